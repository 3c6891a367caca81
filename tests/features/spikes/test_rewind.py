"""A loss that jumps: the run goes back to a checkpoint, leaves rows out, and does the same after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.features.spikes.planted import STEPS, jumps_at, write_planted_run
from tests.helpers.tiny_run import NUM_TRAIN_ROWS
from tests.training.test_run import before_step, fail, lose_the_loss, metrics, numbers, train, weights
from trainer.api import assemble
from trainer.base.errors import ExitCode, NonFiniteError, RecipeError
from trainer.checkpoint.store import CheckpointStore
from trainer.features.spikes.watch import limit_of
from trainer.recipe.reading.loading import load_recipe

ROW = next(row for row in range(NUM_TRAIN_ROWS) if jumps_at(row)[1:] and jumps_at(row)[1] in (8, 9))
FIRST, *LATER = [step for step in jumps_at(ROW) if step > 4]  # the first four losses are not judged


def logged(recipe: Path) -> list[dict[str, Any]]:
    lines = (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return [
        line for line in map(json.loads, lines) if {"spike_loss", "rewound_to_step"} & {*line, *line.get("logged", {})}
    ]


def checkpoint_before(step: int) -> int:
    """Return the newest checkpoint behind which a step before `step` had a regular loss; one every second step."""
    return (step - 2) // 2 * 2


def test_the_limit():
    assert limit_of([1.0, 2.0, 3.0, 4.0, 100.0], 10.0) == 3.0 + 10 * 1.0
    assert limit_of([2.0] * 5, 10.0) == pytest.approx(2.2), "one percent of the median is the least deviation"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = write_planted_run(tmp_path_factory.mktemp("whole"), ROW)
    assert train(recipe) == ExitCode.DONE
    return recipe


def test_rows_since_the_checkpoint_are_left_out(whole: Path):
    """A plain loop with the engine: the steps before the checkpoint, and those behind the jump."""
    assert [step.step for step in metrics(whole).steps] == list(range(1, STEPS + 1)), "no step has its number twice"
    left_out = [step for jump in (FIRST, *LATER) for step in range(checkpoint_before(jump) + 1, jump + 1)]
    assert len(logged(whole)) == len((FIRST, *LATER))
    with assemble(load_recipe(str(whole), ["checkpoint.folder=nowhere"])) as parts:
        for step, batch in enumerate(parts.train_loader, 1):
            if step in left_out:
                parts.engine._step += 1  # the schedule goes on
            else:
                parts.engine.train_step(batch)
        expected = {name: value.detach().clone() for name, value in parts.models[0].named_parameters()}
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


def test_a_killed_run_does_the_same(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It dies behind the jump, before the next checkpoint, and again at a later step."""
    recipe = write_planted_run(tmp_path, ROW)
    for step in (FIRST + 1, FIRST + 4):
        with monkeypatch.context() as patch:
            before_step(patch, step, fail)
            with pytest.raises(RuntimeError, match="the power went off"):
                train(recipe)
    assert train(recipe) == ExitCode.DONE
    assert {one["step"]: one for one in numbers(recipe)} == {one["step"]: one for one in numbers(whole)}
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(recipe).items())


@pytest.mark.slow
def test_after_the_last_rewind_the_run_ends(tmp_path: Path):
    recipe = write_planted_run(tmp_path, ROW, training={"max_rewinds": 1})
    with pytest.raises(NonFiniteError, match=r"`training.max_rewinds` 1, but step \d+: the loss jumps to") as error:
        train(recipe)
    assert error.value.exit_code == ExitCode.NON_FINITE == 3
    assert train(recipe, "training.max_rewinds=3") == ExitCode.DONE, "a resumed run may allow more"


@pytest.mark.slow
def test_a_note_changes_nothing(tmp_path: Path):
    noted, plain = (write_planted_run(tmp_path / name, ROW) for name in ("noted", "plain"))
    assert train(noted, "training.on_spike=note") == ExitCode.DONE
    keys = ("training.spike_window=100", "training.spike_factor=10")
    assert train(plain, "training.on_spike=null", *keys) == ExitCode.DONE
    assert numbers(noted) == numbers(plain)
    assert [line["step"] for line in logged(noted)] == [FIRST, *LATER]


def test_a_loss_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = write_planted_run(tmp_path, None, training={"spike_factor": 1e3})
    lose_the_loss(monkeypatch, 7)
    assert train(recipe) == ExitCode.DONE
    assert [line["step"] for line in logged(recipe)] == [7]
    assert all(math.isfinite(step.loss) for step in metrics(recipe).steps if step.step != 7)


@pytest.mark.slow
def test_without_a_sound_checkpoint_a_jump_is_noted(tmp_path: Path):
    """The checkpoint just before the jump may hold the weights that make it."""
    recipe = write_planted_run(tmp_path, ROW, checkpoint={"every": f"{FIRST - 1} steps"}, training={"max_steps": FIRST})
    assert train(recipe) == ExitCode.DONE
    (line,) = logged(recipe)
    assert "rewound" not in json.dumps(line)
    assert CheckpointStore(tmp_path / "run", 1).steps() == [FIRST - 1, FIRST]


@pytest.mark.slow
def test_checkpoints_in_memory_serve(tmp_path: Path):
    memory = {"every": "2 steps", "folder": str(tmp_path / "memory")}
    recipe = write_planted_run(tmp_path, ROW, checkpoint={"every": "100 steps", "memory": memory})
    (tmp_path / "memory").mkdir(exist_ok=True)
    assert train(recipe) == ExitCode.DONE
    assert f'"rewound_to_step": {checkpoint_before(FIRST)}' in json.dumps(logged(recipe)[0])


def test_keys_without_a_watch_are_refused():
    with pytest.raises(RecipeError, match=r"`training.spike_window` applies to jumps of the loss; set"):
        load_recipe("bert_sample", ["training.spike_window=9"])
