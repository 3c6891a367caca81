"""The workers of a search: threads that each start the run of one trial after another."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from trainer.base.errors import INTERRUPTED, ExitCode, TrainerError, UsageError
from trainer.base.processes import child_variables
from trainer.observe.records import EvaluationRecord
from trainer.observe.summary import format_decimal
from trainer.ranks.stopping import StopRequest
from trainer.tools.report.runs import best_of
from trainer.tools.search.study import LOSS, REASON, SECONDS, STEP, WORDS, Ranked, Study, Yardsticks
from trainer.tools.search.trial_run import TrialRun

REPEATED = 3
"""The number of trials that are repeated with other seeds."""

_LOOK_SECONDS = 0.5
_FAILURES = 3  # of the first trials: then the recipe itself is wrong

Gpus = tuple[str, ...]


@dataclass(frozen=True)
class Crew:
    """The recipe of all trials, and the ranks and GPUs that train them."""

    recipe: str  # the name or path of the recipe
    common: Sequence[str]  # the overrides of all trials
    metric: str  # the metric that decides between trials
    processes: int | None  # the ranks of a trial; None: one, or an equal share of the GPUs
    at_once: int  # the number of workers

    def gpus(self) -> list[Gpus]:
        """Return the GPUs of each worker; empty without GPUs.

        Raises:
            UsageError: there are fewer GPUs than the trials need.
        """
        number, ranks = torch.cuda.device_count(), self.ranks
        if not number:
            return [()] * self.at_once
        if ranks * self.at_once > number:
            raise UsageError(
                f"{self.at_once} trials of {ranks} processes need {ranks * self.at_once} GPUs, but this machine shows"
                f" {number}; lower --at-once or --processes"
            )
        # Of the GPUs that this process may use itself.
        names = (child_variables().get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(number)))).split(",")
        return [tuple(names[ranks * at : ranks * (at + 1)]) for at in range(self.at_once)]

    @property
    def ranks(self) -> int:
        return self.processes or max(1, torch.cuda.device_count() // self.at_once)

    def run(self, words: Sequence[str], folder: Path, gpus: Gpus, seed: int | None = None) -> TrialRun:
        """Return the run of a trial, perhaps with another seed."""
        own = [*self.common, *words]
        if seed is not None:
            own = [*(word for word in own if not word.startswith("training.seed=")), f"training.seed={seed}"]
        return TrialRun(self.recipe, own, folder, self.ranks, gpus)

    def best(self, run: TrialRun) -> EvaluationRecord | None:
        """Return the best evaluation of a run; None if there is none, or all are not finite."""
        found = best_of(run.metrics(), self.metric)
        return found if found is not None and math.isfinite(found.metrics[self.metric]) else None

    def score(self, value: float, loss: float | None) -> dict[str, float]:
        """Return the numbers of an evaluation that decide between trials; `loss` is None if it is not finite."""
        return {"loss": math.inf if loss is None else loss, self.metric: value}


class Workers:
    """The threads of a search."""

    def __init__(self, crew: Crew, study: Study, show: Callable[[str], None]) -> None:
        self._crew, self._study, self._show = crew, study, show
        self._gpus = crew.gpus()
        self._stop = StopRequest()
        self._signal = 0  # for all runs after an error or a second Ctrl-C

    def work(self, most: int, seeds: int, test: str | None) -> int:
        """Train all trials, then the repetitions, then score the best one; return the exit code.

        Args:
            seeds: the number of seeds of the best ones.
            test: the split to score on, or None.

        Raises:
            TrainerError: the first trials failed, or a folder cannot be written.
        """
        with self._stop:
            self._stop.listen()
            try:
                self._all(lambda gpus: self._train_trials(most, gpus))
                self._all(lambda gpus: self._repeat(seeds, gpus))
                if test is not None and (found := self.ranked(seeds)) and not self._asked():
                    self._score(found[0].trial, test)
            except KeyboardInterrupt:
                pass
        if self._stop.received:
            self._show("stopped; the same command continues")
            return INTERRUPTED if self._stop.received == signal.SIGINT else ExitCode.STOPPED
        return ExitCode.DONE if self._complete() else ExitCode.FAILED

    def _asked(self) -> int:
        """Return the signal that all runs get now, or 0."""
        return self._signal or (signal.SIGTERM if self._stop.received else 0)

    def _all(self, work: Callable[[Gpus], None]) -> None:
        """Let each worker do its work; the first error and a second Ctrl-C end all of them."""
        with ThreadPoolExecutor(len(self._gpus)) as pool:
            running = [pool.submit(work, gpus) for gpus in self._gpus]
            try:
                while not all(one.done() for one in running):
                    ended, _ = wait(running, _LOOK_SECONDS, FIRST_EXCEPTION)  # the handler of a signal runs meanwhile
                    for one in ended:
                        one.result()
            except KeyboardInterrupt:
                self._signal = signal.SIGKILL
                raise
            except BaseException:
                self._signal = signal.SIGTERM
                raise

    def _train_trials(self, most: int, gpus: Gpus) -> None:
        while not self._asked() and (trial := self._study.claim(most)) is not None:
            try:
                self._train(trial, self._crew.run(trial.user_attrs[WORDS], self._study.place(trial.number), gpus))
            finally:
                self._study.release(self._study.place(trial.number))
            ended = [one.state for one in self._study.trials if one.state.is_finished()]
            if len(ended) >= _FAILURES and set(ended) == {TrialState.FAIL}:
                reason = next(one.user_attrs[REASON] for one in self._study.trials if REASON in one.user_attrs)
                raise TrainerError(f"the first {len(ended)} trials failed; fix the recipe: {reason}")

    def _train(self, trial: Trial, run: TrialRun) -> None:
        def is_poor(record: EvaluationRecord) -> bool:
            value = record.metrics.get(self._crew.metric, math.nan)
            # A resumed run repeats evaluations, which the study has already.
            if record.step not in self._study.reported(trial) and math.isfinite(value):
                trial.report(value, record.step)
            return bool(trial.should_prune())

        begun = time.monotonic()
        code = run.train(self._asked, is_poor)
        if code not in (None, ExitCode.DONE) and self._asked():
            return  # the next start goes on with it
        facts: dict[str, Any] = {SECONDS: round(time.monotonic() - begun, 1)}
        found = self._crew.best(run)
        if code == ExitCode.DONE and found is not None:
            value = found.metrics[self._crew.metric]
            facts |= {STEP: found.step, LOSS: _loss(found)}
            self._study.tell(trial, value, TrialState.COMPLETE, **facts)
            text = f"{self._crew.metric} {format_decimal(value)} at step {found.step}"
        elif code in (None, ExitCode.NON_FINITE):
            # Non-finite: a poor choice of values, from which the next proposals learn.
            rmtree(run.folder, ignore_errors=True)
            text = "pruned" if code is None else "pruned: its numbers were not finite"
            self._study.tell(trial, None, TrialState.PRUNED, **facts, **{REASON: text})
        else:
            text = run.reason() if code != ExitCode.DONE else "it made no evaluation"
            self._study.tell(trial, None, TrialState.FAIL, **facts, **{REASON: text})
            text = f"failed: {text}"
        done = sum(one.state.is_finished() for one in self._study.trials)
        self._show(f"{done} trials done; {trial.number}: {' '.join(trial.user_attrs[WORDS])}: {text}")

    def _repeat(self, seeds: int, gpus: Gpus) -> None:
        """Train the best trials with other seeds, unless another process trains them now."""
        for place, words, seed in self._repetitions(seeds):
            run = self._crew.run(words, place, gpus, seed)
            if self._asked():
                return
            if (run.metrics().end or {}).get("outcome") == "finished" or not self._study.take(place):
                continue
            try:
                code = run.train(self._asked, lambda _: False)
            finally:
                self._study.release(place)
            if not self._asked():
                found = self._crew.best(run)
                metric = self._crew.metric
                text = run.reason() if code or not found else f"{metric} {format_decimal(found.metrics[metric])}"
                self._show(f"{place.name}: {text}")

    def _repetitions(self, seeds: int) -> list[tuple[Path, Sequence[str], int]]:
        """Return folder, overrides and seed of each repetition."""
        best = [one.trial for one in self.ranked(1)[:REPEATED]]
        return [
            (self._place(one.number, seed), one.user_attrs[WORDS], seed)
            for seed in range(self._study.seed + 1, self._study.seed + seeds)
            for one in best
        ]

    def _place(self, number: int, seed: int) -> Path:
        return self._study.place(number).with_name(f"{number:04}-seed-{seed}")

    def _complete(self) -> list[FrozenTrial]:
        return [one for one in self._study.trials if one.state == TrialState.COMPLETE]

    def ranked(self, seeds: int) -> list[Ranked]:
        """Return the complete trials with each of their seeds, the best first."""
        crew, found = self._crew, []
        for trial in self._complete():
            places = (self._place(trial.number, seed) for seed in range(self._study.seed + 1, self._study.seed + seeds))
            records = [record for place in places if (record := crew.best(crew.run((), place, ()))) is not None]
            scores = [crew.score(float(trial.value or 0.0), trial.user_attrs.get(LOSS))]
            scores += [crew.score(record.metrics[crew.metric], _loss(record)) for record in records]
            found.append(Ranked(trial, scores))
        return sorted(found, key=lambda one: one.place(crew.metric))

    def yardsticks(self, ranked: Sequence[Ranked]) -> Yardsticks:
        """Return the numbers that judge the best trial, as its run computed them."""
        runs = self._crew.run((), self._study.place(ranked[0].trial.number), ()).metrics().runs if ranked else []
        if not runs:
            return Yardsticks()
        # An accuracy without a majority counts tokens.
        is_share = self._crew.metric == "accuracy" and runs[-1].get("majority") is not None
        baseline = runs[-1].get("baselines", {}).get(self._crew.metric)
        return Yardsticks(baseline, runs[-1].get("num_validation_rows"), is_share)

    def _score(self, best: FrozenTrial, split: str) -> None:
        if (self._study.score.get("trial"), self._study.score.get("split")) == (best.number, split):
            return
        command = [sys.executable, "-m", "trainer", "evaluate", str(self._study.place(best.number)), "--json"]
        found = subprocess.run(
            [*command, "--processes", str(self._crew.ranks), f"data.validation={split}"],
            capture_output=True,
            text=True,
            env=child_variables(),
            check=False,
        )
        if found.returncode:
            raise TrainerError(f"the best trial cannot be scored on {split}: {found.stderr.strip()}")
        self._study.score = {"trial": best.number, "split": split, "metrics": json.loads(found.stdout)["metrics"]}


def _loss(record: EvaluationRecord) -> float | None:
    """Return the loss of an evaluation; None if it is not finite, as the storage needs it."""
    loss = record.metrics.get("loss", math.nan)
    return loss if math.isfinite(loss) else None
