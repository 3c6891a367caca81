"""The process groups of the ranks that process the same rows: those of the tensor and of the context axis."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.parallel.groups import Group, planned_group
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import CONTEXT_AXIS, ROWS_AXIS, TENSOR_AXIS


@dataclass(frozen=True)
class RowGroups:
    """The groups of the ranks that process the same rows; None stands for one rank.

    `tensor` ranks shard the matrices of layers, `context` ranks the positions. `joint` are the ranks of both axes; None
    if one of them has one rank.
    """

    tensor: Group = None
    context: Group = None
    joint: Group = None

    @classmethod
    def of(cls, mesh: ParallelMesh) -> RowGroups:
        """Return the groups of this rank."""
        tensor, context = mesh.group(TENSOR_AXIS), mesh.group(CONTEXT_AXIS)
        return cls(tensor, context, mesh.group(ROWS_AXIS) if tensor and context else None)

    @classmethod
    def planned(cls, tensor: int, context: int) -> RowGroups:
        """Return stand-ins for the groups, as their first rank sees them."""
        several = tensor > 1 and context > 1
        groups = ((tensor, tensor > 1), (context, context > 1), (tensor * context, several))
        return cls(*(planned_group(size) if has_ranks else None for size, has_ranks in groups))

    @property
    def vocabulary(self) -> Group:
        """The ranks that shard the vocabulary: all of them."""
        return self.joint or self.tensor or self.context

    def along(self, axis: str) -> Group:
        """Return the group along an axis of the mesh on which these ranks differ."""
        return {TENSOR_AXIS: self.tensor, CONTEXT_AXIS: self.context, ROWS_AXIS: self.vocabulary}[axis]
