"""The sections `task` of embeddings: dense, sparse, and with a vector for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.features.embeddings.names import HIGHEST_SCALE, PAIR_LOSSES, TEACHER_LOSSES
from trainer.recipe.paths import shown_value
from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash, repeated
from trainer.recipe.schema.task_keys import Start, TaskKeys, Traits


class TextTuples(TaskKeys):
    """Keys of all tasks on texts that belong together, and perhaps hard negatives."""

    traits = Traits(streams=True)
    texts: Annotated[list[Name], Field(min_length=2)]
    """Columns of the texts: anchor, positive, and perhaps hard negatives."""
    query_prompt: str | None = None
    """Text before each text of the first column; null: that of the model's folder."""
    document_prompt: str | None = None
    """The same for the other columns."""
    mask_duplicates: bool = False
    """Leave out negatives that equal the anchor, its positive, or the positive of an equal anchor."""
    teacher_temperature: float = Field(1.0, gt=0)
    """Divisor of the teacher's scores, for `kl_divergence`."""
    score: Name | None = None
    loss: str
    _joint: ClassVar[tuple[str, ...]] = ("multiple_negatives",)  # losses that compare the rows of a batch

    @property
    def texts_per_row(self) -> int:
        return len(self.texts)

    @property
    def joint_loss(self) -> str | None:
        return f"`task.loss` {self.loss}" if self.loss in self._joint else None

    @property
    def fewest_rows(self) -> int:
        return 2 if self.loss in self._joint and len(self.texts) == 2 else 1

    @property
    def has_roles(self) -> bool:
        """Whether texts are queries and documents; scored pairs have no order."""
        return self.loss not in PAIR_LOSSES

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from repeated("task.texts", [*self.texts, *([self.score] if self.score else [])])
        if self.loss == "multiple_negatives":
            if self.score is not None:
                problem = f"is {shown_value(self.score)}, but `task.loss` multiple_negatives reads no score"
                others = "cosent, angle or cosine" if "cosent" in self._joint else "margin_mse or kl_divergence"
                yield clash(f"{problem}; remove it, or use the loss {others}", "task.score", "task.loss")
        else:
            if self.mask_duplicates:
                text = f"does not apply to `task.loss` {self.loss}; remove it"
                yield clash(text, "task.mask_duplicates", "task.loss")
            if self.score is None:
                yield clash(f"is missing, but `task.loss` {self.loss} needs it; set it", "task.score", "task.loss")
        if self.loss in TEACHER_LOSSES and len(self.texts) < 3:
            text = f"must name a query and two or more documents for `task.loss` {self.loss}, but names two columns"
            yield clash(f"{text}; add one", "task.texts", "task.loss")
        if self.loss != "kl_divergence" and self.changed("teacher_temperature"):
            text = f"applies to the loss kl_divergence, but `task.loss` is {self.loss}; remove it"
            yield clash(text, "task.teacher_temperature", "task.loss")


class Embedding(TextTuples):
    """Embed texts, so that similar texts have a high cosine similarity."""

    implementation = "trainer.features.embeddings.embedding:EmbeddingTask"
    folder_reader = "trainer.features.embeddings.folder:read_folder"
    type: Literal["embedding"]
    start = Start(model="sentence-transformers/all-MiniLM-L6-v2")
    also_called = ("sentence_similarity", "feature_extraction", "sentence_transformer", "retrieval")
    score: Name | None = None
    """Column of the similarity of both texts, for `cosine`, `cosent` and `angle`; or of a list with a teacher's score
    of each document, for `margin_mse` and `kl_divergence`."""
    pooling: Literal["mean", "cls", "last", "max", "weighted_mean", "mean_sqrt_length"] | None = None
    """Embedding from the states of the tokens: weighted_mean has weights 1, 2, 3, ..., mean_sqrt_length is sum /
    sqrt(tokens). null: as the model's folder, else mean."""
    normalize: bool | None = None
    """Scale embeddings to a length of 1; null: as the model's folder, else true."""
    loss: Literal["multiple_negatives", "cosine", "cosent", "angle", "margin_mse", "kl_divergence"] = (
        "multiple_negatives"
    )
    """multiple_negatives: find the positive among all positives and negatives of the global batch; cosine: squared
    error of cosine and score; cosent: order all pairs of rows of the global batch by score; angle: cosent with angles
    in complex space; margin_mse: squared error of the differences of scores; kl_divergence: of both softmaxes."""
    dimensions: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
    """Matryoshka embeddings: sum of the losses of these numbers of first values; each has metrics too. null: all
    values."""
    dimension_weights: list[Annotated[float, Field(gt=0)]] | None = None
    """Weight of the loss of each of `dimensions`; null: 1."""
    temperature: float = Field(0.05, gt=0)
    """Divisor of the cosine similarities; not for the loss `cosine`."""
    learn_temperature: bool = False
    """Learn the temperature, as CLIP does: 1 / temperature is exp(s), at most 100, without weight decay."""
    metrics: list[Literal["recall_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg", "spearman"]] = Field(
        default=["recall_at_1", "mrr"], min_length=1
    )
    """Share of the positives among the nearest 1, 5 or 10 texts; mean reciprocal rank of the first positive; nDCG of
    the nearest 10; rank correlation of cosine and score."""
    _joint: ClassVar[tuple[str, ...]] = ("multiple_negatives", "cosent", "angle")

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from self._of_dimensions()
        if self.learn_temperature and self.temperature < 1 / HIGHEST_SCALE:
            text = f"must be at least {1 / HIGHEST_SCALE} to be learned, but is {self.temperature}; increase it"
            yield clash(text, "task.temperature", "task.learn_temperature")
        if self.loss in TEACHER_LOSSES and self.learn_temperature:
            text = f"does not apply to `task.loss` {self.loss}; set it to false"
            yield clash(text, "task.learn_temperature", "task.loss")
        if self.loss not in PAIR_LOSSES:
            if "spearman" in self.metrics:
                text = f'has "spearman", which needs scores of pairs, but `task.loss` is {self.loss}; use "mrr"'
                yield clash(text, "task.metrics", "task.loss")
            return
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


class ScoredTuples(TextTuples):
    """Keys of the tasks with vectors that no cosine compares."""

    score: Name | None = None
    """Column of a list with a teacher's score of each document, for `margin_mse` and `kl_divergence`."""
    loss: Literal["multiple_negatives", "margin_mse", "kl_divergence"] = "multiple_negatives"
    """multiple_negatives: find the positive among all positives and negatives of the global batch; margin_mse: squared
    error of the differences of scores; kl_divergence: of the softmax of a teacher's scores from that of scores."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the scores."""


class SparseEmbedding(ScoredTuples):
    """Embed texts as weights of the tokens of the vocabulary, as SPLADE does."""

    implementation = "trainer.features.embeddings.sparse:SparseTask"
    folder_reader = "trainer.features.embeddings.other_folders:read_sparse"
    type: Literal["sparse_embedding"]
    start = Start(model="distilbert/distilbert-base-uncased")
    also_called = ("splade", "sparse_encoder", "learned_sparse")
    query_flops: float = Field(5e-5, ge=0)
    """Weight of the FLOPS regulariser of queries: the sum over tokens of their squared mean weight in the batch."""
    document_flops: float = Field(3e-5, ge=0)
    """The same for documents."""
    flops_warmup: int = Field(0, ge=0)
    """Steps in which both weights grow from 0."""
    flops_growth: Literal["quadratic", "linear"] = "quadratic"
    """Growth of both weights over these steps."""
    metrics: list[Literal["recall_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg"]] = Field(
        default=["recall_at_1", "mrr"], min_length=1
    )
    """Share of the positives among the first 1, 5 or 10 texts; mean reciprocal rank of the first positive; nDCG of the
    first 10."""

    @property
    def joint_loss(self) -> str | None:
        return super().joint_loss or ("the FLOPS regulariser" if self.query_flops or self.document_flops else None)

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        if self.changed("flops_growth") and not self.flops_warmup:
            yield clash("applies to `task.flops_warmup`, but that is 0; set it, or remove this", "task.flops_growth")


class MultiVectorEmbedding(ScoredTuples):
    """Embed texts as a vector for each token, compared by MaxSim (late interaction), as ColBERT does."""

    implementation = "trainer.features.embeddings.multi_vector:MultiVectorTask"
    folder_reader = "trainer.features.embeddings.other_folders:read_multi_vector"
    type: Literal["multi_vector_embedding"]
    start = Start(learning_rate=1e-5)
    also_called = ("colbert", "late_interaction", "multi_vector_encoder", "multi_vector")
    dimensions: int = Field(128, ge=1)
    """Values of the vector of a token, after a linear layer without bias."""
    query_length: int = Field(32, ge=3)
    """Tokens of a query; `data.max_length` are those of a document."""
    query_expansion: bool = True
    """Fill queries up to `query_length` with mask tokens, which have vectors too."""
    skip_punctuation: bool = True
    """Leave out the vectors of punctuation in documents."""
    metrics: list[Literal["recall_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg"]] = Field(
        default=["recall_at_1", "mrr"], min_length=1
    )
    """Share of the positives among the first 1, 5 or 10 texts; mean reciprocal rank of the first positive; nDCG of the
    first 10."""
