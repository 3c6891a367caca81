"""The files of predictions: texts that spreadsheets take for formulas."""

from __future__ import annotations

import json

import pytest

from trainer.data.formats.table import reader_of


def parts_of(folder, *parts):
    for number, rows in enumerate(parts):
        lines = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        (folder / f"{number}.jsonl").write_text(lines)
    return [folder / f"{number}.jsonl" for number in range(len(parts))]


@pytest.mark.parametrize(("name", "separator"), [("out.csv", ","), ("out.tsv", "\t")])
def test_formulas_are_escaped_on_demand(tmp_path, name, separator):
    cells = ["=1+1", "+a", "-a", "@a", "\ta", "a=1", "-1.5", "+1"]
    parts = parts_of(tmp_path, [{"=n": 1, "a": cell} for cell in cells])
    reader_of("csv").write(parts, tmp_path / name)
    plain = (tmp_path / name).read_text()
    assert plain.startswith(f"=n{separator}a\n1{separator}=1+1\n")
    reader_of("csv").write(parts, tmp_path / name, escapes_formulas=True)
    found = (tmp_path / name).read_text()
    assert found.count("'") == 6
    assert found.replace("'", "") == plain
    assert all(f"{separator}{cell}\n" in found for cell in cells[5:])
