"""Shards of a stream: Parquet, Arrow or JSON Lines files at any place that fsspec opens, and reading with retries."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Literal, TypeVar, cast, get_args

from trainer.base.errors import DataError, TrainerError, UsageError, causes, may_pass
from trainer.base.file_formats import formats_by_ending
from trainer.base.terminal import say
from trainer.base.text import without_secrets
from trainer.data.formats.base import reason
from trainer.recipe.paths import is_url

RETRIES, FIRST_WAIT = 5, 1.0
"""A failed read is tried again so many times, after so many seconds, each time after twice as many: 31 s in all."""

SILENT_SECONDS = 60.0
"""The longest time without a byte from a server of HTTP; an answer of any length may take longer."""
_KEY = "data.train"
_PATIENCE = 10.0  # seconds
_BLOCK_BYTES = 4 << 20
_DAMAGED = (ValueError, FileNotFoundError, PermissionError, IsADirectoryError)
"""Errors that another try does not fix; those of pyarrow are `ValueError`s."""
_GONE, _NO_ACCESS = (404, 410), (401, 403, 407)
_TRY_AGAIN = (408, 429)  # answers of HTTP: a time limit, and too many requests
_STAMPS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "Last-Modified")

Item = TypeVar("Item")
ShardFormat = Literal["json", "parquet", "arrow"]


@dataclass(frozen=True)
class Shard:
    """A file of rows.

    Attributes:
        place: its path or its URL.
        stamp: changes with its content, on file systems that record changes.
    """

    place: str
    size: int
    stamp: str
    file_format: ShardFormat

    def __str__(self) -> str:
        return without_secrets(self.place)

    def open(self) -> Any:
        """Open the bytes of the shard, from any place."""
        files, path = _opened(self.place)  # again in each process: connections do not survive a fork
        return files.open(path, "rb", block_size=_BLOCK_BYTES)

    def resumed(
        self, start: int, begin: Callable[[int], Iterator[Item]], size: Callable[[Item], int]
    ) -> Iterator[Item]:
        """Yield the items of `begin(start)`; after an error, those of `begin` at the end of the last item.

        Raises:
            DataError: the shard is damaged or missing.
            TrainerError: it cannot be read after `RETRIES` further tries.
        """
        failures = 0
        while True:
            try:
                for item in begin(start):
                    start, failures = start + size(item), 0  # an item that has come allows all tries again
                    yield item
                return
            except TrainerError:
                raise
            except Exception as error:  # the classes differ between file systems
                if _lasts(error):
                    if (status := _status(error)) in _NO_ACCESS:
                        raise _refused(str(self), status) from error
                    raise DataError(
                        f"`{_KEY}` must hold {self.file_format} that can be read, but `{self}` cannot: {reason(error)}"
                    ) from error
                problem = f"`{self}` of `{_KEY}` cannot be read: {reason(error)}"
                if failures == RETRIES:
                    raise TrainerError(
                        f"{problem}; gave up after {RETRIES} retries in {FIRST_WAIT * (2**RETRIES - 1):.0f} s; restore"
                        " the access and start again, which resumes from the last checkpoint"
                    ) from error
                wait = FIRST_WAIT * 2**failures
                failures += 1
                say(f"{problem}; retry {failures} of {RETRIES} in {wait:.0f} s", err=True)
                time.sleep(wait)

    def blocks(self, start: int) -> Iterator[bytes]:
        """Yield the bytes from an offset on, in parts; see `resumed`."""

        def begin(offset: int) -> Iterator[bytes]:
            with self.open() as file:
                file.seek(offset)
                while block := file.read(_BLOCK_BYTES):
                    yield block

        return self.resumed(start, begin, len)


def _opened(place: str) -> tuple[Any, str]:
    """Return the file system of a place and its path there; a server of HTTP may be silent for a limited time."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    protocol = place.partition("://")[0]
    if protocol not in ("http", "https"):
        return url_to_fs(place)  # type: ignore[no-any-return]
    from aiohttp import ClientTimeout

    limit = ClientTimeout(total=None, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    # Limits of silence and not of the whole answer: large shards take long.
    # fsspec lets this argument replace the one of its configuration as a whole.
    options = {"timeout": limit, **conf.get(protocol, {}).get("client_kwargs", {})}
    return url_to_fs(place, client_kwargs=options)  # type: ignore[no-any-return]


def _lasts(error: Exception) -> bool:
    """Return whether another try does not help; fsspec reports each failure of HTTP as a missing file."""
    if (status := _status(error)) is not None:
        return 400 <= status < 500 and status not in _TRY_AGAIN
    is_of_parquet = type(error) is OSError and error.errno is None  # a page that is damaged or of another length
    return is_of_parquet or (isinstance(error, _DAMAGED) and not may_pass(error))


def _status(error: Exception) -> int | None:
    """Return the status with which a server of HTTP answered; None: there is none."""
    statuses = (getattr(cause, "status", None) for cause in (error, *causes(error)))
    return next((status for status in statuses if isinstance(status, int)), None)


def _refused(shown: str, status: int) -> DataError:
    return DataError(
        f"`{_KEY}` must name places that this machine may read, but the server of `{shown}` answers with the status"
        f" {status}; correct the address, or give its access in fsspec's configuration"
    )


@contextmanager
def naming_waits(what: str) -> Iterator[None]:
    """Say every ten seconds that the block still reads `what`; the block starts no process."""
    done = Event()

    def speak() -> None:
        waits = 0
        while not done.wait(_PATIENCE):
            waits += 1
            say(f"reading {what} for {waits * _PATIENCE:.0f} s", err=True)

    speaker = Thread(target=speak, name="waits", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def find_shards(names: Sequence[str], file_format: str | None = None) -> list[Shard]:
    """Return the shards that paths, URLs and patterns name, those of each pattern in order.

    Args:
        file_format: the format of all of them; None: their endings tell it.

    Raises:
        DataError: there is no such file, or its format cannot be streamed.
        UsageError: a package for the protocol is missing.
        TrainerError: the place does not answer.
    """
    return [shard for name in names for shard in _found(name, file_format)]


def _listed(name: str, shown: str) -> tuple[Any, str, dict[str, Any]]:
    """Return the file system of a name, the path there, and facts of each file that the name stands for."""
    try:
        files, path = _opened(name)
        found = files.glob(path, detail=True) if glob.has_magic(path) else {path: files.info(path)}
        # File systems list in any order, and the order of the shards decides the place of each row.
        shards = {place: info for place, info in sorted(found.items()) if info["type"] == "file"}
        # The list of a folder by HTTP has no sizes.
        shards = {place: files.info(place) if info.get("size") is None else info for place, info in shards.items()}
        return files, path, shards
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"`{_KEY}` must name places that fsspec can open, but names {shown}: {reason(error)}; install its package,"
            " such as s3fs for s3:// and gcsfs for gs://"
        ) from error
    except Exception as error:  # the classes differ between file systems
        if isinstance(error, FileNotFoundError) and _lasts(error):
            if (status := _status(error)) is not None and status not in _GONE:
                raise _refused(shown, status) from error
            raise DataError(f"`{_KEY}` must name shards, but there is none at `{shown}`; correct it") from error
        raise TrainerError(f"`{_KEY}` names {shown}, which cannot be read: {reason(error)}") from error


def _found(name: str, file_format: str | None) -> Iterator[Shard]:
    shown = without_secrets(name)
    files, path, shards = _listed(name, shown)
    if not shards:
        raise DataError(f"`{_KEY}` must name shards, but no file matches `{shown}`; correct the pattern")
    for place, info in shards.items():
        if info.get("size") is None or info.get("partial") is False:
            raise DataError(
                f"`{_KEY}` must name shards that can be read from any byte, but the server of `{shown}` does not allow"
                " it; use a server that states sizes and answers range requests"
            )
        stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
        full = str(files.unstrip_protocol(place)) if is_url(name) else place
        if is_url(name) and name.endswith(path):  # the host may be in the URL only
            full = name.removesuffix(path) + place
        yield Shard(full, int(info["size"]), stamp, _format(place, file_format))


def _format(place: str, given: str | None) -> ShardFormat:
    name = place.lower()
    found = given or next((kind for end, kind in formats_by_ending().items() if name.endswith(end)), None)
    if found in get_args(ShardFormat):
        return cast(ShardFormat, found)
    raise DataError(
        f"`{_KEY}` must name Parquet, Arrow or JSON Lines (.parquet, .arrow, .jsonl) with `data.streaming`, but names"
        f" `{without_secrets(place)}`; convert it: other files, and those that are compressed as a whole, cannot be"
        " read from the middle"
    )
