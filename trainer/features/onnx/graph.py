"""Exported folders with an ONNX graph instead of weights, by the exporter of torch."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import AutoTokenizer, PreTrainedModel

from trainer.base.distribution import install_command
from trainer.base.errors import TrainerError, UsageError
from trainer.base.terminal import quiet
from trainer.engine.forward import without_cache
from trainer.features.onnx.opener import EMBEDDINGS, FILE
from trainer.models.hub_files import without_report
from trainer.models.input_samples import samples_of
from trainer.parallel.microbatch import POOLED
from trainer.recipe.schema import Model, Recipe
from trainer.tasks.exported import OUTPUTS, Card, CardForm, ExportFormat, Program
from trainer.tasks.registry import build_task
from trainer.training.row_encoding import model_folder

_SAMPLE = (2, 3, 5)  # rows, choices and tokens of the inputs that are traced
_SAMPLE_TARGET = 4  # tokens; another number than that of the inputs, or the exporter would tie both

_MOST_REASON = 300  # letters


class _Graph(nn.Module):
    """A model from its inputs, in the order of their names, to its outputs; of an embedding, to the embeddings."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], head: nn.Module | None) -> None:
        super().__init__()
        self.model, self.head, self._inputs = model, head, tuple(inputs)
        self._constants = without_cache(model)

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        inputs = dict(zip(self._inputs, tensors, strict=True))
        pooled = inputs.pop(POOLED, inputs.get("attention_mask"))
        output = self.model(**inputs, **self._constants)
        if self.head is not None:
            return {EMBEDDINGS: self.head(output.last_hidden_state, pooled)}
        return {name: output[name] for name in OUTPUTS if output.get(name) is not None}


_USAGE = """\
from onnxruntime import InferenceSession
from transformers import {processor}

folder = "path/to/this/folder"
inputs = {processor}.from_pretrained(folder)({rows}, return_tensors="np")
{completed}session = InferenceSession(f"{{folder}}/{file}")
outputs = session.run(None, {{one.name: inputs[one.name] for one in session.get_inputs()}})
print(dict(zip([one.name for one in session.get_outputs()], outputs)))"""


class Onnx(ExportFormat):
    """A graph for ONNX Runtime, in fp32."""

    program = Program("ONNX Runtime", ("onnxruntime",), "trainer.features.onnx.opener")

    def require(self, dtype: str, adapter: bool) -> None:
        if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
            raise UsageError(
                f"`--to onnx` needs the package {missing[0]}, which is not installed;"
                f" install it ({install_command('onnx')})"
            )
        if dtype != "fp32":
            raise UsageError(f"`--dtype` must be fp32 with `--to onnx`, but is {dtype}; convert the graph afterwards")
        if adapter:
            raise UsageError(
                "`--adapter` and `--to onnx` exclude each other: a graph holds the merged model; leave one out"
            )

    def convert(self, folder: Path, model_class: type[Any], recipe: Recipe | None) -> Path:
        return to_onnx(folder, model_class, recipe)

    def card_form(self, card: Card) -> CardForm:
        completed = f"{card.graph}\n" if card.graph else ""
        usage = _USAGE.format(processor=card.processor, rows=card.rows, completed=completed, file=FILE)
        return CardForm("A `ARCHITECTURE` as a graph of ONNX in `DTYPE`", usage)


def to_onnx(folder: Path, model_class: type[PreTrainedModel], recipe: Recipe | None) -> Path:
    """Replace the weights of an exported folder by a graph, and return its file.

    The numbers of rows and of tokens are free. The graph of an embedding holds pooling, dense layers and
    normalisation.

    Args:
        folder: a folder with weights in fp32.
        recipe: the recipe of the training; None: it is unknown, and of a task without a head of its own.

    Raises:
        TrainerError: the exporter does not support the model.
    """
    head: nn.Module | None = None
    with without_report():
        # The exporter takes a view of the outputs of torch's fused attention that those of T5 do not have.
        model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        inputs, free = _sample(folder, model)
    if recipe is not None:
        # The exported folder describes its poolings itself, and the origin may be gone.
        own = recipe.model_copy(update={"model": Model(name_or_path=str(folder))})
        task, found = build_task(recipe.task), model_folder(own)
        added = (found.completed(task) if found else task).exported.graph_head()
        head, columns = (None, ()) if added is None else added
        # A copy, or the exporter would take both inputs for one.
        inputs |= {name: inputs["attention_mask"].clone() for name in columns}
    graph = _Graph(model, list(inputs), head)
    with torch.no_grad():
        outputs = list(graph(*inputs.values()))
    # Only these dimensions stay free; the exporter fixes the others at the size of the sample.
    dynamic = tuple(dict.fromkeys(free or range(tensor.dim()), Dim.DYNAMIC) for tensor in inputs.values())
    try:
        with _quietly():
            program = torch.onnx.export(
                graph,
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=outputs,
                dynamic_shapes=(dynamic,),
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        program.save(folder / FILE)
    except (torch.onnx.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:_MOST_REASON] or type(cause).__name__
        raise TrainerError(
            f"`--to onnx` cannot write a {model_class.__name__}: the exporter of torch {torch.__version__} fails:"
            f" {reason}; leave --to out"
        ) from error
    # After the graph is written, so that an error leaves the weights.
    for pattern in ("*.safetensors", "*.safetensors.index.json"):
        for file in folder.rglob(pattern):
            file.unlink()
    return folder / FILE


def _sample(folder: Path, model: PreTrainedModel) -> tuple[dict[str, Tensor], Sequence[int]]:
    """Return inputs of a model by name, and the dimensions whose size the graph leaves free; empty: all.

    Inputs are ids `[rows, tokens]`, `[rows, choices, tokens]`, or other ones. A model that writes texts also takes
    the tokens of the target before each one, `[rows, target tokens]`.
    """
    # A tokenizer may return columns that this model does not take, such as token types.
    parameters = inspect.signature(type(model).forward).parameters
    rows, choices, tokens = _SAMPLE
    if samples := samples_of(model.main_input_name):
        return samples.of_graph(folder, model, rows)
    shape = (rows, choices, tokens) if type(model).__name__.endswith("ForMultipleChoice") else (rows, tokens)
    names = [name for name in AutoTokenizer.from_pretrained(folder).model_input_names if name in parameters]
    values = {name: torch.zeros(shape, dtype=torch.long) for name in names}
    # Ones and not zeros, because 0 is the padding token of many models.
    values |= {"input_ids": torch.ones(shape, dtype=torch.long), "attention_mask": torch.ones(shape).long()}
    end = getattr(model.config, "eos_token_id", None)
    if isinstance(end, int) and end < model.config.vocab_size:  # that of a type may lie outside of a small vocabulary
        values["input_ids"][..., -1] = end  # encoder-decoders classify at this token
    if type(model).__name__.endswith("ForConditionalGeneration"):
        values["decoder_input_ids"] = torch.ones(rows, _SAMPLE_TARGET, dtype=torch.long)
    return values, ()


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide the remarks of the exporter on packages that it would use."""
    with quiet("torch.onnx", logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
