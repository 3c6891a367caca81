"""Kernels and bytes of compiled layers on an H100, from the Triton code that Inductor writes without a GPU.

A layer's forward and backward pass in bf16, on rows without padding, beside the uncompiled layer of this trainer. Both
read the kept copies of weights in 16 bits, and leave the gradients in 16 bits. Attention without dropout is torch's
operation on CPUs. From the root of the repository:

    python -m tests.benchmarks.compiled_layers --store
    python -m tests.benchmarks.compiled_layers --names BERT-large --keys residuals=bf16
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModel

from tests.benchmarks.gpu import BASE, LARGE, LLAMA, MODERN
from tests.benchmarks.operations import T5
from tests.benchmarks.operations import Case as Step
from tests.helpers.inductor_code import Graph, written_for_gpu
from trainer.engine import forward
from trainer.features.shared_casts.weights import StepWeights
from trainer.models.attention import KEYED_ATTENTION
from trainer.models.compiled import CompiledLayers
from trainer.models.dropout import key_dropout
from trainer.models.families.table import COMPILE, layers_of
from trainer.models.place import PlacedModel
from trainer.parallel import dtypes
from trainer.parallel.device_traits import DeviceTraits, planned_traits
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.recipe.registered import asked_for
from trainer.tools.plan.simulated_rank import _AutocastOfCuda, within
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.work import OPTIMIZER_STEP, VIEW

STORED = Path(__file__).parents[2] / "docs" / "compiled_layers.json"
_ON_GPU = DeviceTraits(False, assumes_kernels=True, captures_graphs=False, has_peers=False)
_OF_UPDATE = ("_foreach_mul_", "_foreach_norm")  # clipping, which the ledger cannot tell from a forward pass


@dataclass(frozen=True)
class Case:
    """A model; the last kinds of its layers are those of which a deeper model has more."""

    config: Mapping[str, Any]
    task: str
    rows: int
    length: int
    num_layers: int = 1  # before the one that is counted
    num_kinds: int = 1  # of the layers that one more adds
    attention: str | None = None  # the type of the counted layers in a model with several
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, for changes of the model

    def sized(self, num_layers: int) -> dict[str, Any]:
        key = "num_layers" if "num_layers" in self.config else "num_hidden_layers"
        return {**self.config, key: num_layers, "vocab_size": 64}

    @property
    def num_layers_of_model(self) -> int:
        """The layers of the whole model that count as this one."""
        config = dict(self.config)
        settings = AutoConfig.for_model(config.pop("model_type"), **config)
        if self.attention is None:
            return int(settings.num_hidden_layers)
        return sum(kind == self.attention for kind in settings.layer_types)


_TOKENS = {f"{name}_token_id": index for index, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
CASES = {
    "BERT-large": Case(LARGE, "sequence_classification", 32, 384),
    "BERT-base": Case(BASE, "sequence_classification", 32, 128),
    "ModernBERT-base, local attention": Case(
        {**MODERN, **_TOKENS}, "sequence_classification", 32, 128, num_layers=2, attention="sliding_attention"
    ),
    "ModernBERT-base, global attention": Case(
        {**MODERN, **_TOKENS}, "sequence_classification", 32, 128, num_layers=3, attention="full_attention"
    ),
    "Llama 1B": Case(LLAMA, "causal_lm", 4, 512),
    "T5-base, encoder and decoder": Case(T5, "seq2seq_lm", 32, 128, num_layers=2, num_kinds=2),
}


def graphs(case: Case) -> list[list[Graph]]:
    """Return the forward and the backward code of each kind of layer."""
    config = case.sized(case.num_layers + 1)
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    keys, is_both = DropoutKeys(0), settings.is_encoder_decoder
    model = AutoModel.from_config(settings, attn_implementation=KEYED_ATTENTION)
    key_dropout(model, keys)
    recipe = Step("", {**case.config}, case.task, "bf16", keys=case.keys).plan().recipe
    for change in asked_for("model", recipe):
        change(PlacedModel(model), recipe)
    model.train()
    with planned_traits(_ON_GPU):
        rounded = StepWeights([model], torch.bfloat16)

    def run(rows: int, length: int) -> None:
        ids = torch.randint(5, 64, (rows, length))
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if is_both else {})
        cache = {} if "bert" in settings.model_type else {"use_cache": False}
        with rounded.use(), keys.use(MicrobatchKey(0, torch.arange(rows))):
            model(**inputs, **cache)

    with (
        written_for_gpu(tracing=_AutocastOfCuda) as written,
        torch.autocast("cpu", torch.bfloat16),
        mock.patch.object(dtypes, "computes_on_cpu", return_value=False),
    ):
        layers = CompiledLayers(layers_of(model, COMPILE).values(), keys, torch.device("cpu"))
        layers._run = within(lambda: planned_traits(_ON_GPU), layers._run)
        run(2, 16)
        layers.start()
        run(case.rows, case.length)  # backward passes are compiled with forward passes
    torch._dynamo.reset()
    kinds = dict.fromkeys(graph.kind for graph in written.graphs)
    return [[graph for graph in written.graphs if graph.kind == kind] for kind in kinds]


def chosen(case: Case) -> list[Graph]:
    """Return the code of the layers that one more adds."""
    kinds = graphs(case)
    # The first layer of a stack differs, and layers of several stacks alternate with it.
    last = kinds[-1:] if case.num_kinds == 1 else kinds[1::2]
    assert len(last) == case.num_kinds, [[graph.num_bytes for graph in kind] for kind in kinds]
    found = [graph for kind in last for graph in kind]
    assert [graph.is_backward for graph in found] == [False, True] * case.num_kinds
    return found


def eager(case: Case) -> tuple[int, int]:
    """Return the operations and the bytes of one more layer of each stack in the uncompiled training."""
    found = []
    for num_layers in (case.num_layers + 1, case.num_layers):
        step = Step("", case.sized(num_layers), case.task, "bf16", rows=case.rows, length=case.length, keys=case.keys)
        with mock.patch.object(forward, "has_padding", return_value=False):
            work = plan_step(step.plan(), 0, case.length).totals.work
        counted = [
            amount
            for kind, amount in work.items()
            if kind.operation != VIEW
            and kind.name not in _OF_UPDATE
            and (kind.phase != OPTIMIZER_STEP or kind.name == "_foreach_copy_")
        ]
        found.append((sum(amount.number for amount in counted), sum(amount.num_bytes for amount in counted)))
    (number, num_bytes), (fewer, less) = found
    return number - fewer, num_bytes - less


def figures(case: Case) -> dict[str, float]:
    """Return the kernels and gigabytes of the layers that one more adds, compiled and not."""
    number, num_bytes = eager(case)
    compiled = chosen(case)
    return {
        "layers": case.num_layers_of_model,
        "operations": number,
        "gigabytes": round(num_bytes / 1e9, 3),
        "compiled_kernels": sum(graph.num_kernels for graph in compiled),
        "compiled_gigabytes": round(sum(graph.num_bytes for graph in compiled) / 1e9, 3),
        "bytes_ratio": round(sum(graph.num_bytes for graph in compiled) / num_bytes, 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default="", help="only cases with this text in their names")
    parser.add_argument("--store", action="store_true", help=f"write the figures into docs/{STORED.name}")
    parser.add_argument("--keys", nargs="*", default=[], help="keys of the recipe, as key=value; nothing is stored")
    options = parser.parse_args(arguments)
    found = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    for name, case in CASES.items():
        if options.names not in name:
            continue
        found[name] = figures(replace(case, keys=dict(key.split("=", 1) for key in options.keys)))
        print(name, found[name], flush=True)
        if options.store and not options.keys:
            kept = {name: found[name] for name in CASES if name in found}
            STORED.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
