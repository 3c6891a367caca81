"""The notebooks of `docs/notebooks/` run from top to end, and their outputs are not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT, environment

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_a_data_frame_becomes_a_pipeline(tmp_path, monkeypatch):
    (notebook,) = NOTEBOOKS
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_of(notebook):
        exec(compile(cell, str(notebook), "exec"), names)
    assert names["result"].metrics["accuracy"] > 0.9
    assert [answer["label"] for answer in names["answers"]] == ["bad", "good"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook):
    held = json.loads(notebook.read_text(encoding="utf-8"))
    assert (held["nbformat"], held["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in held["cells"]]
    assert len(set(ids)) == len(ids)
    assert not [cell for cell in held["cells"] if cell.get("outputs") or cell.get("execution_count")]
