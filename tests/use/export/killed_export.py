"""An export that is killed before each of its changes to the file system, each time in a fork.

`main(["export", CHECKPOINT, FOLDER])` is `trainer export`; `main(["run", RECIPE, FOLDER])` is the export of a run over
that of an earlier one. Each change prints a line: `none`, `old` and `new` for FOLDER, and `old aside` between the two
renames that replace it. The last line is `done`, after an export that nothing killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from trainer.base.disk import REPLACED, remove
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.training.assembly import Assembly
from trainer.training.run import run
from trainer.use.export.exporting import export

_CHANGES = ("os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def was_killed(call: int, function: Callable[[], object]) -> bool:
    """Call a function in a fork that is killed before its change number `call`; return whether it has so many."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    calls = count(1)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in _CHANGES or (event == "open" and type(arguments[2]) is int and arguments[2] & _WRITES)
        if is_change and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)  # from any code
    try:
        function()
    finally:
        os._exit(0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def show(place: Path, export_there: Callable[[], object]) -> None:
    """Kill an export to a place before each of its changes; then export, and compare."""
    old, found = contents(place), []
    for call in count(1):
        if not old:
            remove(place)  # `trainer export` refuses a folder that holds files
        if not was_killed(call, export_there):
            break
        found.append((contents(place), contents(place.with_name(f"{REPLACED}{place.name}"))))
    new = contents(place)
    assert new.keys() > {"config.json", "model.safetensors", "README.md"}
    assert old != new
    for here, aside in found:
        state = "new" if here == new else ("old" if old else "none") if here == old else "damaged"
        print("old aside" if not here and aside == old and old else state)
    left = [path.name for path in place.parent.iterdir() if path.name.startswith(".") and place.name in path.name]
    assert not left, f"nothing of the killed ones stays: {left}"
    print("done")


def main(arguments: list[str]) -> None:
    """Run the program; see the module."""
    what, source, place = arguments[0], arguments[1], Path(arguments[2])
    if what == "export":
        show(place, lambda: export(Path(source), place))
        return
    original = Assembly.export

    def killed(self: Assembly, to: Path | str, *checks: Any) -> None:
        if Path(to) == place:
            show(place, lambda: original(self, to, *checks))
        else:
            original(self, to, *checks)

    train(source, 1)
    remove(place.parent / "checkpoints")
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Assembly, "export", killed)
        train(source, 2)


def train(recipe: str, seed: int) -> None:
    words = ["training.max_steps=1", f"training.seed={seed}"]
    run(load_recipe(recipe, words), LaunchEnvironment("none"))
