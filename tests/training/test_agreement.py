"""Facts that must be the same on every rank, and what is said where they are not."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe
from trainer.base.errors import UsageError
from trainer.recipe.plan import plan_run
from trainer.training.agreement import require_agreement, run_facts


def test_facts_of_a_run():
    recipe = tiny_recipe()
    facts = run_facts({"training.seed": 42}, plan_run(recipe, 1), "cpu")
    assert facts["`training.seed`"] == "42"
    assert facts["torch"].startswith("2.")
    assert len(facts["trainer's source"]) == 12
    assert "deepspeed" not in facts


def all_gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Meeting:
    """A rendezvous over a process group."""

    def all_same(self, text: str, timeout_seconds: float) -> bool:
        return len(set(all_gathered(text))) == 1

    def share(self, value: Any, timeout_seconds: float) -> Any:
        return all_gathered(value)[0]

    def gather(self, value: Any, timeout_seconds: float) -> list[Any] | None:
        values = all_gathered(value)
        return None if dist.get_rank() else values


def disagree() -> list[str]:
    """What each of three sets of facts is answered with."""
    rank, answers = dist.get_rank(), []
    for facts in (
        {"torch": "2.10"},
        {"torch": "2.9" if rank == 1 else "2.10", "python": "3.12"},
        {"deepspeed": "0.19"} if rank == 0 else {},
    ):
        try:
            require_agreement(facts, Meeting(), 20)
            answers.append("agreed")
        except UsageError as error:
            answers.append(str(error))
    return answers


def test_all_ranks_name_the_differing_ranks(ranks: RankPools):
    first, *others = ranks(3).run(disagree)
    assert all(other == first for other in others)
    agreed, versions, missing = first
    assert agreed == "agreed"
    assert "torch is 2.10 on ranks 0, 2 (" in versions
    assert "), 2.9 on rank 1 (" in versions
    assert "python" not in versions
    assert "deepspeed is 0.19 on rank 0 (" in missing
    assert "missing on ranks 1, 2 (" in missing
