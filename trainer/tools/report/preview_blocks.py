"""The blocks of a page on what a model will see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.tools.report.figures import bars
from trainer.tools.report.page import Marked, Table


def preview_blocks(preview: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the blocks of a `trainer.observe.preview_records.Preview`, given as JSON values."""
    yield from preview["notes"]
    for row in preview["step"]:
        yield from _texts("step 1, first microbatch of a rank: row", row)
    for row in preview["rows"]:
        yield from _texts("row", row)
    header, rows = split_table(preview["splits"])
    yield Table(header, rows, "Splits")
    for split in preview["splits"]:
        for name in ("histogram", "uncut"):
            if found := split[name]:
                title = f"lengths of {split['name']} rows" + (", without max_length" if name == "uncut" else "")
                yield bars(
                    title, [f"up to {edge}" for edge, _ in found], [("rows", [count for _, count in found])], "rows"
                )
    if preview["classes"]:
        classes = [(one["name"], f"{one['rows']:,}", f"{one['weight']:.4g}") for one in preview["classes"]]
        yield Table(("class", "training rows", "weight"), classes, "Classes")
    if preview["kinds"]:
        yield Table(preview["kinds"][0], preview["kinds"][1:], "Kinds of parameters")


def _texts(title: str, row: Mapping[str, Any]) -> Iterator[Marked]:
    label = f", label {row['label']}" if row["label"] else ""
    label += f", {row['window']}" if row["window"] else ""
    for text in row["texts"]:
        role = "" if len(row["texts"]) == 1 else f", {text['role']}"
        pieces = [(piece["mark"], piece["text"], piece["note"]) for piece in text["pieces"]]
        yield Marked(f"{title} {row['row'] + 1}{role}{label}, {text['tokens']} tokens", pieces)


def split_table(splits: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of a table of splits."""
    rows: list[tuple[str, ...]] = [
        (
            split["name"],
            f"{split['rows']:,}",
            f"{split['longest']:,}",
            f"{split['cut']:,}",
            "of rows or random" if split["trained"] is None else f"{split['trained']:.1%}",
        )
        for split in splits
    ]
    return ("split", "rows", "longest", f"cut to {splits[0]['max_length']} tokens", "trained tokens"), rows
