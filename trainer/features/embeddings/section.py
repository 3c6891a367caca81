"""The section `task` of embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.features.embeddings.names import HIGHEST_SCALE
from trainer.recipe.paths import shown_value
from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash, repeated
from trainer.recipe.schema.task_keys import Start, TaskKeys, Traits


class Embedding(TaskKeys):
    """Embed texts, so that similar texts have a high cosine similarity."""

    implementation = "trainer.features.embeddings.embedding:EmbeddingTask"
    folder_reader = "trainer.features.embeddings.folder:read_folder"
    type: Literal["embedding"]
    traits = Traits(streams=True)
    start = Start(model="sentence-transformers/all-MiniLM-L6-v2")
    also_called = ("sentence_similarity", "feature_extraction", "sentence_transformer", "retrieval")
    texts: Annotated[list[Name], Field(min_length=2)]
    """Columns of the texts: anchor, positive, and perhaps hard negatives."""
    score: Name | None = None
    """Column of the similarity of both texts, for `cosine`, `cosent` and `angle`."""
    pooling: Literal["mean", "cls", "last", "max", "weighted_mean", "mean_sqrt_length"] | None = None
    """Embedding from the states of the tokens: weighted_mean has weights 1, 2, 3, ..., mean_sqrt_length is sum /
    sqrt(tokens). null: as the model's folder, else mean."""
    normalize: bool | None = None
    """Scale embeddings to a length of 1; null: as the model's folder, else true."""
    query_prompt: str | None = None
    """Text before each text of the first column; null: that of the model's folder."""
    document_prompt: str | None = None
    """The same for the other columns."""
    loss: Literal["multiple_negatives", "cosine", "cosent", "angle"] = "multiple_negatives"
    """multiple_negatives: find the positive among all positives and negatives of the global batch; cosine: squared
    error of cosine and score; cosent: order all pairs of rows of the global batch by score; angle: cosent with angles
    in complex space."""
    dimensions: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
    """Matryoshka embeddings: sum of the losses of these numbers of first values; each has metrics too. null: all
    values."""
    dimension_weights: list[Annotated[float, Field(gt=0)]] | None = None
    """Weight of the loss of each of `dimensions`; null: 1."""
    mask_duplicates: bool = False
    """Leave out negatives that equal the anchor, its positive, or the positive of an equal anchor."""
    temperature: float = Field(0.05, gt=0)
    """Divisor of the cosine similarities; not for the loss `cosine`."""
    learn_temperature: bool = False
    """Learn the temperature, as CLIP does: 1 / temperature is exp(s), at most 100, without weight decay."""
    metrics: list[Literal["recall_at_1", "recall_at_5", "recall_at_10", "mrr", "spearman"]] = Field(
        default=["recall_at_1", "mrr"], min_length=1
    )
    """Share of the positives among the nearest 1, 5 or 10 texts; mean reciprocal rank of the first positive; rank
    correlation of cosine and score."""

    @property
    def texts_per_row(self) -> int:
        return len(self.texts)

    @property
    def joint_loss(self) -> str | None:
        return None if self.loss == "cosine" else f"`task.loss` {self.loss}"

    @property
    def fewest_rows(self) -> int:
        has_negatives = self.loss == "multiple_negatives" and len(self.texts) > 2
        return 1 if self.loss == "cosine" or has_negatives else 2

    @property
    def has_roles(self) -> bool:
        """Whether texts are queries and documents; scored pairs have no order."""
        return self.score is None

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from repeated("task.texts", [*self.texts, *([self.score] if self.score else [])])
        yield from self._of_dimensions()
        if self.learn_temperature and self.temperature < 1 / HIGHEST_SCALE:
            text = f"must be at least {1 / HIGHEST_SCALE} to be learned, but is {self.temperature}; increase it"
            yield clash(text, "task.temperature", "task.learn_temperature")
        if self.loss == "multiple_negatives":
            yield from self._without_scores()
            return
        if self.mask_duplicates:
            yield clash(f"does not apply to `task.loss` {self.loss}; remove it", "task.mask_duplicates", "task.loss")
        if self.score is None:
            yield clash(f"is missing, but `task.loss` {self.loss} needs it; set it", "task.score", "task.loss")
        if len(self.texts) != 2:
            number = len(self.texts)
            text = f"must name two columns for `task.loss` {self.loss}, but names {number}; remove the others"
            yield clash(text, "task.texts", "task.loss")
        for metric in self.metrics:
            if metric != "spearman":
                problem = f'has "{metric}", which needs positives, but `task.loss` is {self.loss}, with scores'
                yield clash(f'{problem}; set it to ["spearman"]', "task.metrics", "task.loss")
        for key in self.changed("temperature", "learn_temperature") if self.loss == "cosine" else []:
            yield clash("does not apply to `task.loss` cosine; remove it", f"task.{key}", "task.loss")

    def _of_dimensions(self) -> Iterator[Contradiction]:
        yield from repeated("task.dimensions", self.dimensions or [])
        if self.dimension_weights is not None and len(self.dimension_weights) != len(self.dimensions or []):
            number, expected = len(self.dimension_weights), len(self.dimensions or [])
            text = f"must have one weight for each of `task.dimensions`, {expected}, but has {number}"
            yield clash(text, "task.dimension_weights", "task.dimensions")

    def _without_scores(self) -> Iterator[Contradiction]:
        if self.score is not None:
            problem = f"is {shown_value(self.score)}, but `task.loss` multiple_negatives reads no score"
            yield clash(f"{problem}; remove it, or use the loss cosent, angle or cosine", "task.score", "task.loss")
        if "spearman" in self.metrics:
            text = 'has "spearman", which needs scores, but `task.loss` is multiple_negatives; use "mrr"'
            yield clash(text, "task.metrics", "task.loss")
