"""Score pairs of texts with an exported folder, as the cross-encoder of sentence-transformers opens it.

Another process runs a copy of this file, so it must not import this project.
"""

from typing import Any


def open_folder(request: dict[str, Any]) -> Any:
    """Return a function that computes the logits of all pairs of the request; it takes no arrays."""
    import torch
    from sentence_transformers import CrossEncoder

    encoder = CrossEncoder(request["folder"], device="cpu")
    pairs = [tuple(pair) for pair in request["pairs"]]
    # `CrossEncoder` would apply a sigmoid to a single logit, but the comparison is of logits.
    return lambda _: {"logits": encoder.predict(pairs, activation_fn=torch.nn.Identity())}
