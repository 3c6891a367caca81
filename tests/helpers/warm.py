"""`trainer` as a fork of a process that has imported it, which saves seconds in tests that do not test the start.

The tests of the launchers, of the local ranks and of the README start it as a user does.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import runpy
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import pytest

from tests.helpers import knock, processes
from tests.helpers.forking import forking, start_children_as_usual
from tests.helpers.nodes import Node

_EXECUTABLE = "TRAINER_TESTS_PYTHON"  # the variable with the `python` of `warm_python`, for processes of processes

_SHIM = """#!/bin/sh
[ "$1" = -u ] && [ "$2" != -c ] && shift
case "$1" in
    */folder_reader.py) exec {usual} "$@" ;;  # it must not find this project
    -m | *.py) exec {warm} "$@" ;;
esac
exec {usual} "$@"
"""


class WarmProcess:
    """The subset of `subprocess.Popen`, with stdout and stderr as text pipes, that tests use."""

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str], program: str, node: Node | None = None
    ) -> None:
        self.args = list(arguments)
        context = forking()
        (out, write_out), (err, write_err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(self.args, environment, program, node, write_out, write_err))
        self._process.start()
        write_out.close()
        write_err.close()
        self.stdout, self.stderr = _text(out), _text(err)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end of the process, and return the unread rest of stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: The process has not ended in time.
        """
        texts = ["", ""]

        def read(index: int, stream: TextIO) -> None:
            texts[index] = stream.read()

        streams = (self.stdout, self.stderr)
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate(streams)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
        self._process.join(timeout)
        if self._process.exitcode is None or any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *texts)
        return texts[0], texts[1]


def start(
    arguments: Sequence[object], faulty: bool = False, node: Node | None = None, program: str = "", **variables: str
) -> WarmProcess:
    """Start `trainer` with these arguments, on a node if one is given.

    Args:
        arguments: the arguments of the program.
        faulty: start `faulty_run.py` instead of `trainer`.
        node: the node of the process.
        program: another program, as `MODULE:FUNCTION`; the function takes the arguments and returns the exit code.
        variables: further environment variables.
    """
    words = [str(word) for word in arguments]
    return WarmProcess(words, processes.environment(**variables), program or _program(faulty), node)


def start_on_terminal(
    arguments: Sequence[object], columns: int = 120, faulty: bool = False, program: str = ""
) -> tuple[BaseProcess, int]:
    """Start `trainer`, or another program as `start` does, with a terminal of its own.

    Returns:
        The process, and the descriptor of the terminal.
    """
    terminal, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = processes.environment(TERM="xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        variables.pop(name, None)
    end = Connection(child_end)
    words = [str(word) for word in arguments]
    process = forking().Process(target=_run_on_terminal, args=(words, variables, program or _program(faulty), end))
    process.start()
    end.close()
    return process, terminal


def _run_on_terminal(arguments: list[str], environment: dict[str, str], program: str, end: Connection) -> None:
    _become([Connection(os.dup(end.fileno())) for _ in range(3)], environment, processes.ROOT)
    end.close()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches all processes of this session
    _call(program, arguments)


def _text(connection: Connection) -> TextIO:
    stream = os.fdopen(os.dup(connection.fileno()), encoding="utf-8", errors="replace")
    connection.close()
    return stream


def _run(
    arguments: list[str],
    environment: dict[str, str],
    program: str,
    node: Node | None,
    out: Connection,
    err: Connection,
) -> None:
    if node is not None:
        node.enter()
    nothing = Connection(os.open(os.devnull, os.O_RDONLY))
    _become([nothing, out, err], environment, processes.ROOT)
    _call(program, arguments)


def _program(faulty: bool) -> str:
    return "tests.helpers.faulty_run:main_with_fault" if faulty else "trainer.cli:main"


def _call(program: str, arguments: list[str]) -> None:
    """Run a program, and exit with its code."""
    module, _, function = program.partition(":")
    sys.argv = ["trainer", *arguments]
    sys.exit(getattr(import_module(module), function)(arguments))


def _become(streams: Sequence[Connection], environment: dict[str, str], folder: Path | str) -> None:
    """Give this fork the state of a process from a shell: its own session, streams, environment and folder."""
    os.setsid()
    start_children_as_usual()
    for descriptor, stream in enumerate(streams):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get(_EXECUTABLE, sys.executable)
    os.chdir(folder)


@contextmanager
def door(node: Node | None = None) -> Iterator[dict[str, str]]:
    """Let a shell start warm processes, on a node if one is given. Yield the command to put before the arguments.

    The programs are `trainer`, and `python` with `-`, `-c`, `-m MODULE`, `FILE.py`, or `-u -c` for a
    worker of pytest-xdist.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder) / "door")  # a short path: Linux limits that of a socket to 107 bytes
        listener.bind(path)
        listener.listen()
        threading.Thread(target=_open_to_all, args=(listener, node), daemon=True).start()
        asking = shlex.join([sys.executable, "-I", "-S", knock.__file__, path])
        yield {program: f"{asking} {program}" for program in ("trainer", "python")}
        with suppress(OSError):  # on macOS, which wakes the thread when the socket is closed
            listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def warm_python(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork the processes that start as `python -m MODULE` or `python FILE.py`, and theirs; others start as usual.

    Such a process has the number of `knock.py`, which passes SIGTERM on; if it is killed, the program gets a SIGINT.
    """
    with door() as programs:
        file = tmp_path_factory.mktemp("warm") / "python"
        usual = shlex.quote(sys.executable)
        file.write_text(_SHIM.format(usual=usual, warm=programs["python"]), encoding="utf-8")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        monkeypatch.setenv(_EXECUTABLE, str(file))
        yield


def _open_to_all(listener: socket.socket, node: Node | None) -> None:
    with suppress(OSError):  # the listener is closed
        while True:
            threading.Thread(target=_serve, args=(listener.accept()[0], node), daemon=True).start()


def _serve(caller: socket.socket, node: Node | None) -> None:
    """Run one program to its end, or kill it if the caller disconnects before."""
    with caller:
        first, descriptors, _, _ = socket.recv_fds(caller, 1 << 16, 3)
        streams = [Connection(descriptor) for descriptor in descriptors]
        text = first
        while not text.endswith(b"\n"):
            text += caller.recv(1 << 16)
        asked = json.loads(text)
        process = forking().Process(target=_run_asked, args=(asked, streams, node))
        process.start()
        for stream in streams:
            stream.close()
        while process.sentinel not in connection.wait([process.sentinel, caller]):
            with suppress(OSError):
                if asked_signal := caller.recv(1):
                    os.kill(process.pid or 0, asked_signal[0])
                    continue
            break
        else:
            process.join()
            caller.sendall(str(process.exitcode).encode())
            return
        for number, seconds in ((signal.SIGINT, 10), (signal.SIGKILL, None)):  # tests first end their processes
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, number)
            process.join(seconds)


def _run_python(arguments: list[str]) -> None:
    """Run `python -m MODULE ARGUMENT ...` or `python FILE.py ARGUMENT ...`."""
    is_module = arguments[0] == "-m"
    program, *_ = sys.argv = arguments[is_module:]
    further = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path() if is_module else Path(program).parent), *further]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _run_asked(asked: dict[str, object], streams: list[Connection], node: Node | None) -> None:
    program, *arguments = asked["arguments"]
    if node is not None:
        node.enter()
    _become(streams, asked["environment"], asked["folder"])
    sys.argv = [program, *arguments]
    own, parent = os.getpid(), os.getppid
    os.getppid = lambda: asked["parent"] if os.getpid() == own else parent()  # type: ignore[assignment,return-value]
    if program == "python" and arguments[:2] == ["-u", "-c"]:  # the program reads its standard input itself
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        exec(arguments[2], {"__name__": "__main__"})
        return
    if program == "python" and (arguments[0].endswith(".py") or (arguments[0] == "-m" and arguments[1] != "trainer")):
        _run_python(arguments)
        return
    if program == "python" and arguments[0] != "-m":
        with open(0, encoding="utf-8") as script:
            source = script.read() if arguments == ["-"] else arguments[1]
        exec(compile(source, "<script>", "exec"), {"__name__": "__main__"})
        return
    from trainer.cli import main

    sys.exit(main(arguments[2:] if program == "python" else arguments))
