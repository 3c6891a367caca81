"""The rows of one forward pass, and those of one rank in one optimizer step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.parallel.flat_rows import FlatRows


IGNORED_LABEL = -100
"""The label of positions without a label, such as padding: the default of `torch.nn.functional.cross_entropy`."""

POOLED = "pooled_tokens"
"""The input that is 1 for the tokens to pool and 0 for those of a prompt, which no model of transformers takes."""


class TokenMasking(Protocol):
    """The masking of a task that makes labels from tokens, in each epoch others.

    Attributes:
        mask_token: the id that hides a token.
        ordinary_tokens: the ids of the tokens that it draws in place of others, int64 `[ordinary]`.
    """

    @property
    def mask_token(self) -> int: ...

    @property
    def ordinary_tokens(self) -> Tensor: ...

    def __call__(self, input_ids: Tensor, rows: Tensor, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Return the tokens with masks and the labels; for arguments see `data/collate.py`."""
        ...

    def at(self, step: int, total_steps: int) -> TokenMasking:
        """Return the masking of a step (from 0) of a training; it may depend on the step."""
        ...


@dataclass(frozen=True)
class Microbatch:
    """The rows of one forward pass.

    `inputs` are the model's keyword arguments, each `[batch, sequence]`, or `[batch, texts, sequence]` for rows of
    several texts; `labels` are `[batch]` or `[batch, sequence]`, or `[batch, 0]` for rows without labels;
    `rows` `[batch]` (int64) is the index of each row in its global batch, which keys its dropout masks. A `filler`
    repeats a row so that a rank without rows joins the collectives; it adds nothing to loss, gradients or metrics.
    `flat` are the tokens of the rows on the device of the model, if its layers process them without padding.
    `ahead` is a copy on that device that was begun before. `is_padded` is the result of `has_padding`, if it is known,
    and `num_labels` the number of labelled tokens.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    rows: Tensor
    filler: bool = False
    flat: FlatRows | None = None
    ahead: BegunCopy | None = None
    is_padded: bool | None = None
    num_labels: int | None = None

    @cached_property
    def hidden(self) -> Tensor | None:
        """The `hidden_positions` of the rows, which the loop counts and the forward pass looks at."""
        return hidden_positions(self.inputs)

    @property
    def text_rows(self) -> Tensor:
        """The index of each text in its global batch `[batch * texts]`, which keys its dropout masks."""
        return text_rows(self.rows, self.inputs)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.inputs.values(), self.labels, self.rows]

    def map(self, function: Callable[[Tensor], Tensor]) -> Microbatch:
        """Return the microbatch with the results of `function` as `tensors`."""
        return replace(
            self,
            inputs={name: function(tensor) for name, tensor in self.inputs.items()},
            labels=function(self.labels),
            rows=function(self.rows),
            # A copy that was begun has the tensors of before.
            ahead=None,
        )

    def to(self, device: torch.device) -> Microbatch:
        """Copy to `device`, asynchronously from pinned memory; or return the copy that was begun before, once."""
        copied = self.ahead.take() if self.ahead is not None else None
        return copied or self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Microbatch:
        """Copy to page-locked memory; the `DataLoader` calls this in its own thread."""
        return self.map(lambda tensor: tensor.pin_memory())


def hidden_positions(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of positions of each row that masks in `inputs` hide, int64 `[batch]`; None without a mask."""
    masks = [tensor for name, tensor in inputs.items() if name.endswith("attention_mask")]
    return torch.stack([(mask == 0).flatten(1).sum(1) for mask in masks]).sum(0) if masks else None


def positions(microbatches: Iterable[Microbatch]) -> tuple[int, int]:
    """Return how many positions of microbatches on the host hold padding, and how many there are.

    All of a filler is padding, and microbatches without a mask have no positions.
    """
    hidden = places = 0
    for microbatch in microbatches:
        number = sum(mask.numel() for name, mask in microbatch.inputs.items() if name.endswith("attention_mask"))
        hidden += number if microbatch.filler else 0 if microbatch.hidden is None else int(microbatch.hidden.sum())
        places += number
    return hidden, places


def has_padding(hidden: Tensor | None) -> bool | None:
    """Return whether rows have padding, from their `hidden_positions` on the host; None without a mask."""
    return None if hidden is None else int(hidden.sum()) > 0


class BegunCopy(Protocol):
    """A copy of a microbatch on the device of the model that was begun before it is needed."""

    def take(self) -> Microbatch | None:
        """Return the copy; None if it was taken before, or is not begun."""


class CopyAhead:
    """A copy of a microbatch on a GPU, made on another stream than that of the model.

    Args:
        microbatch: the microbatch in pinned memory.
        stream: the stream for copies, on the GPU.
        waiting: the copies that are not begun, in the order of their use. The first one begins when this one is taken,
            so that the GPU holds at most two. Each must be taken, in this order.
    """

    def __init__(self, microbatch: Microbatch, stream: torch.cuda.Stream, waiting: deque[CopyAhead]) -> None:
        self._source, self._stream, self._waiting = microbatch, stream, waiting
        self._copied: tuple[Microbatch, torch.cuda.Event] | None = None

    def begin(self) -> None:
        with torch.cuda.stream(self._stream):
            self._copied = self._source.to(self._stream.device), self._stream.record_event()

    def take(self) -> Microbatch | None:
        """Return the copy for use on the current stream, which waits for it; None if it was taken before.

        The host does not wait.
        """
        copied, self._copied = self._copied, None
        if copied is None:
            return None
        # The next copy begins before this one is used, so it runs beside the passes of this microbatch.
        if self._waiting:
            self._waiting.popleft().begin()
        copy, done = copied
        current = torch.cuda.current_stream(copy.rows.device)
        current.wait_event(done)
        for tensor in copy.tensors:
            # The memory belongs to the stream for copies, which could reuse it while this stream still reads it.
            tensor.record_stream(current)
        return copy


def copied_ahead(batches: Iterable[RankBatch], device: torch.device) -> Iterator[RankBatch]:
    """Yield batches in pinned memory. Their microbatches are copied to a GPU one ahead, on a stream of their own.

    A copy then runs beside the passes of the microbatch before it, also of that at the end of the step before, and also
    if the host waits for each step.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: deque[CopyAhead] = deque()
    before: RankBatch | None = None
    for batch in batches:
        # Added before the batch before is used: its last copy, once taken, begins the first one of these.
        copies = [CopyAhead(microbatch, stream, waiting) for microbatch in batch.microbatches]
        waiting.extend(copies)
        # No earlier copy begins the first one.
        if before is None:
            waiting.popleft().begin()
        else:
            yield before
        ahead = zip(batch.microbatches, copies, strict=True)
        before = replace(batch, microbatches=[replace(microbatch, ahead=copy) for microbatch, copy in ahead])
    if before is not None:
        yield before


def text_rows(rows: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the index of each text in its global batch `[batch * texts]`; `rows` `[batch]` for single texts."""
    tokens = inputs.get("input_ids")
    if tokens is None or tokens.dim() < 3:
        return rows
    num_texts = tokens.shape[1]
    return (rows[:, None] * num_texts + torch.arange(num_texts, device=rows.device)).flatten()


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of one global batch.

    All ranks have the same number of microbatches in a step. `num_rows` and `num_tokens` (without padding) count the
    global batch over all ranks, without communication. `place` is the place of the next row; None: the number of rows
    gives it.
    """

    microbatches: list[Microbatch]
    num_rows: int
    num_tokens: int
    place: tuple[int, int, int] | None = None

    def pin_memory(self) -> RankBatch:
        return replace(self, microbatches=[microbatch.pin_memory() for microbatch in self.microbatches])
