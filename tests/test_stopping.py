"""Signals ask; a second Ctrl-C insists."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from trainer.stopping import StopRequest


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


def test_before_it_listens_a_signal_does_what_it_did():
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.received == 0
