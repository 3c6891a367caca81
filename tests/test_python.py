"""The Python interface: errors as exceptions, ranks, laziness, and extensions of installed packages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

import trainer
from tests.helpers.processes import ROOT, environment, finish, kill, start
from tests.helpers.tiny_run import write_tiny_run
from trainer.base import extensions
from trainer.base.errors import ExitCode, error_of_values, error_to_values
from trainer.models.describe import describe
from trainer.models.families import table  # noqa: F401  # refuses its own names
from trainer.training import describing


def script(folder: Path, text: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script by Python, or by the program of `command`; the folder is on the path of its imports."""
    (folder / "script.py").write_text(dedent(text), encoding="utf-8")
    path = f"{folder}:{ROOT}"
    process = start([sys.executable, *command, folder / "script.py"], PYTHONPATH=path, **variables)
    try:
        return finish(process, 240)
    finally:
        kill(process)


class TestImport:
    def test_every_name_is_there(self):
        for name in trainer.__all__:
            assert getattr(trainer, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'runn'"):
            _ = trainer.runn  # type: ignore[attr-defined]

    def test_neither_the_import_nor_a_recipe_imports_torch(self, tmp_path):
        file = write_tiny_run(tmp_path)
        ended = script(
            tmp_path,
            f"""
            import sys
            import trainer
            assert "pydantic" not in sys.modules
            recipe = trainer.load_recipe({str(file)!r}, {{"evaluation.every": "2 steps"}})
            trainer.register_metric("share", "nowhere:share", tasks=["sequence_classification"])
            trainer.register_family("nowhere", "nowhere:FAMILY")
            assert str(recipe.recipe.evaluation.every) == "2 steps"
            assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
            """,
        )
        assert ended.returncode == 0, ended.stderr


class OwnError(trainer.RecipeError):
    """An error of another package."""


class TestErrors:
    def test_of_a_recipe_hold_all_problems(self, tmp_path):
        with pytest.raises(trainer.RecipeError) as caught:
            trainer.load_recipe(write_tiny_run(tmp_path), {"training.epoch": 1, "precision": "fp8"})
        assert len(caught.value.problems) == 2
        assert isinstance(caught.value, trainer.TrainerError)

    def test_of_a_run_in_this_process(self, tmp_path):
        file = write_tiny_run(tmp_path, task={"text": "words"})
        with pytest.raises(trainer.DataError, match=r"`task.text`.*words"):
            trainer.run(trainer.load_recipe(file))

    @pytest.mark.slow
    def test_of_ranks_in_other_processes(self, tmp_path):
        file = write_tiny_run(tmp_path, task={"text": "words"})
        with pytest.raises(trainer.DataError, match=r"`task.text`.*words") as caught:
            trainer.run(file, processes=2)
        assert caught.value.exit_code == ExitCode.USER

    @pytest.mark.parametrize(
        "error",
        [
            trainer.RecipeError("one", "two"),
            trainer.DataError("no column"),
            trainer.NonFiniteError("step 3"),
            trainer.TrainerError("the disk is full"),
            trainer.OutOfMemoryError("the memory is full", ["trainer", "plan"]),
            OwnError("one", "two"),
        ],
    )
    def test_keep_their_class_on_the_way(self, error):
        other = error_of_values(json.loads(json.dumps(error_to_values(error))))
        kind = trainer.RecipeError if type(error) is OwnError else type(error)
        assert (type(other), str(other), other.exit_code) == (kind, str(error), error.exit_code)
        for name in ("problems", "plan_command"):
            assert getattr(other, name, None) == getattr(error, name, None)


class TestRanks:
    @pytest.mark.slow
    @pytest.mark.usefixtures("warm_python")
    def test_a_thread_trains_as_the_main_one_and_two_ranks_do(self, tmp_path):
        """A thread gets no signals, so that the run has a process of its own there."""
        file = write_tiny_run(tmp_path)
        results = {}

        def train(name: str, processes: int | None = None) -> None:
            recipe = trainer.load_recipe(file, {"checkpoint.folder": str(tmp_path / name)})
            results[name] = trainer.run(recipe, processes=processes)

        thread = threading.Thread(target=train, args=("thread",))
        thread.start()
        train("main")
        thread.join()
        train("two ranks", 2)
        one = results["main"]
        assert (one.outcome, one.model_folder, one.best_folder) == (
            "finished",
            tmp_path / "main" / "model",
            tmp_path / "main" / "best",
        )
        assert [record.step for record in one.evaluations] == [4, 8]
        assert one.best.value == max(record.metrics["accuracy"] for record in one.evaluations)
        for other in (results["thread"], results["two ranks"]):
            assert other.metrics == pytest.approx(one.metrics, rel=1e-4)
            losses = [record.loss for record in other.steps]
            assert losses == pytest.approx([record.loss for record in one.steps], rel=1e-5)

    def test_a_stopped_run_is_reported_as_stopped(self, tmp_path):
        result = trainer.run(trainer.load_recipe(write_tiny_run(tmp_path), {"training.stop_at_step": 2}))
        assert (result.outcome, result.model_folder, len(result.steps)) == ("stopped", None, 2)

    @pytest.mark.slow
    @pytest.mark.usefixtures("warm_python")
    def test_ranks_of_torchrun(self, tmp_path):
        file = write_tiny_run(tmp_path)
        text = f"""
            import trainer
            result = trainer.run({str(file)!r})
            # One write each, because the ranks share the output.
            print(f"result {{result.outcome}} {{len(result.steps)}} {{result.best.step}}\\n", end="")
            try:
                trainer.run({str(file)!r}, processes=3)
            except trainer.LaunchError as error:
                print("refused\\n", end="")
            """
        ended = script(tmp_path, text, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("result finished 8 ") == 2
        assert ended.stdout.count("refused") == 2

    @pytest.mark.slow
    def test_an_interrupt_saves_and_stops_them(self, tmp_path):
        file = write_tiny_run(tmp_path, training={"max_steps": 100_000}, evaluation={"every": None})
        text = f"""
            import trainer
            result = trainer.run({str(file)!r}, processes=2)
            print("result", result.outcome)
            """
        (tmp_path / "script.py").write_text(dedent(text), encoding="utf-8")
        process = start([sys.executable, tmp_path / "script.py"], PYTHONPATH=str(ROOT))
        try:
            deadline = time.monotonic() + 120
            metrics = tmp_path / "run" / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            ended = finish(process, 120)
        finally:
            kill(process)
        assert "result stopped" in ended.stdout, ended.stdout + ended.stderr
        assert list((tmp_path / "run" / "checkpoints").glob("step-*"))

    def test_registrations_of_a_notebook_are_refused_in_other_processes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(extensions, "_registered", {})
        monkeypatch.setattr(extensions, "_consumers", {})
        extensions.register("metric", "mine", None, "__main__")
        with pytest.raises(trainer.UsageError, match=r"registered metric 'mine'.*move the registration into a module"):
            trainer.run(write_tiny_run(tmp_path), processes=2)


class TestAssembly:
    def test_a_model_is_described_once_and_adapted_before_the_engine_takes_it(self, tmp_path, monkeypatch):
        described = []
        monkeypatch.setattr(describing, "describe", lambda *words: described.append(words) or describe(*words))

        def freeze(model: nn.Module) -> None:
            model.base_model.requires_grad_(False)

        with trainer.assemble(write_tiny_run(tmp_path), adapt=freeze) as parts:
            before = {name: part.clone() for name, part in parts.engine.held().items()}
            for batch in islice(parts.train_loader, 2):
                assert parts.engine.train_step(batch).is_finite
            changed = {name for name, part in parts.engine.held().items() if not torch.equal(part, before[name])}
            assert set(parts.evaluate()) == {"loss", "accuracy", "f1_macro"}
            parts.export(tmp_path / "model")
        assert len(described) == 1
        assert changed == {"classifier.weight", "classifier.bias"}
        assert (tmp_path / "model" / "README.md").exists()
        with pytest.raises(ReferenceError):  # nothing holds the ranks together any more
            _ = parts.engine


class TestRegistering:
    @pytest.fixture(autouse=True)
    def _own_tables(self, monkeypatch):
        monkeypatch.setattr(extensions, "_registered", {})

    def test_a_shipped_name_is_refused(self):
        with pytest.raises(trainer.UsageError, match="'accuracy' ships with trainer"):
            trainer.register_metric("accuracy", max)
        with pytest.raises(trainer.UsageError, match="'bert' ships with trainer"):
            trainer.register_family("bert", "nowhere:FAMILY")
        kind, name = min(extensions._SHIPPED)
        with pytest.raises(trainer.UsageError, match=f"{name!r} ships with trainer"):
            extensions.register(kind, name, None, "elsewhere")
        assert not extensions.registered()

    def test_keys_that_a_task_lacks_are_refused(self):
        class Keys(trainer.TextKeys):
            type: str = "free"

        for keys, problem in ((dict, "a subclass of TextKeys"), (Keys, "must be Literal")):
            with pytest.raises(trainer.UsageError, match=problem):
                trainer.register_task(keys, "nowhere:build")

    def test_recipes_have_names(self, tmp_path):
        write_tiny_run(tmp_path / "tiny_one").rename(tmp_path / "tiny_one" / "tiny_one.json")
        trainer.register_recipes(tmp_path / "tiny_one")
        assert trainer.load_recipe("tiny_one").recipe.name == "tiny"
        (tmp_path / "tiny_one" / "bert_sample.json").write_text("{}")
        with pytest.raises(trainer.UsageError, match="bert_sample, which ship with trainer"):
            trainer.register_recipes(tmp_path / "tiny_one")


def install(folder: Path, name: str, text: str, entry_point: str) -> None:
    """A distribution as pip leaves it: a module, and the metadata beside it."""
    (folder / f"{name}.py").write_text(dedent(text), encoding="utf-8")
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[trainer.extensions]\n{name} = {entry_point}\n", encoding="utf-8")


class TestEntryPoints:
    @pytest.mark.slow
    def test_are_loaded_by_check_and_on_every_rank(self, tmp_path):
        install(
            tmp_path,
            "shares",
            """
            import trainer

            def register():
                trainer.register_metric("share", "shares:share", tasks=["sequence_classification"])

            def share(predictions, labels):
                return float((predictions == labels).mean())
            """,
            "shares:register",
        )
        file = write_tiny_run(tmp_path / "run", task={"metrics": ["share", "accuracy"]})
        with pytest.raises(trainer.RecipeError, match=r"task.metrics.*share"):
            trainer.load_recipe(file)
        command = [sys.executable, "-m", "trainer"]
        path = f"{tmp_path}:{ROOT}"
        checked = finish(start([*command, "check", file], PYTHONPATH=path), 120)
        assert checked.returncode == 0, checked.stderr
        ended = finish(start([*command, "run", file, "--processes", "2"], PYTHONPATH=path), 240)
        assert ended.returncode == 0, ended.stderr
        lines = (tmp_path / "run" / "run" / "metrics.jsonl").read_text().splitlines()
        last = [line["eval"] for line in map(json.loads, lines) if "eval" in line][-1]
        assert last["share"] == last["accuracy"]
        assert json.loads(lines[0])["run"]["versions"]["shares"] == "1.2"

    def test_one_that_fails_is_named(self, tmp_path):
        install(tmp_path, "broken", "raise ValueError('no licence')", "broken")
        variables = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
        command = [sys.executable, "-m", "trainer", "check", "bert_sample"]
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert ended.returncode == ExitCode.USER
        assert "the extension `broken` of broken 1.2 could not be loaded: ValueError: no licence" in ended.stderr


class Watcher(trainer.Callback):
    """Writes down its moments, evaluates at step 1, stops at step 3, and fails at step `fails_at`."""

    def __init__(self, fails_at: int = 0) -> None:
        self.moments: list[str] = []
        self.fails_at = fails_at

    def start(self, run):
        self.moments.append(f"start {run.resumed_from}")

    def step(self, record):
        self.moments.append(f"step {record.step}")
        return trainer.Request(
            evaluate=record.step == 1, stop=record.step == 3, log={"inverse": 1 / (self.fails_at - record.step)}
        )

    def evaluation(self, record):
        self.moments.append(f"evaluation {record.step}")

    def checkpoint(self, record):
        assert record.folder.is_dir()
        self.moments.append(f"checkpoint {record.step}")

    def end(self, record):
        self.moments.append(f"end {record.outcome}")


class TestCallbacks:
    def test_a_run_that_one_stops_resumes(self, tmp_path):
        logging = {"to": ["csv", "tensorboard"]}
        file = write_tiny_run(tmp_path, training={"max_steps": 5}, evaluation={"every": None}, logging=logging)
        watcher = Watcher()
        result = trainer.run(file, callbacks=[watcher])
        assert (result.outcome, result.model_folder) == ("stopped", None)
        resumed = trainer.run(file, callbacks=[watcher])
        assert (resumed.outcome, resumed.best.step) == ("finished", 1)
        assert watcher.moments == [
            "start None", "step 1", "evaluation 1", "step 2", "step 3", "checkpoint 3", "end stopped",
            "start 3", "step 4", "step 5", "checkpoint 5", "end finished",
        ]  # fmt: skip
        assert [record.numbers["inverse"] for record in resumed.logged] == [-1 / step for step in range(1, 6)]
        rows = (tmp_path / "run" / "metrics_logged.csv").read_text().splitlines()
        assert (rows[0], rows[-1], len(rows)) == ("step,inverse", "5,-0.2", 6)

    def test_an_error_of_one_has_its_name_and_nothing_is_lost(self, tmp_path):
        file = write_tiny_run(tmp_path, training={"max_steps": 5}, evaluation={"every": None})
        watcher = Watcher(fails_at=2)
        with pytest.raises(
            trainer.TrainerError, match=r"`Watcher` failed in `step`: ZeroDivisionError.*test_python.py"
        ):
            trainer.run(file, callbacks=[watcher])
        assert watcher.moments[-1] == "end failed"

    def test_one_that_other_processes_cannot_make_is_refused_before_the_start(self, tmp_path):
        with pytest.raises(
            trainer.UsageError, match=r"`Watcher`.*has values \(moments, fails_at\) and is no dataclass"
        ):
            trainer.run(write_tiny_run(tmp_path), processes=2, callbacks=[Watcher()])
