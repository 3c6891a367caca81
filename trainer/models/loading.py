"""Build one rank's parts of a model, from safetensors or at random, without holding the whole model.

The model is made and cut on the `meta` device, where tensors have shapes and no memory. Its parameters are then filled
one by one. Each comes from the slices that this rank reads from the files, or from a module that is drawn whole for a
moment. If data ranks shard the parameters, the model stays on `meta`, and this rank's shards lie beside it.

transformers loads the checkpoint into the model once with tensors on `meta`. This load maps tensors of the files to
parameters, and finds missing and unexpected ones.

If a model cannot be built in parts, `CannotLoadPartsError` is raised. The caller then loads the whole model and reports
the reason.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, is_peft_available
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import get_checkpoint_shard_files

from trainer.base.errors import UsageError
from trainer.models.adapters import factor_shapes
from trainer.models.cutting import CutModel, ModelCut
from trainer.models.initialising import draw_weights
from trainer.models.names import aliases
from trainer.parallel.communication import group_size, index_in_group
from trainer.parallel.node import NodeRanks
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.slices import ranges_of_part
from trainer.parallel.tensor.low_rank import drawn_factor
from trainer.recipe.schema import Model

_CHUNK_ELEMENTS = 1 << 22  # compared at once
_CHUNK_BYTES = 1 << 23  # sent at once


class CannotLoadPartsError(Exception):
    """Error for a model that must be built whole before it is cut; the message completes "because ..."."""


def sizes_differ(which: str) -> UsageError:
    """Return the error for a checkpoint of another model or another task."""
    return UsageError(
        f"`model.name_or_path` is a checkpoint in which {which} are of another size than in this task's model; use a"
        " checkpoint with the task's number of labels, or one without a head"
    )


@dataclass(frozen=True)
class PartedModel:
    """A model in fp32 on the CPU with this rank's parts, the result of its cut, and notes for the user.

    With `ModelCut.shard`, the parameters are on `meta`, and `shards` has this rank's rows of each, by name.
    """

    model: nn.Module
    cut: CutModel
    notes: list[str]
    shards: dict[str, Tensor] | None = None


class Checkpoint:
    """The tensors of safetensors files, which can be read in part.

    A file is opened again for each tensor, because pages of a mapped file count as this process's memory until it is
    closed. Mapped pages therefore never exceed the size of one tensor.

    Raises:
        SafetensorError: a file is damaged.
    """

    def __init__(self, files: Sequence[str | Path]) -> None:
        self._files: dict[str, str | Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  # `opened` is not a mapping
                    self._files[key] = file
                    self.shapes[key] = tuple(opened.get_slice(key).get_shape())

    def read(self, key: str) -> Tensor:
        """Return a copy of a whole tensor, in fp32 if its type is floating."""
        with safe_open(self._files[key], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
            return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else tensor.clone()

    def read_part(self, key: str, placement: ParameterPlacement, cut: ModelCut) -> Tensor:
        """Read only this rank's part of a tensor, in fp32, equal to that of `ModelCut.part`; of it, the own shard."""
        shape = self.shapes[key]
        if not shape or (not placement.splits and cut.shard is None):
            return self.read(key)
        extent, slices = self._slices(key, placement, cut)
        part = torch.zeros(extent)
        if slices:
            with safe_open(self._files[key], framework="pt") as opened:
                stored = opened.get_slice(key)
                for dim, place, index in slices:
                    rows = stored[index]
                    part.narrow(dim, place, rows.shape[dim]).copy_(rows)
        return part

    def wanted(self, needed: Sequence[bool]) -> Sequence[bool]:
        """Return which tensors of a list must be read, given those that this rank needs."""
        return needed

    def read_along(self, key: str) -> None:
        """Take part in the reading of a tensor that another rank needs."""

    def _slices(
        self, key: str, placement: ParameterPlacement, cut: ModelCut
    ) -> tuple[list[int], list[tuple[int, int, tuple[slice, ...]]]]:
        """Return the shape of a part, and the slices of the stored tensor in it, each with its dimension and place."""
        shape = self.shapes[key]
        if placement.splits:
            assert cut.group is not None
            (split,) = placement.splits
            dim, blocks = split.dim or 0, split.blocks
            width, ranges = ranges_of_part(shape[dim], split, index_in_group(cut.group), group_size(cut.group))
        else:
            dim, blocks, width, ranges = 0, 1, shape[0], [(0, shape[0])]
        extent = [*shape[:dim], blocks * width, *shape[dim + 1 :]]
        first, last = cut.shard.bounds(extent) if cut.shard is not None else (0, extent[0])
        extent[0] = last - first
        slices = []
        for block, (start, stop) in enumerate(ranges):
            place = block * width  # of the block in the part
            if dim == 0:  # only the rows of the shard
                start, stop = max(start, start + first - place), min(stop, start + last - place)
                place = max(place - first, 0)
            if start < stop and first < last:
                before = [slice(first, last), *[slice(None)] * (dim - 1)] if dim else []
                slices.append((dim, place, (*before, slice(start, stop))))
        return extent, slices

    def equal(self, key: str, other: str) -> bool:
        """Return whether two tensors have the same elements; they are read a few rows at a time."""
        if self.shapes[key] != self.shapes[other]:
            return False
        if not self.shapes[key]:
            return torch.equal(self.read(key), self.read(other))
        num_rows, *columns = self.shapes[key]
        step = max(1, _CHUNK_ELEMENTS // max(1, torch.Size(columns).numel()))
        for start in range(0, num_rows, step):
            rows = []
            for name in (key, other):
                with safe_open(self._files[name], framework="pt") as opened:
                    rows.append(opened.get_slice(name)[start : start + step].clone())
            if not torch.equal(*rows):
                return False
        return True


class SharedCheckpoint(Checkpoint):
    """The tensors of safetensors files that one rank of each node reads and sends to the others, in chunks of rows.

    Each byte is read once for a node, and sent in the type of the file. A rank holds a chunk beside its part. All ranks
    of the node must make the same calls, with the same keys.

    Args:
        files: the safetensors files.
        node: the ranks of this node.

    Raises:
        OSError, SafetensorError: a file is damaged; on every rank of the node.
    """

    def __init__(self, files: Sequence[str | Path], node: NodeRanks) -> None:
        self._node = node
        described = node.read(lambda: self._describe(files))
        self.shapes = {key: tuple(shape) for key, (shape, _) in described.items()}
        self._types: dict[str, torch.dtype] = {key: getattr(torch, name) for key, (_, name) in described.items()}

    def _describe(self, files: Sequence[str | Path]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Open the files on the reader, and return the shape and type of each tensor."""
        self._own = Checkpoint(files)
        described = {}
        for key, shape in self._own.shapes.items():
            with safe_open(self._own._files[key], framework="pt") as opened:
                one = opened.get_slice(key)[:0] if shape else opened.get_tensor(key)
            described[key] = shape, str(one.dtype).removeprefix("torch.")
        return described

    def read(self, key: str) -> Tensor:
        shape = self.shapes[key]
        dtype = torch.float32 if self._types[key].is_floating_point else self._types[key]
        tensor = torch.empty(shape, dtype=dtype)
        rows = tensor if shape else tensor.view(1)
        for start, chunk in self._chunks(key):
            rows[start : start + len(chunk)] = chunk
        return tensor

    def read_part(self, key: str, placement: ParameterPlacement, cut: ModelCut) -> Tensor:
        if not self.shapes[key] or (not placement.splits and cut.shard is None):
            return self.read(key)
        extent, slices = self._slices(key, placement, cut)
        part = torch.zeros(extent)
        for start, chunk in self._chunks(key):
            for dim, place, (own, *rest) in slices:
                first, last = max(own.start, start), min(own.stop, start + len(chunk))
                if first < last:
                    index = (slice(first - start, last - start), *rest)
                    rows = chunk[index]
                    block = part.narrow(dim, place, rows.shape[dim]) if dim else part[place:]
                    block[first - own.start : last - own.start] = rows
        return part

    def wanted(self, needed: Sequence[bool]) -> Sequence[bool]:
        return self._node.any_of(needed)

    def read_along(self, key: str) -> None:
        for _ in self._chunks(key):
            pass

    def equal(self, key: str, other: str) -> bool:
        same: bool = self._node.read(lambda: self._own.equal(key, other))
        return same

    def _chunks(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a tensor in chunks, each with the index of its first row; a scalar is one row."""
        num_rows, *columns = self.shapes[key] or (1,)
        dtype = self._types[key]
        step = max(1, _CHUNK_BYTES // max(1, torch.Size(columns).numel() * dtype.itemsize))
        for start in range(0, num_rows, step):
            stop = min(num_rows, start + step)
            yield start, self._node.read_tensor(partial(self._rows, key, start, stop), (stop - start, *columns), dtype)

    def _rows(self, key: str, start: int, stop: int) -> Tensor:
        with safe_open(self._own._files[key], framework="pt") as opened:
            if not self.shapes[key]:
                scalar: Tensor = opened.get_tensor(key)
                return scalar.clone()
            rows: Tensor = opened.get_slice(key)[start:stop]
            return rows.clone()


class CountedCheckpoint(Checkpoint):
    """A checkpoint that returns tensors on `meta` and counts the bytes of each file that would be read.

    Args:
        files: the safetensors files, of which only the headers are read.
    """

    def __init__(self, files: Sequence[str | Path]) -> None:
        super().__init__(files)
        self.num_bytes: Counter[str] = Counter()

    def read(self, key: str) -> Tensor:
        self._count(key, ())
        return torch.empty(self.shapes[key], device="meta")

    def read_part(self, key: str, placement: ParameterPlacement, cut: ModelCut) -> Tensor:
        if not self.shapes[key] or (not placement.splits and cut.shard is None):
            return self.read(key)
        extent, slices = self._slices(key, placement, cut)
        for _, _, index in slices:
            self._count(key, index)
        return torch.empty(extent, device="meta")

    def _count(self, key: str, index: tuple[slice, ...]) -> None:
        shape = self.shapes[key]
        with safe_open(self._files[key], framework="pt") as opened:
            one = opened.get_slice(key)[:0] if shape else opened.get_tensor(key)
        num_elements = torch.empty(shape, device="meta")[index].numel()
        self.num_bytes[Path(self._files[key]).name] += num_elements * one.element_size()


@dataclass
class _Sources:
    """The tensors of a checkpoint that fill the parameters and buffers of a model."""

    renamed: dict[str, str] = field(default_factory=dict)  # name in the model: key in the checkpoint
    converted: list[list[str]] = field(default_factory=list)  # groups of keys that are merged or split together
    missing: list[str] = field(default_factory=list)  # names in the model
    notes: list[str] = field(default_factory=list)


def load_parts(
    auto_class: Any,
    recipe: Model,
    config: Any,
    attention: str,
    seed: int,
    prepare: Callable[[nn.Module, Sequence[str]], Any],
    cut: ModelCut,
    node: NodeRanks | None = None,
) -> PartedModel:
    """Build the model of a recipe in parts that are bit for bit equal to a cut of the whole model.

    Args:
        auto_class: the head, an auto class of transformers.
        recipe: the recipe's `model`.
        config: the configuration of transformers.
        attention: the name of the attention function.
        seed: the seed of the random weights.
        prepare: the function that is called before the cut, with the model and the names of the parameters that a
            pretrained model lacks.
        cut: the cut of the model.
        node: the ranks of this node, if one of them reads the files for all; all of them must call it then.

    Raises:
        CannotLoadPartsError: the model must be built whole.
        ValueError: the checkpoint does not fit the model.
        OSError, RuntimeError, SafetensorError: transformers cannot build the model, or a file cannot be read.
        UsageError: the model cannot be cut.
    """
    files = [] if recipe.is_random else _weight_files(recipe, config)
    checkpoint = Checkpoint(files) if node is None else SharedCheckpoint(files, node)
    with torch.random.fork_rng(devices=[]):
        parts, made, whole, sources, factors = _empty_parts(
            auto_class, recipe, config, attention, prepare, cut, checkpoint
        )
        _rebuild_buffers(parts.model)
        parts.read(checkpoint, sources.renamed)
        parts.convert(checkpoint, sources.converted, whole)
        draw_weights(whole, sources.missing, seed, lambda parameters: parts.drawing(whole, parameters), parts.holds)
        for name, shape in factors.items():
            if parts.holds(name):  # other factors are not drawn
                parts.fill_whole(name, drawn_factor(name, shape, seed))
    parts.check_filled()
    return PartedModel(parts.model, made, sources.notes, parts.shards)


def count_reads(
    auto_class: Any,
    recipe: Model,
    config: Any,
    attention: str,
    prepare: Callable[[nn.Module, Sequence[str]], Any],
    cut: ModelCut | None,
) -> Mapping[str, int]:
    """Return the bytes of each file that `load_parts` reads of a pretrained model, from the headers of the files.

    Without a cut, or if the model must be built whole, these are all bytes. Arguments and errors are those of
    `load_parts`.
    """
    checkpoint = CountedCheckpoint(_weight_files(recipe, config))
    try:
        if cut is not None:
            parts, _, _, sources, _ = _empty_parts(auto_class, recipe, config, attention, prepare, cut, checkpoint)
            parts.read(checkpoint, sources.renamed)
            for key in (key for keys in sources.converted for key in keys):
                checkpoint.read(key)
            return checkpoint.num_bytes
    except CannotLoadPartsError:
        checkpoint.num_bytes.clear()
    for key in checkpoint.shapes:
        checkpoint.read(key)
    return checkpoint.num_bytes


def _empty_parts(
    auto_class: Any,
    recipe: Model,
    config: Any,
    attention: str,
    prepare: Callable[[nn.Module, Sequence[str]], Any],
    cut: ModelCut,
    checkpoint: Checkpoint,
) -> tuple[_Parts, CutModel, nn.Module, _Sources, Mapping[str, tuple[int, ...]]]:
    """Return the parts of a cut model on meta, its cut, the whole model on meta, and where their tensors come from.

    The last result has the shapes of the factors of adapters.
    """
    with torch.device("meta"):
        model = auto_class.from_config(config, attn_implementation=attention, dtype=torch.float32)
    sources = _Sources()
    if not recipe.is_random:
        model, sources = _match(type(model), config, attention, checkpoint)
        _take_origin(model, recipe)
    else:
        sources.missing = [name for name, _ in model.named_parameters()]
    whole = copy.deepcopy(model)  # on meta; its modules are drawn and converted one at a time
    prepare(model, () if recipe.is_random else sources.missing)
    factors = factor_shapes(model)
    made = cut(model)
    parts = _Parts(model, made, cut, [*aliases(whole).values(), *([name] for name in factors)])
    return parts, made, whole, sources, factors


def _weight_files(recipe: Model, config: Any) -> list[str]:
    """Return the safetensors files of a folder or of the hub: one file, or several files with an index."""
    for attribute, what in (
        ("quantization_config", "its weights are quantised"),
        ("transformers_weights", "its configuration names a file of weights of its own"),
        ("extra_files", "weights lie in further files"),
    ):
        if getattr(config, attribute, None):
            raise CannotLoadPartsError(what)
    name, revision = str(recipe.name_or_path), recipe.revision or "main"
    try:
        if is_peft_available() and find_file(recipe, "adapter_config.json") is not None:  # without PEFT, it is ignored
            raise CannotLoadPartsError("it is an adapter to another model")
        if (single := find_file(recipe, SAFE_WEIGHTS_NAME)) is not None:
            return [single]
        if (index := find_file(recipe, SAFE_WEIGHTS_INDEX_NAME)) is not None:
            _require_safe_names(name, index)
            return list(get_checkpoint_shard_files(name, index, revision=revision)[0])
    except OSError as error:  # the load of the whole model gives a better message
        raise CannotLoadPartsError(f"its files could not be listed ({error})") from error
    raise CannotLoadPartsError(f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")


def find_file(recipe: Model, file: str) -> str | None:
    """Return the path of a file of a model's folder or of the hub; None if it has no such file.

    Raises:
        OSError: the hub cannot be reached.
    """
    found: str | None = cached_file(
        str(recipe.name_or_path), file, revision=recipe.revision or "main", _raise_exceptions_for_missing_entries=False
    )
    return found


def require_safe_shards(recipe: Model, config: Any) -> None:
    """Refuse a folder without weights, and an index that names a missing file, a pickle, or a file in another folder.

    transformers reads every file that the index names.

    Raises:
        UsageError: there are no weights, or the index names such a file.
    """
    name = str(recipe.name_or_path)
    if getattr(config, "transformers_weights", None):  # a file of another name
        return
    with suppress(OSError):  # transformers has a better message for a checkpoint that cannot be reached
        if find_file(recipe, SAFE_WEIGHTS_NAME) is not None:
            return
        if (index := find_file(recipe, SAFE_WEIGHTS_INDEX_NAME)) is not None:
            _require_safe_names(name, index)
        elif Path(name, "config.json").is_file() and not Path(name, "adapter_config.json").is_file():
            raise UsageError(
                f"`model.name_or_path` is {name!r}, which has no weights ({SAFE_WEIGHTS_NAME}); save the model again"
                " with `save_pretrained`"
            )


def compare_shapes(model_class: Any, recipe: Model, config: Any) -> list[str]:
    """Require weights of the shapes of a model, from the headers of their files; return the parameters they lack.

    Raises:
        UsageError: the shapes of a tensor and its parameter differ.
        CannotLoadPartsError: transformers loads such weights only as a whole.
        OSError, ValueError, RuntimeError, SafetensorError: transformers cannot build the model, or a file is damaged.
    """
    return _match(model_class, config, "eager", Checkpoint(_weight_files(recipe, config)))[1].missing


def _require_safe_names(name: str, index: str) -> None:
    described = json.loads(Path(index).read_text(encoding="utf-8"))
    weight_map = described.get("weight_map") if isinstance(described, dict) else None
    if not isinstance(weight_map, dict):
        raise UsageError(
            f"`model.name_or_path` is {name!r}, but its {SAFE_WEIGHTS_INDEX_NAME} has no `weight_map`; save the model"
            " again with `save_pretrained`"
        )
    for file in dict.fromkeys(map(str, weight_map.values())):
        if not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise UsageError(
                f"`model.name_or_path` is {name!r}, but its {SAFE_WEIGHTS_INDEX_NAME} names the file {file!r}; it may"
                " only name safetensors files of its own folder: save the model again with `save_pretrained`"
            )
        if Path(name).is_dir() and not Path(name, file).is_file():
            raise UsageError(
                f"`model.name_or_path` is {name!r}, but its file {file!r} is missing, which its"
                f" {SAFE_WEIGHTS_INDEX_NAME} names; copy it too"
            )


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


def _match(model_class: Any, config: Any, attention: str, checkpoint: Checkpoint) -> tuple[nn.Module, _Sources]:
    """Return the model on meta as transformers loads it, with weights tied as in the checkpoint, and its sources.

    Raises:
        UsageError: the shapes of a tensor and its parameter differ.
    """
    with without_report():
        model, loading = model_class.from_pretrained(
            None,
            config=config,
            state_dict={key: torch.empty(shape, device="meta") for key, shape in checkpoint.shapes.items()},
            device_map="meta",
            attn_implementation=attention,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the error below names them
        )
    if mismatched := sorted(loading["mismatched_keys"]):
        shapes = "; ".join(f"{name} is {list(stored)} and not {list(shape)}" for name, stored, shape in mismatched[:3])
        raise sizes_differ(f"{len(mismatched)} weights ({shapes})")
    sources = _Sources(missing=sorted(loading["missing_keys"]))
    _rename(model, checkpoint, sources)
    _tie_equal(model, checkpoint, sources)
    if sources.missing:
        sources.notes.append(f"not in the checkpoint, drawn at random: {', '.join(sources.missing)}")
    if unexpected := sorted(loading["unexpected_keys"]):
        sources.notes.append(f"in the checkpoint, not in this model: {', '.join(unexpected)}")
    return model, sources


def _rename(model: Any, checkpoint: Checkpoint, sources: _Sources) -> None:
    """Map tensors of the checkpoint to those of the model, by transformers' rules for the model class."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    expected, prefix = model.state_dict(), model.base_model_prefix
    converted: dict[str, list[str]] = {}
    for key in checkpoint.shapes:
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:  # a current name that matches the rule for an older one
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            continue
        if pattern is not None:
            converted.setdefault(name, []).append(key)
        elif name in sources.renamed:
            raise CannotLoadPartsError(f"{key} and {sources.renamed[name]} in its files are both {name}")
        else:
            sources.renamed[name] = key
    sources.converted = list(converted.values())


def _tie_equal(model: Any, checkpoint: Checkpoint, sources: _Sources) -> None:
    """Tie weights that the checkpoint holds twice with equal values, as transformers does with real weights."""
    renamed = sources.renamed
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in renamed or source not in renamed:
            continue
        if checkpoint.equal(renamed[target], renamed[source]):
            _set(model, target, model.get_parameter(source))
            del renamed[target]
        else:
            del model.all_tied_weights_keys[target]
            sources.notes.append(f"differ in the checkpoint, so they are not tied: {source}, {target}")


def _take_origin(model: Any, recipe: Model) -> None:
    """Set the name of the model's origin, and its generation configuration, as transformers does."""
    name = str(recipe.name_or_path)
    model.name_or_path = model.config.name_or_path = name
    if model.can_generate():
        with suppress(OSError):  # without one, the generation configuration from the model's configuration stays
            model.generation_config = GenerationConfig.from_pretrained(name, revision=recipe.revision or "main")


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


class _Parts:
    """The parameters of a cut model on meta, which can be filled in any order."""

    def __init__(self, model: nn.Module, made: CutModel, cut: ModelCut, tied: Iterable[Sequence[str]]) -> None:
        self.model = model
        self._placements = made.placements
        self._cut = cut
        self.shards: dict[str, Tensor] | None = {} if cut.shard is not None else None
        first = {name: names[0] for names in tied for name in names}  # in the whole model
        origins = made.part.origins if made.part else {}
        own: dict[str, list[str]] = {}  # names in this model, by the first name in the whole model
        for name, _ in model.named_parameters(remove_duplicate=False):
            own.setdefault(origins.get(name) or first[name], []).append(name)
        self._own = {name: own[origin] for name, origin in first.items() if origin in own}
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def holds(self, name: str) -> bool:
        """Return whether this model has the parameter `name` of the whole model, or a copy of it."""
        return name in self._own

    def read(self, checkpoint: Checkpoint, renamed: Mapping[str, str]) -> None:
        """Fill the tensors that need no conversion; tensors of other stages are not read."""
        wanted = checkpoint.wanted([self.holds(name) or name in self._buffers for name in renamed])
        for (name, key), is_wanted in zip(renamed.items(), wanted, strict=True):
            if self.holds(name):
                self._fill(name, checkpoint.read_part(key, self._placement(name), self._cut))
            elif name in self._buffers:
                self._fill_buffer(name, checkpoint.read(key))
            elif is_wanted:
                checkpoint.read_along(key)

    def convert(self, checkpoint: Checkpoint, groups: Sequence[Sequence[str]], whole: Any) -> None:
        """Fill the tensors that must be merged or split; each group is read whole into `whole`, one group at a time."""
        for keys in groups:
            empty = dict(whole.named_parameters(remove_duplicate=False))
            rules = LoadStateDictConfig(
                dtype=torch.float32, device_map={"": "cpu"}, weight_mapping=get_model_conversion_mapping(whole)
            )
            with without_report():
                convert_and_load_state_dict_in_model(whole, {key: checkpoint.read(key) for key in keys}, rules)
            for name, parameter in list(whole.named_parameters(remove_duplicate=False)):
                if not parameter.is_meta:
                    self.fill_whole(name, parameter.detach())
                    _set(whole, name, empty[name])

    @contextmanager
    def drawing(self, whole: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Give `parameters` of the model `whole` memory inside this `Gather`, and keep this rank's parts on exit."""
        names = aliases(whole)
        real = {}
        for empty in parameters:
            # NaN marks elements that no rule draws.
            real[empty] = nn.Parameter(torch.full(empty.shape, torch.nan), requires_grad=empty.requires_grad)
            for name in names[empty]:
                _set(whole, name, real[empty])
        yield
        for empty, drawn in real.items():
            if drawn.isnan().any():
                raise CannotLoadPartsError(f"{type(whole).__name__} has no rule that draws {names[empty][0]}")
            self.fill_whole(names[empty][0], drawn.detach())
            for name in names[empty]:
                _set(whole, name, empty)

    def check_filled(self) -> None:
        """Refuse a model that still has tensors on meta."""
        for name, parameter in self.model.named_parameters():
            if parameter.is_meta if self.shards is None else name not in self.shards:
                raise CannotLoadPartsError(f"it is not clear where {name} comes from")
        for path, module in self.model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    raise CannotLoadPartsError(f"{path}.{attribute} is a tensor that is made with the model")

    def _placement(self, name: str) -> ParameterPlacement:
        return next(self._placements[own] for own in self._own[name] if own in self._placements)

    def fill_whole(self, name: str, whole: Tensor) -> None:
        """Fill the parameter `name` of the whole model with this rank's part of `whole`, if this model has it."""
        if self.holds(name):
            part, shard = self._cut.part(whole, self._placement(name)), self._cut.shard
            if shard is not None and part.dim():
                first, last = shard.bounds(part.shape)
                part = part[first:last].clone()  # the other rows can go
            self._fill(name, part)

    def _fill(self, name: str, part: Tensor) -> None:
        empty = self.model.get_parameter(self._own[name][0])
        if self.shards is not None:
            assert part.shape[1:] == empty.shape[1:], f"{name} is {tuple(part.shape)}, of {tuple(empty.shape)}"
            self.shards |= dict.fromkeys(self._own[name], part)
            return
        assert part.shape == empty.shape, f"{name} is {tuple(part.shape)}, but its place is {tuple(empty.shape)}"
        parameter = nn.Parameter(part, requires_grad=empty.requires_grad)
        for own in self._own[name]:
            _set(self.model, own, parameter)

    def _fill_buffer(self, name: str, value: Tensor) -> None:
        self.model.get_buffer(name).copy_(value)


@torch.no_grad()
def _rebuild_buffers(model: PreTrainedModel) -> None:
    """Set the values of buffers by the model's own rules, which transformers has for models on meta."""

    def rebuild(module: nn.Module, path: str, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner  # the model that has the rules
        for name, child in module.named_children():
            rebuild(child, f"{path}{name}.", owner)
        own = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not own:
            return
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # the rules skip it
        for name in own:
            setattr(module, name, _unset_like(getattr(module, name)))
        owner._init_weights(module)
        for name in own:
            if _is_unset(getattr(module, name)):
                raise CannotLoadPartsError(f"{type(owner).__name__} has no rule for the buffer {path}{name}")

    rebuild(model, "", model)


def _unset_like(buffer: Tensor) -> Tensor:
    """Return a buffer on the CPU, filled with a value that no rule sets."""
    return torch.full_like(buffer, _unset_value(buffer), device="cpu")


def _is_unset(buffer: Tensor) -> bool:
    if buffer.dtype == torch.bool:
        return False  # both values are valid
    unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset_value(buffer)
    return bool(unset.any())


def _unset_value(buffer: Tensor) -> float:
    if buffer.is_floating_point() or buffer.dtype == torch.bool:
        return torch.nan
    return torch.iinfo(buffer.dtype).min
