"""Quantised weights beneath adapters: against plain loops with PEFT and bitsandbytes, folders, and refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_DECODERS, build_tiny, tiny_recipe, tiny_training, weights_of
from tests.models.test_adapters import _name_in_peft
from tests.tools.certify.test_verifying import ASKED, answered_here
from tests.use.export.test_export import assert_same_folder
from tests.use.export.test_peft_folder import CAUSAL, assert_same_logits, base_folder, opened, train
from trainer.base.errors import UsageError
from trainer.engine.state import MODEL_PREFIX
from trainer.models.configuration import load_config
from trainer.recipe.schema import Model
from trainer.tools.certify import verifying
from trainer.use.export.exporting import export

LORA = {"type": "lora", "rank": 4, "alpha": 16.0}
STARTED = {**LORA, "type": "dora", "start": "loftq"}
HEAD = "AutoModelForCausalLM"
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
SINGLE = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
FOUR_BITS = {"nf4": NF4, "nf4_single": SINGLE}


def in_4_bits(folder: Path, kind: str = "nf4") -> Any:
    """Return the model with weights in 4 bits, those of the folder or new ones."""
    is_quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    keys = {} if is_quantized else {"quantization_config": FOUR_BITS[kind]}
    model = AutoModelForCausalLM.from_pretrained(folder, **keys, device_map="cpu", dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False  # for evaluations, it would round scales to bf16
    return model


def in_int8(folder: Path) -> Any:
    """Return the model with the weights that bitsandbytes gives back; its own layer also rounds inputs to 8 bits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, scales, _ = bnb.int8_vectorwise_quant(module.weight.detach().half())
            module.weight.data = bnb.int8_vectorwise_dequant(codes, scales)
    return model


REFERENCES: dict[str, Callable[[Path], Any]] = {
    **{kind: partial(in_4_bits, kind=kind) for kind in FOUR_BITS},
    "int8": in_int8,
}


def quantized_folder(base: Path, kind: str, skipped: Sequence[str] = ()) -> Path:
    """Write a model as transformers and bitsandbytes quantise it; its scales differ from those of a second time."""
    folder = base.with_name(f"{base.name}_{kind}")
    config = copy.deepcopy(FOUR_BITS.get(kind) or BitsAndBytesConfig(load_in_8bit=True))
    config.llm_int8_skip_modules = ["lm_head", *skipped]
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu", dtype="float32")
    model.save_pretrained(folder)
    return folder


DORA = {**LORA, "type": "dora"}


@pytest.mark.parametrize(
    ("kind", "adapter", "is_folder"),
    [
        ("nf4", LORA, False),
        ("int8", LORA, False),
        ("nf4_single", STARTED, False),
        ("nf4", DORA, True),
        ("nf4_single", LORA, True),
        ("int8", LORA, True),
    ],
)
def test_a_loop_with_peft_and_bitsandbytes_has_the_same_losses(
    kind: str, adapter: dict[str, Any], is_folder: bool, tmp_path: Path
):
    base = exact = base_folder(tmp_path / "base", "llama", HEAD)
    if is_folder:
        base = quantized_folder(base, kind)
    keys = {"config": None, "name_or_path": str(base), "dropout": 0.0, "adapter": adapter, "quantization": kind}
    recipe = tiny_recipe(task={"type": "causal_lm", "text": "text"}, model=keys, training={"max_steps": 4})
    with tiny_training(recipe) as training:
        parts = training.engine.state().parts
        start = {part.name.removeprefix(MODEL_PREFIX): part.boxes[0].view.clone() for part in parts}
        results, batches = [], []
        for batch in training.loader:
            batches.append(batch)
            results.append(training.engine.train_step(batch))
        end = weights_of(training.engine, training.mesh)

    targets = sorted({name.split(".lora.")[0].split(".")[-1] for name in start})
    kinds = {"target_modules": targets, "use_dora": adapter["type"] == "dora"}
    config = LoraConfig(r=4, lora_alpha=16, task_type=TaskType.CAUSAL_LM, **kinds)
    reference = get_peft_model(REFERENCES[kind](exact if kind == "int8" else base), config)
    named = dict(reference.named_parameters())
    for name, tensor in start.items():
        named[_name_in_peft(name)].data.copy_(tensor)
    trained = [p for p in reference.parameters() if p.requires_grad]
    assert len(trained) == len(start)
    optimizer = torch.optim.AdamW(trained, weight_decay=0.01)
    assert_same_steps(reference, optimizer, batches, results)
    # AdamW divides each gradient by its size, so those near zero carry the rounding of the CPU's kernels: 8e-4 on some.
    for name, tensor in end.items():
        assert (named[_name_in_peft(name)] - tensor).abs().max() < 5e-3 * tensor.abs().max()
    assert not any(torch.equal(start[name], tensor) for name, tensor in end.items())


def test_loftq_begins_with_the_closest_weights(tmp_path: Path):
    base = base_folder(tmp_path / "base", "llama", HEAD)
    keys = {"config": None, "name_or_path": str(base), "adapter": STARTED, "quantization": "nf4"}
    with tiny_training(tiny_recipe(task={"type": "causal_lm", "text": "text"}, model=keys)) as training:
        layer = training.model.get_submodule("model.layers.1.mlp.up_proj")
        product, quantized = layer.lora, layer.weight.decoded(torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(base).model.layers[1].mlp.up_proj.weight.detach()
    begun = quantized + 16.0 / 4 * product.B @ product.A
    least = torch.linalg.svdvals(whole - quantized)[4:].square().sum().sqrt()  # Eckart and Young
    assert (whole - begun).norm().item() == pytest.approx(least.item(), rel=1e-5)
    assert torch.allclose(product.magnitude.weight, begun.norm(dim=1), rtol=1e-5)


def assert_same_steps(
    reference: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any], results: Sequence[Any]
) -> None:
    """Take the steps of a training with a model of PEFT, and require the same losses and norms."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for batch, result in zip(batches, results, strict=True):
        (microbatch,) = batch.microbatches
        assert result.loss == pytest.approx(mean_loss(reference, microbatch), rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = result.learning_rate
        optimizer.step()
        optimizer.zero_grad()


def mean_loss(model: Any, microbatch: Any) -> float:
    """Run both passes with the labels as they are: those of next tokens."""
    logits: Tensor = model(**microbatch.inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), microbatch.labels.flatten())
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("is_folder", [False, True])
def test_folders_hold_the_trained_model(is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The merged folder and PEFT's over the quantised base have the same logits; PEFT's opens over the plain base."""
    base = exact = base_folder(tmp_path / "base", "llama", HEAD)
    adapter = STARTED
    if is_folder:
        base, adapter = quantized_folder(base, "nf4"), LORA
    model = {"config": None, "name_or_path": str(base), "adapter": adapter, "quantization": "nf4"}
    recipe = write_tiny_run(tmp_path / "tuned", model=model)
    sections = {"task": CAUSAL, "optimizer": {"learning_rate": 0.01}}
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | sections))
    train(recipe)
    run = tmp_path / "tuned" / "run"
    monkeypatch.setattr(verifying, "_answered", answered_here)
    export(run, tmp_path / "certified", verification=ASKED)
    export(run, tmp_path / "merged")
    assert_same_folder(tmp_path / "merged", run / "model")
    export(run, tmp_path / "adapter", adapter=True, verification=ASKED)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    over_quantized = get_opened(tmp_path / "adapter", in_4_bits(base))
    assert_same_logits(over_quantized, merged)
    with pytest.raises(AssertionError):  # the plain base has other weights
        assert_same_logits(opened(tmp_path / "adapter", HEAD, exact), merged)


def get_opened(folder: Path, base: Any) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base, folder)


def test_layers_without_quantisation_are_refused_by_name(tmp_path: Path):
    lora = {"type": "lora", "rank": 2}
    gpt2 = {"config": TINY_DECODERS["gpt2"], "adapter": lora, "quantization": "nf4", "tokenizer": "none"}
    task = {"type": "causal_lm", "text": "text"}
    with pytest.raises(UsageError, match=r"`model.quantization` is nf4, which does not support.*c_attn is a Conv1D"):
        build_tiny(tiny_recipe(task=task, model=gpt2))
    llama = {**gpt2, "config": TINY_DECODERS["llama"]}
    missing = mock.patch("trainer.features.quantization.form.load_package", side_effect=ImportError("no module"))
    with missing, pytest.raises(UsageError, match=r"needs the package bitsandbytes; install it.*\[quantization\]"):
        build_tiny(tiny_recipe(task=task, model=llama))


_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("described", "keys", "words"),
    [
        ({"quant_method": "gptq"}, {}, r"is that of quantised weights \(gptq\), which cannot be read; name"),
        (_BNB, {}, r"`model.quantization` must be nf4_single.*but is nf4;"),
        ({**_BNB, "bnb_4bit_quant_type": "fp4"}, {}, r"\(bitsandbytes, fp4\), which cannot be read"),
        (NF4.to_dict(), {"quantization": "int8"}, r"`model.quantization` must be nf4.*but is int8"),
        (NF4.to_dict(), {"quantization": None}, r"`model.quantization` must be nf4.*but is null"),
        (NF4.to_dict(), {"adapter": STARTED}, r"`model.adapter.start` is \"loftq\".*holds them in nf4"),
    ],
)
def test_files_in_another_format_are_refused_by_name(described: Any, keys: Any, words: str, tmp_path: Path):
    config = {**TINY_DECODERS["llama"], "architectures": ["LlamaForCausalLM"], "quantization_config": described}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    recipe = {"name_or_path": str(tmp_path), "adapter": LORA, "quantization": "nf4", **keys}
    with pytest.raises(UsageError, match=words):
        load_config(Model.model_validate(recipe), {})


def test_an_exact_weight_among_quantised_weights_is_refused(tmp_path: Path):
    folder = quantized_folder(base_folder(tmp_path / "base", "llama", HEAD), "nf4", ["model.layers.0.mlp.up_proj"])
    model = {"config": None, "name_or_path": str(folder), "adapter": LORA, "quantization": "nf4", "tokenizer": "none"}
    with pytest.raises(UsageError, match=r"holds model.layers.0.mlp.up_proj.weight exactly"):
        build_tiny(tiny_recipe(task={"type": "causal_lm", "text": "text"}, model=model))
