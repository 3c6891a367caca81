"""Fill a placed model with weights: read from safetensors, drawn at random, or received from another rank.

A model is described and placed on the `meta` device, where tensors have shapes and no memory. Its parameters are then
filled one by one. Each comes from the slices that this rank reads from the files, or from a module that is drawn whole
for a moment. No rank holds more than its part. If data ranks shard the parameters, the model stays on `meta`, and this
rank's shards lie beside it.

`matching.py` maps tensors of files to parameters. A model that cannot be filled in parts (`CannotLoadPartsError`) is
loaded whole (`whole_model.py`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig

from trainer.base.errors import UsageError
from trainer.models.added import values_of
from trainer.models.describe import ModelDescription
from trainer.models.draw import draw_weights
from trainer.models.hub_files import CannotLoadPartsError, is_adapter, one_line, without_report
from trainer.models.names import aliases, replace_in
from trainer.models.place import ModelCut, Origin, PlacedModel, ShardChoice, place
from trainer.models.stored_weights import Sources, StoredWeights
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.stored_in_parts import weights_in_parts
from trainer.recipe.schema import Model

if TYPE_CHECKING:
    from trainer.models.adapter_starts import Start
    from trainer.parallel.node import NodeRanks


def build_model(
    described: ModelDescription,
    cut: ModelCut = ModelCut(),  # noqa: B008  # it is frozen
    node: NodeRanks | None = None,
) -> PlacedModel:
    """Build a model in fp32 on the CPU, with the same weights on every rank and under every layout.

    Args:
        cut: the cut of the model; the result holds this rank's parts only.
        node: the ranks of this node, if one of them reads the weights for all; all of them must call it then.

    Raises:
        UsageError: the model cannot be loaded, has no safetensors, has a dropout that cannot be keyed, cannot be cut,
            does not keep documents apart, or adds terms to the loss.
    """
    with described.explained():
        try:
            return _fill_parts(described, cut, node)
        except CannotLoadPartsError as reason:
            # transformers would read whole files on every rank, but `broadcast` promises one read for each node.
            if node is not None:
                raise UsageError(
                    f"`parallel.load` is broadcast, but each rank must read this model whole, because {reason}; use"
                    " read"
                ) from reason
            from trainer.models.whole_model import place_whole  # most models are filled in parts

            return place_whole(described, cut, reason)


def is_loaded_whole(recipe: Model, model: nn.Module) -> bool:
    """Return whether a rank holds the whole model while it builds its part.

    The reason is an adapter in a folder, or a tensor that is made with the model. `build_model` finds others.

    Args:
        model: the model or a part of it, on `meta`.
    """
    in_folder = not recipe.is_random and os.path.isdir(str(recipe.name_or_path))
    return (in_folder and is_adapter(recipe)) or _made_with(model) is not None


def _made_with(model: nn.Module) -> str | None:
    """Return the name of a tensor on `meta` that is neither a parameter nor a buffer, and that no file holds."""
    # `vars` shows no parameter and no buffer: torch keeps these in dictionaries of the module.
    values = (
        (f"{path}.{name}", value) for path, module in model.named_modules() for name, value in vars(module).items()
    )
    return next((path for path, value in values if isinstance(value, Tensor) and value.is_meta), None)


def _fill_parts(described: ModelDescription, cut: ModelCut, node: NodeRanks | None) -> PlacedModel:
    """Build a model in parts that are bit for bit equal to a cut of the whole model."""
    files = [] if described.recipe.is_random else described.files()
    stored = _opened(files, node)
    if not described.recipe.is_random:
        from trainer.models.matching import fitted

        stored = fitted(described, stored)
    seed = described.seed
    # The model's own rules may draw; the random numbers of the caller stay where they are.
    with torch.random.fork_rng(devices=[]):
        parts, whole, sources = empty_parts(described, cut, stored)
        _rebuild_buffers(parts.model)
        parts.read(stored, sources.renamed)
        parts.convert(stored, sources.converted, whole)
        # Each module draws from a stream of its own, so a rank leaves out modules without changing the others.
        draw_weights(whole, sources.missing, seed, parts.drawing(whole), parts.holds)
        for name, shape in parts.factors.items():
            from trainer.parallel.tensor.low_rank import drawn_factor

            if parts.holds(name) and not parts.is_filled(name):  # other factors are not drawn
                parts.fill_whole(name, drawn_factor(name, shape, seed))
    for name, value in values_of(described.use.added).items():
        parts.fill_whole(name, value)
    parts.require_filled()
    shards, parts.shards, parts.starts = parts.shards, {}, {}  # weights that are read again start no adapter
    origin = _origin(parts, whole, sources, stored, seed)
    # From here on, `parts` serves `origin` only, which reads into a table of its own.
    placed = replace(parts.placed, shards=shards, origin=origin)
    keys = placed.dropout_keys
    checked = described.check_invariance(placed.model if cut == ModelCut() else None, keys)
    return replace(placed, notes=[*sources.notes, *checked, *placed.notes])


def _opened(files: Sequence[str], node: NodeRanks | None) -> StoredWeights:
    if node is None:
        return StoredWeights(files)
    from trainer.models.shared_weights import SharedWeights  # one rank on a node reads for itself

    return SharedWeights(files, node)


def _origin(parts: _Parts, whole: nn.Module, sources: Sources, stored: StoredWeights, seed: int) -> Origin:
    """Return the source of filled parts, which are read into `parts.shards`; those that need a conversion are not."""
    drawn = set(sources.missing)
    # Files are opened again at the first read only.
    again = cache(stored.again)

    def read(name: str) -> Tensor:
        if name in drawn:
            draw_weights(whole, drawn, seed, parts.drawing(whole), name.__eq__)
        else:
            parts.read(again(), {name: sources.renamed[name]})
        assert parts.shards is not None
        shard = parts.shards[name]
        # One parameter at a time, so that the memory stays that of one.
        parts.shards.clear()
        return shard

    names = [name for name in (*sources.renamed, *drawn) if parts.holds(name)]
    return Origin(names, {name: stored.dtypes[key] for name, key in sources.renamed.items()}, read)


def empty_parts(described: ModelDescription, cut: ModelCut, stored: StoredWeights) -> tuple[_Parts, nn.Module, Sources]:
    """Return the placed model on `meta`, the whole model on `meta`, and where their tensors come from."""
    if described.recipe.is_random:
        try:
            with torch.device("meta"):
                model = described.instantiate()
        except RuntimeError as error:
            raise CannotLoadPartsError(f"transformers cannot make it on meta ({one_line(error)})") from error
        sources, lacking = Sources(missing=[name for name, _ in model.named_parameters()]), []
    else:
        from trainer.models.matching import match, take_origin

        model, sources = match(described, stored)
        take_origin(model, described.recipe)
        lacking = sources.missing
    # Before `prepare` and `place` change `model`: draws and conversions follow the rules of the whole, plain model.
    whole = copy.deepcopy(model)  # its modules are drawn and converted one at a time
    keys = described.new_keys()
    notes = described.prepare(model, lacking, keys)
    factors: dict[str, tuple[int, ...]] = {}
    starts: dict[str, Start] = {}
    if described.recipe.adapter is not None:
        from trainer.models.adapters import factor_shapes, starts_of

        factors, starts = factor_shapes(model), starts_of(model, described.recipe.adapter, described.seed)
    names = list(aliases(whole).values())
    known = {name for group in names for name in group}
    # Parameters of adapters, which the plain model lacks.
    names += [group for group in aliases(model).values() if known.isdisjoint(group)]
    placed = place(model, cut, keys, notes, lacking, described.groups(model))
    return _Parts(placed, factors, names, starts), whole, sources


class _Parts:
    """The parameters of a placed model on `meta`, which can be filled in any order.

    Args:
        factors: the shapes of the tensors of its adapters.
        tied: the names of each parameter of the whole model.
        starts: the starts of its adapters, by the names of the weights that they depend on.
    """

    def __init__(
        self,
        placed: PlacedModel,
        factors: Mapping[str, tuple[int, ...]],
        tied: Sequence[Sequence[str]],
        starts: Mapping[str, Start],
    ) -> None:
        self.placed, self.factors = placed, factors
        self.starts = starts
        self.model = placed.model
        self.shards: dict[str, Tensor] | None = None if placed.cut.shard is None else {}
        self._placements = placed.placements
        first = {name: names[0] for names in tied for name in names}  # in the whole model
        self._in_parts = weights_in_parts(self.model)
        for name, weight in self._in_parts.items():
            # A weight in parts is no parameter of this model; its codes and scales stand for it under its name.
            first |= {f"{name}.{part}": name for part, _ in weight.named_parameters()}
        # A stage may hold a copy of a parameter under another name than the whole model.
        origins = placed.stage.origins if placed.stage else {}
        held: dict[str, list[str]] = {}  # names in this model, by the first name in the whole model
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            held.setdefault(origins.get(name) or first[name], []).append(name)
        self._held = {name: held[origin] for name, origin in first.items() if origin in held}
        self._buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}

    def holds(self, name: str) -> bool:
        return name in self._held

    def read(self, stored: StoredWeights, renamed: Mapping[str, str]) -> None:
        """Fill the tensors that need no conversion; tensors of other stages are not read."""
        # One rank of a node may read for all: every rank then walks through the same keys in the same order.
        wanted = stored.wanted([self.holds(name) or name in self._buffers for name in renamed])
        for (name, key), is_wanted in zip(renamed.items(), wanted, strict=True):
            parts = stored.parts(key) if name in self._in_parts else None
            if parts is not None:
                self._fill_encoded(name, parts)
            elif name in self._in_parts or (self.holds(name) and name in self.starts):
                self.fill_whole(name, stored.read(key))  # a scale belongs to elements of several shards
            elif self.holds(name):
                self._set(self._held[name], stored.read(key, self._placement(name), self.placed.cut))
            elif name in self._buffers:
                self.model.get_buffer(name).copy_(stored.read(key))
            elif is_wanted:
                # This rank does not need the tensor, but others of the node do; it joins their read.
                stored.read_along(key)

    def convert(self, stored: StoredWeights, groups: Sequence[Sequence[str]], whole: Any) -> None:
        """Fill the tensors that must be merged or split; each group is read whole into `whole`, one group at a time."""
        for keys in groups:
            empty = dict(whole.named_parameters(remove_duplicate=False))
            # The converted parameters go back to `meta` afterwards, so one group at a time has memory.
            rules = LoadStateDictConfig(
                dtype=torch.float32, device_map={"": "cpu"}, weight_mapping=get_model_conversion_mapping(whole)
            )
            with without_report():
                convert_and_load_state_dict_in_model(whole, {key: stored.read(key) for key in keys}, rules)
            for name, parameter in list(whole.named_parameters(remove_duplicate=False)):
                if not parameter.is_meta:
                    self.fill_whole(name, parameter.detach())
                    replace_in(whole, name, empty[name])

    def drawing(self, whole: nn.Module) -> Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]:
        """Return the context in which parameters of `whole` have memory; this rank's parts are kept on exit."""
        return contextmanager(partial(self._drawing, whole))

    def _drawing(self, whole: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        names = aliases(whole)
        real = {}
        for empty in parameters:
            # NaN marks elements that no rule draws.
            real[empty] = nn.Parameter(torch.full(empty.shape, torch.nan), requires_grad=empty.requires_grad)
            for name in names[empty]:
                replace_in(whole, name, real[empty])
        yield
        for empty, drawn in real.items():
            if drawn.isnan().any():
                raise CannotLoadPartsError(f"{type(whole).__name__} has no rule that draws {names[empty][0]}")
            self.fill_whole(names[empty][0], drawn.detach())
            for name in names[empty]:
                replace_in(whole, name, empty)

    def is_filled(self, name: str) -> bool:
        first = self._held[name][0]
        return not self.model.get_parameter(first).is_meta if self.shards is None else first in self.shards

    def require_filled(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.is_meta if self.shards is None else name not in self.shards:
                raise CannotLoadPartsError(f"it is not clear where {name} comes from")
        if (path := _made_with(self.model)) is not None:
            raise CannotLoadPartsError(f"{path} is a tensor that is made with the model")

    def fill_whole(self, name: str, whole: Tensor) -> None:
        """Fill the parameter `name` of the whole model with this rank's part of `whole`, if this model has it.

        The parameters of an adapter that begin as a function of it are filled too.
        """
        if not self.holds(name):
            return
        in_parts = self._in_parts.get(name)
        if name in self.starts:
            for part, value in self.starts[name](whole, in_parts.rounded(whole) if in_parts else whole).items():
                self.fill_whole(part, value)
        if in_parts is not None:
            self._set_parts(name, in_parts.encoded(whole))
        else:
            placement, cut = self._placement(name), self.placed.cut
            self._set(self._held[name], _share(cut.part(whole, placement), cut.share_of(placement)))

    def _placement(self, name: str) -> ParameterPlacement:
        return next(self._placements[held] for held in self._held[name] if held in self._placements)

    def _fill_encoded(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Fill a weight that is encoded already, and the parameters of its adapter."""
        if name in self.starts:
            whole = self._in_parts[name].decoded(torch.float32, parts)
            for part, value in self.starts[name](whole, whole).items():
                self.fill_whole(part, value)
        self._set_parts(name, parts)

    def _set_parts(self, name: str, parts: Mapping[str, Tensor]) -> None:
        placement, cut = self._placement(name), self.placed.cut
        for suffix, part in parts.items():
            self._set([f"{name}.{suffix}"], _share(cut.part(part, placement), cut.share_of(placement)))

    def _set(self, names: Sequence[str], part: Tensor) -> None:
        empty = self.model.get_parameter(names[0])
        if self.shards is not None:
            assert part.shape[1:] == empty.shape[1:], f"{names[0]} is {tuple(part.shape)}, of {tuple(empty.shape)}"
            # The model stays on `meta`; the strategy takes the rows from here.
            self.shards |= dict.fromkeys(names, part)
            return
        assert part.shape == empty.shape, f"{names[0]} is {tuple(part.shape)}, but its place is {tuple(empty.shape)}"
        # One parameter under all its names, so that ties of the whole model hold here too.
        parameter = nn.Parameter(part, requires_grad=empty.requires_grad)
        for name in names:
            replace_in(self.model, name, parameter)


def _share(part: Tensor, shard: ShardChoice | None) -> Tensor:
    if shard is None or not part.dim():
        return part
    first, last = shard.bounds(part.shape)
    # A view would keep the memory of the whole part.
    return part[first:last].clone()  # the other rows can go


@torch.no_grad()
def _rebuild_buffers(model: PreTrainedModel) -> None:
    """Set the values of buffers by the model's own rules, which transformers has for models on meta."""

    def rebuild(module: nn.Module, path: str, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner  # the model that has the rules
        for name, child in module.named_children():
            rebuild(child, f"{path}{name}.", owner)
        empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not empty:
            return
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # the rules skip it
        for name in empty:
            buffer = getattr(module, name)
            # A marked value shows afterwards whether a rule has set the buffer.
            setattr(module, name, torch.full_like(buffer, _unset(buffer.dtype), device="cpu"))
        # transformers has the formulas of buffers, such as rotary frequencies, in the rules that draw weights.
        owner._init_weights(module)
        for name in empty:
            buffer = getattr(module, name)
            if buffer.dtype != torch.bool and (buffer.isnan() | (buffer == _unset(buffer.dtype))).any():
                raise CannotLoadPartsError(f"{type(owner).__name__} has no rule for the buffer {path}{name}")

    rebuild(model, "", model)


def _unset(dtype: torch.dtype) -> float:
    """Return a value that no rule sets; both values of bool are valid."""
    return torch.nan if dtype.is_floating_point or dtype == torch.bool else torch.iinfo(dtype).min
