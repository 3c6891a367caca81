"""The section `model`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.base.extensions import registered
from trainer.recipe.schema.fields import HubOrPathField, Name, NameKey, Patterns, Revision
from trainer.recipe.schema.section import Contradiction, Section, clash, hub_or_folder, missing_folder


class Adapter(Section):
    """LoRA (Hu et al. 2021) or DoRA (Liu et al. 2024): trainable low-rank products beside frozen linear layers."""

    type: Literal["lora", "dora"]
    """`dora` also trains the norm of each row of the adapted weights."""
    rank: int = Field(8, ge=1)
    """Rank of each product."""
    alpha: float = Field(16.0, gt=0)
    """Each product is multiplied by `alpha / rank`."""
    rank_stabilised: bool = False
    """Multiply by `alpha / sqrt(rank)` instead (Kalajdzievski 2023)."""
    rank_pattern: dict[NameKey, Annotated[int, Field(ge=1)]] = Field({})
    """Ranks of layers by names or patterns; the first match applies."""
    alpha_pattern: dict[NameKey, Annotated[float, Field(gt=0)]] = Field({})
    """Other values of `alpha`, as in `rank_pattern`."""
    start: Literal["pissa", "pissa_niter_16", "loftq"] | None = None
    """Begin with the largest singular values of each weight (`pissa`), approximately (`pissa_niter_16`), or of the
    errors of its quantisation (`loftq`); null: with zero."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the input of each product."""
    targets: Patterns | Literal["all-linear"] | None = None
    """Names of linear layers, or patterns such as `*.query`; `all-linear`: all but heads and layers trained whole;
    null: those of the repeated layers."""
    modules_to_save: list[Name] | None = None
    """Names or patterns of modules to train whole; null: those that the pretrained model lacks, such as the task's
    head."""

    def rank_of(self, layer: str) -> int:
        """Return the rank of the product of a layer, by its name in the model."""
        return next((rank for pattern, rank in self.rank_pattern.items() if matches(pattern, layer)), self.rank)

    def alpha_of(self, layer: str) -> float:
        """Return the `alpha` of the product of a layer."""
        return next((alpha for pattern, alpha in self.alpha_pattern.items() if matches(pattern, layer)), self.alpha)

    def scaling_of(self, layer: str) -> float:
        """Return the factor of the product of a layer."""
        rank = self.rank_of(layer)
        return self.alpha_of(layer) / (math.sqrt(rank) if self.rank_stabilised else rank)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the name of a module or its last parts, as `target_modules` of PEFT."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


class Model(Section):
    """The Hugging Face model: pretrained (`name_or_path`) or with random weights (`config` alone)."""

    name_or_path: HubOrPathField | None = None
    """A name on the hub, or a folder."""
    revision: Revision = None
    config: dict[str, Any] | None = None
    """Alone: a transformers configuration with its "model_type", for random weights. With `name_or_path`: keys to
    replace."""
    tokenizer: HubOrPathField | None = None
    """A name on the hub, or a folder; null: the tokenizer of the model."""
    new_tokens: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Tokens to add to the tokenizer. Embedding and head get rows for those without one; null: none."""
    new_head: bool = False
    """Draw the weights outside of the base model at random, such as a classifier of other classes."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """All dropout probabilities of the model, 0 also of stochastic depth; null: as configured."""
    freeze: Patterns | None = None
    """Names or patterns of modules and parameters that are not trained, such as `embeddings`."""
    unfreeze_at_step: Annotated[int, Field(ge=1)] | None = None
    """Step after which the weights of `freeze` are trained too; null: never."""
    adapter: Adapter | None = None
    """An adapter to train beside frozen weights; null: none."""

    @property
    def is_partly_frozen(self) -> bool:
        """Whether the recipe freezes weights; checkpoints then hold the trained ones and a digest of the others."""
        return self.adapter is not None or (self.freeze is not None and self.unfreeze_at_step is None)

    @property
    def is_random(self) -> bool:
        """Whether the weights are drawn at random, for a model that `config` describes."""
        return self.name_or_path is None

    def contradictions(self) -> Iterator[Contradiction]:
        yield from hub_or_folder("model.name_or_path", self.name_or_path, self.revision)
        yield from missing_folder("model.tokenizer", self.tokenizer)
        yield from self._contradictions_of_origin()
        if self.adapter is not None and self.freeze is not None:
            text = "has no effect with `model.adapter`, which freezes all other weights; remove it"
            yield clash(text, "model.freeze", "model.adapter")
        if self.unfreeze_at_step is not None and self.freeze is None:
            yield clash("has no effect without `model.freeze`; remove it", "model.unfreeze_at_step", "model.freeze")
        if self.adapter is not None and self.adapter.start == "loftq" and not registered("weight_form"):
            text = 'is "loftq", which begins with errors of quantised weights, but no key quantises any; set it to null'
            yield clash(text, "model.adapter.start")

    def _contradictions_of_origin(self) -> Iterator[Contradiction]:
        name, config = "model.name_or_path", "model.config"
        if not self.is_random:
            if "model_type" in (self.config or {}):
                text = (
                    "with a `model_type` and `model.name_or_path` exclude each other: random or pretrained weights;"
                    " set one of them to null"
                )
                yield clash(text, config, name)
        elif self.config is None:
            yield clash("is missing; set it, or `model.config` for random weights", name, config)
        else:
            if not isinstance(self.config.get("model_type"), str):
                yield clash('must hold a "model_type", such as "bert"', config)
            if self.new_head:
                yield clash("is true, but all weights are random; set it to false", "model.new_head")
            if self.revision is not None:
                text = "applies to a hub repository, but the weights are random (`model.config`); remove it"
                yield clash(text, "model.revision")
