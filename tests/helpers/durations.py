"""The slowest tests and files of a run, and the time limit of each test.

A test that takes more than `LIMIT_SECONDS` and is not listed in `SLOW` fails. The limit holds for a reference machine,
which runs `_reference_work` in `REFERENCE_SECONDS`. Any other machine is measured when a test exceeds the limit, and
the seconds are divided by its slowness. Waiting for a turn or for another worker in `turns.once` does not count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest

from tests.helpers import turns

LIMIT_SECONDS = 60.0
REFERENCE_SECONDS = 0.2
NUM_TESTS_SHOWN, NUM_FILES_SHOWN = 40, 20

SLOW = {
    "tests/benchmarks/test_benchmarks.py::test_throughput": "trains with four programs, two processes each",
    "tests/benchmarks/test_benchmarks.py::test_tensor": "trains with three programs, two processes each",
    "tests/benchmarks/test_peers.py::test_a_compiled_loop_learns_the_same": "g++ builds the code of a whole model",
    "tests/chaos/test_chaos.py::test_a_sample_of_the_campaign": "a dozen starts of ranks",
    "tests/docker/test_install.py::test_a_fresh_prefix_holds_the_pinned_versions_and_the_recipes": "installs by pip",
    "tests/features/adamw_kernel/test_adamw_kernel.py::test_in_tritons_interpreter": "30 tests of Triton",
    "tests/features/elastic/test_elastic.py::TestTorchrun::test_a_node_leaves_and_joins": "four starts without a fork",
    "tests/features/experts/test_runs.py::test_the_sample_trains_alike_under_every_launcher": (
        "six programs, up to four processes each"
    ),
    "tests/features/stages/test_pretraining.py::test_pretrained_weights_beat_random_ones": "six trainings",
    "tests/features/stages/test_shipped_chain.py::test_killed_in_each_stage_it_resumes_under_other_layouts": (
        "fourteen trainings on two ranks; seven are killed and start again"
    ),
    "tests/launch/test_launchers.py::test_two_ranks_train_as_one_process": "up to four programs",
    "tests/launch/test_real_data.py::test_each_launcher_gives_the_same_curve": "trains on files of thousands of rows",
    "tests/launch/test_slurm.py::test_a_job_goes_on_after_a_killed_rank_and_after_a_signal": (
        "a real cluster starts, requeues twice and finishes"
    ),
    "tests/launch/test_launchers.py::test_tensor_ranks_run_the_sample": "four ranks, each a program of its own",
    "tests/launch/test_memory_kills.py::test_a_killed_rank_resumes_from_memory": "torchrun starts twice without a fork",
    "tests/tools/plan/test_shortening.py::test_a_shortened_model_gives_the_plan_of_the_whole_model": "whole plans",
    "tests/launch/test_two_nodes.py::TestTorchrunHandsOutTheRanks::test_a_node_that_was_killed_joins_again": (
        "torchrun waits for the lost node, then both start again"
    ),
    "tests/launch/test_two_nodes.py::TestTorchrunHandsOutTheRanks::test_a_rank_that_was_killed": "it starts twice",
    "tests/features/kernels/test_fused_attention.py::test_the_kernel_in_tritons_interpreter": "40 tests of Triton",
    "tests/models/test_compiled.py::test_with_inductor": "the compiler builds C++ for each graph",
    "tests/features/trackers/test_telemetry.py::test_a_run_asks_nothing_of_the_network": "two runs, not forked",
    "tests/features/kernels/test_compiled_kernels.py::test_every_kernel": "some kernels of large heads take minutes",
    "tests/parity/test_parity.py::TestTheTestCanFail::test_a_planted_mistake": "new ranks for each mistake",
    "tests/tools/audit/test_run_audit.py::test_flipped_entities_of_the_sample": (
        "trains on thousands of rows, and fits five models of n-grams"
    ),
    "tests/tools/reproduce/test_reproduce.py::test_a_sample_is_reproduced": "whole trainings of samples",
    "tests/training/test_compiled.py::test_a_compiled_run": "each layer is traced and compiled",
    "tests/test_readme.py::test_a_page_can_be_followed": "each training of a page, one after the other",
}
"""Tests, without parameters, that take more than 30 s on the reference, and why."""


def _reference_work() -> int:
    """Run CPU work that takes `REFERENCE_SECONDS` on an idle core of the reference machine."""
    total = 0
    for number in range(5_000_000):
        total += number & 7
    return total


def slowness() -> float:
    """Return the current slowdown of this machine relative to the reference, at least 1."""
    begun = time.perf_counter()
    for _ in range(5):
        _reference_work()
    return max(1.0, (time.perf_counter() - begun) / 5 / REFERENCE_SECONDS)


def excess(name: str, seconds: float) -> str | None:
    """Return the message for a test that took too long, or None.

    Args:
        name: The test's node id.
        seconds: The duration of its setup, call and teardown on this machine.
    """
    if seconds <= LIMIT_SECONDS or name.partition("[")[0] in SLOW:
        return None
    factor = slowness()
    if seconds / factor <= LIMIT_SECONDS:
        return None
    return (
        f"{name} took {seconds:.0f} s on a machine {factor:.1f} times slower than the reference, which makes"
        f" {seconds / factor:.0f} s; the limit is {LIMIT_SECONDS:.0f} s; make it faster, or name it in {__name__}"
    )


_SECONDS = pytest.StashKey[float]()
_FAILED = pytest.StashKey[bool]()


class Durations:
    """The pytest plugin that fails tests beyond the limit and shows the slowest tests and files."""

    def __init__(self) -> None:
        self._waited_seconds = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Start the files of the slowest tests first, so that at the end no worker waits for one of them."""
        files = {name.partition("::")[0] for name in SLOW}
        items.sort(key=lambda item: item.nodeid.partition("::")[0] not in files)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        waited = turns.waited_seconds()
        report.duration -= waited - self._waited_seconds
        self._waited_seconds = waited
        seconds = report.duration + (0.0 if call.when == "setup" else item.stash.get(_SECONDS, 0.0))
        failed = report.failed or (call.when != "setup" and item.stash.get(_FAILED, False))
        item.stash[_SECONDS], item.stash[_FAILED] = seconds, failed
        if call.when == "teardown" and not failed and (message := excess(item.nodeid, seconds)):
            report.outcome, report.longrepr = "failed", message
        return report

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Show the slowest tests and files if the run has several workers."""
        if not getattr(config.option, "numprocesses", None):
            return
        tests: dict[str, float] = defaultdict(float)
        files: dict[str, float] = defaultdict(float)
        for report in (one for reports in terminalreporter.stats.values() for one in reports):
            if isinstance(report, pytest.TestReport):
                tests[report.nodeid] += report.duration
                files[report.nodeid.partition("::")[0]] += report.duration
        terminalreporter.section(f"slowest tests and files, of {sum(files.values()):.0f} s in all")
        for total, number in ((tests, NUM_TESTS_SHOWN), (files, NUM_FILES_SHOWN)):
            for name in sorted(total, key=total.__getitem__, reverse=True)[:number]:
                terminalreporter.write_line(f"{total[name]:7.1f} s  {name}")
