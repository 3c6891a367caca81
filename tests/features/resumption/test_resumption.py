"""A raised number of steps beside a run that had it from the start, and checkpoints from before a key existed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import warm
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import RecipeError
from trainer.checkpoint.store import CheckpointStore
from trainer.cli import main
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe

CONSTANT = {"name": "constant", "warmup": 3}
WSD = {"name": "warmup_stable_decay", "warmup": 1, "decay": 3}
SAVED = ("model.safetensors", "config.json")


def write(folder: Path, schedule: dict[str, Any], **training: Any) -> Path:
    """Write a recipe with dropout, 5 steps an epoch."""
    training = {"max_steps": None, "global_batch_size": 8, "micro_batch_size": 4, **training}
    data = {"group_by_length": "batch_size_warmup" not in training}
    model = {"config": {**TINY_BERT, "hidden_dropout_prob": 0.2}}
    file = write_tiny_run(
        folder,
        model=model,
        data=data,
        evaluation={"every": "2 steps", "verify_export": 0},
        checkpoint={"every": "3 steps"},
    )
    recipe = json.loads(file.read_text()) | {"schedule": schedule, "training": training}
    file.write_text(json.dumps(recipe))
    return file


def lines(folder: Path) -> dict[int, tuple[float, float, float, int]]:
    """Return loss, norm, rate and rows of each step."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "grad_norm", "learning_rate", "samples")
    return {line["step"]: tuple(line[key] for key in keys) for line in found if "loss" in line}


def assert_same(run: Path, expected: Path) -> None:
    assert lines(run) == lines(expected)
    for name in SAVED:
        assert (run / "model" / name).read_bytes() == (expected / "model" / name).read_bytes()


@pytest.mark.parametrize(
    ("schedule", "first", "then", "extra", "keys"),
    [
        (CONSTANT, "training.max_steps=4", "training.max_steps=12", (), {}),
        # 20 and 88 rows, of 40 an epoch: two steps of 4 rows, then 8 or fewer in each step.
        (CONSTANT, "training.epochs=0.5", "training.epochs=2.2", (), {"batch_size_warmup": {"start": 4, "steps": 2}}),
        (WSD, "training.max_steps=9", "training.max_steps=12", ("training.stop_at_step=6",), {}),
    ],
    ids=["constant", "epochs of a growing batch", "wsd"],
)
def test_a_raised_run_is_the_longer_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    schedule: dict[str, Any],
    first: str,
    then: str,
    extra: Any,
    keys: dict[str, Any],
):
    file = write(tmp_path, schedule, **keys)
    raised, whole = (f"checkpoint.folder={tmp_path / name}" for name in ("raised", "whole"))
    main(["run", str(file), first, raised, *extra, "logging.to=console,jsonl"])
    assert ("resume  " in capsys.readouterr().out) == bool(extra)  # a finished run has nothing to resume
    # Once more stopped half-way, and resumed.
    assert main(["run", str(file), then, raised, "training.stop_at_step=7", "logging.to=console,jsonl"]) == 75
    printed = " ".join(capsys.readouterr().out.split())
    assert f" ends at step 12 instead of {9 if extra else 4};" in printed
    assert ("/raised/model stays that of step " in printed) == (not extra)
    assert main(["run", str(file), then, raised]) == 0
    assert main(["run", str(file), then, whole]) == 0
    assert_same(tmp_path / "raised", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("parallel.strategy=fsdp", "training.ema_decay=0.9"),
        ("parallel.tensor=2",),
        ("parallel.pipeline.stages=2",),
        ("data.streaming=true", "data.shuffle_window=16", "data.group_by_length=false", "task.labels=[a, b, c]"),
    ],
    ids=["ddp", "fsdp, averages", "tensor", "pipeline", "stream"],
)
def test_a_raised_run_that_is_killed_is_the_longer_one(tmp_path: Path, keys: tuple[str, ...]):
    """A rank dies by SIGKILL in step 11, after a checkpoint of the raised part."""
    file = write(tmp_path, CONSTANT)

    def run(folder: str, steps: int, *fault: object) -> int | None:
        words = (*keys, f"checkpoint.folder={tmp_path / folder}", f"training.max_steps={steps}")
        words += ("training.micro_batch_size=2", "checkpoint.every=2 steps")
        process = warm.start([*fault, "run", file, *words, "--processes", 2], faulty=bool(fault))
        print(*process.communicate(timeout=200))
        return process.returncode

    assert run("raised", 4) == 0
    assert run("raised", 12, "die", 1, 11) not in (0, None)
    assert max(CheckpointStore(tmp_path / "raised", 9).steps()) >= 6
    assert run("raised", 12) == run("whole", 12) == 0
    assert_same(tmp_path / "raised", tmp_path / "whole")


@pytest.mark.parametrize(
    ("schedule", "step"),
    [({"name": "linear", "warmup": 0.25}, 1), ({"name": "cosine"}, 2), (WSD, 5), ({**CONSTANT, "warmup": 0.25}, 1)],
    ids=["linear", "cosine", "wsd", "warmup"],
)
def test_other_rates_are_refused_with_two_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: dict[str, Any], step: int
):
    file = write(tmp_path, schedule, max_steps=6)
    assert main(["run", str(file)]) == 0
    assert main(["run", str(file), "training.max_steps=12"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert f"`training.max_steps` gives 12 steps, but {tmp_path}" in text
    assert f"the schedule {schedule['name']} gives step {step} another learning rate" in text
    assert (
        f"model.name_or_path={tmp_path / 'run' / 'model'} model.config=null checkpoint.folder={tmp_path / 'run'}-2"
        in text
    )
    assert "training.stop_at_step=6" in text
    # The first way, as it is printed, is a run.
    assert main(["run", str(file), f"model.name_or_path={tmp_path / 'run' / 'model'}", "model.config=null",
                 "training.max_steps=5", f"checkpoint.folder={tmp_path / 'run'}-2"]) == 0  # fmt: skip


def test_a_run_without_its_model_ends_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path, {"name": "cosine"}, max_steps=6)
    assert main(["run", str(file), "training.stop_at_step=5"]) == 75
    assert main(["run", str(file), "training.max_steps=12"]) == 2
    assert "further, let this run end at step 6, and start a run: trainer run" in " ".join(
        capsys.readouterr().err.split()
    )


def test_fewer_steps_than_are_done_and_further_differences_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path, CONSTANT, max_steps=6)
    assert main(["run", str(file)]) == 0
    assert main(["run", str(file), "training.max_steps=5"]) == 2
    assert "must give at least the 6 steps that are done, but gives 5" in " ".join(capsys.readouterr().err.split())
    assert main(["run", str(file), "training.max_steps=12", "training.seed=1"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "belongs to another training: `training.max_steps` was 6 and is 12; `training.seed` was 42 and is 1" in text


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("optimizer.weight_decay", None, 2),  # the recipe has another value than the default
        ("training.layout_invariant_dropout", None, 0),
        ("task.label_smoothing", None, 0),
        ("task.label_smoothing", "9.0.0", 2),
    ],
)
def test_keys_that_an_older_version_did_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str | None, code: int
):
    file = write(tmp_path, CONSTANT, max_steps=4)
    assert main(["run", str(file), "training.stop_at_step=2"]) == 75
    (state,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    facts = json.loads(state.read_text())
    section, _, name = key.partition(".")
    del facts["identity"][section][name]
    if value is not None:
        facts["origin"]["versions"]["trainer"] = value
    state.write_text(json.dumps(facts))
    sums = state.parent / "SHA256SUMS"
    import hashlib

    rows = [line.split("  ") for line in sums.read_text().splitlines()]
    digest = hashlib.sha256(state.read_bytes()).hexdigest()
    sums.write_text("".join(f"{digest if name == 'state.json' else old}  {name}\n" for old, name in rows))
    capsys.readouterr()
    assert main(["run", str(file), "logging.to=console,jsonl"]) == code
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    assert (f"is of a version without `{key}`; the defaults stand" if code == 0 else f"`{key}` was None and is") in said


def test_a_part_of_a_step_counts_as_one(tmp_path: Path):
    file = write(tmp_path, CONSTANT)
    for epochs, rows, expected in (
        (0.5, 40, 3),
        (2.5, 40, 13),
        (0.1, 240, 3),
        (3.0, 40, 15),
        (1e-9, 40, 1),
        (3, 41, 18),
    ):
        plan = plan_run(load_recipe(file, [f"training.epochs={epochs}"]).recipe, 1)
        assert plan.total_steps(rows) == expected
    for wrong in ("0", "0.0", "-1.5", "true", '"2.5"', "Infinity", "NaN"):
        with pytest.raises(RecipeError, match=r"training.epochs"):
            load_recipe(file, [f"training.epochs={wrong}"])
