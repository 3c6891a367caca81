"""Embed texts with an exported folder, as sentence-transformers opens it.

Another process runs a copy of this file, so it must not import this project.
"""

from typing import Any

import numpy as np


def open_folder(request: dict[str, Any]) -> Any:
    """Return a function that embeds all texts of the request; it takes no arrays."""
    import sentence_transformers

    name = request.get("model", "SentenceTransformer")
    model = getattr(sentence_transformers, name)(request["folder"], device="cpu")

    def embed(prompt: str, texts: list[str], is_query: bool) -> Any:
        if name == "SentenceTransformer":
            return model.encode(texts, prompt=prompt)
        if name == "SparseEncoder":
            return model.encode(texts, prompt=prompt, convert_to_sparse_tensor=False).numpy()
        task, size = "query" if is_query else "document", request["tokens"]
        found = model.encode(texts, prompt=prompt, task=task, output_value=None)
        # Tokens that do not count have a vector of zeros.
        vectors = [(of["token_embeddings"] * of["attention_mask"][:, None]).numpy() for of in found]
        return np.stack([np.pad(of, ((0, size - len(of)), (0, 0))).ravel() for of in vectors])

    def embedded(_: dict[str, Any]) -> dict[str, Any]:
        return {"embeddings": np.stack([embed(*column) for column in request["columns"]], axis=1)}

    return embedded
