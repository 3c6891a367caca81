"""Token ids on disk as a stage of a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from trainer.base.terminal import say
from trainer.recipe.schema import Recipe, Section

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe

_FOLDER = "shards"


class EncodeStage(Section):
    """The keys of a stage that writes the token ids of its recipe's texts, from which the stages after it train."""

    to: Literal["parquet", "arrow", "megatron"] = "parquet"
    """Format of the shards."""
    shard_rows: Annotated[int, Field(gt=0)] = 100_000
    """Most rows of a shard."""

    def describe(self, recipe: Recipe) -> str:
        """Return what the stage does."""
        return f"writes the token ids of `data.train` for {recipe.task.type}, as {self.to}"

    def changes(self, folder: Path, is_done: bool) -> dict[str, Any]:
        """Return the keys of later stages that read the shards; none stand for them before."""
        if not is_done:
            return {}
        from trainer.tools.encode.encoding import RECIPE  # brings torch
        from trainer.training.row_encoding import ENCODED

        values, made_by = (json.loads((folder / _FOLDER / name).read_text()) for name in (RECIPE, ENCODED))
        before = made_by["made_by"]["data"]
        # The recipe of the shards lacks keys of the texts, such as their format.
        data = dict.fromkeys(("format", "map", "maps"))
        data |= {key: value for key, value in values["data"].items() if key == "source" or value != before.get(key)}
        return {"data": data, "task": {"text": values["task"]["text"]}}

    def problem(self, recipe: Recipe, later: Recipe, written: Mapping[str, Any]) -> str | None:
        """Return why a later stage without rows of its own cannot train from the shards."""
        ours, theirs = recipe.data, later.data
        if {"source", "name", "train"} & (written.get("data") or {}).keys():
            return None
        for key in ("type", "text"):
            if key in (written.get("task") or {}):
                return (
                    f"`task.{key}` follows from the stage that writes its token ids; remove it, or name rows in"
                    " `data.train`"
                )
        if "packing" not in type(recipe.task).model_fields and ours.max_length != theirs.max_length:
            return (
                f"`data.max_length` must be {ours.max_length}, as in the stage that writes its token ids, but is"
                f" {theirs.max_length}; write them again by another stage before it"
            )
        return None

    def run(self, resolved: ResolvedRecipe, folder: Path, processes: int | None) -> None:
        """Write the shards, or those that a stopped run left.

        Raises:
            TrainerError: as `encode_recipe`.
        """
        from trainer.tools.encode.encoding import EncodeRequest, encode_recipe, lines

        request = EncodeRequest(folder / _FOLDER, self.to, processes, self.shard_rows)
        say(*lines(encode_recipe(resolved, request), request)[:-1])
