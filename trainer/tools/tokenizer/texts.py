"""Texts of files, read one after the other: lines, rows of the formats of trainer, also from URLs."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.base.file_formats import file_formats, formats_by_ending
from trainer.base.text import listed, without_secrets
from trainer.data.formats.base import DAMAGED, Row, TextOptions, ending, open_text, reason, require_bounded
from trainer.data.formats.table import format_of, reader_of
from trainer.recipe.paths import is_url

HELD_OUT_EVERY = 100
MOST_HELD_OUT_ROWS, MOST_HELD_OUT_BYTES = 2000, 8 << 20
_LINES = (".txt", ".text")


def places_of(data: Sequence[str]) -> list[str]:
    """Return the files that paths, folders, patterns and URLs name, those of each in order.

    Raises:
        DataError: there is no file, or its ending is unknown.
        UsageError, TrainerError: a place cannot be reached.
    """
    return [place for name in data for place in (_of_url(name) if is_url(name) else _of_disk(name))]


def _of_disk(name: str) -> list[str]:
    path, known = Path(name), (*_LINES, *formats_by_ending())
    if path.is_dir():
        found = sorted(one for one in path.rglob("*") if one.is_file() and ending(one) in known)
    elif path.is_file():
        found = [path]
    else:
        found = sorted(Path(one) for one in glob.glob(name, recursive=True) if Path(one).is_file())
    if not found:
        kind = "a folder without files of texts" if path.is_dir() else "no file, folder or pattern of files"
        raise DataError(f"`DATA` must name files of texts, but {name} is {kind}; known endings are {', '.join(known)}")
    for one in found:
        if ending(one) not in known:
            raise DataError(f"`DATA` must have an ending such as {', '.join(known)}, but names {one}; rename it")
    return [str(one) for one in found]


def _of_url(name: str) -> list[str]:
    from fsspec.core import url_to_fs

    shown = without_secrets(name)
    try:
        files, path = url_to_fs(name)
        found = sorted(files.glob(path)) if glob.has_magic(path) else [path] if files.isfile(path) else []
        places = [str(files.unstrip_protocol(place)) for place in found]
    except (ImportError, ValueError) as error:
        raise UsageError(f"`DATA` names {shown}, which fsspec cannot open: {error}; install its package") from error
    except Exception as error:  # the classes differ between file systems
        raise TrainerError(f"`DATA` names {shown}, which cannot be read: {reason(error)}; try again") from error
    if not places:
        raise DataError(f"`DATA` must name files of texts, but there is none at {shown}; correct it")
    return places


@dataclass
class Texts:
    """The texts of some files. Every hundredth text is held out, for figures on texts that nothing was trained on.

    Attributes:
        column: the column of texts; None: `text`, or the only column of texts.
        num_rows, num_bytes: those of the texts to train on, after a whole pass.
        held_out: the texts that are held out.
        first: some of the texts to train on.
    """

    places: Sequence[str]
    column: str | None = None
    num_rows: int = 0
    num_bytes: int = 0
    held_out: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        self.num_rows = self.num_bytes = held_out_bytes = 0
        self.held_out, self.first = [], []
        for number, text in enumerate(self._all(), start=1):
            size = len(text.encode())
            has_room = len(self.held_out) < MOST_HELD_OUT_ROWS and held_out_bytes + size <= MOST_HELD_OUT_BYTES
            if number % HELD_OUT_EVERY == 0 and has_room:
                self.held_out.append(text)
                held_out_bytes += size
                continue
            self.num_rows += 1
            self.num_bytes += size
            if len(self.first) < HELD_OUT_EVERY:
                self.first.append(text)
            yield text

    def _all(self) -> Iterator[str]:
        if self.column is not None and all(ending(Path(place)) in _LINES for place in self.places):
            raise UsageError(f"`--text` is {self.column}, but lines of texts have no columns; leave it out")
        for place in self.places:
            with _on_disk(place) as path:
                where = f"`{without_secrets(place)}`"
                try:
                    yield from _lines(path) if ending(path) in _LINES else self._of_rows(path, where)
                except UnicodeError as error:
                    raise DataError(f"{where} must be text in UTF-8, but is not: {error}; convert it") from error
                except DAMAGED as error:
                    raise DataError(f"{where} cannot be read: {reason(error)}; copy it again") from error

    def _of_rows(self, path: Path, where: str) -> Iterator[str]:
        kind = str(format_of(path))
        if not file_formats()[kind].in_chunks:
            raise DataError(f"{where} is of the format {kind}, which is not read row by row; write JSON Lines")
        reader = reader_of(kind)
        require_bounded(reader, path, "`DATA`")
        for number, row in enumerate(reader.rows(path, where, TextOptions()), start=1):
            if isinstance(row, DataError):
                raise row
            value = row.get(self._column_of(row, where))
            if value is not None and not isinstance(value, str):
                raise DataError(
                    f"column `{self.column}`, row {number} of {where} must be a text, but is"
                    f" {type(value).__name__}; name another column by --text"
                )
            if value and value.strip():
                yield value

    def _column_of(self, row: Row, where: str) -> str:
        if self.column is None:
            texts = [name for name, value in row.items() if isinstance(value, str)]
            # The first text may be null.
            texts += ["text"] if row.get("text", "") is None else []
            if "text" not in texts and len(texts) != 1:
                raise DataError(
                    f"`--text` must name the column of texts, because {where} has"
                    f" {listed([f'`{name}`' for name in row], 9)}; name one"
                )
            self.column = "text" if "text" in texts else texts[0]
        if self.column not in row:
            names = listed([f"`{name}`" for name in row], 9)
            raise DataError(f"`--text` names the column `{self.column}`, but {where} has {names}; correct it")
        return self.column


def _lines(path: Path) -> Iterator[str]:
    with open_text(path, "utf-8") as file:
        for line in file:
            if text := line.strip():
                yield text


@contextmanager
def _on_disk(place: str) -> Iterator[Path]:
    """Yield a file of this machine with the content of a place; a copy of a URL is removed again."""
    if not is_url(place):
        yield Path(place)
        return
    from fsspec.core import url_to_fs

    files, path = url_to_fs(place)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        copy = Path(folder) / Path(path).name
        try:
            files.get_file(path, str(copy))
        except Exception as error:  # the classes differ between file systems
            raise TrainerError(f"{without_secrets(place)} cannot be read: {reason(error)}; try again") from error
        yield copy


def shares(texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Return figures of a tokenizer on texts, without special tokens.

    `fertility`: tokens of a word between blanks. `bytes_per_token`: UTF-8 bytes of a token. `unknown_share`: the share
    of the tokens that are unknown.
    """
    backend, unknown = tokenizer.backend_tokenizer, tokenizer.unk_token_id
    ids = [one.ids for one in backend.encode_batch(list(texts), add_special_tokens=False)]
    num_tokens, num_words = sum(map(len, ids)), sum(len(text.split()) for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_unknown = sum(one.count(unknown) for one in ids)
    return {
        "rows": len(texts),
        "words": num_words,
        "bytes": num_bytes,
        "tokens": num_tokens,
        "fertility": round(num_tokens / max(1, num_words), 4),
        "bytes_per_token": round(num_bytes / max(1, num_tokens), 4),
        "unknown_share": round(num_unknown / max(1, num_tokens), 6),
    }
