from __future__ import annotations

import pytest

from tests.helpers import durations
from tests.helpers.processes import ROOT


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with the slowness of this machine, which a test may change."""
    factor = [1.0]
    monkeypatch.setattr(durations, "slowness", lambda: factor[0])
    return factor


def test_a_test_beyond_the_limit_is_named(machine):
    assert durations.excess("tests/test_a.py::test_b", 59.0) is None
    assert "test_b took 75 s" in durations.excess("tests/test_a.py::test_b", 75.0)


def test_the_seconds_of_a_slow_machine_are_corrected(machine):
    machine[0] = 2.0
    assert durations.excess("tests/test_a.py::test_b", 119.0) is None
    assert "which makes 61 s" in durations.excess("tests/test_a.py::test_b", 122.0)


def test_a_test_of_the_list_may_take_longer(machine, monkeypatch):
    monkeypatch.setitem(durations.SLOW, "tests/test_a.py::test_b", "a reason")
    assert durations.excess("tests/test_a.py::test_b[2-True]", 500.0) is None


def test_a_machine_is_never_counted_as_faster_than_the_reference(monkeypatch):
    monkeypatch.setattr(durations, "_reference_work", lambda: 0)
    assert durations.slowness() == 1.0


def test_every_test_of_the_list_is_there():
    for name, reason in durations.SLOW.items():
        file, *_, function = name.split("::")
        assert f"def {function}(" in (ROOT / file).read_text(), name
        assert reason, name
