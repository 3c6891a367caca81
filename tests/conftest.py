"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.recipes import minimal, problems, write

__all__ = ["minimal", "problems", "ranks", "write"]  # fixtures, which pytest finds here


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(N).run(function, *args)` calls a function on N gloo ranks; the processes live as long as the session."""
    pools = RankPools()
    yield pools
    pools.close()
