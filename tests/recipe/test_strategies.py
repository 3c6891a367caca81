"""The table of strategies: consistent rows, and the rules that follow from them."""

from __future__ import annotations

import pytest

from trainer.base.errors import RecipeError
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.strategies import STRATEGIES, Strategy


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=STRATEGIES)
class TestRow:
    def test_cuts_parameters_only_with_gradients_and_gradients_only_with_the_optimizer(self, row: Strategy):
        assert row.cuts_parameters <= row.cuts_gradients <= row.cuts_optimizer
        assert row.cuts_anything == row.cuts_optimizer

    def test_describes_placement_and_communication(self, row: Strategy):
        assert row.summary
        assert "P" in row.communication
        assert STRATEGIES[row.name] is row

    def test_can_do_without_offload(self, row: Strategy):
        assert row.offloads[0] == "none"
        assert ("parameters" in row.offloads) <= row.cuts_parameters

    @pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
    def test_its_offloads_are_taken_and_others_refused_with_the_remedy(self, row: Strategy, offload: str):
        keys = [f"parallel.strategy={row.name}", f"parallel.offload={offload}"]
        if offload in row.offloads:
            assert load_recipe("bert_base_mrpc", keys).recipe.parallel.offload == offload
            return
        with pytest.raises(RecipeError, match=r"`parallel\.offload`") as caught:
            load_recipe("bert_base_mrpc", keys)
        assert f"which `parallel.strategy` {row.name} does not support; use " in str(caught.value)
        able = [name for name, other in STRATEGIES.items() if offload in other.offloads]
        assert all(name in str(caught.value) for name in able)

    @pytest.mark.parametrize("processes", [1, 2, 4])
    def test_its_layout_holds_all_processes(self, row: Strategy, processes: int):
        recipe = load_recipe("bert_base_mrpc", [f"parallel.strategy={row.name}"]).recipe
        if row.single_process and processes > 1:
            with pytest.raises(RecipeError, match="is one process, but there are"):
                plan_run(recipe, processes)
            return
        layout = plan_run(recipe, processes).layout
        assert layout.world_size == processes
        assert layout.dp_shard == (processes if row.cuts_anything else 1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["parallel.strategy=ddp", "parallel.shard=2"],
            "`parallel.shard` applies only to hsdp, but `parallel.strategy` is ddp",
        ),
        (
            ["parallel.strategy=zero3", "parallel.reshard_after_forward=false"],
            "`parallel.reshard_after_forward` applies only to fsdp and hsdp, but `parallel.strategy` is zero3",
        ),
        (
            ["parallel.strategy=fsdp", 'parallel.deepspeed={"steps_per_print": 1}'],
            "`parallel.deepspeed` applies only to zero1, zero2 and zero3, but `parallel.strategy` is fsdp",
        ),
    ],
)
def test_keys_of_another_strategy_are_refused(keys: list[str], words: str):
    with pytest.raises(RecipeError) as caught:
        load_recipe("bert_base_mrpc", keys)
    assert words in str(caught.value)
