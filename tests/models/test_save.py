"""Ranks write a model together: each writes whole files, and holds the tensors of one file at most."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.models import save
from trainer.models.attention import KEYED_ATTENTION
from trainer.models.weight_files import WeightFile, plan_files
from trainer.recipe.schema import Recipe

LARGEST = 6_000
MASKED_LM = {"type": "masked_lm", "text": "text"}  # with tied weights in the first and last layer


def export(recipe: Recipe, folder: Path) -> tuple[list[str], int]:
    """Export from all ranks. Return the files that this rank wrote, and the most bytes of tensors that it held."""
    written: list[str] = []
    held: list[int] = []
    write = WeightFile.write

    def watched(self: WeightFile, read: Any, place: Path) -> Path:
        written.append(self.name)
        held.append(sum(read(name).nbytes for name in self.sources))
        return write(self, read, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "plan_files", partial(plan_files, largest_file_bytes=LARGEST))
        patch.setattr(WeightFile, "write", watched)
        with tiny_training(recipe) as training:
            training.engine.export(folder)
    return written, max(held, default=0)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": {"stages": 2}, "tensor": 2},
        pytest.param({"strategy": "fsdp", "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero3"}, marks=pytest.mark.slow),
    ],
    ids=["stages x tensor", "fsdp x tensor", "zero3"],
)
def test_files_and_index_equal_those_of_one_process(ranks: RankPools, tmp_path: Path, parallel: dict[str, Any]):
    keys = {"task": MASKED_LM, "training": {"micro_batch_size": 3}}
    [(alone, _)] = ranks(1).run(export, tiny_recipe(**keys), tmp_path / "one")
    found = ranks(4).run(export, tiny_recipe(**keys, parallel=parallel), tmp_path / "four")
    assert [names for names, _ in found] == [alone[rank::4] for rank in range(4)], "the ranks take turns"
    assert len(alone) > 4
    largest = max(t.numel() * 4 for t in AutoModelForMaskedLM.from_pretrained(tmp_path / "one").parameters())
    assert all(most <= max(LARGEST, largest) for _, most in found)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted([*alone, "config.json", "model.safetensors.index.json"])
    for name in names:
        assert (tmp_path / "four" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    _, loading = AutoModelForMaskedLM.from_pretrained(tmp_path / "four", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert KEYED_ATTENTION not in json.dumps((tmp_path / "four" / "config.json").read_text()), "a plain folder"


def fail_on_rank_one(recipe: Recipe, folder: Path) -> str:
    write = WeightFile.write

    def failing(self: WeightFile, read: Any, place: Path) -> Path:
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(self, read, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "plan_files", partial(plan_files, largest_file_bytes=LARGEST))
        patch.setattr(WeightFile, "write", failing)
        with tiny_training(recipe) as training, pytest.raises(save.TrainerError) as error:
            training.engine.export(folder)
    return str(error.value)


def test_a_full_disk_under_one_rank_is_an_error_on_all(ranks: RankPools, tmp_path: Path):
    for text in ranks(3).run(fail_on_rank_one, tiny_recipe(training={"micro_batch_size": 4}), tmp_path / "model"):
        assert "the model could not be written to" in text
        assert "No space left on device" in text
