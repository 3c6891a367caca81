"""The keys of streams in the section `data` of a recipe, for files, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from pydantic import Field

from trainer.base.file_formats import file_formats
from trainer.recipe.paths import is_url, shown_value
from trainer.recipe.registered import task_sections
from trainer.recipe.schema import Data, FileData, Recipe, TaskSection
from trainer.recipe.schema.section import Contradiction, clash

_KEY = "data.streaming"


class StreamKeys(FileData):
    """The kind and the windows of a stream."""

    streaming: bool = False
    """Read the training split window by window: Parquet, Arrow or JSON Lines, also from URLs such as
    `s3://bucket/part-*.parquet`; see trainer/features/streams/page.md."""
    shuffle_window: int = Field(16_384, ge=1)
    """With `streaming`: rows that are shuffled together."""

    def contradictions(self) -> Iterator[Contradiction]:
        places = self.train if isinstance(self.train, list) else [self.train]
        url = next(filter(is_url, places), None)
        if not self.streaming:
            if url is not None:
                yield clash(f"names {shown_value(url)}, which only `{_KEY}` true reads; set it", "data.train")
            for key in self.changed("shuffle_window"):
                yield clash(f"applies to streams only; remove it, or set `{_KEY}` to true", f"data.{key}")
            return
        if self.format not in (None, "json", "parquet", "arrow"):
            text = f"is {shown_value(self.format)}, which `{_KEY}` does not read; convert the files to Parquet"
            yield clash(text, "data.format", _KEY)
        of_formats = [key for row in file_formats().values() for key in row.keys]
        for key in self.changed("delimiter", "quotes", "encoding", *of_formats):
            text = f"applies to whole files, but `{_KEY}` is true; remove it, and write JSON Lines in UTF-8"
            yield clash(text, f"data.{key}", _KEY)
        held = self.validation if isinstance(self.validation, list) else [self.validation]
        if url := next((place for place in held if isinstance(place, str) and is_url(place)), None):
            text = f"names {shown_value(url)}, but `{_KEY}` is for the training split; copy it to this machine"
            yield clash(text, "data.validation", _KEY)
        if isinstance(self.validation, float):
            text = f"is {self.validation}, but a stream (`{_KEY}`) has no rows to hold out; name a file, or null"
            yield clash(text, "data.validation", _KEY)
        if getattr(self, "maps", None) is not None:
            text = f"is given, but a stream (`{_KEY}`) has one map; write the files alike, or set that to false"
            yield clash(text, "data.maps", _KEY)
        if self.group_by_length:
            text = f"is true, but the lengths of a stream (`{_KEY}`) are not known beforehand; set this to false"
            yield clash(text, "data.group_by_length", _KEY)


def keys_of(recipe: Recipe) -> StreamKeys:
    """Return the section `data` of a recipe with a stream."""
    return cast(StreamKeys, recipe.data)


def contradictions(data: Data, task: TaskSection) -> Iterator[Contradiction]:
    if not (isinstance(data, FileData) and cast(StreamKeys, data).streaming):
        return
    if not task.traits.streams:
        others = ", ".join(name for name, keys in task_sections().items() if keys.traits.streams)
        text = f"is true, but `task.type` {task.type} needs facts on all rows; use {others}"
        yield clash(text, _KEY, "task.type")
    elif hasattr(task, "labels") and task.labels is None:
        text = f"is missing, and a stream (`{_KEY}`) is not searched for classes; list them in order"
        yield clash(text, "task.labels", _KEY)
    if getattr(task, "class_weights", None) == "balanced":
        text = f'is "balanced", which counts rows, but a stream (`{_KEY}`) is not counted; write the weights'
        yield clash(text, "task.class_weights", _KEY)
