"""The axis over which a feature cuts sequences in whole layers, as the trunk uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from trainer.base.extensions import registered, resolved
from trainer.parallel.row_groups import RowGroups
from trainer.recipe.plan import Layout

if TYPE_CHECKING:
    from trainer.parallel.sharded_sequence import LayerCut


class SequenceAxis(ABC):
    """The cut of sequences over the context axis; a feature registers it by the key with the number of its ranks."""

    @abstractmethod
    def check(self, model_type: str) -> None:
        """Refuse a family that it does not cut.

        Raises:
            UsageError: it does not cut the family.
        """

    @abstractmethod
    def set_attention(self, config: Any, groups: RowGroups) -> None:
        """Set the function of attention in the configuration of a model."""

    @abstractmethod
    def layer_cut(self, config: Any, groups: RowGroups) -> LayerCut:
        """Return the cut of a stack of layers; each stack has another, because lengths of sequences differ."""

    @abstractmethod
    def notes(self, config: Any, layout: Layout) -> list[str]:
        """Return notes for the user on the cut of a model."""


def sequence_axis() -> SequenceAxis:
    """Return the registered axis."""
    (row,) = registered("axis")  # the mesh has one such axis
    axis: SequenceAxis = resolved(row.value)()
    return axis


def axis_notes(config: Any, layout: Layout) -> list[str]:
    """Return notes on the cut of sequences in whole layers; none for one rank."""
    return sequence_axis().notes(config, layout) if layout.cp > 1 else []
