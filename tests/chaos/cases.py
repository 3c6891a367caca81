"""The cases of the campaign: each is drawn from a seed and a number, and from the calls of an undisturbed run."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.features import FEATURES
from tests.chaos.plan import ERRORS, OF_PATHS, Call, Target

KINDS = {"kill at a moment": 34, "kill at a call": 22, "error": 30, "damage": 14}
"""The kinds of faults, with their weights."""
DAMAGES = ("cut", "emptied", "flipped", "removed", "swapped", "longer")
_WORKER = "worker"
_WITH_WORKERS = ("in ", "waiting for rows", "saving")  # activities beside data workers
_LONGEST_PAUSE = 0.4  # seconds from the begin of an activity to a kill


@dataclass(frozen=True)
class Tape:
    """The calls and activities of an undisturbed run: depth, rank, call and path; rank, number and activity."""

    calls: list[tuple[int, int, int, str]]
    moments: list[tuple[int, int, str]]

    @classmethod
    def read(cls, plan: Path, moments: Path) -> Tape:
        """Read the files that a recording has written."""
        calls = []
        for line in plan.with_name(f"{plan.name}.log").read_text().splitlines():
            depth, rank, call, path = line.split(" ", 3)
            calls.append((int(depth), int(rank), int(call), path))
        return cls(calls, [tuple(json.loads(line)) for line in moments.read_text().splitlines()])

    def areas(self, calls: Call) -> dict[tuple[int, int, str], Counter[int]]:
        """Return the numbers of calls by process and area of the folder."""
        found: dict[tuple[int, int, str], Counter[int]] = defaultdict(Counter)
        for depth, rank, call, path in self.calls:
            if call & calls:
                found[depth, rank, area(path)][call] += 1
        return found


def area(path: str) -> str:
    """Return the part of a case's folder in which a path lies."""
    parts = [part for part in path.split("/") if part]
    return "/" + "/".join(parts[: 2 if parts[:1] in (["run"], ["mirror"]) else 1])


@dataclass
class Case:
    """One fault in a training.

    `plan` has the fields of `plan.Plan`, without folders; `moment` is that of `injected.py`.
    """

    number: int
    feature: str
    kind: str
    resumes: bool  # the run begins from checkpoints of a killed one
    restarts: int
    at_once: bool = False  # the next start does not wait for ranks that outlive the launcher
    fault: str = ""  # for people
    plan: dict[str, Any] = field(default_factory=dict)
    moment: dict[str, Any] | None = None
    damages: list[tuple[str, float, float]] = field(default_factory=list)  # the damage, the file, and the place in it
    lost: str = ""  # a folder that is lost with the machine

    @property
    def error(self) -> int:
        """The error number of a failing call, or 0."""
        return int(self.plan.get("error", 0))

    @property
    def kills_launcher(self) -> bool:
        """Whether the fault kills the process that the user started."""
        if self.moment:
            is_alone = FEATURES[self.feature].processes == 1
            return self.moment["target"] in ("LAUNCHER", "ALL") or (is_alone and self.moment["target"] == "ITSELF")
        if self.kind != "kill at a call":
            return False
        return self.plan["target"] != Target.ITSELF or self.plan["depth"] == 0

    def exit_codes(self, is_reached: bool) -> set[int]:
        """Return the exit codes that the documentation allows for the disturbed start."""
        if not is_reached:
            return {0}
        if self.kills_launcher:
            return {-9}
        if self.error:
            return {0, 1, 2} if self.error in OF_PATHS else {0, 1}
        hits_worker = self.moment is not None and self.moment["target"] == _WORKER
        return {0} if self.restarts else {0, 1} if hits_worker or self.plan.get("depth") == 2 else {1}


def draw(seed: int, number: int, features: Sequence[str] = tuple(FEATURES)) -> Case:
    """Return the case, of one of some features, without the fault of `aim`."""
    random = Random(f"{seed} {number}")
    feature = random.choice(features)
    (kind,) = random.choices(list(KINDS), list(KINDS.values()))
    restarts = 0 if kind == "damage" or FEATURES[feature].processes == 1 else random.choice([0, 0, 2])
    return Case(number, feature, kind, kind == "damage" or random.random() < 0.4, restarts)


def aim(case: Case, seed: int, tape: Tape) -> None:
    """Draw the fault of a case from the calls and activities of an undisturbed run."""
    random = Random(f"{seed} {case.number} fault")
    if case.kind == "damage":
        _aim_damage(case, random)
    elif case.kind == "kill at a moment":
        _aim_moment(case, random, tape)
    else:
        _aim_call(case, random, tape)
    case.at_once = case.kills_launcher and random.random() < 0.5


def _aim_moment(case: Case, random: Random, tape: Tape) -> None:
    by_activity: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, number, activity in tape.moments:
        by_activity[activity].append((rank, number))
    activity = random.choice(sorted(by_activity))
    rank, number = random.choice(sorted(by_activity[activity]))
    targets = ["ITSELF", "ITSELF", "LAUNCHER", "ALL"]
    if FEATURES[case.feature].sections.get("data", {}).get("num_workers") and activity.startswith(_WITH_WORKERS):
        targets += [_WORKER] * 8
    target = random.choice(targets)
    seconds = random.choice([0.0, random.uniform(0.0, _LONGEST_PAUSE)])
    case.moment = {"rank": rank, "number": number, "seconds": seconds, "target": target}
    case.fault = f"SIGKILL of {_name(target)}, rank {rank}, {seconds:.2f} s into: {activity}"


def _aim_call(case: Case, random: Random, tape: Tape) -> None:
    error = random.choice(sorted(ERRORS)) if case.kind == "error" else 0
    may_fail = ERRORS[error][0] if error else ~Call.READS
    areas = tape.areas(may_fail)
    places = sorted({key[2] for key in areas})
    place = random.choice(places)
    depth, rank, _ = key = random.choice(sorted(one for one in areas if one[2] == place))
    call = random.choice(sorted(areas[key]))
    nth = random.randint(1, areas[key][call])
    lasts = bool(error) and random.random() < 0.5
    target = random.choice([Target.ITSELF, Target.ITSELF, Target.LAUNCHER, Target.ALL])
    case.plan = {
        "depth": depth, "rank": rank, "calls": call, "nth": nth, "error": error, "target": 0 if error else int(target),
        "lasting": int(ERRORS[error][1]) if lasts else 0, "place": place,
    }  # fmt: skip
    process = "the launcher" if depth == 0 else f"{'a child of ' * (depth - 1)}rank {rank}"
    where = f"call {nth} of {Call(call).name} in {place} by {process}"
    name = f"{errno.errorcode[error]}{', lasting,' if lasts else ''}" if error else f"SIGKILL of {_name(target.name)}"
    case.fault = f"{name} at {where}"


def _name(target: str) -> str:
    return {"ITSELF": "the process", "LAUNCHER": "the launcher", "ALL": "all processes"}.get(target, "a data worker")


def _aim_damage(case: Case, random: Random) -> None:
    feature = FEATURES[case.feature]
    places = ["/run/checkpoints", "/run/checkpoints", "/run", "/cache"]
    places += ["/memory"] * 2 if feature.memory else []
    places += ["/mirror/checkpoints"] * 2 if feature.mirror else []
    place = random.choice(places)
    if place.startswith("/mirror"):
        case.lost = "/run"
    case.plan = {"place": place}
    number = 1 if case.lost else random.choice([1, 1, 2])
    # A run without a whole copy is refused, so one of the copies stays whole.
    damages = [name for name in DAMAGES if not case.lost or name != "swapped"]
    case.damages = [(random.choice(damages), random.random(), random.random()) for _ in range(number)]
    case.fault = f"damage in {place}: {', '.join(name for name, _, _ in case.damages)}"
    if case.lost:
        case.fault += f"; {case.lost} is lost"


def damage(case: Case, folder: Path) -> list[str]:
    """Damage files in the folder of a case, and return what happened to which."""
    place = folder / case.plan["place"].lstrip("/")
    done = []
    for name, which, where in case.damages:
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
        if place.name == "run":  # checkpoints have cases of their own, and a run does not read its exports
            files = [path for path in files if path.relative_to(place).parts[0] not in ("checkpoints", "best")]
        if not files:
            continue
        file = files[int(which * len(files))]
        if file.name == "metrics.jsonl":
            if _tear(file, where):
                done.append(f"last line of {file.relative_to(folder)} torn")
            continue
        _damage(name, file, files, where)
        done.append(f"{file.relative_to(folder)} {name}")
    return done


def _tear(file: Path, where: float) -> bool:
    """Leave a part of the last line, as a loss of power does; lines up to a checkpoint are stored with it."""
    *lines, last = file.read_bytes().splitlines(keepends=True)
    saved = [int(place.name.rpartition("-")[2]) for place in (file.parent / "checkpoints").glob("step-*")]
    if json.loads(last).get("step", 0) <= max(saved, default=-1):
        return False
    file.write_bytes(b"".join(lines) + last[: int(where * len(last))])
    return True


def _damage(name: str, file: Path, files: list[Path], where: float) -> None:
    content = file.read_bytes()
    index = int(where * len(content))
    if name == "removed":
        file.unlink()
    elif name == "swapped":
        others = [one for one in files if one.name == file.name and one != file]
        others = others or [one for one in files if one.name != "metrics.jsonl"]
        other = others[int(where * len(others))]
        theirs = other.read_bytes()
        other.write_bytes(content)
        file.write_bytes(theirs)
    else:
        file.write_bytes({
            "cut": content[:index],
            "emptied": b"",
            "flipped": content[:index] + bytes([content[index] ^ (1 << int(where * 1e6) % 8)]) + content[index + 1 :],
            "longer": content[:index] + os.urandom(16) + content[index:],
        }[name])  # fmt: skip
