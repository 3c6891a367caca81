"""A run or another verb in a process of its own, for a caller that is no command line: a script, a notebook, a thread.

The process gets the recipe as a file and starts the ranks as the command does. It makes callbacks again from their
classes and fields: a run unpickles nothing. It reports an error in a file, so that the caller raises the same one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer.base import extensions
from trainer.base.errors import ExitCode, TrainerError, UsageError, error_of_values, error_to_values
from trainer.base.processes import child_variables
from trainer.base.scratch import scratch_folder
from trainer.base.terminal import write
from trainer.observe.observer import callbacks_of

if TYPE_CHECKING:
    from trainer import Callback
    from trainer.recipe.reading.loading import ResolvedRecipe

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_GOOD = (ExitCode.DONE, ExitCode.STOPPED)


def run_apart(
    resolved: ResolvedRecipe, processes: int | None, max_restarts: int, callbacks: Sequence[Callback] = ()
) -> int:
    """Run a recipe on local ranks below a new process, and return the exit code.

    An interrupt asks the run to save and stop, and this waits for that.

    Raises:
        UsageError: A callback cannot be made in another process.
        TrainerError: The error that ended the run.
    """
    with scratch_folder() as folder:
        job = {
            "recipe": recipe_file(resolved, folder),
            "processes": processes,
            "max_restarts": max_restarts,
            "callbacks": [described(callback) for callback in callbacks],
        }
        return _finished(folder, "trainer.tools.apart", job)


def answer_apart(arguments: Sequence[str], captures: bool = False, accepts: Container[int] = _GOOD) -> str:
    """Run a command of `trainer` in a process, and return its standard output.

    Args:
        captures: whether to return the output; it is shown otherwise.
        accepts: the exit codes with which the result of the command can be read.

    Raises:
        TrainerError: the error that ended the command.
    """
    with scratch_folder() as folder:
        output = folder / "output"
        with output.open("wb") as file:
            # By its name: the command line stands above the tools.
            _finished(folder, "trainer.cli.apart", {"arguments": list(arguments)}, file if captures else None, accepts)
        return output.read_text(encoding="utf-8")


def recipe_file(resolved: ResolvedRecipe, folder: Path) -> str:
    """Write a recipe into a folder, and return the path of its file."""
    recipe = resolved.recipe.model_dump(mode="json", exclude_unset=True) | {"name": resolved.recipe.name}
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return str(file)


def _finished(
    folder: Path,
    module: str,
    job: Mapping[str, Any],
    output: IO[bytes] | None = None,
    accepts: Container[int] = _GOOD,
) -> int:
    """Do a job in a process that runs `module`; return its exit code, or raise its error."""
    whole = {
        **job,
        "registered": extensions.needed_elsewhere(),
        "path": sys.path,
        "argv": sys.orig_argv,
        "caller": os.getpid(),
    }
    (folder / "job.json").write_text(json.dumps(whole), encoding="utf-8")
    # A notebook or a test replaces these streams. Then the output of the child passes through this process.
    shown = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    passed = None if shown else subprocess.PIPE
    child = subprocess.Popen(
        [sys.executable, "-m", module, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=passed if output is None else output,
        stderr=subprocess.STDOUT if passed is not None and output is None else passed,
        env=child_variables(),
        start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
    )
    _wait(child, child.stdout or child.stderr)
    return _outcome(folder, child.returncode, accepts)


def _wait(child: subprocess.Popen[bytes], stream: IO[bytes] | None) -> None:
    """Wait for the process, show its output where this process redirects its own, and forward interrupts."""
    while child.poll() is None:
        try:
            if stream is not None:
                for line in stream:
                    write(line.decode("utf-8", "replace"), sys.stdout)
            child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
        except BaseException:
            child.kill()
            raise
    if stream is not None:
        write(stream.read().decode("utf-8", "replace"), sys.stdout)
        stream.close()


def _outcome(folder: Path, code: int, accepts: Container[int]) -> int:
    file = folder / "error.json"
    if file.exists():
        raise error_of_values(json.loads(file.read_text(encoding="utf-8")))
    if code not in accepts:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        raise TrainerError(f"the process that ran the command {how}; its output has the reason")
    return code


def do(folder: Path, work: Callable[[Any], int]) -> int:
    """Do the job of a folder as its caller would, and return the exit code; an error is in a file for the caller."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    # The modules of extensions and callbacks are found as in the caller.
    sys.path[:] = job["path"]
    sys.orig_argv[:] = job["argv"]  # the command to resume with is the caller's
    _stop_with(int(job["caller"]))
    try:
        extensions.load()
        extensions.repeat(job["registered"])
        return work(job)
    except TrainerError as error:
        (folder / "error.json").write_text(json.dumps(error_to_values(error)), encoding="utf-8")
        return error.exit_code


def _run(job: Mapping[str, Any]) -> int:
    from trainer.launch.local import Training, run_or_join
    from trainer.recipe.reading.loading import load_recipe

    training = Training(callbacks_of(made(job["callbacks"])))
    return run_or_join(load_recipe(job["recipe"], is_whole=True), job["processes"], job["max_restarts"], training)


def described(callback: Callback) -> dict[str, Any]:
    """Return the class and the fields of a callback as JSON values, for ranks in other processes.

    Raises:
        UsageError: another process cannot make this callback.
    """
    kind = type(callback)
    rule = f"the callback `{kind.__name__}` must be created again in the processes of the ranks, but"
    if kind.__module__ == "__main__":
        raise UsageError(
            f"{rule} its class is in this script or notebook, which they cannot import; move it into a module and"
            " import that, or start the script itself with torchrun"
        )
    if "." in kind.__qualname__:
        raise UsageError(
            f"{rule} its class is nested in another one ({kind.__qualname__}); move it to the top of its module"
        )
    names: list[str] = [one.name for one in fields(callback) if one.init] if is_dataclass(callback) else []
    if not is_dataclass(callback) and vars(callback):
        raise UsageError(f"{rule} it has values ({', '.join(vars(callback))}) and is no dataclass; make it a dataclass")
    values = {name: getattr(callback, name) for name in names}
    for name, value in values.items():
        if not _is_json(value):
            raise UsageError(
                f"{rule} its field `{name}` is {value!r}; use numbers, texts, lists and objects, as JSON has them, or"
                " start the script itself with torchrun"
            )
    return {"class": f"{kind.__module__}:{kind.__name__}", "fields": values}


def _is_json(value: Any) -> bool:
    try:
        # Values that JSON changes, such as tuples and keys that are numbers, come back as other ones.
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def made(rows: Sequence[Mapping[str, Any]]) -> list[Callback]:
    """Return the callbacks of the results of `described`.

    Raises:
        UsageError: a module cannot be imported.
    """
    callbacks = []
    for row in rows:
        try:
            callbacks.append(extensions.resolved(row["class"])(**row["fields"]))
        except Exception as error:
            raise UsageError(
                f"the callback `{row['class']}` could not be created: {type(error).__name__}: {error}; its module must"
                " be importable in every process"
            ) from error
    return callbacks


def _stop_with(caller: int) -> None:
    """Let the system ask this process to save and stop when its caller dies.

    The process may start no thread, because its ranks are forks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The caller may have died before `prctl`, and then no signal comes.
        if os.getppid() != caller:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(do(Path(sys.argv[1]), _run))
