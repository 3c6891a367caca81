"""The reader of CoNLL files: a word and its tag on each line, and an empty line behind each sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer.base.errors import DataError
from trainer.data.formats.base import Files, Loaded, Reader, Row, TextOptions, open_text


class ConllReader(Reader):
    """CoNLL: a row for each sentence."""

    def load(self, files: Files) -> Loaded:
        import datasets

        rows = [row for path in files.paths for row in _rows(path, files.text.encoding, f"`{path}`")]
        return (datasets.Dataset.from_list(rows) if rows else None), []

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        return _rows(path, text.encoding, where)


def _rows(path: Path, encoding: str, where: str) -> Iterator[Row]:
    with open_text(path, encoding) as file:
        yield from _conll_rows(file, where)


def _conll_rows(lines: Iterable[str], where: str) -> Iterator[dict[str, list[str]]]:
    """Yield a row for each sentence: `words` from the first column and, if there are several, `tags` from the last.

    Tabs separate the columns of a line with a tab, and spaces those of other lines. Lines that begin with `-DOCSTART-`
    are left out.

    Raises:
        DataError: lines differ in their number of columns, or a word or a tag is empty.
    """
    sentence: list[list[str]] = []
    width = first = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            if sentence:
                yield _row(sentence)
            sentence = []
            continue
        # CoNLL 2003 marks the start of a document by such a line, which is no sentence.
        if line.startswith("-DOCSTART-"):
            continue
        text = line.rstrip("\r\n")
        columns = [column.strip() for column in text.split("\t")] if "\t" in text else text.split()
        if not width:
            width, first = len(columns), number
        if len(columns) != width:
            raise DataError(
                f"line {number} of {where} must have {width} columns, as line {first} has, but has {len(columns)}:"
                f" {text!r}; correct or remove it"
            )
        if not columns[0] or not columns[-1]:
            raise DataError(f"line {number} of {where} must have a word and a tag, but one is empty: {text!r}")
        sentence.append(columns)
    if sentence:
        yield _row(sentence)


def _row(sentence: list[list[str]]) -> dict[str, list[str]]:
    words = {"words": [columns[0] for columns in sentence]}
    return words | ({"tags": [columns[-1] for columns in sentence]} if len(sentence[0]) > 1 else {})
