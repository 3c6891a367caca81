"""Adapters of experts against PEFT's `target_parameters`: outputs, gradients, a step, and the merged model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.features.experts.tiny_experts import build_experts
from tests.helpers.families import EXPERTS, VOCABULARY
from trainer.base.errors import UsageError
from trainer.features.experts.adapters_section import contradictions
from trainer.models.adapters import reach_note
from trainer.models.freezing import adapt
from trainer.models.merged_weights import MergedWeights
from trainer.recipe.reading.rules import message
from trainer.recipe.schema import Model

PATTERNS = {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"o_proj": 8.0, "experts.gate_up_proj": 4.0}}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
# Keys of the adapter, and the arguments of PEFT for the same training.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": ({"target_parameters": "all-experts"}, {"target_parameters": BOTH}),
    "patterns": (
        {"target_parameters": ["experts.*_proj"], "rank_stabilised": True, **PATTERNS},
        {"target_parameters": BOTH, "use_rslora": True, **PATTERNS},
    ),
    "down only": (
        {"target_parameters": ["experts.down_proj"]},
        {"target_parameters": ["experts.down_proj"]},
    ),
}
TARGETS = ["o_proj"]  # PEFT takes `down_proj` of dense layers for that of experts


def recipe_of(family: str, keys: dict[str, Any], **others: Any) -> Model:
    adapter = {"type": "lora", "rank": 3, "alpha": 12.0, "targets": TARGETS, **keys}
    config = {"model_type": family, **EXPERTS[family]}
    return Model.model_validate({"config": config, "tokenizer": "none", "adapter": adapter, **others})


def in_peft(name: str, tensor: Tensor, model: nn.Module) -> tuple[str, Tensor]:
    """Return name and value of a factor in PEFT: an own statement of its form, to compare with that of the code."""
    layer, _, rest = name.partition(".lora.")
    if rest in ("A", "B"):
        return f"base_model.model.{layer}.lora_{rest}.default.weight", tensor
    parameter, _, factor = rest.rpartition(".")
    products = model.get_submodule(f"{layer}.lora")
    is_inner = parameter != "down_proj" and "down_proj" in products
    value = torch.cat([*tensor]) if factor == "A" else torch.stack([*tensor], dim=2).flatten(1)
    return f"base_model.model.{layer}{'.base_layer' * is_inner}.lora_{factor}.default.weight", value


def peft_beside(model: nn.Module, plain: nn.Module, arguments: dict[str, Any]) -> Any:
    """Return PEFT's model over the same weights with the same factors."""
    plain.config._experts_implementation = "eager"
    reference: Any = get_peft_model(plain, LoraConfig(r=3, lora_alpha=12, target_modules=TARGETS, **arguments))
    factors = dict(in_peft(name, p.detach(), model) for name, p in model.named_parameters() if ".lora." in name)
    loaded = reference.load_state_dict(factors, strict=False)
    assert not loaded.unexpected_keys
    assert not [name for name in loaded.missing_keys if "lora" in name]
    return reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in ("mixtral", "gpt_oss") else pytest.mark.nightly) for f in EXPERTS],
)
def test_a_step_is_that_of_peft(family: str, kind: str):
    keys, arguments = KINDS[kind]
    plain = build_experts(family).double()
    model: Any = copy.deepcopy(plain)
    recipe = recipe_of(family, keys)
    adapt(model, recipe, seed=5)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):  # with zeros, `A` has no gradient
            nn.init.normal_(parameter, 0.0, 0.2)
    model.double()
    reference = peft_beside(model, plain, arguments)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        losses = [one(input_ids=ids, labels=ids).loss for one in (model, reference)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)
        for loss in losses:
            loss.backward()
        theirs = dict(reference.named_parameters())
        own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(own) == sum(parameter.requires_grad for parameter in theirs.values())
        for name, parameter in own.items():
            in_theirs, gradient = in_peft(name, parameter.grad, model)
            torch.testing.assert_close(gradient, theirs[in_theirs].grad, rtol=1e-4, atol=1e-8)
        with torch.no_grad():
            for parameter in [*own.values(), *(p for p in theirs.values() if p.requires_grad)]:
                parameter -= parameter.grad
                parameter.grad = None
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    merged = MergedWeights(plain_on_meta(family), {k: v.shape for k, v in tensors.items()}, recipe.adapter)
    weights = dict(reference.merge_and_unload().named_parameters())
    assert merged.shapes.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(merged.merged(name, tensors.__getitem__), weight.detach(), rtol=1e-5, atol=1e-6)


def plain_on_meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return build_experts(family)


def test_factors_begin_as_those_of_peft_and_depend_on_their_names_only():
    model, other = build_experts("gpt_oss"), build_experts("gpt_oss")
    adapt(model, recipe_of("gpt_oss", {"target_parameters": "all-experts"}), seed=5)
    adapt(other, recipe_of("gpt_oss", {"target_parameters": ["experts.down_proj"]}), seed=5)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    factors = experts.lora["down_proj"]
    assert factors.A.shape == (4, 3, experts.down_proj.shape[1])
    assert factors.B.shape == (4, experts.down_proj.shape[2], 3)
    assert not factors.B.any()
    bound = experts.down_proj.shape[1] ** -0.5  # that of PEFT's linear layer for all experts
    assert 0.9 * bound < factors.A.abs().max() <= bound
    assert torch.equal(factors.A, other.get_submodule("model.layers.0.mlp.experts").lora["down_proj"].A)
    assert not torch.equal(factors.A[0], factors.A[1])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"target_parameters": ["experts.w1"]}, r"target_parameters` must match.*'experts.w1'.*gate_up_proj"),
        (
            {"target_parameters": ["down_proj"], "modules_to_save": ["layers.0.mlp.experts"]},
            r"layers.0.mlp.experts.down_proj is trained whole by `model.adapter.modules_to_save`",
        ),
        (
            {"target_parameters": "all-experts", "rank_pattern": {"experts.*": 4000}},
            r"rank` must be at most \d+, because .*gate_up",
        ),
        ({"target_parameters": "all-experts", "rank_pattern": {"experts.up": 2}}, r"rank_pattern` must match"),
    ],
)
def test_a_pattern_that_fits_no_matrix_of_experts_is_an_error(keys: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        adapt(build_experts("mixtral"), recipe_of("mixtral", keys), seed=0)


@pytest.mark.parametrize("keys", [{"dropout": 0.1}, {"type": "dora"}, {"start": "pissa"}])
def test_keys_that_peft_does_not_have_for_experts_are_refused(keys: dict[str, Any]):
    (problem,) = contradictions(recipe_of("mixtral", {"target_parameters": "all-experts", **keys}))
    assert message(problem).startswith(f"`model.adapter.{next(iter(keys))}` must be ")
    assert not [*contradictions(recipe_of("mixtral", keys))]


def test_the_note_names_the_key_for_experts_until_it_is_set():
    model, left_out = plain_on_meta("mixtral"), plain_on_meta("mixtral")
    total = sum(parameter.numel() for parameter in model.parameters())
    adapt(left_out, recipe_of("mixtral", {}), seed=0)
    note = reach_note(left_out, None)
    assert "such as model.layers.0.mlp.experts (MixtralExperts): `model.adapter.target_parameters` adds them" in note
    reached = sum(p.numel() for name, p in model.named_parameters() if "o_proj" in name or "experts." in name)
    adapt(model, recipe_of("mixtral", {"target_parameters": "all-experts"}), seed=0)
    assert reach_note(model, None) == (
        f"`model.adapter` reaches layers with {reached:,} of {total:,} parameters ({reached / total:.1%})"
    )
