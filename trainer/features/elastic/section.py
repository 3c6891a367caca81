"""The key `parallel.elastic` of a recipe."""

from __future__ import annotations

from typing import Literal, cast

from trainer.recipe.schema import Parallel, Section

Axis = Literal["none", "data", "shards"]


class ElasticKeys(Section):
    """The axis that follows the number of ranks."""

    elastic: Axis = "none"
    """Axis that follows the number of ranks while nodes join and leave (`torchrun --nnodes MIN:MAX`). data: the
    data-parallel ranks, under hsdp in whole shard groups; shards: under hsdp, one shard group may be smaller; none:
    such a launch is refused."""


def axis_of(parallel: Parallel) -> Axis:
    """Return the axis that follows the number of ranks."""
    return cast(ElasticKeys, parallel).elastic
