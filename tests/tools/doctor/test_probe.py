"""The probe forks this process, so it asks the questions that a test sets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.tools.doctor.machines import CPU
from trainer.tools.doctor import asking
from trainer.tools.doctor.facts import Facts, GlooFacts, GpuFacts, TorchFacts
from trainer.tools.doctor.probe import Probe, ProbeError

GLOO = GlooFacts(0.1, ("127.0.0.1",))


def fail() -> Facts:
    raise ImportError("libcudart.so.12: cannot open\nmore of it")


def crash() -> Facts:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang() -> Facts:
    time.sleep(60)
    raise AssertionError


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Probe]]:
    """Start a probe with these answers and this time limit for the GPUs."""
    begun: list[Probe] = []

    def start(seconds: float = 30.0, **askers: Callable[[], Facts]) -> Probe:
        kinds = {"torch": TorchFacts, "gloo": GlooFacts, "gpus": GpuFacts}
        usual = {TorchFacts: lambda: CPU, GlooFacts: lambda: GLOO, GpuFacts: GpuFacts}
        monkeypatch.setattr(asking, "_ASKERS", usual | {kinds[name]: asker for name, asker in askers.items()})
        for kind in asking.KINDS:
            monkeypatch.setattr(kind, "limit", seconds if kind is GpuFacts else 30.0)
        begun.append(Probe())
        return begun[-1]

    yield start
    for process in begun:
        process.close()


def test_answers_arrive(begin):
    asked = begin()
    assert asked.facts(TorchFacts) == CPU
    assert asked.facts(GlooFacts) == GLOO
    assert asked.facts(GpuFacts) == GpuFacts()


def test_one_error_is_that_of_its_question(begin):
    asked = begin(gloo=fail)
    with pytest.raises(ProbeError, match=r"^ImportError: libcudart.so.12: cannot open$") as error:
        asked.facts(GlooFacts)
    assert error.value.kind is GlooFacts
    assert asked.facts(GpuFacts) == GpuFacts()


def test_without_torch_nothing_more_is_asked(begin):
    asked = begin(torch=fail)
    with pytest.raises(ProbeError, match="libcudart") as error:
        asked.facts(GpuFacts)
    assert error.value.kind is TorchFacts


@pytest.mark.parametrize(
    ("end", "seconds", "message"),
    [
        (crash, 30.0, "the start of CUDA ended the process by SIGKILL"),
        (hang, 1.0, "the start of CUDA did not end within 1 s"),
    ],
)
def test_a_crash_or_a_hang_leaves_the_answers_before_it(begin, end: Callable[[], Facts], seconds, message: str):
    asked = begin(gpus=end, seconds=seconds)
    assert asked.facts(GlooFacts) == GLOO
    with pytest.raises(ProbeError, match=message) as error:
        asked.facts(GpuFacts)
    assert error.value.kind is GpuFacts


def test_a_question_after_a_crash_has_its_error(begin):
    asked = begin(gloo=crash)
    with pytest.raises(ProbeError, match="ended the process by SIGKILL") as error:
        asked.facts(GpuFacts)
    assert error.value.kind is GlooFacts


def test_closing_ends_the_process_and_its_children(begin):
    def start_another() -> Facts:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        return hang()

    asked = begin(gpus=start_another)
    asked.facts(GlooFacts)
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(asked._process.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    asked.close()
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert (len(gone), alive) == (1, [])
