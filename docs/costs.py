"""Formulas for the memory and communication of layouts with real models: the figures of `choosing.md`.

Models are built on torch's meta device, which allocates no memory. The bytes of training state come from the trainer's
`state_bytes`, and the parameters of tensor ranks and stages from its plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from trainer.models.describe import ModelUse, describe
from trainer.models.families.family import TensorPlan, matches, relative_name
from trainer.models.families.table import FAMILIES
from trainer.models.stage_split import split_stages, stage_sizes
from trainer.parallel.placement import ParameterPlacement, Placements, Split, whole
from trainer.parallel.state_bytes import StateBytes, state_bytes
from trainer.recipe.schema import Model, Training
from trainer.recipe.strategies import STRATEGIES

FP32_BYTES = 4
MODELS: Mapping[str, Mapping[str, Any]] = {
    "BERT-base": {"model_type": "bert"},  # transformers' defaults
    "BERT-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
"""The models of Devlin et al. 2019 (arXiv:1810.04805), with a head for two classes."""


@cache
def model_of(name: str) -> nn.Module:
    """Build a model of `MODELS` on the meta device."""
    recipe = Model.model_validate({"config": dict(MODELS[name]), "tokenizer": "none"})
    return describe(recipe, Training(), ModelUse("AutoModelForSequenceClassification", {"num_labels": 2})).on_meta()


def num_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in model_of(name).parameters())


def state(name: str, strategy: str, num_ranks: int, tensor: int = 1) -> StateBytes:
    """Return the bytes of state on a rank in fp32 with AdamW, by the trainer's formula.

    Args:
        name: The name of the model.
        strategy: The name of a row in the table of strategies.
        num_ranks: The number of data-parallel ranks that share the state; for hsdp, the ranks of one group.
        tensor: The degree of tensor parallelism.
    """
    row = STRATEGIES[strategy]
    placements = tensor_cuts(model_of(name), tensor)
    if row.cuts_parameters:
        cut = Split(dim=None if row.package else 0, axis="dp_shard")
        placements = {key: replace(one, splits=(*one.splits, cut)) for key, one in placements.items()}
    return state_bytes(
        placements,
        {"dp_shard": num_ranks if row.cuts_anything else 1, "tp": tensor},
        cut_gradients=row.cuts_gradients,
        cut_optimizer=row.cuts_optimizer,
        weight_bytes=lambda _: 4,
        optimizer_bytes=lambda _, number: (12 if row.package else 8) * number,
    )


def tensor_cuts(model: Any, degree: int) -> Placements:
    """Return the placements of parameters on tensor ranks, by the plan of the model's family."""
    placements = whole(model)
    plan = FAMILIES[model.config.model_type].tensor
    if degree == 1 or plan is None:
        return placements
    return {name: _cut(model, one, plan) for name, one in placements.items()}


def _cut(model: Any, placement: ParameterPlacement, plan: TensorPlan) -> ParameterPlacement:
    path, _, kind = placement.name.rpartition(".")
    module = relative_name(model, path)
    if any(matches(pattern, module) for pattern in (*plan.columns, *plan.embeddings)):
        return replace(placement, splits=(Split(dim=0, axis="tp"),))
    if kind == "weight" and any(matches(pattern, module) for pattern in plan.rows):
        return replace(placement, splits=(Split(dim=1, axis="tp"),))
    return placement


def largest_stage(name: str, num_stages: int) -> int:
    """Return the number of parameters of the largest stage in the trainer's balanced split."""
    model = model_of(name)
    return max(stage_sizes(model, split_stages(model, num_stages, None)))


def sent_by_data_parallel(name: str, strategy: str, num_ranks: int) -> float:
    """Return the bytes that a rank sends in an optimizer step of one microbatch, with ring algorithms in fp32.

    An all-reduce of P elements sends 2 P (N - 1) / N elements, an all-gather or a reduce-scatter half of that.
    Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7; there, stages 1 and 2 reduce each gradient to its
    rank, but DeepSpeed reduces it for all.
    """
    row = STRATEGIES[strategy]
    stays_gathered = bool(row.package) and row.cuts_parameters and num_parameters(name) < 500e6
    passes = 3 if row.cuts_anything and not stays_gathered else 2
    assert f"{passes}P" in row.communication, "the table of strategies says otherwise"
    return passes * num_parameters(name) * FP32_BYTES * (num_ranks - 1) / num_ranks


@dataclass(frozen=True)
class Microbatch:
    """The size of a microbatch."""

    rows: int
    length: int  # tokens per row


def hidden_bytes(name: str, batch: Microbatch) -> int:
    """Return the bytes of the hidden states between two layers, in fp32."""
    config: Any = model_of(name).config
    return batch.rows * batch.length * config.hidden_size * FP32_BYTES


def sent_by_tensor_rank(name: str, batch: Microbatch, degree: int) -> float:
    """Return the bytes that a tensor rank sends for one microbatch.

    Each layer has two all-reduces in the forward pass and two in the backward pass.
    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """
    config: Any = model_of(name).config
    return 4 * config.num_hidden_layers * hidden_bytes(name, batch) * 2 * (degree - 1) / degree


def activations(name: str, batch: Microbatch, tensor: int = 1, sequence: bool = False) -> Mapping[str, float]:
    """Return the bytes that the layers keep for the backward pass in 16 bits, by kind of recomputation.

    "none" keeps a layer's attention scores `[rows, heads, length, length]`, their softmax and its dropout.
    "scores again" recomputes them ("selective" in the paper).
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), equations 1, 2, 4 and 6, and section 5.
    """
    config: Any = model_of(name).config
    unit = batch.length * batch.rows * config.hidden_size  # elements of the hidden states
    scores = 5 * config.num_attention_heads * batch.length / config.hidden_size / tensor
    rest = 34 / tensor if sequence else 10 + 24 / tensor
    return {
        "none": config.num_hidden_layers * unit * (rest + scores),
        "scores again": config.num_hidden_layers * unit * rest,
        "full": config.num_hidden_layers * unit * 2,
    }
