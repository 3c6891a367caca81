"""Embed texts with an exported folder, as sentence-transformers opens it.

Another process runs a copy of this file, so it must not import this project.
"""

from typing import Any

import numpy as np


def open_folder(request: dict[str, Any]) -> Any:
    """Return a function that embeds all texts of the request; it takes no arrays."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(request["folder"], device="cpu")

    def embedded(_: dict[str, Any]) -> dict[str, Any]:
        columns = [model.encode(texts, prompt=prompt) for prompt, texts in request["columns"]]
        return {"embeddings": np.stack(columns, axis=1)}

    return embedded
