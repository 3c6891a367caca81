"""Hidden states in bf16: beside transformers' model in bf16, in each family and layout, and in a plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.ranks import RankPools
from tests.helpers.training import build_tiny, tiny_recipe
from tests.parity.cases import TOLERANCES, model_config
from tests.parity.test_learning import BERT, assert_any_layout_is_one_process, in_some_layouts
from trainer.base.errors import RecipeError
from trainer.features.bf16_residuals.stream import use_bf16
from trainer.models.families.table import layers_of
from trainer.models.place import PlacedModel
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.plan.ledger import ACTIVATIONS
from trainer.tools.plan.simulated_step import plan_step

BF16: dict[str, Any] = {"precision": "bf16", "residuals": "bf16"}


@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2"])
def test_layers_are_those_of_transformers_in_bf16(family: str):
    torch.manual_seed(0)
    config = model_config(family)
    settings = AutoConfig.for_model(**config, num_labels=3, attn_implementation="sdpa")
    model = AutoModelForSequenceClassification.from_config(settings).eval()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
    of_transformers = copy.deepcopy(model).bfloat16()
    use_bf16(PlacedModel(model), tiny_recipe(**BF16))
    found: list[list[Tensor]] = []
    for one in (model, of_transformers):
        outputs: list[Tensor] = []
        layers = list(layers_of(one).values())
        # The same input: the embeddings are in bf16 in transformers' model only.
        given = found[0][0].bfloat16() if found else None
        layers[0].register_forward_pre_hook(_begin(outputs, given), with_kwargs=True)
        for layer in layers:
            layer.register_forward_hook(lambda *call, kept=outputs: kept.append(_hidden(call[-1])))
        with torch.autocast("cpu", torch.bfloat16, enabled=one is model):
            one(input_ids=torch.arange(5, 17).view(2, 6))
        found.append(outputs)
    ours, others = found
    assert [state.dtype for state in ours[1:]] == [torch.bfloat16] * (len(layers) - 1) + [torch.float32]
    for mine, theirs in zip(ours[1:], others[1:], strict=True):
        assert torch.equal(mine.bfloat16(), theirs)


def _hidden(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _begin(kept: list[Tensor], given: Tensor | None) -> Any:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[0] if given is None else given
        kept.append(hidden.detach())
        return (hidden, *args[1:]), kwargs

    return hook


@pytest.mark.parametrize(
    "family",
    ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deberta-v2", "llama", "t5", "bart"))],
)
def test_sums_of_residuals_are_in_bf16(family: str):
    """Also in training: what a layer gets, and each layer norm, is in bf16, and the loss is near that of fp32."""
    model = {"config": model_config(family)} | ({} if family == "bert" else {"tokenizer": "none"})
    losses = []
    for residuals in ("bf16", "fp32"):
        training = build_tiny(tiny_recipe(precision="bf16", residuals=residuals, model=model))
        layers = layers_of(training.engine._models[0])
        seen: list[Tensor] = []

        def note(module: nn.Module, args: Any, output: Any, seen: list[Tensor] = seen) -> None:
            seen.append(args[0])

        for layer in layers.values():
            for module in (layer, *layer.modules()):
                if isinstance(module, nn.LayerNorm):
                    module.register_forward_hook(note)
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        losses.append(training.engine.train_step(next(iter(training.loader))).loss)
        types = {tensor.dtype for tensor in seen}
        assert types == {torch.bfloat16 if residuals == "bf16" else torch.float32}
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[0] != losses[1]


@in_some_layouts
def test_any_layout_is_one_process(ranks: RankPools, layout: str):
    small = {"config": {**BERT, "initializer_range": 0.05}}
    sgd = {"name": "sgd", "learning_rate": 0.01}
    sections = {**BF16, "model": small, "optimizer": sgd}
    assert_any_layout_is_one_process(ranks, layout, sections, TOLERANCES["bf16"])


def test_a_plan_has_fewer_bytes_of_activations():
    (exact, moved), (rounded, moved_rounded) = (
        (step.peak.by_component[ACTIVATIONS], sum(amount.num_bytes for amount in step.totals.work.values()))
        for step in (
            plan_step(plan_run(tiny_recipe(precision="bf16", residuals=residuals), 1), 0, 16)
            for residuals in ("fp32", "bf16")
        )
    )
    assert rounded < 0.95 * exact
    assert moved_rounded < 0.95 * moved


@pytest.mark.parametrize(
    "key", ["precision=fp16", "precision=fp32", "weights=bf16_compensated", "parallel.strategy=zero2"]
)
def test_other_numbers_are_refused(key: str):
    name = key.split("=")[0]
    with pytest.raises(RecipeError, match=f'`residuals` is "bf16".*`{name}`|`{name}`.*`residuals`'):
        load_recipe("bert_sample", ["residuals=bf16", key, *(["precision=bf16"] if name != "precision" else [])])


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_compiled_layer_moves_fewer_bytes():
    from tests.benchmarks.compiled_layers import CASES, chosen

    exact, rounded = (
        sum(graph.num_bytes for graph in chosen(replace(CASES["BERT-base"], keys={"residuals": residuals})))
        for residuals in ("fp32", "bf16")
    )
    assert rounded < 0.95 * exact
