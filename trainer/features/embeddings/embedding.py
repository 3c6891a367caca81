"""Sentence embeddings of pairs and tuples of texts, as in Sentence-BERT (Reimers and Gurevych 2019, arXiv:1908.10084).

The losses `multiple_negatives`, `cosent` and `angle` compare the rows of a global batch with each other. The engines
therefore gather the embeddings of the whole batch (`trainer/engine/joint.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.base.errors import DataError, UsageError
from trainer.features.embeddings.head import SentenceHead
from trainer.features.embeddings.names import PAIR_LOSSES, POOLINGS, TEACHER_LOSSES, DenseLayer
from trainer.features.embeddings.prompts import Prompts
from trainer.features.embeddings.retrieval import Retrieval
from trainer.features.embeddings.section import Embedding, TextTuples
from trainer.features.embeddings.teaching import teacher_losses, teacher_scores
from trainer.parallel.microbatch import POOLED
from trainer.recipe.schema import TaskKeys
from trainer.tasks.exported import Card, ExportedFolder, Program
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.preview import RowPreview
from trainer.tasks.several_texts import SeveralTexts, mean_of_draws
from trainer.tasks.task import Task
from trainer.tasks.text.columns import cell, finite_numbers, require_columns, require_text, tokenise
from trainer.tasks.text.tied_texts import first_of_equal
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer

Loss = Literal["multiple_negatives", "cosine", "cosent", "angle", "margin_mse", "kl_divergence"]

_DECODERS_WITHOUT_MASK = frozenset(("bert-generation", "xlnet"))
"""Model types that predict next tokens only if they are set up so; they see all tokens by default."""

_DIGITS = 9  # of cosines in fp64
_RANDOM_SIZE = 4  # of embeddings at random, which decide no metric
_ROWS_AT_ONCE = 512  # anchors that are compared with all candidates at once, which bounds the memory


_USAGE = """\
from sentence_transformers import SentenceTransformer

embed = SentenceTransformer("path/to/this/folder").encode"""
_PROGRAM = Program(
    "`SentenceTransformer`", ("sentence-transformers",), "trainer.features.embeddings.opener", reads_texts=True
)


@dataclass(frozen=True)
class EmbeddingTask(SeveralTexts):
    """Embeddings of texts, trained by their cosine similarities."""

    # the columns of anchor, positive and negatives; after `without_labels`, the first column only
    text_columns: tuple[str, ...]
    # the column of the similarity of two texts, or of a teacher's scores; None for `multiple_negatives`
    score_column: str | None
    poolings: tuple[str, ...]  # how the states of the tokens become one embedding; several are joined
    normalize: bool  # whether embeddings have a length of 1
    loss: Loss
    temperature: float  # the divisor of cosine similarities
    metric_names: tuple[str, ...]  # the metrics to compute, the deciding one first
    # Whether `multiple_negatives` leaves out negatives that are a right answer to the anchor. The labels of a row are
    # then the numbers of its texts `[texts]`, equal for equal texts.
    mask_duplicates: bool = False
    # the texts before queries, which are those of the first column, and documents
    prompts: Prompts = field(default_factory=Prompts)
    has_roles: bool = True  # whether texts are queries and documents; if not, they have one prompt
    query_column: str | None = None  # the column of queries, after `without_labels`; None: the first one
    # numbers of values of nested embeddings, and the weight of the loss of each
    dimensions: tuple[tuple[int, float], ...] = ()
    # Whether the temperature is a parameter, which `temperature` starts. Scores then hold it as one more value of each
    # embedding.
    learns_temperature: bool = False
    dense: tuple[DenseLayer, ...] = ()  # the dense layers after the pooling
    pools_prompt: bool = True  # whether the pooling takes the tokens of prompts
    teacher_temperature: float = 1.0  # the divisor of a teacher's scores in a divergence

    recipe_type = "embedding"
    auto_class_name = "AutoModel"
    card = Card("feature-extraction", peft_type="FEATURE_EXTRACTION", program=_PROGRAM, usage=_USAGE)
    unencoded_fields = (
        "poolings", "normalize", "temperature", "metric_names", "dimensions", "learns_temperature", "dense",
        "teacher_temperature",
    )  # fmt: skip
    rows_are_labels = True
    unused_modules = ("pooler",)

    @property
    def preview(self) -> RowPreview:
        negatives = (f"negative {number}" for number in range(1, len(self.text_columns) - 1))
        return RowPreview(roles=() if self.scores_pairs else ("anchor", "positive", *negatives))

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        assert isinstance(section, TextTuples)
        if isinstance(section, Embedding):
            sizes = section.dimensions or []
            given |= {
                "poolings": (section.pooling or "mean",),
                "normalize": section.normalize is not False,
                "learns_temperature": section.learn_temperature,
                "dimensions": tuple(zip(sizes, section.dimension_weights or [1.0] * len(sizes), strict=True)),
            }
        prompts = Prompts(section.query_prompt, section.document_prompt)
        return super().of(
            section, text_columns=tuple(section.texts), prompts=prompts, has_roles=section.has_roles, **given
        )

    @property
    def scores_pairs(self) -> bool:
        """Whether rows are two texts with their similarity."""
        return self.loss in PAIR_LOSSES

    @property
    def columns(self) -> tuple[str, ...]:
        return self.text_columns if self.score_column is None else (*self.text_columns, self.score_column)

    @property
    def value_columns(self) -> tuple[str, ...]:
        return () if self.score_column is None else (self.score_column,)

    @property
    def rows_depend(self) -> bool:
        return self.loss not in ("cosine", *TEACHER_LOSSES)

    def for_configuration(self, config: Any) -> EmbeddingTask:
        super().for_configuration(config)
        hidden_size = getattr(config, "hidden_size", None)
        size = hidden_size * len(self.poolings) if isinstance(hidden_size, int) else None
        if self.dense:
            size = self.dense[-1].out_features
        if size is not None and any(number > size for number, _ in self.dimensions):
            numbers = [number for number, _ in self.dimensions]
            raise UsageError(
                f"`task.dimensions` must be at most the {size} values of an embedding, but is {numbers}; remove the"
                " larger ones"
            )
        if "cls" in self.poolings and _is_causal(config):
            raise UsageError(
                f'`task.pooling` is "cls", but the first token of a {config.model_type} sees no other token, so texts'
                ' with an equal first token have equal embeddings; use "last" or "mean"'
            )
        return self

    @property
    def head(self) -> SentenceHead:
        """The modules after the model of transformers."""
        return SentenceHead(
            self.poolings, self.normalize, self.dense, self.temperature if self.learns_temperature else None
        )

    @property
    def _adds_module(self) -> bool:
        return self.learns_temperature or bool(self.dense)

    def added_module(self) -> nn.Module | None:
        return self.head if self._adds_module else None

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        taken = inputs if self._adds_module else {name: inputs[name] for name in inputs if name != POOLED}
        return super().model_inputs(taken)

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, self.text_columns, where, "task.texts")
        if self.score_column is not None:
            require_columns(features, [self.score_column], "task.score", where)

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        for column in self.text_columns:
            for place, text in enumerate(rows[column]):
                if text is not None and not text.strip():
                    raise DataError(f"{cell(column, first_row + place, where)} is empty; leave the row out")
        texts = [self._tokens(rows, column, tokenizer, max_length, where, first_row) for column in self.text_columns]
        features: Encoded = {
            name: [list(of_row) for of_row in zip(*(text[name] for text in texts), strict=True)] for name in texts[0]
        }
        features["cut"] = [any(cut) for cut in features["cut"]]
        if self.score_column is not None and not self.scores_pairs:
            number = len(self.text_columns) - 1
            features["labels"] = teacher_scores(rows, self.score_column, number, where, first_row)
        elif self.score_column is not None:
            # A cosine cannot reach a larger score.
            largest = 1.0 if self.loss == "cosine" else math.inf  # that of cosines
            features["labels"] = finite_numbers(rows, self.score_column, where, first_row, largest)
        if self.mask_duplicates:
            texts_of_rows = zip(*(rows[column] for column in self.text_columns), strict=True)
            # Numbers travel through collectives, texts do not.
            features["labels"] = [np.array([_number(text) for text in of_row]) for of_row in texts_of_rows]
        return features

    def _tokens(
        self, rows: Dataset, column: str, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> Encoded:
        """Return the tokens of the texts of a column."""
        prompt = self.prompt_of(column)
        found = tokenise(rows, [column], tokenizer, max_length, where, first_row, prompt)
        if not self.pools_prompt:
            start = _prompt_length(prompt, tokenizer, max_length)
            # Tokens of the prompt are read by the model, and left out by the pooling.
            found[POOLED] = [[int(at >= start) for at in range(len(ids))] for ids in found["input_ids"]]
        return found

    def is_query(self, column: str) -> bool:
        return column == (self.query_column or self.text_columns[0])

    def prompt_of(self, column: str) -> str:
        """Return the text before each text of a column."""
        return (self.prompts.query if self.is_query(column) else self.prompts.document) or ""

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the embeddings `[batch, texts, hidden]` in fp32; a learned temperature is one more value."""
        embeddings: Tensor = output.last_hidden_state
        if not self._adds_module:
            embeddings = self.head(embeddings, inputs.get(POOLED, inputs["attention_mask"]).flatten(0, -2))
        return embeddings.view(len(inputs["input_ids"]), -1, embeddings.shape[-1])

    def _split(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings, and the temperature of each row `[rows]`."""
        if self.learns_temperature:
            # A parameter is reached by the gathered scores only: gradient caching knows no other way back to the model.
            return scores[..., :-1], scores[:, 0, -1]
        return scores, scores.new_full((len(scores),), self.temperature)

    def num_valid(self, labels: Tensor) -> Tensor:
        return labels.new_tensor(len(labels)).long()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of losses of embeddings `[rows, texts, hidden]`.

        The labels are scores `[rows]`, or `[rows, 0]`; with `mask_duplicates`, the numbers of texts `[rows, texts]`.
        """
        return self.joint_losses(logits, labels).sum()

    def joint_losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row `[rows]`; arguments are those of `loss_sum`, in the order of the global batch.

        `multiple_negatives` is the cross entropy of the own positive among the positives and negatives of all rows
        (Henderson et al. 2017, arXiv:1705.00652; van den Oord et al. 2018, arXiv:1807.03748). `cosent` is one loss for
        all pairs of rows, so each row has the same (Su 2022, kexue.fm/archives/8847); `angle` is the same for angles
        (Li and Li 2023, arXiv:2309.12871). With `dimensions`, it is the sum over nested embeddings (Kusupati et al.
        2022, arXiv:2205.13147).
        """
        embeddings, temperature = self._split(scores)
        if not self.dimensions:
            return self._losses(embeddings, temperature, labels)
        # Each nested embedding is the first values of the whole one.
        parts = [weight * self._losses(embeddings[..., :size], temperature, labels) for size, weight in self.dimensions]
        return torch.stack(parts).sum(0)

    def _losses(self, embeddings: Tensor, temperature: Tensor, labels: Tensor) -> Tensor:
        if self.loss == "multiple_negatives":
            return self._multiple_negatives(embeddings, temperature, labels if self.mask_duplicates else None)
        if self.loss in TEACHER_LOSSES:
            scores = self.scores_of_documents(embeddings) / temperature[:, None]
            divisors = self.temperature, self.teacher_temperature
            return teacher_losses(scores, labels, self.loss == "kl_divergence", *divisors)
        if self.loss == "angle":
            return _cosent(_angle_similarity(embeddings) / temperature, labels).expand(len(embeddings))
        cosines = F.cosine_similarity(embeddings[:, 0], embeddings[:, 1], dim=-1)
        if self.loss == "cosine":
            return (cosines - labels.to(cosines.dtype)).square()
        return _cosent(cosines / temperature, labels).expand(len(cosines))

    def vectors_of(self, embeddings: Tensor) -> Tensor:
        """Return the vectors that `similarities` compares, of embeddings `[..., values]`."""
        return F.normalize(embeddings, dim=-1)

    def similarities(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Return the similarity of each query and each document `[queries, documents]`."""
        return queries @ documents.T

    def scores_of_documents(self, embeddings: Tensor) -> Tensor:
        """Return the similarity of the query of each row and its documents `[rows, documents]`."""
        query, *documents = self.vectors_of(embeddings).unbind(1)
        return torch.stack([(query * document).sum(-1) for document in documents], 1)

    def rows_at_once(self, candidates: Tensor) -> int:
        """Return the anchors to compare with all candidates at once."""
        return _ROWS_AT_ONCE

    def _multiple_negatives(self, embeddings: Tensor, temperature: Tensor, numbers: Tensor | None) -> Tensor:
        """Return the loss of each row `[rows]`.

        Args:
            embeddings: the embeddings `[rows, texts, values]`.
            temperature: the divisor of the similarities of each row `[rows]`.
            numbers: the numbers of the texts `[rows, texts]`. A candidate is then no negative of an anchor if it equals
                the anchor, its positive, or the positive of an equal anchor. None: all candidates are.
        """
        vectors = self.vectors_of(embeddings)
        candidates = vectors[:, 1:].transpose(0, 1).flatten(0, 1)  # positives in the order of rows, then the negatives

        def losses(anchors: Tensor, right: Tensor, divisors: Tensor) -> Tensor:
            # `[anchors of the block, candidates of the whole batch]`, the largest tensor of this loss.
            logits = self.similarities(anchors, candidates) / divisors[:, None]
            if numbers is not None:
                others = numbers[:, 1:].T.flatten()
                own, positive = numbers[right, :1], numbers[right, 1:2]
                same = (others == own) | (others == positive)
                # The positives stand first; those of rows with an equal anchor are right for it too.
                same[:, : len(numbers)] |= numbers[:, 0] == own
                same.scatter_(1, right[:, None], False)  # its own positive stays
                logits = logits.masked_fill(same, -torch.inf)
            return F.cross_entropy(logits, right, reduction="none")

        own = torch.arange(len(vectors), device=vectors.device)
        return _in_blocks(losses, self.rows_at_once(candidates), vectors[:, 0], own, temperature)

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = {"embeddings": logits.float()}
        return {**found, "labels": labels.double()} if labels.numel() else found

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        """Return the metrics, and the loss of the whole split as one batch: it depends on no batch size."""
        scores = _alike(predictions["embeddings"], split)
        labels = predictions.get("labels", scores.new_zeros(len(scores)))
        with torch.no_grad():
            computed = {"loss": float(self.for_evaluation().joint_losses(self.exact(scores), labels).mean())}
        embeddings, temperature = self._split(scores)
        if self.learns_temperature:
            computed["temperature"] = float(temperature[0])
        computed |= self._metrics(embeddings, labels, split)
        for size, _ in self.dimensions:
            nested = self._metrics(embeddings[..., :size], labels, split)
            computed |= {f"{name}/{size}": value for name, value in nested.items()}
        return computed

    def _metrics(self, embeddings: Tensor, labels: Tensor, split: EvaluatedSplit) -> dict[str, float]:
        if not self.scores_pairs:
            found, others = self._retrieval(embeddings, split).ranks()
        else:
            found, others = _cosines(embeddings), labels.numpy()
        return {name: METRICS[name].compute(found, others) for name in self.metric_names}

    def exact(self, embeddings: Tensor) -> Tensor:
        """Return embeddings of a whole split in fp64: sums over it would lose digits in fp32."""
        return embeddings.double()

    def split_baselines(self, split: EvaluatedSplit) -> dict[str, float]:
        if self.scores_pairs:
            return {}
        shape = (len(split.rows), len(self.text_columns), self._random_size)
        return mean_of_draws(lambda draw: self._metrics(_alike(draw, split), draw, split), shape)

    @property
    def _random_size(self) -> int:
        return _RANDOM_SIZE

    def _retrieval(self, embeddings: Tensor, split: EvaluatedSplit) -> Retrieval:
        return self._retrieval_of(embeddings, [split.rows[column] for column in self.text_columns])

    def _retrieval_of(self, embeddings: Tensor, texts: list[Sequence[str]]) -> Retrieval:
        return Retrieval.of(embeddings, texts)

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        """Return the nearest text of the split beside the right one for the first rows, or similarities and scores."""
        if split is None:
            return None
        few = split.few
        embeddings, _ = self._split(_alike(predictions["embeddings"], split))
        first, second, *_ = self.text_columns
        if self.scores_pairs:
            assert self.score_column is not None
            names = (first, second, self.score_column)
            rows = zip(few, _cosines(embeddings[: len(few)]).tolist(), strict=True)
            return {"texts": [{**{name: row[name] for name in names}, "similarity": f"{of:.3f}"} for row, of in rows]}
        retrieval = self._retrieval(embeddings, split)
        queries, right = retrieval.query_of[: len(few)], retrieval.right_of[: len(few)]
        ranks = map(str, retrieval.ranks_of(queries, right))
        columns = (first, "nearest", f"right: {second}", "rank of the right one")
        shown = zip(few[first], retrieval.nearest(queries), few[second], ranks, strict=True)
        return {"texts": [dict(zip(columns, row, strict=True)) for row in shown]}

    def without_labels(self) -> EmbeddingTask:
        first = self.text_columns[0]
        return replace(self, text_columns=(first,), score_column=None, mask_duplicates=False, query_column=first)

    def embedding(self, columns: Sequence[str]) -> EmbeddingTask:
        return replace(self, text_columns=tuple(columns))

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"embeddings": self._split(logits)[0].float()}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        names = ["embedding"]
        if len(self.text_columns) > 1:
            names = [f"embedding_{column}" for column in self.text_columns]
        tokenizer, texts_of_rows = split and split.tokenizer, answers["embeddings"]
        return [dict(zip(names, self.shown(texts, tokenizer), strict=True)) for texts in texts_of_rows]

    def shown(self, texts: Tensor, tokenizer: Tokenizer | None) -> list[Any]:
        """Return the embeddings `[texts, values]` of a row as JSON."""
        values: list[Any] = texts.tolist()
        return values

    @property
    def exported(self) -> ExportedFolder:
        return SentenceFolder(self)

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        if self.mask_duplicates:
            return {}, torch.zeros(shape[:2], dtype=torch.long)
        if self.score_column is None:
            return {}, torch.zeros(shape[0], 0)
        return {}, torch.zeros(shape[0], *(() if self.scores_pairs else (shape[1] - 1,)))


@dataclass(frozen=True)
class SentenceFolder(ExportedFolder):
    """A folder of sentence-transformers."""

    task: EmbeddingTask

    def graph_head(self) -> tuple[nn.Module, tuple[str, ...]]:
        head = replace(self.task, learns_temperature=False).head
        return head, () if self.task.pools_prompt else (POOLED,)

    def inputs(self, rows: Dataset) -> dict[str, Any]:
        """Return the prompt and the texts of each column, for SentenceTransformer."""
        task = self.task
        columns = [[task.prompt_of(column), list(rows[column]), task.is_query(column)] for column in task.text_columns]
        return {"columns": columns}

    def completed(self, scores: Tensor, trained: Tensor) -> Tensor:
        return torch.cat([scores, trained[..., -1:]], -1) if self.task.learns_temperature else scores

    def files(self, max_length: int, hidden_size: int | None) -> dict[str, Any]:
        """Return the files, by name, that make an exported folder one of sentence-transformers."""
        names = ["Transformer", "Pooling", *["Dense"] * len(self.task.dense), *["Normalize"] * self.task.normalize]
        paths = [f"{place}_{name}" if place else "" for place, name in enumerate(names)]
        modules = [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
            for place, (path, name) in enumerate(zip(paths, names, strict=True))
        ]
        pooling: dict[str, Any] = {"word_embedding_dimension": hidden_size, "include_prompt": self.task.pools_prompt}
        if list(self.task.poolings) == [name for name in POOLINGS if name in self.task.poolings]:
            pooling |= {names.switch: pooling in self.task.poolings for pooling, names in POOLINGS.items()}
        else:  # an order that versions before 5 do not have
            pooling["pooling_mode"] = [POOLINGS[name].name for name in self.task.poolings]
        prompts = self.task.prompts.as_json(self.task.has_roles)
        files: dict[str, Any] = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {"similarity_fn_name": "cosine", **prompts},
            "1_Pooling/config.json": pooling,
        }
        for layer in self.task.dense:
            files[f"{layer.folder}/config.json"] = {
                "in_features": layer.in_features,
                "out_features": layer.out_features,
                "bias": layer.bias,
                "activation_function": layer.activation,
            }
        return files | ({f"{paths[-1]}/config.json": {}} if self.task.normalize else {})


def _prompt_length(prompt: str, tokenizer: Tokenizer, max_length: int) -> int:
    """Return the number of tokens before a text: those of its prompt alone, without a special token at its end."""
    if not prompt:
        return 0
    ids = tokenizer([prompt], truncation=True, max_length=max_length)["input_ids"][0]
    return len(ids) - (ids[-1] in tokenizer.all_special_ids)


def _angle_similarity(embeddings: Tensor) -> Tensor:
    """Return the similarity of complex vectors `[rows]`; the second half of an embedding is the imaginary part."""
    if embeddings.shape[-1] % 2:
        # An odd number of values: the last one gets an imaginary part of 0.
        embeddings = F.pad(embeddings, (0, 1))
    first, second = F.normalize(embeddings[:, :2], dim=-1).unbind(1)
    # Both have length 1, so z / w is z · conj(w): its real part is the sum of all products.
    (real, imaginary), (other, other_imaginary) = first.chunk(2, -1), second.chunk(2, -1)
    return ((first * second).sum(-1) + (imaginary * other - real * other_imaginary).sum(-1)).abs()


def _is_causal(config: Any) -> bool:
    from transformers.models.auto import modeling_auto

    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return False
    kind = config.model_type
    if kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in _DECODERS_WITHOUT_MASK:
        return bool(getattr(config, "is_decoder", False))
    return kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _number(text: str) -> int:
    """Return a number of 52 bits, which float64 holds exactly, equal for equal texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 12


def _in_blocks(function: Callable[..., Tensor], number: int, *rows: Tensor) -> Tensor:
    """Return the results of blocks of rows; a backward pass computes each block again instead of keeping it."""
    blocks = list(zip(*(torch.split(tensor, number) for tensor in rows), strict=True))
    if len(blocks) == 1:
        return function(*blocks[0])
    # The logits of all blocks would take rows x candidates numbers until the backward pass.
    return torch.cat([checkpoint(function, *block, use_reentrant=False) for block in blocks])


def _cosent(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(1 + sum of exp(logits[j] - logits[i]) over all pairs with labels[j] < labels[i]), a scalar.

    Sorted by label, the sum over `j` is a cumulative sum, so N rows take N log N operations instead of N².

    Args:
        logits: the scaled similarity of each row `[rows]`.
        labels: the true similarity of each row `[rows]`.
    """
    order = labels.argsort(stable=True)
    logits, labels = logits[order], labels[order].contiguous()
    num_lower = torch.searchsorted(labels, labels)  # rows with a lower label stand before
    # The sum over all rows with a lower label, in a stable form. Shapes depend on no values, so a plan knows them.
    lower = logits.logcumsumexp(0)[(num_lower - 1).clamp(min=0)]
    terms = (lower - logits).masked_fill(num_lower == 0, -torch.inf)
    # The first term is the 1 in the logarithm; made of the logits, it has a gradient where no pair is.
    return torch.cat([logits[:1] * 0.0, terms]).logsumexp(0)


def _alike(embeddings: Tensor, split: EvaluatedSplit) -> Tensor:
    """Return the embeddings `[rows, texts, hidden]` with equal ones for texts with the same tokens."""
    first = torch.from_numpy(first_of_equal(split.encoded))
    return embeddings.flatten(0, 1)[first].view_as(embeddings)


def _cosines(embeddings: Tensor) -> NDArray[np.float64]:
    """Return the similarity of the two texts of each row `[rows]`; rounding does not break the ties of equal texts."""
    both = embeddings.double()
    cosines: NDArray[np.float64] = F.cosine_similarity(both[:, 0], both[:, 1], dim=-1).numpy()
    return cosines.round(_DIGITS)
