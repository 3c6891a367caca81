"""The choices of `choice_sample`."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections import Counter
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_readme_states_the_facts():
    readme = (RECIPES / "choices" / "README.md").read_text(encoding="utf-8")
    splits = {
        name: [json.loads(line) for line in (RECIPES / "choices" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation")
    }
    for name, rows in splits.items():
        assert re.search(rf"`{name}.jsonl` \| {len(rows):,} rows", readme)
        assert all(len(set(row["topics"])) == 4 for row in rows)
    letters = Counter(row["answer"] for row in splits["validation"])
    assert f"the most frequent letter | {max(letters.values()) / letters.total():.1%} |".replace("%", " %") in readme
    assert not {row["sentence"] for row in splits["train"]} & {row["sentence"] for row in splits["validation"]}


def test_the_script_makes_the_files_again(tmp_path: Path):
    shutil.copytree(RECIPES / "sample", tmp_path / "sample")
    (tmp_path / "choices").mkdir()
    script = shutil.copy(RECIPES / "choices" / "make_choices.py", tmp_path / "choices")
    runpy.run_path(str(script), run_name="__main__")
    for name in ("train", "validation"):
        made, shipped = (folder / "choices" / f"{name}.jsonl" for folder in (tmp_path, RECIPES))
        assert made.read_bytes() == shipped.read_bytes()
