"""What a rank reads and holds while its model is built: its parts and one tensor more, never the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, BertForSequenceClassification

from tests.helpers.memory import LARGE_BERT, LARGEST_BYTES, needs_peak, peak_growth
from tests.helpers.ranks import RankPools
from trainer.models import stored_weights
from trainer.models.describe import ModelUse, describe
from trainer.models.fill import build_model
from trainer.models.place import ModelCut, ShardChoice, place
from trainer.parallel.row_groups import RowGroups
from trainer.recipe.schema import Model, Training

WHOLE_BYTES = 47_218_700


@dataclass
class Reading:
    """Of one rank: what it took of the files, and its peaks; all in bytes."""

    read: int
    loaded_parts: int
    drawn_parts: int
    read_shards: int
    read_flat: int
    wrong_flat: list[str]
    loaded_shards: int
    drawn_shards: int
    loaded_whole: int
    drawn_whole: int
    held: int


class CountedSlice:
    def __init__(self, stored: Any, count: Callable[[Tensor], Tensor]) -> None:
        self._stored, self._count = stored, count

    def __getitem__(self, index: Any) -> Tensor:
        return self._count(self._stored[index])

    def get_shape(self) -> Any:
        return self._stored.get_shape()


class CountedFile:
    """`safe_open` that adds up the bytes of what is taken out of it."""

    total = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._opened = SAFE_OPEN(*args, **options)

    def __enter__(self) -> CountedFile:
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> Any:
        return self._file.keys()

    def get_slice(self, key: str) -> CountedSlice:
        return CountedSlice(self._file.get_slice(key), self._count)

    def get_tensor(self, key: str) -> Tensor:
        return self._count(self._file.get_tensor(key))

    @classmethod
    def _count(cls, tensor: Tensor) -> Tensor:
        CountedFile.total += tensor.numel() * tensor.element_size()
        return tensor


SAFE_OPEN = stored_weights.safe_open


def read_by_rank(folder: str) -> Reading:
    def build(recipe: Mapping[str, Any], cut: ModelCut) -> Any:
        use = ModelUse("AutoModelForSequenceClassification", {"num_labels": 3})
        return build_model(describe(Model.model_validate(recipe), Training(), use), cut)

    saved, described = {"name_or_path": folder}, {"config": LARGE_BERT, "tokenizer": "none"}
    cut = ModelCut(RowGroups(dist.group.WORLD))
    tiny = {"config": {**LARGE_BERT, "hidden_size": 16, "intermediate_size": 32}, "tokenizer": "none"}
    build(tiny, cut)  # whatever is imported or allocated once
    CountedFile.total = 0
    stored_weights.safe_open = CountedFile
    try:
        parts = build(saved, cut)
        read, CountedFile.total = CountedFile.total, 0
        shards = ModelCut(shard=ShardChoice(dist.get_rank(), 4))
        build(saved, shards)
        read_shards, CountedFile.total = CountedFile.total, 0
        flat = build(saved, ModelCut(shard=ShardChoice(dist.get_rank(), 4, flat=True)))
    finally:
        stored_weights.safe_open = SAFE_OPEN
    assert not parts.notes
    held = sum(parameter.numel() * parameter.element_size() for parameter in parts.model.parameters())
    del parts
    return Reading(
        read=read,
        read_shards=read_shards,
        read_flat=CountedFile.total,
        wrong_flat=without_elements(flat.shards, folder),
        loaded_shards=peak_growth(lambda: build(saved, shards)),
        drawn_shards=peak_growth(lambda: build(described, shards)),
        loaded_parts=peak_growth(lambda: build(saved, cut)),
        drawn_parts=peak_growth(lambda: build(described, cut)),
        # From a file in fp32, transformers maps the weights: cutting them is what first reads them.
        loaded_whole=peak_growth(lambda: place(build(saved, ModelCut()).model, cut)),
        drawn_whole=peak_growth(lambda: place(build(described, ModelCut()).model, cut)),
        held=held,
    )


def without_elements(shards: Mapping[str, Tensor], folder: str) -> list[str]:
    """The tensors of which a rank's rows lack its quarter of the elements, as DeepSpeed's stage 3 divides them."""
    wrong = []
    for name, whole in load_file(f"{folder}/model.safetensors").items():
        size = -(-whole.numel() // 4)
        start = dist.get_rank() * size
        row = whole[0].numel()
        own = whole.flatten()[start : start + size]
        rows = shards[name].flatten()[start % row :][: own.numel()]
        wrong += [name] if not torch.equal(rows, own) else []
    return wrong


@pytest.mark.slow
@needs_peak
def test_a_rank_of_four_never_holds_the_whole_model(ranks: RankPools, tmp_path):
    model = BertForSequenceClassification(AutoConfig.for_model(**LARGE_BERT, num_labels=3))
    assert sum(p.numel() * 4 for p in model.parameters()) == WHOLE_BYTES
    model.save_pretrained(tmp_path)
    readings: list[Reading] = ranks(4).run(read_by_rank, str(tmp_path))
    if os.environ.get("SHOW_MEMORY"):
        print(*readings, sep="\n")
    slack = 4 << 20  # pages around slices, and the interpreter's own
    for reading in readings:
        assert reading.held < WHOLE_BYTES / 3.5
        padding = 4 * 512 * 4  # rows of zeros, which are in no file
        assert reading.held - padding <= reading.read <= reading.held, "it reads its parts, each once"
        assert reading.loaded_parts < reading.held + LARGEST_BYTES + slack < WHOLE_BYTES / 1.8
        assert reading.drawn_parts < reading.held + 2 * LARGEST_BYTES + slack
        quarter = WHOLE_BYTES / 4
        assert 0.98 * quarter < reading.read_shards < 1.01 * quarter, "under FSDP it reads its rows, each once"
        assert reading.wrong_flat == []
        assert 0.98 * quarter < reading.read_flat < 1.02 * quarter, "under ZeRO-3 it reads the rows of its elements"
        assert reading.loaded_shards < quarter + LARGEST_BYTES + slack
        assert reading.drawn_shards < quarter + 2 * LARGEST_BYTES + slack
        # Of mapped files, what lies between the slices of rows is not always read; hence not quite the whole.
        assert min(reading.loaded_whole, reading.drawn_whole) > 0.75 * WHOLE_BYTES, "or nothing is measured"
