"""What the trainer must know of an architecture, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TensorPlan:
    """How tensor ranks cut an architecture, after Shoeybi et al. 2019 (arXiv:1909.08053).

    Patterns are names of modules relative to the base model, or, for the heads around it, to the whole model; `*`
    stands for one part of a name, and `(this|that)` for either. Those of `columns`, `rows`, `shared_inputs`,
    `attention`, `divided`, `partial`, `split_dropouts` and `head_dropouts` must be found; those of the rest depend on
    the head.
    """

    columns: Mapping[str, int]  # cut by outputs; the number is that of the fused blocks (q, k and v in one: 3)
    rows: tuple[str, ...]  # cut by inputs, their outputs summed
    attention: tuple[str, ...]  # what calls the attention function, with this rank's heads
    # What hands one input to several columns: that input's gradient is summed once, here. It must use the input for
    # nothing else. The columns below no such module each sum their own.
    shared_inputs: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()  # cut over the vocabulary
    head_embeddings: tuple[str, ...] = ()  # vectors of one number for each attention head, cut by heads
    vocabulary_heads: tuple[str, ...] = ()  # logits cut over the vocabulary, for `vocab_parallel_cross_entropy`
    whole: tuple[str, ...] = ()  # computed by every rank: small, or without a partner
    # Held whole, but applied to this rank's heads or features only: each rank has a part of the gradient.
    partial: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("num_attention_heads",)  # keys of the configuration that must divide by the degree
    # Attributes that hold a size of which a rank has only its part.
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split_dropouts: tuple[str, ...] = ()  # dropouts between a column and a row: on this rank's features
    head_dropouts: tuple[str, ...] = ()  # dropouts of attention probabilities: on this rank's heads
    # Whether layers may be given this rank's positions only: `shared_inputs` then stands before everything that looks
    # at other positions, and at the module's entry they are gathered.
    sequence_parallel: bool = False


@dataclass(frozen=True)
class LayerStack:
    """Layers that follow one another, with what stands around them; an encoder has one, an encoder-decoder two.

    Patterns are those of `TensorPlan`.
    """

    layers: str
    before: tuple[str, ...]  # modules with parameters that are used before the first layer
    after: tuple[str, ...] = ()  # modules with parameters between the last layer and the next stack
    result: str | None = None  # of a stack that another follows: the module that gives its output
    result_as: str | None = None  # and the argument by which the model takes that output instead of computing it
    num_results: int = 1  # tensors that a layer returns, hidden states first
    # What the first layer computes for all others of its stack: a module in it, and the attribute, of the module around
    # it, that says so. The first layer of each stage gets a copy.
    first_layer: tuple[str, str] | None = None


@dataclass(frozen=True)
class StagePlan:
    """Where pipeline stages may cut an architecture: between layers. What stands nowhere here is of the last stage."""

    stacks: tuple[LayerStack, ...]
    # Whether layers change the shape of what passes through them, as those of a convolutional network do: shapes and
    # costs are then those of a forward pass over an image.
    changes_shape: bool = False


@dataclass(frozen=True)
class ModelFamily:
    """One architecture of transformers.

    Names are relative to the base model (`model.base_model`); patterns are those of `TensorPlan`.
    """

    model_type: str  # of its configuration in transformers
    layers: str  # the repeated layers, which are sharded and recomputed one by one
    tensor: TensorPlan | None  # None: nothing here cuts its layers
    stages: StagePlan | None = None  # None: not to be cut into pipeline stages
    shared_dropouts: tuple[str, ...] = ()  # dropouts of a tensor that all rows of a batch share
    undeclared_keys: tuple[str, ...] = ()  # of the configuration: read by the model, but not declared by transformers


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a family stands for the module `name`: `*` is one part of it, `(this|that)` either."""
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"[^.]+"), name) is not None


def relative_name(model: Any, name: str) -> str:
    """The name of a module of `model` as patterns say it: relative to the base model, or else to the whole."""
    return name if model.base_model is model else name.removeprefix(f"{model.base_model_prefix}.")
