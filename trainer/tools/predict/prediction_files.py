"""The files of `trainer predict`, which rank 0 alone reads and writes: rows in chunks, and an output in parts."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.base.digests import digest_of, file_digest, source_digest
from trainer.base.disk import UNFINISHED, move_over, no_file, remove, replace_text
from trainer.base.distribution import versions
from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.base.owned_lock import UNSUPPORTED, OwnedLock
from trainer.base.terminal import say, say_json
from trainer.data.formats.base import Row, is_chat, json_chats
from trainer.data.formats.table import reader_of
from trainer.data.row_transform import SourceTransform, transform_of
from trainer.data.sources import text_options
from trainer.recipe.schema import Data, FileData, Recipe
from trainer.tools.predict.chunked_rows import input_format, json_line, output_format, read_chunks

if TYPE_CHECKING:
    from datasets import Dataset

STANDARD = "-"
"""The name of the standard input and output."""

_LOCK_SECONDS = 20.0  # ranks of a killed command leave within this time
_SMALL_BYTES = 1 << 20


@contextmanager
def spooled(name: str) -> Iterator[Path]:
    """Yield the input file; the standard input is copied into a file, since ranks have none and a restart needs it.

    Raises:
        UsageError: there is no such file.
    """
    if name != STANDARD:
        path = Path(name)
        if not path.is_file():
            fix = "name another, or pass JSON Lines to `--input -`"
            if path.is_dir():
                fix = "for its images, name a CSV file in it with a column of their names"
            raise UsageError(f"`--input` must name a file, but {path} {no_file(path)}; {fix}")
        yield path.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        path = Path(folder) / "stdin.jsonl"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


@dataclass(frozen=True)
class Request:
    """The files and the options of a prediction."""

    input: Path  # the file of rows
    shown_input: str  # its name in messages
    output: str  # the file to write, or `STANDARD`
    chunk_rows: int  # the number of rows that are read and written at once
    keep: Literal["all", "none"] = "all"  # which columns of the input the output has: all but binary ones, or none
    top: int | None = None  # the number of classes with a probability; None: all
    overwrite: bool = False  # whether to replace an existing output
    skip_bad_rows: bool = False  # whether a bad row becomes a row with its `error`; otherwise it ends the command
    columns: tuple[str, ...] = ()  # the columns of texts to embed; empty: the first one of the recipe
    escape_formulas: bool = False  # whether texts that a spreadsheet takes for formulas get an apostrophe

    @property
    def where(self) -> str:
        """The input in messages."""
        return f"`{self.shown_input}`"

    @property
    def output_format(self) -> str:
        """The format of the output, by its ending."""
        return "json" if self.output == STANDARD else output_format(Path(self.output))

    def require_output(self) -> None:
        """Refuse an output in an unknown format, one that exists, and one that cannot be a file."""
        path = Path(self.output).absolute()
        if self.escape_formulas and self.output_format != "csv":
            raise UsageError(f"`--escape-formulas` applies to CSV and TSV, but `--output` is {self.output}; remove it")
        if self.output == STANDARD:
            return
        if not path.parent.is_dir():
            raise UsageError(f"`--output` must lie in a folder that exists, but {path.parent} does not; create it")
        if path.is_dir():
            raise UsageError(f"`--output` must name a file, but {path} is a folder; name a file in it")
        if path.exists() and not self.overwrite:
            raise UsageError(f"`--output` must name a new file, but {path} exists; name another, or add --overwrite")


@contextmanager
def naming_resumption(request: Request, num_done: int) -> Iterator[None]:
    """Add to the error of a row how to resume after the rows that are written."""
    try:
        yield
    except DataError as error:
        if not num_done or request.output == STANDARD:
            raise
        raise DataError(
            f"{error}; {num_done:,} rows are done, and the same command with --skip-bad-rows resumes after them"
        ) from error


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of the input; `first_row` is the index of the first, `errors` are those of bad rows."""

    first_row: int
    rows: list[Row]
    errors: dict[int, DataError]

    @property
    def sound(self) -> list[int]:
        """The places in the chunk of rows that are not bad."""
        return [place for place in range(len(self.rows)) if place not in self.errors]


@dataclass
class InputRows:
    """The rows of the input, in chunks."""

    _request: Request
    _data: Data
    _columns: tuple[str, ...]  # which the task reads
    _check: Callable[[Dataset, int], None]  # raises the error of rows that cannot be encoded; takes the first's index
    _transform: SourceTransform | None = None  # that of the first chunk

    @property
    def _format(self) -> str:
        stored = self._data.format if isinstance(self._data, FileData) else None
        return input_format(self._request.input, stored)

    def num_empty(self) -> int:
        """Return the number of empty lines of the input, which are no rows."""
        reader = reader_of(self._format)
        return reader.num_empty(self._request.input, text_options(self._data))

    def chunks(self, num_done: int) -> Iterator[Chunk]:
        """Yield the chunks after the rows that are done.

        Raises:
            UsageError: the ending of the file is unknown.
            DataError: the rows cannot be read, or lack a column.
        """
        request, first = self._request, num_done
        text, skips = text_options(self._data), request.skip_bad_rows
        for part in read_chunks(request.input, self._format, request.chunk_rows, num_done, request.where, skips, text):
            errors = {place: row for place, row in enumerate(part) if isinstance(row, DataError)}
            chunk = Chunk(first, [{} if isinstance(row, DataError) else row for row in part], errors)
            sound = [chunk.rows[place] for place in chunk.sound]
            if sound and self._transform is None:
                self._transform = transform_of(self._data).of_input(sound, self._columns, request.where)
            # If bad rows are skipped, only the first chunk shows the columns: a later row that lacks one is bad itself.
            if not (skips and (first or not sound)):
                self._require_columns(chunk.rows)
            if skips:
                errors.update(self._find_bad(chunk, 0, len(part)))
            yield chunk
            first += len(part)
        if not first:
            raise DataError(f"`--input` must hold at least one row, but {request.where} is empty")

    def _require_columns(self, rows: Sequence[Row]) -> None:
        transformed = () if self._transform is None else self._transform.columns
        present = dict.fromkeys([*(name for row in rows for name in row), *transformed])
        for name in self._columns:
            if name not in present:
                raise DataError(
                    f"the task reads the column `{name}`, but {self._request.where} has none of that name; its columns"
                    f" are {', '.join(f'`{column}`' for column in present) or 'none'}"
                )

    def _find_bad(self, chunk: Chunk, start: int, end: int) -> dict[int, DataError]:
        """Return the error of each further bad row of a part of a chunk; halves of a part with a bad row are parts."""
        if start == end or (end - start == 1 and start in chunk.errors):
            return {}
        first = chunk.first_row + start
        try:
            if chunk.errors.keys().isdisjoint(range(start, end)):
                self._check(self.table(chunk.rows[start:end], first), first)
                return {}
        except DataError as error:
            # Halving finds few bad rows of a chunk with few encodings.
            if end - start == 1:
                named = f"row {first + 1} of {self._request.where}"
                return {start: error if named in str(error) else DataError(f"{named} is bad: {error}")}
        half = (start + end) // 2
        return self._find_bad(chunk, start, half) | self._find_bad(chunk, half, end)

    def table(self, rows: Sequence[Row], first_row: int) -> Dataset:
        """Return the columns of rows that the task reads.

        Raises:
            DataError: a column holds values of several types.
        """
        import datasets
        import pyarrow

        if self._transform is not None:
            rows = self._transform.of_rows(rows, first_row, self._request.where)
        try:
            # Only the columns of the task; the others are written back and never converted.
            columns = {name: [row.get(name) for row in rows] for name in self._columns}
            parts = [
                # The writer of `datasets` takes exponential time for nested lists.
                datasets.Dataset.from_dict({name: values}, datasets.Features({name: json_chats()}))
                if is_chat(next(filter(None, values), None))
                else datasets.Dataset(pyarrow.table({name: values}))
                for name, values in columns.items()
            ]
            return datasets.concatenate_datasets(parts, axis=1)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(
                f"each column of {self._request.where} must hold values of one type, but rows {first_row + 1} to"
                f" {first_row + len(rows)} do not: {error}"
            ) from error


class Output:
    """The output, which is assembled from a part file for each chunk.

    The names of parts hold a digest of the input, the model and the options; a later call with the same ones continues
    after the last part.
    """

    def __init__(self, request: Request, recipe: Recipe) -> None:
        self.num_done = 0
        self.num_bad = 0
        self._request = request
        self._recipe = recipe
        self._path = None if request.output == STANDARD else Path(request.output).absolute()
        self._parts: list[Path] = []
        self._prefix = ""  # of the names of parts
        self._lock: OwnedLock | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def open(self) -> None:
        """Find the finished parts.

        Raises:
            UsageError: the output exists, or another command writes it.
        """
        self._request.require_output()
        if self._path is None:
            return
        if self._folder.is_symlink():
            raise UsageError(
                f"`--output` must have its parts in a folder of its own, but {self._folder} is a link; remove the link"
            )
        with self._must_be_writable():
            self._lock = hold(self._folder, self._path, _LOCK_SECONDS)
            self._prefix = f"part-{digest_of(self._facts())[:16]}-"
            # Parts of another input, model or option must not enter this output.
            others = [path for path in self._folder.glob("part-*") if not path.name.startswith(self._prefix)]
            for path in others:
                path.unlink()
            # Each part is written whole or not at all, in order, so the first missing one ends the work of before.
            while self._next_part().exists():
                self._parts.append(self._next_part())
        self.num_done = len(self._parts) * self._request.chunk_rows
        if self._parts:
            # The last part of the input may be shorter.
            with self._parts[-1].open("rb") as last:
                self.num_done += sum(1 for _ in last) - self._request.chunk_rows
        if others:
            say(
                f"starts from the first row: {self._folder} belongs to another input, model, version or option",
                err=True,
            )
        self.num_bad = sum(map(_num_bad, self._parts))
        if self.num_done:
            say(f"resumes after {self.num_done:,} rows of {self._folder}", err=True)

    def _facts(self) -> dict[str, Any]:
        request, data, recipe = self._request, self._recipe.data, self._recipe.model_dump(mode="json")
        return {
            "input": file_digest(request.input),
            "model": _folder_digest(Path(self._recipe.model.name_or_path or ""), self._folder),
            # Other versions may compute other numbers, and one output holds those of one program.
            "versions": versions() | {"source": source_digest()},
            "options": [request.keep, request.top, request.chunk_rows, request.columns],
            "task": recipe["task"],
            "data": [recipe["data"].get("max_length"), transform_of(data).facts, asdict(text_options(data))],
            "precision": recipe["precision"],
            # Sampled texts depend on the seed.
            "seed": recipe["training"]["seed"],
        }

    def write(self, chunk: Chunk, predictions: Sequence[dict[str, Any]]) -> None:
        """Write the predictions for the sound rows of a chunk, and the errors of bad ones.

        Raises:
            DataError: a column of the input has the name of a prediction.
            TrainerError: the file cannot be written.
        """
        answers = dict(zip(chunk.sound, predictions, strict=True))
        answers |= {place: {"error": str(error)} for place, error in chunk.errors.items()}
        text = "".join(json_line(self._merged(row, answers[place])) for place, row in enumerate(chunk.rows))
        with self._must_be_writable():
            if self._path is None:
                say_json(text, end="")
            else:
                replace_text(self._next_part(), text)
                self._parts.append(self._next_part())
        self.num_bad += len(chunk.errors)
        self.num_done += len(chunk.rows)

    def _merged(self, row: Row, answer: dict[str, Any]) -> Row:
        if self._request.top is not None and isinstance(answer.get("probabilities"), dict):
            # A stable sort: equal probabilities keep the order of the classes.
            ranked = sorted(answer["probabilities"].items(), key=lambda item: -item[1])
            answer = {**answer, "probabilities": dict(ranked[: self._request.top])}
        if self._request.keep == "none":
            return answer
        for name in answer:
            if name in row:
                raise DataError(
                    f"column `{name}` of {self._request.where} has the name of a prediction; rename it, or leave the"
                    " columns of the input out with --keep none"
                )
        return {name: value for name, value in row.items() if not _is_binary(value)} | answer

    def finish(self) -> None:
        """Assemble the output from its parts.

        Raises:
            DataError: the rows do not fit the format.
            TrainerError: the file cannot be written.
        """
        if self._path is None:
            return
        new = self._path.with_name(f"{UNFINISHED}{self._path.name}")
        with self._must_be_writable():
            remove(new)  # of a command that was killed here, or a link
            request = self._request
            source = request.input if request.keep == "all" else None
            reader_of(request.output_format).write(self._parts, new, source, request.escape_formulas)
            # A rename: readers see the old output or the whole new one.
            move_over(new, self._path)
            # After the rename: a kill between the two leaves parts behind, but loses no row.
            shutil.rmtree(self._folder, ignore_errors=True)
        say(f"wrote {self.num_done:,} rows to {self._path}", err=True)

    @property
    def _folder(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.parts")

    def _next_part(self) -> Path:
        return self._folder / f"{self._prefix}{len(self._parts):06}.jsonl"

    @contextmanager
    def _must_be_writable(self) -> Iterator[None]:
        try:
            yield
        # The reader of the standard output has ended, as `head` does; the disk is not at fault.
        except BrokenPipeError:
            raise
        except OSError as error:
            raise TrainerError(
                f"the predictions cannot be written to {self._request.output}: {error}; make room there"
            ) from error


def hold(folder: Path, output: Path, wait_seconds: float = 0.0) -> OwnedLock:
    """Make the folder of a command that writes `output`, and return its lock; a file system may have no locks.

    Raises:
        UsageError: another command has the folder.
        OSError: the folder cannot be written.
    """
    folder.mkdir(exist_ok=True)
    lock = OwnedLock(folder / "lock")
    try:
        is_free = lock.take(wait_seconds)
    except FileNotFoundError:  # another command has written the output, and removed the folder
        is_free = False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        is_free = True
    if not is_free:
        raise UsageError(f"another command is writing {output}; wait for it, or name another --output")
    return lock


def _num_bad(part: Path) -> int:
    """Return the number of rows of a part that have an `error` in place of predictions."""
    with part.open("rb") as lines:
        # The answer comes last in a row; before it, a column of the input may have the same name.
        return sum(b'"error"' in line and [*json.loads(line)][-1] == "error" for line in lines)


def _is_binary(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))


def _folder_digest(folder: Path, left_out: Path) -> str:
    """Return a digest of names and sizes, and of the content of small files or the time of large ones.

    Chat templates and modules of sentence-transformers lie in folders of the folder.
    """
    facts = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.absolute().is_relative_to(left_out.absolute()):
            state = path.stat()
            small = state.st_size <= _SMALL_BYTES
            name = path.relative_to(folder).as_posix()
            # Large files, such as weights, are known by their time: to read them would take long.
            facts.append([name, state.st_size, file_digest(path) if small else state.st_mtime_ns])
    return digest_of(facts)
