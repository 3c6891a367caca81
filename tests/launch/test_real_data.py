"""Real data with launchers: a small BERT with random weights on SST-2 and TREC, if the files exist."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import warm
from tests.helpers.processes import ROOT, finish
from tests.launch.test_launchers import CASES, LOSS_TOLERANCE, launch, losses, metrics, overrides

DATA = ROOT.parent / "shared" / "data"
STEPS = 8
LAUNCHERS = {"sst2": "accelerate", "trec": "deepspeed --no_python"}
COLUMNS = {"sst2": ("sentence", "dev"), "trec": ("question", "test")}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not DATA.is_dir(), reason="SST-2 and TREC are not at hand"),
]


def write_recipe(name: str, folder: Path) -> Path:
    text, validation = COLUMNS[name]
    recipe: dict[str, Any] = {
        "extends": "bert_sample",
        "name": name,
        "task": {"text": text, "metrics": ["accuracy"]},
        "data": {"train": str(DATA / f"{name}_train.jsonl"), "validation": str(DATA / f"{name}_{validation}.jsonl")},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(recipe))
    return path


@pytest.fixture(scope="module")
def one_process(request, tmp_path_factory) -> tuple[Path, list[float]]:
    """A recipe and its losses on one process."""
    folder = tmp_path_factory.mktemp(request.param)
    recipe = write_recipe(request.param, folder)
    ended = finish(warm.start(["run", recipe, *overrides(folder / "run", steps=STEPS)]))
    assert ended.returncode == 0, ended.stderr
    assert len(losses(folder / "run")) == STEPS
    return recipe, losses(folder / "run")


@pytest.mark.parametrize(
    ("one_process", "launcher"),
    LAUNCHERS.items(),
    indirect=["one_process"],
)
def test_each_launcher_gives_the_same_curve(launcher, one_process, tmp_path):
    recipe, expected = one_process
    codes = launch(CASES[launcher], tmp_path / "run", path=os.environ["PATH"], recipe=recipe, steps=STEPS)
    assert set(codes) == {0}
    assert metrics(tmp_path / "run")[0]["run"]["world_size"] == 2
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=LOSS_TOLERANCE)
