"""The observer that compares the steps of a run with their plan, which a child process makes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.observe.observer import Observer
from trainer.observe.records import RunInfo, StepRecord
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.schema import Recipe
from trainer.tools.advice import NoPlanError, result_of, start_plan
from trainer.tools.plan.hardware import device_named, parse_devices
from trainer.tools.utilisation import FIRST_STEP, Planned, mean_length, shortfall

_OTHER_LENGTH = 1.25  # the ratio of two mean lengths that need a new plan
_MOST_PLANS = 3  # of a run
_MOST_SECONDS = 600.0  # of a plan


class WatchedSpeed(Observer):
    """The steps of a run beside their plan, from step 20 of a start on, and again if the rows change their length.

    It gives one note. The plan runs beside the training, and nothing waits for it.
    """

    def __init__(self, recipe: Recipe, environment: LaunchEnvironment, note: Callable[[str], None]) -> None:
        self._recipe, self._environment, self._note = recipe, environment, note
        self._device: str | None = None
        self._first = 0
        self._left = _MOST_PLANS
        self._length: int | None = None  # of the last plan
        self._children: list[subprocess.Popen[str]] = []
        self._made: dict[str, Future[Mapping[str, Any]]] = {}  # the plans, by their precision
        self._threads = ThreadPoolExecutor(max_workers=2)  # they read the plans while the run trains
        self._folder: TemporaryDirectory[str] | None = None

    def start(self, run: RunInfo) -> None:
        self._device = device_named(run.device)
        self._first = run.resumed_from or 0
        if self._device is None:
            self._note(f"the speed is not compared with a plan, because no file describes the device {run.device!r}")

    def step(self, record: StepRecord) -> None:
        if self._device is None or record.step - self._first < FIRST_STEP:
            return
        if self._made:
            self._compare(record)
        elif self._left and self._is_other(length := mean_length(record, self._recipe) or 1):
            self._left -= 1
            self._length = length
            try:
                self._begin(length)
            except OSError as error:  # no memory for a process, or no folder that can be written
                self._left = 0
                self._stop()
                self._note(f"the speed is not compared with a plan: {error}")

    def _is_other(self, length: int) -> bool:
        old = self._length
        return old is None or max(length, old) > _OTHER_LENGTH * min(length, old)

    def _begin(self, length: int) -> None:
        assert self._device is not None
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="trainer-")
        file = Path(self._folder.name) / "recipe.json"
        file.write_text(self._recipe.model_dump_json(), encoding="utf-8")
        local = self._environment.local_world_size
        nodes = ["--nodes", str(self._environment.world_size // local)]
        command = ["trainer", "plan", str(file), "--gpus", f"{local}x{self._device}", *nodes, "--length", str(length)]
        machine = parse_devices(self._device).machine
        precisions = [self._recipe.precision]
        if self._recipe.precision == "fp32" and machine is not None and machine.runs_kernels:
            precisions.append("bf16")
        for precision in precisions:
            words = [*command, f"precision={precision}"]
            child = start_plan(words, "--json", "--changes", "0")
            self._children.append(child)
            self._made[precision] = self._threads.submit(result_of, child, _MOST_SECONDS)

    def _compare(self, record: StepRecord) -> None:
        if not all(made.done() for made in self._made.values()):
            return
        own = self._recipe.precision
        try:
            seconds = {name: _seconds(made.result()) for name, made in self._made.items()}
        except NoPlanError as error:
            self._left = 0
            self._note(f"the speed is not compared with a plan: {error}")
            return
        finally:
            self._stop()
        assert self._device is not None
        assert self._length is not None
        planned = Planned(self._device, self._length, seconds[own], seconds.get("bf16") if own == "fp32" else None)
        if (text := shortfall(record, self._recipe, planned, self._environment.world_size == 1)) is not None:
            self._left = 0
            self._note(text)

    def _stop(self) -> None:
        for child in self._children:
            child.kill()
        self._children, self._made = [], {}

    def close(self) -> None:
        self._stop()
        self._threads.shutdown()
        if self._folder is not None:
            self._folder.cleanup()


def _seconds(made: Mapping[str, Any]) -> float:
    if made["time"] is None:
        raise NoPlanError("the plan has no time")
    return float(made["time"]["seconds"]["likely"])
