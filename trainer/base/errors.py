"""Errors that users can fix, and the exit code of each.

A message names the recipe path, its value, the rule and the fix: "`training.global_batch_size` must be divisible by
the data-parallel size 3, but is 32; use 30 or 33". A `TrainerError` is shown without a traceback. Any other exception
that reaches the user is a bug of the trainer and shows one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Self


class ExitCode(IntEnum):
    """Exit code of the process; part of the public interface."""

    DONE = 0
    FAILED = 1
    USER = 2
    NON_FINITE = 3
    STOPPED = 75  # EX_TEMPFAIL of sysexits.h, "try again later": a scheduler should start the job again


INTERRUPTED = 130
"""128 + SIGINT, as shells report it: Ctrl-C came before there was anything to save."""


class TrainerError(Exception):
    """An error that the user can fix; `str(error)` is the whole message, with the fix."""

    _exit_code = ExitCode.FAILED
    has_lines = False
    """Whether line breaks of the message are meant; others come from values, and are shown escaped."""

    @classmethod
    def of_lines(cls, message: str) -> Self:
        """Return an error with lines; see `has_lines`."""
        error = cls(message)
        error.has_lines = True
        return error

    @property
    def lines(self) -> list[str]:
        """The lines of the message."""
        return str(self).split("\n") if self.has_lines else [str(self)]

    @property
    def exit_code(self) -> ExitCode:
        """The exit code; `FAILED` instead of `USER` if a fault of machine or network caused the error."""
        if self._exit_code == ExitCode.USER and may_pass(self):
            return ExitCode.FAILED
        return self._exit_code

    @exit_code.setter
    def exit_code(self, code: ExitCode) -> None:
        self._exit_code = code


class UsageError(TrainerError):
    """The recipe, an argument or the environment does not allow this run; found before training starts."""

    _exit_code = ExitCode.USER


class OutOfMemoryError(TrainerError):
    """The memory of a device is full."""

    def __init__(self, message: str, plan_command: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.plan_command = plan_command


# Properties of a path: a new start fails in the same way until the user changes the path.
_OF_THE_PATH = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


# Faults that may pass, so that a batch system may start the run again.
_OF_THE_MACHINE = {
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOLCK,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_OF_THE_NETWORK = {"ConnectionError", "ClientConnectionError", "Timeout", "TimeoutError", "TransportError"}
"""Names of classes of errors in the standard library, requests, urllib3, httpx and aiohttp; none is imported here."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors that led to an error, the nearest first."""
    while error is not None:
        # Without an explicit cause, the error during which this one was raised.
        error = error.__cause__ or error.__context__
        if error is not None:
            yield error


def may_pass(error: BaseException) -> bool:
    """Return whether a fault that may pass is among the causes: a full disk, a lost server, no network."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _OF_THE_MACHINE)
        or any(kind.__name__ in _OF_THE_NETWORK for kind in type(cause).__mro__)
        for cause in causes(error)
    )


def storage_error(message: str, cause: OSError) -> TrainerError:
    """Return a `UsageError` if `cause` is a property of the path, else a `TrainerError`.

    A full disk, a quota or a lost server may pass, so a batch system may start the run again.
    """
    return (UsageError if cause.errno in _OF_THE_PATH else TrainerError)(message)


class RecipeError(UsageError):
    """All problems of a recipe, reported together."""

    @property
    def lines(self) -> list[str]:
        return list(self.problems)

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        # By default, a pickle would make one problem of the joined text.
        return type(self), self.problems


class DataError(UsageError):
    """A data set does not match the recipe; the message names the column and the row."""


class DataProblemsError(RecipeError, DataError):
    """Several problems of a data set."""


class Problems:
    """A collection of errors that are reported together."""

    def __init__(self) -> None:
        self._errors: list[TrainerError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a `TrainerError` of the block."""
        try:
            yield
        except TrainerError as error:
            self._errors.append(error)

    @property
    def messages(self) -> list[str]:
        """All messages, each once."""
        parts = (error.problems if isinstance(error, RecipeError) else [str(error)] for error in self._errors)
        return list(dict.fromkeys(message for messages in parts for message in messages))

    @property
    def error(self) -> TrainerError | None:
        """The only error, or one with all messages and the exit code `FAILED` if all may pass; None: there is none."""
        # Each message once, because several checks may find the same problem.
        errors = list({str(error): error for error in self._errors}.values())
        if len(errors) < 2:
            return errors[0] if errors else None
        kind = DataProblemsError if all(isinstance(error, DataError) for error in errors) else RecipeError
        joined = kind(*self.messages)
        if all(error.exit_code == ExitCode.FAILED for error in errors):
            joined.exit_code = ExitCode.FAILED
        return joined

    def raise_all(self) -> None:
        """Raise the errors, if there are any.

        Raises:
            TrainerError: the only error.
            RecipeError: several errors; with the exit code `FAILED`, if all of them may pass.
        """
        if (error := self.error) is not None:
            raise error


class LaunchError(UsageError):
    """The number of ranks that started differs from the number requested."""


class LostPeerError(TrainerError):
    """Another rank has ended, so this rank cannot continue; that rank reports the cause."""


class StoppedError(TrainerError):
    """A signal came while the run waited before its first step; nothing is lost."""

    _exit_code = ExitCode.STOPPED


class NonFiniteError(TrainerError):
    """The loss or the gradient norm is not finite; the message names the step, and no later state was saved."""

    _exit_code = ExitCode.NON_FINITE


_KINDS = {kind.__name__: kind for kind in (
    TrainerError, UsageError, OutOfMemoryError, RecipeError, DataError, DataProblemsError, LaunchError, LostPeerError,
    StoppedError, NonFiniteError,
)}  # fmt: skip


def error_to_values(error: TrainerError) -> list[Any]:
    """Convert an error to JSON values for another process; a class of another module becomes its nearest base here."""
    kind = next(kind for kind in type(error).__mro__ if kind in _KINDS.values())
    arguments: list[Any] = list(error.problems) if isinstance(error, RecipeError) else [str(error)]
    if isinstance(error, OutOfMemoryError):
        arguments.append(list(error.plan_command))
    return [kind.__name__, int(error.exit_code), arguments, error.has_lines]


def error_of_values(values: list[Any]) -> TrainerError:
    """Return the error of `error_to_values`."""
    name, code, arguments, has_lines = values
    error = _KINDS[name](*arguments)
    error.has_lines = has_lines
    error.exit_code = ExitCode(code)
    return error
