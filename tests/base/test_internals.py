"""Private members of other packages: each is there, and a version without one is refused by name."""

from __future__ import annotations

import re

import pytest

from trainer.base.errors import UsageError
from trainer.base.internals import Internals
from trainer.engine import ddp, fsdp_internals
from trainer.features.deepspeed import internals as deepspeed_internals
from trainer.features.deepspeed.package import import_deepspeed
from trainer.parallel.pipeline import torch_stage
from trainer.tools.plan import simulated_deepspeed

PLANS = {
    owner: [*names]
    for table in (simulated_deepspeed._STATE, simulated_deepspeed._ANSWERS, simulated_deepspeed._CREATORS)
    for owner, names in table.items()
}


class Kept:
    declared: int

    def set(self) -> None:
        self.assigned = [one.inner for one in ()]


def members_of(*names: str) -> Internals:
    return Internals("torch", "2.11 to 2.13", {f"{__name__}:Kept": names})


@pytest.mark.parametrize(
    "internals",
    [
        pytest.param(ddp.INTERNALS, id="ddp"),
        pytest.param(fsdp_internals.INTERNALS, id="fsdp"),
        pytest.param(torch_stage.INTERNALS, id="stages"),
        pytest.param(torch_stage.VOTES, id="votes"),
    ],
)
def test_torch_has_each(internals: Internals):
    assert not internals.lacking()


def test_deepspeed_has_each():
    pytest.importorskip("deepspeed")
    import_deepspeed()
    assert not deepspeed_internals.INTERNALS.lacking()
    assert not Internals("deepspeed", "", PLANS).lacking()


def test_a_class_has_its_attributes_and_those_its_methods_set():
    assert not members_of("declared", "set", "assigned", "inner").lacking()
    assert members_of("declared", "gone").lacking() == [f"{__name__}.Kept.gone"]


def test_of_a_missing_module_are_all_missing():
    assert Internals("torch", "", {"torch.gone:Kept": ["a", "b"]}).lacking() == [
        "torch.gone.Kept.a",
        "torch.gone.Kept.b",
    ]


def test_a_version_without_one_is_refused():
    torch = r"which torch 2\.\S+ lacks; install torch 2\.11 to 2\.13, or use ddp$"
    with pytest.raises(
        UsageError, match=rf"^`parallel.strategy` fsdp needs {re.escape(__name__)}\.Kept\.gone, {torch}"
    ):
        members_of("set", "gone").require("`parallel.strategy` fsdp", "use ddp")
