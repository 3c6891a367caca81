"""Draws a layout as text: which rank holds which pipeline stages, replica, shard and tensor part.

It knows numbers and names only; what the stages of a model hold is counted elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from trainer.recipe.plan import RunPlan

MAX_LINES = 16
"""Where there are more ranks, one line stands for several."""


@dataclass(frozen=True)
class StageContents:
    """What a pipeline stage has of the model, before tensor and data-parallel ranks share it."""

    layers: tuple[str, ...]
    num_parameters: int


@dataclass(frozen=True)
class _Axis:
    """A column of the drawing."""

    title: str
    cells: tuple[str, ...]  # what the ranks along the axis hold, in order
    size: int


def layout_lines(plan: RunPlan) -> list[str]:
    """A table of the ranks; empty for one process.

    Up to `MAX_LINES` ranks have a line each. Of more, the inner axes are folded: a line then stands for all ranks that
    share the outer ones.
    """
    axes = _axes(plan)
    if not axes:
        return []
    fitting = [count for count in range(len(axes) + 1) if prod(axis.size for axis in axes[:count]) <= MAX_LINES]
    num_open = max(fitting[-1], 1 if plan.pipeline is not None else 0)  # what is on which stage is always said
    rows = list(_rows(axes[:num_open], axes[num_open:]))
    if len(rows) > MAX_LINES:
        rows = [*rows[: MAX_LINES - 2], ("...", *("" for _ in axes)), rows[-1]]
    header = ("ranks" if num_open < len(axes) else "rank", *(axis.title for axis in axes))
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = (zip(row, widths, strict=True) for row in (header, *rows))
    table = ["  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines]
    return table + ["(of neighbouring ranks, the rightmost column differs)"] * (len(axes) - num_open > 1)


def _axes(plan: RunPlan) -> list[_Axis]:
    """The axes of more than one rank, outermost first: ranks are numbered along the innermost first."""
    layout, axes = plan.layout, []
    if plan.pipeline is not None:
        held = [plan.pipeline.stages_of(rank) for rank in range(layout.pp)]
        title = "stage" if plan.pipeline.stages_per_rank == 1 else "stages"
        axes.append(_Axis(title, tuple(", ".join(map(str, stages)) for stages in held), layout.pp))
    for title, size in (("replica", layout.dp_replicate), ("shard", layout.dp_shard), ("tensor", layout.tp)):
        axes.append(_Axis(title, tuple(map(str, range(size))), size))
    return [axis for axis in axes if axis.size > 1]


def _rows(opened: Sequence[_Axis], folded: Sequence[_Axis]) -> Iterator[tuple[str, ...]]:
    many = prod(axis.size for axis in folded)
    rest = tuple(f"{axis.cells[0]}-{axis.cells[-1]}" for axis in folded)
    for number, cells in enumerate(product(*(axis.cells for axis in opened))):
        first = number * many
        yield (f"{first}-{first + many - 1}" if many > 1 else str(first), *cells, *rest)


def stage_lines(plan: RunPlan, stages: Sequence[StageContents] | None) -> list[str]:
    """What each stage of a pipeline holds, in fp32; None: the model is not at hand."""
    if plan.pipeline is None:
        return []
    if stages is None:
        return ["its layers are balanced over the stages when the model is loaded"]
    layout, cuts = plan.layout, plan.strategy.cuts_parameters
    shards = layout.dp_shard if cuts else 1
    if layout.tp > 1:
        whose = "before tensor and data-parallel cuts" if shards > 1 else "before tensor cuts"
        shards = 1
    else:
        whose = "a rank"
    rows = [
        (
            f"stage {number}",
            layers_text(stage.layers),
            f"{stage.num_parameters:,} parameters",
            f"{4 * -(-stage.num_parameters // shards) / 2**20:,.1f} MiB",
        )
        for number, stage in enumerate(stages)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{name:<{widths[0]}}  {layers:<{widths[1]}}  {count:>{widths[2]}}  {size:>{widths[3]}} {whose}"
        for name, layers, count, size in rows
    ]


def layers_text(names: Sequence[str]) -> str:
    """The layers of a stage in words: `encoder.layer.0 to encoder.layer.5`."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
