"""Kernels and bytes of compiled layers on an H100, from the Triton code that Inductor writes without a GPU.

A layer's forward and backward pass in bf16, on rows without padding, beside the uncompiled layer of this trainer. Both
read the kept copies of weights in 16 bits, and leave the gradients in 16 bits. Attention without dropout is torch's
operation on CPUs. From the root of the repository:

    python -m tests.benchmarks.compiled_layers --store
    python -m tests.benchmarks.compiled_layers --names BERT-large --keys residuals=bf16
    python -m tests.benchmarks.compiled_layers --names "96 rows" --plan H100 modernbert_base_pretraining KEY=VALUE ...

The last one shows the plan of a step of a recipe, and its plan with the counted kernels of these layers.
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
from tests.benchmarks.operations import FLAT_SIZES, T5, without_padding
from tests.benchmarks.operations import Case as Step
from tests.helpers.inductor_code import POINTWISE, REDUCTION, Graph, written_for_gpu
from trainer.engine import forward
from trainer.features.shared_casts.weights import StepWeights
from trainer.models.attention import FLAT, KEYED_ATTENTION
from trainer.models.compiled import CompiledLayers
from trainer.models.dropout import key_dropout
from trainer.models.families.table import COMPILE, layers_of
from trainer.models.layer_hooks import flatten_layers
from trainer.models.place import PlacedModel
from trainer.parallel import dtypes
from trainer.parallel.device_traits import DeviceTraits, planned_traits
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.flat_rows import FlatRows
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.registered import asked_for
from trainer.tools.plan import work as work_kinds
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.recipe_plan import plan_recipe
from trainer.tools.plan.simulated_rank import _AutocastOfCuda, within
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.timing import StepTime, step_time
from trainer.tools.plan.work import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    MATMUL,
    NOTHING,
    OPTIMIZER_STEP,
    VIEW,
    Amount,
    Kind,
    Work,
    sum_of,
)

STORED = Path(__file__).parents[2] / "docs" / "compiled_layers.json"
_ON_GPU = DeviceTraits(False, assumes_kernels=True, captures_graphs=False, has_peers=False)
_MOST_MISSING = 0.02  # of the bytes of all layers beside products, the share that a step may lack
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
_KINDS = {"local": (2, "sliding_attention"), "global": (3, "full_attention")}  # of ModernBERT, and their layers before
CASES = {
    "BERT-large": Case(LARGE, "sequence_classification", 32, 384),
    "BERT-base": Case(BASE, "sequence_classification", 32, 128),
    **{
        f"ModernBERT-base, {name} attention": Case(
            {**MODERN, **_TOKENS}, "sequence_classification", 32, 128, num_layers=before, attention=kind
        )
        for name, (before, kind) in _KINDS.items()
    },
    **{
        f"ModernBERT-base, {name} attention, {rows} rows of {length:,} tokens without padding": Case(
            {**MODERN, **_TOKENS}, "masked_lm", rows, length, before, attention=kind, keys=without_padding(length)
        )
        for rows, length in FLAT_SIZES
        for name, (before, kind) in _KINDS.items()
    },
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
    if recipe.data.padding_free:
        flatten_layers(model)
    model.train()
    with planned_traits(_ON_GPU):
        rounded = StepWeights([model], torch.bfloat16)

    def run(rows: int, length: int) -> None:
        ids = torch.randint(5, 64, (rows, length))
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if is_both else {})
        cache = {} if "bert" in settings.model_type else {"use_cache": False}
        is_flat = recipe.data.padding_free
        flat = FlatRows.of([length] * rows, length, torch.device("cpu")) if is_flat else None
        with rounded.use(), keys.use(MicrobatchKey(0, torch.arange(rows), flat)):
            model(**inputs, **cache, **({FLAT: flat} if is_flat else {}))

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


def eager(case: Case) -> Work:
    """Return the work of one more layer of each stack in the uncompiled training."""
    found = []
    for num_layers in (case.num_layers + 1, case.num_layers):
        step = Step("", case.sized(num_layers), case.task, "bf16", rows=case.rows, length=case.length, keys=case.keys)
        with mock.patch.object(forward, "has_padding", return_value=False):
            work = plan_step(step.plan(), 0, case.length).totals.work
        counted = {
            kind: amount
            for kind, amount in work.items()
            if kind.operation != VIEW
            and kind.name not in _OF_UPDATE
            and (kind.phase != OPTIMIZER_STEP or kind.name == "_foreach_copy_")
        }
        found.append(counted)
    more, fewer = found
    return sum_of(more, fewer, -1)


def figures(case: Case) -> dict[str, float]:
    """Return the kernels and gigabytes of the layers that one more adds, compiled and not."""
    work, compiled = eager(case), chosen(case)
    number, num_bytes = (sum(getattr(amount, name) for amount in work.values()) for name in ("number", "num_bytes"))
    return {
        "layers": case.num_layers_of_model,
        "operations": number,
        "gigabytes": round(num_bytes / 1e9, 3),
        "compiled_kernels": sum(graph.num_kernels for graph in compiled),
        "compiled_gigabytes": round(sum(graph.num_bytes for graph in compiled) / 1e9, 3),
        "bytes_ratio": round(sum(graph.num_bytes for graph in compiled) / num_bytes, 2),
    }


def planned(words: Sequence[str], gpus: str, layers: Sequence[Case]) -> tuple[StepTime, StepTime]:
    """Return the planned time of a step, and that with compiled layers: their kernels replace single operations.

    Products and attention remain. The kernels of a layer take the time of their bytes: those with a reduction have the
    rate of reductions in the plan, and the others that of memory.

    Args:
        words: a recipe and its overrides, with the rows and tokens of `layers`.
        layers: the kinds of layers of its model.
    """
    recipe, *overrides = words
    made = plan_recipe(load_recipe(recipe, overrides, needs_data=False), parse_devices(gpus, None, None, None))
    assert made.time is not None
    assert made.devices.machine is not None
    (step,), microbatches = made.steps, made.plan.batch.num_microbatches
    work = dict(step.totals.work)
    for layer in layers:
        assert (layer.rows, layer.length) == (made.plan.batch.micro_batch_size, made.length)
        number = microbatches * layer.num_layers_of_model
        fused = {
            kind: amount
            for kind, amount in eager(layer).items()
            if amount.number and kind.phase != OPTIMIZER_STEP and kind.operation not in (MATMUL, ATTENTION)
        }
        missing = 0
        for kind, one in fused.items():
            # The first layer has no norm before its attention, and weights are cast once in a step.
            known = work.get(kind, NOTHING)
            work[kind] = Amount(*(max(0, own - number * other) for own, other in zip(known, one, strict=True)))
            missing += max(0, number * one.num_bytes - known.num_bytes)
        of_layers = number * sum(one.num_bytes for one in fused.values())
        assert missing <= _MOST_MISSING * of_layers, "the layers are not those of the recipe"
        for graph in chosen(layer):
            phase = BACKWARD if graph.is_backward else FORWARD
            of_sums = sum(not name.startswith("triton_poi") for name in graph.kernels)
            kernels = {REDUCTION: of_sums, POINTWISE: len(graph.kernels) - of_sums}
            for kind, operation in ((REDUCTION, work_kinds.REDUCTION), (POINTWISE, work_kinds.OTHER)):
                one = Kind(phase, operation, "compiled", torch.bfloat16, 0, 0)
                work = sum_of(work, {one: Amount(kernels[kind], 0, graph.moved[kind])}, number)
    compiled = replace(step, totals=replace(step.totals, work=work))
    return made.time, step_time(made.plan, [compiled], made.devices.machine, made.length)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default="", help="only cases with this text in their names")
    parser.add_argument("--store", action="store_true", help=f"write the figures into docs/{STORED.name}")
    parser.add_argument("--keys", nargs="*", default=[], help="keys of the recipe, as key=value; nothing is stored")
    parser.add_argument("--plan", nargs="+", default=[], metavar=("GPUS", "RECIPE"), help="show the plan of a step")
    options = parser.parse_args(arguments)
    given = dict(key.split("=", 1) for key in options.keys)
    if options.plan:
        gpus, *words = options.plan
        layers = [replace(case, keys={**case.keys, **given}) for name, case in CASES.items() if options.names in name]
        times = planned([*words, *options.keys], gpus, layers)
        for name, time in zip(("one by one", "compiled"), times, strict=True):
            parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in time.parts.items() if seconds)
            rates = [time.tokens_per_second * time.likely / seconds for seconds in (time.most, time.least)]
            print(f"{name}: {time.tokens_per_second:,.0f} tokens/s, {rates[0]:,.0f} to {rates[1]:,.0f}; {parts}")
        return
    found = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    for name, case in CASES.items():
        if options.names not in name:
            continue
        found[name] = figures(replace(case, keys={**case.keys, **given}))
        print(name, found[name], flush=True)
        if options.store and not options.keys:
            kept = {name: found[name] for name in CASES if name in found}
            STORED.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
