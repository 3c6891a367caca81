"""Errors that users can fix, and the exit code of each.

A message names the recipe path, its value, the rule and the fix: "`training.global_batch_size` must be divisible by
the data-parallel size 3, but is 32; use 30 or 33". A `TrainerError` is shown without a traceback. Any other exception
that reaches the user is a bug of the trainer and shows one.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of the process; part of the public interface."""

    DONE = 0
    FAILED = 1
    USER = 2
    NON_FINITE = 3
    STOPPED = 75  # EX_TEMPFAIL of sysexits.h, "try again later": a scheduler should start the job again


class TrainerError(Exception):
    """An error that the user can fix; `str(error)` is the whole message, with the fix."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(TrainerError):
    """The recipe, an argument or the environment does not allow this run; found before training starts."""

    exit_code = ExitCode.USER


class RecipeError(UsageError):
    """All problems of a recipe, reported together."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(UsageError):
    """A data set does not match the recipe; the message names the column and the row."""


class LaunchError(UsageError):
    """The number of ranks that started differs from the number requested."""


class LostPeerError(TrainerError):
    """Another rank has ended, so this rank cannot continue; that rank reports the cause."""


class NonFiniteError(TrainerError):
    """The loss or the gradient norm is not finite; the message names the step, and no later state was saved."""

    exit_code = ExitCode.NON_FINITE
