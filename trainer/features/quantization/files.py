"""Weights of safetensors files that bitsandbytes has quantised."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.features.quantization.linear import FORMATS
from trainer.models.changed_weights import ChangedWeights
from trainer.models.stored_weights import Index, StoredWeights
from trainer.parallel.stored_in_parts import CODES

_STATE = ".quant_state.bitsandbytes__nf4"
_SIZES_OF_BLOCKS = {"nf4": {"blocksize": 64, "nested_blocksize": 256}, "nf4_single": {"blocksize": 64}}
"""The sizes in `linear.py`, which are the defaults of bitsandbytes."""


def quantized_keys(keys: Collection[str]) -> dict[str, str]:
    """Return the tensors that bitsandbytes has quantised among those of files, with the names of their formats."""
    weights = [key.removesuffix(_STATE) for key in keys if key.endswith(_STATE)]
    # With `nested_absmax`, the scales of the blocks are codes themselves.
    found = {key: "nf4" if f"{key}.nested_absmax" in keys else "nf4_single" for key in weights}
    # bitsandbytes stores no quantisation state for int8; the row scales `SCB` show such a weight.
    return found | {f"{key.removesuffix('SCB')}weight": "int8" for key in keys if key.endswith(".SCB")}


class QuantizedFiles(ChangedWeights):
    """Stored tensors, some of them quantised by bitsandbytes, which are read as they were.

    Args:
        shapes: the shapes of quantised tensors before their quantisation.

    Raises:
        UsageError: a tensor has blocks of another size.
    """

    def __init__(self, stored: StoredWeights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(stored, shapes)
        self._kinds = quantized_keys(stored.shapes)
        # The tensors of a format belong to their weight and match no parameter of the model.
        inside = {key for key in stored.shapes for end in (".weight.", ".SCB", ".weight_format") if end in key}
        self.shapes = {key: shape for key, shape in stored.shapes.items() if key not in inside} | dict(shapes)
        # Files hold the codes as integers, but `read` must make a floating target for the dequantised values.
        self.dtypes = stored.dtypes | dict.fromkeys(shapes, torch.float32)
        self._offsets = {key: self._offset(key, kind) for key, kind in self._kinds.items() if kind in _SIZES_OF_BLOCKS}

    def _offset(self, key: str, kind: str) -> Tensor:
        """Return the mean of the scales of a weight, which `nf4` quantises without it."""
        state = self._stored.read(f"{key}{_STATE}")
        if state.is_meta:
            return torch.empty(1, device="meta")
        # bitsandbytes packs its state as JSON into a uint8 tensor, because safetensors files hold tensors only.
        described = json.loads(bytes(state.tolist()))
        if sizes := {
            name: described.get(name) for name, size in _SIZES_OF_BLOCKS[kind].items() if described.get(name) != size
        }:
            raise UsageError(
                f"`model.name_or_path` must have nf4 weights in blocks of 64, but {key} has {sizes}; save it again with"
                " the defaults of bitsandbytes"
            )
        return torch.tensor([described.get("nested_offset", 0.0)], dtype=torch.float32)

    def equal(self, key: str, other: str) -> bool:
        return key not in self._kinds and other not in self._kinds and self._stored.equal(key, other)

    def parts(self, key: str) -> dict[str, Tensor] | None:
        kind = self._kinds.get(key)
        if kind is None:
            return None
        codes = self._stored.read(key)
        if kind == "int8":
            return {CODES: codes, "row_scales": self._stored.read(f"{key.removesuffix('weight')}SCB")}
        if kind == "nf4_single":
            return {CODES: codes, "block_scales": self._stored.read(f"{key}.absmax")}
        scales, nested = (self._stored.read(f"{key}.{name}") for name in ("absmax", "nested_absmax"))
        return {CODES: codes, "scales": scales, "nested_scales": nested, "offset": self._offsets[key]}

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        parts = self.parts(key)
        if parts is None:
            super()._copy(key, targets)
        # `parts` above has made the reads that ranks of a node share, so a rank without targets is done.
        elif targets and self.device != "meta":
            whole = FORMATS[self._kinds[key]].dequantize(parts, self.shapes[key], torch.float32)
            for index, target in targets:
                target.copy_(whole[index])
