"""Parity of `data.map`: mapped rows train as rows that were written so, under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import sgd_sections, train_tiny
from tests.parity.cases import assert_same_curve
from trainer.checkpoint.counters import Progress
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe

COLUMNS = {
    "text": "{first}[ {second}]",
    "label": {"column": "stars", "values": {"1": "a", "2": "b", "3": "c"}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp-accumulated": (3, {"training": {"micro_batch_size": 2}}),
    "stages": (2, {"parallel": {"pipeline": {"stages": 2}}}),
}


def recipe_of(folder: Path, data: dict[str, Any], **sections: Any) -> Recipe:
    sizes = {"max_steps": 5, "global_batch_size": 12, "micro_batch_size": 12}
    base = {**sgd_sections(0.05), "training": sizes, "evaluation": {"every": None}}
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    return load_recipe(str(write_tiny_run(folder, **merged, data=data))).recipe


@pytest.mark.parametrize("layout", [pytest.param("ddp-accumulated", marks=pytest.mark.slow), "stages"])
def test_mapped_rows_train_as_rows_that_were_written_so(tmp_path: Path, ranks: RankPools, layout: str):
    plain = recipe_of(tmp_path / "plain", {"validation": None})
    expected = train_tiny(plain, progress=Progress())
    rows = [json.loads(line) for line in (tmp_path / "plain" / "train.jsonl").read_text().splitlines()]
    size, sections = LAYOUTS[layout]
    recipe_of(tmp_path, {})  # writes the tokenizer
    with (tmp_path / "wide.jsonl").open("w") as file:
        for number, row in enumerate(rows):
            first, *rest = row["text"].split(" ", number % 2)
            wide = {"first": first, "second": rest[0] if rest else None, "stars": "abc".index(row["label"]) + 1}
            for skipped in (True, False):
                file.write(json.dumps({**wide, "skipped": skipped}) + "\n")
    data = {"train": "wide.jsonl", "validation": None, "map": {"columns": COLUMNS, "where": ["skipped == false"]}}
    mapped = recipe_of(tmp_path, data, **sections)
    for curve in ranks(size).run(train_tiny, mapped, progress=Progress()):
        assert_same_curve(curve, expected)
