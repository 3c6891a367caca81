"""A module of a task after a model of transformers, such as dense layers after the pooling of an embedding.

It is a submodule of the model, and runs in the forward pass of the model. Every layout therefore places, trains and
saves its parameters like those of a head.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.base.disk import save_tensors
from trainer.models.forward_context import replace_forward
from trainer.parallel.microbatch import POOLED

ADDED = "added"
"""The name of the module in the model."""
_PREFIX = f"{ADDED}."
_T = TypeVar("_T")


def add_module(model: nn.Module, module: nn.Module) -> None:
    """Add a copy of a module with values to a model, perhaps on `meta`; its output replaces the last hidden states.

    Its arguments are the hidden states and the mask of tokens.
    """
    # A copy, because one task may describe several models.
    added = copy.deepcopy(module)
    if next(model.parameters()).is_meta:
        added.to("meta")
    model.add_module(ADDED, added)
    replace_forward(model, _forward(type(model)))  # type: ignore[arg-type]  # a class is hashable


def values_of(module: nn.Module | None) -> dict[str, Tensor]:
    """Return the values of the parameters of an added module, by their names in the model."""
    return {} if module is None else {f"{_PREFIX}{name}": value.detach() for name, value in module.named_parameters()}


@functools.cache
def _forward(base: type[nn.Module]) -> Callable[..., Any]:
    base_forward = base.forward

    @functools.wraps(base_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A mask of its own says which tokens are pooled; the model must not see the argument.
        mask = kwargs.pop(POOLED, None)
        output = base_forward(self, *args, **kwargs)
        mask = kwargs["attention_mask"] if mask is None else mask
        output.last_hidden_state = getattr(self, ADDED)(output.last_hidden_state, mask)
        return output

    return forward


def is_added(name: str) -> bool:
    """Return whether a parameter, by its name in the model, belongs to an added module."""
    return name.startswith(_PREFIX)


def without_added(of_model: Mapping[str, _T]) -> dict[str, _T]:
    """Return the items of a model's tensors, by name, without those of an added module."""
    return {name: value for name, value in of_model.items() if not is_added(name)}


def added_of(of_model: Mapping[str, _T]) -> dict[str, _T]:
    """Return the items of a model's tensors, by name, that belong to an added module."""
    return {name: value for name, value in of_model.items() if is_added(name)}


def write_added(tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Write the tensors of an added module, by their names in the model, one file for each of its submodules.

    Raises:
        OSError, SafetensorError: a file cannot be written.
    """
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        submodule, _, key = name.removeprefix(_PREFIX).partition(".")
        files.setdefault(submodule, {})[key] = tensor.to(dtype).contiguous()
    for submodule, of_submodule in files.items():
        (folder / submodule).mkdir(exist_ok=True)
        save_tensors(of_submodule, folder / submodule / "model.safetensors", metadata={"format": "pt"})
