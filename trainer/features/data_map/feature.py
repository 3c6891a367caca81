"""The transform of rows that `data.map` and `data.maps` describe. Its parts are imported when rows do not stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.nulls import item_of
from trainer.data.formats.base import CellKind, Row
from trainer.data.row_transform import RowTransform
from trainer.features.data_map.section import DataMap, map_of, maps_of
from trainer.features.data_map.shapes import OF_ALPACA, stays
from trainer.recipe.schema import Data, FileData

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.features.data_map.source_map import SourceMap

_FIRST = 20


@dataclass(frozen=True)
class DataTransform(RowTransform):
    """A map of a recipe, or of an entry of `data.train`, under its key."""

    section: DataMap
    key: str = "data.map"

    @classmethod
    def of(cls, data: Data) -> DataTransform:
        return cls(map_of(data))

    @classmethod
    def of_entries(cls, data: FileData) -> Sequence[DataTransform] | None:
        maps = maps_of(data)
        return None if maps is None else [cls(one, f"data.maps[{place}]") for place, one in enumerate(maps)]

    @property
    def facts(self) -> object:
        return self.section.model_dump(mode="json")

    def kinds(self, kinds: Mapping[str, CellKind]) -> dict[str, CellKind]:
        is_made = self.section.columns is not None
        found: dict[str, CellKind] = {} if is_made else {**dict.fromkeys(OF_ALPACA, "text"), **kinds}
        if not is_made and not self.section.where:
            return found
        from trainer.features.data_map.row_map import kinds_of_sources

        return found | kinds_of_sources(self.section, kinds, found)

    def of_source(self, rows: Dataset, wanted: Sequence[str], where: str) -> SourceMap | None:
        values = _first_values(rows)
        if stays(self.section, wanted, values):
            return None
        from trainer.features.data_map.source_map import SourceMap

        return SourceMap.of(self.section, wanted, values, where, self.key)

    def of_input(self, rows: Sequence[Row], wanted: Sequence[str], where: str) -> SourceMap | None:
        from trainer.features.data_map.source_map import SourceMap

        return SourceMap.of_input(self.section, wanted, rows, where)

    def whole(
        self, rows: Dataset, wanted: Sequence[str], where: str
    ) -> tuple[Dataset, NDArray[np.int64] | None, list[str]]:
        found = self.of_source(rows, wanted, where)
        return (rows, None, []) if found is None else found.of_whole(rows, self.section.where, where)

    def fix(self, column: str, value: Any) -> str | None:
        from trainer.features.data_map.row_map import fix_of_row

        return fix_of_row(self.section, column, value) if self.key == "data.map" else None


def _first_values(rows: Dataset) -> dict[str, Sequence[Any]]:
    """Return the columns, with the first values of those that may hold chats."""

    def may_hold(feature: Any) -> bool:
        return isinstance(feature, dict) or type(feature).__name__ == "Json"

    features = rows.features  # a copy of all columns at each call
    items = {name: item_of(feature) for name, feature in features.items()}
    chats = [
        name
        for name, item in items.items()
        if may_hold(features[name]) or may_hold(item) or item_of(item) is not None  # the last: lists of turns
    ]
    # Only columns that may hold chats are read: others may be images, which would be decoded.
    first = rows.select_columns(chats)[:_FIRST] if chats else {}
    return {name: first.get(name, ()) for name in features}
