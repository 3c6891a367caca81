"""The errors that a user meets, and the exit code that each one ends the program with.

This room knows nothing of ours. One grammar for every message: the recipe path, its value, the rule, the remedy:
"`training.global_batch_size` must be divisible by the data-parallel size 3, but is 32; use 30 or 33". A `TrainerError`
is the user's to mend and is shown without a traceback; anything else that escapes is our own bug and shows one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process answers to its caller; part of the public interface."""

    DONE = 0
    FAILED = 1
    USER = 2
    NON_FINITE = 3
    STOPPED = 75  # EX_TEMPFAIL of sysexits.h: "try again later", which is what a scheduler should do


class TrainerError(Exception):
    """Something that the user can mend; `str(error)` is the whole message, the remedy included."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(TrainerError):
    """The recipe, an argument or the environment does not allow this run; found before training starts."""

    exit_code = ExitCode.USER


class RecipeError(UsageError):
    """Everything that is wrong with a recipe, reported at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(UsageError):
    """A data set that does not hold what the recipe says it holds; names the column and the row."""


class LaunchError(UsageError):
    """The ranks that were asked for are not the ranks that started."""


class LostPeerError(TrainerError):
    """Another rank has gone, so that this one cannot go on; why, that rank says."""


class NonFiniteError(TrainerError):
    """The loss or the gradient norm is not a number; the step is named, and nothing after it was saved."""

    exit_code = ExitCode.NON_FINITE
