"""Plans of experts against measured steps: bytes alive, and the collectives of real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.families import EXPERTS
from tests.helpers.ranks import RankPools
from tests.tools.plan.measured import LENGTH, measure, planned, recipe_of
from tests.tools.plan.test_truth import MOST_OF_RANKS
from trainer.base.errors import UsageError
from trainer.models.configuration import number_of_experts
from trainer.parallel.placement import EXPERT_AXIS
from trainer.recipe.plan import Layout, plan_run
from trainer.tools.compare.contestants import contestants
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.ledger import OPTIMIZER, PARAMETERS
from trainer.tools.plan.recipe_plan import traffic_by_axis
from trainer.tools.plan.searching import LayoutSearch, expert_degree
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.timing import Link, link_of
from trainer.tools.search.space import read_space


def keys_of(parallel: dict[str, Any], chosen: int = 4, layers: int = 2) -> dict[str, Any]:
    """Return a recipe of four experts; where each token chooses all four, real ranks exchange what a plan assumes."""
    config = {"model_type": "qwen3_moe", **EXPERTS["qwen3_moe"], "num_experts_per_tok": chosen}
    model = {"config": config | {"num_hidden_layers": layers}, "tokenizer": "none"}
    return {"parallel": parallel, "model": model, "task": {"type": "causal_lm", "text": "text"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (2, {"strategy": "ddp", "expert": 2}),
        (2, {"strategy": "fsdp", "expert": 2}),
        (4, {"strategy": "fsdp", "expert": 2}),
        (4, {"strategy": "hsdp", "shard": 2, "expert": 2}),
    ],
)
def test_peak_and_collectives_of_each_rank(ranks: RankPools, size: int, parallel: dict[str, Any]):
    keys = keys_of(parallel)
    plan = planned(keys, size, 0)
    calls, _ = plan.traffic["alltoall_base", EXPERT_AXIS]
    # Two layers of 2 microbatches on 4 ranks: counts and rows there and back, and rows back and there again.
    assert calls == 2 * (16 // size // 4) * 5
    for found in ranks(size).run(measure, keys):
        assert plan.traffic == found.traffic
        assert plan.alive == pytest.approx(found.alive, rel=MOST_OF_RANKS)


def test_ranks_of_experts_divide_them_and_exchange_the_chosen_rows():
    keys = [keys_of({"strategy": "ddp", "expert": number}, 2) for number in (1, 2)]
    whole, divided = (plan_step(plan_run(recipe_of(one), 2), 0, LENGTH, cuda=False) for one in keys)
    num_bytes = 2 * 4 * 4 * (2 * 24 * 32 + 24 * 32)  # of the experts of two layers
    assert whole.resident[PARAMETERS] - divided.resident[PARAMETERS] == num_bytes / 2
    assert whole.resident[OPTIMIZER] - divided.resident[OPTIMIZER] == 2 * num_bytes / 2
    assert ("alltoall_base", EXPERT_AXIS) not in traffic_by_axis(whole)
    # Two microbatches of 4 texts of 24 tokens with 2 choices, four times in each of two layers, and the counts.
    assert traffic_by_axis(divided)["alltoall_base", EXPERT_AXIS] == (20, 2 * 2 * (4 * 4 * 24 * 2 * 32 * 4 + 4 * 8))


def test_fsdp_counts_experts_of_one_rank_as_its_other_shards():
    keys = [keys_of({"strategy": "fsdp", "expert": number}) for number in (1, 2)]
    sharded, divided = (plan_step(plan_run(recipe_of(one), 2), 0, LENGTH, cuda=False) for one in keys)
    assert divided.gradients == sharded.gradients
    # Where rows do not divide, shards are padded.
    assert divided.loaded == sharded.loaded == pytest.approx(divided.resident[PARAMETERS], rel=0.01)


def test_a_deep_stack_of_sharded_experts_is_shortened():
    deep, shallow = (planned(keys_of({"strategy": "fsdp", "expert": 2}, 2, n), 4, 0).traffic for n in (8, 6))
    axis = "alltoall_base", EXPERT_AXIS
    assert deep[axis].calls * 6 == shallow[axis].calls * 8


def test_links_of_joint_axes():
    layout = Layout(dp_replicate=1, dp_shard=2, ep=8)
    assert link_of(layout, EXPERT_AXIS, 8) == Link(8, 8, 8)
    assert link_of(layout, "dp_shard", 8) == Link(2, 1, 8)
    assert link_of(layout, "dp_shard_ep", 8) == Link(16, 8, 8)


def test_a_search_divides_the_experts(tmp_path: Path):
    keys = keys_of({"strategy": "ddp"})
    model = {**keys["model"], "config": {**keys["model"]["config"], "num_experts": 12}}
    recipe = tmp_path / "recipe.json"
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 8)
    data = {"train": str(tmp_path / "rows.jsonl"), "max_length": 16}
    training = {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 1}
    recipe.write_text(
        json.dumps({"name": "tiny", "task": keys["task"], "model": model, "data": data, "training": training})
    )
    found = set(LayoutSearch(str(recipe), [], parse_devices("8xA100-80"))._layouts())
    assert ("parallel.strategy=fsdp", "parallel.expert=4") in found
    assert ("parallel.strategy=fsdp", "parallel.tensor=4", "parallel.expert=2") in found
    assert not any("parallel.expert=8" in one for one in found)
    given = LayoutSearch(str(recipe), ["parallel.expert=2"], parse_devices("8xA100-80"))
    assert not any("parallel.expert" in word for one in given._layouts() for word in one)
    compared = [one.name for one in contestants(str(recipe), [], None, 2, 0)[1]]
    assert "expert=2" in compared


@pytest.mark.parametrize(("processes", "is_tried"), [(2, True), (3, False)])
def test_a_comparison_divides_the_experts_of_a_model_by_name(processes: int, is_tried: bool):
    overrides = ["model.name_or_path=Qwen/Qwen3-30B-A3B", "model.config=null"]
    compared = [one.name for one in contestants("experts_sample", overrides, None, processes, 0)[1]]
    assert ("expert=2" in compared) == is_tried


def test_a_search_of_keys_refuses_the_axis_which_changes_no_result():
    with pytest.raises(UsageError, match=r"`parallel\.expert` changes how a recipe trains .* `trainer plan --search`"):
        read_space("experts_sample", ["parallel.expert=1,2"])


def test_the_largest_degree_of_both():
    assert [expert_degree(*pair) for pair in ((128, 8), (6, 8), (6, 3), (0, 8))] == [8, 2, None, None]
    assert number_of_experts(SimpleNamespace(n_routed_experts=64, num_experts=None)) == 64
