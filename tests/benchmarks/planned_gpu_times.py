"""Plans of GPU times beside measured and published figures: `python -m tests.benchmarks.planned_gpu_times`.

It needs no GPU. Each row is a training with random weights; a name as an argument plans the rows that begin with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.gpu import BASE, LARGE, LLAMA, MODERN
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.timing import StepTime, step_time

_TEXTS = {"type": "sequence_classification", "text": "text"}
_CAUSAL = {"type": "causal_lm", "text": "text"}
_LLAMA_8B = {
    **LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
_HEAD = "| work | devices | rows x tokens | planned | range | figure | planned / figure |\n" + 7 * "|---" + "|"
_LORA = {"type": "lora", "rank": 8, "alpha": 32.0}


def _like_mpt(hidden: int, layers: int, heads: int, length: int) -> Mapping[str, Any]:
    """Return a GPT-2 with the shape, positions and activation of a model of llm-foundry, but with biases."""
    shape = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length, "vocab_size": 50368}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"model_type": "gpt2", "activation_function": "gelu", **shape, **dropout}


@dataclass(frozen=True)
class Work:
    """A training and its figure.

    Args:
        name: the model and its work.
        devices: the devices of a machine.
        rows: the rows of a global batch.
        length: the tokens of a text.
        config: the configuration of the model.
        samples_per_second: the measured figure; tokens count as their texts.
        keys: other keys of the recipe.
        model: other keys of its model.
    """

    name: str
    devices: str
    rows: int
    length: int
    config: Mapping[str, Any]
    samples_per_second: float
    keys: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def plan(self) -> StepTime:
        """Return the planned time of a step."""
        devices = parse_devices(self.devices)
        keys = {"precision": "bf16", "task": _TEXTS, "cuda_graphs": False, **self.keys}
        sizes = {"max_steps": 1000, "global_batch_size": self.rows, "micro_batch_size": self.rows}
        recipe = Recipe.model_validate(
            {
                "name": "work",
                "model": {"config": self.config, "tokenizer": "none", **self.model},
                "data": {"source": "files", "train": "none", "max_length": self.length},
                **keys,
                "training": {**sizes, **keys.get("training", {})},
            }
        )
        assert devices.machine is not None
        plan = plan_run(recipe, devices.number)
        steps = plan_steps(plan, self.length, fused=devices.machine.runs_kernels)
        return step_time(plan, steps, devices.machine, self.length)


_GRAPHS = {"cuda_graphs": True}
MEASURED: Sequence[Work] = (
    Work("BERT-base, CUDA graphs", "1xH200", 32, 128, BASE, 2825.9, _GRAPHS),
    Work("BERT-base", "1xH200", 32, 128, BASE, 666.3),
    Work("BERT-large, CUDA graphs", "1xH200", 32, 384, LARGE, 426.3, _GRAPHS),
    Work("ModernBERT", "1xH200", 16, 1024, MODERN, 173.5),
)
"""This trainer's own steps on one H200, with torch 2.11, Triton 3.6 and a slow host."""

_TORCH = {"training": {"layout_invariant_dropout": False}}
_FSDP = {
    "task": _CAUSAL,
    "training": {"micro_batch_size": 1},
    "activation_checkpointing": "selective",
    "parallel": {"strategy": "fsdp"},
}


def _whole(micro_batch_size: int) -> Mapping[str, Any]:
    """Return the keys of FSDP without recomputation."""
    training = {"micro_batch_size": micro_batch_size}
    return {"task": _CAUSAL, "training": training, "parallel": {"strategy": "fsdp"}}


PUBLISHED: Sequence[Work] = (
    Work("BERT-large, SQuAD, fp16", "1xV100-32", 10, 384, LARGE, 52, {"precision": "fp16", **_TORCH}),
    Work("BERT-large, SQuAD, fp32", "1xV100-32", 4, 384, LARGE, 12, {"precision": "fp32", **_TORCH}),
    Work("BERT-large, SQuAD, fp16", "1xA100-80", 32, 384, LARGE, 110.5, {"precision": "fp16"}),
    Work("BERT-large, SQuAD, TF32", "1xA100-80", 32, 384, LARGE, 61.5, {"precision": "fp32", "tf32": True}),
    Work("BERT-large, SQuAD, fp16", "1xH100", 32, 384, LARGE, 301, {"precision": "fp16"}),
    Work("Llama 8B, FSDP, bf16", "8xH100", 8, 8192, _LLAMA_8B, 46096 / 8192, _FSDP),
    Work(
        "Llama 8B, LoRA, bf16", "1xH100", 32, 4096, _LLAMA_8B, 12473 / 4096,
        {"task": _CAUSAL, "training": {"micro_batch_size": 2}, "weights": "bf16_stochastic"}, {"adapter": _LORA},
    ),
    Work("MPT-like 7B, FSDP, bf16", "8xH100", 48, 2048, _like_mpt(4096, 32, 32, 2048), 85144 / 2048, _whole(6)),
    Work("MPT-like 1B, FSDP, bf16", "8xH100", 1792, 512, _like_mpt(2048, 24, 16, 512), 418201 / 512, _whole(56)),
    Work(
        "mpnet, texts of pairs, fp16", "4xV100-16", 256, 32, {"model_type": "mpnet", "vocab_size": 30527}, 2 * 6980,
        {
            "precision": "fp16", "parallel": {"strategy": "ddp"},
            "training": {**_TORCH["training"], "micro_batch_size": 64},
        },
    ),
)  # fmt: skip
"""Figures of NVIDIA's DeepLearningExamples and NeMo AutoModel, torchtitan, llm-foundry and sentence-transformers."""


def row(work: Work) -> str:
    """Return a row of the table of `planned_times.md`."""
    found = work.plan()
    likely, least, most = (work.rows / seconds for seconds in (found.likely, found.most, found.least))
    unit = work.length if work.keys.get("task") is _CAUSAL else 1
    planned, low, high, real = (f"{unit * rate:,.0f}" for rate in (likely, least, most, work.samples_per_second))
    return (
        f"| {work.name} | {work.devices} | {work.rows} x {work.length:,} | {planned} | {low} to {high} | {real} |"
        f" {likely / work.samples_per_second:.2f} |"
    )


def main() -> None:
    """Plan and print."""
    for works in (MEASURED, PUBLISHED):
        print(_HEAD)
        for work in works:
            if work.name.startswith(tuple(sys.argv[1:]) or ""):
                print(row(work), flush=True)
        print()


if __name__ == "__main__":
    main()
