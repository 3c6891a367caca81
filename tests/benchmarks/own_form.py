"""ModernBERT in the form of its authors' repository (AnswerDotAI/ModernBERT, `FlexBert`), on fake tensors.

All rows are joined once, so a layer has tokens without padding. A kernel of flash-attn rotates queries and keys in
place, another one attends inside of rows, and a third one has the loss of masked words. Operations without values stand
for these kernels. Their recipe `modernbert-base-pretrain.yaml` names the form: `padding: unpadded`, `masked_prediction`
and `fa_cross_entropy`. Its compiled parts, its dropout of attention's outputs and StableAdamW are left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.families.table import layers_of
from trainer.parallel.launching import MOVED
from trainer.parallel.microbatch import Microbatch

_NAMESPACE = "own_form"
_SCHEMAS = {
    "rotate_": "(Tensor(a!) qk, Tensor cos, Tensor sin, Tensor starts) -> ()",
    "attention": "(Tensor qkv, Tensor starts) -> (Tensor, Tensor)",
    "attention_backward": "(Tensor gradient, Tensor qkv, Tensor output, Tensor log_sums, Tensor starts) -> Tensor",
    "places": "(Tensor mask, int number) -> Tensor",
    "cross_entropy": "(Tensor logits, Tensor labels) -> (Tensor, Tensor, Tensor)",
    "cross_entropy_backward": "(Tensor gradient, Tensor logits, Tensor log_sums, Tensor labels) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"{_NAMESPACE}::{_name}", _schema)
_OF = torch.ops.own_form
MOVED[_OF.rotate_] = lambda inputs: [inputs[0], *inputs]  # queries and keys are read, and written in place


@torch.library.register_fake(f"{_NAMESPACE}::rotate_")
def _nothing(*_: Tensor) -> None:
    return None


@torch.library.register_fake(f"{_NAMESPACE}::attention")
def _output_and_sums(qkv: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    tokens, _, heads, _ = qkv.shape
    return torch.empty_like(qkv[:, 0], memory_format=torch.contiguous_format), qkv.new_empty(
        heads, tokens, dtype=torch.float32
    )


@torch.library.register_fake(f"{_NAMESPACE}::attention_backward")
def _packed_gradient(gradient: Tensor, qkv: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(qkv)


@torch.library.register_fake(f"{_NAMESPACE}::places")
def _numbers(mask: Tensor, number: int) -> Tensor:
    return mask.new_empty(number, dtype=torch.int64)


@torch.library.register_fake(f"{_NAMESPACE}::cross_entropy")
def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    losses, log_sums, z_losses = (logits.new_empty(len(labels), dtype=torch.float32) for _ in range(3))
    return losses, log_sums, z_losses


@torch.library.register_fake(f"{_NAMESPACE}::cross_entropy_backward")
def _gradient(gradient: Tensor, logits: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(logits)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, starts)
        _OF.rotate_(qkv[:, :2], cos, sin, starts)
        return qkv

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _OF.rotate_(gradient[:, :2], *ctx.saved_tensors)
        return gradient, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, starts: Tensor) -> Tensor:
        output, log_sums = _OF.attention(qkv, starts)
        ctx.save_for_backward(qkv, output, log_sums, starts)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _OF.attention_backward(gradient, *ctx.saved_tensors), None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses, log_sums, _ = _OF.cross_entropy(logits, labels)
        ctx.save_for_backward(logits, log_sums, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _OF.cross_entropy_backward(gradient, *ctx.saved_tensors), None


def _attend(attention: nn.Module, hidden: Tensor, *, tables: Tensor, starts: Tensor, **_: Any) -> tuple[Tensor, None]:
    qkv = attention.Wqkv(hidden).view(len(hidden), 3, -1, attention.head_dim)
    output = _Attention.apply(_Rotation.apply(qkv, *tables, starts), starts)
    return attention.Wo(output.view(hidden.shape)), None


class OwnForm(nn.Module):
    """The loss of masked words of a ModernBERT of transformers, whose layers have the authors' kernels.

    Args:
        longest: the number of positions in the tables of cosines and sines, which live as long as the model.
    """

    def __init__(self, model: nn.Module, longest: int) -> None:
        super().__init__()
        self.model = model
        for layer in layers_of(model).values():
            layer.attn.forward = partial(_attend, layer.attn)
        # of half of a head, in the type of queries
        self.tables = torch.empty(2, longest, layer.attn.head_dim // 2, dtype=torch.bfloat16)

    def forward(self, words: Tensor, labels: Tensor, starts: Tensor, number: int) -> Tensor:
        """Return the mean loss of the masked words, of which there are `number`."""
        body = self.model.model
        hidden = body.embeddings(words)
        for layer in body.layers:
            hidden = layer(hidden, tables=self.tables, starts=starts)
        hidden = body.final_norm(hidden)
        mask = labels != -100
        hidden, labels = (tensor[_places(mask, number)] for tensor in (hidden, labels))
        logits = self.model.decoder(self.model.head(hidden))
        return _CrossEntropy.apply(logits, labels).sum() / (labels != -100).sum()


def _places(mask: Tensor, number: int) -> Tensor:
    """Return the places of the true values, whose number the host waits for."""
    mask[0].item()
    return _OF.places(mask, number)


def joined_loss(form: Any, microbatch: Microbatch) -> Tensor:
    """Return the loss of a microbatch, with its rows joined; the lengths come with the batch."""
    words, flat = microbatch.inputs["input_ids"], microbatch.flat
    return form(words.flatten(), microbatch.labels.flatten(), flat.starts, microbatch.num_labels)
