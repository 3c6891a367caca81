"""The section `task` of rerankers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash, repeated
from trainer.recipe.schema.task_keys import TaskKeys


class Reranker(TaskKeys):
    """Score pairs of a query and a document by a cross-encoder, so that documents can be ranked."""

    implementation = "trainer.features.rerankers.reranker:RerankerTask"
    folder_reader = "trainer.features.rerankers.folder:read_folder"
    type: Literal["reranker"]
    pipelines = ("text_ranking",)
    also_called = ("cross_encoder",)
    query: Name = "query"
    """Column of queries."""
    documents: Name | Annotated[list[Name], Field(min_length=2)] = "documents"
    """Column of one document or of a list; or several columns: the right document, then wrong ones."""
    label: Name | None = None
    """Column of the relevance of each document; null: the first one of a row is right."""
    loss: Literal["binary_cross_entropy", "cross_entropy", "list_net", "lambda"] = "binary_cross_entropy"
    """binary_cross_entropy: of each pair; cross_entropy: find the right document of the row; list_net: cross entropy of
    the softmax of labels and scores; lambda: LambdaLoss with NDCG-Loss2++."""
    positive_weight: float = Field(1.0, gt=0)
    """Weight of right documents in `binary_cross_entropy`."""
    scale: Annotated[float, Field(gt=0)] | None = None
    """For `cross_entropy`: the logits are the sigmoid of the scores times this; null: the scores."""
    activation: Literal["sigmoid", "identity"] | None = None
    """Function of predicted scores; null: that of the model's folder, else sigmoid."""
    metrics: list[Literal["ndcg_at_5", "ndcg_at_10", "mrr_at_5", "mrr_at_10", "map"]] = Field(
        default=["ndcg_at_10", "mrr_at_10", "map"], min_length=1
    )
    """Means over distinct queries: nDCG of the first 5 or 10 documents, 1 / rank of the first relevant one among these,
    average precision."""

    @property
    def texts_per_row(self) -> int | None:
        if isinstance(self.documents, list):
            return len(self.documents)
        return None if self.label is not None and self.loss == "binary_cross_entropy" else 4

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        documents = [self.documents] if isinstance(self.documents, str) else self.documents
        yield from repeated("task.documents", [self.query, *documents, *([self.label] if self.label else [])])
        if self.label is not None and len(documents) > 1:
            text = "is set, but `task.documents` names several columns, and the first one is right; remove it"
            yield clash(text, "task.label", "task.documents")
        for key, loss in (("positive_weight", "binary_cross_entropy"), ("scale", "cross_entropy")):
            if self.loss != loss and self.changed(key):
                text = f"applies to the loss {loss}, but `task.loss` is {self.loss}; remove it"
                yield clash(text, f"task.{key}", "task.loss")
