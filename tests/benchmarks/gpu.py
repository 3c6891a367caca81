"""Figures of one GPU, within a limit of time; results are written as JSON after each.

    python -m tests.benchmarks.gpu --json gpu.json

- Speed, shares of the peak (MFU and HFU), launched kernels and peak memory of trainings, beside plain loops of PyTorch
  (as it is, compiled, and compiled with CUDA graphs) and transformers' `Trainer`. The host reads each loss one step
  late, as in a run.
- The planned memory of each model, and the planned time of a step on a device that plans know.
- An update with moments in 32 and in 8 bits.

The error of a row is in the results, and the others run; the exit code is then 1. Rows for which no time is left are
named too.
`tests/benchmarks/first_gpu.py` runs this after the tests.

`--tiny` runs everything with tiny models, on the CPU if there is no GPU: it checks this script.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.peers import PEERS, PeerTraining, with_torchs_dropout
from trainer.base.disk import replace_text
from trainer.engine.builders import build_engine
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.features.adamw_8bit.section import AdamW8bit
from trainer.models.fill import build_model
from trainer.observe.meter import peak_flops
from trainer.parallel.mesh import ParallelMesh, init_process_group
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch, RankBatch
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import AdamW, OptimizerKeys, Recipe
from trainer.recipe.strategies import STRATEGIES
from trainer.tools.plan.hardware import device_named, parse_devices
from trainer.tools.plan.reference import task_and_models
from trainer.tools.plan.shape_batch import blank_batch
from trainer.tools.plan.simulated_step import plan_step, planned_model, planned_task
from trainer.tools.plan.timing import step_time

WARM_UP, STEPS = 4, 24
TURNS = 2
"""The turns of a training and its peers. The fastest counts, because the host of a virtual machine is at times slow."""
LIMIT_SECONDS = 150.0
"""The longest part of the run."""
CLASSIFICATION = {"type": "sequence_classification", "text": "text"}
BASE = {"model_type": "bert", "vocab_size": 30522}
LARGE = {**BASE, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODERN = {"model_type": "modernbert", "max_position_embeddings": 8192}
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
VIT = {"model_type": "vit", "image_size": 224, "patch_size": 16}
T5 = {"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}
MASKED = 0.3
"""The share of masked tokens in the training of ModernBERT (Warner et al. 2024, arXiv:2412.13663)."""
MASKED_WORDS = "ModernBERT-base, masked words"
TASKS: dict[str, dict[str, Any]] = {
    "Llama 1B": {"type": "causal_lm", "text": "text"},
    "T5-base": {"type": "seq2seq_lm", "source": "text", "target": "target", "max_target_length": 64},
    "ViT-base": {"type": "image_classification", "image": "image", "label": "label", "labels": ["a", "b"]},
    MASKED_WORDS: {"type": "masked_lm", "text": "text", "mask_probability": MASKED},
}
"""The tasks of the models that do not classify texts."""
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 211,
}
SMALL_MODELS: dict[str, dict[str, Any]] = {
    "Llama 1B": {**SMALL, "num_key_value_heads": 2},
    "T5-base": {"vocab_size": 211, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "ViT-base": {key: value for key, value in SMALL.items() if key != "vocab_size"},
}
COMPILED = ("compiled", "compiled, CUDA graphs")
OWN_SETTINGS = ("without padding, no dropout", "without padding, no dropout, compiled")
"""Settings near those of ModernBERT's repository: flat rows, a compiled model, its rates and betas, and no clipping.

Differences: it drops 0.1 of the outputs of attention, and trains by StableAdamW. Files of AnswerDotAI/ModernBERT:
yamls/modernbert/modernbert-base-pretrain.yaml.
"""
_OWN_UPDATE: dict[str, Any] = {
    "optimizer": {
        "name": "adamw",
        "learning_rate": 8e-4,
        "betas": [0.9, 0.98],
        "epsilon": 1e-6,
        "weight_decay": 1e-5,
    },
    "training": {"max_grad_norm": None},
    "model": {"dropout": 0.0},
    "data": {"padding_free": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "keyed dropout": {},
    "keyed dropout, CUDA graphs": {"cuda_graphs": True},
    "torch's dropout": {"training": {"layout_invariant_dropout": False}},
    "no dropout": {"model": {"dropout": 0.0}},
    "compiled": {"compile": True},
    "compiled, CUDA graphs": {"compile": True, "cuda_graphs": True},
    "CUDA graphs, whole logits": {"cuda_graphs": True, "task": {"logits_chunk": None}},
    "short rows": {},
    "short rows without padding": {"data": {"padding_free": True}},
    "short rows, no dropout": {"model": {"dropout": 0.0}},
    "short rows without padding, no dropout": {"data": {"padding_free": True}, "model": {"dropout": 0.0}},
    "without padding, no dropout": _OWN_UPDATE,
    "without padding, no dropout, compiled": {**_OWN_UPDATE, "compile": True},
}
SHORT_ROWS = tuple(name for name in VARIANTS if name.startswith("short rows"))
"""The variants with rows of a quarter of the length up to all of it. The others have no padding."""


@dataclass(frozen=True)
class Case:
    """One training that is measured."""

    model: str
    config: Mapping[str, Any]
    length: int
    rows: int
    variant: str = "keyed dropout"
    strategy: str = "ddp"
    precision: str = "bf16"
    beside_peers: bool = False

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.length}"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.rows} x {self.length} tokens, {self.precision}, {self.strategy}, {self.variant}"

    def recipe(self) -> Recipe:
        keys: dict[str, Any] = {
            "name": "gpu",
            "task": TASKS.get(self.model, CLASSIFICATION),
            "model": {"config": self.config, "tokenizer": "none"},
            "data": {"source": "files", "train": "none", "max_length": self.length},
            "training": {"max_steps": 1000, "global_batch_size": self.rows, "micro_batch_size": self.rows},
            "precision": self.precision,
            "cuda_graphs": False,
            "parallel": {"strategy": self.strategy},
        }
        for section, values in VARIANTS[self.variant].items():
            keys[section] = {**keys.get(section, {}), **values} if isinstance(values, Mapping) else values
        return Recipe.model_validate(keys)


HEADLINES = (("BERT-large", "32x384"), ("BERT-base", "32x128"), ("Llama 1B", "2x2048"))
"""The models and shapes that are also compiled."""


def cases() -> Iterator[Case]:
    """Iterate over all measured trainings, the most important first."""
    eager, graphs, *others = VARIANTS
    for model, config, length, rows in (
        ("BERT-base", BASE, 128, 32),
        ("BERT-large", LARGE, 384, 32),
        ("BERT-base", BASE, 384, 32),
        ("BERT-base", BASE, 512, 32),
        ("BERT-large", LARGE, 128, 64),
        ("ModernBERT-base", MODERN, 1024, 16),
        ("Llama 1B", LLAMA, 2048, 2),
        ("BERT-large", LARGE, 512, 32),
        ("BERT-base", BASE, 128, 128),
        ("ModernBERT-base", MODERN, 8192, 2),
        ("ViT-base", VIT, 197, 64),
        ("T5-base", T5, 512, 16),
    ):
        for variant in (graphs, eager):
            yield Case(model, config, length, rows, variant, beside_peers=variant == eager)
        if (model, f"{rows}x{length}") in HEADLINES:
            for variant in COMPILED:
                yield Case(model, config, length, rows, variant)
    yield Case("Llama 1B", LLAMA, 2048, 2, "CUDA graphs, whole logits")
    for variant in OWN_SETTINGS:
        yield Case(MASKED_WORDS, MODERN, 1024, 96, variant, beside_peers=variant == OWN_SETTINGS[0])
    for variant in others:
        if variant not in (*OWN_SETTINGS, "CUDA graphs, whole logits"):
            yield Case("BERT-base", BASE, 384, 32, variant)
    for variant in SHORT_ROWS[:2]:  # with a sliding window, and with causal attention
        yield Case("ModernBERT-base", MODERN, 1024, 16, variant)
        yield Case("Llama 1B", LLAMA, 2048, 4, variant)
    # On one rank, hsdp is fsdp.
    for strategy, row in STRATEGIES.items():
        if not row.single_process and strategy not in ("ddp", "hsdp"):
            yield Case("BERT-base", BASE, 128, 128, strategy=strategy)


def shrunk(case: Case) -> Case:
    """Return the case with a tiny model, few rows and few tokens."""
    config = {**case.config, **SMALL_MODELS.get(case.model, SMALL)}
    if case.model.startswith("ModernBERT-base"):
        config |= dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0)
        config |= dict.fromkeys(("eos_token_id", "sep_token_id"), 1)
    return replace(case, config=config, length=min(16, case.length), rows=4)


def random_batches(case: Case, recipe: Recipe, task: Any, config: Any) -> list[RankBatch]:
    """Return a batch of random tokens, which read the whole embedding, for each step."""
    generator, batches = torch.Generator().manual_seed(0), []
    for _ in range(WARM_UP + STEPS):
        batch = blank_batch(recipe, task, config, plan_run(recipe, 1).batch, case.length)
        for index, microbatch in enumerate(batch.microbatches):
            for name, values in microbatch.inputs.items():
                if name.endswith("input_ids"):
                    values.copy_(torch.randint(5, config.vocab_size, values.shape, generator=generator))
                if name == "pixel_values":
                    values.normal_(generator=generator)
            if case.variant in SHORT_ROWS:
                microbatch = _shortened(microbatch, generator)
            elif recipe.data.padding_free:  # rows of the whole length
                whole = torch.ones_like(microbatch.inputs["attention_mask"])
                microbatch = replace(microbatch, inputs={**microbatch.inputs, "attention_mask": whole}, flat=None)
            if recipe.task.type == "masked_lm":
                labels = torch.randint(5, config.vocab_size, microbatch.labels.shape, generator=generator)
                labels[torch.rand(labels.shape, generator=generator) >= MASKED] = IGNORED_LABEL
                microbatch = replace(microbatch, labels=labels, num_labels=int((labels != IGNORED_LABEL).sum()))
            batch.microbatches[index] = microbatch
        masks = [one.inputs["attention_mask"] for one in batch.microbatches if "attention_mask" in one.inputs]
        if masks:  # images have none
            batch = replace(batch, num_tokens=int(sum(mask.sum() for mask in masks)))
        batches.append(batch)
    return batches


def _shortened(microbatch: Microbatch, generator: torch.Generator) -> Microbatch:
    rows, width = microbatch.inputs["input_ids"].shape
    lengths = torch.randint(max(1, width // 4), width + 1, (rows,), generator=generator)
    lengths[0] = width
    mask = (torch.arange(width) < lengths[:, None]).long()
    # the engine joins the rows
    return replace(microbatch, inputs={**microbatch.inputs, "attention_mask": mask}, flat=None)


LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
TOOLS = {"plain": "pytorch", **{name: name for name in ("compiled", "captured", "sparse", "transformers")}}
"""The other loops, by the name of their results. `sparse` trains masked words only."""
OURS, UPDATES = "ours", "updates"
"""The names of this trainer's steps and of updates among the contestants."""
PARTS = ("plans", UPDATES, "training", *TOOLS)
NEEDS_GPU = "needs an NVIDIA GPU"
"""The part of the error of a row with CUDA graphs on a CPU."""


class Device:
    """The measured device, with its clock and memory; a CPU has no memory figure."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.is_gpu = self.device.type == "cuda"
        self.name = torch.cuda.get_device_name(self.device) if self.is_gpu else "cpu"

    def now(self) -> float:
        """Return the time after all queued work."""
        if self.is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    @classmethod
    def of_ranks(cls) -> Device:
        """Return the device of a process group of one rank."""
        device = cls()
        init_process_group(device.device, 0, 1, dist.HashStore(), timedelta(minutes=1))
        return device

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.is_gpu else None


def begun(case: Case, device: Device) -> tuple[Any, list[RankBatch]]:
    """Return the engine of a case and its batches, of which the first `WARM_UP` only warm up."""
    recipe = case.recipe()
    plan = plan_run(recipe, 1)
    mesh = ParallelMesh(device.device)
    task, built = task_and_models(plan, mesh)
    engine = build_engine(built, task, mesh, plan, 1000)
    batches = random_batches(case, recipe, task, built[0].model.config)
    return engine, [batch.pin_memory() for batch in batches] if device.is_gpu else batches


def run_steps(engine: Any, batches: Iterable[RankBatch]) -> tuple[Callable[[], Any], float]:
    """Begin a step for each batch, and read its loss one step late; return the last reading and the host's seconds."""
    started, read = time.perf_counter(), None
    for batch in batches:
        before, read = read, engine.begin_step(batch)
        if before is not None:
            before()
    assert read is not None, "there is no batch"
    return read, time.perf_counter() - started


def train(case: Case, planned: Mapping[str, Any] | None) -> dict[str, Any]:
    """Train a case with the engine, and return its figures."""
    device = Device.of_ranks()
    engine, batches = begun(case, device)
    started = device.now()
    engine.train_step(batches[0])
    first = device.now() - started
    for batch in batches[1:WARM_UP]:
        engine.train_step(batch)
    started = device.now()
    read, issued = run_steps(engine, batches[WARM_UP:-1])
    last, step = read(), (device.now() - started) / (STEPS - 1)
    peak_bytes = device.peak_bytes()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine.train_step(batches[-1])
    found = {
        "rows": case.rows,
        "step_seconds": step,
        "host_seconds": issued / (STEPS - 1),
        "launches": sum(event.count for event in profiled.key_averages() if event.key in LAUNCHES),
        "first_step_seconds": first,
        "tokens_per_second": statistics.mean(batch.num_tokens for batch in batches[WARM_UP:-1]) / step,
        "rows_per_second": case.rows / step,
        "peak_bytes": peak_bytes,
        "last_loss": last.loss,
    }
    # A plan has no padding, and labels on all tokens.
    if planned is not None and case.variant not in SHORT_ROWS and case.recipe().task.type != "masked_lm":
        peak = peak_flops(device.name, case.precision)
        for share, flops in (("mfu", "model_flops"), ("hfu", "flops")):
            found[share] = None if peak is None else planned[flops] / step / peak
        found["planned_step_seconds"] = planned.get("step_seconds")
        if case.recipe().cuda_graphs is not True:  # a plan does not know the memory of graphs
            found["planned_peak_bytes"] = planned["peak_bytes"]
    return found


def train_by_peer(case: Case, peer: str) -> dict[str, Any]:
    """Train a case by another loop on the same batches with torch's dropout, and return its figures."""
    device = Device.of_ranks()
    recipe = with_torchs_dropout(case.recipe())
    plan = plan_run(recipe, 1)
    task, built = planned_task(plan), build_model(planned_model(plan))
    model: Any = built.model.to(device.device)
    batches = random_batches(case, recipe, task, model.config)
    times: list[float] = []

    def timed() -> Iterator[RankBatch]:
        for number, batch in enumerate(batches):
            if number in (WARM_UP, WARM_UP + STEPS - 1):
                times.append(device.now())
            yield batch

    PEERS[peer](PeerTraining(recipe, plan, task, built, len(batches), len(batches)), timed(), None)
    step = (times[1] - times[0]) / (STEPS - 1)
    return {"step_seconds": step, "rows_per_second": case.rows / step, "peak_bytes": device.peak_bytes()}


def update(recipe: OptimizerKeys, tiny: bool) -> dict[str, Any]:
    """Step the matrices of BERT-large's layers, without a training around it, and return the figures."""
    device = Device()
    width = 64 if tiny else 1024
    shapes = [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)] * (1 if tiny else 24)
    matrices = [nn.Parameter(torch.zeros(shape, device=device.device)) for shape in shapes]
    optimizer = build_optimizer(
        recipe, TrainedParameters({str(number): matrix for number, matrix in enumerate(matrices)})
    )
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        started = device.now()
        optimizer.step()
        seconds.append(device.now() - started)
    return {
        "elements": sum(matrix.numel() for matrix in matrices),
        "step_seconds": statistics.median(seconds[WARM_UP:]),
        "peak_bytes": device.peak_bytes(),
    }


def apart(work: Callable[[], dict[str, Any]], limit_seconds: float = LIMIT_SECONDS) -> dict[str, Any]:
    """Return the result of `work` in a process of its own, a fork, or an error after the limit.

    Torch's profiler and DeepSpeed change a process, and later steps in it took up to 1.5 times as long. This process
    must not use CUDA, which a fork cannot take over.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        try:
            sender.send(work())
        except Exception as error:  # the other parts are worth running
            sender.send({"error": f"{type(error).__name__}: {str(error)[-600:]}"})

    process = context.Process(target=send)
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv() if receiver.poll(limit_seconds) else {"error": "it took too long"}
    except EOFError:
        process.join()
        found = {"error": f"its process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return found


def attempt(
    results: dict[str, Any], name: str, until: float, work: Callable[[], dict[str, Any]], on_cpu: bool = False
) -> None:
    """Add the result of `work` under `name`, or the reason why there is none; keep a faster one of an earlier turn.

    On a CPU it may take until the deadline: g++ needs minutes for a compiled model.
    """
    if time.monotonic() > until:
        results.setdefault(name, {"not_run": "no time was left"})
        return
    started = time.monotonic()
    found = apart(work, max(LIMIT_SECONDS, until - started) if on_cpu else LIMIT_SECONDS)
    found["seconds"] = round(time.monotonic() - started, 1)
    print(f"{name}: {json.dumps(found)[:160]}", flush=True)
    if name not in results or found.get("step_seconds", math.inf) < results[name].get("step_seconds", math.inf):
        results[name] = found


def plan(case: Case, device: str = "") -> dict[str, Any]:
    """Plan the memory, the arithmetic and the time of a case on a GPU; this needs none.

    `device` is torch's name of it. One that plans do not know has no times.
    """
    layout = plan_run(case.recipe(), 1)
    planned = plan_step(layout, 0, case.length, cuda=True)
    totals = planned.totals
    found = {
        "peak_bytes": planned.peak.num_bytes,
        "flops": sum(totals.flops.values()),
        "model_flops": totals.model_flops,
    }
    if (known := device_named(device)) and (machine := parse_devices(known).machine):
        found["step_seconds"] = step_time(layout, [planned], machine, case.length).likely
    return found


def plan_all(chosen: Mapping[str, Case], device: str, out: Path) -> None:
    """Write the plans of cases into a file, for runs on a device with that name."""
    plans: dict[str, Any] = {}
    for name, case in chosen.items():
        attempt(plans, name, math.inf, partial(plan, case, device))
        replace_text(out, json.dumps({"device": device, "plans": plans}, indent=2) + "\n")


def read_plans(file: Path, device: str) -> dict[str, Any]:
    """Return the plans of a file; without times, if they are those of another device."""
    found = json.loads(file.read_text(encoding="utf-8"))
    plans: dict[str, Any] = found["plans"]
    if device_named(found.get("device", "")) != device_named(device):
        for one in plans.values():
            one.pop("step_seconds", None)
    return plans


def run(
    chosen: Mapping[str, Case],
    tiny: bool,
    until: float,
    out: Path,
    plans: Path | None,
    contestants: Collection[str],
    turns: int = TURNS,
) -> list[str]:
    """Run all parts until the deadline; `out` is written after each, so that an interrupted run keeps the others.

    `plans` is a file of an earlier run with the plans; None: they are made now. `contestants` are some of `OURS`,
    `TOOLS` and `UPDATES`. Returns a line for each error, on a CPU without those of rows that need a GPU.
    """
    results: dict[str, Any] = {**apart(lambda: {"device": Device().name}), "torch": torch.__version__, "tiny": tiny}
    results |= {part: {} for part in PARTS}
    on_cpu = results.get("device") == "cpu"

    def save() -> None:
        replace_text(out, json.dumps(results, indent=2) + "\n")

    if plans is not None:
        results["plans"] = read_plans(plans, results.get("device", ""))
    for name, case in chosen.items():
        if plans is None and OURS in contestants:
            attempt(results["plans"], name, until, partial(plan, case, results.get("device", "")))
        planned = results["plans"].get(name, {})
        for _ in range(turns if case.beside_peers else 1):
            if OURS in contestants:
                work = partial(train, case, planned if "flops" in planned else None)
                attempt(results["training"], name, until, work, on_cpu)
                save()
            for peer, tool in TOOLS.items() if case.beside_peers else ():
                if peer in contestants and (peer != "sparse" or case.model == MASKED_WORDS):
                    attempt(results[peer], name, until, partial(train_by_peer, case, tool), on_cpu)
                    save()
    for recipe in (AdamW(), AdamW8bit(name="adamw_8bit")) if UPDATES in contestants else ():
        attempt(results["updates"], recipe.name, until, partial(update, recipe, tiny))
        save()
    save()
    errors = {f"{part}, {name}": row.get("error", "") for part in PARTS for name, row in results[part].items()}
    return [f"{name}: {error}" for name, error in errors.items() if error and not (on_cpu and NEEDS_GPU in error)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the file of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check this script; works without a GPU")
    parser.add_argument("--seconds", type=float, default=500, help="no part begins after so many seconds")
    names = list(dict.fromkeys(case.model for case in cases()))
    parser.add_argument("--models", choices=names, nargs="+", default=names, help="the models to measure")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=VARIANTS, help="the variants to measure")
    shapes = list(dict.fromkeys(case.shape for case in cases()))
    parser.add_argument("--shapes", choices=shapes, nargs="+", default=shapes, help="the rows x tokens to measure")
    parser.add_argument(
        "--headlines", action="store_true", help=f"only {', '.join(map(' '.join, HEADLINES))}, in order"
    )
    everyone = [OURS, *TOOLS, UPDATES]
    parser.add_argument("--contestants", choices=everyone, nargs="+", default=everyone, help="the loops to measure")
    parser.add_argument(
        "--turns", type=int, default=TURNS, help="turns of a training and its peers; the fastest counts"
    )
    parser.add_argument("--plan-only", action="store_true", help="make the plans only; this needs no GPU")
    parser.add_argument("--device", default="NVIDIA H200", help="torch's name of the GPU for the times of --plan-only")
    parser.add_argument("--plans", type=Path, help="a file of --plan-only, whose plans are not made again")
    options = parser.parse_args(arguments)
    named = [
        case
        for case in cases()
        if case.model in options.models and case.variant in options.variants and case.shape in options.shapes
    ]
    if options.headlines:
        of_headline = [[case for case in named if (case.model, case.shape) == headline] for headline in HEADLINES]
        named = [case for found in of_headline for case in found]
    chosen = {case.name: shrunk(case) if options.tiny else case for case in named}
    if options.plan_only:
        plan_all(chosen, options.device, options.json)
        return 0
    if not options.tiny and not apart(lambda: {"is_gpu": Device().is_gpu})["is_gpu"]:
        parser.error("this machine has no GPU; --tiny checks the script without one")
    until = time.monotonic() + options.seconds
    errors = run(chosen, options.tiny, until, options.json, options.plans, options.contestants, options.turns)
    print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
