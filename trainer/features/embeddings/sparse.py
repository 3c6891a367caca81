"""Sparse embeddings: a weight for each token of the vocabulary, as in SPLADE (Formal et al. 2021, arXiv:2109.10086)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from trainer.base.errors import UsageError
from trainer.features.embeddings.embedding import EmbeddingTask, SentenceFolder
from trainer.features.embeddings.retrieval import Retrieval, ScoredRetrieval
from trainer.parallel.communication import join_sequence
from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.groups import group_size, index_in_group
from trainer.parallel.shards.slices import bounds_of_part
from trainer.parallel.tensor.cross_entropy import VocabularyCut
from trainer.recipe.schema import TaskKeys
from trainer.tasks.exported import Card, ExportedFolder, Program
from trainer.tasks.task import Task
from trainer.tasks.types import EvaluatedSplit, Tokenizer

_USAGE = """\
from sentence_transformers import SparseEncoder

embed = SparseEncoder("path/to/this/folder").encode_query"""
_PROGRAM = Program(
    "`SparseEncoder`", ("sentence-transformers",), "trainer.features.embeddings.opener", reads_texts=True
)
_DIGITS = 6  # of weights that are shown


@dataclass(frozen=True)
class SparseTask(EmbeddingTask):
    """Sparse embeddings of texts, compared by dot products, with the FLOPS regulariser.

    The embedding is max over tokens of log(1 + relu(logit)) of a masked language model.
    """

    query_flops: float = 0.0  # the weights of the regulariser
    document_flops: float = 0.0
    flops_warmup: int = 0  # the steps in which they grow
    flops_growth: Literal["quadratic", "linear"] = "quadratic"
    flops_share: float = 1.0  # the share of both weights at the current step
    vocabulary: VocabularyCut | None = None

    recipe_type = "sparse_embedding"
    auto_class_name = "AutoModelForMaskedLM"
    card = Card("feature-extraction", program=_PROGRAM, usage=_USAGE)
    unencoded_fields = (  # type: ignore[assignment]  # more names than of the base class
        *EmbeddingTask.unencoded_fields, "query_flops", "document_flops", "flops_warmup", "flops_growth", "flops_share",
        "vocabulary",
    )  # fmt: skip

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        return super().of(section, poolings=(), normalize=False, **given)

    @property
    def rows_depend(self) -> bool:
        return super().rows_depend or self.query_flops > 0 or self.document_flops > 0

    def at_step(self, step: int) -> SparseTask:
        share = min(1.0, step / self.flops_warmup) if self.flops_warmup else 1.0
        return replace(self, flops_share=share**2 if self.flops_growth == "quadratic" else share)

    def for_evaluation(self) -> SparseTask:
        """Return the task without the regulariser."""
        return replace(self, flops_share=0.0)

    def for_vocabulary(self, cut: VocabularyCut | None) -> SparseTask:
        return replace(self, vocabulary=cut)

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the embeddings `[batch, texts, vocabulary]` in fp32 at least, whole on each tensor rank."""
        hidden = inputs["attention_mask"].flatten(0, -2).unsqueeze(-1) == 0
        # The logarithm grows with the logit, so the largest logit has the largest weight.
        weights = at_least_fp32(output.logits.masked_fill(hidden, 0.0).max(1).values).relu().log1p()
        if (cut := self.vocabulary) is not None:
            start, stop = bounds_of_part(cut.size, index_in_group(cut.group), group_size(cut.group))
            weights = join_sequence(weights[:, : stop - start], cut.group, 1, cut.size)
        return weights.view(len(inputs["input_ids"]), -1, weights.shape[-1])

    def joint_losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row `[rows]`, with the regulariser of the whole batch."""
        return super().joint_losses(scores, labels) + self.flops_share * self._flops(scores)

    def _flops(self, embeddings: Tensor) -> Tensor:
        """Return the weighted sum over tokens of their squared mean weight (Paria et al. 2020, arXiv:2004.05665)."""
        queries, documents = embeddings[:, 0].mean(0), embeddings[:, 1:].flatten(0, 1).mean(0)
        return self.query_flops * queries.square().sum() + self.document_flops * documents.square().sum()

    def vectors_of(self, embeddings: Tensor) -> Tensor:
        return embeddings

    def exact(self, embeddings: Tensor) -> Tensor:
        # A copy in fp64 of the whole vocabulary would take twice the memory of the split.
        return embeddings

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        """Return the metrics, with the mean number of weights above 0 of queries and documents.

        Raises:
            UsageError: no weight of any text is above 0, so that no gradient is left.
        """
        active = (predictions["embeddings"] > 0).sum(-1).float()
        if not predictions["embeddings"].any():
            raise UsageError(
                f"`task.query_flops` {self.query_flops:g} and `task.document_flops` {self.document_flops:g} must leave"
                " weights above 0, but all weights of all texts are 0, so no gradient is left; lower these keys or"
                " `optimizer.learning_rate`, or raise `task.flops_warmup`, and train again"
            )
        found = {"query_active_tokens": active[:, 0], "document_active_tokens": active[:, 1:]}
        return super().split_metrics(predictions, split) | {name: float(of.mean()) for name, of in found.items()}

    def _retrieval_of(self, embeddings: Tensor, texts: list[Sequence[str]]) -> Retrieval:
        return replace(ScoredRetrieval.of(self.vectors_of(embeddings), texts), score=self.similarities)

    def shown(self, texts: Tensor, tokenizer: Tokenizer | None) -> list[Any]:
        """Return the weights of each text by token, the largest first."""
        assert tokenizer is not None, "the rows are texts"
        found = []
        for weights in texts:
            ids = weights.argsort(descending=True, stable=True)[: int((weights > 0).sum())]
            # A model may have more rows than its tokenizer has tokens.
            names = [tokenizer.convert_ids_to_tokens(at) or f"[{at}]" for at in ids.tolist()]
            rounded = (round(weight, _DIGITS) for weight in weights[ids].tolist())
            found.append(dict(zip(names, rounded, strict=True)))
        return found

    @property
    def exported(self) -> ExportedFolder:
        return _SparseFolder(self)


@dataclass(frozen=True)
class _SparseFolder(SentenceFolder):
    """A folder of SparseEncoder."""

    def inputs(self, rows: Any) -> dict[str, Any]:
        return {**super().inputs(rows), "model": "SparseEncoder"}

    def files(self, max_length: int, hidden_size: int | None) -> dict[str, Any]:
        own = "sentence_transformers"
        return {
            "modules.json": [
                {"idx": 0, "name": "0", "path": "", "type": f"{own}.base.modules.transformer.Transformer"},
                {
                    "idx": 1,
                    "name": "1",
                    "path": "1_SpladePooling",
                    "type": f"{own}.sparse_encoder.modules.splade_pooling.SpladePooling",
                },
            ],
            "sentence_bert_config.json": {
                "transformer_task": "fill-mask",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
                "module_output_name": "token_embeddings",
                "max_seq_length": max_length,
            },
            "config_sentence_transformers.json": {
                "model_type": "SparseEncoder",
                "similarity_fn_name": "dot",
                **self.task.prompts.as_json(self.task.has_roles),
            },
            "1_SpladePooling/config.json": {
                "pooling_strategy": "max",
                "activation_function": "relu",
                "embedding_dimension": None,
            },
        }
