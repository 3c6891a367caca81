"""The columns of rerankers, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_QUERIES = ("query", "question")
_DOCUMENTS = ("document", "passage", "documents", "passages")
_LABELS = ("labels", "label", "relevance", "scores")


def of_lists(columns: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` of rows with a query and a list of documents, and the reason for it."""
    query, documents = columns.get(("text",), *_QUERIES), columns.get(("texts",), *_DOCUMENTS)
    if query is None or documents is None:
        return
    label = columns.get(("numbers",), *_LABELS)
    keys = {"query": query.name, "documents": documents.name} | ({"label": label.name} if label else {})
    yield {"type": "reranker", **keys}, f"a query and its documents in `{documents.name}`"


def of_rows(columns: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` of rows with a query, one of its documents and its relevance, and the reason for it."""
    query, document = columns.get(("text",), *_QUERIES), columns.get(("text",), *_DOCUMENTS)
    if query is None or document is None or len(query.distinct) == len(query.values):
        return
    scores = [one for one in columns.labels([query.name, document.name]) if one.kind in ("integer", "number")]
    if scores and scores[0].mapped is None:
        keys = {"query": query.name, "documents": document.name, "label": scores[0].name}
        yield {"type": "reranker", **keys}, f"documents of each query, with their relevance in `{keys['label']}`"
