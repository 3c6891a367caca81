"""The pairs of `embedding_sample`."""

from __future__ import annotations

import json
import platform
import runpy
from collections import Counter
from pathlib import Path

import pytest

PAIRS = Path(__file__).parents[3] / "trainer/features/embeddings/recipes/pairs"


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict[str, str]]]:
    lines = {name: (PAIRS / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("train", "validation")}
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in lines.items()}


def test_no_text_is_there_twice(splits):
    for column in ("name", "description"):
        texts = Counter(row[column].lower() for rows in splits.values() for row in rows)
        assert max(texts.values()) == 1
        assert min(map(len, texts)) > 0


def test_the_readme_states_the_facts(splits):
    readme = (PAIRS / "README.md").read_text(encoding="utf-8")
    assert f"| {len(splits['train']):,} rows" in readme
    assert f"| {len(splits['validation']):,} rows" in readme
    assert f"{1 / len(splits['validation']):.1%}".replace("%", " %") in readme
    assert "PSF-2.0" in readme


@pytest.mark.nightly
def test_the_script_makes_the_files_again(tmp_path):
    if platform.python_version() != "3.11.7":
        pytest.skip(f"made with Python 3.11.7, here is {platform.python_version()}")
    (tmp_path / "make_pairs.py").write_bytes((PAIRS / "make_pairs.py").read_bytes())
    runpy.run_path(str(tmp_path / "make_pairs.py"), run_name="__main__")
    for name in ("train", "validation"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (PAIRS / f"{name}.jsonl").read_bytes()
