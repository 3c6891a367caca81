"""A run keeps the date that its chat template writes, in checkpoints at each place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_DECODERS
from trainer.checkpoint.store import CheckpointStore
from trainer.cli import main
from trainer.features.host_memory.folder import folder_of_run
from trainer.recipe.reading.loading import load_recipe
from trainer.training import first_day, run_data

DATED = "{% for m in messages %}{{ strftime_now('word%d') }} {{ m.content }} {% endfor %}"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def set_today(day: str) -> None:
        class Day(date):
            @classmethod
            def today(cls) -> date:
                return date.fromisoformat(day)

        for module in (first_day, run_data):
            monkeypatch.setattr(module, "date", Day)

    return set_today


def write_run(folder: Path, *, template: str = DATED, **checkpoint: object) -> Path:
    recipe = write_tiny_run(
        folder,
        model={"config": TINY_DECODERS["llama"]},
        training={"max_steps": 4},
        evaluation={"every": None, "verify_export": 0},
        checkpoint={"every": "2 steps", **checkpoint},
    )
    content = json.loads(recipe.read_text())
    content["task"] = {"type": "causal_lm", "messages": "chat"}
    recipe.write_text(json.dumps(content))
    config = folder / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template, "eos_token": "[SEP]"}))
    turns = ({"role": "user", "content": "word50"}, {"role": "assistant", "content": "word60"})
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text(f"{json.dumps({'chat': turns})}\n" * 8)
    return recipe


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "mirror"])
def test_a_resume_on_another_day_keeps_the_date(on, tmp_path, capfd, place):
    keys = {"mirror": str(tmp_path / "mirror")} if place == "mirror" else {}
    whole, recipe = write_run(tmp_path / "whole"), write_run(tmp_path / "cut", **keys)
    on("2026-01-20")
    assert main(["run", str(whole)]) == 0
    assert main(["run", str(recipe), "training.stop_at_step=2"]) == 75
    shutil.rmtree(tmp_path / "cut" / "cache")
    if place == "mirror":
        shutil.rmtree(tmp_path / "cut" / "run")
    capfd.readouterr()
    on("2026-01-21")
    assert main(["run", str(recipe), 'logging.to=["console","jsonl"]']) == 0
    assert "here 2026-01-20; set `data.date` to it" in " ".join(capfd.readouterr().out.split())
    assert {**losses(tmp_path / "whole"), **losses(tmp_path / "cut")} == losses(tmp_path / "whole")
    saved = json.loads((tmp_path / "cut" / "run" / "model" / "trainer_recipe.json").read_text())
    assert saved["data"]["date"] == "2026-01-20"
    if place == "disk":
        assert main(["run", str(recipe), "data.date=2026-01-21"]) == 2
        assert "`data.date` was '2026-01-20' and is '2026-01-21'" in capfd.readouterr().err
        assert main(["run", str(recipe), f"checkpoint.folder={tmp_path / 'other'}"]) == 0
        state = CheckpointStore(tmp_path / "other", 1).path(4) / "state.json"
        assert json.loads(state.read_text())["origin"]["recipe"]["data"]["date"] == "2026-01-21"


def test_memory_and_damaged_checkpoints(on, tmp_path):
    recipe = write_run(tmp_path, memory={"folder": str(tmp_path / "memory"), "every": "1 step"})
    loaded = load_recipe(str(recipe)).recipe
    on("2026-01-20")
    assert first_day.first_day(loaded, 0, None) == "2026-01-20"
    assert main(["run", str(recipe), "training.stop_at_step=1", "checkpoint.memory=null"]) == 75
    on("2026-01-21")
    assert first_day.first_day(loaded, 0, None) == "2026-01-20"
    assert first_day.first_day(load_recipe(str(recipe), ["data.date=2026-01-22"]).recipe, 0, None) is None
    assert first_day.first_day(load_recipe(str(recipe), ["checkpoint.resume=never"]).recipe, 0, None) == "2026-01-21"
    store = CheckpointStore(tmp_path / "run", 1)
    place = folder_of_run(tmp_path / "memory", tmp_path / "run") / store.memory_key()[0] / "rank-00000-of-00001"
    shutil.copytree(store.folder, place / "checkpoints")
    (store.path(1) / "state.json").write_text("{}")
    assert first_day.first_day(loaded, 0, None) == "2026-01-20"
    shutil.rmtree(place)
    assert first_day.first_day(loaded, 0, None) == "2026-01-21"


@pytest.mark.slow
def test_a_template_without_a_date_keeps_its_rows(on, tmp_path):
    recipe = write_run(tmp_path, template=DATED.replace("strftime_now('word%d')", "'word7'"))
    for day in ("2026-01-20", "2026-01-21"):
        on(day)
        assert main(["run", str(recipe), f"checkpoint.folder={tmp_path / day}"]) == 0
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
    assert json.loads((tmp_path / day / "model" / "trainer_recipe.json").read_text())["data"]["date"] is None
