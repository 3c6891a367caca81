"""The files of weights of a Hugging Face folder; each tensor is read when its file is written.

A model of transformers on the `meta` device, where tensors have shapes and no memory, gives their names, types and
files. A run, which has the model, and a checkpoint, which has only tensors, therefore give the same folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from trainer.base.disk import save_tensors
from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.models.names import aliases
from trainer.models.statistics import persistent_buffers

LARGEST_FILE_BYTES = 5_000_000_000
_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9_]*")


class UnknownModelError(Exception):
    """Error for a configuration that describes no model of transformers; the message gives the reason."""


def transformers_class(model: Any) -> Any:
    """Return the class of transformers that a model has, without a class that FSDP may derive from it."""
    return next(base for base in type(model).__mro__ if base.__module__.startswith("transformers."))


def described_model(described: Mapping[str, Any]) -> Any:
    """Build the model that the content of a `config.json` describes, on `meta`.

    The name of its class must be one of transformers' own; no module that a file names is imported.

    Raises:
        UnknownModelError: there is no such class, or it does not belong to this configuration.
    """
    model_type, names = described.get("model_type"), described.get("architectures")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnknownModelError(f"its `model_type` is {model_type!r}, which transformers does not know")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str):
        raise UnknownModelError(f"its `architectures` must name one class, but are {names!r}")
    kind: Any = getattr(transformers, name, None) if _CLASS_NAME.fullmatch(name) else None
    if not _is_model(kind):
        raise UnknownModelError(f"its `architectures` name {name!r}, which is no model of transformers")
    if kind.config_class is not CONFIG_MAPPING[model_type]:
        raise UnknownModelError(f"{name} is not of its `model_type` {model_type!r}")
    try:
        config_class = CONFIG_MAPPING[model_type]
        # `save_pretrained` tags infinities and NaN, and `from_dict` alone does not restore them.
        config = config_class.from_dict(config_class._decode_special_floats(dict(described)))
        with torch.device("meta"):
            return kind(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise UnknownModelError(f"{name} cannot be built from it: {error}") from error


def _is_model(kind: Any) -> bool:
    # A file must not choose another attribute of transformers, such as a function, to be called.
    shipped = getattr(kind, "__module__", "").startswith("transformers.models.")
    return shipped and isinstance(kind, type) and issubclass(kind, PreTrainedModel)


@dataclass(frozen=True)
class _Group:
    """Tensors of the model that are converted to tensors of a file together; usually one to one."""

    sources: Mapping[str, str]  # name that transformers writes: name of the tensor to read
    written: Collection[str]


@dataclass(frozen=True)
class WeightFile:
    """A file of weights that is not written yet.

    `sources` are the names of the tensors that it needs; other files may need some of them too. `num_bytes` are the
    bytes of its tensors.
    """

    name: str
    sources: tuple[str, ...]
    num_bytes: int
    _model: Any
    _keys: frozenset[str]
    _groups: tuple[_Group, ...]
    _types: Mapping[str, torch.dtype]

    def write(self, read: Callable[[str], Tensor], folder: Path) -> Path:
        """Write the file to an existing folder, from tensors that `read` returns by their names, and return its path.

        Raises:
            UsageError: a value is too large for its type.
            OSError, SafetensorError: the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for group in self._groups:
            whole = {name: _cast(name, read(source), self._types[name]) for name, source in group.sources.items()}
            reverted = revert_weight_conversion(self._model, whole)
            # A file may have some tensors of a group only, and another file the others.
            tensors |= {key: _alone(reverted[key]) for key in self._keys.intersection(group.written)}
        save_tensors(tensors, folder / self.name, metadata={"format": "pt"})
        return folder / self.name


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model's weights, and the text of their index if there are several."""

    files: tuple[WeightFile, ...]
    index: str | None

    def write(self, read: Callable[[str], Tensor], folder: Path) -> list[Path]:
        """Write all files to an existing folder, one after the other, and return those of weights; see `WeightFile`."""
        written = [file.write(read, folder) for file in self.files]
        self.write_index(folder)
        return written

    def write_index(self, folder: Path) -> None:
        if self.index is not None:
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(self.index, encoding="utf-8")


def plan_files(
    model: Any,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype = torch.float32,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
) -> WeightFiles:
    """Divide the weights of a model among safetensors files, as transformers does.

    Args:
        model: the model on `meta`, from `described_model`.
        shapes: the shapes of the available tensors, by their names in the model; tied tensors appear once.
        dtype: the type of floating tensors, except for those that transformers keeps in fp32.
        largest_file_bytes: the maximum size of the tensors of a file; a larger tensor gets its own file.

    Raises:
        UnknownModelError: the tensors do not belong to the model.
    """
    sources = _sources(model, shapes)
    whole = model.state_dict()
    for name, source in sources.items():
        if tuple(shapes[source]) != tuple(whole[name].shape):
            raise UnknownModelError(
                f"{name} has the shape {tuple(shapes[source])}, and there {tuple(whole[name].shape)}"
            )
    types = _types(model, sources, dtype)
    # As in transformers for a model that was not loaded from files: older names are not restored.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [rule for rule in conversions if not isinstance(rule, PrefixChange)]

    written: dict[str, Tensor] = {}
    groups = []
    for names in _together(sources, model._weight_conversions):
        empty = {name: torch.empty(shapes[sources[name]], dtype=types[name], device="meta") for name in names}
        reverted = revert_weight_conversion(model, empty)
        groups.append(_Group({name: sources[name] for name in names}, reverted.keys()))
        # New tensors, because the storage size of a slice is that of the whole tensor.
        written |= {key: torch.empty(t.shape, dtype=t.dtype, device="meta") for key, t in reverted.items()}

    split = split_torch_state_dict_into_shards(
        written, filename_pattern="model{suffix}.safetensors", max_shard_size=largest_file_bytes
    )
    files = []
    for file, listed_keys in split.filename_to_tensors.items():
        keys = frozenset(listed_keys)
        of_file = tuple(group for group in groups if keys.intersection(group.written))
        needed = tuple(dict.fromkeys(chain.from_iterable(group.sources.values() for group in of_file)))
        files.append(WeightFile(file, needed, sum(written[key].nbytes for key in keys), model, keys, of_file, types))
    if not split.is_sharded:
        return WeightFiles(tuple(files), None)
    metadata = {"total_parameters": model.num_parameters(), **split.metadata}
    index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    return WeightFiles(tuple(files), json.dumps(index, indent=2, sort_keys=True) + "\n")


def _sources(model: Any, available: Collection[str]) -> dict[str, str]:
    """Map the names that transformers writes, in its order, to available names; they differ for tied weights."""
    copies, ignored = set(model.all_tied_weights_keys), set(model._keys_to_ignore_on_save or ())
    sources: dict[str, str] = {}
    missing = []
    for names in [*aliases(model).values(), *([name] for name in persistent_buffers(model))]:
        present = [name for name in names if name in available]
        if len(present) == 1:
            sources[next((name for name in names if name not in copies), names[0])] = present[0]
        else:  # several: the configuration ties them, but their weights differ
            sources |= {name: name for name in present}
        missing += names[:1] if not present else []
    if missing := sorted(set(missing) - ignored):
        raise UnknownModelError(f"there is no {listed(missing, 3)}")
    if unexpected := sorted(set(available) - set(sources.values())):
        raise UnknownModelError(f"{type(model).__name__} has no {listed(unexpected, 3)}")
    # The split into files follows the order of the tensors, so it must be that of transformers.
    return {name: sources[name] for name in model.state_dict() if name in sources.keys() - ignored}


def _types(model: Any, names: Collection[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the type of each written tensor; transformers keeps tensors in fp32 that need the precision."""
    kept = {re.compile(glob.replace("*", ".*")): type_ for glob, type_ in model._get_dtype_plan(dtype).items()}
    empty = model.state_dict()
    types = {}
    for name in names:
        if empty[name].is_floating_point():
            types[name] = next((type_ for pattern, type_ in kept.items() if pattern.search(name)), dtype)
        else:
            types[name] = empty[name].dtype
    return types


def _together(names: Collection[str], conversions: Sequence[Any]) -> Iterator[list[str]]:
    """Yield groups of tensors that `revert_weight_conversion` splits or merges together."""
    # In the reverse order, as transformers undoes its conversions.
    reverse = [rule.reverse_transform() for rule in conversions[::-1]]
    converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        target, pattern = apply_converters(name, converters)
        groups.setdefault((target if pattern is not None else name, pattern is not None), []).append(name)
    yield from groups.values()


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    # The extremes are checked first, because they need no memory.
    suspicious = cast is not tensor and cast.numel() > 0 and not torch.stack(cast.aminmax()).isfinite().all()
    if suspicious and bool((cast.isinf() & ~tensor.isinf()).any()):
        raise UsageError(
            f"`--dtype` must be a type that holds every weight, but {name} reaches {tensor.abs().max().item():g}, which"
            f" is more than the {torch.finfo(dtype).max:g} of {str(dtype).removeprefix('torch.')}; use bf16 or fp32"
        )
    return cast


def _alone(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with its own memory, which is not shared with a larger tensor."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
