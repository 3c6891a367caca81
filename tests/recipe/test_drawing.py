"""The drawing of a layout, compared with independent arithmetic over the ranks."""

from __future__ import annotations

import pytest

from trainer.cli.check import layout_lines, stage_lines
from trainer.recipe.drawing import MAX_LINES, StageContents, layers_text
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import load_recipe


def plan(processes: int, *keys: str) -> RunPlan:
    overrides = [f"parallel.{key}" for key in keys] + ["training.global_batch_size=768"]
    return plan_run(load_recipe("bert_base_mrpc", overrides).recipe, processes)


def table(processes: int, *keys: str) -> list[list[str]]:
    return [line.split() for line in layout_lines(plan(processes, *keys))]


def test_one_process_has_nothing_to_draw():
    assert layout_lines(plan(1)) == []


def test_eight_ranks_have_eight_lines():
    assert layout_lines(plan(8, "pipeline.stages=2", "tensor=2", "strategy=hsdp", "shard=2")) == [
        "rank  stage  shard  tensor",
        "0     0      0      0",
        "1     0      0      1",
        "2     0      1      0",
        "3     0      1      1",
        "4     1      0      0",
        "5     1      0      1",
        "6     1      1      0",
        "7     1      1      1",
    ]


def test_a_rank_may_hold_several_stages():
    assert layout_lines(plan(2, "pipeline.stages=2", "pipeline.schedule=interleaved_1f1b")) == [
        "rank  stages",
        "0     0, 2",
        "1     1, 3",
    ]


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 4, 1, 2), (4, 1, 3, 1), (2, 1, 1, 1)])
def test_each_rank_has_its_coordinates_in_the_mesh(sizes: tuple[int, int, int, int]):
    """The reference is arithmetic: pp outermost, then replicas, shards, and tensor ranks innermost."""
    stages, replicas, shards, tensor = sizes
    world = stages * replicas * shards * tensor
    keys = [f"pipeline.stages={stages}", f"tensor={tensor}", "strategy=hsdp", f"shard={shards}"]
    _, *rows = table(world, *keys)
    assert len(rows) == world
    for rank, row in enumerate(rows):
        places = [
            (rank // (replicas * shards * tensor), stages),
            (rank // (shards * tensor) % replicas, replicas),
            (rank // tensor % shards, shards),
            (rank % tensor, tensor),
        ]
        assert row == [str(rank), *(str(place) for place, size in places if size > 1)]


def test_many_ranks_are_folded():
    assert layout_lines(plan(64, "pipeline.stages=2", "tensor=2", "strategy=hsdp", "shard=8")) == [
        "ranks  stage  replica  shard  tensor",
        "0-15   0      0        0-7    0-1",
        "16-31  0      1        0-7    0-1",
        "32-47  1      0        0-7    0-1",
        "48-63  1      1        0-7    0-1",
        "(consecutive ranks differ in the rightmost column)",
    ]
    assert layout_lines(plan(64)) == ["ranks  replica", "0-63   0-63"]


def test_more_stages_than_lines_are_cut_short():
    lines = layout_lines(plan(64, "pipeline.stages=32"))
    assert len(lines) == MAX_LINES + 1
    assert lines[1] == "0-1    0      0-1"
    assert lines[-2:] == ["...", "62-63  31     0-1"]


STAGES = [StageContents(("layer.0", "layer.1"), 2**18), StageContents(("layer.2",), 2**20)]


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        (["strategy=ddp"], ["1.0 MiB a rank", "4.0 MiB a rank"]),
        (["strategy=fsdp"], ["0.5 MiB a rank", "2.0 MiB a rank"]),
        (["strategy=ddp", "tensor=2"], ["1.0 MiB before tensor sharding", "4.0 MiB before tensor sharding"]),
        (["strategy=fsdp", "expert=2"], ["0.5 MiB a rank", "2.0 MiB a rank"]),
        (["strategy=ddp", "expert=2"], ["1.0 MiB before experts are divided", "4.0 MiB before experts are divided"]),
    ],
)
def test_stages_show_the_bytes_of_a_rank(keys: list[str], sizes: list[str]):
    assert stage_lines(plan(4, "pipeline.stages=2", *keys), STAGES) == [
        f"stage 0  layer.0 to layer.1    262,144 parameters  {sizes[0]}",
        f"stage 1  layer.2             1,048,576 parameters  {sizes[1]}",
    ]


def test_bytes_with_tensor_ranks_are_counted_before_sharding():
    lines = stage_lines(plan(8, "pipeline.stages=2", "tensor=2", "strategy=fsdp"), STAGES)
    assert all(line.endswith(" MiB before tensor and data-parallel sharding") for line in lines)


def test_stages_of_a_model_that_is_not_loaded():
    assert stage_lines(plan(2, "pipeline.stages=2"), None) == [
        "layers are balanced over the stages when the model is loaded"
    ]
    assert stage_lines(plan(2), None) == []


def test_layers_are_named_from_the_first_to_the_last():
    assert layers_text(["a"]) == "a"
    assert layers_text(["a", "b", "c"]) == "a to c"
