"""The study of a search: its trials in Optuna's storage, which several processes and machines share.

Optuna proposes values and decides which trials are pruned. A proposal depends on the seed of the recipe, the number
of the trial and the results so far.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import ConfigDict, Strict, TypeAdapter, with_config
from typing_extensions import TypedDict

from trainer.base.digests import digest_of
from trainer.base.disk import open_plain
from trainer.base.errors import UsageError
from trainer.base.owned_lock import OwnedLock
from trainer.base.text import without_secrets
from trainer.checkpoint.owner import OWNER_FILE
from trainer.tasks.metrics.table import merit
from trainer.tools.search.space import Axis

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "hyperband", "none")
WORDS, REASON, STEP, LOSS, SECONDS = "overrides", "reason", "step", "loss", "seconds"
"""Attributes of a trial in the storage: its overrides; why it failed; its best step and the loss there; its time."""

_RULES, _SURPLUS, _SCORE = "rules", "surplus", "score"


@with_config(ConfigDict(strict=True))
class _Attributes(TypedDict, total=False):
    overrides: list[str]
    reason: str | None
    step: int | None
    loss: float | None
    seconds: float | None


@with_config(ConfigDict(strict=True))
class _Score(TypedDict, total=False):
    """The attribute of the study that `score` sets."""

    trial: int
    split: str
    metrics: dict[str, float | str]


_ATTRIBUTES, _SCORES = TypeAdapter(_Attributes), TypeAdapter(_Score)
_NUMBERS = TypeAdapter(list[Annotated[float, Strict()]])


@dataclass(frozen=True)
class Ranked:
    """A complete trial, with the metric and the loss at the best evaluation of each of its seeds."""

    trial: FrozenTrial
    scores: Sequence[Mapping[str, float]]

    @property
    def means(self) -> dict[str, float]:
        """The means over the seeds."""
        return {name: fmean(one[name] for one in self.scores) for name in self.scores[0]}

    def place(self, metric: str) -> tuple[float, ...]:
        """The order of trials, the best first: more seeds, the mean of the metric, that of the loss, the number."""
        return -len(self.scores), *(-one for one in merit(metric, self.means)), self.trial.number


@dataclass(frozen=True)
class Yardsticks:
    """The numbers that judge the best trial."""

    baseline: float | None = None  # the metric of predictions that ignore the input; None: unknown
    rows: int | None = None  # the number of validation rows; None: unknown
    is_share: bool = False  # whether the metric is a share of these rows, which gives its error


@dataclass(frozen=True)
class Rules:
    """The rules of a search, which every process that joins it must have.

    Raises:
        UsageError: they have no such sampler or pruner, or a grid of a range.
    """

    axes: Sequence[Axis]  # the keys and their values
    facts: Any  # values of the recipe that define the trials
    is_better_above: bool  # whether the larger metric is the better one
    sampler: str  # one of `SAMPLERS`
    pruner: str  # one of `PRUNERS`
    seed: int  # the seed of the proposals

    def __post_init__(self) -> None:
        for name, value, known in (("sampler", self.sampler, SAMPLERS), ("pruner", self.pruner, PRUNERS)):
            if value not in known:
                raise UsageError(f"`--{name}` is {value!r}; use {', '.join(known)}")
        if self.sampler == "grid" and (ranges := [axis.key for axis in self.axes if not axis.values]):
            raise UsageError(f"`--sampler` is grid, but `{ranges[0]}` is a range; name its values: a,b,c")

    def make_sampler(self, place: int) -> BaseSampler:
        """Return the sampler of a trial, by its place among all that count."""
        # Of seed and place alone, so that the number of processes does not change it.
        seed = int(digest_of([self.seed, place])[:8], 16)
        if self.sampler == "tpe":
            # Running trials count as poor ones (`constant_liar`), so that workers propose other values than theirs.
            return TPESampler(seed=seed, n_startup_trials=min(10, 2 + 2 * len(self.axes)), constant_liar=True)
        points = self.points if self.sampler == "grid" else [{}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return PartialFixedSampler(points[place % len(points)], RandomSampler(seed=seed))

    @property
    def points(self) -> list[dict[str, Any]]:
        """The points of the grid; none if an axis is a range."""
        keys = [axis.key for axis in self.axes]
        return [dict(zip(keys, one, strict=True)) for one in itertools.product(*(axis.values for axis in self.axes))]

    def make_pruner(self) -> BasePruner:
        """Return the pruner of a process."""
        pruners = {"median": MedianPruner(n_startup_trials=4), "hyperband": HyperbandPruner(), "none": NopPruner()}
        return pruners[self.pruner]


class _Journal(JournalFileBackend):  # type: ignore[misc]  # Optuna has no types here
    """A journal whose lines stay whole if another process was killed in a write, or had no room for it."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        _drop_half_a_line(Path(self._file_path))
        super().append_logs(logs)


def _drop_half_a_line(file: Path) -> None:
    """Remove a last line that a process has not written to its end, since Optuna would append to it."""
    # By the lock of Optuna's own backend, so that no other process appends meanwhile.
    descriptor, lock = open_plain(file, os.O_RDWR), JournalFileSymlinkLock(str(file))
    with open(descriptor, "r+b") as journal:
        lock.acquire()
        try:
            end = journal.seek(0, os.SEEK_END)
            journal.seek(max(0, end - 1))
            if journal.read() not in (b"", b"\n"):
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)
        finally:
            lock.release()


class Study:
    """The trials of a search.

    Args:
        storage: the address of a database that SQLAlchemy opens; None: a file in the folder.

    Raises:
        UsageError: the storage cannot be opened, or has another search.
    """

    def __init__(self, folder: Path, storage: str | None, rules: Rules) -> None:
        self.folder, self._rules = folder, rules
        self._own: dict[Path, OwnedLock] = {}
        self._lock = threading.Lock()  # of the workers, which are threads
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        file = folder / "study.log"
        place = file if storage is None else without_secrets(storage)
        self._damaged = f"the storage of the search, {place}, has wrong values in {{}}; name another"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if storage is None and os.path.lexists(file):
                _drop_half_a_line(file)
            self._study = optuna.create_study(
                storage=JournalStorage(_Journal(str(file))) if storage is None else storage,
                study_name=folder.name,
                sampler=rules.make_sampler(0),
                pruner=rules.make_pruner(),
                direction="maximize" if rules.is_better_above else "minimize",
                load_if_exists=True,
            )
            saved = self._study.user_attrs.get(_RULES)
        except (UsageError, KeyboardInterrupt):
            raise
        except Exception as error:  # of SQLAlchemy, its driver, the file system, or a damaged file
            raise UsageError(f"the storage of the search, {place}, cannot be opened ({error}); name another") from error
        # As the storage returns them: JSON makes lists of tuples.
        own = json.loads(json.dumps(asdict(rules)))
        if saved is None:
            self._study.set_user_attr(_RULES, own)
        elif saved != own:
            differing = ", ".join(name for name in own if not isinstance(saved, dict) or saved.get(name) != own[name])
            raise UsageError(
                f"{folder} has a search with other values of: {differing}; restore them, or name another folder with"
                " --output"
            )

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, in the order of their numbers.

        Raises:
            UsageError: one has values that no search gives.
        """
        found = [one for one in self._study.get_trials(deepcopy=False) if _SURPLUS not in one.user_attrs]
        for one in found:
            is_complete = one.state == TrialState.COMPLETE
            with self._right(f"trial {one.number}"):
                _NUMBERS.validate_python([*one.intermediate_values.values(), *([one.value] if is_complete else [])])
                words = _ATTRIBUTES.validate_python(one.user_attrs).get("overrides")
                keys = None if words is None else [word.partition("=")[0] for word in words]
                if keys != [axis.key for axis in self._rules.axes] and (is_complete or words is not None):
                    raise ValueError
        return found

    @contextmanager
    def _right(self, name: str) -> Iterator[None]:
        """Refuse wrong values of a storage, which other programs can write."""
        try:
            yield
        except (ValueError, IndexError) as error:
            raise UsageError(self._damaged.format(name)) from error

    def place(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.folder / "trials" / f"{number:04}"

    def claim(self, most: int) -> Trial | None:
        """Return a trial that no other process trains, left half-way or new; None if `most` are there.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            for one in self.trials:
                if one.state == TrialState.RUNNING and WORDS in one.user_attrs and self._take(self.place(one.number)):
                    return Trial(self._study, one._trial_id)
            if self._rules.sampler == "grid":
                most = min(most, len(self._rules.points))
            if len(self.trials) >= most:
                return None
            trial = self._study.ask()
            # It seeds the proposal, so trials that a race made surplus do not count.
            place = sum(one.number < trial.number for one in self.trials)
            if place >= most or not self._take(self.place(trial.number)):  # another process was faster
                trial.set_user_attr(_SURPLUS, True)
                self._study.tell(trial, state=TrialState.FAIL)
                return None
            # Optuna draws values at the first `suggest` and not in `ask`, so this sampler proposes those of the trial.
            self._study.sampler = self._rules.make_sampler(place)
            trial.set_user_attr(WORDS, [axis.propose(trial) for axis in self._rules.axes])
            return trial

    def take(self, folder: Path) -> bool:
        """Take a run folder, and return whether no other process has it.

        Raises:
            OSError: the folder above cannot be written.
        """
        with self._lock:
            return self._take(folder)

    def _take(self, folder: Path) -> bool:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A run may outlive the search that started it. A process does not see its own locks.
        if folder in self._own or OwnedLock(folder / OWNER_FILE).is_held():
            return False
        lock = OwnedLock(folder.with_name(f"{folder.name}.lock"))
        if not lock.take():
            return False
        self._own[folder] = lock
        return True

    def release(self, folder: Path) -> None:
        """Leave a run folder to others."""
        with self._lock:
            self._own.pop(folder).release()

    def reported(self, trial: Trial) -> set[int]:
        """Return the steps with a reported value."""
        return next(set(one.intermediate_values) for one in self.trials if one.number == trial.number)

    @property
    def seed(self) -> int:
        """The seed of all trials."""
        return self._rules.seed

    @property
    def score(self) -> dict[str, Any]:
        """The metrics of the best trial on a third split; empty without.

        Raises:
            UsageError: they are none.
        """
        with self._right("the score of the best trial"):
            return dict(_SCORES.validate_python(self._study.user_attrs.get(_SCORE, {})))

    @score.setter
    def score(self, values: dict[str, Any]) -> None:
        self._study.set_user_attr(_SCORE, values)

    @property
    def sign(self) -> int:
        """1 if the larger value is the better one, else -1."""
        return 1 if self._rules.is_better_above else -1

    def importance(self) -> dict[str, float]:
        """Return the share of each key in the differences of the values; empty with too few complete trials."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of too few trials: all shares would be equal
            try:
                return dict(optuna.importance.get_param_importances(self._study))
            except (ValueError, RuntimeError, UserWarning):  # also fewer than two trials, or equal values
                return {}

    def tell(self, trial: Trial, value: float | None, state: TrialState, **facts: Any) -> None:
        """Save the result of a trial; `facts` are attributes."""
        with self._lock:
            for name, fact in facts.items():
                trial.set_user_attr(name, fact)
            self._study.tell(trial, value, state)
