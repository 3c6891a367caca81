"""`trainer encode`: trainings from shards beside trainings from texts, resumption, formats and errors."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.helpers.processes import ROOT
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import DataError, ExitCode, TrainerError, UsageError
from trainer.cli.program import answer
from trainer.data.sources import load_splits
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import FileData
from trainer.tools.encode import encoding
from trainer.tools.encode.encoding import EncodeRequest, encode_recipe
from trainer.tools.encode.writers import WRITERS
from trainer.training.run import run

GPT2 = {
    "model_type": "gpt2", "vocab_size": 3000, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16,
    "bos_token_id": 3, "eos_token_id": 3,
}  # fmt: skip
SHORT = {"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 4}


def recipe_of(folder: Path, task: str, **sections: Any) -> Path:
    keys: dict[str, Any] = {"type": task, "text": "text", "metrics": ["accuracy"]}
    if task == "causal_lm":
        sections.setdefault(
            "model", {"config": GPT2, "tokenizer": str(ROOT / "recipes" / "sample" / "decoder_tokenizer")}
        )
        keys["packing"] = sections.pop("packing", "none")
    sections.setdefault("training", SHORT)
    file = write_tiny_run(folder, task=keys, **sections)
    values = json.loads(file.read_text())
    values["data"]["group_by_length"] = False
    file.write_text(json.dumps(values))
    return file


def encoded(recipe: Path, output: Path, *overrides: str, **keys: Any) -> dict[str, Any]:
    return encode_recipe(load_recipe(str(recipe), overrides), EncodeRequest(output, **{"shard_rows": 15, **keys}))


def losses(recipe: Path, folder: Path, *overrides: str) -> list[Any]:
    """Loss and gradient norm of each step, and the metrics of each evaluation."""
    loaded = load_recipe(str(recipe), [f"checkpoint.folder={folder}", *overrides])
    assert run(loaded, LaunchEnvironment("none")) == ExitCode.DONE
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {name: value for name, value in row.items() if re.search("loss|norm|accuracy|tokens$|step", name)}
        for row in rows
    ]
    assert sum("grad_norm" in row for row in kept) == 3, rows[:2]
    return [{name: value for name, value in row.items() if "second" not in name} for row in kept]


@pytest.mark.parametrize(
    ("task", "to", "packing"),
    [
        ("masked_lm", "parquet", None),
        pytest.param("causal_lm", "megatron", "documents", marks=pytest.mark.slow),
        pytest.param("masked_lm", "arrow", None, marks=pytest.mark.slow),
        pytest.param("masked_lm", "megatron", None, marks=pytest.mark.nightly),
        pytest.param("causal_lm", "parquet", "none", marks=pytest.mark.nightly),
        pytest.param("causal_lm", "parquet", "joined", marks=pytest.mark.nightly),
    ],
)
def test_a_training_from_shards_has_the_losses_of_one_from_texts(tmp_path, task, to, packing):
    recipe = recipe_of(tmp_path, task, **({"packing": packing} if packing else {}))
    found = encoded(recipe, tmp_path / "out", to=to)
    assert found["rows"] == 57
    assert len([name for name in found["files"] if name.startswith("train")]) == 3 * (1 + (to == "megatron"))
    ours = losses(tmp_path / "out" / "recipe.json", tmp_path / "of-shards")
    assert ours == losses(recipe, tmp_path / "of-texts")


@pytest.mark.slow
def test_a_held_out_share_is_written_as_it_is_drawn(tmp_path):
    recipe = recipe_of(tmp_path, "masked_lm", data={"validation": 0.25})
    encoded(recipe, tmp_path / "out")
    ours = losses(tmp_path / "out" / "recipe.json", tmp_path / "of-shards")
    assert ours == losses(recipe, tmp_path / "of-texts")


@pytest.mark.slow
def test_whole_texts_serve_each_length(tmp_path):
    recipe = recipe_of(tmp_path, "causal_lm")
    encoded(recipe, tmp_path / "out", "data.max_length=4")
    ours = losses(tmp_path / "out" / "recipe.json", tmp_path / "of-shards", "data.max_length=16")
    assert ours == losses(recipe, tmp_path / "of-texts")


def test_processes_write_the_same_and_a_second_call_goes_on(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, "masked_lm")
    whole = encoded(recipe, tmp_path / "whole")
    calls = 0
    first_call = encoding._Encoder.__call__

    def killed(self: Any, shard: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            (self.folder / ".unfinished-train-00-00002.parquet").write_bytes(b"half")
            raise KeyboardInterrupt
        return first_call(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(encoding._Encoder, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            encoded(recipe, tmp_path / "out", num_processes=1)
    assert not (tmp_path / "out" / "encoded.json").exists()
    damaged = tmp_path / "out" / "train-00-00001.parquet"
    kept = (tmp_path / "out" / "train-00-00000.parquet").stat().st_ino
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    again = encoded(recipe, tmp_path / "out", num_processes=2)
    assert again["done_before"] == 1
    assert (tmp_path / "out" / "train-00-00000.parquet").stat().st_ino == kept
    assert (again["sha256"], again["files"]) == (whole["sha256"], whole["files"])
    for name in whole["files"]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_files_are_those_of_the_tokenizer(tmp_path):
    recipe = recipe_of(tmp_path, "causal_lm")
    for to in ("parquet", "arrow", "megatron"):
        found = encoded(recipe, tmp_path / to, to=to)
    texts = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(recipe)
    expected = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    table = pyarrow.parquet.read_table(sorted((tmp_path / "parquet").glob("train-*.parquet")))
    assert table["input_ids"].to_pylist() == expected
    # The reader is tested with files of Megatron's own writer.
    for to, names in (("arrow", "train-*.arrow"), ("megatron", "train-*.idx")):
        data = FileData(source="files", train=str(tmp_path / to / names))
        assert load_splits(data).train.rows["input_ids"][:] == expected
    size = (tmp_path / "megatron" / "train-00-00000.bin").stat().st_size
    assert size == 2 * sum(map(len, expected[:15])), "a small vocabulary takes two bytes"
    validation = sum(map(len, found_rows(tmp_path / "parquet", "validation")))
    assert found["tokens"] == sum(map(len, expected)) + validation
    facts = json.loads((tmp_path / "megatron" / "encoded.json").read_text())
    assert facts["made_by"]["task"]["text"] == "text"


def found_rows(folder: Path, split: str) -> list[list[int]]:
    return pyarrow.parquet.read_table(sorted(folder.glob(f"{split}-*.parquet")))["input_ids"].to_pylist()


def load_tokenizer(recipe: Path) -> Any:
    from trainer.training.row_encoding import tokenizer_of

    return tokenizer_of(load_recipe(str(recipe)).recipe)


def test_a_stream_and_a_mixture_are_written_source_by_source(tmp_path):
    recipe = recipe_of(tmp_path, "masked_lm")
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:22]))
    (tmp_path / "b.jsonl").write_text("".join(lines[22:]))
    whole = encoded(recipe, tmp_path / "whole")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    names = [f"data.train={json.dumps(files)}", "data.mixture=[1, 2]"]
    for name, further in (("files", []), ("stream", ["data.streaming=true"])):
        found = encoded(recipe, tmp_path / name, *names, *further)
        assert found["tokens"] == whole["tokens"]
        assert [path.name for path in sorted((tmp_path / name).glob("train-*.parquet"))] == [
            "train-00-00000.parquet", "train-00-00001.parquet", "train-01-00000.parquet", "train-01-00001.parquet"
        ]  # fmt: skip
        assert found_rows(tmp_path / name, "train") == found_rows(tmp_path / "whole", "train")
        values = json.loads((tmp_path / name / "recipe.json").read_text())
        assert len(values["data"]["train"]) == 2
        losses(tmp_path / name / "recipe.json", tmp_path / f"run-{name}")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.max_length=12"], "`data.max_length` must be 16, as in .*out of `data.train`, but is 12; encode"),
        (
            ['model.new_tokens=["word7x"]', "model.config.vocab_size=200"],
            "which the tokenizer `.*tokenizer` with",
        ),
    ],
)
def test_shards_of_another_recipe_are_refused(tmp_path, overrides, problem):
    encoded(recipe_of(tmp_path, "masked_lm"), tmp_path / "out")
    with pytest.raises(TrainerError, match=problem):
        losses(tmp_path / "out" / "recipe.json", tmp_path / "run", *overrides)


def test_shards_with_other_sizes_are_refused(tmp_path):
    encoded(recipe_of(tmp_path, "masked_lm"), tmp_path / "out")
    path = tmp_path / "out" / "train-00-00002.parquet"
    path.unlink()
    with pytest.raises(DataError, match=r"train-00-00002.parquet must have .* bytes, but does not exist; copy"):
        losses(tmp_path / "out" / "recipe.json", tmp_path / "run")
    (tmp_path / "out" / "encoded.json").write_text("{}")
    with pytest.raises(DataError, match="must be that of `trainer encode`, but is not"):
        losses(tmp_path / "out" / "recipe.json", tmp_path / "run")


def test_errors(tmp_path):
    recipe = recipe_of(tmp_path, "masked_lm")
    encoded(recipe, tmp_path / "out")
    for keys, problem in (
        ({"to": "megatron"}, "begun with other `--to`; name another folder"),
        ({"shard_rows": 14}, "begun with other texts or `--shard-rows`"),
    ):
        with pytest.raises(UsageError, match=problem):
            encoded(recipe, tmp_path / "out", **keys)
    with pytest.raises(UsageError, match="begun with other tokenizer, task or length"):
        encoded(recipe, tmp_path / "out", "data.max_length=8")
    with pytest.raises(UsageError, match="`OUT` must be a new folder, or one that `trainer encode` began"):
        encoded(recipe, tmp_path / "tokenizer")
    with pytest.raises(UsageError, match=r"`task.text` must name a column of texts, but column `input_ids` holds"):
        encoded(tmp_path / "out" / "recipe.json", tmp_path / "other")
    labelled = write_tiny_run(tmp_path / "labelled")
    with pytest.raises(UsageError, match=r"`task.type` must read token ids of one column of texts, but is sequence"):
        encoded(labelled, tmp_path / "other")
    for text in ("[]", "{"):
        (tmp_path / "out" / "plan.json").write_text(text)
        with pytest.raises(UsageError, match="begun with other tokenizer, task or length"):
            encoded(recipe, tmp_path / "out")
    blank = recipe_of(tmp_path / "blank", "causal_lm")
    (tmp_path / "blank" / "train.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(DataError, match=r"train.jsonl. must hold a text with a token, but column `text` has none"):
        encoded(blank, tmp_path / "none")
    (tmp_path / "train.jsonl").write_text('{"text": null}\n{"text": "word1"}\n')
    with pytest.raises(DataError, match=r"column `text`, row 1 of .*train.jsonl. is null"):
        encoded(recipe, tmp_path / "other")


@pytest.mark.parametrize("to", WRITERS)
def test_a_full_disk_keeps_no_part_of_a_shard(tmp_path, monkeypatch, to):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WRITERS[to], "close", full)
    with pytest.raises(TrainerError, match=r"`OUT` .* cannot be written: No space left on device; make room"):
        encoded(recipe_of(tmp_path, "masked_lm"), tmp_path / "out", to=to, num_processes=1)
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"plan.json", ".lock"}


def test_the_verb_shows_figures_and_the_next_command(tmp_path, capsys):
    recipe = recipe_of(tmp_path, "masked_lm")
    for _ in range(2):
        assert answer(["encode", str(recipe), str(tmp_path / "out"), "--processes", "1", "--shard-rows", "20"]) == 0
    first, second = capsys.readouterr().out.split("encoded   ")[1:]
    assert first.startswith("57 rows, ")
    assert f"next      trainer run {tmp_path / 'out' / 'recipe.json'}" in first
    assert "resumed   3 shards were there, and were verified" in second
    shutil.rmtree(tmp_path / "out")
