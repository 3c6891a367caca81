"""Fill a placed model with weights: read from safetensors, drawn at random, or received from another rank.

A model is described and placed on the `meta` device, where tensors have shapes and no memory. Its parameters are then
filled one by one. Each comes from the slices that this rank reads from the files, or from a module that is drawn whole
for a moment. No rank holds more than its part. If data ranks shard the parameters, the model stays on `meta`, and this
rank's shards lie beside it.

transformers loads the checkpoint into the model once with tensors on `meta`. This load maps tensors of the files to
parameters, and finds missing and unexpected ones.

A model that cannot be filled in parts (`CannotLoadPartsError`) is loaded whole by transformers before it is placed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging

from trainer.base.errors import UsageError
from trainer.models.added import values_of
from trainer.models.configuration import vocabulary_size
from trainer.models.describe import ModelDescription, sizes_differ
from trainer.models.draw import draw_weights
from trainer.models.hub_files import CannotLoadPartsError, is_adapter, one_line, require_safe_shards
from trainer.models.names import aliases, replace_in
from trainer.models.place import ModelCut, Origin, PlacedModel, ShardChoice, place
from trainer.models.registered_forms import form_of
from trainer.models.stored_weights import StoredWeights
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
            return _place_whole(described, cut, reason)


def _place_whole(described: ModelDescription, cut: ModelCut, reason: CannotLoadPartsError) -> PlacedModel:
    keys = described.new_keys()
    model, drawn, notes = load_whole(described)
    # In a random model all is drawn, which is no news for the user.
    lacking = () if described.recipe.is_random else drawn
    prepared = described.prepare(model, lacking, keys)
    notes = [*notes, *described.check_invariance(model, keys), *prepared]
    if cut != ModelCut():
        notes.append(f"every rank held the whole model for a moment while it was built, because {reason}")
    # The strategy shards whole parameters itself, so no shard is cut here.
    return place(model, replace(cut, shard=None, expert_shard=None), keys, notes, lacking, described.groups(model))


def load_whole(described: ModelDescription) -> tuple[nn.Module, list[str], list[str]]:
    """Return the model as transformers loads it, the names of weights that are drawn instead, and notes."""
    recipe, seed = described.recipe, described.seed
    with torch.random.fork_rng(devices=[]):
        # transformers draws weights that a checkpoint lacks; `draw_weights` replaces them by layout-invariant ones.
        torch.manual_seed(seed)
        if recipe.is_random:
            model = described.instantiate()
            drawn = [name for name, _ in model.named_parameters()]
            draw_weights(model, drawn, seed)
            return model, drawn, []
        require_safe_shards(recipe, described.config)
        tensors = _fitted_tensors(described)
        with without_report():
            model, loading = described.model_class.from_pretrained(
                recipe.name_or_path if tensors is None else None,
                config=described.config,
                state_dict=tensors,
                revision=recipe.revision or "main",
                use_safetensors=True,  # a pickle can run code
                trust_remote_code=False,
                output_loading_info=True,
                **described.keyword_arguments,
            )
    if tensors is not None:
        _take_origin(model, recipe)
    # transformers returns a set, which has another order in each process.
    missing = sorted(loading["missing_keys"])
    if missing:
        draw_weights(model, missing, seed)
    return model, missing, _loading_notes(missing, loading)


def _fitted_tensors(described: ModelDescription) -> dict[str, Tensor] | None:
    recipe, form = described.recipe, form_of(described.recipe)
    if recipe.new_tokens is None and form is None and not recipe.new_head:
        return None
    try:
        plain = StoredWeights(described.files())
        stored = fitted(described, plain)
    except CannotLoadPartsError as error:
        key = "model.new_tokens" if recipe.new_tokens is not None else form.key if form else "model.new_head"
        raise UsageError(
            f"`{key}` needs weights in safetensors files of the model itself, but {error}; save the model"
            " again with `save_pretrained` of transformers"
        ) from error
    # If no tensor was changed, transformers reads the files itself, without a second copy in memory.
    return None if stored is plain else {key: stored.read(key) for key in stored.shapes}


def _loading_notes(missing: Sequence[str], loading: Mapping[str, Any]) -> list[str]:
    notes = [f"not in the checkpoint, initialised at random: {', '.join(missing)}"] if missing else []
    unexpected = sorted(loading["unexpected_keys"])
    return [*notes, f"in the checkpoint, not in this model: {', '.join(unexpected)}"] if unexpected else notes


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
    stored = fitted(described, _opened(files, node))
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


def _origin(parts: _Parts, whole: nn.Module, sources: _Sources, stored: StoredWeights, seed: int) -> Origin:
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


def check_weights(described: ModelDescription, compares_sizes: bool = True) -> list[str]:
    """Check that the files of pretrained weights exist and fit the model; their values are not read.

    Returns the parameters that the files lack, as far as these can be compared.

    Args:
        compares_sizes: whether to compare sizes, which may depend on options of the task.

    Raises:
        UsageError: the files are missing, or of other sizes.
    """
    if described.recipe.is_random:
        return []
    require_safe_shards(described.recipe, described.config)
    if not compares_sizes:
        return []
    with described.explained():
        try:
            return _match(described, fitted(described, StoredWeights(described.files())))[1].missing
        except CannotLoadPartsError:
            return []  # such a model is compared when it is loaded


@dataclass
class _Sources:
    """The tensors of a checkpoint that fill the parameters and buffers of a model."""

    renamed: dict[str, str] = field(default_factory=dict)  # name in the model: key in the checkpoint
    converted: list[list[str]] = field(default_factory=list)  # groups of keys that are merged or split together
    missing: list[str] = field(default_factory=list)  # names in the model
    notes: list[str] = field(default_factory=list)


def empty_parts(
    described: ModelDescription, cut: ModelCut, stored: StoredWeights
) -> tuple[_Parts, nn.Module, _Sources]:
    """Return the placed model on `meta`, the whole model on `meta`, and where their tensors come from."""
    if described.recipe.is_random:
        try:
            with torch.device("meta"):
                model = described.instantiate()
        except RuntimeError as error:
            raise CannotLoadPartsError(f"transformers cannot make it on meta ({one_line(error)})") from error
        sources, lacking = _Sources(missing=[name for name, _ in model.named_parameters()]), []
    else:
        model, sources = _match(described, stored)
        _take_origin(model, described.recipe)
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


@contextmanager
def without_report() -> Iterator[None]:
    """Hide the report and the bar of transformers for a load, one for each rank: notes of the build say the same."""
    verbosity, had_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()


def fitted(described: ModelDescription, stored: StoredWeights) -> StoredWeights:
    """Return stored weights by the names of whole ones, with the rows of new tokens and without those of a new head."""
    form = form_of(described.recipe)
    encoded = form is not None and form.stored_in(stored.shapes)
    recipe = described.recipe
    if recipe.is_random or not (encoded or recipe.new_tokens or recipe.new_head):
        return stored
    from trainer.models.changed_weights import EnlargedWeights, FewerWeights  # most models keep their shapes

    model = described.on_meta()
    renamed = renamed_keys(model, stored)[0]
    if recipe.new_head:
        head = _head(model, renamed, recipe)
        stored = FewerWeights(stored, {renamed.pop(name) for name in head})
    shapes = {key: tuple(model.state_dict()[name].shape) for name, key in renamed.items()}
    if form is not None and encoded:
        described.adapt(model)
        stored = form.opened(recipe, stored, model, renamed, shapes)
    if not recipe.new_tokens:
        return stored
    size = vocabulary_size(described.config)
    larger = {key: after for key, after in shapes.items() if _has_more_tokens(stored.shapes[key], after, size)}
    return EnlargedWeights(stored, larger)


def _head(model: nn.Module, renamed: Mapping[str, str], recipe: Model) -> list[str]:
    head = [name for name in renamed if _is_in_head(model, name)]
    if not head or len(head) == len(renamed):
        raise UsageError(
            f"`model.new_head` is true, but the checkpoint {recipe.name_or_path} has no head for this task that"
            " could be replaced; set it to false"
        )
    return head


def _is_in_head(model: Any, name: str) -> bool:
    return not name.startswith(f"{model.base_model_prefix}.")


def _has_more_tokens(before: Sequence[int], after: Sequence[int], size: int | None) -> bool:
    """Return whether exactly one dimension differs, and has grown to the size of the vocabulary."""
    changes = [(old, new) for old, new in zip(before, after, strict=False) if old != new]
    return len(before) == len(after) and len(changes) == 1 and changes[0][0] < changes[0][1] == size


def _match(described: ModelDescription, stored: StoredWeights) -> tuple[nn.Module, _Sources]:
    with without_report():
        model, loading = described.model_class.from_pretrained(
            None,
            config=described.config,
            # Tensors without memory: transformers matches names and shapes, and reads nothing.
            state_dict={key: torch.empty(shape, device="meta") for key, shape in stored.shapes.items()},
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the error below names them
            **described.keyword_arguments,
        )
    if mismatched := sorted(loading["mismatched_keys"]):
        shapes = "; ".join(f"{name} is {list(stored)} and not {list(shape)}" for name, stored, shape in mismatched[:3])
        in_head = [_is_in_head(model, name) for name, *_ in mismatched]
        raise sizes_differ(f"{len(mismatched)} weights ({shapes})", all(in_head))
    return model, _sources(model, stored, loading)


def _sources(model: Any, stored: StoredWeights, loading: Mapping[str, Any]) -> _Sources:
    """Map tensors of the files to those of the model, and tie weights that the files hold twice with equal values.

    transformers ties such weights, too, when it loads their values.
    """
    renamed, converted = renamed_keys(model, stored)
    missing = sorted(loading["missing_keys"])
    notes = []
    # A list, because the loop deletes ties.
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in renamed or source not in renamed:
            continue
        if stored.equal(renamed[target], renamed[source]):
            replace_in(model, target, model.get_parameter(source))
            del renamed[target]
        else:
            del model.all_tied_weights_keys[target]
            notes.append(f"differ in the checkpoint, so they are not tied: {source}, {target}")
    return _Sources(renamed, converted, missing, [*notes, *_loading_notes(missing, loading)])


def renamed_keys(model: Any, stored: StoredWeights) -> tuple[dict[str, str], list[list[str]]]:
    """Return the tensors of files by the parameters that they fill, and groups of those that are merged or split.

    The rules are those of transformers for the model class.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    expected, prefix = model.state_dict(), model.base_model_prefix
    renamed: dict[str, str] = {}
    converted: dict[str, list[str]] = {}
    for key in stored.shapes:
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        # Rules for older names may also match a current name.
        if name not in expected and key in expected:  # a current name that matches the rule for an older one
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            continue
        if pattern is not None:
            # A converter merges or splits tensors, so their parts cannot be read in slices.
            converted.setdefault(name, []).append(key)
        elif name in renamed:
            raise CannotLoadPartsError(f"{key} and {renamed[name]} in its files are both {name}")
        else:
            renamed[name] = key
    return renamed, list(converted.values())


def _take_origin(model: Any, recipe: Model) -> None:
    """Set the name of the model's origin, and its generation configuration, as transformers does."""
    name = str(recipe.name_or_path)
    model.name_or_path = model.config.name_or_path = name
    if model.can_generate():
        revision = recipe.revision or "main"
        try:
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
        except OSError:  # older folders have the settings in `config.json`, without which a configuration is made
            model.generation_config = GenerationConfig.from_pretrained(
                name, config_file_name=CONFIG_NAME, revision=revision, _from_model_config=True
            )


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
