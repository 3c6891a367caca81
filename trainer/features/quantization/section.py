"""The key `model.quantization` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from trainer.recipe.schema import Model
from trainer.recipe.schema.section import Contradiction, clash


class QuantizationKeys(Model):
    """The storage of frozen weights."""

    quantization: Literal["nf4", "nf4_single", "int8"] | None = None
    """Frozen weights beneath an adapter in 4 bits (NormalFloat; `nf4_single`: scales in fp32) or 8 bits; null: not."""

    def contradictions(self) -> Iterator[Contradiction]:
        start, keys = self.adapter and self.adapter.start, ("model.adapter.start", "model.quantization")
        if start == "loftq" and self.quantization is None:
            yield clash(
                'is "loftq", which begins with the errors of `model.quantization`; set that too, or null', *keys
            )
        if start in ("pissa", "pissa_niter_16") and self.quantization is not None:
            yield clash(f'is "{start}", which quantises other weights than those of the model; use "loftq"', *keys)
        if self.quantization is not None and self.adapter is None:
            text = f"is {self.quantization}, but quantised weights cannot be trained; set `model.adapter` too"
            yield clash(text, "model.quantization", "model.adapter")
