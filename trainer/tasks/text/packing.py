"""Packing of documents into rows of one length, in the order of the documents and without a look at later ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainer.tasks.types import Encoded


class Packer(Protocol):
    """Packs the documents of successive batches into rows; a row may hold documents of several batches."""

    def add(self, documents: Mapping[str, list[Any]]) -> Encoded:
        """Return the rows that the documents, in the form that `TextTask.encode` returns, complete."""
        ...

    def finish(self) -> Encoded:
        """Return the last row, which may be shorter; no row if there are no documents."""
        ...


class StreamPacker:
    """Packs documents as one stream of tokens; each row predicts the first token of the next row too."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._tokens: list[int] = []

    def add(self, documents: Mapping[str, list[Any]]) -> Encoded:
        for ids in documents["input_ids"]:
            self._tokens.extend(ids)
        # Rows overlap by one token, which is the last label of one row and the first input of the next.
        last = max(0, len(self._tokens) - 1) // self._length * self._length
        rows = [self._row(start) for start in range(0, last, self._length)]
        del self._tokens[:last]
        return _features(rows)

    def finish(self) -> Encoded:
        # A token alone is the last label of the row before, and has no label of its own.
        rows = [self._row(0)] if len(self._tokens) > 1 else []
        self._tokens = []
        return _features(rows)

    def _row(self, start: int) -> dict[str, Any]:
        tokens = self._tokens[start : start + self._length + 1]
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class DocumentPacker:
    """Packs documents side by side; `position_ids` start from 0 in each document, and in each part of a document.

    Args:
        splits: whether a document that does not fit continues in the next row; otherwise it starts there.
    """

    def __init__(self, length: int, splits: bool) -> None:
        self._length = length
        self._splits = splits
        self._row = self._empty()

    def add(self, documents: Mapping[str, list[Any]]) -> Encoded:
        rows: list[dict[str, Any]] = []
        cut = documents.get("cut") or [False] * len(documents["input_ids"])
        for ids, labels, is_cut in zip(documents["input_ids"], documents["labels"], cut, strict=True):
            start = 0
            while start < len(ids):
                space = self._length - len(self._row["input_ids"])
                # A document that may not be split fits into an empty row: it was truncated to the length before.
                if space == 0 or (not self._splits and space < len(ids)):
                    rows.append(self._row)
                    self._row, space = self._empty(), self._length
                part = ids[start : start + space]
                self._row["input_ids"] += part
                self._row["labels"] += labels[start : start + space]
                # A position of 0 marks the start of a document; attention stays inside of it.
                self._row["position_ids"] += range(len(part))
                self._row["cut"] |= is_cut
                start += len(part)
        return _features(rows)

    def finish(self) -> Encoded:
        rows = [self._row] if self._row["input_ids"] else []
        self._row = self._empty()
        return _features(rows)

    @staticmethod
    def _empty() -> dict[str, Any]:
        return {"input_ids": [], "labels": [], "position_ids": [], "cut": False}


def _features(rows: list[dict[str, Any]]) -> Encoded:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {"input_ids": []}
