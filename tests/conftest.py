"""Fixtures for every test, and the rules of a run: turns, durations, and nothing left for the next test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Before torch is imported. With more threads than cores, each operation would wait for threads of other workers.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests start programs of this environment by their names. Once: workers have the path of the process that starts them.
os.environ["PATH"] = os.pathsep.join(
    dict.fromkeys([str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)])
)

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import forking, turns, warm
from tests.helpers.durations import Durations
from tests.helpers.ranks import RankPools
from tests.helpers.recipes import minimal, problems, write
from tests.helpers.rows import in_folder
from tests.helpers.warm import warm_python
from trainer.base.collector import importing

__all__ = ["in_folder", "minimal", "problems", "ranks", "warm_python", "write"]  # fixtures, which pytest finds here

# Seconds of an example on a busy machine say nothing.
settings.register_profile("trainer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainer")

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.hookimpl(trylast=True)  # pytest's own temporary folders come first
def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background ignores SIGINT for them, and they for every process they start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forking.join(getattr(config, "workerinput", {}).get("fork_server"))
    turns.begin(config)
    config.pluginmanager.register(turns.Turns())
    config.pluginmanager.register(Durations())


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the workers too: they share the imports of torch, transformers and DeepSpeed."""
    opened = ExitStack()
    config.add_cleanup(opened.close)
    python = opened.enter_context(warm.door())["python"]
    for spec in (one for one in specs if one.popen and not one.python):
        spec.python = python


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fork_server"] = forking.address()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    with importing():
        try:
            return (yield)
        finally:
            gc.freeze()  # modules and items stay, also in a fork that had imported transformers before


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(N).run(function, *args)` calls a function on N gloo ranks; the processes are kept from test to test."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """Keep objects of earlier modules, mostly of imports, out of the collector; each training runs it twice."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_interfaces() -> Iterator[None]:
    """Code under test may choose an interface for its process; the children of a later test would inherit it."""
    before = {name: os.environ.get(name) for name in INTERFACES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
