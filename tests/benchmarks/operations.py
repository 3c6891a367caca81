"""Operations and bytes of one optimizer step on a GPU, counted on fake tensors: ours and a plain loop of transformers.

ModernBERT without padding is also counted in the form of its authors' repository (`own_form.py`).

Counted are the operations below autograd that start work on a device, and collectives; views are not. Bytes are those
that the operations read and write, without collectives. Waits are those of the host for values of the device: copies
to the host, and answers of operations such as `item`. No GPU is needed. From the root of the repository:

    python -m tests.benchmarks.operations                          # the table
    python -m tests.benchmarks.operations --top 30 --rows 0        # the operations of the first row, by name
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.integrations import moe

from tests.benchmarks.gpu import BASE, LLAMA, MASKED, MODERN
from tests.benchmarks.own_form import OwnForm, joined_loss
from trainer.engine import forward
from trainer.engine.ddp import wrap_ddp
from trainer.models.families.table import layers_of
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.ledger import Ledger, Totals
from trainer.tools.plan.shape_batch import blank_batch
from trainer.tools.plan.shapes import shape_of
from trainer.tools.plan.simulated_rank import shapes_only, simulated_mesh
from trainer.tools.plan.simulated_step import plan_step, planned_task
from trainer.tools.plan.work import HOST_WAIT, VIEW

T5 = {"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "d_kv": 64}
T5 |= {"vocab_size": 32128, "decoder_start_token_id": 0}
SPARSE = {
    "model_type": "qwen3_moe", "vocab_size": 3000, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}  # fmt: skip
STORED = Path(__file__).parents[2] / "docs" / "operations.json"
_TEXT = {"text": "text"}
_CLASSES = {
    "sequence_classification": AutoModelForSequenceClassification,
    "masked_lm": AutoModelForMaskedLM,
    "causal_lm": AutoModelForCausalLM,
    "seq2seq_lm": AutoModelForSeq2SeqLM,
}
_TASKS: dict[str, dict[str, Any]] = {
    "sequence_classification": {"text": "text"},
    "masked_lm": {"text": "text"},
    "causal_lm": {"text": "text"},
    "seq2seq_lm": {"source": "text", "target": "target", "max_target_length": 128},
}
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "tensor 2": (2, {"tensor": 2}),
    "expert 2": (2, {"strategy": "ddp", "expert": 2}),
    "context 2": (2, {"context": 2}),
}
FLAT_SIZES = ((96, 1024), (12, 8192))
"""The rows and tokens of steps without padding."""
_USUAL = ("one process", "ddp", "fsdp", "tensor 2")
_WITHOUT_PADDING = ("one process", "ddp", "fsdp", "context 2")
_DATA, _COLUMNS, _ROWS = "dp", "colwise", "rowwise"


@dataclass(frozen=True)
class Case:
    """One training: a model, its task, its layout, and the rows and tokens of a rank's batch."""

    model: str
    config: Mapping[str, Any]
    task: str
    precision: str
    layout: str = "one process"
    microbatches: int = 1
    rows: int = 32
    length: int = 128
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Whether the layers process tokens without padding."""
        return bool(self.keys.get("data", {}).get("padding_free"))

    @property
    def has_own_form(self) -> bool:
        """Whether the authors' repository has a form of this training."""
        return self.is_flat and self.layout != "context 2"

    @property
    def name(self) -> str:
        several = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        several += f", {self.rows} rows of {self.length:,} tokens without padding" if self.is_flat else ""
        return f"{self.model}, {self.task}, {self.precision}, {self.layout}{several}"

    def plan(self) -> RunPlan:
        """Return the plan of our training."""
        ranks, parallel = _LAYOUTS[self.layout]
        rows = self.rows * (1 if {"tensor", "context"} & {*parallel} else ranks)
        keys = {
            "name": "operations",
            "task": {"type": self.task, **_TASKS[self.task]},
            "model": {"config": self.config, "tokenizer": "none"},
            "data": {"source": "files", "train": "none", "max_length": self.length},
            "training": {
                "max_steps": 1000,
                "global_batch_size": rows,
                "micro_batch_size": self.rows // self.microbatches,
            },
            "precision": self.precision,
            "parallel": parallel,
            **self.keys,
        }
        return plan_run(Recipe.model_validate(keys), ranks)


def cases() -> list[Case]:
    """Return the rows of the table: each model with its tasks, in each precision and layout, and one accumulation."""
    longer = {"rows": 4, "length": 512}
    models: tuple[tuple[str, dict[str, Any], str, dict[str, int]], ...] = (
        ("BERT-base", BASE, "sequence_classification", {}),
        ("BERT-base", BASE, "masked_lm", {}),
        ("ModernBERT-base", MODERN, "sequence_classification", {}),
        ("ModernBERT-base", MODERN, "masked_lm", {}),
        ("Llama 1B", LLAMA, "causal_lm", longer),
        ("T5-base", T5, "seq2seq_lm", {}),
    )
    return [
        *(
            Case(*model, precision, layout, **sizes)
            for (*model, sizes), precision, layout in product(models, ("bf16", "fp32"), _USUAL)
            if (model[0], layout) != ("T5-base", "tensor 2")  # its class in transformers cannot be split by DTensor
        ),
        Case("BERT-base", BASE, "sequence_classification", "bf16", microbatches=4),
        *(
            Case(model, config, "causal_lm", "bf16", layout, **sizes)
            for (model, config, sizes), layout in product(
                (("Qwen3-MoE tiny", SPARSE, {}), ("Qwen3-30B-A3B", shape_of("Qwen/Qwen3-30B-A3B"), longer)),
                ("one process", "ddp", "fsdp", "expert 2"),
            )
        ),
        *(
            Case("ModernBERT-base", MODERN, "masked_lm", "bf16", layout, 1, rows, length, without_padding(length))
            for (rows, length), layout in product(FLAT_SIZES, _WITHOUT_PADDING)
        ),
    ]


def without_padding(length: int) -> dict[str, Any]:
    """Return the keys of ModernBERT's pretraining: rows without padding, and 30 % of the words masked."""
    data = {"source": "files", "train": "none", "max_length": length, "padding_free": True}
    return {"data": data, "task": {"type": "masked_lm", "text": "text", "mask_probability": MASKED}}


@dataclass(frozen=True)
class Count:
    """The operations and their bytes, by name, and the waits of the host."""

    number: Mapping[str, int]
    num_bytes: Mapping[str, int]
    waits: int

    @property
    def sums(self) -> tuple[int, int]:
        """All operations, and all bytes."""
        return sum(self.number.values()), sum(self.num_bytes.values())

    @classmethod
    def of(cls, totals: Totals) -> Count:
        """Return the counts of totals, without views."""
        number, num_bytes = Counter[str](), Counter[str]()
        for kind, amount in totals.work.items():
            if kind.operation != VIEW:
                number[kind.name] += amount.number
                num_bytes[kind.name] += amount.num_bytes
        for collective, traffic in totals.traffic.items():
            number[collective.operation] += traffic.calls
        return cls(number, num_bytes, sum(one.number for kind, one in totals.work.items() if kind.name == HOST_WAIT))


def ours(case: Case) -> Count:
    """Count a step of this trainer, on rows without padding."""
    with mock.patch.object(forward, "has_padding", return_value=False):  # a planned batch has some
        return Count.of(plan_step(case.plan(), 0, case.length).totals)


def plain(case: Case) -> Count:
    """Count a step of transformers' model in a plain loop.

    Each rank has all experts, and casts their weights to bf16 for each product: the grouped product of transformers
    refuses fp32 under autocast.
    """
    if case.layout == "context 2":  # transformers has no loop for it; half of the rows are as many tokens of a rank
        case = replace(case, layout="one process", rows=case.rows // 2)
    return _loop(case, lambda model: model, lambda call, one: call(**one.inputs, labels=one.labels).loss)


def own_form(case: Case) -> Count:
    """Count a step of the form of ModernBERT in its authors' repository, in the same loop."""
    return _loop(case, partial(OwnForm, longest=case.length), joined_loss)


def _loop(
    case: Case, form: Callable[[nn.Module], nn.Module], loss_of: Callable[[Any, Microbatch], torch.Tensor]
) -> Count:
    """Count a step of a loop: autocast, clipping, torch's fused AdamW.

    Dropout is torch's fused kernel, and attention torch's fused one with its own dropout.

    Args:
        form: returns the module to call, from transformers' model.
        loss_of: returns the loss of a microbatch by that module.
    """
    plan = case.plan()
    recipe, task, layout = plan.recipe, planned_task(plan), case.layout
    is_ddp = layout in ("ddp", "expert 2")
    config: dict[str, Any] = {**case.config}
    config = AutoConfig.for_model(config.pop("model_type"), **config, **task.model_options())
    opened = shapes_only(cuda=True), Ledger(answers=True)
    with simulated_mesh(plan, 0) as mesh, opened[0], _fused_kernels(), opened[1] as ledger:
        with mock.patch.object(PreTrainedModel, "initialize_weights"):  # draws again until all values are in a range
            model = _CLASSES[case.task].from_config(config, attn_implementation="sdpa").train()
        model.config.use_cache = False
        layers, model = layers_of(model).values(), form(model)
        call: Any = model
        if is_ddp:
            call = wrap_ddp(model, mesh)
        elif layout == "fsdp":
            for part in (*layers, model):
                fully_shard(part, mesh=mesh.device_mesh["dp_shard"])
        elif layout != "one process":
            _split(model, mesh.device_mesh["tp"])
        parameters = list(model.parameters())
        # Torch's functions for lists take DTensors or tensors, not both.
        groups = [[p for p in parameters if isinstance(p, DTensor) == sharded] for sharded in (False, True)]
        groups = [group for group in groups if group]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, fused=True)
        batch = blank_batch(recipe, task, config, plan.batch, case.length)
        for microbatch in batch.microbatches:
            del microbatch.inputs["attention_mask"]  # without padding, its values let the model drop it
        for _ in range(2):  # the first step makes the state of the optimizer
            ledger.restart_totals()
            for index, microbatch in enumerate(batch.microbatches):
                if is_ddp:
                    call.require_backward_grad_sync = index == len(batch.microbatches) - 1
                cast = torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16" else nullcontext()
                with cast:
                    loss = loss_of(call, microbatch) / len(batch.microbatches)
                loss.backward()
            for group in groups:
                nn.utils.clip_grad_norm_(group, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
        return Count.of(ledger.totals)


def _split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers over two ranks by DTensor, as torch's documentation shows."""
    cut = ("query", "key", "value", "intermediate.dense", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    cut += ("Wqkv", "Wi")
    joined = ("output.dense", "o_proj", "down_proj", "Wo")
    for layer in layers_of(model).values():
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        plan = {name: ColwiseParallel() for name in names if name.endswith(cut)}
        parallelize_module(layer, mesh, plan | {name: RowwiseParallel() for name in names if name.endswith(joined)})


@contextmanager
def _fused_kernels() -> Iterator[None]:
    """Use the fused dropout that torch has on GPUs, and count the dropout of attention to its fused kernel."""
    attention = F.scaled_dot_product_attention

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def grouped(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x.to(torch.bfloat16), weight.to(torch.bfloat16), offs=offs)

    def attend(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **kwargs)

    with (
        mock.patch.object(F, "dropout", dropout),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(moe, "_grouped_mm", grouped),
    ):
        yield


def side_by_side(counts: Mapping[str, Count], most: int) -> Iterator[str]:
    """Yield the lines of a table of operations by name, the most frequent ones first."""
    yield f"| operation | {' | '.join(f'{name} | MB' for name in counts)} |"
    yield "|---" * (1 + 2 * len(counts)) + "|"
    names = dict.fromkeys(name for count in counts.values() for name in count.number)
    for name in sorted(names, key=lambda name: -max(count.number.get(name, 0) for count in counts.values()))[:most]:
        numbers = [(count.number.get(name, 0), count.num_bytes.get(name, 0) / 1e6) for count in counts.values()]
        yield f"| {name} | {' | '.join(f'{number:,} | {moved:,.0f}' for number, moved in numbers)} |"


def figures(first: Count, second: Count, own: Count | None = None) -> dict[str, float]:
    """Return the figures of a row: operations, gigabytes and waits of each loop, and ratios of ours to the others'."""
    (ours_number, ours_bytes), (plain_number, plain_bytes) = first.sums, second.sums
    found = {
        "operations": ours_number,
        "plain_operations": plain_number,
        "gigabytes": round(ours_bytes / 1e9, 1),
        "plain_gigabytes": round(plain_bytes / 1e9, 1),
        "operations_ratio": round(ours_number / plain_number, 3),
        "bytes_ratio": round(ours_bytes / plain_bytes, 3),
        "waits": first.waits,
        "plain_waits": second.waits,
    }
    if own is not None:
        number, num_bytes = own.sums
        found |= {"own_operations": number, "own_gigabytes": round(num_bytes / 1e9, 1), "own_waits": own.waits}
        found |= {"own_bytes_ratio": round(ours_bytes / num_bytes, 3)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(known)), help="the rows, counted from 0")
    parser.add_argument("--top", type=int, default=0, help="show so many operations of each row by name")
    parser.add_argument("--store", action="store_true", help=f"write the figures into docs/{STORED.name}")
    options = parser.parse_args(arguments)
    found = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    for index in options.rows:
        case = known[index]
        counts = {"ours": ours(case), "plain": plain(case)}
        if case.has_own_form:
            counts["own form"] = own_form(case)
        found[case.name] = figures(*counts.values())
        print(index, case.name, found[case.name], flush=True)
        for line in side_by_side(counts, options.top) if options.top else ():
            print(line)
        if options.store:
            kept = {case.name: found[case.name] for case in known if case.name in found}
            STORED.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
