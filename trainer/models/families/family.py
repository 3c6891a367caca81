"""What the trainer must know of an architecture, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFamily:
    """One architecture of transformers.

    Names are relative to the base model (`model.base_model`); `*` stands for one part of a name.
    """

    model_type: str  # of its configuration in transformers
    layers: str  # the repeated layers, which are sharded and recomputed one by one
