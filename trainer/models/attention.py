"""Attention function of transformers' models under layout-invariant dropout.

It is registered with transformers under `KEYED_ATTENTION`. Without keyed dropout (evaluation, or probability 0), it
calls transformers' SDPA, or torch's variable-length attention in place of a mask. With it, it calls the fused kernel on
a GPU. Elsewhere, and for arguments that the kernel does not take, it materialises the probabilities and applies the
keyed mask to them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.base.errors import UsageError
from trainer.models.dropout import ReplaceCalledDropout, has_site, site_of
from trainer.parallel import varlen
from trainer.parallel.dropout import REMEDY
from trainer.parallel.dtypes import at_least_fp32, is_narrow
from trainer.parallel.kernel_support import KERNELS, missing
from trainer.parallel.random import LANES

if TYPE_CHECKING:
    from trainer.parallel.flat_rows import FlatRows

KEYED_ATTENTION = "trainer_keyed"
OWN_ATTENTION = "trainer_own"
"""The attention function of the model's own file in transformers, with keyed dropout."""
FLAT_ATTENTION = "trainer_packed"
"""The same function for rows that are always joined; the model makes no mask."""
FLAT = "flat"
"""The argument of models, layers and attention with the `FlatRows` of their hidden states."""

_TILES = "visible_tiles"
"""The attribute of a mask with its visible tiles."""

_ROWS = "padded_rows"
"""The attribute of a mask with the rows that torch's variable-length attention reads in its place."""

JOINT_STATES = "joint_states"
"""The attribute of an attention module with its `JointStates`, if there are any."""

_VARIANTS = ("softcap", "s_aux", "cache")  # arguments that change the formula


class JointStates(Protocol):
    """Queries, keys and values that one product computes."""

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Return the tensor `[batch, positions, features]` that the states of a call are views of, side by side.

        Each call of attention asks once. None: they are not, or have passed other operations.
        """


def _masked_scores(
    scores: Tensor, attention_mask: Tensor | None, position_bias: Tensor | None, is_causal: bool
) -> Tensor:
    """Return the scores `[batch, heads, queries, keys]` with bias and mask; a boolean mask is True at visible keys."""
    if position_bias is not None:
        scores = scores + position_bias
    # As in transformers' SDPA: a single query is the newest token, and sees every key.
    if attention_mask is None and is_causal and scores.shape[-2] > 1:
        attention_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attention_mask is None:
        return scores
    if attention_mask.dtype == torch.bool:
        # An added mask needs no work in the backward pass. The lowest finite number absorbs every score, and it makes
        # the probabilities of a fully masked row uniform instead of NaN.
        lowest = torch.finfo(scores.dtype).min
        attention_mask = scores.new_zeros(attention_mask.shape).masked_fill_(attention_mask.logical_not(), lowest)
    return scores + attention_mask


def keyed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    row_keys: Tensor | None = None,
    whole: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute scaled dot-product attention with a dropout mask that does not depend on the layout.

    Args:
        module: the calling attention module, which holds its dropout site.
        query: the queries `[batch, heads, queries, head_dim]`.
        key: the keys `[batch, key_value_heads, keys, head_dim]`.
        value: the values `[batch, key_value_heads, keys, head_dim]`.
        attention_mask: a boolean mask (True: visible) or an additive mask, broadcastable to
            `[batch, heads, queries, keys]`, or None.
        dropout: the dropout probability of the attention probabilities; 0 outside training.
        scaling: the factor of the scores; None means `head_dim ** -0.5`.
        is_causal: whether a missing mask means a causal mask; None takes the module's value.
        position_bias: the bias that is added to the scores (T5), or None.
        row_keys: the keys of the rows for the dropout mask, as in `DropoutSite.drop`.
        whole: queries, keys and values side by side; see `JointStates`.

    Returns:
        The output `[batch, queries, heads, head_dim]`, and the probabilities before dropout: None from SDPA and from
        the fused kernel.

    Raises:
        UsageError: the model needs a variant of attention that has no keyed form.
    """
    if variant := variant_of(kwargs):  # SDPA would ignore some of them
        raise UsageError(f"this model's attention uses {variant}, which has no keyed form; {REMEDY}")
    # No keyed mask is drawn; transformers' function has torch's own dropout too.
    if dropout == 0.0 or not has_site(module):
        rows = getattr(attention_mask, _ROWS, None)
        if rows is not None and dropout == 0.0 and position_bias is None:
            states = (in_autocast_type(query), in_autocast_type(key), in_autocast_type(value))
            if varlen.obstacle(*states) is None:
                return rows.attention(*states, scale_of(query, scaling)), None
        if position_bias is not None and is_narrow(query):  # else its gradient would be summed over rows in fp16
            position_bias = position_bias.expand(len(query), -1, -1, -1)
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, position_bias=position_bias, **kwargs,
        )  # fmt: skip
        return output
    scale = scale_of(query, scaling)
    causal = is_causal_call(module, is_causal)
    if missing("attention", query.device) is None:
        inputs = _Inputs(
            in_autocast_type(query), in_autocast_type(key), in_autocast_type(value), attention_mask, position_bias
        )
        obstacle = _obstacle(module, inputs)
        if obstacle is None:
            return _fused(module, inputs, dropout, scale, causal, row_keys, whole), None
        warnings.warn(f"attention with dropout stores its probabilities, because {obstacle}", stacklevel=2)
    # Grouped heads: each head of keys serves `groups` heads of queries.
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = _masked_scores(at_least_fp32(scores), attention_mask, position_bias, causal)
    # The softmax is in fp32, the product after it in the type of the values, as in transformers' eager functions.
    probabilities = torch.softmax(scores, dim=-1).to(value.dtype)
    dropped = site_of(module).drop(probabilities, dropout, row_keys)
    return torch.matmul(dropped, value).transpose(1, 2).contiguous(), probabilities


def variant_of(options: Mapping[str, Any]) -> str | None:
    """Return an argument that changes the formula, of those that a form of attention has no name for; None: none."""
    return next((name for name in ("position_bias", *_VARIANTS) if options.get(name) is not None), None)


def scale_of(query: Tensor, given: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if given is None else given


def is_causal_call(module: nn.Module, given: bool | None) -> bool:
    # transformers' SDPA has the same default for a module without this attribute.
    return bool(getattr(module, "is_causal", True) if given is None else given)


class _Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:3], self.key.shape[2])


def in_autocast_type(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def _obstacle(module: nn.Module, inputs: _Inputs) -> str | None:
    """Return the reason why the fused kernel does not take the arguments of a call; None if it takes them."""
    query, key, value, mask, bias = inputs
    if obstacle := obstacle_of_states(query, key, value):
        return obstacle
    for name, added in (("mask", mask), ("position bias", bias)):
        if added is not None and not _broadcasts(added, inputs.shape):
            return f"the fused kernel does not take a {name} {list(added.shape)} for scores {list(inputs.shape)}"
    # A word of random bits serves several neighbouring keys, so a rank must begin at the first key of a word.
    if site_of(module).offsets(inputs.shape)[3] % LANES:
        return f"the first key of this rank is no multiple of {LANES}"
    # The kernel stores no probabilities, so it cannot return them.
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return "the model returns its attentions"
    return None


def obstacle_of_states(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    kernel = KERNELS["attention"]
    if query.dtype not in kernel.DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"the fused kernel does not compute in {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > kernel.MAX_HEAD_DIM:
        return f"heads of the fused kernel have at most {kernel.MAX_HEAD_DIM} dimensions"
    return None


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
    return len(sizes) == len(shape) and all(length in (1, size) for length, size in zip(sizes, shape, strict=True))


def _fused(
    module: nn.Module,
    inputs: _Inputs,
    dropout: float,
    scale: float,
    causal: bool,
    row_keys: Tensor | None,
    whole_states: Tensor | None,
) -> Tensor:
    """Return the output `[batch, queries, heads, head_dim]` of the fused kernel."""
    query, key, value, mask, bias = inputs
    shape, site = inputs.shape, site_of(module)
    is_causal = causal and mask is None and query.shape[2] > 1
    if mask is not None and mask.requires_grad:  # the kernel computes the gradient of a bias only
        bias = mask if bias is None else bias + mask
        mask = None
    # `whole` remains the tensor that all layers share; the views of `_expanded` are new for each layer.
    whole, mask, bias = mask, _expanded(mask, shape), _expanded(bias, shape)
    tiles = _tiles(whole, mask, inputs) or (None, None)
    if row_keys is None:
        row_keys = site.keys.row_keys(site.name, shape)
    offsets = site.offsets(shape)[1:]
    output: Tensor = KERNELS["attention"].fused_attention(
        query, key, value, row_keys, mask, bias, tiles[0], tiles[1], scale, dropout, is_causal, offsets,
        whole=whole_states,
    )[0]  # fmt: skip
    return output


def _tiles(whole: Tensor | None, mask: Tensor | None, inputs: _Inputs) -> tuple[Tensor, Tensor] | None:
    """Return the visible tiles of `mask`, which is `whole` with all its sizes; layers that share `whole` share them."""
    query, key, value = inputs[:3]
    tiles: tuple[Tensor, Tensor] | None
    if whole is None or torch.compiler.is_compiling():
        tiles = KERNELS["attention"].visible_tiles(mask, query, key, value)
        return tiles
    # The version tells of a change in place, after which the tiles would be wrong.
    facts = (whole._version, inputs.shape)
    kept: tuple[Any, tuple[Tensor, Tensor] | None] | None = getattr(whole, _TILES, None)
    if kept is None or kept[0] != facts:
        kept = (facts, KERNELS["attention"].visible_tiles(mask, query, key, value))
        # Kept on the mask itself, so the tiles are freed together with it.
        setattr(whole, _TILES, kept)
    return kept[1]


def _expanded(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor[(None,) * (len(shape) - tensor.dim())]
    return tensor.expand(*tensor.shape[:2], *shape[2:])


def attention_notes(model: nn.Module, device: torch.device) -> list[str]:
    """Return notes on the functions that compute attention with dropout or of flat rows, on a GPU.

    There are none for other models.
    """
    form = FORMS.get(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    return form.notes(model, device, missing("attention", device)) if form and device.type == "cuda" else []


def notes_of_masks(model: nn.Module, device: torch.device, obstacle: str | None) -> list[str]:
    dropped = "runs in the fused kernel" if obstacle is None else f"stores its probabilities, because {obstacle}"
    if (reason := varlen.obstacle_of_device(device)) is None:
        masked = "reads padded rows by torch's variable-length attention in 16 bits, and other masks by torch's SDPA"
    else:
        masked = f"passes masks of padding to torch's SDPA, because {reason}"
    return [f"attention with dropout {dropped}", f"attention without dropout {masked}"]


def notes_of_rows(model: nn.Module, device: torch.device, obstacle: str | None) -> list[str]:
    is_keyed = any(map(has_site, model.modules()))
    notes = []
    if not is_keyed:
        notes.append("attention pads flat rows for torch's dropout: only layout-invariant dropout has a kernel")
    if obstacle is None:
        reads = "attention reads flat rows without padding in the fused kernel"
        notes.append(reads if is_keyed else f"{reads}, where it has no dropout")
    else:
        notes.append(f"attention pads flat rows, because {obstacle}")
    if varlen.obstacle_of_device(device) is None:
        notes.append("without dropout in 16 bits, torch's variable-length attention reads flat rows")
    return notes


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    flat: FlatRows | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute `keyed_attention`, also for tokens without padding.

    With `flat`, queries, keys, values and output have a batch of 1, and one position for each token. The mask is that
    of the rows, and `attention_mask` is not read. No probabilities are returned.
    """
    joint: JointStates | None = getattr(module, JOINT_STATES, None)
    whole = None if joint is None else joint.whole(query, key, value)
    if flat is not None:
        return _of_rows(module, query, key, value, flat, whole=whole, **options), None
    return keyed_attention(module, query, key, value, attention_mask, whole=whole, **options)


def _attention_of_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any, *, flat: FlatRows, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute `attention` for flat rows, which need no mask: each token sees those of its row."""
    return attention(module, query, key, value, None, flat, **options)


def _own_attention(module: nn.Module, *states: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of the model's own file, with a dropout mask that does not depend on the layout."""
    # Each model file of transformers has its own function, with its own formula.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    with ReplaceCalledDropout([site_of(module)]) if module.training and has_site(module) else nullcontext():
        output: tuple[Tensor, Tensor | None] = eager(module, *states, **options)
    return output


def next_row_keys(module: nn.Module, query: Tensor, flat: FlatRows | None) -> Tensor:
    """Return the keys of the rows of a microbatch for the next call of attention, int64 `[batch]`."""
    site = site_of(module)
    # Flat states have a batch of 1; the keys are those of the padded rows, so both forms draw equal masks.
    shape = query.shape if flat is None else (flat.shape[0], query.shape[1], *flat.shape[1:] * 2)
    return site.keys.row_keys(site.name, shape)


def _of_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    flat: FlatRows,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    whole: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the output `[1, tokens, heads, head_dim]` of attention inside of the rows of `flat`.

    The fused kernel and torch's variable-length attention read the flat rows. Where neither runs, rows are padded: on
    a CPU in groups of similar length, and for torch's dropout, which neither draws.
    """
    if variant := variant_of(kwargs):
        raise UsageError(
            f"this model's attention uses {variant}, which has no form for rows without padding; set"
            " `data.padding_free` to false"
        )
    row_keys = next_row_keys(module, query, flat) if dropout and has_site(module) else None
    scale, causal = scale_of(query, scaling), is_causal_call(module, is_causal)
    window = None if sliding_window is None else sliding_window - 1  # transformers counts the query too
    states = (in_autocast_type(query), in_autocast_type(key), in_autocast_type(value))
    if not dropout and varlen.obstacle(*states) is None:
        return varlen.attention(*states, flat.starts, max(flat.lengths), scale, causal, window)
    if missing("attention", query.device) is None and (row_keys is not None or not dropout):
        obstacle = obstacle_of_states(*states)
        if obstacle is None:
            keys, first_head = flat.order, 0  # neither is read without dropout
            if row_keys is not None:
                # Flat rows lie in another order than the rows of the microbatch.
                keys, first_head = row_keys[flat.order], site_of(module).offsets(query.shape)[1]
            output: Tensor = KERNELS["attention"].fused_attention(
                *states, keys, None, None, None, None, scale, dropout, causal, [first_head, 0, 0],
                flat.starts, flat.lengths, window, whole,
            )[0]  # fmt: skip
            return output
        warnings.warn(f"attention pads flat rows, because {obstacle}", stacklevel=2)
    outputs = []
    # Rows of similar length are padded together, which keeps the padded share small.
    for group in flat.groups:
        rows = [group.pad(tensor.transpose(1, 2)).transpose(1, 2) for tensor in (query, key, value)]
        padded, _ = keyed_attention(
            module, rows[0], rows[1], rows[2], group.mask(window, causal), dropout, scaling, is_causal,
            row_keys=None if row_keys is None else row_keys[group.rows], **kwargs,
        )  # fmt: skip
        outputs.append(group.join(padded))
    return torch.cat(outputs).unsqueeze(0)


_IS_PADDED: ContextVar[bool | None] = ContextVar("is_padded", default=None)


@contextmanager
def padding_known(is_padded: bool | None) -> Iterator[None]:
    """Set whether inputs are padded, for the mask functions in this context.

    transformers calls these functions by name, so they get no further argument. Without this value they read the mask,
    and the host waits. Models with torch's own dropout use the name "sdpa", which other models of the process share; so
    its function is replaced inside of this context only.

    Args:
        is_padded: whether a mask of the inputs hides a position; None: not known.
    """
    before, replaced = _IS_PADDED.set(is_padded), ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _mask)
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", replaced)
        _IS_PADDED.reset(before)


def _mask(attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return the mask of `sdpa_mask` for the same arguments, without a read of its values if they are known."""
    is_padded = _IS_PADDED.get()
    if is_padded is False:
        # Without a mask, SDPA can choose its fastest kernels.
        attention_mask = None  # no position is hidden
    if is_padded and attention_mask is not None:
        # Else, transformers would read the values of the mask, to find out whether it can be left out.
        options = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **options)
    if mask is not None and is_padded is not None and varlen.obstacle_of_device(mask.device) is None:
        from trainer.models.padded_attention import rows_of

        setattr(mask, _ROWS, rows_of(attention_mask, options))
    return mask


def hides_nothing() -> bool:
    """Return whether inputs are known to have no padding; see `padding_known`."""
    return _IS_PADDED.get() is False


@dataclass(frozen=True)
class AttentionForm:
    """Facts about a function of attention that is registered with transformers.

    Attributes:
        notes: returns the notes on a model on a GPU, given the reason why the fused kernel does not run; None: it runs.
        flat: the function for rows that are always joined.
    """

    notes: Callable[[nn.Module, torch.device, str | None], list[str]]
    flat: str = FLAT_ATTENTION


_OF_TORCH = "attention runs in torch's SDPA; a mask of padding or of a window keeps FlashAttention off"
FORMS = {
    KEYED_ATTENTION: AttentionForm(notes_of_masks),
    FLAT_ATTENTION: AttentionForm(notes_of_rows),
    "sdpa": AttentionForm(lambda *_: [_OF_TORCH]),
}
"""The forms of registered functions by name; a feature adds its functions."""

ALL_ATTENTION_FUNCTIONS.register(KEYED_ATTENTION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(KEYED_ATTENTION, _mask)
ALL_ATTENTION_FUNCTIONS.register(OWN_ATTENTION, _own_attention)
# Functions of model files add the mask to their scores, so they need the additive form.
ALL_MASK_ATTENTION_FUNCTIONS.register(OWN_ATTENTION, eager_mask)
ALL_ATTENTION_FUNCTIONS.register(FLAT_ATTENTION, _attention_of_rows)
ALL_MASK_ATTENTION_FUNCTIONS.register(FLAT_ATTENTION, lambda *_, **__: None)
