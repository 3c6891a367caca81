"""Attention over blocks of positions that go around a ring of ranks.

Each rank has the queries of its block, and keys and values of one block at a time (Liu et al. 2023, Ring Attention,
arXiv:2310.01889). The blocks of a query's row are joined by a running maximum and sum (Milakov & Gimelshein 2018,
arXiv:1805.02867). The backward pass computes the probabilities again; the gradients of keys and values go around behind
them.

Rows without padding may be joined. A block then has some positions of some rows, and is computed row by row: two blocks
share at most one row, which is cut between them. Neighbouring rows of one length are computed together.

A block is computed by the fused kernel if it runs on the device, else by operations of torch. Dropout masks are those
of one process, drawn at the positions of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.features.context.exchange import begin_shift
from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.groups import Group
from trainer.parallel.kernel_support import KERNELS
from trainer.parallel.random import LANES, element_keys, keep_mask, quantised

_MOST_SCORES = 1 << 24
"""The scores of a tile of queries, unless one query has more: 64 MiB in fp32."""

# Keys and values have the tags 0 and 1. Their gradients travel at the same time, and need other ones.
_GRADIENTS_TAG = 2  # of shifts of gradients, behind those of keys and values

_NOTHING, _EVERYTHING = 0, 2
"""The parts of a block that its queries see; 1 is any other part."""


class BlockMask:
    """A mask of scores that is computed for some queries and keys at a time.

    Args:
        compute: returns the mask of a range of queries and a range of keys: boolean (True: visible), or added to the
            scores. It is broadcastable to `[batch, heads, queries, keys]`.
        on_host: returns the same mask in the memory of the host, so that a look at it waits for no device; None: only
            the device has it.
        of_tokens: the mask of each row without its padding, for flat rows; None: its queries see all its keys.
    """

    def __init__(
        self,
        compute: Callable[[range, range], Tensor],
        on_host: Callable[[range, range], Tensor] | None = None,
        of_tokens: BlockMask | None = None,
    ) -> None:
        self.compute = compute
        self.of_tokens = of_tokens
        self._on_host = on_host or compute
        self._seen: dict[tuple[range, range], int] = {}

    @classmethod
    def of(cls, mask: Tensor) -> BlockMask:
        """Return the blocks of a whole mask, broadcastable to `[batch, heads, queries, keys]`."""

        def compute(queries: range, keys: range) -> Tensor:
            part = mask[(None,) * (4 - mask.dim())]
            part = part if part.shape[2] == 1 else part[:, :, queries.start : queries.stop]
            return part if part.shape[3] == 1 else part[..., keys.start : keys.stop]

        return cls(compute)

    def hides(self, queries: range, keys: range) -> bool:
        """Return whether no query of a block sees a key of it."""
        return self._part(queries, keys) == _NOTHING

    def of_block(self, queries: range, keys: range) -> Tensor | None:
        """Return the mask of a block; None if all its queries see all its keys."""
        return None if self._part(queries, keys) == _EVERYTHING else self.compute(queries, keys)

    def _part(self, queries: range, keys: range) -> int:
        """Return the part of a block that its queries see. Layers share a mask, so the host reads it once."""
        # Kept, because each read of a mask on a GPU waits for the device.
        found = self._seen.get((queries, keys))
        if found is None:
            mask = self._on_host(queries, keys)
            # A plan, which has no values, answers 1 to such a read, so it counts the mask.
            found = int((mask.any().int() + mask.all().int()).item()) if mask.dtype == torch.bool else 1
            self._seen[queries, keys] = found
        return found


@dataclass(frozen=True)
class Ring:
    """A rank's place in a ring."""

    group: Group  # the context ranks
    distance: int  # the distance of neighbours of the ring in the group
    index: int  # the index of this rank's block
    blocks: Sequence[range]  # the positions of each block, in the order of the ring; the last ones may have none
    # the positions of each row, if a block holds positions of rows that are joined; None: of all rows
    lengths: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.blocks)

    def pieces(self, block: int) -> Sequence[Piece]:
        """Return the parts of this rank's queries that see keys of a block, with these keys."""
        # Queries stay on their rank, and only the keys are those of another block.
        queries, keys = self.blocks[self.index], self.blocks[block]
        return (Piece(queries, keys, slice(None)),) if self.lengths is None else _pieces(self.lengths, queries, keys)

    def begin_shift(self, tensors: Sequence[Tensor], tag: int = 0) -> Callable[[], list[Tensor]]:
        return begin_shift(tensors, self.group, self.distance, tag)


@lru_cache(maxsize=256)
def _pieces(lengths: tuple[int, ...], queries: range, keys: range) -> tuple[Piece, ...]:
    """Return the pieces of two blocks of rows that are joined; all layers and the backward pass need the same ones."""
    starts = [0, *accumulate(lengths)]
    parts = [(_part(queries, start, stop), _part(keys, start, stop)) for start, stop in pairwise(starts)]
    found = []
    # Neighbours with the same queries and keys are whole rows, so they lie side by side in both blocks.
    for (own, others), rows in groupby(range(len(parts)), parts.__getitem__):
        first, *more = rows
        if own and others:
            places = (starts[first] + own.start - queries.start, starts[first] + others.start - keys.start)
            found.append(Piece(own, others, slice(first, first + 1 + len(more)), places))
    return tuple(found)


def _part(block: range, start: int, stop: int) -> range:
    """Return the positions of a row that a block has; the row begins at `start` of all blocks and ends at `stop`."""
    return range(max(block.start, start) - start, min(block.stop, stop) - start)


@dataclass(frozen=True)
class Piece:
    """Queries of one block and keys of another that belong to the same rows."""

    queries: range  # the positions of the queries in their rows
    keys: range  # the positions of the keys
    rows: slice  # the places of the rows among those that are joined; all rows, if blocks hold positions of all
    # the places of the first query and of the first key in their blocks, if rows are joined
    places: tuple[int, int] | None = None

    def of_queries(self, x: Tensor) -> Tensor:
        """Return a view of these queries `[rows, heads, queries, ...]` of those of a block."""
        return self._view(x, 0, len(self.queries))

    def of_keys(self, x: Tensor) -> Tensor:
        """Return a view of these keys `[rows, heads, keys, ...]` of those of a block, which may be padded."""
        return self._view(x, 1, len(self.keys))

    def _view(self, x: Tensor, side: int, length: int) -> Tensor:
        if self.places is None:
            return x.narrow(2, 0, length)
        num_rows = self.rows.stop - self.rows.start
        # `[heads, rows * length, ...]`: the rows of a piece have one length, so a view divides them.
        joined = x.squeeze(0).narrow(1, self.places[side], num_rows * length)
        return joined.view(x.shape[1], num_rows, length, *x.shape[3:]).transpose(0, 1)


@dataclass(frozen=True)
class BlockAttention:
    """The options of a call of attention that its blocks share."""

    scale: float  # the factor of the products of queries and keys
    probability: float  # the share of the probabilities to drop, in [0, 1)
    mask: BlockMask | None  # the mask, or None
    is_causal: bool  # whether a query sees no key at a later position; it excludes `mask`
    first_head: int  # the index of the first head in those of one process
    fused: bool  # whether the fused kernel computes the blocks

    def skips(self, queries: range, keys: range) -> bool:
        """Return whether a block has nothing to compute."""
        if not queries or not keys or (self.is_causal and keys.start >= queries.stop):
            return True
        return self.mask is not None and self.mask.hides(queries, keys)

    def scores(self, query: Tensor, key: Tensor, queries: range, keys: range) -> Tensor:
        """Return the masked scores of a tile in at least fp32, `[batch, heads, queries, keys]`."""
        # The queries of heads that share keys are rows of one product, so keys need no copies for the heads.
        products = torch.matmul(_grouped(query, key), key.transpose(2, 3)).view(*query.shape[:3], key.shape[2])
        scores = at_least_fp32(products * self.scale)
        mask = None
        if self.mask is not None:
            mask = self.mask.compute(queries, keys)
        elif self.is_causal and keys.stop > queries.start + 1:
            mask = _positions(queries, key)[:, None] >= _positions(keys, key)
        if mask is None:
            return scores
        if mask.dtype == torch.bool:  # see the eager function for the lowest number
            return scores.masked_fill_(mask.logical_not(), torch.finfo(scores.dtype).min)
        return scores + mask

    def kept(self, row_keys: Tensor, heads: int, queries: range, keys: range) -> Tensor:
        """Return the dropout mask of a tile, uint8 `[batch, heads, queries, keys]`."""
        streams = element_keys(row_keys, (heads, len(queries)), (self.first_head, queries.start))
        return keep_mask(streams, len(keys), self.probability, keys.start)

    @property
    def kept_scale(self) -> float:
        return 1.0 / (1.0 - quantised(self.probability))

    def forward_block(self, sums: Sums, query: Tensor, block: Block) -> None:
        """Add a block of keys to the sums of its queries, `[batch, heads, queries, head_dim]`."""
        if self.fused:
            # The kernel divides by the sum over this block; blocks are joined by sums, so this undoes it.
            output, found = KERNELS["attention"].fused_attention(*self._arguments(query, block))
            total = found[1].exp2()
            weighted = at_least_fp32(output).transpose(1, 2) * total.unsqueeze(-1)
            # The kernel divides by 0 for a query if it computes no key of the block, or an added mask hides all.
            sums.add(slice(None), weighted.masked_fill(total.unsqueeze(-1) == 0, 0.0), found[0], total)
            return
        key, value, row_keys, queries, keys = block
        for tile, positions in _tiles(query, key, queries):
            scores = self.scores(query[:, :, tile], key, positions, keys)
            largest = scores.amax(-1)
            # An added mask may hide all keys of a query by -inf. Relative to 0, their shares are 0; relative to -inf,
            # NaN.
            shares = scores.sub_(_finite(largest).unsqueeze(-1)).exp_()
            # The sum precedes dropout, because the softmax divides by all exponentials and dropout acts on its results.
            total = shares.sum(-1)
            if self.probability:
                kept = self.kept(row_keys, query.shape[1], positions, keys)
                shares = shares.mul_(kept).mul_(self.kept_scale)
            # Products have the type of the values, as in the eager function; the sums over blocks stay in fp32.
            shares = shares.to(value.dtype)
            products = torch.matmul(_grouped(shares, value), value).view(*shares.shape[:3], value.shape[-1])
            sums.add(tile, at_least_fp32(products), largest, total)

    def backward_block(self, gradients: Sequence[Tensor], output_gradient: Tensor, results: Results, query: Tensor,
                       block: Block) -> None:  # fmt: skip
        """Add the gradients of a block to `gradients`, those of query, key and value in at least fp32.

        The gradient of the output is `[batch, queries, heads, value_dim]`. `results` are those of all keys.
        """
        if self.fused:
            # The kernel reads the sums in its own form: the maximum, and the binary logarithm of the sum.
            sums = torch.stack([results.largest, results.total.log2()])
            arguments = self._arguments(query, block)
            found = KERNELS["attention"].backward_of(output_gradient, results.output, sums, *arguments, False)
            for gradient, part in zip(gradients, found, strict=True):
                # `_arguments` may have put hidden keys before the block, and their gradients are dropped here.
                gradient += part.narrow(2, part.shape[2] - gradient.shape[2], gradient.shape[2])
            return
        key, value, row_keys, queries, keys = block
        for tile, positions in _tiles(query, key, queries):
            rows = query[:, :, tile]
            of_output = output_gradient[:, tile].transpose(1, 2)
            # The mean of `of_shares` under the probabilities, which the derivative of the softmax subtracts. It is also
            # the product of output and gradient, summed over the head (Dao et al. 2022, arXiv:2205.14135).
            delta = (at_least_fp32(of_output) * results.output[:, tile].transpose(1, 2)).sum(-1)
            scores = self.scores(rows, key, positions, keys)
            shares = scores.sub_(_finite(results.largest[:, :, tile]).unsqueeze(-1)).exp_()
            # The sum over all keys, so these are the probabilities of the whole row and not of this block.
            shares.div_(results.total[:, :, tile].unsqueeze(-1))
            of_output = _grouped(of_output, value)
            of_shares = at_least_fp32(torch.matmul(of_output, value.transpose(2, 3))).view(shares.shape)
            # The gradient of the values needs the shares after dropout; the derivative of the softmax needs those
            # before it.
            dropped = shares
            if self.probability:
                kept = self.kept(row_keys, query.shape[1], positions, keys)
                dropped = shares.mul(kept).mul_(self.kept_scale)
                of_shares = of_shares.mul_(kept).mul_(self.kept_scale)
            dropped = _grouped(dropped.to(value.dtype), value)
            of_scores = (shares * of_shares.sub_(delta.unsqueeze(-1))).mul_(self.scale).to(key.dtype)
            of_scores = _grouped(of_scores, key)
            # A query belongs to one tile, but a key to all of them, so its gradient is added up over the tiles.
            gradients[0][:, :, tile] += torch.matmul(of_scores, key).view(rows.shape)
            gradients[1].add_(torch.matmul(of_scores.transpose(2, 3), _grouped(rows, key)))
            gradients[2].add_(torch.matmul(dropped.transpose(2, 3), of_output))

    def _arguments(self, query: Tensor, block: Block) -> tuple[Any, ...]:
        """Return the arguments of the fused kernel for a block, with hidden keys before it up to a multiple of 4."""
        key, value, row_keys, queries, keys = block
        mask = None if self.mask is None else self.mask.of_block(queries, keys)
        # Other blocks that `skips` leaves have earlier keys only, and all queries see them.
        is_diagonal = self.is_causal and queries.start == keys.start
        # A word of the dropout mask serves four keys, and the kernel begins each block with a whole word.
        if before := keys.start % LANES:
            if mask is None:
                mask = key.new_ones((len(queries), len(keys)) if is_diagonal else len(keys), dtype=torch.bool)
                # The causal mask of the kernel compares places in the block, and the padding moves those of the keys.
                mask, is_diagonal = mask.tril() if is_diagonal else mask, False
            assert mask.dtype == torch.bool, "rows that are joined have no mask that is added"
            key, value, mask = (
                F.pad(key, [0, 0, before, 0]),
                F.pad(value, [0, 0, before, 0]),
                F.pad(mask, [before, 0]),
            )
            keys = range(keys.start - before, keys.stop)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            # Dimensions that broadcast get a stride of 0 and no memory.
            mask = mask.expand(*mask.shape[:2], len(queries), len(keys))
        tiles = KERNELS["attention"].visible_tiles(mask, query, key, value, other_keys=True) or (None, None)
        offsets = [self.first_head, queries.start, keys.start]
        return query, key, value, row_keys, mask, None, *tiles, self.scale, self.probability, is_diagonal, offsets


class Block(NamedTuple):
    """Keys and values for some queries."""

    key: Tensor  # the keys `[batch, key_value_heads, keys, head_dim]`
    value: Tensor  # the values `[batch, key_value_heads, keys, value_dim]`
    row_keys: Tensor  # the keys of the rows for the dropout mask, int64 `[batch]`
    queries: range  # the positions of the queries
    keys: range  # the positions of the keys

    @classmethod
    def of(cls, piece: Piece, held: Sequence[Tensor], row_keys: Tensor) -> Block:
        """Return the keys of a piece, of the keys and values `held`."""
        key, value = map(piece.of_keys, held)
        return cls(key, value, row_keys[piece.rows], piece.queries, piece.keys)


class Results(NamedTuple):
    """The results of queries, over all keys; see `Sums`."""

    output: Tensor  # the output `[batch, queries, heads, value_dim]`; 0 for a query without a computed block
    largest: Tensor  # the largest score `[batch, heads, queries]`
    total: Tensor  # the sum of the exponentials, relative to the largest; 1 for a query without a computed block

    def of(self, piece: Piece) -> Results:
        """Return views of the results of a part of the queries."""
        output = piece.of_queries(self.output.transpose(1, 2)).transpose(1, 2)
        return Results(output, piece.of_queries(self.largest), piece.of_queries(self.total))


@dataclass(frozen=True)
class Sums:
    """The sums over the keys so far, of queries `[batch, heads, queries, head_dim]`, in at least fp32."""

    largest: Tensor  # the largest score `[batch, heads, queries]`; negative infinity before the first block
    total: Tensor  # the sum of the exponentials, relative to the largest
    # the sum of the values, weighted by the exponentials that dropout keeps, `[batch, heads, queries, value_dim]`
    output: Tensor

    @classmethod
    def begin(cls, query: Tensor, value: Tensor) -> Sums:
        """Return the sums over no keys."""
        like, shape = at_least_fp32(query.new_empty(())), query.shape[:3]
        return cls(like.new_full(shape, -torch.inf), like.new_zeros(shape), like.new_zeros((*shape, value.shape[-1])))

    def of(self, piece: Piece) -> Sums:
        """Return views of the sums of a part of the queries."""
        return Sums(*map(piece.of_queries, (self.largest, self.total, self.output)))

    def add(self, tile: slice, output: Tensor, largest: Tensor, total: Tensor) -> None:
        """Add the sums of more keys for a tile of queries."""
        before = self.largest[:, :, tile]
        larger = torch.maximum(before, largest)
        base = _finite(larger)
        # Both sums become relative to the larger score. Before the first block, `decay` is exp(-inf) = 0.
        decay, factor = (before - base).exp_(), (largest - base).exp_()
        self.total[:, :, tile] = self.total[:, :, tile] * decay + total * factor
        self.output[:, :, tile] = self.output[:, :, tile] * decay.unsqueeze(-1) + output * factor.unsqueeze(-1)
        self.largest[:, :, tile] = larger

    def finish(self, dtype: torch.dtype) -> Results:
        """Return the results, the output in a type."""
        # A query without a computed block has an output of 0; 0 / 0 would make it NaN.
        total = self.total.masked_fill(self.total == 0, 1.0)
        output = (self.output / total.unsqueeze(-1)).to(dtype).transpose(1, 2).contiguous()
        return Results(output, self.largest, total)


def _finite(largest: Tensor) -> Tensor:
    """Return the largest scores, with 0 for queries that see no key so far."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _positions(positions: range, like: Tensor) -> Tensor:
    return torch.arange(positions.start, positions.stop, device=like.device)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Return `x` `[batch, heads, queries, n]` as `[batch, key_value_heads, heads of each x queries, n]`."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def _tiles(query: Tensor, key: Tensor, queries: range) -> Iterator[tuple[slice, range]]:
    """Yield tiles of queries with at most `_MOST_SCORES` scores, and their positions."""
    length = max(1, _MOST_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    for start in range(0, len(queries), length):
        yield slice(start, start + length), queries[start : start + length]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, row_keys: Tensor | None, options: BlockAttention, ring: Ring
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks of a ring.

    Args:
        query: this rank's queries `[batch, heads, block, head_dim]`, with its padding; a batch of 1, if rows are
            joined.
        key: its keys `[batch, key_value_heads, block, head_dim]`, of the type of the queries.
        value: its values, `[batch, key_value_heads, block, value_dim]`.
        row_keys: the keys of the rows for the dropout mask, int64 `[rows]`, in the order in which they are joined, if
            they are; None without dropout.

    Returns:
        The output `[batch, queries, heads, value_dim]`, without padding.
    """
    if row_keys is None:
        num_rows = query.shape[0] if ring.lengths is None else len(ring.lengths)
        row_keys = torch.zeros(num_rows, dtype=torch.int64, device=query.device)
    # Keys keep their padding, because blocks that travel need one shape; padded queries would have no use.
    query = query.narrow(2, 0, len(ring.blocks[ring.index]))
    return cast(Tensor, _RingAttention.apply(query, key, value, row_keys, options, ring))  # type: ignore[no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, row_keys: Tensor, options: BlockAttention, ring: Ring
    ) -> Tensor:
        # Autocast is off in the backward pass, so both passes round at the same places.
        with torch.autocast(query.device.type, enabled=False):
            sums = Sums.begin(query, value)
            held = [key, value]
            # In step s, this rank holds the keys and values of the block s places before its own.
            for step in range(ring.size):
                # The next block travels while this one is computed.
                receive = ring.begin_shift(held) if step < ring.size - 1 else None
                for piece in ring.pieces((ring.index - step) % ring.size):
                    if not options.skips(piece.queries, piece.keys):
                        block = Block.of(piece, held, row_keys)
                        options.forward_block(sums.of(piece), piece.of_queries(query), block)
                held = receive() if receive else []
            results = sums.finish(value.dtype)
        # Only the keys and values of this rank are kept; the backward pass sends all around the ring again.
        ctx.save_for_backward(query, key, value, row_keys, *results)
        ctx.options, ctx.ring = options, ring
        return results.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, row_keys, *found = ctx.saved_tensors
        results = Results(*found)
        options: BlockAttention = ctx.options
        ring: Ring = ctx.ring
        # The shares of all blocks are added in fp32, and rounded once at the end.
        of_query = torch.zeros_like(at_least_fp32(query))
        own: list[Tensor] = []
        held, receive_gradients = [key, value], None
        for step in range(ring.size):
            receive = ring.begin_shift(held) if step < ring.size - 1 else None
            added = [torch.zeros_like(tensor, dtype=of_query.dtype) for tensor in held]
            for piece in ring.pieces((ring.index - step) % ring.size):
                if not options.skips(piece.queries, piece.keys):
                    gradients = (piece.of_queries(of_query), *map(piece.of_keys, added))
                    of_output = piece.of_queries(output_gradient.transpose(1, 2)).transpose(1, 2)
                    block = Block.of(piece, held, row_keys)
                    options.backward_block(gradients, of_output, results.of(piece), piece.of_queries(query), block)
            if receive_gradients:  # of this block, from its previous holder
                added = [ours.add_(theirs) for ours, theirs in zip(added, receive_gradients(), strict=True)]
            # The own block comes first and stays. Gradients of the others travel one step behind their keys, and each
            # holder adds its share. Those of the own block arrive after the whole round.
            if step == 0:
                own = added
            else:
                receive_gradients = ring.begin_shift(added, _GRADIENTS_TAG)
            held = receive() if receive else []
        if receive_gradients:
            own = [ours.add_(theirs) for ours, theirs in zip(own, receive_gradients(), strict=True)]
        of_key, of_value = own
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None
