"""Frozen weights in 16 bits: the bits of every result are those of fp32 storage, also what is written."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, TINY_DECODERS, tiny_recipe, tiny_training
from tests.use.export.test_peft_folder import base_folder
from trainer.base.errors import UsageError
from trainer.parallel.shards.digest import own_digest
from trainer.parallel.shards.gathering import local_part

LORA = {"type": "lora", "rank": 2, "alpha": 8.0, "dropout": 0.1, "targets": ["q_proj", "down_proj"]}
BERT = {**TINY_BERT, "initializer_range": 0.2}


def outcome(keys: dict[str, Any], folder: Path, stored: bool) -> tuple[Any, ...]:
    """Train three steps, and return numbers, trained weights, digest, exported file, and types of frozen weights."""
    patch = nullcontext() if stored else mock.patch("trainer.engine.forward.store_frozen")
    with patch, tiny_training(tiny_recipe(**keys)) as training:
        engine = training.engine
        numbers = [(result.loss, result.grad_norm) for result in training.steps(3)]
        digest = own_digest(engine.state().frozen())
        training.parts.engine.export(folder / str(stored))
        frozen = {p.dtype for p in engine.parameters.values() if not p.requires_grad}
        trained = {name: local_part(p.detach()).clone() for name, p in engine.parameters.items() if p.requires_grad}
    file = (folder / str(stored) / "model.safetensors").read_bytes() if training.mesh.rank == 0 else b""
    return numbers, digest, hashlib.sha256(file).hexdigest(), trained, frozen


def assert_same_bits(keys: dict[str, Any], folder: Path, half: torch.dtype = torch.bfloat16) -> None:
    rounded, exact = outcome(keys, folder, True), outcome(keys, folder, False)
    assert rounded[:3] == exact[:3]
    assert all(torch.equal(weight, exact[3][name]) for name, weight in rounded[3].items())
    assert rounded[4] == {half, torch.float32}
    assert exact[4] == {torch.float32}


CAUSAL = {"type": "causal_lm", "text": "text"}
LLAMA = {"config": {**TINY_DECODERS["llama"], "tie_word_embeddings": False}, "adapter": LORA, "tokenizer": "none"}
FROZEN = {"config": BERT, "dropout": 0.1, "freeze": ["embeddings", "layer.0", "pooler"]}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"task": CAUSAL, "model": LLAMA, "training": {"micro_batch_size": 5}}),
    "frozen": (1, {"model": FROZEN, "precision": "fp16"}),
    "fsdp": (3, {"task": CAUSAL, "model": LLAMA, "parallel": {"strategy": "fsdp"}}),
    "fsdp-offload": (2, {"model": FROZEN, "parallel": {"strategy": "fsdp", "offload": "parameters"}}),
    "tensor": (2, {"task": CAUSAL, "model": LLAMA, "parallel": {"strategy": "ddp", "tensor": 2}}),
    "pipeline": (
        2,
        {"task": CAUSAL, "model": LLAMA, "parallel": {"pipeline": {"stages": 2}}, "precision": "fp16"},
    ),
}


QUICK = ((False, "fsdp"), (True, "one"))


@pytest.mark.parametrize(
    ("pretrained", "case"),
    [
        pytest.param(pretrained, case, marks=() if (pretrained, case) in QUICK else pytest.mark.slow)
        for pretrained in (False, True)
        for case in CASES
    ],
)
def test_results_have_the_bits_of_fp32_storage(ranks: RankPools, tmp_path: Path, case: str, pretrained: bool):
    world_size, keys = CASES[case]
    keys = {"precision": "bf16", **keys}
    if pretrained:
        adapted = "adapter" in keys["model"]
        head = "AutoModelForCausalLM" if adapted else "AutoModelForMaskedLM"
        base = base_folder(tmp_path / "base", "llama" if adapted else "bert", head)
        keys["model"] = {**keys["model"], "config": None, "name_or_path": str(base), "tokenizer": None}
    half = torch.float16 if keys["precision"] == "fp16" else torch.bfloat16
    if world_size == 1:
        assert_same_bits(keys, tmp_path, half)
    else:
        ranks(world_size).run(assert_same_bits, keys, tmp_path, half)


def test_an_origin_that_changed_is_an_error(tmp_path: Path):
    model = {
        **LLAMA,
        "config": None,
        "name_or_path": str(base_folder(tmp_path / "base", "llama", "AutoModelForCausalLM")),
    }
    with tiny_training(tiny_recipe(task=CAUSAL, model=model, precision="bf16")) as training:
        base_folder(tmp_path / "base", "llama", "AutoModelForCausalLM", seed=2)
        with pytest.raises(UsageError, match=r"`model.name_or_path` must keep its files.*q_proj.weight is another one"):
            training.engine.export(tmp_path / "merged")
        (tmp_path / "base" / "model.safetensors").unlink()
        with pytest.raises(UsageError, match=r"must keep its files.*cannot be read again"):
            training.engine.export(tmp_path / "merged")
