"""Embeddings with a vector for each token, compared by MaxSim (ColBERT, Khattab and Zaharia 2020, arXiv:2004.12832).

Vectors of tokens that do not count, such as padding, are zero. No other vector is: they have a length of 1.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.features.embeddings.embedding import EmbeddingTask, SentenceFolder
from trainer.features.embeddings.retrieval import Retrieval, ScoredRetrieval
from trainer.features.embeddings.section import MultiVectorEmbedding
from trainer.parallel.microbatch import POOLED
from trainer.recipe.schema import TaskKeys
from trainer.tasks.exported import Card, ExportedFolder, Program
from trainer.tasks.task import Task
from trainer.tasks.text.columns import cell
from trainer.tasks.types import Dataset, Encoded, Tokenizer

_USAGE = """\
from sentence_transformers import MultiVectorEncoder

embed = MultiVectorEncoder("path/to/this/folder").encode_query"""
_PROGRAM = Program(
    "`MultiVectorEncoder`", ("sentence-transformers",), "trainer.features.embeddings.opener", reads_texts=True
)
_MOST_PRODUCTS = 2**24  # products of vectors in a block, which take 64 MB in fp32


@dataclass(frozen=True)
class MultiVectorTask(EmbeddingTask):
    """A vector for each token of a text; a query's score is the sum over its tokens of the largest dot product.

    An embedding holds the vectors of `tokens` tokens in a row. `dense` is the linear layer after the model.
    """

    vector_size: int = 128  # values of a vector
    query_length: int = 32  # tokens of a query
    query_expansion: bool = True  # whether mask tokens fill queries
    skip_punctuation: bool = True  # whether punctuation of documents has no vectors
    tokens: int = 0  # the largest number of tokens of a text, from the recipe

    recipe_type = "multi_vector_embedding"
    card = Card("feature-extraction", program=_PROGRAM, usage=_USAGE)
    unencoded_fields = (*EmbeddingTask.unencoded_fields, "vector_size", "tokens")  # type: ignore[assignment]

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        assert isinstance(section, MultiVectorEmbedding)
        given |= {"dimensions": (), "vector_size": section.dimensions}  # no sizes of nested embeddings
        return super().of(section, poolings=("tokens",), normalize=True, **given)

    def _tokens(
        self, rows: Dataset, column: str, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> Encoded:
        """Return the tokens of a column, with those that have a vector in the column `POOLED`."""
        if not self.is_query(column):
            found = super()._tokens(rows, column, tokenizer, max_length, where, first_row)
            skipped = _punctuation(tokenizer) if self.skip_punctuation else set()
            found[POOLED] = [[int(token not in skipped) for token in ids] for ids in found["input_ids"]]
            if empty := [row for row, kept in enumerate(found[POOLED]) if not any(kept)]:
                place = cell(column, first_row + empty[0], where)
                raise DataError(f"{place} is a text of punctuation only; leave the row out")
            return found
        if self.query_length > max_length:
            raise UsageError(
                f"`task.query_length` must be at most `data.max_length` {max_length}, but is {self.query_length}; lower"
                " it"
            )
        found = super()._tokens(rows, column, tokenizer, self.query_length, where, first_row)
        if self.query_expansion:
            if tokenizer.mask_token_id is None:
                raise UsageError(
                    "`task.query_expansion` is true, but the tokenizer has no mask token; set it to false, or use a"
                    " model that was trained with one"
                )
            fills = {"input_ids": tokenizer.mask_token_id}
            for name in found.keys() - {"cut"}:
                fill = fills.get(name, 0)
                found[name] = [ids + [fill] * (self.query_length - len(ids)) for ids in found[name]]
        found[POOLED] = [[1] * len(ids) for ids in found["input_ids"]]
        return found

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the vectors of all texts `[batch, texts, tokens * vector size]`, zero without a token."""
        vectors = output.last_hidden_state
        assert vectors.shape[1] <= self.tokens, f"{vectors.shape[1]} tokens in a text of at most {self.tokens}"
        # One size for all microbatches and ranks, which exchange them.
        vectors = F.pad(vectors, (0, 0, 0, self.tokens - vectors.shape[1]))
        embeddings: Tensor = vectors.reshape(len(inputs["input_ids"]), -1, self.tokens * self.vector_size)
        return embeddings

    def vectors_of(self, embeddings: Tensor) -> Tensor:
        """Return the vectors `[..., tokens, vector size]`."""
        return embeddings.view(*embeddings.shape[:-1], -1, self.vector_size)

    def similarities(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Return MaxSim of queries `[queries, tokens, size]` and documents `[documents, tokens, size]`."""
        queries = queries[:, : self.query_length]  # later vectors are zero
        if torch.is_grad_enabled():
            return _max_sim(queries, documents)
        parts = torch.split(queries, self.rows_at_once(documents))
        return torch.cat([_max_sim(part, documents) for part in parts])

    def scores_of_documents(self, embeddings: Tensor) -> Tensor:
        vectors = self.vectors_of(embeddings)
        query, documents = vectors[:, :1, : self.query_length], vectors[:, 1:]
        return _sum_of_largest(query @ documents.transpose(-1, -2), documents)

    def rows_at_once(self, candidates: Tensor) -> int:
        return max(1, _MOST_PRODUCTS // (candidates.shape[0] * candidates.shape[1] * self.query_length))

    def exact(self, embeddings: Tensor) -> Tensor:
        # MaxSim of a whole split takes most of an evaluation's time, and twice as much in fp64.
        return embeddings

    @property
    def _random_size(self) -> int:
        return self.vector_size  # one token

    def _retrieval_of(self, embeddings: Tensor, texts: list[Sequence[str]]) -> Retrieval:
        return replace(ScoredRetrieval.of(self.vectors_of(embeddings), texts), score=self.similarities)

    def shown(self, texts: Tensor, tokenizer: Tokenizer | None) -> list[Any]:
        """Return the vectors of the tokens of each text, without those of tokens that do not count."""
        return [vectors[(vectors != 0).any(-1)].tolist() for vectors in self.vectors_of(texts)]

    @property
    def exported(self) -> ExportedFolder:
        return _MultiVectorFolder(self)


def _punctuation(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that are a punctuation mark."""
    ids = {tokenizer.convert_tokens_to_ids(mark) for mark in string.punctuation}
    return ids - {tokenizer.unk_token_id, None}


def _max_sim(queries: Tensor, documents: Tensor) -> Tensor:
    # `[queries, documents, tokens of the query, tokens of the document]`
    products = queries.flatten(0, 1) @ documents.flatten(0, 1).T
    shape = (len(queries), queries.shape[1], len(documents), documents.shape[1])
    return _sum_of_largest(products.view(shape).transpose(1, 2), documents)


def _sum_of_largest(products: Tensor, documents: Tensor) -> Tensor:
    """Return the sum over the tokens of a query of its largest product with a token of the document.

    Args:
        products: the products `[..., tokens of the query, tokens of the document]`; those of a zero vector are 0.
        documents: the vectors of the documents `[..., tokens, size]`.
    """
    absent = (documents == 0).all(-1).unsqueeze(-2)
    return products.masked_fill(absent, torch.finfo(products.dtype).min).max(-1).values.sum(-1)


@dataclass(frozen=True)
class _MultiVectorFolder(SentenceFolder):
    """A folder of MultiVectorEncoder."""

    task: MultiVectorTask

    def inputs(self, rows: Dataset) -> dict[str, Any]:
        return {**super().inputs(rows), "model": "MultiVectorEncoder", "tokens": self.task.tokens}

    def files(self, max_length: int, hidden_size: int | None) -> dict[str, Any]:
        own, task = "sentence_transformers", self.task
        names = {
            "Transformer": f"{own}.base.modules.transformer.Transformer",
            "Dense": f"{own}.base.modules.dense.Dense",
            "MultiVectorMask": f"{own}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
            "Normalize": f"{own}.base.modules.normalize.Normalize",
        }
        paths = [f"{place}_{name}" if place else "" for place, name in enumerate(names)]
        of_tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        expansion = {"strategy": "fixed", "attend": True, "token": None, "length": task.query_length}
        (layer,) = task.dense
        return {
            "modules.json": [
                {"idx": place, "name": str(place), "path": path, "type": kind}
                for place, (path, kind) in enumerate(zip(paths, names.values(), strict=True))
            ],
            "sentence_bert_config.json": {
                "transformer_task": "feature-extraction",
                "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                "module_output_name": "token_embeddings",
                "max_seq_length": max_length,
                "document_length": max_length,
                **({"query_expansion": expansion} if task.query_expansion else {"query_length": task.query_length}),
            },
            "config_sentence_transformers.json": {
                "model_type": "MultiVectorEncoder",
                "similarity_fn_name": "maxsim",
                **task.prompts.as_json(task.has_roles),
            },
            f"{layer.folder}/config.json": {
                "in_features": layer.in_features,
                "out_features": layer.out_features,
                "bias": layer.bias,
                "activation_function": layer.activation,
                **of_tokens,
            },
            "2_MultiVectorMask/config.json": {
                "skiplist_words": [*string.punctuation] if task.skip_punctuation else [],
                "skiplist_tasks": ["document"],
                "keep_only_token_ids": None,
            },
            "3_Normalize/config.json": of_tokens,
        }
