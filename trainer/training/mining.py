"""The work of `trainer mine`: hard negatives of pairs of texts, by the embeddings of a trained model.

The search is exact. Embeddings lie in files of rank 0, which sends them in blocks. Each rank compares its share of a
block of queries with each block of documents. Options and results are those of `mine_hard_negatives` of
sentence-transformers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.base.disk import UNFINISHED, move_over, remove
from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.base.terminal import say
from trainer.data.chunked_rows import INPUT_FORMATS, OUTPUT_FORMATS, json_line, read_chunks, row_format, write_rows
from trainer.data.formats.base import Row
from trainer.data.row_map import RowMap
from trainer.data.sources import text_options
from trainer.parallel.mesh import ParallelMesh
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Data
from trainer.tasks.embedding import EmbeddingTask
from trainer.tasks.registry import build_task
from trainer.training.predict import Predictor, table_bytes
from trainer.training.prediction_files import Request, hold
from trainer.training.process_group import run_on_ranks
from trainer.training.row_encoding import Preparation, fitted, load_preparation

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe

_QUERIES_AT_ONCE, _DOCUMENTS_AT_ONCE = 4_096, 2_048  # the size of a block of similarities on a rank
_UNITS = 10**6  # in a similarity of 1; rounding errors of embeddings are below one
_HALF = 2**32  # of 64 bits


@dataclass(frozen=True)
class Limits:
    """The choice of negatives of a query, from the documents that are most similar to it."""

    number: int = 3  # the negatives of each query
    skip: int = 0  # the most similar documents to leave out
    among: int | None = None  # the most similar documents to choose from; None: enough for `number`
    # the least difference to the similarity of the least similar right document; None: none
    margin: float | None = None
    relative_margin: float | None = None  # the same, as a share of that similarity
    highest: float | None = None  # the largest similarity of a negative
    lowest: float | None = None  # the least one

    def last(self, most_right: int) -> int:
        """Return how many documents are considered, if a query has at most `most_right` right ones."""
        if self.among is not None:
            return self.among
        filters = (self.margin, self.relative_margin, self.highest)
        return self.skip + self.number * (1 if filters == (None,) * 3 else 10) + most_right

    def check(self) -> None:
        """Refuse a range with fewer documents than negatives, and limits that compare with no number."""
        given = {
            "--margin": self.margin,
            "--relative-margin": self.relative_margin,
            "--max-score": self.highest,
            "--min-score": self.lowest,
        }
        for name, limit in given.items():
            if limit is not None and not math.isfinite(limit):
                raise UsageError(f"`{name}` must be a finite number, but is {limit}; correct it, or leave it out")
        if self.among is not None and self.among - self.skip < self.number:
            raise UsageError(
                f"`--range-max` must be at least {self.skip + self.number} (`--range-min` {self.skip} and `--number`"
                f" {self.number}), but is {self.among}; increase it"
            )


@dataclass(frozen=True)
class Mining:
    """The job that writes the negatives of the pairs of a file."""

    request: Request
    limits: Limits
    form: Literal["columns", "list"]

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        """Mine as the rank of `environment`, and return the exit code.

        Raises:
            TrainerError: a user error.
        """
        return run_on_ranks(resolved, environment, self._prepare, self._mine)

    def _prepare(self, plan: RunPlan) -> tuple[Preparation, EmbeddingTask]:
        task = build_task(plan.recipe.task)
        if not isinstance(task, EmbeddingTask):
            raise UsageError(
                f"`trainer mine` needs an embedding model, but `task.type` is {plan.recipe.task.type}; name another RUN"
            )
        self.limits.check()
        self.request.check_output()
        if self._output.exists() and self._output.samefile(self.request.input):
            raise UsageError(
                "`--output` must name another file than `--input`, because it lacks other columns and pairs without"
                f" negatives, but both are {self._output}; name another"
            )
        preparation = load_preparation(plan.recipe)
        found = fitted(task, preparation)
        assert isinstance(found, EmbeddingTask)
        return preparation, found

    def _mine(self, plan: RunPlan, mesh: ParallelMesh, prepared: tuple[Preparation, EmbeddingTask]) -> None:
        preparation, task = prepared
        query, document, *_ = task.text_columns
        own = task.without_labels()
        predictor = Predictor(plan, mesh, preparation, own, self.request)
        texts: _Texts | None = None

        def read() -> tuple[Tensor, Tensor]:
            nonlocal texts
            texts = _Texts.of(self.request, plan.recipe.data, query, document)
            return torch.tensor([len(texts.queries), len(texts.documents)]), texts.pairs

        sizes, pairs = mesh.on_rank_zero(read)
        with ExitStack() as stack:
            folder = mesh.on_rank_zero(lambda: str(stack.enter_context(_folder_beside(self._output))))
            places = [Path(folder, name) for name in ("queries", "documents")]
            queries, documents = (StoredRows(mesh, *one) for one in zip(places, sizes.tolist(), strict=True))
            self._embed(mesh, predictor, own, queries, None if texts is None else texts.queries)
            of_documents = replace(own, text_columns=(document,))
            self._embed(mesh, predictor, of_documents, documents, None if texts is None else texts.documents)
            gathered = mesh.gather(mine(queries, documents, pairs, self.limits, mesh.rank, mesh.world_size))

            def write() -> int:
                assert texts is not None
                assert gathered is not None
                for place in places:  # makes room for the output
                    remove(place)
                return self._write(Path(folder), texts, dict(zip_rows(gathered)), (query, document))

            left_out = mesh.on_rank_zero(write)
        if mesh.rank == 0:
            for note in predictor.notes():
                say(note, err=True)
            if left_out:
                number = self.limits.number
                say(f"left out: {left_out:,} of {len(pairs):,} pairs have fewer than {number} negatives", err=True)

    @property
    def _output(self) -> Path:
        return Path(self.request.output).absolute()

    def _embed(
        self,
        mesh: ParallelMesh,
        predictor: Predictor,
        task: EmbeddingTask,
        stored: StoredRows,
        texts: Sequence[str] | None,
    ) -> None:
        """Store the unit embeddings of texts. All ranks must call it.

        Args:
            texts: the texts on rank 0; None on others.
        """
        import pyarrow

        (column,) = task.text_columns
        for start in range(0, stored.number, self.request.chunk_rows):

            def chunk(start: int = start) -> Tensor:
                assert texts is not None
                return table_bytes(pyarrow.table({column: texts[start : start + self.request.chunk_rows]}))

            number = min(self.request.chunk_rows, stored.number - start)
            answers, _ = predictor.answers(mesh.on_rank_zero(chunk), torch.arange(start, start + number), start, task)
            stored.append(F.normalize(answers["embeddings"][:, 0].float(), dim=-1) if answers else torch.empty(0))

    def _write(self, folder: Path, texts: _Texts, negatives: dict[int, list[int]], columns: tuple[str, str]) -> int:
        """Write the output, and return the number of pairs that are left out.

        Args:
            folder: holds files until the output is complete.

        Raises:
            DataError: no pair has enough negatives.
        """
        output, left_out = self._output, 0
        try:
            lines, made = folder / "rows.jsonl", folder / f"made-{output.name}"
            with lines.open("w", encoding="utf-8") as file:
                for query, document in texts.pairs.tolist():
                    wrong = [texts.documents[number] for number in negatives[query]]
                    if len(wrong) < self.limits.number:
                        left_out += 1
                        continue
                    row = self._row(columns, texts.queries[query], texts.documents[document], wrong)
                    file.write(json_line(row))
            if left_out == len(texts.pairs):
                raise DataError(
                    f"{self.request.where} must hold a pair with {self.limits.number} negatives, but none of"
                    f" {left_out:,} pairs has so many among {len(texts.documents):,} documents; lower `--number`,"
                    " relax the limits, or add documents"
                )
            write_rows([lines], made, row_format(output, "--output", OUTPUT_FORMATS))
            move_over(made, output)
        except OSError as error:
            raise _cannot_write(output, error) from error
        return left_out

    def _row(self, columns: tuple[str, str], query: str, right: str, wrong: Sequence[str]) -> Row:
        if self.form == "list":
            return {columns[0]: query, "documents": [right, *wrong], "label": [1] + [0] * len(wrong)}
        numbered = {f"negative_{number}": text for number, text in enumerate(wrong, 1)}
        return {columns[0]: query, columns[1]: right, **numbered}


@dataclass(frozen=True)
class _Texts:
    """The distinct queries and documents of a file, and the distinct pairs `[pairs, 2]` of their numbers."""

    queries: list[str]
    documents: list[str]
    pairs: Tensor

    @classmethod
    def of(cls, request: Request, data: Data, query: str, document: str) -> _Texts:
        queries: dict[str, int] = {}
        documents: dict[str, int] = {}
        pairs: dict[tuple[int, int], None] = {}
        file_format = row_format(request.input, "--input", INPUT_FORMATS)
        number, found = 0, None
        text = text_options(data)
        for chunk in read_chunks(request.input, file_format, request.chunk_rows, 0, request.where, text=text):
            rows = [row for row in chunk if not isinstance(row, DataError)]
            found = found or RowMap.of_input(data.map, (query, document), rows, request.where)
            for row in found.of_rows(rows, number, request.where) if found else rows:
                number += 1
                first, second = (_text(row, column, number, request.where) for column in (query, document))
                pair = queries.setdefault(first, len(queries)), documents.setdefault(second, len(documents))
                pairs[pair] = None
        if not pairs:
            raise DataError(f"{request.where} has no row; name a file with pairs of texts")
        return cls(list(queries), list(documents), torch.tensor(list(pairs)))


class StoredRows:
    """Rows of fp32 numbers in a file of rank 0. All ranks must make the same calls.

    Args:
        path: the file, which must not exist yet.
    """

    def __init__(self, mesh: ParallelMesh, path: Path, number: int) -> None:
        self._mesh, self._path, self.number = mesh, path, number

    def append(self, rows: Tensor) -> None:
        """Write the rows of rank 0 `[rows, hidden]` to the end.

        Raises:
            TrainerError: they cannot be written.
        """

        def write() -> None:
            try:
                with self._path.open("ab") as file:
                    rows.contiguous().numpy().tofile(file)
            except OSError as error:
                raise _cannot_write(self._path, error) from error

        self._mesh.on_rank_zero(write)

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return some rows `[rows, hidden]` on all ranks."""
        return self._mesh.on_rank_zero(lambda: self._read(start, stop))

    def _read(self, start: int, stop: int) -> Tensor:
        row_bytes = self._path.stat().st_size // self.number
        with self._path.open("rb") as file:
            file.seek(start * row_bytes)
            content = bytearray(file.read((stop - start) * row_bytes))
        return torch.frombuffer(content, dtype=torch.float32).view(stop - start, -1)


@contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    """Make a folder for temporary files on the disk of the output; that of a command that was killed is emptied.

    Raises:
        UsageError: another command has it.
        TrainerError: it cannot be written.
    """
    folder = output.with_name(f"{UNFINISHED}{output.name}")
    try:
        if folder.is_symlink() or not folder.is_dir():
            remove(folder)
        lock = hold(folder, output)
        for path in folder.iterdir():
            if path != lock.file:
                remove(path)
    except OSError as error:
        raise _cannot_write(output, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _cannot_write(place: Path, error: OSError) -> TrainerError:
    return TrainerError(f"`--output` could not be written to {place}: {error}; make room there")


def _text(row: Row, column: str, number: int, where: str) -> str:
    if column not in row:
        raise DataError(f"row {number} of {where} has no column `{column}`; its columns are {', '.join(row)}")
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        problem = "null" if text is None else "empty" if isinstance(text, str) else repr(text)
        raise DataError(f"column `{column}`, row {number} of {where} must be a text, but is {problem}; leave it out")
    return text


def zip_rows(gathered: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[int, list[int]]]:
    """Yield each query and its negatives, from the results of `mine` on each rank."""
    for queries, negatives in gathered:
        for query, of_query in zip(queries.tolist(), negatives.tolist(), strict=True):
            yield query, [number for number in of_query if number >= 0]


class Rows(Protocol):
    """Unit embeddings, which `__call__` returns in blocks `[rows, hidden]`; `number` is that of all rows."""

    number: int

    def __call__(self, start: int, stop: int) -> Tensor: ...


def mine(
    queries: Rows, documents: Rows, pairs: Tensor, limits: Limits, rank: int = 0, world_size: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the queries of a rank `[queries]`, and the documents that are their negatives `[queries, number]`.

    The most similar one is first, and of equal ones the first document. -1 stands for a negative that is missing. A
    rank holds a block of queries and one of documents, with the most similar documents of the former.

    Args:
        pairs: the numbers of queries and of their right documents `[pairs, 2]`.
        rank: the rank, which has each `world_size`-th query.
    """
    most_right = int(torch.bincount(pairs[:, 0]).max())
    pairs = pairs[(pairs[:, 0] % world_size == rank).nonzero().flatten()]
    own = torch.arange(rank, queries.number, world_size)
    found = [torch.empty(0, limits.number, dtype=torch.long)]
    step = _QUERIES_AT_ONCE * world_size
    for start in range(0, queries.number, step):
        stop = min(start + step, queries.number)
        # Ranks without queries in the last block take part in its collectives.
        block = queries(start, stop)[(rank - start) % world_size :: world_size].double()
        of_block = pairs[(pairs[:, 0] >= start) & (pairs[:, 0] < stop)]
        of_block = torch.stack([(of_block[:, 0] - start) // world_size, of_block[:, 1]], dim=1)
        found.append(_negatives(block, documents, of_block, limits, most_right))
    return own, torch.cat(found)


def _negatives(queries: Tensor, documents: Rows, pairs: Tensor, limits: Limits, most_right: int) -> Tensor:
    """Return the negatives of queries `[queries, number]`.

    Args:
        pairs: the numbers of queries in the block, and of their right documents.
        most_right: the largest number of right documents of a query.
    """
    last = limits.last(most_right)
    scores, numbers, least = _most_similar(queries, documents, pairs, last + most_right)
    out = torch.zeros(scores.shape, dtype=torch.bool)
    for row, document in pairs.tolist():
        out[row] |= numbers[row] == document
    if limits.margin is not None:
        out = out | (scores + limits.margin > least)
    if limits.relative_margin is not None:
        out = out | (scores > least - least.abs() * limits.relative_margin)
    if limits.highest is not None:
        out = out | (scores > limits.highest)
    if limits.lowest is not None:
        out = out | (scores < limits.lowest)
    # The documents that remain move to the front, in their order.
    order = out.int().sort(dim=1, stable=True).indices[:, :last]
    chosen = numbers.masked_fill(out, -1).gather(1, order)[:, limits.skip :][:, : limits.number]
    return F.pad(chosen, (0, limits.number - chosen.shape[1]), value=-1)


def _most_similar(queries: Tensor, documents: Rows, pairs: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most similar documents of queries, and the least similarity of a right one `[queries, 1]`.

    The first results are similarities and numbers of these documents `[queries, number]`, in descending order, and of
    equal ones in that of the documents. Both are the halves of one integer, so topk decides ties too.
    """
    best = torch.empty(len(queries), 0, dtype=torch.long)
    least = torch.full((len(queries),), torch.inf, dtype=torch.float64)
    for start in range(0, documents.number, _DOCUMENTS_AT_ONCE):
        block = documents(start, min(start + _DOCUMENTS_AT_ONCE, documents.number)).double()
        similar = queries @ block.T
        inside = pairs[(pairs[:, 1] >= start) & (pairs[:, 1] < start + len(block))]
        least = least.scatter_reduce(0, inside[:, 0], similar[inside[:, 0], inside[:, 1] - start], "amin")
        later = _HALF - 1 - torch.arange(start, start + len(block))
        both = similar.mul_(_UNITS).round_().long().mul_(_HALF).add_(later)
        # The best of the block first, so that similarities are not copied.
        both = torch.cat([best, both.topk(min(number, len(block)), dim=1).values], 1)
        best = both.topk(min(number, both.shape[1]), dim=1).values
    similar = best.div(_HALF, rounding_mode="floor").double() / _UNITS
    return similar, _HALF - 1 - best.remainder(_HALF), least[:, None]
