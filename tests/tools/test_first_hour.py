"""The first hour of a user: all commands from a messy file to an exported model, as the pages name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.base.errors import ExitCode
from trainer.cli import main

CITIES = ("München", "Köln", "Bremen")


def price(row: int) -> str:
    """Return a price as a German spreadsheet writes it; some rows have none."""
    if row % 13 == 5:
        return "k. A." if row % 2 else ""
    return f"{1 + row % 4}.{row * 7 % 1000:03d},{row % 90 + 10}"


@pytest.mark.slow
def test_a_messy_file_reaches_an_exported_model(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{row + 100};Wohnung {row} in {CITIES[row % 3]}, größer;{price(row)};{CITIES[row % 3]}" for row in range(80)
    ]
    Path("Wohnungen 2024.csv").write_text("\r\n".join(["Nr.;Beschreibung;Preis (EUR);Ort", *rows]), encoding="cp1252")

    def shown(*words: str) -> str:
        assert main(list(words)) == ExitCode.DONE, capfd.readouterr().err
        return capfd.readouterr().out

    first = shown("init", "Wohnungen 2024.csv", "--yes")
    assert "task      sequence_regression: `Preis (EUR)` holds numbers" in first
    assert 'leaves out 6 of 80 rows: `Preis (EUR)` is null or "k. A." in 6' in first
    assert "read      encoding cp1252" in first
    assert first.endswith("next      trainer run Wohnungen_2024.yaml\n")
    assert "checked   no problem was found" in shown("check", "Wohnungen_2024.yaml")
    assert "label 2007.11: " in shown("preview", "Wohnungen_2024.yaml", "--rows", "2", "data.validation=null")
    assert "It fits: " in shown("plan", "Wohnungen_2024.yaml", "--gpus", "1xT4")
    ended = shown("run", "Wohnungen_2024.yaml", "--processes", "1", "training.max_steps=3")
    assert "finished after 3 steps" in ended
    assert "\nrows      7\n" in shown("evaluate", "runs/Wohnungen_2024")
    shown("predict", "runs/Wohnungen_2024", "--input", "Wohnungen 2024.csv", "--output", "out.jsonl")
    predictions = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert len(predictions) == 80
    assert all(isinstance(row["prediction"], float) for row in predictions)
    shown("report", "runs/Wohnungen_2024")
    assert "Wohnungen_2024  finished  3 of 3" in shown("runs")
    assert "Another process" in shown("export", "runs/Wohnungen_2024", "exported", "--verify")
    assert Path("exported", "model.safetensors").is_file()
