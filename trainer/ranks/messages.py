"""Messages between ranks as bytes: JSON, with tensors as safetensors. Unlike a pickle, a message runs no code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

_HEADER_BYTES = 8  # length of the JSON part, little-endian


def encode(value: Any) -> bytes:
    """Encode None, bool, int, float, str, tensors, and lists, tuples and dicts of these; keys are str or int.

    Scalars of numpy become those of Python.

    Raises:
        TypeError: another type; the caller must convert it.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(value, tensors)).encode()
    return len(text).to_bytes(_HEADER_BYTES, "little") + text + (save(tensors) if tensors else b"")


def decode(message: bytes) -> Any:
    """Decode a message of `encode`; tensors are on the CPU.

    Raises:
        ValueError: the bytes are no such message.
    """
    end = _HEADER_BYTES + int.from_bytes(message[:_HEADER_BYTES], "little")
    if len(message) < end:
        raise ValueError(f"a message between ranks must have at least {end} bytes, but has {len(message)}")
    return _restored(json.loads(message[_HEADER_BYTES:end]), load(message[end:]) if len(message) > end else {})


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert to JSON values; an object with one key stands for a type that JSON lacks."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), tensors)
    # Subclasses, such as members of an `IntEnum`, become plain numbers.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [_plain(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, tensors) for item in value]}
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())  # safetensors takes no views
        return {"tensor": name}
    raise TypeError(f"a message between ranks cannot hold {type(value).__name__}; convert it to plain values")


def _restored(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restored(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    # `_plain` makes objects of one key only.
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_restored(item, tensors) for item in content)
    if kind == "dict":
        return {key: _restored(item, tensors) for key, item in content}
    raise ValueError(f"a message between ranks has the unknown type {kind!r}")
