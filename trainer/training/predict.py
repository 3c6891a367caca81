"""The work of `trainer predict`: one output row for each input row, in chunks that survive a kill."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from filelock import FileLock, Timeout
from rich.progress import Progress
from torch import Tensor

from trainer.base.digests import digest_of, file_digest, source_digest
from trainer.base.disk import UNFINISHED, no_file, read_plain, remove, replace_text, sync
from trainer.base.distribution import versions
from trainer.base.errors import DataError, ExitCode, TrainerError, UsageError
from trainer.data.chunked_rows import (
    INPUT_FORMATS,
    OUTPUT_FORMATS,
    Row,
    json_line,
    read_chunks,
    row_format,
    write_rows,
)
from trainer.data.loader import EvalLoader
from trainer.data.readers import json_chats
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.data.tokenised_split import MOST_UNKNOWN
from trainer.engine.builders import refuse_generation_in_parts
from trainer.parallel.copying import one_behind
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.tasks.embedding import EmbeddingTask
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.tasks.types import EvaluatedSplit
from trainer.training.assembly import Assembly, assemble
from trainer.training.evaluate import progress_bar, with_class_names
from trainer.training.evaluation import RowTensors, in_row_order
from trainer.training.process_group import joined_ranks, open_mesh
from trainer.training.row_encoding import Preparation, load_preparation, require_fitting_rotations
from trainer.training.run_data import PreparedData

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.recipe.reading.loading import ResolvedRecipe

STANDARD = "-"
"""The name of the standard input and output."""

_MANIFEST, _LOCK = "manifest.json", "lock"
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
            raise UsageError(
                f"`--input` must name a file, but {path} {no_file(path)}; name another, or pass JSON Lines to"
                " `--input -`"
            )
        yield path.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        path = Path(folder) / "stdin.jsonl"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


@dataclass(frozen=True)
class Request:
    """The files and the options of a prediction.

    Attributes:
        input: the file of rows.
        shown_input: its name in messages.
        output: the file to write, or `STANDARD`.
        chunk_rows: the number of rows that are read and written at once.
        keep: which columns of the input the output has: all but binary ones, or none.
        top: the number of classes with a probability; None: all.
        overwrite: whether to replace an existing output.
        skip_bad_rows: whether a bad row becomes a row with its `error`; otherwise it ends the command.
        columns: the columns of texts to embed; empty: the first one of the recipe.
    """

    input: Path
    shown_input: str
    output: str
    chunk_rows: int
    keep: Literal["all", "none"] = "all"
    top: int | None = None
    overwrite: bool = False
    skip_bad_rows: bool = False
    columns: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return the options that change the output."""
        return {"keep": self.keep, "top": self.top, "chunk_rows": self.chunk_rows, "columns": list(self.columns)}


@dataclass(frozen=True)
class Prediction:
    """The job that writes the predictions for the rows of a file."""

    request: Request

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        """Predict as the rank of `environment`, and return the exit code.

        Raises:
            TrainerError: a user error.
        """
        recipe = resolved.recipe
        plan = plan_run(recipe, environment.world_size, environment.local_world_size)
        prepare = partial(_prepared, plan, self.request.columns)
        with joined_ranks(resolved, plan, environment, prepare) as (device, (preparation, task)):
            _predict(self.request, plan, preparation, task, device)
        return ExitCode.DONE


def _prepared(plan: RunPlan, columns: tuple[str, ...]) -> tuple[Preparation, Task]:
    recipe = plan.recipe
    preparation = load_preparation(recipe)
    task: Task = build_task(with_class_names(recipe).task).without_labels()
    if columns:
        if not isinstance(task, EmbeddingTask):
            raise UsageError(f"`--column` names texts to embed, but `task.type` is {recipe.task.type}; remove it")
        task = replace(task, text_columns=tuple(dict.fromkeys(columns)))
    require_fitting_rotations(recipe, preparation.config, task)
    task = task.for_configuration(preparation.config)
    refuse_generation_in_parts(task, plan)
    return preparation, task


def _predict(request: Request, plan: RunPlan, preparation: Preparation, task: Task, device: torch.device) -> None:
    """Predict on the joined ranks; all that holds the process group is gone when this returns."""
    mesh = open_mesh(plan.layout, device)
    predictor = _Predictor(plan, mesh, preparation, task, request)
    with _Rows(request, plan.recipe, task.columns, predictor.check) as rows, progress_bar(mesh.rank == 0) as bar:
        mesh.on_rank_zero(rows.open)
        shown = _bar_task(bar, rows)
        while (shared := mesh.on_rank_zero(rows.next_chunk)) is not None:
            chunk = _Chunk(**shared)
            with _way_on(request, chunk.first_row):
                found = predictor.answers(chunk) if len(chunk.places) else None

            def write(found: tuple[dict[str, Tensor], EvaluatedSplit] | None = found) -> None:
                rows.write(task.readable(*found) if found else [])

            mesh.on_rank_zero(write)
            bar.update(shown, completed=rows.num_done)
        mesh.on_rank_zero(rows.finish)
        if mesh.rank == 0:
            for note in [*predictor.notes(), *rows.notes()]:
                _print_note(note)


@contextmanager
def _way_on(request: Request, num_done: int) -> Iterator[None]:
    """Add to the error of a row how to go on after the rows that are written."""
    try:
        yield
    except DataError as error:
        if not num_done or request.output == STANDARD:
            raise
        raise DataError(
            f"{error}; {num_done:,} rows are done, and the same command with --skip-bad-rows goes on after them"
        ) from error


@dataclass(frozen=True)
class _Chunk:
    """Rows to predict.

    `table` holds the rows in the format of Arrow, as bytes. `places` are their indices in the file `[rows]`, which
    leave out bad rows; `first_row` is that of the first row, which may be bad.
    """

    table: Tensor
    places: Tensor
    first_row: int


def _bar_task(bar: Progress, rows: _Rows) -> Any:
    return bar.add_task("rows", total=None, completed=rows.num_done)


class _Predictor:
    """The model on the ranks, which is built for the first chunk."""

    def __init__(
        self, plan: RunPlan, mesh: ParallelMesh, preparation: Preparation, task: Task, request: Request
    ) -> None:
        self._plan = plan
        self._mesh = mesh
        self._preparation = preparation
        self._task = task
        self._where = f"`{request.shown_input}`"
        self._request = request
        self._parts: Assembly | None = None
        self._num_unknown = self._num_tokens = self._num_cut = 0

    def check(self, rows: Dataset, first_row: int) -> None:
        """Encode rows on this rank only.

        Args:
            rows: consecutive rows of the file.
            first_row: the index of the first row in the file.

        Raises:
            DataError: a row is bad.
        """
        with tempfile.TemporaryDirectory(prefix="trainer-") as cache:
            self._preparation.encode(self._split(rows, first_row), self._task, Path(cache))

    def answers(self, chunk: _Chunk) -> tuple[dict[str, Tensor], EvaluatedSplit]:
        """Return the task's answers in the order of the rows, on rank 0, and the split. All ranks must call it."""
        rows = _dataset(chunk.table)
        cache = Path(self._mesh.share(tempfile.mkdtemp(prefix="trainer-") if self._mesh.rank == 0 else None))
        try:
            encoded = self._encode(rows, chunk.first_row, cache)
            split = EvaluatedSplit(rows, encoded, self._preparation.text_tokenizer, self._where)
            if not len(encoded):  # no text has a token
                return {}, split
            unknown, tokens = encoded.unknown_tokens or (0, 0)
            self._num_unknown += unknown
            self._num_tokens += tokens
            self._num_cut += encoded.num_cut
            if self._parts is None:
                data = PreparedData(self._task, None, self._preparation, encoded, None)
                self._parts = assemble(self._plan, self._mesh, data)
            return self._gathered(self._parts, encoded, chunk.places), split
        finally:
            self._mesh.barrier()  # another rank may still open the files
            shutil.rmtree(cache, ignore_errors=True)

    def _split(self, rows: Dataset, first_row: int = 0) -> Split:
        return Split(rows, self._where, first_row, is_part=True, folders=(self._request.input.parent,))

    def _encode(self, rows: Dataset, first_row: int, cache: Path) -> EncodedSplit:
        try:
            return self._preparation.encode(self._split(rows), self._task, cache)
        except DataError:
            # Once more, with the place of the rows in the file, for the message.
            self._preparation.encode(self._split(rows, first_row), self._task, cache)
            raise

    def _gathered(self, parts: Assembly, encoded: EncodedSplit, places: Tensor) -> dict[str, Tensor]:
        mesh = self._mesh
        loader = EvalLoader(
            encoded,
            self._plan.recipe.evaluation.batch_size,
            mesh.index("dp"),
            mesh.size("dp"),
            self._preparation.batching,
            pin_memory=mesh.device.type == "cuda",
        )
        here = RowTensors()

        def begin(microbatch: Microbatch) -> Callable[[], tuple[Tensor, dict[str, Tensor]]]:
            # Drawn tokens depend on the row of the file, and not on its chunk; windows of a row are no places.
            keyed = places[microbatch.rows] if len(places) == len(encoded) else microbatch.rows
            read = parts.engine.begin_answer(replace(microbatch, rows=keyed))
            return lambda: (microbatch.rows, read())

        for rows, answers in one_behind(map(begin, loader)):
            here.add(rows, answers)
        # Ranks that share a model replica have the same rows, so one of them counts.
        gathered = mesh.gather(here.joined() if mesh.index("tp") == 0 else {})
        return in_row_order(gathered or [], len(encoded))

    def notes(self) -> list[str]:
        """Return notes for the user on truncated rows, and on unknown tokens if most are."""
        found = []
        if self._num_cut:
            length = self._plan.recipe.data.max_length
            found.append(f"truncated: {self._num_cut:,} rows of {self._where} have more than {length} tokens")
        if self._num_unknown > MOST_UNKNOWN * self._num_tokens:
            found.append(
                f"unknown to the tokenizer: {self._num_unknown:,} of {self._num_tokens:,} tokens of {self._where}; the"
                " predictions may be wrong"
            )
        return found


def _is_chat(values: Sequence[Any]) -> bool:
    first = next((value for value in values if value), None)
    return isinstance(first, list) and isinstance(first[0], dict) and "role" in first[0]


class _Rows:
    """Input and output, which rank 0 alone reads and writes.

    Each chunk of rows becomes a part file beside the output. The manifest names the input, the model and the options of
    the parts; a later call with the same ones goes on after the last part.
    """

    def __init__(
        self, request: Request, recipe: Recipe, columns: tuple[str, ...], check: Callable[[Dataset, int], None]
    ) -> None:
        self.num_done = 0
        self._check = check
        self._errors: dict[int, DataError] = {}  # of the current chunk
        self._num_bad = 0
        self._request = request
        self._recipe = recipe
        self._columns = columns
        self._output = None if request.output == STANDARD else Path(request.output).absolute()
        self._where = f"`{request.shown_input}`"
        self._chunks: Iterator[list[Row | DataError]] = iter(())
        self._chunk: list[Row] = []
        self._num_parts = 0
        self._lock: Any = None

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def open(self) -> None:
        """Find the finished parts, and open the input behind their rows.

        Raises:
            UsageError: the output exists, or another command writes it.
        """
        request = self._request
        file_format = row_format(request.input, "--input", INPUT_FORMATS)
        if self._output is not None:
            row_format(self._output, "--output", OUTPUT_FORMATS)
            if self._output.exists() and not request.overwrite:
                raise UsageError(
                    f"`--output` must name a new file, but {self._output} exists; name another, or add --overwrite"
                )
            try:
                self._find_parts(self._output)
            except OSError as error:
                raise self._unwritable(error) from error
        self.num_done = self._num_parts * request.chunk_rows
        self._chunks = read_chunks(
            request.input, file_format, request.chunk_rows, self.num_done, self._where, request.skip_bad_rows
        )

    def next_chunk(self) -> dict[str, Any] | None:
        """Return the attributes of the next `_Chunk`, which ranks can share; None at the end.

        Raises:
            DataError: the rows cannot be read, lack a column, or hold values of several types.
        """
        import pyarrow

        with _way_on(self._request, self.num_done):
            found = next(self._chunks, [])
            if not found:
                if not self.num_done:
                    raise DataError(f"`--input` must hold at least one row, but {self._where} is empty")
                return None
            self._errors = {place: row for place, row in enumerate(found) if isinstance(row, DataError)}
            self._chunk = [{} if isinstance(row, DataError) else row for row in found]
            if not (self._request.skip_bad_rows and (self._num_parts or len(self._errors) == len(found))):
                self._check_columns()
            if self._request.skip_bad_rows:
                self._find_bad(0, len(found))
            sound = [place for place in range(len(found)) if place not in self._errors]
            table = self._rows([self._chunk[place] for place in sound], self.num_done).data.table
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        tensor = torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)
        places = torch.tensor(sound, dtype=torch.int64) + self.num_done
        return {"table": tensor, "places": places, "first_row": self.num_done}

    def _find_bad(self, start: int, end: int) -> None:
        """Keep the error of each bad row of a part of the chunk; halves of a part with a bad row are parts."""
        if start == end or (end - start == 1 and start in self._errors):
            return
        first = self.num_done + start
        try:
            if self._errors.keys().isdisjoint(range(start, end)):
                self._check(self._rows(self._chunk[start:end], first), first)
                return
        except DataError as error:
            if end - start == 1:
                named = f"row {first + 1} of {self._where}"
                self._errors[start] = error if named in str(error) else DataError(f"{named} is bad: {error}")
                return
        half = (start + end) // 2
        self._find_bad(start, half)
        self._find_bad(half, end)

    def _rows(self, chunk: list[Row], first_row: int) -> Dataset:
        """Return the columns of rows that the task reads.

        Raises:
            DataError: a column holds values of several types.
        """
        import datasets
        import pyarrow

        try:
            columns = {name: [row.get(name) for row in chunk] for name in self._columns}
            parts = [
                # The writer of `datasets` takes exponential time for nested lists.
                datasets.Dataset.from_dict({name: values}, datasets.Features({name: json_chats()}))
                if _is_chat(values)
                else datasets.Dataset(pyarrow.table({name: values}))
                for name, values in columns.items()
            ]
            return datasets.concatenate_datasets(parts, axis=1)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(
                f"each column of {self._where} must hold values of one type, but rows {first_row + 1} to"
                f" {first_row + len(chunk)} do not: {error}"
            ) from error

    def _check_columns(self) -> None:
        present = dict.fromkeys(name for row in self._chunk for name in row)
        for name in self._columns:
            if name not in present:
                raise DataError(
                    f"the task reads the column `{name}`, but {self._where} has none of that name; its columns are"
                    f" {', '.join(f'`{column}`' for column in present) or 'none'}"
                )

    def write(self, found: list[dict[str, Any]]) -> None:
        """Write the predictions for the current rows, and the errors of bad ones.

        Raises:
            DataError: a column of the input has the name of a prediction.
            TrainerError: the file cannot be written.
        """
        assert len(found) + len(self._errors) == len(self._chunk), "one prediction for each sound row"
        answers = iter(found)
        errors = {place: {"error": str(error)} for place, error in self._errors.items()}
        merged = (self._merged(row, errors.get(place) or next(answers)) for place, row in enumerate(self._chunk))
        text = "".join(map(json_line, merged))
        self._num_bad += len(self._errors)
        try:
            if self._output is None:
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                replace_text(self._part(self._num_parts), text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from error
        self._num_parts += 1
        self.num_done += len(self._chunk)

    def notes(self) -> list[str]:
        """Return a note on the bad rows that this command skipped."""
        return [f"bad: {self._num_bad:,} rows of {self._where} have an `error`"] if self._num_bad else []

    def finish(self) -> None:
        """Assemble the output from its parts.

        Raises:
            DataError: the rows do not fit the format.
            TrainerError: the file cannot be written.
        """
        if self._output is None:
            return
        new = self._output.with_name(f"{UNFINISHED}{self._output.name}")
        try:
            remove(new)  # of a command that was killed here, or a link
            file_format = row_format(self._output, "--output", OUTPUT_FORMATS)
            write_rows([self._part(number) for number in range(self._num_parts)], new, file_format)
            sync(new)
            os.replace(new, self._output)
            sync(self._output.parent)
            shutil.rmtree(self._folder, ignore_errors=True)
        except OSError as error:
            raise self._unwritable(error) from error
        _print_note(f"wrote {self.num_done:,} rows to {self._output}")

    @property
    def _folder(self) -> Path:
        assert self._output is not None
        return self._output.with_name(f"{self._output.name}.parts")

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:06}.jsonl"

    def _unwritable(self, error: OSError) -> TrainerError:
        return TrainerError(f"the predictions cannot be written to {self._request.output}: {error}; make room there")

    def _find_parts(self, output: Path) -> None:
        if not output.parent.is_dir():
            raise UsageError(f"`--output` must lie in a folder that exists, but {output.parent} does not; create it")
        if self._folder.is_symlink():
            raise UsageError(
                f"`--output` must have its parts in a folder of its own, but {self._folder} is a link; remove the link"
            )
        self._folder.mkdir(exist_ok=True)
        self._lock = FileLock(self._folder / _LOCK)
        try:
            self._lock.acquire(timeout=_LOCK_SECONDS)
        except Timeout as error:
            raise UsageError(f"another command is writing {output}; wait for it, or name another --output") from error
        manifest = self._folder / _MANIFEST
        facts = self._facts()
        before = _read_manifest(manifest)
        if before != facts:
            if before is not None:
                changed = ", ".join(name for name in facts if before.get(name) != facts[name])
                _print_note(f"starts anew: {self._folder} is of a prediction with another {changed}")
            for path in self._folder.iterdir():
                if path.name != _LOCK:
                    path.unlink()
            replace_text(manifest, json.dumps(facts, indent=2) + "\n")
        while self._part(self._num_parts).exists():
            self._num_parts += 1
        if self._num_parts:
            _print_note(f"goes on after {self._num_parts * self._request.chunk_rows:,} rows of {self._folder}")

    def _facts(self) -> dict[str, Any]:
        folder = Path(self._recipe.model.name_or_path or "")
        recipe = self._recipe.model_dump(mode="json")
        kept = {"task": recipe["task"], "max_length": recipe["data"].get("max_length")}
        return {
            "input": file_digest(self._request.input),
            "model": _folder_digest(folder, self._folder),
            "versions": versions() | {"source": source_digest()},
            "options": self._request.options()
            | kept
            | {"precision": recipe["precision"], "seed": recipe["training"]["seed"]},
        }

    def _merged(self, row: Row, answer: dict[str, Any]) -> Row:
        if self._request.top is not None and isinstance(answer.get("probabilities"), dict):
            ranked = sorted(answer["probabilities"].items(), key=lambda item: -item[1])
            answer = {**answer, "probabilities": dict(ranked[: self._request.top])}
        if self._request.keep == "none":
            return answer
        for name in answer:
            if name in row:
                raise DataError(
                    f"column `{name}` of {self._where} has the name of a prediction; rename it, or leave the columns of"
                    " the input out with --keep none"
                )
        return {name: value for name, value in row.items() if not _is_binary(value)} | answer


def _dataset(table: Tensor) -> Dataset:
    import datasets
    import pyarrow

    with pyarrow.ipc.open_stream(pyarrow.py_buffer(table.numpy().tobytes())) as reader:
        return datasets.Dataset(reader.read_all())


def _is_binary(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))


def _read_manifest(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_plain(file))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


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
            facts.append([name, state.st_size, file_digest(path) if small else state.st_mtime_ns])
    return digest_of(facts)


def _print_note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
