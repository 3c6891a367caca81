"""The task of `docs/extending.md` trains, evaluates and predicts as it stands."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, finish, start
from tests.helpers.tiny_run import write_tiny_run

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
COMMANDS = """
import sys

import counts

from trainer.cli import main

recipe, model, rows = sys.argv[1:]
assert main(["run", recipe]) == 0
assert main(["evaluate", model, "--json"]) == 0
assert main(["predict", model, "--input", rows, "--output", rows.replace("in.", "out.")]) == 0
"""


@pytest.mark.slow
def test_the_task_of_the_page(tmp_path: Path):
    ((name, source),) = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / name).write_text(source)
    (tmp_path / "commands.py").write_text(COMMANDS)
    recipe = write_tiny_run(tmp_path)
    content = json.loads(recipe.read_text())
    content["task"] = {"type": "counts", "text": "text", "metrics": ["mse"]}
    recipe.write_text(json.dumps(content))
    for split in ("train", "validation"):
        file = tmp_path / f"{split}.jsonl"
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({"text": text, "label": len(text.split())}) + "\n" for text in texts))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = [recipe, tmp_path / "run" / "model", tmp_path / "in.jsonl"]
    process = start([sys.executable, tmp_path / "commands.py", *arguments], PYTHONPATH=f"{tmp_path}:{ROOT}")
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line)["count"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    lengths = [len(text.split()) for text in texts]
    error = sum((count - length) ** 2 for count, length in zip(found, lengths, strict=True)) / len(texts)
    shown = json.loads(ended.stdout.splitlines()[-1])["metrics"]["mse"]
    assert math.isclose(error, shown, rel_tol=1e-4)
