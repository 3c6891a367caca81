"""The key of the section `logging` of a recipe, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from trainer.recipe.schema import Data, Logging, Parallel
from trainer.recipe.schema.section import Contradiction, Section, clash

_KEY = "logging.rows"


class RowKeys(Section):
    """Whether a run keeps the loss of each training row."""

    rows: bool = False
    """Keep loss and margin of each training row at each epoch in the folder `rows` of the run, for `trainer audit`."""


def contradictions(logging: Logging, data: Data, parallel: Parallel, cuda_graphs: Any) -> Iterator[Contradiction]:
    if not cast(RowKeys, logging).rows:
        return
    if getattr(data, "streaming", False):
        yield clash("is true, but a stream (`data.streaming`) has no row numbers; set one of them to false", _KEY)
    if getattr(parallel, "context", 1) > 1:
        yield clash("is true, but context ranks hold parts of rows; set `parallel.context` to 1", _KEY)
    if cuda_graphs is True:
        yield clash("is true, but a CUDA graph shows no scores of rows; set `cuda_graphs` to false", _KEY)
