"""`trainer audit RECIPE`: rows of the splits that are repeated, damaged, cut or of no use, before a run.

Texts are read some at a time. A million rows keep some numbers each: hashes, lengths and the bands of MinHashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.base.distribution import install_command
from trainer.data.hashing import row_digest
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.schema import Recipe
from trainer.tasks.task import TextTask
from trainer.tools.audit import near_duplicates
from trainer.tools.audit.characters import damage, script
from trainer.tools.audit.findings import AuditResult, Finding, FoundRow
from trainer.tools.audit.row_texts import RowText, TextReader, shortened
from trainer.training.row_source import row_source
from trainer.training.run_data import PreparedData, prepare_data, read_splits

MOST_DESCRIBED = 100_000
"""Rows of a finding that are described; further ones are counted."""
_UNUSUAL_SHARE = 0.01  # of the rows with letters, for a script
_FENCE = 3.0  # interquartile ranges of the logarithms of lengths beyond the quartiles
_LEAST_SPREAD = 0.25  # of these logarithms
_FEW = 10  # rows of a class
_SHORT = 2  # characters
_LEAST_ANSWER = 10  # characters: short answers stand in many prompts by chance
_MOST_NOTES = 2

Rows: TypeAlias = NDArray[np.int64]


@dataclass
class _Scan:
    """Facts on the rows of a split, in their order."""

    name: str
    split: Split
    reader: TextReader
    texts: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))  # hashes
    labels: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    lengths: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    scripts: NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, np.int16))
    names: list[str] = field(default_factory=list)  # of scripts
    damaged: dict[int, str] = field(default_factory=dict)
    answered: list[int] = field(default_factory=list)  # rows with their answer in the prompt
    classes: Counter[str] = field(default_factory=Counter)

    def read(self, numbers: Sequence[int]) -> list[RowText]:
        return [row for batch in self.reader.batches(self.split.rows, numbers) for row in batch]

    def run(self) -> None:
        """Read all rows once."""
        parts: list[tuple[Any, ...]] = []
        places: dict[str, int] = {}
        start, label = 0, self.reader.label
        # Tags of words are lists, and no classes of rows.
        has_class = label is not None and not hasattr(self.split.rows.features[label], "feature")
        for batch in self.reader.batches(self.split.rows):
            found = [script(row.text[:2000]) for row in batch]
            codes = [places.setdefault(name, len(places)) for name in found]
            parts.append(
                (
                    np.array([_hash(row.text) for row in batch], np.uint64),
                    np.array([_hash(row.label) for row in batch], np.uint64),
                    np.array([len(row.text.strip()) for row in batch], np.int64),
                    np.array(codes, np.int16),
                )
            )
            for place, row in enumerate(batch):
                if problem := damage(row.text):
                    self.damaged[start + place] = problem
                answer = row.answer.strip()
                if len(answer) >= _LEAST_ANSWER and answer in row.prompt:
                    self.answered.append(start + place)
                if has_class and row.label and len(self.classes) <= _FEW * 1000:
                    self.classes[row.label] += 1
            start += len(batch)
        if parts:
            self.texts, self.labels, self.lengths, self.scripts = map(np.concatenate, zip(*parts, strict=True))
        self.names = list(places)

    def bands(self, rows: Rows) -> Iterator[NDArray[np.uint64]]:
        for batch in self.reader.batches(self.split.rows, rows.tolist()):
            yield near_duplicates.bands(row.text for row in batch)


def audit_data(recipe: Recipe) -> AuditResult:
    """Audit the training and the validation split of a recipe.

    Raises:
        TrainerError: the data cannot be read or prepared.
    """
    data = prepare_data(recipe)
    splits = read_splits(recipe, data.task, None, None, row_source(recipe))
    scans = []
    for name, split in (("training", splits.train), ("validation", splits.validation)):
        if split is not None:
            scans.append(_Scan(name, split, TextReader.of(recipe, data.task, split.rows.column_names)))
            scans[-1].run()
    notes = list(data.data_notes)
    has_texts = bool(scans[0].reader.columns) and bool(scans[0].lengths.any())
    findings = [*_repeated(scans, notes)] if has_texts else []
    for scan in scans:
        findings += [*_of_split(scan, data, recipe)]
    # The most notable first, as they stand in this table.
    findings.sort(key=lambda one: (_ORDER.index(one.name), one.split))
    if not has_texts:
        notes.insert(0, "the rows hold no texts, so only their labels were looked at")
    if len(notes) > _MOST_NOTES:
        rest = len(notes) - _MOST_NOTES
        notes = [*notes[:_MOST_NOTES], f"{rest} further notes: trainer preview RECIPE shows them"]
    sizes = {scan.name: len(scan.split.rows) for scan in scans}
    return AuditResult(recipe.name, sizes, findings, [*_facts(data, scans[0])], notes)


_MEANINGS = {
    "no label left": "truncation leaves no trained token, so the row teaches nothing; raise `data.max_length`",
    "in validation": "the text of a validation row, so metrics do not show new rows",
    "near validation": "nearly the text of a validation row",
    "other label": "the same text with another label",
    "answer in prompt": "the prompt holds the answer word for word",
    "exact duplicate": "the text and the label of an earlier row",
    "near duplicate": "nearly the text of an earlier row",
    "damaged text": "characters that were lost or decoded wrongly",
    "unusual script": f"a script that less than {_UNUSUAL_SHARE:.0%} of the rows have",
    "truncated": "longer than `data.max_length`, so its end is not read",
    "very short": "an empty text, or one that is far shorter than most",
    "very long": "a text that is far longer than most",
    "rare class": f"a class with fewer than {_FEW} training rows",
}
_ORDER = list(_MEANINGS)


def _finding(
    name: str,
    scan: _Scan,
    rows: Sequence[int] | Rows,
    details: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
) -> Iterator[Finding]:
    """Yield the finding of some rows, if there are any."""
    if not len(rows):
        return
    first = [int(row) for row in rows[:MOST_DESCRIBED]]
    texts = scan.read(first) or [RowText("", "")] * len(first)
    kept = scan.split.rows.select(first)
    digests = map(row_digest, kept.select_columns(plain_columns(kept)))
    described = [
        FoundRow(
            scan.name,
            row,
            details[place] if details is not None else "",
            shortened(text.label),
            score=None if scores is None else scores[place],
            text=shortened(text.text),
            digest=digest,
        )
        for place, (row, text, digest) in enumerate(zip(first, texts, digests, strict=True))
    ]
    yield Finding(name, scan.name, _MEANINGS[name], len(rows), described)


def plain_columns(rows: Any) -> list[str]:
    """Return the columns that a digest of rows reads; images would be decoded."""
    return [name for name, kind in rows.features.items() if type(kind).__name__ not in ("Image", "Audio", "Video")]


def _repeated(scans: Sequence[_Scan], notes: list[str]) -> Iterator[Finding]:
    """Yield the rows that repeat others, exactly or nearly, in a split or in both."""
    train = scans[0]
    for scan in scans:
        order = np.lexsort((np.arange(len(scan.texts)), scan.texts))
        ordered = scan.texts[order]
        first = order[np.searchsorted(ordered, scan.texts)]  # of each text: its earliest row
        has_label = scan.reader.label is not None
        differs = scan.labels != scan.labels[first]
        repeated = first != np.arange(len(first))
        if has_label:
            # All rows of a text with several labels, with the first row of another label.
            torn = np.flatnonzero(np.isin(scan.texts, scan.texts[differs]))
            yield from _finding(
                "other label",
                scan,
                torn,
                [f"as row {first[row] + 1}" if first[row] != row else "" for row in torn[:MOST_DESCRIBED]],
            )
        same = np.flatnonzero(repeated & ~differs)
        yield from _finding(
            "exact duplicate", scan, same, [f"of row {first[row] + 1}" for row in same[:MOST_DESCRIBED]]
        )
    if len(scans) > 1:
        other = scans[1]
        order = np.argsort(other.texts, kind="stable")
        ordered = other.texts[order]
        places = np.minimum(np.searchsorted(ordered, train.texts), len(ordered) - 1)
        known = np.flatnonzero(ordered[places] == train.texts)
        details = [f"validation row {order[places[row]] + 1}" for row in known[:MOST_DESCRIBED]]
        yield from _finding("in validation", train, known, details)
    if not near_duplicates.is_installed():
        notes.insert(0, f"near duplicates were not looked for; install datasketch ({install_command('audit')})")
        return
    yield from _nearly(scans)


def _nearly(scans: Sequence[_Scan]) -> Iterator[Finding]:
    """Yield the rows that are nearly the same as earlier ones; each text counts once."""
    texts = np.concatenate([scan.texts for scan in scans])
    chosen = np.sort(np.unique(texts, return_index=True)[1])
    size = len(scans[0].texts)
    own = [chosen[chosen < size], chosen[chosen >= size] - size]
    bands = [part for scan, rows in zip(scans, own, strict=False) for part in scan.bands(rows)]

    def texts_of(numbers: Sequence[int]) -> list[str]:
        rows = chosen[np.asarray(numbers, np.int64)]
        split = np.searchsorted(rows, size)
        found = scans[0].read(rows[:split].tolist())
        return [
            row.text for row in found + (scans[1].read((rows[split:] - size).tolist()) if split < len(rows) else [])
        ]

    pairs, indices = near_duplicates.near(near_duplicates.candidates(np.concatenate(bands)), texts_of)
    first, second = chosen[pairs[:, 0]], chosen[pairs[:, 1]]
    of_both = (first < size) & (second >= size)
    kinds = [
        ("near validation", scans[0], of_both, first, second - size, "validation row"),
        ("near duplicate", scans[0], second < size, second, first, "row"),
        ("near duplicate", scans[-1], first >= size, second - size, first - size, "row"),
    ]
    for name, scan, where, rows, others, word in kinds[: 3 if len(scans) > 1 else 2]:
        found, places = np.unique(rows[where], return_index=True)
        near, index = others[where][places], indices[where][places]
        details = [f"{share:.2f} of {word} {other + 1}" for share, other in zip(index, near, strict=True)]
        yield from _finding(name, scan, found, details, index.tolist())


def _of_split(scan: _Scan, data: PreparedData, recipe: Recipe) -> Iterator[Finding]:
    """Yield the findings on single rows of a split."""
    yield from _finding("answer in prompt", scan, scan.answered)
    damaged = list(scan.damaged)
    yield from _finding("damaged text", scan, damaged, [scan.damaged[row] for row in damaged])
    if len(scan.lengths) and scan.reader.columns:
        yield from _unusual_scripts(scan)
        low, high = fences(scan.lengths)
        short = np.flatnonzero((scan.lengths < low) | (scan.lengths < _SHORT))
        yield from _finding("very short", scan, short, [f"{scan.lengths[row]} characters" for row in short])
        long = np.flatnonzero(scan.lengths > high)
        long = long[np.argsort(-scan.lengths[long], kind="stable")]
        yield from _finding("very long", scan, long, [f"{scan.lengths[row]:,} characters" for row in long])
    if scan.name == "training" and data.task.class_names and scan.classes:
        few = [name for name, number in scan.classes.items() if number < _FEW]
        hashes = np.array([_hash(name) for name in few], np.uint64)
        if len(few) > 0 and len(few) < len(scan.classes):
            rare = np.flatnonzero(np.isin(scan.labels, hashes))
            yield from _finding("rare class", scan, rare)
    encoded = data.splits.get(scan.name)
    if encoded is not None:
        yield from _lost(scan, encoded, data, recipe)


def fences(lengths: Rows) -> tuple[float, float]:
    """Return the shortest and the longest usual length: three interquartile ranges of logarithms from the quartiles."""
    logarithms = np.log(np.maximum(lengths, 1))
    low, high = np.quantile(logarithms, [0.25, 0.75])
    spread = max(_LEAST_SPREAD, high - low)
    return float(np.exp(low - _FENCE * spread)), float(np.exp(high + _FENCE * spread))


def _unusual_scripts(scan: _Scan) -> Iterator[Finding]:
    counts = np.bincount(scan.scripts, minlength=len(scan.names))
    written = sum(int(number) for name, number in zip(scan.names, counts, strict=True) if name)
    rare = [code for code, name in enumerate(scan.names) if name and counts[code] < _UNUSUAL_SHARE * written]
    rows = np.flatnonzero(np.isin(scan.scripts, rare))
    yield from _finding("unusual script", scan, rows, [scan.names[scan.scripts[row]].lower() for row in rows])


def _lost(scan: _Scan, encoded: EncodedSplit, data: PreparedData, recipe: Recipe) -> Iterator[Finding]:
    """Yield the rows that are truncated, and those without a trained token."""
    sources = data.task.preview.source_rows(encoded)
    is_same = sources is None and len(encoded) == len(scan.split.rows)
    if not encoded.tokens or not (is_same or sources is not None):
        return  # packed rows are no rows of the source
    of_rows = np.arange(len(encoded)) if sources is None else np.asarray(sources)
    column = encoded.ragged.get("labels")
    labels = encoded.tokens.get("labels") if column is None else column.values
    if labels is not None and encoded.texts_per_row == 1:
        offsets = encoded.offsets if column is None else column.offsets
        trained: NDArray[np.bool_] = np.zeros(len(scan.split.rows), bool)
        # Windows of a row together, some rows at a time.
        for start in range(0, len(encoded), 10_000):
            part = offsets[start : start + 10_001]
            counts = np.concatenate([[0], np.cumsum(labels[part[0] : part[-1]] != IGNORED_LABEL)])
            trained[of_rows[start : start + len(part) - 1][np.diff(counts[part - part[0]]) > 0]] = True
        yield from _finding("no label left", scan, np.flatnonzero(~trained))
    if encoded.num_cut and is_same and isinstance(data.task, TextTask):
        longest = np.flatnonzero(encoded.lengths >= encoded.lengths.max())
        yield from _finding("truncated", scan, longest[_is_cut(scan, longest, data, recipe)])


def _is_cut(scan: _Scan, rows: Rows, data: PreparedData, recipe: Recipe) -> NDArray[np.bool_]:
    """Return which rows are longer than the maximum length: those that are exactly as long are whole."""
    task, tokenizer = data.task, data.preparation.text_tokenizer
    assert isinstance(task, TextTask)
    if tokenizer is None:
        return np.ones(len(rows), bool)
    found: list[bool] = []
    for start in range(0, len(rows), 1000):
        part = scan.split.rows.select(rows[start : start + 1000])
        cut = task.encode(part, tokenizer, recipe.data.max_length, scan.split.where, 0).get("cut")
        found += map(bool, cut if cut is not None else [True] * len(part))
    return np.array(found, bool)


def _facts(data: PreparedData, scan: _Scan) -> Iterator[str]:
    """Yield lines on classes, and on the turns of chats that are trained."""
    if scan.classes and data.task.class_names and len(scan.classes) > 1:
        ordered = scan.classes.most_common()
        (most, many), (least, few) = ordered[0], ordered[-1]
        yield f"classes   {len(ordered)}: {shortened(most, 30)} {many:,} rows to {shortened(least, 30)} {few:,}"
    labels = data.train.tokens.get("labels")
    if data.task.labels_are_tokens and labels is not None and len(labels):
        trained = np.asarray(labels[:20_000_000]) != IGNORED_LABEL
        yield f"trained   {trained.mean():.1%} of the tokens{_turns(data, scan, trained)}"


def _turns(data: PreparedData, scan: _Scan, trained: NDArray[np.bool_]) -> str:
    """Return the number of turns of each role in the first chats, and of the parts that are trained."""
    features = scan.split.rows.features
    column = next(
        (name for name in scan.reader.columns if type(features[name]).__name__ in ("List", "Json", "LargeList")), None
    )
    if column is None:
        return ""
    roles: Counter[str] = Counter()
    for chat in scan.split.rows.select(range(min(len(scan.split.rows), 10_000)))[column]:
        roles.update(str(turn.get("role", "?")) for turn in chat or [] if isinstance(turn, dict))
    number = int(np.count_nonzero(np.diff(trained.astype(np.int8), prepend=0) > 0))
    counts = ", ".join(f"{role} {count:,}" for role, count in roles.most_common(4))
    return f", in {number:,} parts; turns: {counts}" if roles else ""


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
