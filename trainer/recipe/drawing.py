"""A layout as text: the pipeline stages, replica, shard and tensor rank of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from trainer.recipe.plan import RunPlan

MAX_LINES = 16
"""With more ranks, one line stands for several."""


@dataclass(frozen=True)
class StageContents:
    """The layers and parameters of a pipeline stage, before tensor and data-parallel sharding."""

    layers: tuple[str, ...]
    num_parameters: int


@dataclass(frozen=True)
class _Axis:
    title: str
    cells: tuple[str, ...]  # one for each rank along the axis
    size: int


def layout_table(plan: RunPlan) -> tuple[list[tuple[str, ...]], int]:
    """Return the header and the rows of a table of the ranks, and the number of axes that rows stand for.

    With more than `MAX_LINES` ranks, one line stands for all ranks with the same coordinates on the outer axes.
    """
    axes = _axes(plan)
    if not axes:
        return [], 0
    fitting = [count for count in range(len(axes) + 1) if prod(axis.size for axis in axes[:count]) <= MAX_LINES]
    num_open = max(fitting[-1], 1 if plan.pipeline is not None else 0)  # pipeline stages are always shown
    rows = list(_rows(axes[:num_open], axes[num_open:]))
    if len(rows) > MAX_LINES:
        rows = [*rows[: MAX_LINES - 2], ("...", *("" for _ in axes)), rows[-1]]
    header = ("ranks" if num_open < len(axes) else "rank", *(axis.title for axis in axes))
    return [header, *rows], len(axes) - num_open


def _axes(plan: RunPlan) -> list[_Axis]:
    """Return the axes of size above 1, outermost first; consecutive ranks differ along the innermost axis."""
    layout, axes = plan.layout, []
    if plan.pipeline is not None:
        held = [plan.pipeline.stages_of(rank) for rank in range(layout.pp)]
        title = "stage" if plan.pipeline.stages_per_rank == 1 else "stages"
        axes.append(_Axis(title, tuple(", ".join(map(str, stages)) for stages in held), layout.pp))
    titles = {"replica": layout.dp_replicate, "shard": layout.dp_shard, "experts": layout.ep, "context": layout.cp}
    for title, size in {**titles, "tensor": layout.tp}.items():
        axes.append(_Axis(title, tuple(map(str, range(size))), size))
    return [axis for axis in axes if axis.size > 1]


def _rows(opened: Sequence[_Axis], folded: Sequence[_Axis]) -> Iterator[tuple[str, ...]]:
    many = prod(axis.size for axis in folded)
    rest = tuple(f"{axis.cells[0]}-{axis.cells[-1]}" for axis in folded)
    for number, cells in enumerate(product(*(axis.cells for axis in opened))):
        first = number * many
        yield (f"{first}-{first + many - 1}" if many > 1 else str(first), *cells, *rest)


def layers_text(names: Sequence[str]) -> str:
    """Return the range of layers of a stage: `encoder.layer.0 to encoder.layer.5`."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
