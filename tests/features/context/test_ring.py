"""Attention around a ring of ranks, forward and backward, against the eager function of one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    create_bidirectional_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.helpers.families import VOCABULARY, build
from tests.helpers.ranks import RankPools
from trainer.features.context import blocks
from trainer.features.context.attention import FLAT_HEADS_ATTENTION, HEADS_ATTENTION, RING_ATTENTION
from trainer.features.context.blocks import Block, BlockAttention
from trainer.features.context.cut import ContextCut, ContextSplit
from trainer.models.attention import keyed_attention, padding_known
from trainer.models.dropout import key_dropout, move_site
from trainer.models.tensor_split import split_model
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.flat_rows import FlatRows
from trainer.parallel.kernel_support import load
from trainer.parallel.row_groups import RowGroups

LENGTH = 9
KEY = MicrobatchKey(2, torch.tensor([5, 3, 8]))
BATCH, WIDTH = 3, 4


class Attention(nn.Module):
    is_causal = False


@dataclass(frozen=True)
class Case:
    heads: int = 3
    key_heads: int = 3
    length: int = 23
    mask: str | None = None  # a function of transformers' masks, or a kind of tensor
    pads: bool = True
    causal: bool = False
    dropout: float = 0.3
    dtype: torch.dtype = torch.float64
    flat: bool = False

    def states(self) -> list[Tensor]:
        random = torch.Generator().manual_seed(1)
        sizes = (self.heads, self.key_heads, self.key_heads)
        return [
            torch.randn(BATCH, heads, self.length, WIDTH, generator=random, dtype=torch.float64).to(self.dtype)
            for heads in sizes
        ]

    def masked(self, make: Any) -> Any:
        tokens = torch.ones(BATCH, self.length, dtype=torch.bool)
        tokens[0, self.length // 2 :] = False  # packed rows go by their length, so they change places
        tokens[2] = False  # a row of padding
        if self.mask in ("additive", "infinite"):
            lowest = -torch.inf if self.mask == "infinite" else torch.finfo(self.dtype).min
            tokens[2, 1] = True
            return torch.zeros(BATCH, 1, 1, self.length, dtype=self.dtype).masked_fill(~tokens[:, None, None], lowest)
        functions = {
            "bidirectional": bidirectional_mask_function,
            "causal": causal_mask_function,
            "window": sliding_window_causal_mask_function(5),
        }
        if self.mask is None:
            return None
        return make(
            batch_size=BATCH, q_length=self.length, kv_length=self.length, mask_function=functions[self.mask],
            attention_mask=tokens if self.pads else None, allow_is_causal_skip=False,
        )  # fmt: skip


CASES = [
    Case(mask="bidirectional"),
    Case(mask="bidirectional", heads=4, key_heads=2, length=6, dropout=0.0),
    Case(mask="causal", heads=4, key_heads=2),
    Case(mask="window", heads=6, key_heads=1, pads=False),
    Case(mask="additive", heads=2, key_heads=1, length=9),
    Case(mask="infinite", heads=2, key_heads=2, length=17),
    Case(causal=True, heads=4, key_heads=2, length=19),
    Case(causal=True, heads=1, key_heads=1, length=1),
    Case(heads=5, key_heads=5, length=31),
    Case(mask="causal", heads=4, key_heads=2, dtype=torch.bfloat16),
    Case(mask="bidirectional", flat=True),
    Case(mask="bidirectional", heads=4, key_heads=2, length=8, pads=False, flat=True),
    Case(mask="window", heads=5, key_heads=5, flat=True),
    Case(mask="bidirectional", heads=2, key_heads=2, length=2, flat=True),
    Case(causal=True, heads=4, key_heads=2, flat=True),
]


def run(case: Case, cut: ContextCut | None) -> list[Tensor]:
    """Return the output and the gradients of query, key and value, all positions and heads."""
    keys, model = DropoutKeys(7), nn.ModuleDict({"attention": Attention()})
    key_dropout(model, keys)
    module = model["attention"]
    module.num_key_value_groups = case.heads // case.key_heads
    states = [tensor.requires_grad_() for tensor in case.states()]
    lengths = [case.length // 2, case.length, 0] if case.pads else [case.length] * BATCH
    flat = FlatRows.of(lengths, case.length, torch.device("cpu")) if case.flat else None
    with keys.use(replace(KEY, flat=flat)):
        options = {"dropout": case.dropout, "scaling": 0.4, "is_causal": case.causal}
        if cut is None:
            mask = case.masked(sdpa_mask)
            output, _ = keyed_attention(module, *states, mask, **options)
        else:
            move_site(module, lambda site: replace(site, cut_dim=1, part=cut.part_of_heads(0)))
            cut.cut_attention(module)
            wholes = [tensor.transpose(1, 2).flatten(2) for tensor in states]
            parts = [cut.split(flat.join(whole) if flat else whole) for whole in wholes]
            parts = [part.unflatten(2, (-1, WIDTH)).transpose(1, 2) for part in parts]
            of_heads = FLAT_HEADS_ATTENTION if flat else HEADS_ATTENTION
            name = RING_ATTENTION if cut.of_heads.ring > 1 else of_heads
            mask = case.masked(ALL_MASK_ATTENTION_FUNCTIONS[name])
            if case.mask == "window":
                options |= {"sliding_window": 5, "is_causal": True}
            options |= {"flat": flat}
            output, _ = ALL_ATTENTION_FUNCTIONS[name](module, *parts, mask, **options)
            output = cut.join(output.flatten(2))
            output = (flat.pad(output) if flat else output).unflatten(2, (-1, WIDTH))
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    visible = torch.ones(BATCH, case.length, 1, 1, dtype=torch.bool)
    if case.mask in ("bidirectional", "causal") and case.pads:
        visible[2] = False  # its queries see no key
    if case.flat:
        visible = (torch.arange(case.length) < torch.tensor(lengths)[:, None])[..., None, None]
    output = output * visible
    (output * weights).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in states)]


def differences(most_scores: int) -> list[float]:
    """Return the largest difference of each case from one process, relative to the tolerance of its type."""
    found = []
    for case in CASES:
        cut = ContextCut(dist.group.WORLD, ContextSplit.of(dist.get_world_size(), (case.heads, case.key_heads)))
        with mock.patch.object(blocks, "_MOST_SCORES", most_scores):
            ours = run(case, cut)
        tolerance = 1e-12 if case.dtype == torch.float64 else 4 * torch.finfo(case.dtype).eps
        pairs = zip(ours, run(case, None), strict=True)
        found.append(max(((own - whole).abs() / (1 + whole.abs())).max().item() / tolerance for own, whole in pairs))
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_hidden_blocks_of_a_causal_model_with_padding_are_skipped(fused: bool):
    """The kernel gets masks for the blocks of the diagonal and of the padding only; layers share the answers."""
    load()  # as a run does when it chooses the kernels
    length, blocks = 32, [range(start, start + 8) for start in range(0, 32, 8)]
    tokens = torch.ones(1, length, dtype=torch.bool)
    tokens[:, -3:] = False
    mask = ALL_MASK_ATTENTION_FUNCTIONS[RING_ATTENTION](
        batch_size=1, q_length=length, kv_length=length, attention_mask=tokens, allow_is_causal_skip=False
    )
    options = BlockAttention(1.0, 0.0, mask, False, 0, fused)
    pairs = [(queries, keys) for queries in blocks for keys in blocks if not options.skips(queries, keys)]
    assert len(pairs) == 10
    with mock.patch.object(mask, "compute", wraps=mask.compute) as compute:
        assert sum(not options.skips(queries, keys) for queries in blocks for keys in blocks) == 10
        assert not compute.called
        state = torch.zeros(1, 1, 8, WIDTH)
        for queries, keys in pairs:
            found = options._arguments(state, Block(state, state, KEY.rows, queries, keys))[4]
            assert (found is None) == (queries != keys)
        assert compute.call_count == 4


def test_the_kernel_gets_a_mask_for_joined_rows_of_a_causal_model():
    """Keys begin at a multiple of 4, so two hidden ones come before these."""
    load()
    state = torch.zeros(1, 1, 8, WIDTH)
    options = BlockAttention(1.0, 0.0, None, True, 0, fused=True)
    on_diagonal, later = (
        options._arguments(state, Block(state, state, KEY.rows, range(start, start + 8), range(6, 14)))
        for start in (6, 14)
    )
    visible = torch.ones(8, 8, dtype=torch.bool)
    assert torch.equal(on_diagonal[4][0, 0], torch.nn.functional.pad(visible.tril(), [2, 0]))
    assert torch.equal(later[4][0, 0], torch.nn.functional.pad(visible, [2, 0]))
    assert not on_diagonal[10]


@pytest.mark.parametrize(
    ("size", "most_scores"), [pytest.param(2, 100, marks=pytest.mark.nightly), (3, 100), (4, 1 << 24)]
)
def test_outputs_and_gradients_equal_one_process(ranks: RankPools, size: int, most_scores: int):
    """Two, three and four ranks split the heads of some cases and not of others; 100 scores make several tiles."""
    for found in ranks(size).run(differences, most_scores):
        assert all(difference <= 1 for difference in found), dict(zip(map(str, CASES), found, strict=True))


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that an operation makes."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.element_size()
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor)
        ]
        self.found = max(self.found, *sizes, 0)
        return result


def largest_tensor(length: int, is_cut: bool) -> int:
    """Return the elements of the largest tensor of a step of a causal model with padding and dropout."""
    keys = DropoutKeys(7)
    model = build("gpt2", "AutoModelForSequenceClassification", 0.1, keys)
    model.get_submodule("transformer.wpe").weight = nn.Parameter(torch.randn(length, 32))
    model.config.max_position_embeddings = length
    if is_cut:
        split_model(model, RowGroups(context=dist.group.WORLD))
    ids = torch.randint(5, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    with Largest() as largest, keys.use(MicrobatchKey(0, torch.tensor([0]))):
        model(input_ids=ids, attention_mask=mask).logits.square().sum().backward()
    return largest.found


def test_no_tensor_has_all_queries_and_keys(ranks: RankPools):
    """Three ranks do not divide the four heads, so the scores of a block are a ninth of four heads."""
    length = 768
    assert largest_tensor(length, False) >= 4 * length**2, "one process stores the scores"
    assert all(found <= 4 * (length // 3) ** 2 for found in ranks(3).run(largest_tensor, length, True))


def test_a_mask_of_positions_is_read_without_a_device():
    """The host would wait for a GPU. A tensor on `meta` has no values, so a read of it fails."""
    mask = ALL_MASK_ATTENTION_FUNCTIONS[RING_ATTENTION](
        batch_size=2, q_length=8, kv_length=8, mask_function=sliding_window_causal_mask_function(2), local_size=2,
        device="meta",
    )  # fmt: skip
    assert mask.compute(range(4), range(4)).is_meta
    assert mask.hides(range(6, 8), range(4))
    assert not mask.hides(range(4, 8), range(4))
    assert mask.of_block(range(4, 8), range(4)).is_meta


class TestMasks:
    @pytest.mark.parametrize("is_padded", [None, True, False])
    def test_of_joined_rows_around_a_ring_keep_the_window(self, is_padded):
        config = AutoConfig.for_model("mistral", hidden_size=8, num_attention_heads=2, sliding_window=3)
        config._attn_implementation = RING_ATTENTION
        mask, embeddings = torch.ones(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH, 8)
        with padding_known(is_padded):
            found = create_sliding_window_causal_mask(config, embeddings, mask, None)
        places = torch.arange(LENGTH)
        distances = places[:, None] - places
        of_tokens = found.of_tokens.compute(range(LENGTH), range(LENGTH))
        assert torch.equal(of_tokens[0, 0], (distances >= 0) & (distances < 3))

    def test_around_a_ring_are_none_without_padding(self):
        config = AutoConfig.for_model("bert", hidden_size=8, num_attention_heads=2)
        config._attn_implementation = RING_ATTENTION
        mask, embeddings = torch.ones(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH, 8)
        for is_padded in (False, True):
            with padding_known(is_padded):
                assert (create_bidirectional_mask(config, embeddings, mask) is None) == (not is_padded)
