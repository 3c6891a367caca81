"""Signals ask; a second Ctrl-C insists."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress

import pytest

from tests.helpers import processes
from tests.helpers.processes import ROOT
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.processes import start_of
from trainer.ranks.stopping import SAVE, SHOW_CURSOR, STOP, StopRequest, stop_before_training


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noted_and_survived(number):
    with StopRequest() as stop:
        stop.listen()
        assert stop.received == 0
        send(number)
        assert stop.received == number


def test_a_second_ctrl_c_interrupts_at_once():
    with StopRequest() as stop:
        stop.listen()
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.received == signal.SIGINT


def test_the_first_ctrl_c_is_answered_at_once(tmp_path, capfd):
    with StopRequest() as stop:
        stop.listen(speaks=True)
        send(signal.SIGINT)
        assert "SIGINT: stopping when the model is built; nothing is lost" in capfd.readouterr().err
        stop.watch(tmp_path)
        send(signal.SIGUSR1)
        assert "SIGUSR1: saving a checkpoint after this step, then stopping" in capfd.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_first_ctrl_c_shows_the_cursor(monkeypatch, capfd, is_terminal):
    """torchrun kills the ranks at the second one, without a chance to do it then."""
    monkeypatch.setattr(os, "isatty", lambda descriptor: is_terminal)
    with StopRequest() as stop:
        stop.listen(speaks=True)
        send(signal.SIGINT)
    assert capfd.readouterr().out == (SHOW_CURSOR.decode() if is_terminal else "")


def test_a_ctrl_c_after_a_schedulers_warning_interrupts_too():
    with StopRequest() as stop:
        stop.listen()
        send(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_scheduler_may_ask_twice():
    with StopRequest() as stop:
        stop.listen()
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.received


def test_the_handlers_before_come_back_even_after_an_error():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with suppress(ValueError), StopRequest() as stop:
        stop.listen()
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        raise ValueError
    assert {number: signal.getsignal(number) for number in before} == before


def test_before_listening_a_signal_keeps_its_action():
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.received == 0


class TestFiles:
    def test_ask_and_are_removed_when_obeyed(self, tmp_path):
        stop = StopRequest()
        (tmp_path / "save").touch()
        assert stop.asked() == 0, "it does not watch yet"
        stop.watch(tmp_path)
        assert stop.asked() == SAVE
        (tmp_path / "stop").touch()
        stop.obeyed(SAVE)
        assert stop.asked() == STOP
        stop.obeyed(STOP)
        assert stop.asked() == 0
        assert not any(tmp_path.iterdir())

    def test_the_file_system_is_asked_a_few_times_a_second(self, tmp_path):
        now = 0.0
        stop = StopRequest(clock=lambda: now)
        stop.watch(tmp_path)
        assert stop.asked() == 0
        (tmp_path / "stop").touch()
        now = 0.2
        assert stop.asked() == 0
        now = 0.3
        assert stop.asked() == STOP

    def test_a_signal_goes_before_save_and_stop_before_a_signal(self, tmp_path):
        with StopRequest() as stop:
            stop.listen()
            stop.watch(tmp_path)
            send(signal.SIGUSR1)
            (tmp_path / "save").touch()
            assert stop.asked() == signal.SIGUSR1
            assert min(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) > SAVE
            assert max(signal.valid_signals()) < STOP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGUSR1, 75, "stopped by SIGUSR1 before the first step; nothing was lost\n"), (signal.SIGINT, 130, "")],
)
def test_a_signal_at_an_import_of_the_start_ends_the_run(tmp_path, number, code, message):
    """torch ignores any error in its import of numpy, which a handler that raises would end up in."""
    recipe = write_tiny_run(tmp_path)
    program = ROOT / "tests" / "helpers" / "signalled_imports.py"
    ended = processes.run([sys.executable, program, "500", number.name, "numpy", "run", recipe])
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert [one for one in found if one[1:] != [code, message]] == []
    assert len(found) > 5
    assert "numpy" in [name for name, *_ in found]


def test_a_signal_before_the_first_step_ends_the_processes_that_the_run_has_started():
    text = "import os, signal, subprocess\nfrom trainer.ranks.stopping import stop_before_training\n"
    text += "with stop_before_training():\n    print(subprocess.Popen(['sleep', '600']).pid)\n"
    text += "    os.kill(os.getpid(), signal.SIGTERM)"
    ended = processes.run([sys.executable, "-c", text])
    assert ended.returncode == 75
    until = time.monotonic() + 30
    while start_of(int(ended.stdout)):  # a killed process ends a moment later
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.01)


def test_a_process_that_ignores_ctrl_c_goes_on():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_before_training(interrupts=True):
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
