"""Recomputation: less is kept, and not one bit of the result changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.helpers.training import VOCABULARY
from trainer.engine.precision import cast_forward
from trainer.models.checkpointing import checkpoint_layers, kept_result
from trainer.models.describe import ModelUse, describe
from trainer.models.families.table import layers_of
from trainer.models.fill import build_model
from trainer.models.place import PlacedModel
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.recipe.schema import Model, Training

KINDS = ["none", "selective", "full"]
CONFIG = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}


def build(
    how: str, dropout: float = 0.1, keyed: bool = True, precision: str = "fp32", model_type: str = "bert"
) -> PlacedModel:
    config = {**CONFIG, "model_type": model_type}
    recipe = Model.model_validate({"config": config, "tokenizer": "none", "dropout": dropout})
    use = ModelUse("AutoModelForSequenceClassification", {"num_labels": 3})
    built = build_model(describe(recipe, Training(layout_invariant_dropout=keyed), use))
    layers = layers_of(built.model).values()
    assert checkpoint_layers(layers, how, built.dropout_keys) == (len(layers) if how != "none" else 0)
    cast_forward(built.model, precision, torch.device("cpu"))
    built.model.train()
    return built


def inputs(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(5, VOCABULARY, (4, 48), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def loss_of(built: PlacedModel, index: int) -> Tensor:
    """Of one microbatch, whose dropout is that of its rows."""
    rows = torch.arange(4) + 4 * index
    keyed: AbstractContextManager[Any] = nullcontext()
    if built.dropout_keys is not None:
        keyed = built.dropout_keys.use(MicrobatchKey(0, rows))
    with keyed:
        return built.model(**inputs(index)).logits.float().square().sum()


def gradients(built: PlacedModel) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in built.model.named_parameters()}


def one_after_the_other(built: PlacedModel) -> list[float]:
    losses = []
    for index in range(2):
        loss = loss_of(built, index)
        loss.backward()
        losses.append(loss.item())
    return losses


def interleaved(built: PlacedModel) -> list[float]:
    """As a pipeline does it: both forward passes, then both backward passes."""
    losses = [loss_of(built, index) for index in range(2)]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses]


def assert_same_results(one: PlacedModel, other: PlacedModel, run: Callable[[PlacedModel], list[float]]) -> None:
    torch.manual_seed(0)
    losses = run(one)
    torch.manual_seed(0)
    assert run(other) == losses
    expected = gradients(one)
    for name, gradient in gradients(other).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("how", ["selective", "full"])
class TestResults:
    @pytest.mark.parametrize("run", [one_after_the_other, interleaved])
    @pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.nightly), 0.1])
    def test_are_the_same_bit_for_bit(self, how, dropout, run):
        assert_same_results(build("none", dropout), build(how, dropout), run)

    @pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
    def test_in_half_precision_too(self, how, precision):
        assert_same_results(build("none", precision=precision), build(how, precision=precision), interleaved)

    @pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
    def test_of_one_layer_that_is_called_several_times(self, how, precision):
        """Autocast's cache would keep the weights of ALBERT's one layer from call to call."""
        one, other = (build(kind, precision=precision, model_type="albert") for kind in ("none", how))
        assert interleaved(other) == pytest.approx(interleaved(one), rel=1e-3)
        expected = gradients(one)
        for name, gradient in gradients(other).items():
            if gradient is not None:
                assert (gradient - expected[name]).abs().max() <= 2e-2 * expected[name].abs().max() + 1e-4, name

    @pytest.mark.parametrize("run", [one_after_the_other, interleaved])
    def test_with_torchs_own_dropout(self, how, run):
        assert_same_results(build("none", keyed=False), build(how, keyed=False), run)

    def test_a_key_that_does_not_travel_is_found(self, how, monkeypatch):
        """Recomputed under whatever key there is: in the backward pass none, and here that of the last forward."""
        keys = MicrobatchKey(0, torch.arange(4) + 4)
        monkeypatch.setattr(DropoutKeys, "capture", lambda self: lambda: self.use(keys))
        with pytest.raises(AssertionError):
            assert_same_results(build("none"), build(how), interleaved)

    def test_an_evaluation_keeps_nothing(self, how):
        built = build(how)
        built.model.eval()
        with torch.no_grad():
            assert not built.model(**inputs(0)).logits.requires_grad

    def test_parameters_keep_their_names(self, how):
        assert [name for name, _ in build(how).model.named_parameters()] == [
            name for name, _ in build("none").model.named_parameters()
        ]


def kept_bytes(how: str, dropout: float = 0.1, precision: str = "fp32") -> int:
    """Bytes that a forward pass leaves allocated for its backward pass: the allocator's own count."""
    built = build(how, dropout, precision=precision)
    loss_of(built, 0).backward()  # what is made once is there
    gc.collect()  # what other tests left must not be freed while it is counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        loss = loss_of(built, 0)
    assert loss.requires_grad  # and so alive until here
    return sum(event.self_cpu_memory_usage for event in watched.events())


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.nightly), 0.1])
def test_the_more_is_recomputed_the_less_is_kept(dropout, precision):
    none, selective, full = (kept_bytes(how, dropout, precision) for how in KINDS)
    print(f"kept for the backward pass: {none:,} bytes, {selective:,} selective, {full:,} full")
    assert full < 0.35 * none
    assert 1.5 * full < selective < 0.9 * none


def test_full_keeps_one_tensor_for_each_layer():
    """The input of each layer, [4, 48, 64] in fp32, besides what embeddings, pooler and head keep."""
    layer_input = 4 * 48 * 64 * 4
    outside = kept_bytes("full", 0.0) - 4 * layer_input
    assert 0 < outside < 6 * layer_input


class Numbered(torch.nn.Module):
    """Multiplies by the number of results that were computed before, in all of its passes."""

    num_computed = 0

    def _computed(self) -> int:
        self.num_computed += 1
        return self.num_computed

    def forward(self, x: Tensor) -> Tensor:
        return (x * kept_result(self._computed)).sin()


@pytest.mark.parametrize("how", KINDS)
def test_a_recomputation_gets_the_kept_results_of_its_own_forward_pass(how: Any):
    layer, x = Numbered(), torch.ones(3, requires_grad=True)
    checkpoint_layers([layer], how, None)
    outputs = [layer(x), layer(x)]  # of two microbatches, before the first backward pass
    for number, output in enumerate(outputs, start=1):
        (gradient,) = torch.autograd.grad(output.sum(), x)
        torch.testing.assert_close(gradient, number * torch.cos(number * x.detach()))
    assert layer.num_computed == 2
