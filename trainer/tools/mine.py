"""`trainer mine`: hard negatives of pairs of texts, by `mine_hard_negatives` of sentence-transformers.

That function embeds, searches and chooses; it keeps all texts and embeddings in memory. This module has the parts that
it lacks: the formats of `trainer predict`, the keys of `data`, errors that name a row or an option, distinct
pairs, and a whole file or none. Distinct pairs, because it counts a repeated pair as one more right document.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.base.disk import UNFINISHED, move_over
from trainer.base.distribution import install_command
from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.base.terminal import say
from trainer.data.formats.base import Row
from trainer.data.formats.table import reader_of
from trainer.data.row_transform import transform_of
from trainer.data.sources import text_options
from trainer.models.sentence_files import MODULES, read_json
from trainer.recipe.schema import Data
from trainer.tasks.registry import build_task
from trainer.tools.predict.chunked_rows import input_format, json_line, output_format, read_chunks
from trainer.tools.predict.prediction_files import Request
from trainer.training.row_encoding import model_folder

if TYPE_CHECKING:
    from trainer.use.trained import Trained

_QUERIES_AT_ONCE = 1024  # a block of similarities with 200,000 documents then takes 0.8 GB


@dataclass(frozen=True)
class Limits:
    """The choice of negatives of a query, by the arguments of `mine_hard_negatives`."""

    num_negatives: int = 3
    range_min: int = 0  # the most similar documents to leave out
    range_max: int | None = None  # the most similar documents to choose from; None: enough for the negatives
    # the least difference to the similarity of the least similar right document; None: none
    absolute_margin: float | None = None
    relative_margin: float | None = None  # the same, as a share of that similarity
    max_score: float | None = None
    min_score: float | None = None

    def check(self) -> None:
        """Refuse a range with fewer documents than negatives, and limits that compare with no number."""
        limits = {"margin": self.absolute_margin, "relative-margin": self.relative_margin}
        for name, limit in (limits | {"max-score": self.max_score, "min-score": self.min_score}).items():
            if limit is not None and not math.isfinite(limit):
                raise UsageError(f"`--{name}` must be a finite number, but is {limit}; correct it, or leave it out")
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            raise UsageError(
                f"`--range-max` must be at least {self.range_min + self.num_negatives} (`--range-min` {self.range_min}"
                f" and `--number` {self.num_negatives}), but is {self.range_max}; increase it"
            )


def mine(trained: Trained, request: Request, limits: Limits, form: Literal["columns", "list"], processes: int) -> None:
    """Write the negatives of the pairs of a file.

    Args:
        form: one column for each negative, or lists of documents with labels.
        processes: the processes that embed, each on a device of its own where there are GPUs.

    Raises:
        TrainerError: a user error.
    """
    recipe = trained.resolved.recipe
    task = build_task(recipe.task)
    if task.card.pipeline_tag != "feature-extraction":
        raise UsageError(
            f"`trainer mine` needs an embedding model, but `task.type` is {recipe.task.type}; name another RUN"
        )
    limits.check()
    request.require_output()
    output = Path(request.output).absolute()
    if output.exists() and output.samefile(request.input):
        raise UsageError(
            "`--output` must name another file than `--input`, because it lacks other columns and pairs without"
            f" negatives, but both are {output}; name another"
        )
    query, document, *_ = task.columns
    # A pair that stands twice would get its negatives twice.
    pairs = list(dict.fromkeys(_pairs(request, recipe.data, query, document)))
    devices = _devices(processes)
    miner, model = _sentence_transformers(trained)
    if devices and isinstance(model, _ByNumber):
        raise UsageError(
            f"`--processes` must be 1 for `task.type` {recipe.task.type}, but is {processes}; leave it out"
        )

    import datasets

    found = miner(
        datasets.Dataset.from_dict({query: [pair[0] for pair in pairs], document: [pair[1] for pair in pairs]}),
        model,
        query,
        document,
        **asdict(limits),
        output_format="n-tuple",
        batch_size=recipe.evaluation.batch_size,
        faiss_batch_size=_QUERIES_AT_ONCE,
        use_multi_process=devices,
        verbose=False,
    )
    if not len(found):
        num_documents = len({text for _, text in pairs})
        raise DataError(
            f"{request.where} must hold a pair with {limits.num_negatives} negatives, but none of {len(pairs):,} pairs"
            f" has so many among {num_documents:,} documents; lower `--number`, relax the limits, or add documents"
        )
    _write(output, found if form == "columns" else map(_as_list, found))
    if left_out := len(pairs) - len(found):
        number = limits.num_negatives
        say(f"left out: {left_out:,} of {len(pairs):,} pairs have fewer than {number} negatives", err=True)


def _pairs(request: Request, data: Data, query: str, document: str) -> Iterator[tuple[str, str]]:
    file_format = input_format(request.input)
    number, found, text = 0, None, text_options(data)
    for chunk in read_chunks(request.input, file_format, request.chunk_rows, 0, request.where, text=text):
        rows = [row for row in chunk if not isinstance(row, DataError)]
        found = found or transform_of(data).of_input(rows, (query, document), request.where)
        for row in found.of_rows(rows, number, request.where) if found else rows:
            number += 1
            yield _text(row, query, number, request.where), _text(row, document, number, request.where)
    if not number:
        raise DataError(f"{request.where} has no row; name a file with pairs of texts")


def _text(row: Row, column: str, number: int, where: str) -> str:
    if column not in row:
        raise DataError(f"row {number} of {where} has no column `{column}`; its columns are {', '.join(row)}")
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        problem = "null" if text is None else "empty" if isinstance(text, str) else repr(text)
        raise DataError(f"column `{column}`, row {number} of {where} must be a text, but is {problem}; leave it out")
    return text


def _devices(processes: int) -> list[str] | bool:
    """Return the devices of the processes; False: this process alone."""
    gpus = torch.cuda.device_count()
    if gpus and processes > gpus:
        raise UsageError(
            f"`--processes` must be at most {gpus}, the GPUs of this machine, but is {processes}; lower it"
        )
    return processes > 1 and [f"cuda:{index}" if gpus else "cpu" for index in range(processes)]


def _sentence_transformers(trained: Trained) -> tuple[Any, Any]:
    """Return `mine_hard_negatives` and the model.

    Raises:
        UsageError: the package is not installed, or the folder is not one of sentence-transformers.
    """
    recipe = trained.resolved.recipe
    model_folder(recipe)  # a folder that does not fit the task is refused
    if read_json(recipe.model, MODULES, list) is None:  # it would guess a pooling
        raise UsageError(
            f"`RUN` must hold a model of sentence-transformers, but {trained.folder} has no modules.json; name a folder"
            " that trainer exported"
        )
    try:
        import sentence_transformers
        from sentence_transformers.util import mine_hard_negatives
    except ImportError as error:
        fix = install_command("mining")
        raise UsageError(f"`trainer mine` needs sentence-transformers; install it ({fix}) ({error})") from error
    name = build_task(recipe.task).card.program.name.strip("`")
    model = getattr(sentence_transformers, name)(str(trained.folder), local_files_only=True)
    return mine_hard_negatives, model if name == "SentenceTransformer" else _ByNumber(model)


class _ByNumber:
    """A model whose embeddings are the numbers of texts, because `mine_hard_negatives` takes arrays only."""

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, model.device
        self._vectors: list[torch.Tensor] = []

    def encode_query(self, texts: list[str], **options: Any) -> NDArray[np.int64]:
        return self._encode(self._model.encode_query, texts, options)

    def encode_document(self, texts: list[str], **options: Any) -> NDArray[np.int64]:
        return self._encode(self._model.encode_document, texts, options)

    def _encode(self, encode: Any, texts: list[str], options: dict[str, Any]) -> NDArray[np.int64]:
        first = len(self._vectors)
        self._vectors.extend(encode(list(texts), batch_size=options["batch_size"]))
        return np.arange(first, len(self._vectors))

    def similarity(self, queries: Any, documents: Any) -> torch.Tensor:
        return self._dense(self._model.similarity(self._of(queries), self._of(documents)))

    def similarity_pairwise(self, queries: Any, documents: Any) -> torch.Tensor:
        return self._dense(self._model.similarity_pairwise(self._of(queries), self._of(documents)))

    def _of(self, numbers: Any) -> Any:
        vectors = [self._vectors[int(number)] for number in numbers]
        return torch.stack(vectors) if vectors[0].is_sparse else vectors

    def _dense(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.to_dense() if scores.is_sparse else scores


def _as_list(row: Row) -> Row:
    """Return a query with its documents, the right one first, and their labels."""
    (column, query), *documents = row.items()
    return {column: query, "documents": [text for _, text in documents], "label": [1] + [0] * (len(documents) - 1)}


def _write(output: Path, rows: Any) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=output.parent) as folder:
            lines, made = Path(folder) / "rows.jsonl", Path(folder) / output.name
            with lines.open("w", encoding="utf-8") as file:
                file.writelines(map(json_line, rows))
            reader_of(output_format(output)).write([lines], made)
            move_over(made, output)
    except OSError as error:
        raise TrainerError(f"`--output` could not be written to {output}: {error}; make room there") from error
