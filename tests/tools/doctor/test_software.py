from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from tests.tools.doctor.machines import answers, machine
from trainer import __version__
from trainer.base import distribution
from trainer.tools.doctor import software

REQUIRES = [
    "torch>=2.10",
    "rich<16,>=14",
    'tomli>=2; python_version < "3"',
    'deepspeed>=0.19.8,<0.20; extra == "deepspeed"',
]
GOOD = {"recipe-trainer": __version__, "torch": "2.13.0+cpu", "rich": "15.0.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages; a test may change them."""
    packages = dict(GOOD)

    def found(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    for module in (software, distribution):
        monkeypatch.setattr(module, "version", found)
    monkeypatch.setattr(software, "requires", lambda name: [REQUIRES, found(name)][0])
    return packages


def test_python_and_the_container(tmp_path):
    assert ", Docker container" in answers(software.trainer_itself, machine(tmp_path, files={"/.dockerenv": ""}))[1]


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


def test_the_remedy_names_the_package(installed):
    installed["rich"] = "13.0.0"
    assert software.dependencies(machine()).remedy == 'pip install "rich<16,>=14"'


def test_without_metadata_no_ranges_are_known(installed):
    del installed["recipe-trainer"]
    assert answers(software.dependencies, machine())[0] == "ok"
