"""The training of a tokenizer, the folder that it writes, and the report on it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.base.digests import file_digest
from trainer.base.disk import numbered_errors, replace_folder
from trainer.base.distribution import installed
from trainer.base.errors import DataError, UsageError, storage_error
from trainer.base.text import size as shown_size
from trainer.tools.tokenizer.families import CONTINUED, FAMILIES, USUAL_FAMILIES, TokenizerShape
from trainer.tools.tokenizer.texts import Texts, places_of, shares

REPORT = "report.json"
_BYTES = 256
_MOST = 10_000_000  # a trainer reserves memory for all tokens that it may make


@dataclass(frozen=True)
class TokenizerRequest:
    """The arguments of `trainer tokenizer`.

    Attributes:
        kind, family: None: the one that the other usually has; both None: WordPiece and BERT.
        size: the number of tokens, with the special ones.
        min_frequency: the fewest times that texts have a pair of pieces before it is joined.
    """

    data: Sequence[str]
    output: Path
    kind: str | None = None
    family: str | None = None
    size: int = 32_000
    text: str | None = None
    min_frequency: int = 2
    lowercase: bool | None = None
    max_length: int | None = None

    @property
    def shape(self) -> TokenizerShape:
        family = self.family or USUAL_FAMILIES[self.kind or "wordpiece"]
        return TokenizerShape(family, self.kind or FAMILIES[family].kind, self.lowercase, self.max_length)


def train_tokenizer(request: TokenizerRequest, texts: Texts | None = None) -> dict[str, Any]:
    """Train a tokenizer, write its folder, and return the report on it.

    `texts` are those of `request.data` by default. Texts are read one after the other; memory holds the distinct words.

    Raises:
        DataError: the data have no text, or cannot be read.
        UsageError: the output exists, a number is too large, or the size does not hold the alphabet of the texts.
    """
    output, shape = request.output, request.shape
    _require_new(output)
    for key, number in (("--size", request.size), ("--min-frequency", request.min_frequency)):
        if number > _MOST:
            raise UsageError(f"`{key}` must be at most {_MOST:,}, but is {number:,}; lower it")
    if shape.kind != "bpe" and shape.unknown in (None, shape.family.tokens.get("eos_token")):
        raise UsageError(
            f"`--kind` {shape.kind} needs a token for unknown characters, but `--family` {shape.family_name} has none;"
            " use bpe, or another family"
        )
    special = len(shape.family.special) + shape.family.sentinels
    _require_size(request, special + (_BYTES if shape.kind == "bpe" else 1))
    texts, started = texts or Texts(places_of(request.data), request.text), time.perf_counter()
    tokenizer = shape.finished(_trained(request, shape, texts))
    seconds = time.perf_counter() - started
    if len(tokenizer) > request.size:
        _require_size(request, len(tokenizer))
    measured = texts.held_out or texts.first
    report = {
        "kind": shape.kind,
        "family": shape.family_name,
        "class": type(tokenizer).__name__,
        "lowercase": shape.is_lowercase,
        "min_frequency": request.min_frequency,
        "asked_size": request.size,
        "size": len(tokenizer),
        "files": list(texts.places),
        "column": texts.column,
        "rows": texts.num_rows,
        "bytes": texts.num_bytes,
        "seconds": round(seconds, 1),
        "held_out": bool(texts.held_out),
        "measured": shares(measured, tokenizer),
        "versions": {name: installed(name) for name in ("tokenizers", "transformers")},
    }
    return _written(tokenizer, report, output)


def lines(report: dict[str, Any], output: Path) -> list[str]:
    """Return a report for the terminal."""
    found = report["measured"]
    which = "held-out" if report["held_out"] else "trained"
    shown = [
        f"tokenizer {report['kind']} of {report['size']:,} tokens for {report['family']} ({report['class']})"
        + ", lower case" * report["lowercase"],
        f"texts     {report['rows']:,} of {shown_size(report['bytes'])}, trained in {report['seconds']:,.1f} s",
        f"fertility {found['fertility']:.2f} tokens a word, {found['bytes_per_token']:.2f} bytes a token,"
        f" {found['unknown_share']:.2%} unknown, on {found['rows']:,} {which} texts",
    ]
    if report["size"] < report["asked_size"]:
        shown.append(
            f"note      {report['asked_size']:,} tokens were asked for, but the texts have only {report['size']:,} that"
            f" occur {report['min_frequency']} times; add texts, or lower --size or --min-frequency"
        )
    return [*shown, f"wrote     {output}, with {REPORT}"]


def _trained(request: TokenizerRequest, shape: TokenizerShape, texts: Texts) -> Tokenizer:
    further: list[str] = []
    if shape.kind == "wordpiece":
        # The trainer numbers pieces inside of words in the order of a hash table, which decides between equal counts.
        # A pass that joins nothing finds them, and they get sorted ids.
        alphabet = _fitted(request, shape, texts, shape.trainer(1, request.min_frequency)).get_vocab()
        further = sorted(piece for piece in alphabet if piece.startswith(CONTINUED))
        _require_size(request, len(alphabet))
    return _fitted(request, shape, texts, shape.trainer(request.size, request.min_frequency, further))


def _fitted(request: TokenizerRequest, shape: TokenizerShape, texts: Texts, trainer: Any) -> Tokenizer:
    tokenizer = shape.blank()
    try:
        tokenizer.train_from_iterator(iter(texts), trainer)
    except BaseException as error:
        # Of the package tokenizers, which raises errors of these two types only.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        if not texts.num_rows:
            raise _no_text(request) from error
        raise UsageError(
            f"`--size` is {request.size:,}, and the trainer of {shape.kind} refuses it for these texts: {error};"
            " raise it, or add texts"
        ) from error
    if not texts.num_rows:
        raise _no_text(request)
    return tokenizer


def _require_new(output: Path) -> None:
    if os.path.lexists(output):
        raise UsageError(f"`OUT` must name a new folder, but {output} exists; name another, or remove it")


def _no_text(request: TokenizerRequest) -> DataError:
    return DataError(f"`DATA` must hold a text, but {', '.join(request.data)} has none; name other files")


def _require_size(request: TokenizerRequest, least: int) -> None:
    if request.size < least:
        raise UsageError(
            f"`--size` must hold the {least:,} special tokens and characters, but is {request.size:,}; raise it, or use"
            " --kind bpe, which has 256 bytes"
        )


def _written(tokenizer: Any, report: dict[str, Any], output: Path) -> dict[str, Any]:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
            new = Path(folder) / output.name
            # The package tokenizers raises no `OSError` for a full disk.
            with numbered_errors():
                tokenizer.save_pretrained(new)
            report["sha256"] = file_digest(new / "tokenizer.json")
            (new / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            _require_new(output)  # another process may have written it since the start
            replace_folder(new, output)
    except OSError as error:
        raise storage_error(
            f"`OUT` {output} cannot be written: {error.strerror}; make room, or name another folder", error
        ) from error
    return report
