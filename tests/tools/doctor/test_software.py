from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.tools.doctor.machines import answers, machine, without_torch
from trainer import __version__
from trainer.base import distribution
from trainer.tools.doctor import software
from trainer.tools.doctor.facts import DeepSpeedFacts
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError

REQUIRES = [
    "torch>=2.10",
    "rich<16,>=14",
    'tomli>=2; python_version < "3"',
    'deepspeed>=0.19.8,<0.20; extra == "deepspeed"',
    'ninja; extra == "deepspeed"',
    'tensorboard>=2.18; extra == "tensorboard"',
    'pytest>=8; extra == "dev"',
]
GOOD = {"recipe-trainer": __version__, "torch": "2.13.0+cpu", "rich": "15.0.0"}
DEEPSPEED = {"deepspeed": "0.19.8", "ninja": "1.13.2"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages; a test may change them."""
    packages = dict(GOOD)

    class Metadata:
        def get_all(self, name: str) -> list[str]:
            assert name == "Provides-Extra"
            return ["deepspeed", "tensorboard", "dev"]

    def found(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    for module in (software, distribution):
        monkeypatch.setattr(module, "version", found)
    monkeypatch.setattr(software, "requires", lambda name: [REQUIRES, found(name)][0])
    monkeypatch.setattr(software, "metadata", lambda name: [Metadata(), found(name)][0])
    return packages


def test_python_and_the_container(tmp_path):
    status, value = answers(software.python, machine(tmp_path, files={"/.dockerenv": ""}))
    assert status == "ok"
    assert value.endswith(", Docker container")


def test_trainer_is_the_one_that_is_installed(installed):
    assert answers(software.trainer_itself, machine())[0] == "ok"
    installed["recipe-trainer"] = "0.0.9"
    assert answers(software.trainer_itself, machine())[1].endswith(", but 0.0.9 is installed")
    del installed["recipe-trainer"]
    assert answers(software.trainer_itself, machine())[0] == "warning"


@pytest.mark.parametrize(
    ("changes", "status", "value"),
    [
        ({}, "ok", "torch 2.13.0+cpu, rich 15.0.0"),
        ({"torch": "2.10.0a0+1234.nv"}, "ok", "torch 2.10.0a0+1234.nv, rich 15.0.0"),  # a vendor's build
        ({"torch": "2.9.1"}, "problem", "torch 2.9.1 is not >=2.10"),
        ({"rich": "16.0.0", "torch": None}, "problem", "torch is not installed, rich 16.0.0 is not <16,>=14"),
    ],
)
def test_dependencies_are_held_to_their_ranges(installed, changes: dict[str, str | None], status: str, value: str):
    installed |= changes
    for name in [name for name, version in installed.items() if version is None]:
        del installed[name]
    assert answers(software.dependencies, machine()) == (status, value)


def test_the_remedy_names_what_to_install(installed):
    installed["rich"] = "13.0.0"
    assert software.dependencies(machine()).remedy == 'pip install "rich<16,>=14"'


@pytest.mark.parametrize(
    ("changes", "keys", "status", "value"),
    [
        ({}, None, "ok", "not installed: deepspeed, tensorboard"),
        (DEEPSPEED, None, "ok", "deepspeed 0.19.8, ninja 1.13.2; not installed: tensorboard"),
        (DEEPSPEED | {"deepspeed": "0.18.0"}, None, "warning", "deepspeed 0.18.0 is not <0.20,>=0.19.8"),
        (
            {"tensorboard": "2.18.0"},
            ("parallel.strategy=zero2", "logging.to=[]"),
            "problem",
            "deepspeed is not installed, ninja is not installed; the recipe needs it",
        ),
        ({}, ('logging.to=["tensorboard"]',), "problem", "tensorboard is not installed; the recipe needs it"),
        ({}, ("logging.to=[]",), "ok", "not installed: deepspeed, tensorboard"),
    ],
)
def test_extras(installed, changes: dict[str, str], keys: tuple[str, ...] | None, status: str, value: str):
    installed |= changes
    at = machine() if keys is None else machine(recipe="bert_sample", overrides=keys)
    assert answers(software.extras, at) == (status, value)


def test_without_metadata_no_ranges_are_known(installed):
    del installed["recipe-trainer"]
    assert answers(software.dependencies, machine())[0] == "ok"
    assert answers(software.extras, machine()) == ("ok", "none")


class TestDeepSpeed:
    @pytest.fixture(autouse=True)
    def package(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
        """Whether the package is installed; a test may change it."""
        package = {"is installed": True}
        monkeypatch.setattr(software, "installed", lambda name: "0.19.8" if package["is installed"] else None)
        return package

    def with_zero(self, *facts: object) -> Machine:
        return machine(Path("/nowhere"), *facts, recipe="bert_sample", overrides=("parallel.strategy=zero2",))

    def test_an_import_that_works(self):
        assert answers(software.deepspeed, machine()) == ("ok", "0.19.8")

    def test_without_the_package_only_a_recipe_that_needs_it_has_a_problem(self, package):
        package["is installed"] = False
        assert answers(software.deepspeed, machine())[0] == "ok"
        assert answers(software.deepspeed, self.with_zero())[0] == "problem"

    def test_an_import_that_fails(self):
        broken = ProbeError("ImportError: no CUDA_HOME", DeepSpeedFacts)
        value = "cannot be imported: ImportError: no CUDA_HOME"
        assert answers(software.deepspeed, machine(Path(), broken)) == ("warning", value)
        assert answers(software.deepspeed, self.with_zero(broken)) == ("problem", value)
        with pytest.raises(ProbeError, match="no torch"):  # which is the business of another line
            software.deepspeed(without_torch())
