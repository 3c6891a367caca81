"""Ranks that are killed at random moments and restarted: the final weights equal those of an undisturbed run."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers import processes, warm
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode

STEPS = 120


def start(recipe: Path, *options: str) -> warm.WarmProcess:
    keys = ["checkpoint.every=3 steps", "evaluation.every=null", f"training.max_steps={STEPS}"]
    return warm.start(["run", recipe, "--processes", "2", *options, *keys])


def weights(recipe: Path) -> bytes:
    return (recipe.parent / "run" / "model" / "model.safetensors").read_bytes()


def kill_ranks(process: warm.WarmProcess, most: int, draw: random.Random) -> int:
    """Kill at most `most` ranks, one after another, while the run continues. Return the number of kills."""
    killed = 0
    while killed < most:
        # A fork takes about a second: most kills come after the ranks have begun, some before.
        if process.poll() is not None:
            return killed
        time.sleep(draw.uniform(0.2, 2.5))
        with suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(process.pid).children()
            if ranks:
                draw.choice(ranks).kill()
                killed += 1
    return killed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_rank_is_killed_at_random_moments(kills, tmp_path):
    whole = write_tiny_run(tmp_path / "whole")
    assert processes.finish(start(whole)).returncode == ExitCode.DONE
    draw, done, runs = random.Random(kills), 0, 0
    while done < kills:
        runs += 1
        recipe = write_tiny_run(tmp_path / f"killed{runs}")
        process = start(recipe, "--max-restarts", "30")
        try:
            killed = kill_ranks(process, kills - done, draw)
        except BaseException:
            processes.kill(process)
            raise
        finished = processes.finish(process, timeout_seconds=600)
        assert finished.returncode == ExitCode.DONE, finished.stderr
        assert finished.stderr.count("was killed by SIGKILL") >= min(killed, 1)
        assert weights(recipe) == weights(whole)
        done += killed
    print(f"{done} kills in {runs} runs")
