from __future__ import annotations

import errno
import os

import pytest
import requests
from huggingface_hub.constants import HF_HUB_CACHE

from trainer.base.errors import (
    DataError,
    ExitCode,
    NonFiniteError,
    Problems,
    TrainerError,
    error_of_values,
    error_to_values,
    storage_error,
)
from trainer.checkpoint.owner import FolderOwner
from trainer.data import cache
from trainer.data.readers import refuse_datasets_cache
from trainer.models.hub_files import not_found


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EIO, 1), (errno.ESTALE, 1), (errno.EACCES, 2), (errno.ENOTDIR, 2)],
)
def test_machine_faults_are_transient_and_path_faults_are_not(number, code):
    assert storage_error("text", OSError(number, "text")).exit_code == code


class TransportError(Exception):
    """The error of httpx that is a parent of those of its connections; the hub's client bundles its own httpx."""


class ConnectError(TransportError):
    pass


def raised(cause: Exception, kind: type[TrainerError] = DataError) -> TrainerError:
    """An error as a library of files wraps it, and as `trainer` reports it."""
    try:
        try:
            raise OSError("a message without a number") from cause
        except OSError as error:
            raise kind("the file cannot be read") from error
    except TrainerError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        *((OSError(number, "text"), 1) for number in (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EMFILE)),
        (ConnectError("refused"), 1),
        (requests.exceptions.ConnectionError("refused"), 1),
        (ConnectionResetError("reset"), 1),
        (TimeoutError("late"), 1),
        *((OSError(number, "text"), 2) for number in (errno.EACCES, errno.ENOENT, errno.EROFS, errno.EADDRINUSE)),
        (requests.exceptions.HTTPError("404"), 2),
        (ValueError("not JSON"), 2),
    ],
    ids=repr,
)
def test_only_errors_of_the_user_exit_with_2(cause, code):
    error = raised(cause)
    assert error.exit_code == code
    assert error_of_values(error_to_values(error)).exit_code == code, "on the other ranks"
    assert raised(cause, NonFiniteError).exit_code == ExitCode.NON_FINITE


FULL, LOST, WRONG = OSError(errno.ENOSPC, "full"), ConnectionResetError("reset"), ValueError("not JSON")


@pytest.mark.parametrize(
    ("causes", "code"), [([FULL], 1), ([FULL, LOST], 1), ([FULL, WRONG], 2), ([WRONG, WRONG], 2)], ids=repr
)
@pytest.mark.parametrize("times", [1, 2])
def test_collected_faults_may_pass_if_all_of_them_may(causes, code, times):
    problems = Problems()
    for number, cause in enumerate(causes * times):
        with problems.collect():
            error = raised(cause)
            error.args = (f"file {number % len(causes)}",)  # a fault may be collected twice
            raise error
    with pytest.raises(DataError) as caught:
        problems.raise_all()
    assert caught.value.exit_code == code
    assert error_of_values(error_to_values(caught.value)).exit_code == code
    assert str(caught.value) == "\n".join(f"file {number}" for number in range(len(causes)))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS])
def test_the_cache_of_the_hub_is_blamed_for_its_faults(number):
    fault = OSError(number, os.strerror(number), f"{HF_HUB_CACHE}/models--bert/refs")
    wrapped = raised(fault).__cause__
    assert isinstance(wrapped, OSError)
    error = not_found("model.name_or_path", "bert", wrapped)
    assert "the hub's cache must be a folder that can be used, but" in str(error)
    assert "set HF_HOME to another folder" in str(error)
    assert error.exit_code == (1 if number == errno.ENOSPC else 2)
    assert "`model.name_or_path` is 'bert'" in str(not_found("model.name_or_path", "bert", FileNotFoundError()))


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_no_error_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(Exception, match="No space left") as raised:
        FolderOwner(tmp_path).take()
    assert raised.value.exit_code == ExitCode.FAILED
    with pytest.raises(Exception, match="No space left") as raised:
        cache.open_or_write(tmp_path, "key", full)
    assert raised.value.exit_code == ExitCode.FAILED
    with pytest.raises(Exception, match="No space left") as raised:
        refuse_datasets_cache(OSError(errno.ENOSPC, "No space left on device"))
    assert raised.value.exit_code == ExitCode.FAILED
