"""The campaign: it prepares undisturbed runs, disturbs copies of them, and compares their ends."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.chaos import plan
from tests.chaos.cases import Case, Tape, aim, damage, draw
from tests.chaos.features import FEATURES, write_feature
from tests.helpers import warm
from trainer.checkpoint.reading import open_verified
from trainer.features.host_memory.folder import folder_of_run
from trainer.recipe.reading.files import RECIPE_FILE
from trainer.tools.run_metrics import Metrics, read_metrics

TIMEOUT_SECONDS = 400.0  # of one start on a busy machine
_ORPHAN_SECONDS = 100.0  # the ranks save and stop after the launcher was killed
_NUMBERS = ("step", "epoch", "loss", "grad_norm", "learning_rate", "samples", "tokens", "skipped_steps", "loss_scale")
_STATE = ("run", "memory", "mirror", "cache")
_KILLED_IN_STEP = 7
# Not those of multiprocessing alone, which workers print when their parent was killed.
_TRACEBACK = re.compile(r'Traceback \(most recent call last\):\n(?:  .*\n)*?  File "[^"]*/trainer/')
_LEFT = re.compile(r"/\.(saving|replaced|removed|seen)-")


@dataclass
class Result:
    """The result of a case. `codes` are the exit codes of all starts."""

    number: int
    feature: str
    kind: str
    resumes: bool
    restarts: int
    fault: str
    is_reached: bool = False
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    output: str = ""  # of the starts, if there are problems


@dataclass(frozen=True)
class _Ended:
    code: int
    output: str
    is_reached: bool
    problems: list[str]


class Campaign:
    """Cases of a seed in a folder.

    Args:
        folder: for the undisturbed runs, which several processes may share, and for the cases.
        features: the trainings to draw from.
    """

    def __init__(self, seed: int, folder: Path, features: Sequence[str] = tuple(FEATURES)) -> None:
        self.seed = seed
        self._features = features
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "library.lock"):
            os.environ["LD_PRELOAD"] = str(plan.library(folder))  # of the fork server, and so of its forks

    def run(self, number: int) -> Result:
        """Run a case to its end."""
        case, begun = draw(self.seed, number, self._features), time.monotonic()
        try:
            tapes = self.prepare(case.feature)
        except AssertionError as error:
            problem = f"the undisturbed runs fail: {error}"
            return Result(number, case.feature, case.kind, case.resumes, case.restarts, "", problems=[problem])
        aim(case, self.seed, tapes[case.resumes])
        result = Result(number, case.feature, case.kind, case.resumes, case.restarts, case.fault)
        folder = self._folder / f"case-{number}-{os.getpid()}"
        try:
            recipe = write_feature(case.feature, folder)
            if case.resumes:
                self._copy(case.feature, folder)
            self._disturb(case, recipe, result)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result.seconds = round(time.monotonic() - begun, 1)
        return result

    def prepare(self, feature: str) -> dict[bool, Tape]:
        """Return the tapes of undisturbed runs: from the start, and by True from the checkpoints of a killed run."""
        place = self._folder / feature.replace(" ", "-")
        place.mkdir(exist_ok=True)
        with _locked(place / "lock"):
            if not (place / "done").exists():
                self._prepare(feature, place)
                (place / "done").touch()
        return {one: Tape.read(place / f"plan-{one}", place / f"moments-{one}") for one in (False, True)}

    def _prepare(self, feature: str, place: Path) -> None:
        whole, killed, again = place / "whole", place / "killed", place / "again"
        for folder in (whole, killed, again):
            shutil.rmtree(folder, ignore_errors=True)
        self._record(feature, whole, place, resumes=False)
        moments = Tape.read(place / "plan-False", place / "moments-False").moments
        rank = max(one for one, _, _ in moments)
        in_steps = [number for one, number, activity in moments if one == rank and activity.startswith("in step")]
        recipe = write_feature(feature, killed)
        step = min(_KILLED_IN_STEP, len(in_steps) - 1)  # a run may stop before
        moment = {"rank": rank, "number": in_steps[step - 1], "seconds": 0.0, "target": "ITSELF"}
        ended = self._start(recipe, FEATURES[feature].processes, 0, killed, {}, {"moment": moment})
        assert ended.is_reached, ended.output
        self._copy(feature, write_feature(feature, again).parent)
        self._record(feature, again, place, resumes=True)
        assert not (problems := different(again, whole)), problems

    def _record(self, feature: str, folder: Path, place: Path, resumes: bool) -> None:
        recipe = write_feature(feature, folder)
        names = [place / f"plan-{resumes}", place / f"plan-{resumes}.log", place / f"moments-{resumes}"]
        for name in names:
            name.unlink(missing_ok=True)
        order = {"moments": str(names[2])}
        ended = self._start(recipe, FEATURES[feature].processes, 0, folder, {"records": 1}, order, names[0])
        assert ended.code == 0, ended.output
        assert not ended.problems, ended.problems

    def _copy(self, feature: str, folder: Path) -> None:
        source = self._folder / feature.replace(" ", "-") / "killed"
        for name in _STATE:
            if (source / name).exists():
                shutil.copytree(source / name, folder / name, symlinks=True, dirs_exist_ok=True)
        for saved in (folder / "memory").glob("trainer-*"):  # the name is that of the run's folder
            saved.rename(folder_of_run(folder / "memory", folder / "run"))

    def _disturb(self, case: Case, recipe: Path, result: Result) -> None:
        folder, outputs = recipe.parent, []
        processes = FEATURES[case.feature].processes
        if case.kind == "damage":
            if done := damage(case, folder):
                result.is_reached = True
                result.fault += f" ({'; '.join(done)})"
            if case.lost:
                shutil.rmtree(folder / case.lost.lstrip("/"))
        else:
            values = {**case.plan}
            order = {"moment": case.moment}
            ended = self._start(recipe, processes, case.restarts, folder, values, order, waits=not case.at_once)
            result.is_reached = ended.is_reached
            result.codes.append(ended.code)
            result.problems += [*ended.problems, *_judged(case, ended)]
            outputs.append(ended.output)
        # A start beside ranks that still save may find that they own the folder.
        for _ in range(2 if case.at_once else 1):
            if result.codes and result.codes[-1] == 0:
                break
            ended = self._start(recipe, processes, 0, folder, {}, {})
            result.codes.append(ended.code)
            result.problems += ended.problems
            outputs.append(ended.output)
        if result.codes[-1] != 0:
            result.problems.append(f"the next start ends with exit code {result.codes[-1]}")
        else:
            whole = self._folder / case.feature.replace(" ", "-") / "whole"
            problems = different(folder, whole, has_start=not case.lost)
            if case.plan.get("lasting") and case.plan["place"] == "/run/ranks":  # nor can the rank remove its record
                problems = [problem for problem in problems if problem != "ranks is left"]
            result.problems += problems
        if result.problems:
            result.output = "\n=== next start\n".join(outputs)[-12000:]

    def _start(
        self,
        recipe: Path,
        processes: int,
        restarts: int,
        folder: Path,
        values: dict[str, Any],
        order: dict[str, Any],
        file: Path | None = None,
        waits: bool = True,
    ) -> _Ended:
        """Start a run with the plan of `values` to its end, and to that of all its processes if it waits."""
        file = file or folder / "plan"
        place, disk = values.pop("place", ""), ""
        if place:
            disk = "/" + place.split("/")[1]
        root = str(folder)
        plan.write(file, root=root.encode(), place=f"{root}{place}".encode(), disk=f"{root}{disk}/".encode(), **values)
        words = [json.dumps({"plan": str(file), **order}), "run", recipe]
        words += ["--processes", processes] if processes > 1 else []
        words += ["--max-restarts", restarts] if restarts else []
        process = warm.start(words, program="tests.chaos.injected:main")
        problems = []
        try:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            out, err = error.output or "", error.stderr or ""
            problems.append(f"it hangs for {TIMEOUT_SECONDS:g} s")
            _kill(file, wait_seconds=0.0)
            process.communicate(timeout=60)
        if waits and (left := _kill(file, _ORPHAN_SECONDS)):
            problems.append(f"{left} processes outlive the run by {_ORPHAN_SECONDS:g} s")
        is_reached = bool(plan.read(file).fired)
        output = f"{out}\n{err}"
        if _TRACEBACK.search(output):
            problems.append("it shows a traceback")
        return _Ended(process.returncode if process.returncode is not None else 999, output, is_reached, problems)


def _judged(case: Case, ended: _Ended) -> Iterator[str]:
    """Yield what is wrong with the end of a disturbed start."""
    if ended.code not in (allowed := case.exit_codes(ended.is_reached)):
        yield f"exit code {ended.code}, not {' or '.join(map(str, sorted(allowed)))}"
    if case.error and ended.is_reached and ended.code in (1, 2) and os.strerror(case.error) not in ended.output:
        yield f"the cause, {os.strerror(case.error)}, is not named"


def _kill(file: Path, wait_seconds: float) -> int:
    """Wait until all processes of a run have ended, kill the others, and return their number."""
    end = time.monotonic() + wait_seconds
    while True:
        alive = [pid for pid in plan.read(file).processes if _is_alive(pid)]
        if not alive or time.monotonic() > end:
            break
        time.sleep(0.05)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(alive)


def _is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def different(folder: Path, whole: Path, has_start: bool = True) -> list[str]:
    """Return the differences of a run's results from those of the undisturbed run.

    Args:
        has_start: whether `metrics.jsonl` has all steps, and not only those since a copy elsewhere was downloaded.
    """
    problems = []
    for name in ("model", "best"):
        problems += _different_files(folder, whole, f"run/{name}", name)
    problems += _different_checkpoint(folder / "run" / "checkpoints", whole / "run" / "checkpoints", "the checkpoint")
    files = [one / "run" / "metrics.jsonl" for one in (folder, whole)]
    problems += _different_metrics(*files, has_start)
    if (whole / "mirror").exists():
        problems += _different_files(folder, whole, "mirror/model", "the copy of the model")
        copies = [one / "mirror" / "checkpoints" for one in (folder, whole)]
        problems += _different_checkpoint(*copies, "the copy of the checkpoint")
    left = [path.relative_to(folder).as_posix() for path in folder.rglob(".*") if _LEFT.search(path.as_posix())]
    left += [path.relative_to(folder).as_posix() for path in (folder / "memory").rglob("*.safetensors")]
    left += ["ranks"] if (folder / "run" / "ranks").exists() else []
    problems += [f"{name} is left" for name in left]
    return problems


def _different_files(folder: Path, whole: Path, place: str, name: str) -> list[str]:
    def contents(root: Path) -> dict[str, bytes]:
        inside = root / place
        files = [path for path in inside.rglob("*") if path.is_file() and path.name != "README.md"]
        found = {path.relative_to(inside).as_posix(): path.read_bytes() for path in files}
        if RECIPE_FILE in found:  # it names the folder of the case
            found[RECIPE_FILE] = re.sub(rb'"/[^"]*/', b'"', found[RECIPE_FILE])
        return found

    own, theirs = contents(folder), contents(whole)
    differing = [file for file in sorted(own.keys() | theirs.keys()) if own.get(file) != theirs.get(file)]
    return [f"{name} differs: {', '.join(differing)}"] if differing else []


def _different_checkpoint(folder: Path, whole: Path, name: str) -> list[str]:
    """Compare the newest checkpoints by their whole tensors: ranks may divide replicated ones in another way."""

    def content(place: Path) -> dict[str, Any]:
        state = open_verified(max(place.glob("step-*")))
        tensors = {key: state.read(key).reshape(-1).view(torch.uint8).numpy().tobytes() for key in state.shapes}
        facts = state.facts.to_json()
        return {"facts": {key: facts[key] for key in ("progress", "identity", "scalars")}, "tensors": tensors}

    try:
        own, theirs = content(folder), content(whole)
    except (OSError, ValueError) as error:
        return [f"{name} is damaged: {error}"]
    found = [key for key in own if own[key] != theirs[key]]
    return [f"{name} differs in its {' and '.join(found)}"] if found else []


def _different_metrics(file: Path, whole: Path, has_start: bool) -> list[str]:
    own, theirs = read_metrics(file), read_metrics(whole)
    first = 0 if has_start or not own.steps else own.steps[0].step

    def steps(metrics: Metrics) -> list[tuple[Any, ...]]:
        records = [record for record in metrics.steps if record.step >= first]
        return [tuple(getattr(record, name) for name in _NUMBERS) for record in records]

    def evaluations(metrics: Metrics) -> list[dict[str, Any]]:
        return [asdict(record) for record in metrics.evaluations if record.step >= first]

    problems = []
    if steps(own) != steps(theirs):
        problems.append("the steps of metrics.jsonl differ")
    if evaluations(own) != evaluations(theirs):
        problems.append("the evaluations of metrics.jsonl differ")
    if own.bad_steps:
        problems.append("metrics.jsonl has bad steps")
    return problems
