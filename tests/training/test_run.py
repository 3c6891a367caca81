"""Whole runs on tiny data, in this process; ranks that a launcher starts are in `TestTwoRanks`."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.helpers import processes, warm
from tests.helpers.forking import forking
from tests.helpers.tiny_run import NUM_VALIDATION_ROWS, write_tiny_run
from trainer.base.errors import ExitCode, NonFiniteError, TrainerError, UsageError
from trainer.checkpoint.format import share_name
from trainer.checkpoint.reading import SavedState
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.forward import ModelForward
from trainer.engine.native import NativeEngine
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.run_metrics import Metrics, read_metrics
from trainer.training.assembly import assemble
from trainer.training.run import run
from trainer.training.whole_split import Evaluated

CLOCKS = {
    "step_seconds", "samples_per_second", "tokens_per_second", "peak_memory_bytes", "rank_memory_bytes", "mfu",
    "seconds", "sample", "padding",
}  # fmt: skip
"""The numbers that a clock gives, or that depend on the interval of the lines."""


def train(recipe: Path, *overrides: str) -> int:
    return run(load_recipe(str(recipe), overrides), LaunchEnvironment("none"))


def metrics(recipe: Path) -> Metrics:
    return read_metrics(recipe.parent / "run" / "metrics.jsonl")


def numbers(recipe: Path) -> list[dict[str, Any]]:
    """Every number of every step and evaluation, without those that a clock gives."""
    read = metrics(recipe)
    steps = [{k: v for k, v in vars(record).items() if k not in CLOCKS} for record in read.steps]
    return steps + [vars(record) for record in read.evaluations]


def weights(recipe: Path, folder: str = "model") -> dict[str, torch.Tensor]:
    return load_file(recipe.parent / "run" / folder / "model.safetensors")


def assert_same_run(recipe: Path, other: Path) -> None:
    """Bit for bit: every number that was written, and the models that were exported."""
    assert numbers(recipe) == numbers(other)
    for folder in ("model", "best"):
        one, two = weights(recipe, folder), weights(other, folder)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    recipe = write_tiny_run(tmp_path_factory.mktemp("whole"))
    assert train(recipe) == ExitCode.DONE
    return recipe


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[NativeEngine], None]) -> None:
    begin_step = NativeEngine.begin_step

    def disturbed(self: NativeEngine, *args: Any) -> Any:
        if self._step + 1 == step:
            action(self)
        return begin_step(self, *args)

    monkeypatch.setattr(NativeEngine, "begin_step", disturbed)


def lose_the_loss(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the loss of a step NaN; it is finite when it is computed again."""
    loss_sum = ModelForward.loss_sum

    def lost(self: ModelForward, microbatch: Any) -> torch.Tensor:
        return loss_sum(self, microbatch) * (math.nan if self._step + 1 == step else 1.0)

    monkeypatch.setattr(ModelForward, "loss_sum", lost)


def fail(engine: NativeEngine) -> None:
    raise RuntimeError("the power went off")


class TestWholeRun:
    def test_writes_every_step_and_evaluation(self, whole):
        read = metrics(whole)
        assert [record.step for record in read.steps] == list(range(1, 9))
        assert [record.step for record in read.evaluations] == [4, 8]
        assert set(read.evaluations[0].metrics) == {"loss", "accuracy", "f1_macro"}
        assert read.steps[-1].samples == 64
        (start,) = read.runs
        assert (start["world_size"], start["total_steps"], start["num_validation_rows"]) == (1, 8, NUM_VALIDATION_ROWS)

    def test_the_model_opens_with_transformers_and_repeats_the_evaluation(self, whole):
        folder = whole.parent / "run" / "model"
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = [json.loads(line) for line in (whole.parent / "validation.jsonl").read_text().splitlines()]
        batch = tokenizer(
            [row["text"] for row in rows], truncation=True, max_length=16, padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            classes = model(**batch).logits.argmax(-1).tolist()
        right = sum(model.config.id2label[index] == row["label"] for index, row in zip(classes, rows, strict=True))
        assert right / len(rows) == metrics(whole).evaluations[-1].metrics["accuracy"]

    def test_the_best_model_is_that_of_the_best_evaluation(self, whole):
        store = CheckpointStore(whole.parent / "run", keep=1)
        progress = SavedState(store.path(store.steps()[-1])).facts.progress
        accuracies = {record.step: record.metrics["accuracy"] for record in metrics(whole).evaluations}
        assert progress.best.value == max(accuracies.values()) == accuracies[progress.best.step]
        same = all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(whole, "best").items())
        assert same == (progress.best.step == 8)

    def test_once_more_is_the_same(self, whole, tmp_path):
        recipe = write_tiny_run(tmp_path)
        assert train(recipe) == ExitCode.DONE
        assert_same_run(recipe, whole)

    def test_nothing_unfinished_is_left(self, whole):
        assert not [path for path in (whole.parent / "run").rglob("*") if path.name.startswith(".saving")]

    def test_started_again_it_is_still_finished(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        train(recipe)
        before, model = numbers(recipe), weights(recipe)
        assert train(recipe) == ExitCode.DONE
        assert numbers(recipe) == before
        assert len(metrics(recipe).runs) == 2
        assert all(torch.equal(tensor, weights(recipe)[name]) for name, tensor in model.items())


MASKED_LM = {"type": "masked_lm", "text": "text", "metrics": ["accuracy", "perplexity"]}


class TestMaskedLM:
    def test_the_model_opens_with_transformers_and_is_one_to_fine_tune(self, tmp_path):
        recipe = write_tiny_run(tmp_path / "pretrained", task=MASKED_LM)
        assert train(recipe) == ExitCode.DONE
        evaluations = metrics(recipe).evaluations
        assert [set(record.metrics) for record in evaluations] == [{"loss", "accuracy", "perplexity"}] * 2
        folder = tmp_path / "pretrained" / "run" / "model"
        model = AutoModelForMaskedLM.from_pretrained(folder)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        tuned = write_tiny_run(tmp_path / "tuned", model={"config": None, "name_or_path": str(folder)})
        assert train(tuned, "training.max_steps=1") == ExitCode.DONE

    def test_going_on_hides_the_same_tokens(self, tmp_path):
        parts, whole = (write_tiny_run(tmp_path / name, task=MASKED_LM) for name in ("parts", "whole"))
        assert train(whole) == ExitCode.DONE
        assert train(parts, "training.stop_at_step=3") == ExitCode.STOPPED
        assert train(parts) == ExitCode.DONE
        assert_same_run(parts, whole)

    def test_a_tokenizer_without_a_mask_token_is_refused(self, tmp_path):
        recipe = write_tiny_run(tmp_path, task=MASKED_LM)
        file = tmp_path / "tokenizer" / "tokenizer_config.json"
        content = json.loads(file.read_text())
        del content["mask_token"]
        file.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=r"`task.type` may be masked_lm only for a tokenizer with a mask token"):
            train(recipe)

    def test_the_shipped_recipe(self, tmp_path):
        places = [f"checkpoint.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", "logging.to=[]"]
        resolved = load_recipe("bert_sample_mlm", ["training.max_steps=2", *places])
        assert run(resolved, LaunchEnvironment("none")) == ExitCode.DONE
        (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations
        assert 0.9 < math.log(record.metrics["perplexity"]) / math.log(3000) < 1.1, "it has hardly begun"


class TestResume:
    """A run that was interrupted, and went on, is the run that nothing disturbed."""

    def test_after_stop_at_step(self, whole, tmp_path):
        recipe = write_tiny_run(tmp_path)
        assert train(recipe, "training.stop_at_step=4") == ExitCode.STOPPED
        assert not (tmp_path / "run" / "model").exists()
        assert train(recipe) == ExitCode.DONE
        assert_same_run(recipe, whole)

    def test_in_the_middle_of_an_epoch_of_ragged_batches(self, tmp_path):
        """40 rows in batches of 12: each epoch ends with a batch of 4."""
        ragged = {"training": {"max_steps": 7, "global_batch_size": 12, "micro_batch_size": 5}}
        parts, whole = write_tiny_run(tmp_path / "parts", **ragged), write_tiny_run(tmp_path / "whole", **ragged)
        assert train(whole) == ExitCode.DONE
        for stop in (3, 4, 6):
            assert train(parts, f"training.stop_at_step={stop}") == ExitCode.STOPPED
        assert train(parts, "training.stop_at_step=6") == ExitCode.DONE, "the same command goes on"
        assert_same_run(parts, whole)

    def test_after_a_failure_steps_since_the_checkpoint_are_done_again(self, whole, tmp_path, monkeypatch):
        recipe = write_tiny_run(tmp_path)
        with monkeypatch.context() as patch:
            before_step(patch, 6, fail)
            with pytest.raises(RuntimeError, match="power"):
                train(recipe, "checkpoint.every=3 steps")
        assert [record.step for record in metrics(recipe).steps] == [1, 2, 3, 4, 5]
        assert train(recipe) == ExitCode.DONE
        assert [record.step for record in metrics(recipe).steps] == list(range(1, 9))
        assert_same_run(recipe, whole)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    def test_after_a_signal(self, whole, tmp_path, monkeypatch, number):
        recipe = write_tiny_run(tmp_path)
        handler = signal.getsignal(number)
        with monkeypatch.context() as patch:
            before_step(patch, 3, lambda engine: os.kill(os.getpid(), number))
            assert train(recipe) == ExitCode.STOPPED == 75
        assert signal.getsignal(number) is handler
        assert CheckpointStore(tmp_path / "run", 1).steps() == [4]
        assert train(recipe) == ExitCode.DONE
        assert_same_run(recipe, whole)

    def test_with_other_microbatches_the_numbers_are_close(self, whole, tmp_path):
        recipe = write_tiny_run(tmp_path)
        train(recipe, "training.stop_at_step=4")
        assert train(recipe, "training.micro_batch_size=8") == ExitCode.DONE
        for one, other in zip(metrics(recipe).steps, metrics(whole).steps, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)

    def test_a_damaged_checkpoint_is_skipped_and_reported(self, whole, tmp_path, capsys):
        recipe = write_tiny_run(tmp_path)
        train(recipe, "training.stop_at_step=6", "checkpoint.every=3 steps")
        tensors = tmp_path / "run" / "checkpoints" / "step-00000006" / share_name(0, 1)
        content = tensors.read_bytes()
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        capsys.readouterr()
        assert train(recipe, 'logging.to=["console"]') == ExitCode.DONE
        shown = " ".join(capsys.readouterr().out.split())
        assert "skipped the checkpoint" in shown
        assert "resuming after step 3" in shown
        assert_same_run(recipe, whole)

    def test_another_learning_rate_is_refused(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        train(recipe, "training.stop_at_step=4")
        before = numbers(recipe)
        with pytest.raises(UsageError, match=r"`optimizer.learning_rate` was 0.001 and is 0.01\.") as error:
            train(recipe, "optimizer.learning_rate=0.01")
        assert error.value.exit_code == ExitCode.USER
        assert numbers(recipe) == before

    def test_another_configuration_in_the_folder_of_the_model_is_refused(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        train(recipe, "training.max_steps=1")
        model = tmp_path / "run" / "model"
        words = (f"model.name_or_path={model}", "model.config=null", f"checkpoint.folder={tmp_path / 'second'}")
        train(recipe, *words, "training.stop_at_step=2")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "hidden_act": "relu", "architectures": None}))
        with pytest.raises(UsageError, match=r"training: `model.config.hidden_act` was None and is 'relu'\."):
            train(recipe, *words)

    def test_more_epochs_after_the_end_are_a_new_run(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        train(recipe)
        with pytest.raises(UsageError, match=r"`training.max_steps` gives 12 steps, but .* is of a training of 8: "):
            train(recipe, "training.max_steps=12")

    def test_a_signal_while_the_model_is_built_takes_no_step(self, whole, tmp_path, monkeypatch):
        recipe = write_tiny_run(tmp_path)
        with monkeypatch.context() as patch:

            def disturbed(*arguments: Any, **named: Any) -> Any:
                os.kill(os.getpid(), signal.SIGUSR1)
                return assemble(*arguments, **named)

            patch.setattr("trainer.training.run.assemble", disturbed)
            before_step(patch, 1, fail)
            assert train(recipe) == ExitCode.STOPPED
        assert train(recipe) == ExitCode.DONE
        assert_same_run(recipe, whole)

    def test_other_training_rows_are_refused(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        train(recipe, "training.stop_at_step=4")
        lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "train.jsonl").write_text("".join([lines[0].replace("word", "worm"), *lines[1:]]))
        with pytest.raises(UsageError, match=r"the prepared training rows differ \(data, tokenizer"):
            train(recipe)

    def test_the_best_of_other_validation_rows_does_not_count(self, tmp_path, capsys):
        recipe = write_tiny_run(tmp_path, logging={"every": "1 step", "to": ["console", "jsonl"]})
        rows = tmp_path / "validation.jsonl"
        lines = rows.read_text().splitlines(keepends=True)
        rows.write_text(json.dumps({"text": "word0", "label": "a"}) + "\n")
        perfect = Evaluated({"loss": 0.0, "accuracy": 1.0}, None)
        with pytest.MonkeyPatch.context() as patch:  # the only row is right from the start
            patch.setattr("trainer.training.whole_split.Evaluator.evaluate", lambda self: perfect)
            assert train(recipe, "training.stop_at_step=4") == ExitCode.STOPPED
        rows.write_text("".join(lines))
        assert train(recipe) == ExitCode.DONE
        shown = capsys.readouterr().out
        assert "validation data changed; best-metric tracking restarts" in shown
        assert re.search(r"best +accuracy 0\.\d+ at step 8", shown), shown

    def test_never_refuses_a_used_folder(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        train(recipe, "training.stop_at_step=4")
        with pytest.raises(UsageError, match=r"`checkpoint.resume` is never"):
            train(recipe, "checkpoint.resume=never")


class TestFailures:
    def test_a_loss_that_is_not_finite(self, tmp_path, monkeypatch, capsys):
        def poison(engine: NativeEngine) -> None:
            with torch.no_grad():
                engine.parameters["classifier.weight"].fill_(float("nan"))

        recipe = write_tiny_run(tmp_path)
        before_step(monkeypatch, 3, poison)
        with pytest.raises(NonFiniteError, match="step 3: the loss is nan") as error:
            train(recipe, "checkpoint.every=1 step", 'logging.to=["console"]')
        assert error.value.exit_code == ExitCode.NON_FINITE == 3
        assert CheckpointStore(tmp_path / "run", 1).steps() == [1, 2]
        assert [record.step for record in metrics(recipe).steps] == [1, 2]
        shown = capsys.readouterr().out
        assert "exit code 3" in shown
        assert str(tmp_path / "run") in shown

    def test_a_bad_step_that_is_read_one_step_late_is_the_same(self, tmp_path, monkeypatch):
        """Step 3 is read after the passes of step 4, with the weights of step 2."""
        lose_the_loss(monkeypatch, 3)
        keys = ("logging.every=4 steps", "training.max_bad_steps=1")
        at_once, late = (write_tiny_run(tmp_path / name) for name in ("at_once", "late"))
        assert train(late, *keys) == ExitCode.DONE
        begin_step = NativeEngine.begin_step

        def waiting(self: NativeEngine, batch: Any, before_update: Callable[[], object]) -> Any:
            before_update()
            result = begin_step(self, batch)()
            return lambda: result

        monkeypatch.setattr(NativeEngine, "begin_step", waiting)
        assert train(at_once, *keys) == ExitCode.DONE
        assert_same_run(at_once, late)
        (one,), (other,) = metrics(at_once).bad_steps, metrics(late).bad_steps
        assert one.step == 3
        assert repr(one) == repr(other), "of NaN, too"

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        (tmp_path / "run").write_text("a file in the way")
        with pytest.raises(UsageError, match=r"`checkpoint.folder` must be a folder that can be written") as error:
            train(recipe)
        assert error.value.exit_code == ExitCode.USER

    @pytest.mark.parametrize(("every", "label", "other"), [(1, "resume", "restart"), (100, "restart", "resume")])
    def test_our_own_bug_ends_with_a_summary_too(self, tmp_path, monkeypatch, capsys, every, label, other):
        recipe = write_tiny_run(tmp_path)
        before_step(monkeypatch, 3, fail)
        checkpoint = (f"checkpoint.every={every} steps", "checkpoint.asynchronous=false")
        with pytest.raises(RuntimeError, match="power"):
            train(recipe, 'logging.to=["console"]', *checkpoint)
        shown = capsys.readouterr().out
        assert "exit code 1" in shown
        assert f"\n  {label:<12}" in shown
        assert f"\n  {other:<12}" not in shown, "a command resumes only where a checkpoint is"
        assert "power" not in shown, "the traceback on standard error has the message"

    def test_without_a_validation_split(self, tmp_path):
        recipe = write_tiny_run(tmp_path, evaluation={"every": None}, data={"validation": None})
        assert train(recipe) == ExitCode.DONE
        assert metrics(recipe).evaluations == []
        assert not (tmp_path / "run" / "best").exists()


EVALUATIONS = ("evaluation.every=1 step", "optimizer.learning_rate=1e-30")
PATIENCE = (*EVALUATIONS, "evaluation.patience=1")


def stop_by_a_file(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("trainer.ranks.stopping._LOOK_SECONDS", 0.0)
    before_step(monkeypatch, 3, lambda engine: (folder / "stop").touch())


def stop_by_a_signal(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    before_step(monkeypatch, 3, lambda engine: os.kill(os.getpid(), signal.SIGUSR1))


def fail_to_export(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("trainer.training.assembly.complete_folder", fail)


def die_in_export(recipe: Path, place: str) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as disturbed:
        disturbed.setattr(f"trainer.training.model_card.{place}", die)
        train(recipe, "evaluation.every=null")


def lose_a_loss(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    lose_the_loss(monkeypatch, 3)


Setting = Callable[[pytest.MonkeyPatch, Path], None] | None


class TestTheSameCommandAgain:
    """Each ending, and the same command after it: it repeats the end, or goes on to that of an undisturbed run."""

    @pytest.mark.parametrize(
        ("keys", "setting", "code", "step"),
        [
            ((), None, 0, 8),
            (PATIENCE, None, 0, 2),
            ((), lose_a_loss, 3, 2),
        ],
        ids=["max_steps", "patience", "non-finite"],
    )
    def test_changes_nothing(self, tmp_path, monkeypatch, keys: Sequence[str], setting: Setting, code, step):
        recipe, run_folder = write_tiny_run(tmp_path), tmp_path / "run"
        if setting:
            setting(monkeypatch, run_folder)
        keys = (*keys, "checkpoint.every=1 step")
        assert self.ended(recipe, *keys) == code
        assert CheckpointStore(run_folder, 1).steps()[-1] == step
        before, files = numbers(recipe), self.files(run_folder)
        assert self.ended(recipe, *keys) == code
        assert numbers(recipe) == before
        after = self.files(run_folder)
        assert [name for name in files.keys() | after.keys() if files.get(name) != after.get(name)] == []

    @pytest.mark.parametrize(
        ("keys", "setting", "code", "step"),
        [
            (("training.stop_at_step=3",), None, 75, 3),
            ((), stop_by_a_file, 75, 4),
            ((), stop_by_a_signal, 75, 4),
            ((), fail_to_export, 1, 8),
        ],
        ids=["stop_at_step", "stop file", "signal", "failed export"],
    )
    def test_goes_on(self, whole, tmp_path, monkeypatch, keys: Sequence[str], setting: Setting, code, step):
        recipe, run_folder = write_tiny_run(tmp_path), tmp_path / "run"
        keys = (*keys, "evaluation.every=null")
        with monkeypatch.context() as disturbed:
            if setting:
                setting(disturbed, run_folder)
            assert self.ended(recipe, *keys) == code
        assert CheckpointStore(run_folder, 1).steps()[-1] == step
        for _ in range(2):  # the second time, nothing is left to train
            assert self.ended(recipe, *keys) == ExitCode.DONE
            one, other = weights(recipe), weights(whole)
            assert all(torch.equal(one[name], other[name]) for name in other)
            assert [record.loss for record in metrics(recipe).steps] == [x.loss for x in metrics(whole).steps]

    @pytest.mark.parametrize(
        "place",
        [
            pytest.param("write_card", marks=pytest.mark.slow, id="half of the files"),
            pytest.param("replace_folder", id="before the move"),
        ],
    )
    def test_after_a_kill_within_the_export_writes_the_same_model(self, whole, tmp_path, place: str):
        recipe, run_folder = write_tiny_run(tmp_path), tmp_path / "run"
        process = forking().Process(target=die_in_export, args=(recipe, place))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        assert CheckpointStore(run_folder, 1).steps()[-1] == 8
        assert (run_folder / ".saving-model" / "model.safetensors").is_file()
        assert not (run_folder / "model").exists(), "half a folder must not look like a model"
        assert train(recipe, "evaluation.every=null") == ExitCode.DONE
        assert not list(run_folder.glob(".*model*"))
        assert all(torch.equal(tensor, weights(recipe)[name]) for name, tensor in weights(whole).items())
        names = [sorted(path.name for path in (one.parent / "run" / "model").iterdir()) for one in (recipe, whole)]
        assert names[0] == names[1]

    def test_and_a_longer_patience_goes_on(self, tmp_path, capsys):
        recipe = write_tiny_run(tmp_path)
        for patience, last in ((1, 2), (1, 2), (3, 4)):
            keys = (*EVALUATIONS, f"evaluation.patience={patience}", 'logging.to=["console", "jsonl"]')
            assert train(recipe, *keys) == ExitCode.DONE
            assert [record.step for record in metrics(recipe).evaluations][-1] == last
        assert " ".join(capsys.readouterr().out.split()).count("already ended: no better evaluation within") == 1

    @staticmethod
    def ended(recipe: Path, *keys: str) -> int:
        try:
            return train(recipe, *keys)
        except TrainerError as error:
            return error.exit_code

    @staticmethod
    def files(folder: Path) -> dict[str, bytes]:
        """Return the models and checkpoints of a run."""
        found = [path for path in folder.rglob("*") if path.is_file() and path.parent not in (folder, folder / "ranks")]
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_cold(words: Sequence[object], **variables: str) -> Any:
    """As `warm.start` with a fault, but an interpreter from its start to its end."""
    program = processes.ROOT / "tests" / "helpers" / "faulty_run.py"
    return processes.start([sys.executable, program, *map(str, words)], **variables)


def start_ranks(
    recipe: Path,
    *overrides: str,
    fault: tuple[str, int, int] | None = None,
    of_rank: Mapping[int, Sequence[str]] | None = None,
    port: int | None = None,
    how: Callable[..., Any] | None = None,
) -> list[Any]:
    """Two ranks as a bare launcher starts them; with `fault`, as `faulty_run.py` describes it.

    `of_rank` holds more overrides, of one rank alone; `how` starts a rank.
    """
    start = how or partial(warm.start, faulty=fault is not None)
    port = str(port or _free_port())
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(
            [*(fault or ()), "run", recipe, *overrides, *(of_rank or {}).get(rank, ())],
            RANK=str(rank), LOCAL_RANK=str(rank), **common,
        )
        for rank in range(2)
    ]  # fmt: skip


def finish_ranks(ranks: list[Any]) -> list[Any]:
    try:
        return [processes.finish(rank) for rank in ranks]
    finally:
        for rank in ranks:
            processes.kill(rank)


def run_ranks(recipe: Path, *overrides: str, fault: tuple[str, int, int] | None = None) -> list[int]:
    ended = finish_ranks(start_ranks(recipe, *overrides, fault=fault))
    for rank in ended:
        print(rank.stdout, rank.stderr)  # shown where the test fails
    return [rank.returncode for rank in ended]


class TestTwoRanks:
    def test_train_as_one_process(self, whole, tmp_path):
        recipe = write_tiny_run(tmp_path)
        assert run_ranks(recipe) == [0, 0]
        for one, other in zip(metrics(recipe).steps, metrics(whole).steps, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
            assert (one.samples, one.tokens, one.learning_rate) == (other.samples, other.tokens, other.learning_rate)
        for one, other in zip(metrics(recipe).evaluations, metrics(whole).evaluations, strict=True):
            assert one.metrics == pytest.approx(other.metrics, rel=1e-5)

    def test_another_recipe_on_one_is_refused_by_both(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        ended = finish_ranks(
            start_ranks(recipe, of_rank={1: ("optimizer.learning_rate=0.5", "parallel.sequence=false")})
        )
        assert [rank.returncode for rank in ended] == [2, 2]
        for rank in ended:
            assert (
                f"`optimizer.learning_rate` is 0.001 on rank 0 ({socket.gethostname()}), 0.5 on rank 1" in rank.stderr
            )
            assert rank.stderr.count(" on rank 0 ") == 1, "nothing else differs"
        assert not (tmp_path / "run").exists()

    def test_other_code_on_one_is_refused_by_both(self, tmp_path):
        ended = finish_ranks(start_ranks(write_tiny_run(tmp_path), fault=("other_code", 1, 1)))
        assert [rank.returncode for rank in ended] == [2, 2]
        assert all("trainer's source is " in rank.stderr for rank in ended)
        assert all(", 0123456789ab on rank 1 (" in rank.stderr for rank in ended)

    def test_a_port_that_another_program_has(self, tmp_path):
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            first, second = start_ranks(write_tiny_run(tmp_path), port=port)
            try:
                ended = processes.finish(first)
            finally:
                processes.kill(second)  # as a launcher does
                processes.finish(second)
        assert ended.returncode == 2
        assert f"error: MASTER_PORT is {port}, but another program has that port of" in ended.stderr
        assert "set it to a free port" in ended.stderr
        assert "Traceback" not in ended.stderr

    @pytest.mark.slow
    def test_a_rank_that_fails_takes_the_other_with_it_and_is_named(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        first, second = finish_ranks(start_ranks(recipe, 'logging.to=["console"]', fault=("raise", 1, 3)))
        assert (first.returncode, second.returncode) == (1, 1)
        assert "RuntimeError: the fault" in second.stderr
        assert "error: another rank failed or was killed" in first.stderr
        assert "Traceback" not in first.stderr
        assert "exit code 1" in first.stdout

    @pytest.mark.slow
    def test_a_rank_that_is_killed_does_not_leave_the_other_waiting(self, tmp_path):
        assert run_ranks(write_tiny_run(tmp_path), fault=("die", 1, 3)) == [1, -signal.SIGKILL]

    @pytest.mark.slow
    def test_a_rank_that_is_stopped_does_not_leave_the_other_waiting(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        first, second = start_ranks(recipe, "parallel.stall_timeout=4 seconds", fault=("stop", 1, 3))
        try:
            ended = processes.finish(first)
        finally:
            processes.kill(second)  # as a launcher does
            processes.finish(second)
        assert ended.returncode == 1
        assert "error: no rank has made any progress for 4 seconds" in ended.stderr
        assert ended.stderr.count("no answer") == 1

    @pytest.mark.slow
    def test_half_and_half_is_the_whole_bit_for_bit(self, tmp_path):
        parts, whole = write_tiny_run(tmp_path / "parts"), write_tiny_run(tmp_path / "whole")
        assert run_ranks(whole) == [0, 0]
        assert run_ranks(parts, "training.stop_at_step=4") == [75, 75]
        assert run_ranks(parts) == [0, 0]
        assert_same_run(parts, whole)

    @pytest.mark.slow
    def test_a_run_may_go_on_with_other_ranks(self, whole, tmp_path):
        recipe = write_tiny_run(tmp_path)
        assert run_ranks(recipe, "training.stop_at_step=4") == [75, 75]
        assert train(recipe) == ExitCode.DONE
        for one, other in zip(metrics(recipe).steps, metrics(whole).steps, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_signal_to_either_stops_both(self, tmp_path, rank):
        parts, whole = write_tiny_run(tmp_path / "parts"), write_tiny_run(tmp_path / "whole")
        assert run_ranks(whole) == [0, 0]
        assert run_ranks(parts, fault=("terminate", rank, 3)) == [75, 75]
        assert run_ranks(parts) == [0, 0]
        assert_same_run(parts, whole)

    @pytest.mark.slow
    def test_a_loss_that_is_not_finite_on_one_ends_both(self, tmp_path):
        assert run_ranks(write_tiny_run(tmp_path), fault=("nan", 1, 3)) == [3, 3]

    @pytest.mark.slow
    def test_a_folder_that_cannot_be_written_ends_both_as_the_users_error(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        (tmp_path / "run").write_text("a file in the way")
        assert run_ranks(recipe) == [2, 2]

    @pytest.mark.slow
    def test_the_interpreter_does_not_abort_after_a_failure(self, tmp_path):
        """Gloo's threads abort it where something, a traceback's frame say, still holds the process group."""
        recipe = write_tiny_run(tmp_path, training={"max_steps": 4})
        ended = finish_ranks(start_ranks(recipe, fault=("nan", 1, 3), how=start_cold))
        assert [rank.returncode for rank in ended] == [3, 3]
