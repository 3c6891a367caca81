"""The sections `task` of embeddings: dense, sparse, and with a vector for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.features.embeddings.names import PAIR_LOSSES
from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash
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
    joint_losses: ClassVar[tuple[str, ...]] = ("multiple_negatives",)  # losses that compare the rows of a batch

    @property
    def texts_per_row(self) -> int:
        return len(self.texts)

    @property
    def joint_loss(self) -> str | None:
        return f"`task.loss` {self.loss}" if self.loss in self.joint_losses else None

    @property
    def fewest_rows(self) -> int:
        return 2 if self.loss in self.joint_losses and len(self.texts) == 2 else 1

    @property
    def has_roles(self) -> bool:
        """Whether texts are queries and documents; scored pairs have no order."""
        return self.loss not in PAIR_LOSSES

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        from trainer.features.embeddings.rules import of_tuples  # only recipes of these tasks need them

        yield from of_tuples(self)


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
    joint_losses: ClassVar[tuple[str, ...]] = ("multiple_negatives", "cosent", "angle")

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        from trainer.features.embeddings.rules import of_embedding

        yield from of_embedding(self)


class ScoredTuples(TextTuples):
    """Keys of the tasks with vectors that no cosine compares."""

    score: Name | None = None
    """Column of a list with a teacher's score of each document, for `margin_mse` and `kl_divergence`."""
    loss: Literal["multiple_negatives", "margin_mse", "kl_divergence"] = "multiple_negatives"
    """multiple_negatives: find the positive among all positives and negatives of the global batch; margin_mse: squared
    error of the differences of scores; kl_divergence: of the softmax of a teacher's scores from that of scores."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the scores."""
    metrics: list[Literal["recall_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg"]] = Field(
        default=["recall_at_1", "mrr"], min_length=1
    )
    """Share of the positives among the first 1, 5 or 10 texts; mean reciprocal rank of the first positive; nDCG of the
    first 10."""


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
