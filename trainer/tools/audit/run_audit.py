"""`trainer audit RUN`: training rows that are probably mislabelled or harmful, from the record of the run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import UsageError
from trainer.checkpoint.counters import Progress
from trainer.data.hashing import row_digest
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.reading.loading import load_values
from trainer.recipe.schema import Recipe
from trainer.tasks.types import Dataset
from trainer.tools.audit.data_audit import MOST_DESCRIBED, plain_columns
from trainer.tools.audit.findings import AuditResult, Finding, FoundRow
from trainer.tools.audit.judge import LEAST_ROWS, MOST_ROWS, Judgement, judge_rows, judge_words
from trainer.tools.audit.row_record import RowRecord, read_record
from trainer.tools.audit.row_texts import RowText, TextReader, flat, shortened
from trainer.tools.audit.scores import RowScores, confident_issues, scores_of
from trainer.tools.report.runs import read_run
from trainer.training.run_data import PreparedData, prepare_data, read_splits

_SPREADS = 3.0  # interquartile ranges above the upper quartile, of mean losses
_FORGOTTEN = 2  # times
_SEEDS = 5  # of the command that measures the gain

Rows: TypeAlias = NDArray[np.int64]


def audit_run(folder: Path, overrides: Sequence[str] = (), write: Path | None = None) -> AuditResult:
    """Audit the training rows of a run.

    Args:
        overrides: changes of the recipe's keys, such as data.train, if files have moved.
        write: the file for the rows; it stands in the command that measures the gain.

    Raises:
        TrainerError: the run has no record, or its data cannot be read or have changed.
    """
    record = read_record(folder)
    recipe = recipe_of(folder, overrides)
    data = prepare_data(recipe)
    split = read_splits(recipe, data.task, None, None, None).train
    numbers, epochs = row_numbers(record, data, recipe)
    size = len(data.train)
    is_packed = data.task.preview.source_rows(data.train) is None and size != len(split.rows)
    if is_packed and write is not None:
        raise UsageError(f"`--write` needs rows of the source, but those of {folder} are {data.unit}; leave it out")
    scores = scores_of(record.records, numbers, size)
    reader = TextReader.of(recipe, data.task, split.rows.column_names)
    judgement = None if is_packed else _judgement(data, split.rows, record, reader)
    unseen = share_right_unseen(record, numbers)
    findings = _Described(data, split.rows, reader, record, scores, judgement, unseen)
    missing = int(np.count_nonzero(scores.number == 0))
    facts = [f"record    {len(record.records):,} rows of {epochs:g} epochs; kind {record.kind}"]
    if judgement is not None:
        facts.append(
            f"right     {unseen:.0%} of new rows by the run in its first epoch, {judgement.right:.0%} by the judge of"
            f" n-grams; {'the judge' if findings.is_judged else 'the run'} orders"
        )
    notes = list(record.notes)
    if missing:
        notes.append(f"{missing:,} of {size:,} rows have no record, because the run did not reach them")
    command = ""
    if recipe.data.validation is None:
        notes.append("`data.validation` is null, so no metric can show the gain of leaving rows out")
    elif not is_packed:
        command = _measuring(folder, recipe, overrides, str(write or "rows.csv"))
    return AuditResult(folder.name, {"training": size}, [*findings.all()], facts, notes, command)


def _measuring(folder: Path, recipe: Recipe, overrides: Sequence[str], file: str) -> str:
    """Return the command that compares the recipe of a run with and without the rows of a file."""
    before = getattr(recipe.data, "leave_out", None)
    files = [] if before is None else [before] if isinstance(before, str) else list(before)
    values = [json.dumps(one) if one else "null" for one in (files, [*files, file])]
    words = [str(folder / "model" / "trainer_recipe.json"), *overrides, f"data.leave_out={','.join(values)}"]
    return shlex.join(["trainer", "compare", *words, "--seeds", str(_SEEDS)])


def recipe_of(folder: Path, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a run, from its metrics."""
    runs = read_run(folder).metrics.runs
    values = runs[-1].get("recipe") if runs else None
    if not isinstance(values, dict):
        raise UsageError(f"`RUN` must be a run with its recipe in metrics.jsonl, but {folder} has none; name another")
    return load_values(values, overrides).recipe


def row_numbers(record: RowRecord, data: PreparedData, recipe: Recipe) -> tuple[Rows, float]:
    """Return the encoded row of each record, and the number of epochs.

    Raises:
        UsageError: the data are not those of the run.
    """
    rows = data.training_rows(recipe, Progress())
    steps, starts = np.unique(record.records["step"], return_index=True)
    ends: Rows = np.append(starts[1:], len(record.records))
    numbers: Rows = np.zeros(len(record.records), np.int64)
    for step, start, end in zip(steps.tolist(), starts.tolist(), ends.tolist(), strict=True):
        ids, places = rows.row_ids(step), record.records["place"][start:end]
        if len(places) and int(places.max()) >= len(ids):
            raise UsageError(
                f"the rows of the run must be those of its recipe, but step {step + 1} took {int(places.max()) + 1}"
                f" rows and has {len(ids)} now; restore the data, or name them by data.train=FILE"
            )
        numbers[start:end] = ids[places]
    labels = data.train.scalars.get("labels")
    if record.kind == "classes" and labels is not None and (labels[numbers] != record.records["label"]).any():
        raise UsageError(
            "the rows of the run must be those of its recipe, but some have another label now; restore the data, or"
            " name them by data.train=FILE"
        )
    return numbers, len(record.records) / max(1, len(data.train))


def share_right_unseen(record: RowRecord, numbers: Rows) -> float:
    """Return the share of rows that a run was right on before it learnt from them, in the second half of an epoch.

    Args:
        numbers: the encoded row of each record.
    """
    if "margin" not in (record.records.dtype.names or ()) or not len(numbers):
        return 0.0
    first = np.sort(np.unique(numbers, return_index=True)[1])
    return float((record.records["margin"][first[len(first) // 2 :]] > 0).mean())


def _judgement(data: PreparedData, rows: Dataset, record: RowRecord, reader: TextReader) -> Judgement | None:
    """Return the opinion of the judge on the rows of the source; None for rows that it cannot judge."""
    if record.kind not in ("classes", "tokens") or reader.label is None or not LEAST_ROWS <= len(rows) <= MOST_ROWS:
        return None
    if record.kind == "classes":
        labels = data.train.scalars.get("labels")
        columns = [texts for name in reader.columns if any(texts := list(map(flat, rows[name])))]
        if labels is None or len(labels) != len(rows) or not columns:
            return None
        return judge_rows(columns, np.asarray(labels, np.int64))
    places = {name: place for place, name in enumerate(record.classes)}
    names = getattr(getattr(rows.features[reader.label], "feature", None), "names", None)
    tags = [[names[tag] if names else str(tag) for tag in row or ()] for row in rows[reader.label]]
    words = rows[reader.columns[0]]
    is_known = all(isinstance(one, list) for one in words) and all(tag in places for row in tags for tag in row)
    if not is_known or list(map(len, words)) != list(map(len, tags)):
        return None  # texts with spans
    return judge_words(words, [np.array([places[tag] for tag in row], np.int64) for row in tags])


class _Described:
    """The findings on a run, with texts and labels in words.

    The judge orders the rows if it is right more often than the run was on rows that it had not seen.
    """

    def __init__(
        self,
        data: PreparedData,
        rows: Dataset,
        reader: TextReader,
        record: RowRecord,
        scores: RowScores,
        judgement: Judgement | None,
        unseen: float,
    ) -> None:
        self._data, self._reader, self._record, self._scores = data, reader, record, scores
        self._rows, self._judgement = rows, judgement
        self.is_judged = judgement is not None and judgement.right > unseen

    def all(self) -> list[Finding]:
        scores, ranked = self._scores, self._scores.ranked
        if scores.margin is None:
            losses = scores.loss[ranked]
            if not len(losses):
                return []
            low, high = np.quantile(losses, [0.25, 0.75])
            hard = ranked[losses > high + _SPREADS * (high - low)]
            return self._finding("high loss", "a mean loss far above that of most rows", hard, scores.loss)
        assert scores.label is not None
        assert scores.forgotten is not None
        wrong = ranked[scores.margin[ranked] < 0]
        if self._judgement is not None and self.is_judged:
            return [*self._judged(self._judgement, wrong), *self._forgotten(scores)]
        details = None
        if scores.probabilities is not None:
            issues: NDArray[np.bool_] = np.zeros(len(scores.number), bool)
            issues[ranked] = confident_issues(scores.probabilities[ranked], scores.label[ranked])
            details = ["also by confident learning" if issues[row] else "" for row in wrong]
        meaning = "the area under the margin is negative: over the epochs, the model believes another label"
        return [
            *self._finding("probably mislabelled", meaning, wrong, scores.margin, details),
            *self._forgotten(scores),
        ]

    def _forgotten(self, scores: RowScores) -> list[Finding]:
        assert scores.forgotten is not None
        assert scores.margin is not None
        forgotten = np.flatnonzero(scores.forgotten >= _FORGOTTEN)
        forgotten = forgotten[np.argsort(-scores.forgotten[forgotten], kind="stable")]
        return self._finding(
            "forgotten",
            f"right and then wrong at least {_FORGOTTEN} times",
            forgotten,
            scores.margin,
            [f"{count} times" for count in scores.forgotten[forgotten]],
        )

    def _judged(self, found: Judgement, wrong: Rows) -> list[Finding]:
        """Return the rows that are wrong by the judge; `wrong` are those of the run."""
        rows, by_run = found.suspects, {*self._numbers(wrong).tolist()}
        first = rows[:MOST_DESCRIBED]
        shown = [
            FoundRow(
                "training",
                row,
                ", ".join(filter(None, (found.shown(row), "also by the run" if row in by_run else ""))),
                self._class(found.label, row),
                self._class(found.believed, row),
                float(found.margin[row]),
                shortened(text.text),
                digest,
            )
            for row, (text, digest) in zip(first.tolist(), self._texts(first, first), strict=True)
        ]
        meaning = "a model of n-grams that did not learn from the row believes another label"
        return [Finding("probably mislabelled", "training", meaning, len(rows), shown)] if shown else []

    def _numbers(self, rows: Rows) -> Rows:
        """Return the row of the source of each encoded row."""
        source = self._data.task.preview.source_rows(self._data.train)
        return rows if source is None else np.asarray(source)[rows]

    def _finding(
        self, name: str, meaning: str, rows: Rows, scores: NDArray[np.float64], details: Sequence[str] | None = None
    ) -> list[Finding]:
        if not len(rows):
            return []
        numbers = self._numbers(rows)
        # The worst window stands for a row.
        first = np.sort(np.unique(numbers, return_index=True)[1])[:MOST_DESCRIBED]
        described = self._texts(rows[first], numbers[first])
        found = [
            FoundRow(
                "training",
                int(numbers[place]),
                details[place] if details is not None else self._word(int(rows[place])),
                self._class(self._scores.label, rows[place]) or shortened(text.label),
                self._class(self._scores.believed, rows[place]),
                float(scores[rows[place]]),
                shortened(text.text),
                digest,
            )
            for place, (text, digest) in zip(first.tolist(), described, strict=True)
        ]
        return [Finding(name, "training", meaning, len(np.unique(numbers)), found)]

    def _texts(self, rows: Rows, numbers: Rows) -> list[tuple[RowText, str]]:
        """Return text and digest of each row; packed rows have their tokens as text."""
        source = self._rows
        data, tokenizer = self._data, self._data.preparation.text_tokenizer
        total = len(source)
        if data.task.preview.source_rows(data.train) is None and len(data.train) != total:
            found = []
            for row in rows.tolist():
                start, end = data.train.offsets[row * data.train.texts_per_row : row * data.train.texts_per_row + 2]
                ids = data.train.tokens["input_ids"][start : min(end, start + 100)].tolist()
                found.append((RowText(str(tokenizer.decode(ids)) if tokenizer else "", ""), ""))
            return found
        texts = [row for batch in self._reader.batches(source, numbers.tolist()) for row in batch]
        kept = source.select(numbers.tolist())
        digests = [row_digest(row) for row in kept.select_columns(plain_columns(kept))]
        return list(zip(texts or [RowText("", "")] * len(digests), digests, strict=True))

    def _class(self, classes: Rows | None, row: int) -> str:
        if classes is None or classes[row] < 0:
            return ""
        names, number = self._record.classes, int(classes[row])
        return names[number] if number < len(names) else str(number)

    def _word(self, row: int) -> str:
        """Return the word with the smallest margin."""
        positions, tokenizer = self._scores.position, self._data.preparation.text_tokenizer
        if positions is None or tokenizer is None or positions[row] < 0:
            return ""
        split = self._data.train
        start, end = (int(offset) for offset in split.offsets[row : row + 2])
        labels = split.tokens["labels"][start:end]
        first = int(positions[row])
        last = first + 1
        # The tokens of a word after its first one have no label; neither have special tokens.
        special = set(tokenizer.all_special_ids)
        ids = split.tokens["input_ids"][start:end].tolist()
        while last < len(ids) and labels[last] == IGNORED_LABEL and ids[last] not in special:
            last += 1
        return f"word {str(tokenizer.decode(ids[first:last])).strip()!r}"
