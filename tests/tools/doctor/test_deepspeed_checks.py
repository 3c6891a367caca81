from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.doctor.machines import answers, machine, without_torch
from trainer.tools.doctor import software
from trainer.tools.doctor.facts import DeepSpeedFacts
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the package is installed; a test may change it."""
    package = {"is installed": True}
    monkeypatch.setattr(software, "installed", lambda name: "0.19.8" if package["is installed"] else None)
    return package


def with_zero(*facts: object) -> Machine:
    return machine(Path("/nowhere"), *facts, recipe="bert_sample", overrides=("parallel.strategy=zero2",))


def test_an_import_that_works():
    assert answers(software.deepspeed, machine()) == ("ok", "0.19.8")


def test_without_the_package_only_a_recipe_that_needs_it_has_a_problem(installed):
    installed["is installed"] = False
    assert answers(software.deepspeed, machine())[0] == "ok"
    assert answers(software.deepspeed, with_zero())[0] == "problem"


def test_an_import_that_fails():
    broken = ProbeError("ImportError: no CUDA_HOME", DeepSpeedFacts)
    value = "cannot be imported: ImportError: no CUDA_HOME"
    assert answers(software.deepspeed, machine(Path(), broken)) == ("warning", value)
    assert answers(software.deepspeed, with_zero(broken)) == ("problem", value)
    with pytest.raises(ProbeError, match="no torch"):  # which is the business of another line
        software.deepspeed(without_torch())
