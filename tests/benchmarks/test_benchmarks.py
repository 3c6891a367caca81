"""Smoke tests of the benchmarks. Their results are only valid on an otherwise idle machine."""

from __future__ import annotations

import re
import sys

from tests.helpers import processes

NUMBER = r"-?\d+\.\d+"


def cells(output: str) -> list[list[str]]:
    """Return the rows of the tables in an output, without their headers."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    return [row for row in rows if re.search(r"\d", row[-1])]


def run(*arguments: str) -> list[list[str]]:
    done = processes.run([sys.executable, "-m", *arguments], timeout_seconds=580)
    assert done.returncode == 0, done.stderr
    return cells(done.stdout)


def test_throughput():
    rows = run("tests.benchmarks.throughput", "--processes=2", "--models=small", "--rounds=2", "--steps=2")
    assert [row[0] for row in rows] == ["PyTorch by hand", "ours", "ours, torch's dropout", "transformers' Trainer"]
    for _, rate, *ratios in rows:
        assert float(rate) > 0
        for ratio in ratios:
            # loose bounds: they only detect a training that computes something else
            assert 0.1 < float(re.match(NUMBER, ratio)[0]) < 10, rows


def test_tensor():
    rows = run("tests.benchmarks.tensor", "--models=small", "--rounds=2", "--steps=1")
    assert [row[0].split(",")[0] for row in rows] == ["our blocks", "DTensor", "transformers"]
    for _, milliseconds, ratio, peak in rows:
        assert float(milliseconds) > 0
        assert 0.1 < float(re.match(NUMBER, ratio)[0]) < 20, rows
        assert float(re.match(NUMBER, peak)[0]) > 0


def test_startup():
    ((processes, imports, whole, *added),) = run("tests.benchmarks.startup", "--processes=1", "--rounds=1")
    assert processes == "1"
    assert float(re.match(NUMBER, imports)[0]) > 0
    assert float(re.match(NUMBER, whole)[0]) > 0
    assert all(re.match(NUMBER, cell) for cell in added)
