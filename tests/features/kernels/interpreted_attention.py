"""The fused attention kernel in Triton's interpreter against the eager function; `test_fused_attention.py` runs it.

Triton chooses its interpreter when it is imported, so these tests need a process of their own:

    TRITON_INTERPRET=1 python -m pytest tests/features/kernels/interpreted_attention.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton  # noqa: F401  # the kernels run where it is imported as an interpreter
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.gpu import test_attention_gpu
from tests.helpers.families import CONFIGS, build, inputs_of
from trainer.features.context.blocks import Block, BlockAttention, BlockMask, Sums
from trainer.features.kernels import fused_attention
from trainer.models.attention import FLAT_ATTENTION, keyed_attention
from trainer.models.checkpointing import checkpoint_layers
from trainer.models.dropout import key_dropout, move_site, site_of
from trainer.models.families.table import layers_of
from trainer.parallel import kernel_support
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.flat_rows import FlatRows
from trainer.parallel.random import element_keys, keep_mask
from trainer.tools.plan.work import FLOPS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the lowest score, scaled

KEY = MicrobatchKey(2, torch.tensor([5, 3]))
BATCH = KEY.rows.numel()
LOWEST = torch.finfo(torch.float32).min


def test_the_interpreter_is_on():
    assert kernel_support.is_interpreted()
    assert kernel_support.obstacle(torch.device("cpu")) is None


@contextmanager
def eager() -> Iterator[None]:
    with mock.patch.object(kernel_support, "obstacle", return_value="the test wants the eager function"):
        yield


@contextmanager
def fused() -> Iterator[None]:
    """Fail where the eager function runs."""
    with mock.patch("trainer.models.attention.torch.softmax", side_effect=AssertionError("not fused")):
        yield


@pytest.fixture(autouse=True)
def kept_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep masks in fp32 too, the type of most tests."""
    monkeypatch.setattr(fused_attention, "_BITS_SIZE", 4)


@contextmanager
def drawn_again() -> Iterator[None]:
    """Let each kernel draw the masks, and keep none."""
    with mock.patch.object(fused_attention, "keeps_bits", return_value=False):
        yield


@contextmanager
def listed_tiles() -> Iterator[None]:
    """List visible tiles of masks that are too short for it."""
    with mock.patch.object(fused_attention, "_LISTED_KEYS", 1):
        yield


class Attention(nn.Module):
    is_causal = False


@dataclass(frozen=True)
class Case:
    """The arguments of a call; see `keyed_attention`. `tensors` make masks and biases from a generator."""

    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (1, 1)
    lengths: tuple[int, int] = (11, 20)
    dims: tuple[int, int] = (16, 16)
    mask: str = ""
    bias: tuple[int, ...] | None = None
    dropout: float = 0.3
    causal: bool = False
    lists: bool = False
    part: int = 0

    def tensors(self) -> list[Tensor]:
        """Query, key, value, and the bias if there is one, as projections make them."""
        random = torch.Generator().manual_seed(0)
        shapes = [
            (self.heads[0], self.lengths[0], self.dims[0]),
            *[(self.heads[1], self.lengths[1], d) for d in self.dims],
        ]
        found = [
            torch.randn(BATCH, length, heads, dim, generator=random).to(self.dtype).transpose(1, 2)
            for heads, length, dim in shapes
        ]
        if self.bias is not None:
            found.append(torch.randn(self.bias, generator=random))
        return found

    def masked(self) -> Tensor | None:
        queries, keys = self.lengths
        visible = torch.ones(BATCH, 1, 1, keys, dtype=torch.bool)
        visible[1, ..., keys // 2 :] = False
        if self.mask == "padding":
            return visible.expand(BATCH, 1, queries, keys)
        if self.mask == "window":
            near = (torch.arange(queries)[:, None] - torch.arange(keys)).abs() < 4
            visible = visible & near
            assert not visible.any(-1).all(), "some queries see nothing"
            return visible
        if self.mask == "documents":
            document = torch.arange(keys) // 13
            return (document[:queries, None] == document)[None, None]
        if self.mask == "keys":
            return visible[:1, 0, 0]
        if self.mask == "additive":
            return torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, torch.finfo(self.dtype).min)
        if self.mask == "infinite":
            return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        return None


def keyed_module() -> tuple[DropoutKeys, nn.Module]:
    keys = DropoutKeys(7)
    model = nn.ModuleDict({"attention": Attention()})
    key_dropout(model, keys)
    return keys, model["attention"]


def call(case: Case, tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """The output and the gradients of query, key, value and bias."""
    keys, module = keyed_module()
    move_site(module, lambda site: replace(site, cut_dim=1, part=case.part))
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    query, key, value, *bias = tensors
    with keys.use(KEY):
        output, _ = keyed_attention(
            module, query, key, value, mask, dropout=case.dropout, scaling=0.4, is_causal=case.causal,
            position_bias=bias[0] if bias else None,
        )  # fmt: skip
    weights = torch.linspace(-1, 1, output.numel()).to(output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


CASES = {
    "plain": Case(lengths=(35, 19)),
    "causal": Case(lengths=(35, 35), causal=True),
    "causal, more queries": Case(lengths=(37, 18), causal=True),
    "grouped heads of a tensor rank": Case(heads=(4, 2), part=1),
    "one query": Case(lengths=(1, 9), causal=True),
    "padding": Case(mask="padding"),
    "window, queries that see nothing": Case(mask="window", lengths=(40, 40)),
    "window, listed": Case(mask="window", lengths=(40, 70), lists=True),
    "documents, listed": Case(mask="documents", lengths=(40, 70), lists=True),
    "mask of keys": Case(mask="keys"),
    "additive mask": Case(mask="additive"),
    "infinite mask": Case(mask="infinite"),
    "bias of T5": Case(bias=(1, 2, 19, 37), mask="padding", heads=(2, 2), lengths=(19, 37)),
    "bias of T5, causal": Case(bias=(1, 1, 35, 35), lengths=(35, 35), causal=True),
    "bias of each row": Case(bias=(BATCH, 1, 1, 20)),
    "bias of keys": Case(bias=(20,), heads=(2, 1)),
    "other size of values": Case(dims=(24, 40)),
    "size 256": Case(dims=(256, 256), lengths=(5, 9)),
    "bf16, size 80": Case(torch.bfloat16, dims=(80, 80), mask="padding"),
    "bf16, bias": Case(torch.bfloat16, bias=(1, 1, 11, 20)),
    "fp16, size 96": Case(torch.float16, dims=(96, 96), mask="additive"),
    "no dropout but a rounding of it": Case(dropout=1e-9),
    "nearly all dropped": Case(dropout=0.9),
}


FURTHER = (
    "plain", "causal, more queries", "one query", "window, queries that see nothing", "mask of keys", "infinite mask",
    "bias of T5, causal", "bias of keys", "other size of values", "bf16, bias", "nearly all dropped",
)  # fmt: skip
"""Cases whose parts others have too."""


def some(names: Iterable[str], further: Collection[str]) -> list[Any]:
    """Return the names as parameters. Those that are further values run nightly."""
    return [pytest.param(name, marks=pytest.mark.nightly if name in further else ()) for name in names]


@pytest.mark.parametrize("name", some(CASES, FURTHER))
def test_outputs_and_gradients_are_those_of_the_eager_function(name: str):
    """The reference computes in fp64 from the same inputs. In 16 bits, the kernel errs as the eager function does.

    A mask that is drawn once gives the bits of one that each kernel draws.
    """
    case = CASES[name]
    tensors, mask = case.tensors(), case.masked()
    with fused(), listed_tiles() if case.lists else mock.MagicMock():
        with mock.patch.object(fused_attention, "_draw", side_effect=fused_attention._draw) as draw:
            found = call(case, tensors, mask)
        assert draw.call_count == (case.dropout > 1e-6)
        with drawn_again():
            drawn = call(case, tensors, mask)
    assert all(map(torch.equal, found, drawn))
    with eager():
        exact = call(case, [tensor.double() for tensor in tensors], mask)
        own = call(case, tensors, mask)
    for result, reference, rounded in zip(found, exact, own, strict=True):
        assert result.dtype == rounded.dtype
        size = reference.abs().max()
        error, eager_error = ((x.double() - reference).abs().max() / size for x in (result, rounded))
        # The interpreter cuts off the digits that bf16 lacks, where torch and GPUs round.
        allowed = 3 if case.dtype == torch.bfloat16 else 1.5
        assert error < max(4e-6, allowed * eager_error), (error, eager_error)


def test_the_mask_is_that_of_the_definition_bit_for_bit():
    """Equal scores and values of an identity show the mask in the output; gradients of an identity show it again."""
    size, heads, probability = 36, 2, 0.4
    query, key = torch.zeros(BATCH, heads, size, 16), torch.zeros(BATCH, heads, size, 16)
    value = torch.eye(size).expand(BATCH, heads, size, size)
    keys, module = keyed_module()
    move_site(module, lambda site: replace(site, cut_dim=1, part=3))
    with keys.use(KEY):
        expected = site_of(module).mask((BATCH, heads, size, size), probability).bool()
    tensors = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    with fused(), keys.use(KEY):
        output, _ = keyed_attention(module, *tensors, None, dropout=probability)
    (of_values,) = torch.autograd.grad(output, tensors[2:], torch.eye(size)[None, :, None].expand_as(output))
    assert torch.equal(output.transpose(1, 2) > 0, expected)
    assert torch.equal(of_values.transpose(2, 3) > 0, expected)


@pytest.mark.parametrize("gradient", [True, False], ids=["drawn once", "drawn by each kernel"])
@pytest.mark.parametrize("offsets", [[4, 3, 0], [0, 5, 8]], ids=["heads and queries", "queries and keys"])
def test_parts_of_a_sequence_have_their_part_of_the_mask(offsets: list[int], gradient: bool):
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(BATCH, 2, 24, 16, generator=random) for _ in range(3))
    keys = DropoutKeys(7)
    shape = (BATCH, 2, 24, 24)
    with keys.use(KEY):
        row_keys = keys.row_keys("a", shape)
    mask = keep_mask(element_keys(row_keys, shape[1:3], offsets[:2]), 24, 0.3, offsets[2])
    output, _ = fused_attention.fused_attention(
        query.requires_grad_(gradient), key, value, row_keys, None, None, None, None, 1.0, 0.3, False, offsets
    )
    probabilities = torch.softmax(query @ key.mT, -1) * mask / 0.7
    torch.testing.assert_close(output, (probabilities @ value).transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["whole", "causal", "joined"])
def test_bits_are_those_of_the_definition(how: str):
    """Each word has the bits of 32 keys of a query, the first key in its lowest bit."""
    heads, size, probability = 2, 70, 0.4
    row_keys, offsets = torch.tensor([5, -3]), [3, 0, 0]
    lengths = [41, size] if how == "joined" else [size, size]
    flat = FlatRows.of(sorted(lengths, reverse=True), size, torch.device("cpu")) if how == "joined" else None
    of_rows = () if flat is None else (flat.starts, flat.lengths)
    sizes = [heads, sum(lengths), sum(lengths)] if flat else [heads, size, size]
    bits = fused_attention._draw(row_keys, None, sizes, probability, how == "causal", offsets, *of_rows)
    kept = (bits.transpose(2, 3).unsqueeze(-1) >> torch.arange(32)) & 1
    kept = kept.flatten(3).bool()  # [batch, heads, queries, keys]
    for row, length in enumerate(flat.lengths if flat else lengths):
        expected = keep_mask(element_keys(row_keys[row : row + 1], (heads, length), offsets[:2]), length, probability)
        start = flat.bounds[row] if flat else 0
        found = kept[0 if flat else row, :, start : start + length, :length]
        # Words without a visible key are not written.
        hidden = torch.ones(length, length).triu(1).bool() & (how == "causal")
        assert torch.equal(found.masked_fill(hidden, 0), expected[0].bool().masked_fill(hidden, 0))


def test_a_mask_is_kept_while_it_is_small_beside_other_tensors():
    """Of heads of 64 in 16 bits, queries, keys, values and output have 512 bytes a token; 2,048 keys half as many."""

    def keeps(length: int, probability: float = 0.1, key_heads: int = 4, **options: Any) -> bool:
        shapes = [(2, heads, length, 64) for heads in (4, key_heads, key_heads)]
        states = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        return fused_attention.keeps_bits(*states, probability, **options)

    assert keeps(2048)
    assert not keeps(2049)
    assert not keeps(2048, key_heads=2)
    assert not keeps(512, probability=0.0)
    assert not keeps(512, window=64)
    assert keeps(4096, lengths=[2048, 2048])
    assert not keeps(4096, lengths=[2049, 2047])
    with mock.patch.object(fused_attention, "_BITS_SIZE", 1):
        assert not keeps(512)


@dataclass(frozen=True)
class Joined:
    """Rows that are joined; see `Case`. Blocks of the interpreter have 16 or 32 tokens."""

    lengths: tuple[int, ...] = (45, 3, 0, 32, 1)
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    dropout: float = 0.3
    window: int | None = None
    causal: bool = False
    part: int = 0


JOINED = {
    "plain": Joined(),
    "window": Joined(window=8),
    "window, causal": Joined(window=20, causal=True, lengths=(33, 70)),
    "causal, grouped heads of a tensor rank": Joined(causal=True, heads=(2, 1), part=1, lengths=(37, 3, 45)),
    "bf16, other size of values": Joined(dtype=torch.bfloat16, dims=(24, 40), window=4),
    "no dropout": Joined(dropout=0.0, window=5),
}


@pytest.mark.parametrize("name", some(JOINED, ("plain", "window", "no dropout")))
def test_joined_rows_are_padded_rows(name: str):
    """All rows in one call: outputs and gradients of padded rows, in fp64 and in the same type."""
    case, random = JOINED[name], torch.Generator().manual_seed(0)
    flat = FlatRows.of(case.lengths, max(case.lengths), torch.device("cpu"))
    states = [
        torch.randn(1, sum(case.lengths), heads, dim, generator=random).to(case.dtype).transpose(1, 2)
        for heads, dim in ((case.heads[0], case.dims[0]), *((case.heads[1], dim) for dim in case.dims))
    ]
    keys, module = keyed_module()
    move_site(module, lambda site: replace(site, cut_dim=1, part=case.part))
    rows = torch.tensor([5, 3, 9, 0, 7])[: len(case.lengths)]

    def attend(dtype: torch.dtype, flat: FlatRows = flat) -> list[Tensor]:
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in states]
        options = {"dropout": case.dropout, "scaling": 0.4, "is_causal": case.causal}
        options["sliding_window"] = None if case.window is None else case.window + 1
        module.num_key_value_groups = case.heads[0] // case.heads[1]
        with keys.use(MicrobatchKey(2, rows, flat)):
            output, _ = ALL_ATTENTION_FUNCTIONS[FLAT_ATTENTION](module, *inputs, None, flat=flat, **options)
        weights = torch.linspace(-1, 1, output.numel()).to(output.dtype).view_as(output)
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    with mock.patch.object(FlatRows, "groups", mock.PropertyMock(side_effect=AssertionError("padded"))):
        found = attend(case.dtype)
        with drawn_again():
            assert all(map(torch.equal, found, attend(case.dtype, flat.of_any_length)))  # as compiled layers call it
    with eager():
        exact, own = attend(torch.float64), attend(case.dtype)
    for result, reference, rounded in zip(found, exact, own, strict=True):
        assert result.dtype == rounded.dtype
        size = reference.abs().max()
        error, eager_error = ((x.double() - reference).abs().max() / size for x in (result, rounded))
        assert error < max(4e-6, (3 if case.dtype == torch.bfloat16 else 1.5) * eager_error), (error, eager_error)


def test_a_query_that_sees_nothing_sees_all_keys_alike():
    case = Case(lengths=(3, 40), dropout=1e-9)
    query, key, value = case.tensors()
    nowhere = torch.zeros(BATCH, 1, 3, 40, dtype=torch.bool)
    with fused(), listed_tiles():
        output = call(case, [query, key, value], nowhere)[0]
    torch.testing.assert_close(output, value.mean(2, keepdim=True).expand(-1, -1, 3, -1).transpose(1, 2))


def test_autocast_chooses_the_type():
    case = Case(mask="padding")
    with torch.autocast("cpu", torch.bfloat16):
        with fused():
            found = call(case, case.tensors(), case.masked())
        with eager():
            expected = call(case, case.tensors(), case.masked())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)


def test_an_additive_mask_with_a_gradient_is_a_bias():
    case = Case(bias=(1, 1, 11, 20))
    query, key, value, bias = case.tensors()
    keys, module = keyed_module()
    gradients = []
    for how in (fused, eager):
        mask = bias.detach().requires_grad_()
        with how(), keys.use(KEY):
            output, _ = keyed_attention(module, query, key, value, mask, dropout=0.3, position_bias=bias)
            gradients.append(torch.autograd.grad(output.square().sum(), mask)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("what", ["fp64", "size", "attentions", "keys"])
def test_what_the_kernel_does_not_take_is_named(what: str):
    case = Case(dims=(272, 16) if what == "size" else (16, 16), lengths=(11, 18))
    query, key, value = (x.double() if what == "fp64" else x for x in case.tensors())
    keys, module = keyed_module()
    if what == "attentions":
        module.config = mock.Mock(output_attentions=True)
    if what == "keys":
        move_site(module, lambda site: replace(site, cut_dim=3, part=1))
    message = {
        "fp64": r"in torch\.float64", "size": "at most 256", "attentions": "returns its attentions",
        "keys": "no multiple of 4",
    }[what]  # fmt: skip
    with keys.use(KEY), pytest.warns(UserWarning, match=f"stores its probabilities, because .*{message}"):
        _, probabilities = keyed_attention(module, query, key, value, None, dropout=0.3)
    assert probabilities is not None


@pytest.mark.parametrize(
    ("name", "middle", "length"),
    [
        ("causal", 8, 12),
        *(
            pytest.param(name, 8, 12, marks=pytest.mark.nightly)
            for name in ("grouped heads of a tensor rank", "infinite mask", "bf16, size 80")
        ),
        pytest.param("documents, listed", 40, 56, marks=pytest.mark.nightly),
        ("grouped heads of a tensor rank", 9, 12),  # rows that are joined begin anywhere
        ("documents, listed", 43, 59),
    ],
)
def test_blocks_of_a_ring_are_the_whole_sequence(name: str, middle: int, length: int, monkeypatch: pytest.MonkeyPatch):
    """Two blocks of queries see two blocks of keys each; torch's operations compute the same blocks."""
    case = replace(CASES[name], lengths=(length, length))
    if case.lists:
        monkeypatch.setattr(fused_attention, "_LISTED_KEYS", 1)
    tensors, mask = case.tensors(), case.masked()
    keys, module = keyed_module()
    move_site(module, lambda site: replace(site, cut_dim=1, part=case.part))
    with eager():
        exact = call(case, [tensor.double() for tensor in tensors], mask)
        own = call(case, tensors, mask)
    with keys.use(KEY):
        row_keys = site_of(module).keys.row_keys(site_of(module).name, tensors[0].shape)
    weights = torch.linspace(-1, 1, own[0].numel()).to(case.dtype).view_as(own[0])
    blocks = (range(middle), range(middle, length))
    for is_fused in (True, False):
        block_mask = None if mask is None else BlockMask.of(mask)
        options = BlockAttention(0.4, case.dropout, block_mask, case.causal, case.part * case.heads[0], is_fused)
        gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        outputs = []
        for queries in blocks:
            query = tensors[0][:, :, queries.start : queries.stop]
            seen = []
            for positions in blocks:
                key, value = (tensor[:, :, positions.start : positions.stop] for tensor in tensors[1:])
                if not options.skips(queries, positions):
                    seen.append(Block(key, value, row_keys, queries, positions))
            sums = Sums.begin(query, tensors[2])
            for block in seen:
                options.forward_block(sums, query, block)
            results = sums.finish(case.dtype)
            outputs.append(results.output)
            for block in seen:
                of_block = [gradients[0][:, :, queries.start : queries.stop]]
                of_block += [gradient[:, :, block.keys.start : block.keys.stop] for gradient in gradients[1:]]
                options.backward_block(of_block, weights[:, queries.start : queries.stop], results, query, block)
        for result, reference, rounded in zip([torch.cat(outputs, 1), *gradients], exact, own, strict=True):
            size = reference.abs().max()
            error, eager_error = ((x.double() - reference).abs().max() / size for x in (result, rounded))
            assert error < max(4e-6, 3 * eager_error), (is_fused, error, eager_error)


def test_a_block_of_a_ring_lists_visible_tiles_only():
    """Tiles have 32 queries and keys. The first 26 queries see none of these keys, but others of the ring."""
    query, key, value = Case(lengths=(40, 36)).tensors()
    mask = CASES["documents, listed"].masked()[..., :40, 34:]  # the third document ends at 39
    assert not mask[..., :26, :].any()
    with listed_tiles():
        alone = fused_attention.visible_tiles(mask, query, key, value)
        in_ring = fused_attention.visible_tiles(mask, query, key, value, other_keys=True)
    assert alone is not None
    assert in_ring is not None
    assert [lists[..., :2].sum().item() for lists in alone] == [3, 3]
    assert [lists[..., :2].sum().item() for lists in in_ring] == [2, 2]


def test_a_batch_without_rows():
    keys = torch.zeros(0, dtype=torch.int64)
    tensors = [torch.zeros(0, 2, 8, 16, requires_grad=True) for _ in range(3)]
    output, _ = fused_attention.fused_attention(*tensors, keys, None, None, None, None, 1.0, 0.1, False, [0, 0, 0])
    assert output.shape == (0, 8, 2, 16)
    assert all(gradient.shape == (0, 2, 8, 16) for gradient in torch.autograd.grad(output.sum(), tensors))


class TestMemory:
    """A mask of padding has one number for each key, so nothing but a bit is needed for each query and key."""

    LENGTH = 96

    def step(self) -> tuple[int, int]:
        """The bytes that the forward pass leaves for the backward pass, and those of the largest allocation of both."""
        case = Case(lengths=(self.LENGTH, self.LENGTH), heads=(1, 1), mask="padding", lists=True)
        tensors = case.tensors()
        keys, module = keyed_module()
        query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
        mask = case.masked()
        with listed_tiles(), keys.use(KEY), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
            output, _ = keyed_attention(module, query, key, value, mask, dropout=0.3)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
            output.sum().backward()
        kept = sum(event.self_cpu_memory_usage for event in forward.events())
        events = [*forward.events(), *backward.events()]
        return kept, max(event.self_cpu_memory_usage for event in events)

    def test_a_bit_for_each_query_and_key_is_allocated_or_nothing(self):
        pairs = BATCH * self.LENGTH**2
        with eager():
            kept, largest = self.step()
        assert kept > 9 * pairs, "the eager function stores probabilities twice, and the mask"
        assert largest >= 4 * pairs
        with fused(), drawn_again():
            kept, largest = self.step()
        with fused():
            kept_with_bits, _ = self.step()
        assert kept_with_bits - kept == BATCH * 128**2 // 8, "a bit for each pair of whole tiles"
        output, sums = BATCH * self.LENGTH * 16 * 4, 2 * BATCH * self.LENGTH * 4
        assert output + sums <= kept < output + sums + 4096, kept  # and the lists of visible tiles
        assert largest <= output
        assert largest < pairs, "not even a byte for each pair"


def test_torch_sees_operations():
    """Their schemas, shapes and strides are right, and a compiled graph has no break."""
    case = Case(lengths=(3, 5), bias=(1, 1, 3, 5), mask="padding")
    query, key, value, bias = (tensor.requires_grad_() for tensor in case.tensors())
    arguments = (query, key, value, torch.tensor([1, 2]), case.masked(), bias, None, None, 0.4, 0.3, False, [0, 0, 0])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.trainer.keyed_attention.default, arguments, test_utils=checks)
    drawn = (torch.tensor([1, 2]), None, [1, 3, 5], 0.3, False, [0, 0, 0])
    torch.library.opcheck(torch.ops.trainer.draw_attention_mask.default, drawn, test_utils=checks)

    def loss(*tensors: Tensor) -> Tensor:
        return fused_attention.fused_attention(*tensors, *arguments[len(tensors) :])[0].square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(query, key, value), (query, key, value, bias))
    found = torch.autograd.grad(compiled(query, key, value), (query, key, value, bias))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("heads", "dim", "with_bias"),
    [((2, 2), 16, False), ((2, 2), 16, True), ((4, 2), 8, True), ((2, 1), 48, False), ((1, 1), 4, True)],
)
def test_states_side_by_side_have_one_gradient(heads: tuple[int, int], dim: int, with_bias: bool):
    """Output and gradients are those of states apart, bit for bit, and states side by side have one gradient."""
    case = Case(heads=heads, lengths=(20, 20), dims=(dim, dim), bias=(1, heads[0], 20, 20) if with_bias else None)
    states = [tensor.transpose(1, 2).flatten(2) for tensor in case.tensors()[:3]]
    bias = case.tensors()[3].requires_grad_() if with_bias else None
    arguments = (torch.tensor([1, 2]), None, bias, None, None, 0.4, 0.3, False, [0, 0, 0])

    def gradients(whole: Tensor, joint: bool) -> tuple[Tensor, ...]:
        parts = fused_attention._parts(whole, case.tensors()[:3])
        output, _ = fused_attention.fused_attention(*parts, *arguments, whole=whole if joint else None)
        inputs = (whole,) if bias is None else (whole, bias)
        return (output, *torch.autograd.grad(output.square().sum(), inputs))

    whole = torch.cat(states, -1).requires_grad_()
    with mock.patch.object(fused_attention, "backward_of", side_effect=fused_attention.backward_of) as backward:
        found, expected = gradients(whole, True), gradients(whole, False)
    assert [len(call.args) > 20 and call.args[20] for call in backward.call_args_list] == [True, False]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Site:
    """A dropout site with the keys of its rows at hand."""

    name = "attention"

    @property
    def keys(self) -> Site:
        return self

    def row_keys(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return KEY.rows

    def offsets(self, shape: tuple[int, ...]) -> list[int]:
        return [0] * len(shape)


def test_the_attention_function_has_no_graph_break(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.models.attention.site_of", lambda module: Site())
    monkeypatch.setattr("trainer.models.attention.has_site", lambda module: True)
    query, key, value = Case(lengths=(5, 20)).tensors()
    mask = torch.arange(20) < 15

    def attend(query: Tensor) -> Tensor:
        return keyed_attention(nn.Module(), query * 2, key, value, mask, dropout=0.3, is_causal=False)[0] + 1

    with listed_tiles():
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(query), attend(query))


def test_its_products_are_counted():
    assert torch.ops.trainer.keyed_attention in FLOPS
    case = Case(heads=(2, 1), lengths=(9, 15), bias=(1, 2, 9, 15), dims=(16, 24))
    tensors = [tensor.requires_grad_() for tensor in case.tensors()]
    with FlopCounterMode(display=False) as counter:
        output, _ = fused_attention.fused_attention(
            *tensors[:3], torch.tensor([1, 2]), None, tensors[3], None, None, 0.4, 0.3, False, [0, 0, 0]
        )
        pairs = 2 * BATCH * 2 * 9 * 15
        assert counter.get_total_flops() == pairs * (16 + 24)
        output.sum().backward()
    assert counter.get_total_flops() == pairs * (16 + 24) + pairs * (5 * 16 + 4 * 24)


HEADS = {"bert": "AutoModelForSequenceClassification", "t5": "AutoModelForSeq2SeqLM",
         "modernbert": "AutoModelForMaskedLM", "llama": "AutoModelForCausalLM"}  # fmt: skip
SMALLER = {"num_hidden_layers": 1, "num_attention_heads": 2}  # the interpreter runs one head after the other
SMALLER_OF = {"t5": {"num_layers": 1, "num_heads": 2}, "llama": {**SMALLER, "num_key_value_heads": 1}}


def logits_and_gradients(model_type: str, checkpointing: str = "none") -> tuple[Tensor, dict[str, Tensor]]:
    keys = DropoutKeys(0)
    with mock.patch.dict(CONFIGS[model_type], SMALLER_OF.get(model_type, SMALLER)):
        model = build(model_type, HEADS[model_type], 0.2, keys)
    for module in model.modules():
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.2
    checkpoint_layers(layers_of(model).values(), checkpointing, keys)
    inputs = {name: tensor[:BATCH] for name, tensor in inputs_of(model_type, HEADS[model_type]).items()}
    with keys.use(KEY):
        logits = model(**inputs).logits
        logits.square().mean().backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("model_type", some(HEADS, ("modernbert", "llama", "t5")))
def test_models_train_as_with_the_eager_function(model_type: str):
    with fused_in_models():
        found = logits_and_gradients(model_type)
    with eager():
        expected = logits_and_gradients(model_type)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@contextmanager
def fused_in_models() -> Iterator[None]:
    with mock.patch("trainer.models.attention.repeat_kv", side_effect=AssertionError("not fused")):
        yield


@pytest.mark.parametrize("name", ["forward_kernel", "draw_kernel"])
def test_selective_checkpointing_keeps_its_output(name: str):
    """The kernel of the forward pass runs once for the one layer; the recomputation draws the mask again."""
    kernel = getattr(fused_attention._kernels(), name)
    with mock.patch.object(type(kernel), "__getitem__", autospec=True, side_effect=type(kernel).__getitem__) as launch:
        found = logits_and_gradients("bert", "selective")
    times = {"forward_kernel": 1, "draw_kernel": 2}[name]
    assert [call.args[0] for call in launch.call_args_list].count(kernel) == times
    with eager():
        expected = logits_and_gradients("bert")
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_the_measurements_on_a_gpu_run():
    """With small sizes, so that a machine with a GPU need not find their mistakes."""
    cpu = torch.device("cpu")
    sizes = test_attention_gpu.Sizes(9, heads=1, key_heads=1, dim=16, mask="window")
    test_attention_gpu.assert_as_exact(replace(sizes, bias=True), torch.float16, cpu)
    assert torch.equal(*test_attention_gpu.mask_in_output(16, cpu, torch.float32))
    steps: list[object] = []
    assert len(test_attention_gpu.speeds(sizes, cpu, lambda step: steps.append(step()) or 1.0)) == len(steps) == 5
    rows = test_attention_gpu.Sizes.joined(9, 3, heads=1, key_heads=1, dim=16, mask="window")
    for dropout in (0.1, 0.0):
        test_attention_gpu.assert_as_exact(rows, torch.float16, cpu, dropout)
    found = test_attention_gpu.speeds_of_rows(rows, cpu, lambda step: steps.append(step()) or 1.0)
    assert len(found) == len(steps) - 5 == 5
