"""The outputs of modules and their gradients, in the order of execution, by the rows of the global batch.

An output is recorded if its first dimension is that of the rows, or if it holds the tokens of all rows. Column-parallel
layers know the places of their features. Other modules inside of a layer that is cut over tensor ranks have fewer
features than the whole ones; the width stands in the record, so a reader can leave them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from trainer.features.fingerprints.numbers import Tokens
from trainer.models.checkpointing import not_recorded
from trainer.models.place import PlacedModel
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.groups import group_size, index_in_group
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.pipeline.stand_ins import Absent
from trainer.parallel.placement import CONTEXT_AXIS, TENSOR_AXIS
from trainer.parallel.shards.slices import bounds_of_part, ranges_of_part
from trainer.parallel.tensor.kinds import ShardedLinear
from trainer.parallel.tensor.linear import ColumnParallelLinear

_MASK = "attention_mask"  # the end of the names of inputs that are 1 for tokens
Call = tuple[str, int]
"""A module's name, and the number of its earlier calls in the forward pass."""


@dataclass
class Record:
    """The numbers of one output, or of its gradient, by the place of the row in the global batch."""

    width: int  # the features on this rank
    is_shared: bool  # whether other ranks hold other elements of the same rows
    rows: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class _Pass:
    """A forward pass of the model: the inputs by name, and the calls of each module until now."""

    inputs: Mapping[str, Tensor]
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Output:
    """An output that is recorded: its tokens, their rows in the global batch, and the places of its features."""

    tokens: Tokens
    rows: list[int]
    features: Tensor
    is_shared: bool


class ModuleRecorder:
    """Hooks on all modules of a rank's models, which record training passes.

    Args:
        shards_positions: whether tensor ranks hold different positions between the matrices of a layer.
    """

    def __init__(self, built: Sequence[PlacedModel], mesh: ParallelMesh, shards_positions: bool) -> None:
        self.forward: dict[Call, Record] = {}
        self.backward: dict[Call, Record] = {}
        tensor_ranks = mesh.size(TENSOR_AXIS) if shards_positions else 1
        self._cuts = [
            (mesh.index(CONTEXT_AXIS), mesh.size(CONTEXT_AXIS)),
            (mesh.index(TENSOR_AXIS) if shards_positions else 0, tensor_ranks),
        ]
        self._pass: _Pass | None = None
        self._own: set[int] = set()
        self._handles = [handle for part in built for handle in self._hooks(part)]

    def begin(self, own_rows: set[int]) -> None:
        """Begin a step; rows other than `own_rows` are repetitions that fill microbatches."""
        self._own, self.forward, self.backward = own_rows, {}, {}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hooks(self, part: PlacedModel) -> Iterator[Any]:
        keys = part.dropout_keys
        assert keys is not None, "a rule needs layout-invariant dropout"
        yield part.model.register_forward_pre_hook(self._enter, with_kwargs=True)
        yield part.model.register_forward_hook(self._leave)
        # Products of an adapter inside of a sharded layer are parts of a sum over its ranks.
        named = dict(part.model.named_modules())
        sharded = tuple(f"{name}." for name, module in named.items() if isinstance(module, ShardedLinear))
        for name, module in named.items():
            if name and not isinstance(module, Absent) and not name.startswith(sharded):
                # Unseen by selective recomputation, which runs no hooks, and repeats the products that it saw.
                yield module.register_forward_hook(not_recorded(partial(self._take, name, keys)))

    def _enter(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._pass = _Pass({name: value for name, value in kwargs.items() if isinstance(value, Tensor)})

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        # A recomputation runs modules outside of a forward pass of the model, and is no second output.
        self._pass = None

    def _take(self, name: str, keys: DropoutKeys, module: nn.Module, args: Any, output: Any) -> None:
        tensor, key = _first_tensor(output), keys.key
        if self._pass is None or key is None or tensor is None:
            return
        call = name, self._pass.calls[name]
        self._pass.calls[name] += 1
        if (place := self._place(name, module, tensor, key)) is None:
            return
        _add(self.forward, call, place, tensor, self._own, is_sum=False)
        if tensor.requires_grad:
            tensor.register_hook(partial(self._take_gradient, call, [place]))  # type: ignore[no-untyped-call]

    def _take_gradient(self, call: Call, places: list[_Output], gradient: Tensor) -> None:
        # Once: a zero-bubble schedule computes the same gradient again for the weights.
        if places:
            _add(self.backward, call, places.pop(), gradient, self._own, is_sum=True)

    def _place(self, name: str, module: nn.Module, output: Tensor, key: MicrobatchKey) -> _Output | None:
        found = self._tokens(name, output, key)
        if found is None:
            return None
        tokens, is_cut = found
        features = torch.arange(output.shape[-1], device=output.device)
        is_column = isinstance(module, ColumnParallelLinear) and group_size(module.group) > 1
        if isinstance(module, ColumnParallelLinear) and is_column:
            features = _features(module).to(output.device)
        return _Output(tokens, key.rows.tolist(), features, is_cut or is_column)

    def _tokens(self, name: str, output: Tensor, key: MicrobatchKey) -> tuple[Tokens, bool] | None:
        """Return the tokens of an output, and whether other ranks hold other positions; None: its rows are unknown."""
        shape, device, num_rows = output.shape, output.device, len(key.rows)
        if key.flat is not None and len(shape) == 3 and shape[0] == 1:
            total = len(key.flat.rows)
            if (part := self._part(total, shape[1])) is not None:
                start, length = part
                chosen = torch.arange(shape[1], device=device) < length
                cut = slice(start, start + length)
                return Tokens(chosen, key.flat.rows[cut], key.flat.positions[cut], num_rows), shape[1] < total
        masks = self._masks(name, key, num_rows)
        if shape[0] != num_rows and len(shape) == 2:  # routers and experts get tokens without their rows
            if key.flat is not None and len(key.flat.rows) == shape[0]:
                chosen = torch.ones(shape[0], dtype=torch.bool, device=device)
                return Tokens(chosen, key.flat.rows, key.flat.positions, num_rows), False
            mask = next((one for one in masks if one.numel() == shape[0]), None)
            return None if mask is None else (_of_mask(mask, 0, mask.shape[1], mask.shape[1]), False)
        if shape[0] != num_rows or len(shape) < 2:
            return None
        if len(shape) == 2 or not masks:
            # Without a mask, all of an output belongs to its row, unless ranks shard positions.
            if len(shape) > 3 or (len(shape) == 3 and any(size > 1 for _, size in self._cuts)):
                return None
            positions = prod(shape[1:-1])
            mask = torch.ones(num_rows, positions, dtype=torch.int64, device=device)
            return _of_mask(mask, 0, positions, positions), False
        if len(shape) > 3:
            return None  # such as scores of attention, which have padding in two dimensions
        for mask in masks:
            if (part := self._part(mask.shape[1], shape[1])) is not None:
                return _of_mask(mask, *part, shape[1]), shape[1] < mask.shape[1]
        return None

    def _masks(self, name: str, key: MicrobatchKey, num_rows: int) -> list[Tensor]:
        """Return masks of tokens `[rows, positions]`; the first one belongs to the stack of the module."""
        inputs = self._pass.inputs if self._pass else {}
        # The second stack of an encoder-decoder has positions and padding of its own.
        names = sorted(
            (n for n in inputs if n.endswith(_MASK)), key=lambda n: n.startswith("decoder") != ("decoder" in name)
        )
        found = [inputs[n] for n in names] + ([] if key.mask is None else [key.mask])
        flat = [mask.flatten(0, -2) for mask in found if mask.dim() > 1]
        return [mask for mask in flat if len(mask) == num_rows]

    def _part(self, total: int, positions: int) -> tuple[int, int] | None:
        """Return this rank's first position and how many it has, if an output has `positions` of `total`."""
        if positions == total:
            return 0, total
        start, left, padded = 0, total, total
        for index, size in self._cuts:
            first, last = bounds_of_part(padded, index, size)
            padded = -(-padded // size)
            start, left = start + first, max(0, min(left - first, last - first))
            if size > 1 and positions in (padded, left):  # the last part may have padding or not
                return start, left
        return None


def _of_mask(mask: Tensor, start: int, length: int, positions: int) -> Tokens:
    """Return the tokens of padded rows; an output has `positions`, of which `length` from `start` on are real."""
    is_token = mask != 0
    places = is_token.long().cumsum(1) - 1  # padding on the left shifts no token
    part = slice(start, start + length)
    chosen = torch.zeros(len(mask), positions, dtype=torch.bool, device=mask.device)
    chosen[:, :length] = is_token[:, part]
    rows = torch.arange(len(mask), device=mask.device).unsqueeze(1).expand(-1, length)
    return Tokens(chosen.flatten(), rows[is_token[:, part]], places[:, part][is_token[:, part]], len(mask))


def _features(module: ColumnParallelLinear) -> Tensor:
    """Return the places of a layer's outputs on this rank in the whole output; -1 for padding."""
    total, split = module.whole_out_features, module.weight_split
    width, ranges = ranges_of_part(total, split, index_in_group(module.group), group_size(module.group))
    places = torch.full((len(ranges) * width,), -1)
    for block, (start, stop) in enumerate(ranges):
        places[block * width : block * width + stop - start] = torch.arange(start, stop)
    return places


def _first_tensor(output: Any) -> Tensor | None:
    """Return the output of a module, or the first one of several, if it holds numbers."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    elif isinstance(output, tuple | list):
        output = output[0] if output else None
    is_number = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1 and output.numel() > 0
    return output if is_number else None


@torch.no_grad()
def _add(records: dict[Call, Record], call: Call, place: _Output, tensor: Tensor, own: set[int], is_sum: bool) -> None:
    """Add the numbers of a tensor to the records; an output that comes again is the same, but gradients add up."""
    record = records.setdefault(call, Record(tensor.shape[-1], place.is_shared))
    numbers = place.tokens.numbers(tensor, place.features).tolist()
    for row, values in zip(place.rows, numbers, strict=True):
        if row not in own:
            continue
        before = record.rows.get(row)
        if before is None:
            record.rows[row] = values
        elif is_sum:
            # A repeated row has a gradient of zero, so one of the two addends is the gradient.
            record.rows[row] = [values[0], *(one + other for one, other in zip(before[1:], values[1:], strict=True))]
