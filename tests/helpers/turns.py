"""Turns of the workers of one run of the tests: a test that needs the machine for itself, and artefacts that all share.

A test marked `alone` runs while no other worker runs a test. `once` makes an artefact in the first worker that asks and
gives it to all others. Without pytest-xdist there is one worker, and neither waits.

The locks are POSIX record locks, and not those of `flock`, which a process that a test leaves behind would inherit.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _State:
    folder: Path | None = None  # of this run, the same for all workers
    has_others = False
    waited_seconds = 0.0


def begin(config: pytest.Config) -> None:
    """Finds the folder of the run; call it once, before the first test."""
    folder = Path(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    _State.has_others = hasattr(config, "workerinput")
    _State.folder = (folder.parent if _State.has_others else folder) / "turns"
    _State.folder.mkdir(exist_ok=True)


def waited_seconds() -> float:
    """Seconds that this worker has waited in `once` so far, while another worker made an artefact."""
    return _State.waited_seconds


@contextmanager
def turn(is_alone: bool) -> Iterator[None]:
    """Holds the machine for one test: alone, or beside the tests of other workers that are not alone."""
    if not _State.has_others:
        yield
        return
    # Whoever wants the machine holds the gate until it has it, so that a test which waits to be alone comes next.
    with _file("gate").open("a+") as gate, _file("machine").open("a+") as machine:
        fcntl.lockf(gate, fcntl.LOCK_EX)
        fcntl.lockf(machine, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.lockf(gate, fcntl.LOCK_UN)
        yield


def once(name: str, make: Callable[[], T]) -> T:
    """Return `make()` of the first worker that asks for `name`; the others wait and load it.

    Args:
        name: of the artefact, unique in the suite.
        make: gives something that can be pickled: numbers, tensors, or the path of a file under `shared_folder`.
    """
    file = _file(hashlib.sha256(name.encode()).hexdigest()[:24])
    with file.with_suffix(".lock").open("w") as lock:
        begun = time.monotonic()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        _State.waited_seconds += time.monotonic() - begun
        if not file.exists():
            made = pickle.dumps(make())
            file.with_suffix(".part").write_bytes(made)
            file.with_suffix(".part").rename(file)
    loaded: T = pickle.loads(file.read_bytes())
    return loaded


def shared_folder(name: str) -> Path:
    """A folder of the run that all workers see, for the files that `once` makes."""
    folder = _file(f"shared-{name}")
    folder.mkdir(exist_ok=True)
    return folder


def _file(name: str) -> Path:
    assert _State.folder is not None, "`begin` was not called"
    return _State.folder / name


class Turns:
    """The plugin that gives each test its turn.

    Tests that want to be alone come first, and one after the other they keep the machine. Scattered over the run, each
    would wait for the longest test of the other workers, and these workers with it.
    """

    def __init__(self) -> None:
        self._turn = ExitStack()
        self._keeps_machine = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: not _is_alone(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the timeout of a test, which must not count the wait
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        if not self._keeps_machine:
            self._turn.enter_context(turn(_is_alone(item)))
        try:
            return (yield)
        finally:
            self._keeps_machine = _is_alone(item) and nextitem is not None and _is_alone(nextitem)
            if not self._keeps_machine:
                self._turn.close()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None
