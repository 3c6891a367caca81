from __future__ import annotations

import itertools

import pytest

from trainer.base.errors import RecipeError
from trainer.recipe.plan import Layout, RunPlan, plan_run
from trainer.recipe.reading.loading import load_recipe


@pytest.mark.parametrize(
    ("ranks", "micro", "expected"),
    [
        (1, 8, (8, 4)),
        (4, 8, (8, 1)),
        (2, 100, (16, 1)),  # at most the rows of a rank
        (1, 5, (5, 7)),
        (2, 5, (4, 4)),  # as even as the maximum allows
    ],
)
def test_the_batch_follows_from_ranks_and_microbatch(ranks: int, micro: int, expected: tuple[int, int]) -> None:
    recipe = load_recipe("bert_base_mrpc", [f"training.micro_batch_size={micro}"]).recipe
    batch = plan_run(recipe, ranks).batch
    assert (batch.micro_batch_size, batch.num_microbatches) == expected
    assert batch.micro_batch_size <= micro
    assert batch.rank_batch_size * ranks == 32
    assert batch.num_microbatches * batch.micro_batch_size >= batch.rank_batch_size


def test_a_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    recipe = load_recipe("bert_base_mrpc").recipe
    with pytest.raises(RecipeError) as caught:
        plan_run(recipe, 5)
    assert str(caught.value) == (
        "`training.global_batch_size` must be divisible by the data-parallel size 5, but is 32; use 30 or 35,"
        " or a number of processes that divides 32"
    )
    with pytest.raises(RecipeError, match="use 64, or"):
        plan_run(recipe, 64)


def test_steps_count_the_ragged_last_batch() -> None:
    plan = plan_run(load_recipe("bert_base_mrpc").recipe, 1)
    assert (plan.steps_per_epoch(64), plan.steps_per_epoch(65)) == (2, 3)
    assert plan.total_steps(65) == 9
    assert plan_run(load_recipe("bert_base_mrpc", ["training.max_steps=4"]).recipe, 1).total_steps(65) == 4


def test_plans_read_as_sentences() -> None:
    plan = plan_run(load_recipe("bert_base_mrpc").recipe, 4)
    assert str(plan.batch) == "32 rows a step = 4 data-parallel ranks x 1 microbatch of at most 8 rows"
    assert str(Layout()) == "one process"
    assert str(Layout(dp_replicate=2, tp=4)) == "dp_replicate 2 x tp 4"
    assert str(Layout(dp_shard=2, cp=2, tp=4)) == "dp_shard 2 x cp 2 x tp 4"
    assert Layout(dp_replicate=2, dp_shard=3, tp=4, pp=5).world_size == 120


@pytest.mark.parametrize(
    ("keys", "world_size", "local", "expected"),
    [
        (["strategy=ddp"], 4, 4, Layout(dp_replicate=4)),
        (["strategy=fsdp"], 4, 2, Layout(dp_shard=4)),
        (["strategy=zero2"], 3, 3, Layout(dp_shard=3)),
        (["strategy=hsdp"], 4, 2, Layout(dp_replicate=2, dp_shard=2)),  # auto: the ranks of a node
        (["strategy=hsdp"], 4, 4, Layout(dp_shard=4)),
        (["strategy=hsdp", "shard=4"], 8, 2, Layout(dp_replicate=2, dp_shard=4)),
        (["strategy=hsdp", "shard=1"], 2, 2, Layout(dp_replicate=2)),
        (["strategy=dp"], 1, 1, Layout()),
    ],
)
def test_the_layout_follows_from_strategy_and_ranks(keys, world_size, local, expected) -> None:
    overrides = [f"parallel.{key}" for key in keys] + ["training.global_batch_size=24"]
    plan = plan_run(load_recipe("bert_base_mrpc", overrides).recipe, world_size, local)
    assert plan.layout == expected
    assert plan.batch.data_parallel_size == world_size


def test_a_shard_group_that_does_not_divide_lists_the_divisors() -> None:
    recipe = load_recipe("bert_base_mrpc", ["parallel.strategy=hsdp", "parallel.shard=3"]).recipe
    with pytest.raises(RecipeError) as caught:
        plan_run(recipe, 4)
    assert str(caught.value) == "`parallel.shard` must divide the 4 processes, but is 3; use one of 1, 2, 4"


@pytest.mark.parametrize(
    ("keys", "local", "why"), [([], 1, "one rank"), (["parallel.tensor=2"], 2, "one group of tensor and context ranks")]
)
def test_nodes_with_nothing_to_shard_over(keys, local, why) -> None:
    recipe = load_recipe("bert_base_mrpc", ["parallel.strategy=hsdp", *keys]).recipe
    with pytest.raises(RecipeError, match=f"`parallel.shard` auto .* each node has only {why}.* use fsdp or ddp"):
        plan_run(recipe, 4, local)
    assert plan_run(recipe, 4).layout.dp_shard > 1, "on one node there is"


def pipeline_plan(ranks: int, *keys: str, batch: int = 48, micro: int = 24) -> RunPlan:
    overrides = [f"training.global_batch_size={batch}", f"training.micro_batch_size={micro}"]
    return plan_run(load_recipe("bert_sample", [*overrides, *(f"parallel.{key}" for key in keys)]).recipe, ranks)


class TestPipeline:
    @pytest.mark.parametrize(
        ("ranks", "keys", "micro", "expected"),  # passes, microbatches of a pass, rows of each
        [
            (2, [], 24, (1, 4, 12)),  # two per stage
            (4, [], 2, (1, 12, 2)),  # as the micro batch size requires
            (2, ["pipeline.microbatches=2"], 24, (1, 2, 24)),
            (2, ["pipeline.microbatches=2"], 8, (3, 2, 8)),
            (2, ["pipeline.schedule=gpipe", "pipeline.microbatches=1"], 24, (2, 1, 24)),
            (2, ["pipeline.schedule=interleaved_1f1b"], 24, (1, 8, 6)),
        ],
    )
    def test_the_rows_of_a_step_are_cut_into_passes(self, ranks, keys, micro, expected):
        plan = pipeline_plan(ranks, "pipeline.stages=2", *keys, micro=micro)
        batch = plan.batch
        assert (batch.num_passes, batch.microbatches_per_pass, batch.micro_batch_size) == expected
        assert batch.num_microbatches * batch.micro_batch_size >= batch.rank_batch_size
        assert batch.equal_widths

    def test_stages_lie_round_the_ranks(self):
        pipeline = pipeline_plan(2, "pipeline.stages=2", "pipeline.schedule=interleaved_1f1b").pipeline
        assert pipeline is not None
        assert pipeline.num_stages == 4
        assert [pipeline.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
        assert [pipeline.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]

    @pytest.mark.parametrize(
        ("schedule", "bubble"),
        [("gpipe", 1 / 9), ("1f1b", 1 / 9), ("interleaved_1f1b", 1 / 17), ("zero_bubble", 1 / 49)],
    )
    def test_the_bubble_is_that_of_the_papers(self, schedule, bubble):
        plan = pipeline_plan(2, "pipeline.stages=2", f"pipeline.schedule={schedule}", "pipeline.microbatches=8")
        assert plan.pipeline is not None
        assert plan.pipeline.bubble == pytest.approx(bubble)

    def test_one_microbatch_is_one_stage_at_a_time(self):
        plan = pipeline_plan(4, "pipeline.stages=4", "pipeline.schedule=gpipe", "pipeline.microbatches=1", micro=48)
        assert plan.pipeline is not None
        assert plan.pipeline.bubble == pytest.approx(3 / 4)

    def test_every_count_that_a_message_names_fits(self):
        """A count that the plan chooses fits too, if any count fits."""
        for stages, per_rank, count in itertools.product((2, 4), (2, 3), (None, *range(1, 8), 47, 49)):
            keys = [f"pipeline.stages={stages}", f"pipeline.stages_per_rank={per_rank}"]
            keys += ["pipeline.schedule=interleaved_1f1b"]
            try:
                pipeline_plan(stages, *keys, *([f"pipeline.microbatches={count}"] if count else []))
            except RecipeError as error:
                assert count is not None
                remedy = str(error).rpartition("use ")[2].split(" or ")
                for named in remedy:
                    pipeline_plan(stages, *keys, f"pipeline.microbatches={int(named)}")

    def test_no_count_fits(self):
        with pytest.raises(RecipeError, match=r"at least the 64 stages.*at most the 48 rows.*; use gpipe, more rows"):
            pipeline_plan(64, "pipeline.stages=64")

    @pytest.mark.parametrize(
        ("ranks", "keys", "words"),
        [
            (
                3,
                ["pipeline.stages=2"],
                "stages` must divide the 3 processes, but is 2; use 2 processes",
            ),
            (
                6,
                ["pipeline.stages=2", "tensor=2"],
                "stages` times `parallel.tensor` 2 must divide the 6 processes, but is 2; use 4 processes",
            ),
            (
                6,
                ["tensor=2", "context=2"],
                "tensor` times `parallel.context` 2 must divide the 6 processes, but is 2; use 4 processes",
            ),
            (
                4,
                ["tensor=2", "context=3"],
                "use 6 processes or a multiple of it, or smaller degrees",
            ),
            (
                2,
                ["pipeline.stages=2", "pipeline.microbatches=1"],
                "at least the 2 stages for the schedule 1f1b, but is 1",
            ),
            (
                2,
                ["pipeline.stages=2", "pipeline.schedule=interleaved_1f1b", "pipeline.microbatches=5"],
                "multiple of the 2 ranks of the pipeline for the schedule interleaved_1f1b, but is 5; use 4 or 6",
            ),
            (
                2,
                [
                    *("pipeline.stages=2", "pipeline.stages_per_rank=3"),
                    *("pipeline.schedule=interleaved_1f1b", "pipeline.microbatches=3"),
                ],
                "must be at least the 6 stages and a multiple of the 2 ranks of the pipeline for the schedule"
                " interleaved_1f1b, but is 3; use 6",
            ),
            (
                2,
                ["pipeline.stages=2", "pipeline.microbatches=49"],
                "must be at most the 48 rows that a rank has in one optimizer step, but is 49; use 48",
            ),
        ],
    )
    def test_unsupported_combinations_are_refused(self, ranks, keys, words):
        with pytest.raises(RecipeError) as caught:
            pipeline_plan(ranks, *keys)
        assert words in str(caught.value)
