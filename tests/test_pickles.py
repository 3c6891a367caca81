"""Nothing that a run reads or receives is unpickled.

A pickle in the place of each file is refused, or made anew, and never run; ranks send each other no pickles.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import BertConfig, BertForSequenceClassification

import trainer
from tests.helpers.hostile import Trap
from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.parallel.mesh import ParallelMesh


def test_the_pickle_would_be_seen(tmp_path):
    pickle.loads(Trap(tmp_path / "marker").pickled())
    assert (tmp_path / "marker").exists()


def _with_model(folder: Path) -> dict[str, Any]:
    """A run from a pretrained folder, tokenizer included."""
    write_tiny_run(folder)
    keys = {key: value for key, value in TINY_BERT.items() if key != "model_type"}
    model = BertForSequenceClassification(BertConfig(**keys, num_labels=3))
    model.save_pretrained(folder / "model")
    for file in (folder / "tokenizer").iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    return {"model": {"config": None, "tokenizer": None, "name_or_path": str(folder / "model")}}


def _only_a_pickle_of_weights(folder: Path) -> Path:
    (folder / "model" / "model.safetensors").unlink()
    return folder / "model" / "pytorch_model.bin"


def _messages_without_pickle() -> list[object]:
    """Every kind of message of the mesh, while pickle cannot be used."""
    mesh = ParallelMesh(torch.device("cpu"), dp_replicate=dist.get_world_size())

    def refuse(*arguments: object, **keys: object) -> None:
        raise AssertionError("a pickle")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        patch.setattr(distributed_c10d, "_pickler", refuse)
        patch.setattr(distributed_c10d, "_unpickler", refuse)
        gathered = mesh.gather({"rank": mesh.rank, "rows": torch.tensor([mesh.rank])})
        rows = torch.cat([part["rows"] for part in gathered]).tolist() if gathered else None
        return [mesh.share(rows), mesh.on_rank_zero(lambda: (1.5, None))]


@pytest.mark.slow
def test_between_ranks(ranks: RankPools):
    assert ranks(2).run(_messages_without_pickle) == [[[0, 1], (1.5, None)]] * 2


def test_no_source_sends_an_object_or_reads_a_pickle():
    """torch's collectives of objects are pickles; so are the states of its c10d rendezvous."""
    forbidden = re.compile(
        r"_object_list\(|gather_object\(|import pickle|torch\.load\(|backend\W{0,3}c10d|distributed\.elastic"
    )
    files = sorted((Path(trainer.__file__).parent).rglob("*.py"))
    found = [f"{file.name}: {match[0]}" for file in files for match in forbidden.finditer(file.read_text())]
    assert found == []


ROLES: dict[str, Callable[[Path], Path]] = {
    "recipe": lambda folder: folder / "recipe.json",
    "rows": lambda folder: folder / "train.jsonl",
    "tokenizer": lambda folder: folder / "model" / "tokenizer.json",
    "its configuration": lambda folder: folder / "model" / "tokenizer_config.json",
    "configuration": lambda folder: folder / "model" / "config.json",
    "weights": lambda folder: folder / "model" / "model.safetensors",
    "old weights": _only_a_pickle_of_weights,
}


@pytest.mark.parametrize("role", ROLES)
def test_in_place_of_the_starting_model(tmp_path, role, capsys):
    recipe = write_tiny_run(tmp_path, **_with_model(tmp_path))
    assert main(["check", str(recipe)]) == ExitCode.DONE, "it would run"
    ROLES[role](tmp_path).write_bytes(Trap(tmp_path / "marker").pickled())
    assert main(["run", str(recipe)]) == ExitCode.USER
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_in_place_of_rows_of_other_kinds(tmp_path, ending):
    rows = tmp_path / f"rows.{ending}"
    recipe = write_tiny_run(tmp_path, data={"train": str(rows), "validation": None}, evaluation={"every": None})
    rows.write_bytes(Trap(tmp_path / "marker").pickled())
    assert main(["run", str(recipe)]) == ExitCode.USER
    assert not (tmp_path / "marker").exists()


def test_in_place_of_prepared_rows(tmp_path):
    recipe = write_tiny_run(tmp_path)
    assert main(["run", str(recipe), "training.stop_at_step=2"]) == ExitCode.STOPPED
    files = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(Trap(tmp_path / "marker").pickled())
    assert main(["run", str(recipe)]) in (ExitCode.DONE, ExitCode.USER)
    assert not (tmp_path / "marker").exists()
