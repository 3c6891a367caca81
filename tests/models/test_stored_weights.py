"""`parallel.load` broadcast: one rank of a node reads the weights, and all ranks hold the bits that they would read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, BertForMaskedLM

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, digests_of, tiny_recipe, tiny_training
from trainer.base.errors import UsageError
from trainer.models import shared_weights, stored_weights
from trainer.parallel import node

QUICK: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp", "tensor": 2},
    {"strategy": "ddp", "pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}},
]
MORE: list[dict[str, Any]] = [
    {"strategy": "fsdp"},
    {"strategy": "hsdp", "shard": 2},
    {"strategy": "ddp", "tensor": 4},
    {"strategy": "fsdp", "pipeline": {"stages": 2}},
    {"strategy": "zero2"},
]
LAYOUTS = [
    pytest.param(QUICK[0], marks=pytest.mark.slow),
    *QUICK[1:],
    *(pytest.param(keys, marks=pytest.mark.nightly) for keys in MORE),
]
SAFE_OPEN = stored_weights.safe_open


@dataclass
class Load:
    """One rank's load: digests of its parts, how often it opened files, and the bytes that it got or sent."""

    digests: dict[str, str]
    num_opened: int
    num_bytes: int
    error: str = ""


def load(folder: str, parallel: dict[str, Any], failing: bool = False) -> Load:
    """Load on two nodes of two ranks, in chunks of some rows. `failing`: a reader fails."""
    found = Load({}, 0, 0)
    rank = dist.get_rank()

    def opened(*args: Any, **options: Any) -> Any:
        found.num_opened += 1
        if failing and found.num_opened > 60:
            raise OSError("the disk is gone")
        return SAFE_OPEN(*args, **options)

    def sent(self: node.NodeRanks, tensor: torch.Tensor) -> None:
        found.num_bytes += tensor.nbytes
        broadcast(self, tensor)

    broadcast = node.NodeRanks._broadcast
    model = {"config": None, "tokenizer": None, "name_or_path": folder}
    recipe = tiny_recipe(task={"type": "masked_lm", "text": "text"}, model=model, parallel=parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "node_name", lambda: str(rank // 2))
        patch.setattr(node.NodeRanks, "_broadcast", sent)
        patch.setattr(stored_weights, "safe_open", opened)
        patch.setattr(shared_weights, "_CHUNK_BYTES", 1000)
        try:
            with tiny_training(recipe) as training:
                found.digests = digests_of(training)
        except UsageError as error:
            found.error = str(error)
    return found


@pytest.fixture
def folder(tmp_path) -> str:
    torch.manual_seed(3)
    model = BertForMaskedLM(AutoConfig.for_model(**{**TINY_BERT, "num_hidden_layers": 4}))
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    return str(tmp_path)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_each_rank_holds_the_bits_that_it_would_read(ranks: RankPools, folder: str, parallel: dict[str, Any]):
    read = ranks(4).run(load, folder, parallel)
    shared = ranks(4).run(load, folder, {**parallel, "load": "broadcast"})
    assert [one.digests for one in shared] == [one.digests for one in read]
    assert [one.num_opened > 0 for one in shared] == [True, False, True, False]
    assert not any(one.num_bytes for one in read)
    stored = 2 * BertForMaskedLM.from_pretrained(folder).num_parameters()  # in bf16
    assert all(0.3 * stored < one.num_bytes < 1.7 * stored for one in shared), "it is sent once, in the file's type"


def test_a_file_that_a_reader_cannot_read_ends_all_ranks_of_its_node(ranks: RankPools, folder: str):
    found = ranks(4).run(load, folder, {"strategy": "ddp", "tensor": 2, "load": "broadcast"}, failing=True)
    for reader, other in (found[:2], found[2:]):
        assert "the disk is gone" in reader.error
        assert "which reads for this node" in other.error
