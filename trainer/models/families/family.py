"""Description of an architecture as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trainer.parallel.groups import Group
from trainer.parallel.placement import Placements

PartCut = Callable[[nn.Module, str, Group], Placements]
"""A function that leaves a module its part of its parameters, in place; it returns their placements after a prefix."""


@dataclass(frozen=True)
class TensorPlan:
    """The tensor parallelism of an architecture, after Shoeybi et al. 2019 (arXiv:1909.08053).

    Patterns are names of modules relative to the base model, or to the whole model for the heads around it. `*` matches
    one part of a name, and `(this|that)` matches either.

    Every pattern of `columns`, `rows`, `shared_inputs`, `attention`, `divided`, `partial`, `parts`, `split_dropouts`
    and `head_dropouts` must match a module. Matches of the other patterns depend on the head.
    """

    columns: Mapping[str, int]  # sharded by outputs; the value counts fused blocks (3 for q, k and v in one)
    rows: tuple[str, ...]  # sharded by inputs; their outputs are summed
    attention: tuple[str, ...]  # modules that call the attention function with this rank's heads
    # Modules that pass one input to several columns and do not use it otherwise. The input's gradient is summed once,
    # here. Each column outside such modules sums its own input gradient.
    shared_inputs: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()  # sharded over the vocabulary
    head_embeddings: tuple[str, ...] = ()  # vectors with one element per attention head, sharded by heads
    vocabulary_heads: tuple[str, ...] = ()  # logits sharded over the vocabulary, for `vocab_parallel_cross_entropy`
    vocabulary_buffers: tuple[str, ...] = ()  # buffers `[1, vocabulary]` of the whole model, added to its logits
    whole: tuple[str, ...] = ()  # replicated: small, or without a matching column or row
    # Replicated, but applied to this rank's heads or features only; each rank has a partial gradient.
    partial: tuple[str, ...] = ()
    # Cuts of further parameters.
    parts: Mapping[str, PartCut] = field(default_factory=dict)
    heads: tuple[str, ...] = ("num_attention_heads",)  # configuration keys with values that the degree must divide
    # Attributes with a size that is divided by the number of tensor ranks.
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split_dropouts: tuple[str, ...] = ()  # dropouts between a column and a row, on this rank's features
    head_dropouts: tuple[str, ...] = ()  # dropouts of attention probabilities, on this rank's heads
    # Whether the inputs of layers may be sharded by position. Every module that reads other positions must then be in
    # or below a module of `shared_inputs`, which gathers the positions at its entry.
    sequence_parallel: bool = False
    # Whether layers may have this rank's positions only, and all weights. Every module that reads other positions must
    # then be in `attention`; its other inputs are a mask and rotations.
    context_parallel: bool = False


@dataclass(frozen=True)
class LayerStack:
    """A sequence of layers and the modules around it; an encoder has one stack, an encoder-decoder two.

    Patterns are as in `TensorPlan`.
    """

    layers: str
    before: tuple[str, ...]  # modules with parameters that are used before the first layer
    after: tuple[str, ...] = ()  # modules with parameters between the last layer and the next stack
    result: str | None = None  # the module that returns the stack's output, if another stack follows
    result_as: str | None = None  # the model's argument that replaces the computation of that output
    num_results: int = 1  # tensors that a layer returns, hidden states first
    # A module of the first layer with results for all layers of the stack, and the attribute of its parent that marks
    # its presence. The first layer of each stage gets a copy.
    first_layer: tuple[str, str] | None = None


@dataclass(frozen=True)
class StagePlan:
    """The layers between which an architecture is cut into pipeline stages; other modules are on the last stage."""

    stacks: tuple[LayerStack, ...]
    # If layers change the shape of their input, as in a convolutional network: the shape of an input of one row, by the
    # configuration. A forward pass over it gives the costs of layers, so it must depend on the recipe only.
    costed_row: Callable[[Any], tuple[int, ...]] | None = None
    # The positions of hidden states, by configuration and inputs; None: those of `input_ids`.
    positions: Callable[[Any, Mapping[str, Tensor]], int] | None = None


@dataclass(frozen=True)
class ModelFamily:
    """One architecture of transformers.

    Names are relative to the base model (`model.base_model`); patterns are as in `TensorPlan`.
    """

    model_type: str  # the `model_type` of its configuration in transformers
    layers: str  # the repeated layers, which are sharded and recomputed separately
    tensor: TensorPlan | None  # None: no tensor parallelism
    stages: StagePlan | None = None  # None: no pipeline stages
    shared_dropouts: tuple[str, ...] = ()  # dropouts of a tensor that all rows of a batch share
    # Names for the dropouts that modules call as functions, in the order of the calls in a forward pass. Each becomes a
    # submodule, which `TensorPlan` may name.
    called_dropouts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The forward functions of modules that drop and add a residual; a `KeyedDropout` does both there.
    residual_outputs: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    shared_second_calls: tuple[str, ...] = ()  # dropouts of such a tensor in their second call of a forward pass
    # Methods of modules that multiply such a tensor by weights of their linear layers.
    shared_products: Mapping[str, str] = field(default_factory=dict)
    starts_with_padding: bool = False  # whether a decoder starts with the padding token if no start token is set
    # whether layers hand unknown arguments on to the attention function, and may omit padding
    padding_free: bool = False
    change: Callable[[Any], object] | None = None  # changes a whole model before it is cut
    prepare: Callable[[Any, Any], None] | None = None  # a `ModelChange` of each training (`engine/forward.py`)
    undeclared_keys: tuple[str, ...] = ()  # configuration keys that the model reads and transformers does not declare


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the module `name`; `*` matches one part, `(this|that)` either."""
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"[^.]+"), name) is not None


def relative_name(model: Any, name: str) -> str:
    """Return the name of a module as in patterns: relative to the base model, or to the whole model outside of it."""
    return name if model.base_model is model else name.removeprefix(f"{model.base_model_prefix}.")
