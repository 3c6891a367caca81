"""Faults that a layout can have, each planted at its own place of a tiny training, and what a certificate must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.features.fingerprints.recorded import Fault
from tests.helpers.families import EXPERTS
from tests.helpers.training import TinyTraining
from trainer.parallel.microbatch import Microbatch


@dataclass(frozen=True)
class Planted:
    """A fault, the layout that has it, and the first difference that it makes."""

    plant: Fault
    place: str
    name: str
    cause: str  # a part of the text
    sections: dict[str, Any] = field(default_factory=dict)  # of the layout
    common: dict[str, Any] = field(default_factory=dict)  # of layout and reference
    ranks: int = 1
    rank: int | None = None


def _changed_batches(training: TinyTraining, change: Callable[[Microbatch], Microbatch]) -> None:
    batches = training.loader

    def changed() -> Any:
        for batch in batches:
            yield replace(batch, microbatches=[change(one) for one in batch.microbatches])

    training.loader = changed()


def swap_rows(training: TinyTraining) -> None:
    """Two rows change places; their tokens, masks and labels do."""

    def swap(one: Microbatch) -> Microbatch:
        order = torch.arange(len(one.rows))
        order[[0, 1]] = order[[1, 0]]
        return replace(
            one, inputs={name: tensor[order] for name, tensor in one.inputs.items()}, labels=one.labels[order]
        )

    _changed_batches(training, swap)


def mask_of_another_row(training: TinyTraining) -> None:
    """A row has the attention mask of the next one; its attention sees other keys."""

    def swap(one: Microbatch) -> Microbatch:
        mask = one.inputs["attention_mask"].clone()
        mask[[0, -1]] = mask[[-1, 0]]
        return replace(one, inputs={**one.inputs, "attention_mask": mask})

    _changed_batches(training, swap)


def truncate_a_row(training: TinyTraining) -> None:
    """The last two tokens of a row are missing."""

    def cut(one: Microbatch) -> Microbatch:
        mask, tokens = one.inputs["attention_mask"].clone(), one.inputs["input_ids"].clone()
        last = int(mask[1].sum())
        mask[1, last - 2 : last] = 0
        tokens[1, last - 2 : last] = 0
        return replace(one, inputs={**one.inputs, "attention_mask": mask, "input_ids": tokens})

    _changed_batches(training, cut)


def unsummed_bias(training: TinyTraining) -> None:
    """Tensor ranks do not sum the gradient of a bias that they have in parts."""
    engine: Any = training.engine
    name = "bert.encoder.layer.0.output.dense.bias"
    engine._partial = [(own, placement) for own, placement in engine._partial if placement.name != name]


def tf32_on_rank_1(training: TinyTraining) -> None:
    """One rank rounds the weights of a product to the 10 bits of TF32."""
    if training.mesh.rank == 1:
        layer = _module(training, "bert.encoder.layer.1.intermediate.dense")
        layer.forward = lambda x: F.linear(_tf32(x), _tf32(layer.weight), layer.bias)


def _tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return x + (((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32) - x).detach()


def update_tied_twice(training: TinyTraining) -> None:
    """The optimizer steps a tied weight twice."""
    optimizer, weight = (
        training.engine.optimizer,
        training.model.get_parameter("bert.embeddings.word_embeddings.weight"),
    )
    step = optimizer.step

    def twice() -> None:
        before = weight.detach().clone()
        step()
        with torch.no_grad():
            weight.add_(weight - before)

    optimizer.step = twice  # type: ignore[method-assign]


def another_epsilon(training: TinyTraining) -> None:
    _module(training, "bert.encoder.layer.1.output.LayerNorm").eps = 1e-3


def norm_in_half_precision(training: TinyTraining) -> None:
    layer = _module(training, "bert.encoder.layer.0.attention.output.LayerNorm")
    forward = layer.forward
    layer.forward = lambda x: forward(x.half().float())


def skip_a_residual(training: TinyTraining) -> None:
    """The second stage of a pipeline leaves out the residual of its layer."""
    model: Any = training.model
    if training.mesh.index("pp") == 1:
        output = model.bert.encoder.layer[1].output
        output.forward = lambda hidden, residual: output.LayerNorm(output.dropout(output.dense(hidden)))


def another_adapter_scale(training: TinyTraining) -> None:
    name = "bert.encoder.layer.1.attention.self.query"
    _module(training, name).lora.scaling *= 2


def wrong_denominator(training: TinyTraining) -> None:
    """The loss is divided by the rows of a microbatch more."""
    forward: Any = training.engine._forward
    denominator = forward.denominator
    forward.denominator = lambda batch: denominator(batch) * 1.25


def stale_buffer(training: TinyTraining) -> None:
    """The buffer of token types is one of before."""
    model: Any = training.model
    model.bert.embeddings.token_type_ids = torch.ones_like(model.bert.embeddings.token_type_ids)


def missing_in_norm(training: TinyTraining) -> None:
    engine: Any = training.engine
    engine._placed = engine._placed[:-2]


def one_expert_of_two(training: TinyTraining) -> None:
    """Each of two ranks computes the first one of its two experts in the second layer."""
    experts = _module(training, "model.layers.1.mlp.experts")
    forward = experts.forward
    experts.forward = lambda hidden, index, weights: forward(hidden, index, weights * (index % 2 == 0))


def sparse(num_experts: int = 4) -> dict[str, Any]:
    """Return the sections of a tiny mixture of experts."""
    config = {"model_type": "qwen3_moe", **EXPERTS["qwen3_moe"], "num_experts": num_experts}
    return {"model": {"config": config, "tokenizer": "none"}, "task": {"type": "causal_lm", "text": "text"}}


def _module(training: TinyTraining, name: str) -> Any:
    return training.model.get_submodule(name)


_TINY: dict[str, Any] = {"training": {"global_batch_size": 6, "micro_batch_size": 6}}
_LORA = {"model": {"adapter": {"type": "lora", "rank": 4}}}
_MASKED = {"task": {"type": "masked_lm"}}

FAULTS: dict[str, Planted] = {
    "a row swapped": Planted(
        swap_rows, "forward", "bert.embeddings.word_embeddings", "another order of rows: row 0 has the values of row 1"
    ),
    "a mask of another row": Planted(
        mask_of_another_row, "forward", "bert.embeddings.word_embeddings", "another mask, or a row of another length"
    ),
    "a truncated row": Planted(
        truncate_a_row, "forward", "bert.embeddings.word_embeddings", "another mask, or a row of another length"
    ),
    "a missing sum of a bias": Planted(
        unsummed_bias, "sum over ranks", "bert.encoder.layer.0.output.dense.bias", "sum",
        {"parallel": {"tensor": 2, "sequence": True}}, ranks=2,
    ),
    "tf32 on one rank": Planted(
        tf32_on_rank_1, "forward", "bert.encoder.layer.1.intermediate.dense", "TF32",
        {"training": {"micro_batch_size": 3}}, ranks=2, rank=1,
    ),
    "a tied weight updated twice": Planted(
        update_tied_twice, "update", "bert.embeddings.word_embeddings.weight", "applied twice (it is 2 times",
        common=_MASKED,
    ),
    "epsilon": Planted(another_epsilon, "forward", "bert.encoder.layer.1.output.LayerNorm", "epsilon"),
    "a norm in half precision": Planted(
        norm_in_half_precision, "forward", "bert.encoder.layer.0.attention.output.LayerNorm", "rounding to 16 bits"
    ),
    "a stage that skips a residual": Planted(
        # Dropout adds the residual, in one operation.
        skip_a_residual, "forward", "bert.encoder.layer.1.output.dropout", "skipped residual",
        {"parallel": {"pipeline": {"stages": 2}}}, ranks=2, rank=1,
    ),
    "an adapter's scale": Planted(
        # The factor B is zero at the start, so outputs do not show the scale yet.
        another_adapter_scale, "sum over ranks", "bert.encoder.layer.1.attention.self.query.lora.B",
        "scale of an adapter", common=_LORA,
    ),
    "a wrong denominator": Planted(wrong_denominator, "loss", "", "denominator"),
    "a stale buffer": Planted(stale_buffer, "forward", "bert.embeddings.token_type_embeddings", "stale buffer"),
    "one expert of two": Planted(
        one_expert_of_two, "forward", "model.layers.1.mlp.experts", "experts",
        {"parallel": {"expert": 2}, "training": {"micro_batch_size": 3}}, sparse(), ranks=2,
    ),
    "a part missing in the norm": Planted(missing_in_norm, "norm", "", "leaves out a part"),
}  # fmt: skip


def sections_of(fault: Planted, of_layout: bool) -> dict[str, Any]:
    """Return the sections of a fault's layout, or of its reference."""
    merged: dict[str, Any] = {key: dict(value) for key, value in _TINY.items()}
    for part in (fault.common, fault.sections if of_layout else {}):
        for key, value in part.items():
            merged[key] = {**merged.get(key, {}), **value}
    return merged
