"""The output head of a language model without logits: it computes the losses of labelled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.text import size
from trainer.engine.precision import narrow_precision
from trainer.features.chunked_head.linear_cross_entropy import LinearLayer, Passes, linear_cross_entropy
from trainer.features.chunked_head.rows import KERNEL
from trainer.models.families.table import FAMILIES
from trainer.models.place import PlacedModel
from trainer.parallel.communication import in_product_type
from trainer.parallel.kernel_support import missing
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.pipeline.stand_ins import Absent
from trainer.parallel.tensor.cross_entropy import VocabularyCut
from trainer.parallel.tensor.linear import ColumnParallelLinear
from trainer.parallel.tensor.low_rank import product_of
from trainer.parallel.tensor.trained_rows import rows_of
from trainer.recipe.plan import RunPlan
from trainer.recipe.registered import asked_for
from trainer.tasks.task import Task
from trainer.tasks.token_labels import TokenLabels

Tokens = int | Literal["auto"]
TokenScores = Callable[[Tensor, Tensor], Tensor]

_WHOLE_BYTES = 2**31
_CHUNK_BYTES = 2**30  # at least some thousand tokens, because each chunk reads and writes the gradient of the weight
_FROZEN_BYTES = 2**28
_EVALUATED_ELEMENTS = 2**24  # 64 MiB in fp32
_TOKENS = 64  # numbers of labelled tokens are rounded up, so that shapes recur
_FIRST = {
    "bert": "cls.predictions.transform", "roberta": "lm_head", "xlm-roberta": "lm_head", "modernbert": "head",
    "distilbert": "vocab_transform", "electra": "generator_predictions",
}  # fmt: skip
"""The first module between the hidden states of a masked language model and its logits, by model type."""


class Way(NamedTuple):
    """The way of a head from hidden states to losses.

    Attributes:
        tokens: the tokens with logits in memory at a time.
        sums: whether all losses have the same gradient, as those of a sum.
        keeps: whether a backward pass may run twice, as in schedules that split it.
    """

    tokens: Tokens
    sums: bool = False
    keeps: bool = False

    @classmethod
    def of(cls, tokens: Tokens, task: Task, plan: RunPlan) -> Way:
        # By the functions, because a task may derive from `TokenLabels` and weigh tokens. A pipeline cuts rows off.
        sums = all(getattr(type(task), name, None) is getattr(TokenLabels, name) for name in ("loss_sum", "scores"))
        stages = plan.pipeline
        return cls(tokens, sums and stages is None, stages is not None and stages.schedule.splits_backward)

    def passes(self, num_tokens: int, token_bytes: int, is_trained: bool) -> Passes:
        """Return the passes for tokens with logits of so many bytes each; of a trained head, or of a frozen one."""
        if self.tokens != "auto":
            return Passes(self.tokens, self.sums, self.keeps)
        most = _WHOLE_BYTES if is_trained else _FROZEN_BYTES
        chunk = num_tokens if num_tokens * token_bytes <= most else min(most, _CHUNK_BYTES) // token_bytes
        return Passes(max(1, chunk), self.sums, self.keeps)


class ChunkedHead:
    """Makes a head return the scores of labelled tokens instead of their logits, inside the context `use`.

    The head module stays in its place and is called as usual, so hooks and shards of its weight keep working.

    Args:
        head: the linear layer from hidden states to logits; its `forward` is replaced.
        cut: how the vocabulary is sharded over tensor ranks; None: it is not.
        scores: computes the scores of tokens from logits `[..., vocabulary]` and labels `[...]`, without gradients.
        first: a module before the head that is called with all hidden states, and from which on each token is computed
            by itself; None: there is none. It then gets the labelled tokens only.
    """

    def __init__(
        self, head: nn.Module, way: Way, cut: VocabularyCut | None, scores: TokenScores, first: nn.Module | None = None
    ) -> None:
        self._head: Any = head
        self._way = way
        self._cut = cut
        self._scores = scores
        self._labels: Tensor | None = None
        self._num_labels: int | None = None
        self._labelled: Tensor | None = None  # the places of labelled tokens, which the first module has selected
        if first is not None:
            first.register_forward_pre_hook(self._select)
        # Of the object: the module, its weight and its hooks stay.
        head.forward = self._run

    @contextmanager
    def use(self, labels: Tensor, num_labels: int | None = None) -> Iterator[None]:
        """Score the tokens of a microbatch inside of this context.

        Args:
            labels: the labels `[batch, sequence]`.
            num_labels: the number of labels that are not ignored, if the host knows it; other tokens then need no
                logits.
        """
        self._labels, self._num_labels = labels, num_labels
        try:
            yield
        finally:
            self._labels = self._num_labels = self._labelled = None

    def _logits(self, hidden: Tensor) -> Tensor:
        # By the class, because the object's `forward` is `_run`.
        logits: Tensor = type(self._head).forward(self._head, hidden)
        return logits

    def _run(self, hidden: Tensor) -> Tensor:
        """Return the logits for hidden states `[batch, sequence, hidden]`, or the scores `[batch, sequence, 1 or 2]`.

        The scores of a token are its loss and, without gradients, 1 if its prediction is right, else 0.
        """
        # Outside of `use`, such as in generation, the head is an ordinary one.
        if self._labels is None:
            return self._logits(hidden)
        tokens, labels, labelled = hidden.flatten(0, -2), self._labels.flatten(), self._labelled
        if labelled is None and (labelled := self._places(labels)) is not None:
            tokens = tokens.index_select(0, labelled)
        if labelled is None:
            scores = self._scores_of(tokens, labels)
        else:
            own = self._scores_of(tokens, labels.index_select(0, labelled))
            # Tokens without labels have a loss of 0.
            scores = own.new_zeros(len(labels), own.shape[-1]).index_copy(0, labelled, own)
        return scores.view(*self._labels.shape, -1)

    def _select(self, first: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._labelled = None if self._labels is None else self._places(self._labels.flatten())
        if self._labelled is None:
            return None
        return args[0].flatten(0, -2).index_select(0, self._labelled).unsqueeze(0), *args[1:]

    def _places(self, labels: Tensor) -> Tensor | None:
        """Return the places of labelled tokens, and of some others; None: all tokens are scored."""
        # The host must know the number: a read of it from the device would make it wait.
        size = len(labels) if self._num_labels is None else max(1, -(-self._num_labels // _TOKENS)) * _TOKENS
        if size >= len(labels):
            return None
        # A sort has an output of known size, unlike `nonzero`, for which the host would wait.
        return torch.argsort(labels == IGNORED_LABEL, stable=True)[:size]  # those with labels come first

    def _scores_of(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the scores `[tokens, 1 or 2]` for hidden states `[tokens, hidden]` and labels `[tokens]`."""
        head, weight = self._head, self._head.weight
        if not torch.is_grad_enabled():
            step = max(1, _EVALUATED_ELEMENTS // len(weight)) if self._way.tokens == "auto" else self._way.tokens
            chunks = zip(torch.split(tokens, step), torch.split(labels, step), strict=True)
            return torch.cat([self._scores(self._logits(own), of) for own, of in chunks])
        # The communication of a column-parallel layer, which `_logits` would do inside of its forward.
        received = in_product_type(head.received(tokens) if isinstance(head, ColumnParallelLinear) else tokens)
        is_trained = weight.requires_grad or (head.bias is not None and head.bias.requires_grad)
        passes = self._way.passes(len(labels), received.element_size() * len(weight), is_trained)
        cut = self._cut or VocabularyCut(None, len(weight))
        return linear_cross_entropy(received, LinearLayer(weight, head.bias), labels, cut, passes).unsqueeze(-1)


class ChunkedHeads:
    """The heads of a recipe's models."""

    def __init__(self, way: Way) -> None:
        self._way = way

    @classmethod
    def of(cls, built: Sequence[PlacedModel], task: Task, plan: RunPlan) -> Self | None:
        """Return the heads; None if `auto` or null finds that the models return logits.

        Raises:
            UsageError: a model needs its logits, but `task.logits_chunk` is a number.
        """
        chosen = _chosen(task, plan)
        if chosen is None:
            return None
        why = _why_whole(built, plan)
        # A number is the user's wish, which is refused and never dropped in silence.
        if why is not None and chosen != "auto" and not plan.strategy.single_process:
            raise UsageError(
                f'`task.logits_chunk` is a number, but the model needs its logits: {why}; set it to "auto" or null'
            )
        return cls(Way.of(chosen, task, plan)) if why is None else None

    @staticmethod
    def notes(built: Sequence[PlacedModel], task: Task, plan: RunPlan, device: torch.device | None) -> list[str]:
        """Return notes on the logits of a training; without a device, not on its kernels."""
        if (chosen := _chosen(task, plan)) is None:
            return []
        if (why := _why_whole(built, plan)) is not None:
            return [f"the logits are whole and copied in fp32, because {why}"]
        obstacle = None if device is None or device.type == "cpu" else missing(KERNEL, device)
        torchs = [] if obstacle is None else [f"the loss of tokens has no kernel here, because {obstacle}"]
        return [_note(Way.of(chosen, task, plan), built[0].model, plan), *torchs]

    def attach(self, model: Any, cut: VocabularyCut | None, task: Task) -> ChunkedHead | None:
        """Compute the losses of a language model in its head; return None for a pipeline stage without the head."""
        head = model.get_output_embeddings()
        if isinstance(head, Absent):
            return None
        return ChunkedHead(head, self._way, cut, task.token_scores, _first_of(model, task))


def _first_of(model: Any, task: Task) -> nn.Module | None:
    name = _FIRST.get(model.config.model_type)
    if name is None or task.auto_class_name != "AutoModelForMaskedLM":
        return None
    first: nn.Module = model.get_submodule(name)
    # The masks of a dropout, such as that of an adapter, depend on the places of tokens.
    drops = any("dropout" in type(module).__name__.lower() for module in first.modules())
    return None if drops else first


def _chosen(task: Task, plan: RunPlan) -> Tokens | None:
    # A registered task may derive its section from another base. Answers need no logits, whatever the training does.
    chosen: Tokens | None = getattr(plan.recipe.task, "logits_chunk", None)
    return "auto" if task.head_blocks == "tokens" else chosen


def _why_whole(built: Sequence[PlacedModel], plan: RunPlan) -> str | None:
    """Return why the models of a recipe must return logits; None if they need not."""
    if plan.strategy.single_process:  # copies modules, but the `forward` of a copied head would call the first
        return f"the strategy {plan.strategy.name} runs copies of the head at once"
    if asked_for("second_model", plan.recipe):
        return "a second model's logits are compared with them"
    return next((why for part in built if (why := why_whole(part.model))), None)


def _note(way: Way, model: Any, plan: RunPlan) -> str:
    recipe, batch, layout = plan.recipe, plan.batch, plan.layout
    vocabulary = -(-model.config.get_text_config().vocab_size // layout.ranks_per_row)
    texts = recipe.task.texts_per_row or 1
    tokens = batch.micro_batch_tokens or batch.micro_batch_size * texts * recipe.data.max_length
    token_bytes = vocabulary * (4 if recipe.precision == "fp32" else 2)
    head = model.get_output_embeddings()
    is_trained = isinstance(head, Absent) or head.weight.requires_grad
    passes = way.passes(tokens, token_bytes, is_trained)
    if passes.rows >= tokens and is_trained:
        return f"the head keeps up to {size(tokens * token_bytes)} of logits, and their gradient takes their place"
    chunk = min(tokens, passes.rows)
    at_once = f"the head computes the logits of {chunk:,} tokens at a time, {size(chunk * token_bytes)}"
    if narrow_precision(recipe.precision) is not None or (is_trained and not way.sums):
        return f"{at_once}, in the forward pass and again in the backward pass"
    return f"{at_once}, with loss and gradient in the forward pass"


def why_whole(model: Any) -> str | None:
    """Return why the head of a model must return the logits of the whole vocabulary; None if it need not."""
    kind = model.config.model_type
    # Only of families in the table is it known that nothing happens to the logits after the head.
    if kind not in FAMILIES or isinstance(getattr(model, "final_logits_bias", None), Tensor):
        return f"a model of type {kind} may change the logits after its head"
    head = model.get_output_embeddings()
    if isinstance(head, Absent):
        return None
    # The losses multiply by the head's weight directly, so nothing may change its output.
    if product_of(head) is not None or rows_of(head) is not None or head._forward_hooks:
        return "an adapter changes the logits of its head"
    if type(head) not in (nn.Linear, ColumnParallelLinear):
        return f"its head is no linear layer, but a {type(head).__name__}"
    return None
