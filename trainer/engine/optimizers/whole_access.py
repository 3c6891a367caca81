"""Whole tensors of sharded parameters, for updates that depend on all elements of a matrix.

The matrices of a batch are gathered one by one. All ranks compute their whole update and keep their parts, so a layout
changes rounding only. Parameters of one shape are stacked and updated at once, so that a GPU starts few kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from torch import Tensor, nn

from trainer.base.batches import batches
from trainer.engine.optimizers.tensor_batches import alike, most_elements, stack_of, stepped
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.gathering import gather_on_all, is_whole, local_part, part_like


@dataclass(frozen=True)
class WholeAccess:
    """Whole tensors of sharded parameters; without a mesh, every tensor is whole."""

    placements: Mapping[nn.Parameter, ParameterPlacement]
    mesh: ParallelMesh | None = None

    def placement(self, parameter: nn.Parameter) -> ParameterPlacement:
        if self.mesh is None:
            return ParameterPlacement("", tuple(parameter.shape))
        return self.placements[parameter]

    def batches(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield batches of parameters of one shape and placement that have gradients; on all ranks in one order."""

        def kind(parameter: nn.Parameter) -> Hashable:
            placement = self.placement(parameter)
            # Equal splits too, because `_cut_over` asks the first parameter of a batch only.
            return placement.shape, placement.splits, parameter.dtype

        for group in alike(stepped(parameters), kind):
            most = most_elements(local_part(group[0]).device)
            yield from batches(group, lambda parameter: prod(self.placement(parameter).shape), most)

    def _cut_over(self, batch: Sequence[nn.Parameter]) -> ParallelMesh | None:
        mesh, first = self.mesh, batch[0]
        return None if mesh is None or is_whole(first, self.placements[first], mesh) else mesh

    def gather(self, parameters: Sequence[nn.Parameter], parts: Tensor) -> Tensor:
        """Return whole tensors on every rank for this rank's parts; a collective for each one that is sharded.

        Args:
            parts: plain tensors `[n, *shape]` with the shape of this rank's parts of them.
        """
        if (mesh := self._cut_over(parameters)) is None:
            return parts
        # One collective for each matrix, in the order of `batches`, which all ranks share.
        gathered = partial(gather_on_all, mesh=mesh)
        return stack_of([gathered(part, p, self.placements[p]) for p, part in zip(parameters, parts, strict=True)])

    def parts(self, parameters: Sequence[nn.Parameter], whole: Tensor) -> Tensor:
        """Return this rank's parts of whole tensors `[n, *shape]`."""
        if (mesh := self._cut_over(parameters)) is None:
            return whole
        cut = partial(part_like, mesh=mesh)
        return stack_of([cut(full, p, self.placements[p]) for p, full in zip(parameters, whole, strict=True)])


def gradients_of(batch: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_part(parameter.grad) for parameter in batch if parameter.grad is not None]
