"""Open the graph of an exported folder with ONNX Runtime.

Another process runs a copy of this file, so it must not import this project.
"""

from pathlib import Path
from typing import Any

FILE = "model.onnx"
EMBEDDINGS = "sentence_embedding"


def open_folder(request: dict[str, Any]) -> Any:
    """Return a function from the inputs of a batch, arrays by name, to the outputs of the graph."""
    from onnxruntime import InferenceSession

    session = InferenceSession(str(Path(request["folder"]) / FILE), providers=["CPUExecutionProvider"])
    # ONNX Runtime refuses arrays that the graph does not take.
    names = [one.name for one in session.get_inputs()]
    outputs = [one.name for one in session.get_outputs()]

    def computed(inputs: dict[str, Any]) -> dict[str, Any]:
        found = dict(zip(outputs, session.run(outputs, {name: inputs[name] for name in names}), strict=True))
        # Embeddings are the scores of their task.
        return {"scores" if name == EMBEDDINGS else name: value for name, value in found.items()}

    return computed
