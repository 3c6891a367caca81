"""The key `parallel.numa` of a recipe."""

from __future__ import annotations

from typing import Literal, cast

from trainer.recipe.schema import Parallel, Section


class NumaKeys(Section):
    """The cores of the ranks that `trainer run` starts."""

    numa: Literal["auto", "off"] = "auto"
    """auto: each of several local ranks with GPUs runs on the cores of its GPU's NUMA node, within those that the
    process may use; off: on all of these. Ranks of other launchers keep their cores."""


def binds(parallel: Parallel) -> bool:
    """Return whether local ranks run on the cores beside their GPUs."""
    return cast(NumaKeys, parallel).numa == "auto"
