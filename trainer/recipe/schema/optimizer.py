"""The section `optimizer`, one class for each optimizer. Features and other packages register further ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name, Patterns
from trainer.recipe.schema.section import Contradiction, Section


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Name | Patterns
    """Names or patterns of modules and parameters, such as `classifier`."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the schedule; null: that of the optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Not applied to biases and norm weights; null: that of the optimizer."""


ExclusionRow = tuple[Mapping[str, Sequence[Any] | str], str, str]
"""A condition on another key as in `recipe/exclusions.json`, the reason and the remedy."""


def needs_whole_weights(update: str, offloaded: str, others: str) -> tuple[ExclusionRow, ...]:
    """Return the rows of an optimizer that cannot update parts of flattened weights.

    Args:
        update: the reason against DeepSpeed, after "but".
        offloaded: the reason against weights in CPU memory.
        others: the optimizers to use instead.
    """
    return (
        (
            {"parallel.strategy": "another engine"},
            f"DeepSpeed flattens and cuts weights, but {update}",
            f"use {others}, or fsdp",
        ),
        ({"parallel.offload": ["parameters"]}, f"{offloaded} from CPU memory", f'use {others}, or "none"'),
    )


class OptimizerKeys(Section):
    """The keys of every optimizer. A subclass has `name: Literal["NAME"]` and its own keys."""

    implementation: ClassVar[str]  # its `EngineOptimizer`, as "module:class"
    exclusions: ClassVar[Sequence[ExclusionRow]] = ()
    needs_layers: ClassVar[bool] = False  # whether it must know the repeated layers of a model
    replaces_decay: ClassVar[bool] = False  # whether it takes the place of a decaying learning rate
    state_type: ClassVar[str] = "fp32"  # as tables show it
    # Largest relative differences of loss and gradient norm between layouts in fp32; None: those of sums in fp32
    tolerances: ClassVar[tuple[float, float] | None] = None
    foreign_names: ClassVar[Sequence[str]] = ()  # in TrainingArguments; empty: its own name
    difference: ClassVar[str] = ""  # from the optimizer with these names

    name: str
    learning_rate: float = Field(gt=0)
    """Peak learning rate of the schedule."""
    weight_decay: float = Field(0.0, ge=0)
    """Not applied to biases and norm weights."""
    groups: Annotated[list[ParameterGroup], Field(min_length=1)] | None = None
    """Parameters with values of their own, each in one group only."""
    layer_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor of the learning rate from each layer to the one below; the head has the whole rate. null: 1."""

    def contradictions(self) -> Iterator[Contradiction]:
        for index, group in enumerate(self.groups or ()):
            if group.learning_rate is None and group.weight_decay is None:
                text = "must set `learning_rate` or `weight_decay`; to train nothing of it, use `model.freeze`"
                yield Contradiction((("optimizer", "groups", index),), text)


class AdamWKeys(OptimizerKeys):
    """The keys of Adam and its relatives."""

    learning_rate: float = Field(5e-5, gt=0)
    """Peak learning rate of the schedule."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999]
    )
    """Decay rates of the running means of the gradient and of its square."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of the second mean."""


class AdamW(AdamWKeys):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    implementation: ClassVar[str] = "trainer.engine.optimizers.adamw:AdamW"

    name: Literal["adamw"] = "adamw"


class SGD(OptimizerKeys):
    """Stochastic gradient descent."""

    implementation: ClassVar[str] = "trainer.engine.optimizers.sgd:SGD"

    name: Literal["sgd"]
    momentum: float = Field(0.0, ge=0, lt=1)
    """0: no momentum."""


OptimizerSection = AdamW | SGD
