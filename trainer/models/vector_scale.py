"""The factor of an embedding that multiplies its vectors; transformers has such a class for each model."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.parallel.tensor.trained_rows import VectorScale


def scale_of(embedding: nn.Embedding) -> VectorScale | None:
    """Return the factor of the vectors of an embedding, perhaps on `meta`; None if its `forward` is unknown."""
    if type(embedding).forward is nn.Embedding.forward:
        return VectorScale()
    scale = getattr(embedding, "embed_scale", None)
    # A buffer has the factor in the type of the weight; the number is beside it.
    is_rounded = isinstance(scale, Tensor)
    number = getattr(embedding, "scalar_embed_scale", None) if is_rounded else scale
    others = {name for name, _ in embedding.named_parameters()} - {"weight"}
    if others or not type(embedding).__name__.endswith("ScaledWordEmbedding") or not isinstance(number, int | float):
        return None
    return VectorScale(float(number), is_rounded)
