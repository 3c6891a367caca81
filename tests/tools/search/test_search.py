"""Searches: their keys, trials that end in every way, several processes, and a real one that is stopped and goes on."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from scipy.stats import t

from tests.helpers import warm
from tests.helpers.figures import figures_of
from tests.helpers.processes import finish
from tests.helpers.tiny_run import write_tiny_run
from tests.observe.samples import run_info
from trainer.base.errors import ExitCode, RecipeError, TrainerError, UsageError
from trainer.observe.metrics_file import MetricsFile
from trainer.observe.records import EndRecord, EvaluationRecord
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.search import search as search_module
from trainer.tools.search.search import SearchRequest, search
from trainer.tools.search.search_result import _half_of_share
from trainer.tools.search.space import Axis, read_space
from trainer.tools.search.study import Rules, Study, Yardsticks
from trainer.tools.search.trial_run import TrialRun

RATE = "optimizer.learning_rate"


class TestSpace:
    def test_ranges_lists_and_overrides(self):
        words = [f"{RATE}=1e-5..1e-3,log", "model.dropout=0,0.1", "training.epochs=1..3", "name=searched"]
        common, axes = read_space("bert_sample", words)
        assert common == ["name=searched"]
        assert axes == [
            Axis(RATE, ends=("1e-5", "1e-3"), is_log=True),
            Axis("model.dropout", values=("0", "0.1")),
            Axis("training.epochs", ends=("1", "3")),
        ]
        assert [axis.is_whole for axis in axes if axis.ends] == [False, True]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "needs a key with several values"),
            ([f"{RATE}=1e-3..1e-5"], "must be a range low..high, but is 1e-3..1e-5; raise its end"),
            ([f"{RATE}=0..1,log"], "above 0"),
            ([f"{RATE}=1e-3,0.001"], "equal values"),
            (["parallel.strategy=ddp,fsdp"], "trainer plan --search"),
            (["training.micro_batch_size=2..8"], "changes how a recipe trains"),
            (["evaluation.batch_size=4,8"], "changes how a recipe trains"),
        ],
    )
    def test_wrong_spaces_are_refused(self, words, message):
        with pytest.raises(UsageError, match=re.escape(message)):
            read_space("bert_sample", words)

    def test_each_value_is_checked_before_the_first_trial(self):
        with pytest.raises(RecipeError, match="dropout"):
            read_space("bert_sample", ["model.dropout=0,0.1,2"])


@dataclass
class Trained:
    """Stand-in for `TrialRun.train`: each trial evaluates twice, and `accuracy` gives the value of its overrides."""

    accuracy: Callable[[dict[str, str]], float]
    codes: dict[int, int] = field(default_factory=dict)  # of the first runs, by their order
    runs: list[tuple[str, ...]] = field(default_factory=list)
    loss: Callable[[dict[str, str]], float] = lambda _: 1.0

    def __call__(self, run: TrialRun, asked: Callable[[], int], is_poor: Callable[[EvaluationRecord], bool]) -> Any:
        words = {key: text for key, _, text in (word.partition("=") for word in run.words)}
        number = len(self.runs)
        self.runs.append(tuple(run.words))
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "output.txt").write_text("loading\nerror: `x` must be 1, but is 2; use 1\n")
        code = self.codes.get(number, ExitCode.DONE)
        if code == ExitCode.STOPPED:
            os.kill(os.getpid(), signal.SIGINT)
            while not asked():
                time.sleep(0.01)
            return code
        file = MetricsFile()
        file.start(replace(run_info(run.folder), baselines={"accuracy": 0.5, "loss": 0.4}))
        for step in (1, 2) if code == ExitCode.DONE else ():
            value = self.accuracy(words) * step
            record = EvaluationRecord(step, {"loss": self.loss(words), "accuracy": value, "f1_macro": 0.5})
            file.evaluation(record)
            if is_poor(record):
                file.close()
                return None
        file.end(EndRecord("finished", code, run.folder, None, None, 2, 1.0, "trainer run"))
        file.close()
        return code


@pytest.fixture
def request_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(trained: Trained, *words: str, **options: Any) -> SearchRequest:
        monkeypatch.setattr(TrialRun, "train", lambda *parts: trained(*parts))  # noqa: PLW0108
        found = {
            "recipe": "bert_sample", "words": words or ("model.dropout=0,0.1,0.2",), "trials": 3, "processes": 1,
            "at_once": 1, "seeds": 1, "sampler": "tpe", "pruner": "median", "storage": None,
            "output": tmp_path / "found", "test": None, "write": None,
        }  # fmt: skip
        return SearchRequest(**{**found, **options})

    return make


def by_dropout(words: dict[str, str]) -> float:
    return 0.3 - abs(float(words["model.dropout"]) - 0.1) + (float(words.get("training.seed", 42)) - 42) / 100


def result(request: SearchRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((request.output / "search.json").read_text())
    return found


class TestTrials:
    @pytest.mark.parametrize("ending", ["json", "yaml"])
    def test_the_best_trial_is_written_as_a_recipe(self, request_of, tmp_path, ending):
        place = tmp_path / f"best.{ending}"
        request = request_of(Trained(by_dropout), sampler="grid", trials=9, write=place)
        shown: list[str] = []
        assert search(request, shown.append) == ExitCode.DONE
        found = result(request)
        assert [one["state"] for one in found["trials"]] == ["complete"] * 3
        assert found["best"]["overrides"] == ["model.dropout=0.1"]
        assert found["best"]["value"] == pytest.approx(0.6)
        assert found["best"]["curve"] == [[1, pytest.approx(0.3)], [2, pytest.approx(0.6)]]
        written = place.read_text()
        assert (json.loads if ending == "json" else yaml.safe_load)(written) == {
            "extends": "bert_sample", "name": "best", "model": {"dropout": 0.1},
        }  # fmt: skip
        assert written.startswith("{" if ending == "json" else "# ")
        assert load_recipe(str(place)).recipe.name == "best"
        assert not any("note" in line for line in shown)
        assert any("complete" in line for line in shown)
        drawn = figures_of(request.output / "search.html")
        assert {"validation accuracy", "values of the complete trials; the best one on top"} <= set(drawn)

    def test_a_written_recipe_works_in_another_folder_and_has_a_name_of_its_own(self, request_of, tmp_path):
        (tmp_path / "rows.csv").write_text("sentence,label\na,1\n")
        (tmp_path / "sub").mkdir()
        words = ("model.dropout=0,0.1", "data.source=files", "data.train=rows.csv", "data.validation=0.5")
        place = tmp_path / "sub" / "bert_sample.json"
        search(request_of(Trained(by_dropout), *words, trials=2, write=place), print)
        recipe = load_recipe(str(place)).recipe
        assert recipe.data.train == str(tmp_path / "rows.csv")
        assert recipe.name == "bert_sample-best"

    @pytest.mark.parametrize("name", ["best", "best.toml", "no/best.json", "there.yaml"])
    def test_a_recipe_that_cannot_be_written_is_refused_first(self, request_of, tmp_path, name):
        (tmp_path / "there.yaml").touch()
        trained = Trained(by_dropout)
        with pytest.raises(UsageError, match="--write"):
            search(request_of(trained, write=tmp_path / name), print)
        assert not trained.runs

    @pytest.mark.parametrize(
        ("losses", "metric", "best", "note"),
        [
            ((0.7, 0.5, 0.6), "accuracy", "0.1", "the trials do not differ in accuracy; the loss decides"),
            ((0.5, 0.5, 0.5), "accuracy", "0", "the trials do not differ in accuracy and loss; the first one with"),
            ((0.7, 0.5, 0.5), "accuracy", "0.1", "the trials do not differ in accuracy; the first one with the lowest"),
            ((0.7, math.nan, 0.8), "accuracy", "0", "the trials do not differ in accuracy; the loss decides"),
            ((0.5, 0.5, 0.5), "loss", "0", "the trials do not differ in loss; the first one with the lowest loss"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("seeds", [1, 2])
    def test_the_loss_decides_between_equal_trials(self, request_of, losses, metric, best, note, seeds):
        by_value = dict(zip(("0", "0.1", "0.2"), losses, strict=True))
        trained = Trained(lambda _: 0.2, loss=lambda words: by_value[words["model.dropout"]])
        words = ("model.dropout=0,0.1,0.2", f"evaluation.best={metric}")
        request, shown = request_of(trained, *words, sampler="grid", pruner="none", seeds=seeds), []
        search(request, shown.append)
        found = result(request)
        assert found["best"]["overrides"] == [f"model.dropout={best}"]
        if metric == "accuracy":
            assert found["best"]["loss"] == by_value[best]
            assert [line.split()[:3] for line in shown if "  trial" in line] == [["trial", "accuracy", "loss"]]
        notes = [line for line in shown if line.startswith("note")]
        assert notes[0].startswith(f"note      {note}")
        beats = (
            "the majority class: accuracy 0.5000"
            if metric == "accuracy"
            else "a prediction that ignores the input: loss 0.4000"
        )
        assert found["remarks"][1:] == [f"no trial beats {beats}"]

    def test_only_the_best_trials_may_be_equal(self, request_of):
        trained = Trained(lambda words: {"0": 0.2, "0.1": 0.4, "0.2": 0.4}[words["model.dropout"]])
        request = request_of(trained, sampler="grid", pruner="none")
        search(request, print)
        assert result(request)["remarks"] == [
            "2 trials have the best accuracy and loss; the first one with the lowest loss is taken"
        ]

    @pytest.mark.parametrize(
        ("second", "seeds", "note"),
        [
            # with z = 1.96: 0.6 - (0.6 + z^2 / 816 - z * sqrt(0.24 / 408 + (z / 816)^2)) / (1 + z^2 / 408) = 0.0478
            (0.177, 1, ["another trial is within the error of the best accuracy, ± 0.0478 at 95% with 408 validation"]),
            (0.176, 1, []),
            (0.181, 3, ["another trial is within the error of the best accuracy, ± 0.0497 at 95%; more seeds"]),
        ],
    )
    def test_a_difference_within_the_error_of_the_best_is_noted(self, request_of, second, seeds, note):
        def accuracy(words: dict[str, str]) -> float:
            by_seed = (int(words.get("training.seed", 42)) - 43) / 100  # of the best: 0.38, 0.40 and 0.42
            return {"0": 0.2, "0.1": second}[words["model.dropout"]] + by_seed * (seeds > 1 and second < 0.2)

        request = request_of(Trained(accuracy), "model.dropout=0,0.1", sampler="grid", pruner="none", seeds=seeds)
        search(request, print)
        remarks = [remark for remark in result(request)["remarks"] if "no trial beats" not in remark]
        assert [remark[: len(start)] for remark, start in zip(remarks, note, strict=True)] == note

    def test_a_share_of_all_rows_has_an_error(self):
        # with z = 1.96: 1 - 16 / (16 + z^2)
        assert _half_of_share(1.0, Yardsticks(rows=16, is_share=True)) == pytest.approx(0.1936, abs=1e-4)

    @pytest.mark.parametrize("losses", [{"0": 0.45, "0.1": 0.5}, {"0": 0.5, "0.1": 0.5}])
    def test_an_unknown_error_of_a_metric_is_noted(self, request_of, losses):
        trained = Trained(lambda _: 0.2, loss=lambda words: losses[words["model.dropout"]])
        request = request_of(trained, "model.dropout=0,0.1", "evaluation.best=loss", sampler="grid", pruner="none")
        search(request, print)
        note = (
            "the error of the best loss on 408 validation rows is unknown, so differences may be noise; `--seeds`"
            " measures it"
        )
        assert (note in result(request)["remarks"]) == (losses["0"] != losses["0.1"])

    def test_a_second_start_adds_trials_and_proposes_as_one_start_does(self, request_of, tmp_path):
        words = (f"{RATE}=1e-5..1e-2,log", "model.dropout=0,0.1")
        whole, parts = Trained(by_dropout), Trained(by_dropout)
        search(request_of(whole, *words, trials=6, output=tmp_path / "whole"), print)
        search(request_of(parts, *words, trials=2, output=tmp_path / "parts"), print)
        assert len(parts.runs) == 2
        search(request_of(parts, *words, trials=6, output=tmp_path / "parts"), print)
        assert parts.runs == whole.runs

    def test_a_poor_trial_keeps_nothing(self, request_of):
        trained = Trained(lambda _: 0.1 if len(trained.runs) == 5 else 0.5)
        request = request_of(trained, f"{RATE}=1e-5..1e-2,log", trials=5)
        assert search(request, print) == ExitCode.DONE
        poor = next(one for one in result(request)["trials"] if one["state"] == "pruned")
        assert poor["trial"] == 4
        assert poor["curve"] == [[1, 0.1]]
        assert sorted(one.name for one in (request.output / "trials").iterdir()) == ["0000", "0001", "0002", "0003"]

    def test_failures(self, request_of):
        trained = Trained(by_dropout, codes={0: ExitCode.NON_FINITE, 1: ExitCode.USER})
        request = request_of(trained, f"{RATE}=1e-5..1e-2,log", "model.dropout=0.1")
        assert search(request, print) == ExitCode.DONE
        states = {one["trial"]: (one["state"], one["reason"]) for one in result(request)["trials"]}
        assert states == {
            0: ("pruned", "pruned: its numbers were not finite"),
            1: ("failed", "`x` must be 1, but is 2; use 1"),
            2: ("complete", None),
        }
        assert not (request.output / "trials" / "0000").exists()

    @pytest.mark.parametrize("stage", ["stage=names", "training.seed=1"])
    def test_a_stage_is_searched_by_a_recipe_without_stages(self, request_of, stage):
        trained, options = Trained(by_dropout), {"recipe": "pretraining_sample", "trials": 2}
        with pytest.raises(UsageError, match="that a stage extends, or pretraining_sample stages=null, with the keys"):
            search(request_of(trained, "model.dropout=0.1,0.2", stage, **options), print)
        read_space("pretraining_sample", ["model.dropout=0.1,0.2", "stages=null"])

    def test_a_wrong_recipe_ends_the_search(self, request_of):
        trained = Trained(by_dropout, codes=dict.fromkeys(range(9), ExitCode.USER))
        with pytest.raises(TrainerError, match=r"the first 3 trials failed; .*`x` must be 1"):
            search(request_of(trained, f"{RATE}=1e-5..1e-2,log", trials=9), print)
        assert len(trained.runs) == 3

    def test_a_stopped_trial_goes_on_in_the_next_start(self, request_of):
        trained = Trained(by_dropout, {1: ExitCode.STOPPED})
        request = request_of(trained, f"{RATE}=1e-5..1e-2,log", "model.dropout=0.1")
        assert search(request, print) == 130
        assert [one["state"] for one in result(request)["trials"]] == ["complete", "not ended"]
        assert search(request, print) == ExitCode.DONE
        assert trained.runs[1] == trained.runs[2]
        assert len(trained.runs) == 4

    def test_a_full_disk_loses_no_trial(self, request_of, monkeypatch):
        trained = Trained(by_dropout)
        request = request_of(trained, f"{RATE}=1e-5..1e-2,log", "model.dropout=0.1")
        write = JournalFileBackend.append_logs

        def full(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
            if len(trained.runs) == 2:
                raise OSError(28, "No space left on device")
            write(self, logs)

        with monkeypatch.context() as patched:
            patched.setattr(JournalFileBackend, "append_logs", full)
            with pytest.raises(TrainerError, match=r"No space left .*; make room, .* start the same command again"):
                search(request, print)
        assert search(request, print) == ExitCode.DONE
        assert [one["state"] for one in result(request)["trials"]] == ["complete"] * 3
        assert trained.runs[1] == trained.runs[2]

    def test_another_search_does_not_join(self, request_of):
        search(request_of(Trained(by_dropout)), print)
        with pytest.raises(UsageError, match="other values of: axes"):
            search(request_of(Trained(by_dropout), "model.dropout=0,0.3"), print)
        with pytest.raises(UsageError, match="other values of: facts"):
            search(request_of(Trained(by_dropout), "model.dropout=0,0.1,0.2", "training.epochs=9"), print)

    def test_seeds_give_intervals_and_decide(self, request_of):
        by_luck = {"0": 0.30, "0.1": 0.29, "0.2": 0.1}

        def accuracy(words: dict[str, str]) -> float:
            first = "training.seed" not in words
            return (
                by_luck[words["model.dropout"]]
                if first
                else {"0": 0.1, "0.1": 0.29, "0.2": 0.1}[words["model.dropout"]]
            )

        trained = Trained(accuracy)
        request = request_of(trained, sampler="grid", seeds=3)
        search(request, print)
        best = result(request)["best"]
        assert best["overrides"] == ["model.dropout=0.1"]
        assert best["seeds"] == [pytest.approx(0.58)] * 3
        second = result(request)["trials"][1]
        assert second["seeds"] == [pytest.approx(0.6), pytest.approx(0.2), pytest.approx(0.2)]
        deviation = math.sqrt(((0.6 - 1 / 3) ** 2 + 2 * (0.2 - 1 / 3) ** 2) / 2)
        assert second["half"] == pytest.approx(t.ppf(0.975, 2) * deviation / math.sqrt(3))
        assert len(trained.runs) == 3 + 2 * 3
        search(request, print)
        assert len(trained.runs) == 3 + 2 * 3  # nothing is trained again

    def test_several_workers_train_each_trial_once(self, request_of):
        trained = Trained(by_dropout)
        request = request_of(trained, f"{RATE}=1e-5..1e-2,log", "model.dropout=0.1", trials=8, at_once=3, pruner="none")
        assert search(request, print) == ExitCode.DONE
        assert len(set(trained.runs)) == len(trained.runs) == 8


def test_each_trial_sees_its_share_of_the_gpus(monkeypatch, tmp_path):
    """A script stands in for the run; it waits until both trials have begun."""
    begun, run = tmp_path / "begun", tmp_path / "run"
    run.write_text(
        f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES $*\necho >> {begun}\n"
        f"for _ in $(seq 300); do [ $(wc -l < {begun}) -ge 2 ] && exit 2; sleep 0.1; done\n"
    )
    run.chmod(0o755)
    found = tmp_path / "found"
    request = SearchRequest(
        "bert_sample", ["model.dropout=0,0.1"], 2, None, 2, 1, "tpe", "median", None, found, None, None
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-b,2,MIG-d")
    monkeypatch.setattr(sys, "executable", str(run))
    assert search(request, print) == ExitCode.FAILED
    seen = [(one / "output.txt").read_text().split() for one in (found / "trials").iterdir()]
    assert sorted((words[0], words[-1]) for words in seen) == [("2,MIG-d", "2"), ("7,GPU-b", "2")]
    with pytest.raises(
        UsageError, match=r"2 trials of 3 processes need 6 GPUs, but this machine shows 4; lower --at-o"
    ):
        search(replace(request, processes=3, output=tmp_path / "other"), print)


class TestStudy:
    RULES = Rules([Axis("model.dropout", values=("0", "0.1"))], {}, True, "tpe", "median", 42)

    @pytest.mark.parametrize("database", [False, True])
    def test_processes_share_a_storage(self, tmp_path, database):
        storage = f"sqlite:///{tmp_path}/study.db" if database else None
        context = multiprocessing.get_context("fork")
        claimed, ends = context.Queue(), context.Event()

        def join() -> None:
            trial = Study(tmp_path / "found", storage, self.RULES).claim(2)
            claimed.put(None if trial is None else trial.number)
            ends.wait(60)

        other = context.Process(target=join)
        other.start()
        assert claimed.get(timeout=60) == 0
        own = Study(tmp_path / "found", storage, self.RULES)
        trial = own.claim(2)
        assert trial is not None
        assert trial.number == 1
        assert own.claim(2) is None
        own.tell(trial, 0.5, TrialState.COMPLETE)
        ends.set()
        other.join(60)
        left = own.claim(2)  # its process has ended
        assert left is not None
        assert left.number == 0
        assert [one.value for one in own.trials] == [None, 0.5]

    def test_a_trial_too_many_takes_no_place(self, tmp_path):
        """Two processes may ask for the last trial at once; one of them gives its trial up."""
        study = Study(tmp_path / "found", None, replace(self.RULES, sampler="grid"))
        first = study.claim(1)
        assert first is not None
        surplus = study._study.ask()
        surplus.set_user_attr("surplus", True)
        study.tell(surplus, None, TrialState.FAIL)
        second = study.claim(2)
        assert second is not None
        assert second.number == 2
        assert [trial.user_attrs["overrides"] for trial in (first, second)] == [
            ["model.dropout=0"],
            ["model.dropout=0.1"],
        ]
        second.report(0.5, 3)
        assert study.reported(second) == {3}

    def test_a_damaged_storage_is_named(self, tmp_path):
        (tmp_path / "study.log").write_text("{}\n[1]\n")
        with pytest.raises(UsageError, match=r"study\.log, cannot be opened"):
            Study(tmp_path, None, self.RULES)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("overrides", ["<script>"]),
            ("overrides", 3),
            ("step", "one"),
            ("rules", 7),
            ("score", {"trial": "best"}),
            ("values", [None]),
            ("values", []),
            ("intermediate_value", "high"),
        ],
    )
    def test_a_wrong_value_in_a_storage_is_named(self, tmp_path, key, value):
        study = Study(tmp_path, None, self.RULES)
        trial = study.claim(1)
        assert trial is not None
        trial.report(0.5, 1)
        study.tell(trial, 0.5, TrialState.COMPLETE, step=1, seconds=2.0)
        study.score = {"trial": 0, "split": "test", "metrics": {"accuracy": 0.5}}
        assert Study(tmp_path, None, self.RULES).score["trial"] == 0
        file = tmp_path / "study.log"
        records = [json.loads(text) for text in file.read_text().splitlines()]
        places = [place for one in records for place in (one, one.get("user_attr", {})) if key in place]
        places[-1][key] = value
        file.write_text("".join(json.dumps(one) + "\n" for one in records))
        with pytest.raises(UsageError, match=r"study\.log, has wrong values in|has a search with other values of"):
            assert [Study(tmp_path, None, self.RULES).trials, Study(tmp_path, None, self.RULES).score]

    @pytest.mark.parametrize("restarts", [True, False])
    def test_a_kill_in_a_write_loses_only_its_line(self, tmp_path, restarts):
        study = Study(tmp_path, None, self.RULES)
        trial = study.claim(1)
        assert trial is not None
        study.tell(trial, 0.5, TrialState.COMPLETE, step=1, seconds=2.0)
        study.release(study.place(0))
        with (tmp_path / "study.log").open("ab") as journal:
            journal.write(b'{"op_code": 7, "trial')
        other = Study(tmp_path, None, self.RULES) if restarts else study
        assert other.claim(2) is not None
        assert [one.value for one in Study(tmp_path, None, self.RULES).trials] == [0.5, None]

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_a_storage_that_is_no_file(self, tmp_path, kind):
        if kind == "pipe":
            os.mkfifo(tmp_path / "study.log")  # a read would wait
        else:
            (tmp_path / "study.log").symlink_to(tmp_path / "precious")
        with pytest.raises(UsageError, match=r"study\.log, cannot be opened .*no regular file"):
            Study(tmp_path, None, self.RULES)
        assert not (tmp_path / "precious").exists()

    def test_a_password_in_the_address_is_not_shown(self, tmp_path):
        with pytest.raises(UsageError) as error:
            Study(tmp_path, "nothing://user:hunter2@host/db", self.RULES)
        assert "hunter2" not in str(error.value)

    @pytest.mark.parametrize(("sampler", "pruner"), [("grid", "none"), ("annealing", "none"), ("tpe", "best")])
    def test_wrong_rules(self, tmp_path, sampler, pruner):
        with pytest.raises(UsageError, match=r"is grid, but|use tpe|use median"):
            Study(tmp_path, None, Rules([Axis(RATE, ends=("1", "2"))], {}, True, sampler, pruner, 42))


def test_without_optuna_the_extra_is_named(request_of, monkeypatch):
    monkeypatch.setattr(search_module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"recipe-trainer\[search\]"):
        search(request_of(Trained(by_dropout)), print)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_a_search_is_stopped_in_a_trial_and_goes_on(tmp_path):
    """Ctrl-C reaches the search alone; the trial saves, and the next start ends it and scores the best one."""
    recipe = write_tiny_run(tmp_path, training={"max_steps": 60}, evaluation={"every": "20 steps"})
    command = ["search", recipe, f"{RATE}=1e-4..1e-2,log", "--trials", "2"]
    command += ["--output", tmp_path / "found", "--test", tmp_path / "train.jsonl"]
    child = warm.start(command)
    place = tmp_path / "found" / "trials" / "0000" / "metrics.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (place.exists() and place.read_text().count("\n") > 3):
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    stopped = finish(child, 120)
    assert stopped.returncode == 130, stopped
    ended = finish(warm.start(command), 240)
    assert ended.returncode == 0, ended
    found = json.loads((tmp_path / "found" / "search.json").read_text())
    assert [one["state"] for one in found["trials"]] == ["complete"] * 2
    assert found["test"]["metrics"]["accuracy"] >= 0
