"""The verb `rehearse` against real ranks, the loader's order, and files of weights on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_DECODERS, TINY_TASKS
from tests.tools.plan.measured import LENGTH, recipe_of
from trainer.checkpoint.format import snapshot
from trainer.cli import main
from trainer.data.order import GlobalOrder
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.plan.plan_text import text_of
from trainer.tools.plan.reference import engine_and_batch
from trainer.tools.plan.rehearsal import Rehearsal, rehearse

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "ddp", "tensor": 2},
    "pipeline": {"strategy": "ddp", "pipeline": {"stages": 2}},
}


def written(keys: Mapping[str, Any], folder: Path) -> str:
    file, data = folder / "recipe.json", folder / "rows.csv"
    data.write_text("text,label\ngood,1\n")
    sections = {**keys, "data": {"train": str(data), "max_length": LENGTH, **keys.get("data", {})}}
    file.write_text(recipe_of(sections).model_dump_json(exclude_defaults=True))
    return str(file)


def rehearsed(keys: Mapping[str, Any], folder: Path, ranks: int, rank: int, rows: int | None = None) -> Rehearsal:
    return rehearse(load_recipe(written(keys, folder)), ranks, rank, rows=rows)


def saved(keys: Mapping[str, Any]) -> tuple[int, int]:
    """Take a step on this rank, and return the bytes and the number of the tensors that it saves."""
    engine, batch = engine_and_batch(plan_run(recipe_of(keys), dist.get_world_size()), LENGTH, 2)
    engine.train_step(batch)
    tensors = snapshot(engine.state().parts)
    return sum(tensor.nbytes for tensor in tensors.values()), len(tensors)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(keys, id=name, marks=pytest.mark.slow if name in ("fsdp", "pipeline") else pytest.mark.nightly)
        for name, keys in LAYOUTS.items()
    ],
)
def test_a_checkpoint_has_the_tensors_of_real_ranks(ranks: RankPools, tmp_path: Path, parallel: dict[str, Any]):
    keys = {"parallel": parallel}
    for rank, real in enumerate(ranks(2).run(saved, keys)):
        state = rehearsed(keys, tmp_path, 2, rank).state
        assert (state.written, state.tensors) == real


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", pytest.param("pipeline", marks=pytest.mark.nightly)])
def test_ranks_read_each_byte_of_the_weights_once(tmp_path: Path, name: str):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    files = sorted((tmp_path / "llama").glob("*.safetensors"))
    assert len(files) > 2
    keys = {
        "task": TINY_TASKS["causal_lm"].keys,
        "model": {"config": None, "name_or_path": str(tmp_path / "llama"), "tokenizer": "none"},
        "parallel": LAYOUTS[name],
    }
    read = [rehearsed(keys, tmp_path, 2, rank).weights_read for rank in range(2)]
    for file in files:
        with safe_open(file, framework="pt") as opened:
            whole = sum(opened.get_tensor(key).nbytes for key in opened.keys())  # noqa: SIM118
        assert sum((one or {}).get(file.name, 0) for one in read) == whole
    assert all(one and sum(one.values()) for one in read)
    keys["parallel"] = {**LAYOUTS[name], "load": "broadcast"}
    first, second = (rehearsed(keys, tmp_path, 2, rank) for rank in range(2))
    assert sum((first.weights_read or {}).values()) == sum(sum((one or {}).values()) for one in read)
    assert second.weights_read == {}
    assert "from the first rank of its machine" in text_of("rehearsal", found=second)


@pytest.mark.slow
def test_data_ranks_share_the_rows_of_the_loader(tmp_path: Path):
    training = {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 1}
    keys = {"data": {"group_by_length": False}, "training": training}
    found = [rehearsed(keys, tmp_path, 2, rank, rows=50) for rank in range(2)]
    rows: dict[int, int] = {}
    for one in found:
        assert one.microbatches is not None
        assert one.rows is not None
        assert [len(chunk) for chunk in one.rows] == [2, 2]
        rows |= dict(zip(chain(*one.microbatches), chain(*one.rows), strict=True))
    seed = found[0].plan.recipe.training.seed
    assert [rows[place] for place in range(8)] == GlobalOrder(50, None, 8, seed).batch(0, 0).tolist()


@pytest.mark.slow
def test_the_ranks_write_the_whole_model(tmp_path: Path):
    keys = {"task": TINY_TASKS["causal_lm"].keys, "model": {"config": TINY_DECODERS["llama"], "tokenizer": "none"}}
    first, second = (rehearsed(keys, tmp_path, 2, rank) for rank in range(2))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_DECODERS["llama"]))
    assert sum(first.model_files.values()) == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert not second.model_files


@pytest.mark.slow
def test_a_rank_of_many_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["rehearse", written({}, tmp_path), "--ranks", "64", "--rank", "63", "training.global_batch_size=64"]
    assert main([*words, "parallel.strategy=fsdp", "parallel.tensor=2"]) == 0
    shown = capsys.readouterr().out
    assert "rank      63 of 64: dp_shard 31, tp 1" in shown
    assert "state-00063-of-00064.safetensors" in shown
    assert main([*words, "parallel.pipeline.stages=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["position"] == {"pp": 1, "dp_replicate": 31}
    assert found["checkpoint"]["written"] > 0
    assert found["checkpoints_in_memory"] == 0


@pytest.mark.slow
def test_checkpoints_in_memory_are_shown(tmp_path: Path):
    keys = {"checkpoint": {"memory": {"every": "2 steps"}}}
    one = rehearsed(keys, tmp_path, 2, 0)
    assert one.in_memory == 2 * one.state.written
    more = one.host["checkpoint"] - rehearsed({}, tmp_path, 2, 0).host["checkpoint"]
    assert more == one.in_memory + one.state.written
    several = rehearse(load_recipe(written(keys, tmp_path)), 2, 0, local_ranks=1)
    assert several.in_memory == 4 * several.state.written
    assert "with the copy of a rank of another host" in text_of("rehearsal", found=several)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "8", "--rank", "8"], "`--rank` must be from 0 to 7"),
        (["--ranks", "8", "--rank", "-1"], "`--rank` must be from 0 to 7"),
        (["--ranks", "8", "--local-ranks", "3"], "`--local-ranks` must divide the 8 ranks"),
        (["--ranks", "6", "parallel.tensor=4"], "`parallel.tensor` must divide the 6 processes"),
        (["--ranks", "3", "training.global_batch_size=16"], "must be divisible by the data-parallel size 3"),
    ],
)
def test_a_rank_or_layout_that_cannot_be_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    assert main(["rehearse", written({}, tmp_path), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
