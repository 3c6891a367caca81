"""The packages of trackers, which are optional."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.distribution import install_command
from trainer.base.errors import UsageError
from trainer.ranks.environment import forbid_telemetry


@contextmanager
def packages_of(destination: str) -> Iterator[None]:
    """Import the packages of a word of `logging.to` inside this context, with their usage reports off.

    The extra of this project with these packages has the same name.

    Raises:
        UsageError: a package is not installed.
    """
    # Again, since a target of an entry point is registered after the start; a package reads it when it is imported.
    forbid_telemetry()
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f'`logging.to` holds "{destination}", which needs packages that are not installed;'
            f" install them ({install_command(destination)}) or remove it from `logging.to` ({error})"
        ) from error
