"""The first minutes on a GPU, in order of value: commands without make and without a network.

    python -m tests.benchmarks.gpu --plan-only --json plans.json        # before, on any machine
    python -m tests.benchmarks.first_gpu --plans plans.json --out first_gpu
    python -m tests.benchmarks.first_gpu --checks --out first_gpu_checks

The first run measures, the second one checks. Each part is a process of its own, with a limit of time. It streams to
`OUT/PART.txt`, and writes each result into its JSON as soon as it is known. So a part that is cut off keeps its output,
and the others run. Parts that check run several at once, parts that measure run alone. `OUT/summary.txt` has a line for
each part that ended. `OUT/budget.txt` has the expected figures beside the measured ones, and the wrong assumptions.
`OUT/gpu.json` has the trainings of all parts, for a page. With `--minutes 25`, the parts that take long run too. A
signal ends the running parts, and no other begins. The exit code is 1 if a part failed.

`--tiny` rehearses the first run on a CPU with tiny models; `--minutes` above nine make all limits longer then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.benchmarks import budget
from tests.helpers.processes import ROOT, environment, kill
from trainer.base.disk import replace_text
from trainer.ranks.stopping import handled

PYTEST = ("-m", "pytest", "-v", "-rA", "--tb=short", "-p", "no:cacheprovider")
UNEVALUATED = "evaluation.every=null"
FORTY = (UNEVALUATED, "training.max_steps=40")
BF16 = ("precision=bf16", "data.pad_to=32")
SLOW_TESTS = "speed or other_blocks"
FILES = ("ahead", "eight_bits", "attention", "strategies", "graphs", "dropout", "rotation", "tensor", "pipeline")
LONG_TEST = "computes_as"
"""A test of attention with many rows, which runs beside the others."""
SAME_LOSSES = (
    ("run", "run_resumed", 0.0),
    *(("run", name, 1e-5) for name in ("run_torchrun", "run_offloaded", "run_zero3")),
    ("run_bf16", "run_graphs", 1e-3),
)
"""Two runs, and the largest relative difference of their losses."""
TOKENS = '"vocab_size":3000,"max_position_embeddings":128,"bos_token_id":3,"eos_token_id":3,"pad_token_id":0'
HEADS = '"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"intermediate_size":128'
LLAMA = f'model.config={{"model_type":"llama","hidden_size":128,{HEADS},{TOKENS}}}'
MIXTRAL = f'model.config={{"model_type":"mixtral","hidden_size":64,"num_local_experts":4,{HEADS},{TOKENS}}}'
GEMMA = f'model.config={{"model_type":"gemma2","hidden_size":64,"head_dim":16,"sliding_window":32,{HEADS},{TOKENS}}}'
TRAINED_TOKENS = '{"type":"lora","rank":4,"alpha":8.0,"trainable_tokens":[7,8,9]}'
LARGE_HEADS = '"num_hidden_layers":16,"num_attention_heads":32,"num_key_value_heads":8,"intermediate_size":8192'
LLAMA_1B = f'model.config={{"model_type":"llama","hidden_size":2048,{LARGE_HEADS},{TOKENS}}}'
TRAININGS: dict[str, tuple[str, ...]] = {
    "classification": ("bert_sample",),
    "images": ("vit_sample",),
    "texts": ("t5_sample",),
    "answers_in_rows": ("sft_sample", 'task.packing="none"', "data.padding_free=true"),
    "llama": ("gpt2_sample", LLAMA),
    "llama_in_rows": ("sft_sample", 'task.packing="none"', "data.padding_free=true", LLAMA),
    "mixtral": ("gpt2_sample", MIXTRAL),
    "gemma2": ("gpt2_sample", GEMMA),
    "preferences": ("dpo_sample",),
    "rewards": ("reward_sample",),
    "reranker": ("reranker_sample",),
    "matryoshka": ("matryoshka_sample",),
    "temperature": ("embedding_sample", "task.learn_temperature=true"),
    "groups": ("groups_sample",),
    "unfreezing": ("bert_sample", 'model.freeze=["embeddings"]', "model.unfreeze_at_step=5"),
    "neftune": ("gpt2_sample", "model.neftune_alpha=5"),
    "new_tokens": ("gpt2_sample", 'model.new_tokens=["<a>","<b>"]'),
    "pissa": ("lora_sample", "model.adapter.start=pissa"),
    "loftq": ("qlora_sample", "model.adapter.start=loftq"),
    "mixtral_sharded": ("gpt2_sample", MIXTRAL, "parallel.strategy=fsdp"),
    "trained_tokens": ("gpt2_sample", LLAMA, f"model.adapter={TRAINED_TOKENS}"),
}
"""Trainings that run on the GPU and on the CPU of the machine: 20 steps in fp32, and an evaluation."""
LARGER = {"texts": 1e-4}
"""Larger tolerances: T5 does not scale its scores, so that rounding of matrix products grows: docs/hardware.md."""
FIGURES = ("figures", "variants", "modernbert", "heads", "loops", "ours")
"""The parts that write results of `tests/benchmarks/gpu.py`; a later one takes precedence."""
LEAST_SECONDS = 5.0
"""No part begins with less time left."""


@dataclass(frozen=True)
class Part:
    """A command of Python; `{out}` in it is the folder of the results, and `{seconds}` most of the time left."""

    name: str
    arguments: tuple[str, ...]
    limit_seconds: float = 150.0
    on_gpu: bool = True


def training(name: str, recipe: str, *keys: str, on_gpu: bool = True) -> Part:
    """Return a short run in the folder `name`."""
    run = ("-m", "trainer", "run", recipe, "--processes", "1", "logging.every=1 step")
    return Part(name, (*run, f"checkpoint.folder={{out}}/{name}", *keys), on_gpu=on_gpu)


def sample(name: str, *keys: str) -> Part:
    """Return a short run of the sample in the folder `name`."""
    return training(name, "bert_sample", *FORTY, *keys)


def tested(name: str, file: str, chosen: str) -> Part:
    """Return the tests of a file that the expression `chosen` selects."""
    return Part(name, (*PYTEST, "-k", chosen, f"tests/gpu/test_{file}_gpu.py"), 240)


def beside_cpu() -> list[Part]:
    """Return each training twice, on the GPU and on the CPU."""
    return [
        training(name if on_gpu else f"{name}_cpu", *keys, "training.max_steps=20", on_gpu=on_gpu)
        for name, keys in TRAININGS.items()
        for on_gpu in (True, False)
    ]


def checks() -> list[Part]:
    """Return the parts that may run at once, the most valuable first."""
    stopped = sample("run_resumed", "training.stop_at_step=20")
    torchrun = sample("run_torchrun")
    return [
        Part("environment", ("-m", "trainer", "doctor")),
        *(tested(name, name, f"not ({LONG_TEST} or {SLOW_TESTS})") for name in FILES),
        sample("run"),
        sample("run_bf16", *BF16),
        sample("run_graphs", *BF16, "cuda_graphs=true"),
        tested("attention_lengths", "attention", LONG_TEST),
        Part("run_stopped", stopped.arguments),
        sample("run_compiled", *BF16, "compile=true"),
        sample("run_offloaded", "parallel.strategy=fsdp", "parallel.offload=parameters"),
        sample("run_zero3", "parallel.strategy=zero3"),
        Part(torchrun.name, ("-m", "torch.distributed.run", "--nproc-per-node", "1", *torchrun.arguments)),
    ]


def measurements(is_long: bool, tiny: bool = False, plans: Path | None = None) -> list[Part]:
    """Return the parts that run alone, the most valuable first; those of a short run take nine minutes at most.

    A combination of keys that a recipe refuses has its error in the results, and the others run.
    """
    small = ("--tiny",) if tiny else ()
    figures = ("-m", "tests.benchmarks.gpu", *small, "--seconds", "{seconds}", "--turns", "1")
    figures += () if plans is None else ("--plans", str(plans.resolve()))

    def part(name: str, limit: float, *words: str) -> Part:
        return Part(name, (*words, "--json", f"{{out}}/{name}.json"), limit)

    ceilings = ("-m", "tests.benchmarks.gpu_ceilings", *small)
    profile = ("-m", "tests.benchmarks.gpu_profile", *small, "--cases")
    graphs = [f"{model}, CUDA graphs" for model in ("BERT-large", "Llama 1B", "BERT-base")]
    ours = ("--contestants", "ours", "--variants")
    short = [
        part("ceilings", 40, *ceilings, "ceilings"),
        part("profile", 95, *profile, *graphs),
        part("loops", 150, *figures, "--headlines", "--contestants", "compiled", "captured", "plain",
             "--variants", budget.EAGER),
        part("ours", 110, *figures, "--headlines", *ours, budget.GRAPHS, "compiled", budget.BOTH),
        part("attention_kernels", 45, *ceilings, "attention"),
        part("heads", 30, *figures, "--models", "Llama 1B", *ours, "CUDA graphs, whole logits"),
        part("graph_work", 25, *profile, f"BERT-base, {budget.EAGER}"),
        part("updates", 20, *ceilings, "updates"),
    ]  # fmt: skip
    return short if not is_long else [*short, *_long_measurements(figures)]


def _long_measurements(figures: tuple[str, ...]) -> list[Part]:
    variants = ("short rows", "short rows without padding")
    own = ("ModernBERT-base, masked words",)
    large = ("gpt2_sample", LLAMA_1B, *BF16, UNEVALUATED, "training.max_steps=4")
    stopped = training("large_resumed", *large, "training.stop_at_step=2")
    long = ("bert_sample", UNEVALUATED, "training.max_steps=100000")
    blocks = ("-m", "tests.benchmarks.attention_blocks", "--seconds", "180", "--json", "{out}/blocks.json")
    return [
        Part("modernbert", (*figures, "--models", *own, "--json", "{out}/modernbert.json"), 240),
        Part("large_stopped", stopped.arguments),  # the checkpoint of a large model
        training("large_resumed", *large),
        Part("figures", (*figures, "--json", "{out}/figures.json"), 420),
        Part("variants", (*figures, "--json", "{out}/variants.json", "--variants", *variants), 240),
        replace(training("sampled", *long), limit_seconds=60),  # killed after its first samples
        Part("why", ("-m", "trainer", "why", "{out}/sampled")),
        Part("blocks", blocks, 240),
        Part("speed", (*PYTEST, "-k", SLOW_TESTS, "tests/gpu/test_attention_gpu.py"), 600),
    ]


class Runner:
    """The running of parts until a deadline.

    Args:
        out: the folder of the results.
        until: the deadline, by `time.monotonic`.
    """

    def __init__(self, out: Path, until: float) -> None:
        self._out, self._until, self._lock = out, until, threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.has_failed = False

    def run(self, part: Part) -> None:
        """Run a part, and write its line of the summary."""
        started = time.monotonic()
        left = self._until - started
        state = "not run: no time was left"
        if left >= LEAST_SECONDS:
            try:
                state = self._state(part, min(part.limit_seconds, left))
            except OSError as error:  # such as a full disk
                state = f"failed: {error.strerror}"
        self._judge(state)
        self.note(f"{part.name:20} {time.monotonic() - started:6.1f} s  {state}")

    def _state(self, part: Part, limit: float) -> str:
        words = [sys.executable, *(self._filled(word, limit) for word in part.arguments)]
        with (self._out / f"{part.name}.txt").open("w", encoding="utf-8") as output:
            print(shlex.join(words), file=output, flush=True)
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment(PYTHONUNBUFFERED="1") | ({} if part.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
            self._running.add(process)
            try:
                code = process.wait(min(limit, self._until - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill(process)
                with suppress(subprocess.TimeoutExpired):  # the next part may need its memory
                    process.wait(LEAST_SECONDS)
                return f"cut off after {limit:.0f} s"
            finally:
                self._running.remove(process)
        if code and self._until < 0:
            return "stopped"
        return "ok" if code in (0, 75) else f"failed with exit code {code}"

    def stop(self, *_: object) -> None:
        """End the running parts, and begin no other; a handler of signals."""
        self._until = -math.inf
        for process in tuple(self._running):
            kill(process)

    def _filled(self, word: str, limit: float) -> str:
        return word.replace("{out}", str(self._out)).replace("{seconds}", str(int(limit * 0.9)))

    def report(self, tiny: bool) -> None:
        """Write the budget beside the figures of all parts until now, and the trainings of all parts into one file."""
        heading = ["a rehearsal with tiny models: its figures say nothing about a GPU"] if tiny else []
        with suppress(OSError):
            replace_text(self._out / "budget.txt", "\n".join([*heading, *budget.lines(self._out)]) + "\n")
            if trainings := merged(self._out):
                replace_text(self._out / "gpu.json", json.dumps(trainings, indent=2) + "\n")

    def compare(self, one: str, other: str, tolerance: float) -> None:
        """Write a line about the losses of two runs."""
        try:
            first, second = self._losses(one), self._losses(other)
            differences = [abs(first[step] - second[step]) / abs(first[step]) for step in first]
            worst = max(differences, key=lambda one: (math.isnan(one), one))
        except (OSError, KeyError, ValueError, ZeroDivisionError) as error:
            self.note(f"{other} beside {one}: no losses to compare ({type(error).__name__})")
            return
        state = "ok" if worst <= tolerance else "failed"
        self._judge(state)
        self.note(f"{other} beside {one}: losses differ by {worst:.1e} at most, {state}")

    def _losses(self, name: str) -> dict[tuple[int, bool], float]:
        """Return the losses of a run by step, and whether they are those of an evaluation."""
        text = (self._out / name / "metrics.jsonl").read_text(encoding="utf-8")
        lines = list(map(json.loads, text.splitlines()))
        return {
            (line["step"], evaluated): found["loss"]
            for line in lines
            for evaluated, found in ((False, line), (True, line.get("eval", {})))
            if "loss" in found
        }

    def _judge(self, state: str) -> None:
        if state.startswith("failed"):  # never set back: other threads judge, too
            self.has_failed = True

    def note(self, line: str) -> None:
        with self._lock:
            with suppress(OSError):  # a closed terminal
                print(line, flush=True)
            with suppress(OSError), (self._out / "summary.txt").open("a", encoding="utf-8") as summary:
                print(line, file=summary, flush=True)


def merged(folder: Path) -> dict[str, Any]:
    """Return the results of all parts that train, as one of `tests/benchmarks/gpu.py`."""
    found: dict[str, Any] = {}
    for name in FIGURES:
        with suppress(OSError, ValueError):
            for key, value in json.loads((folder / f"{name}.json").read_text(encoding="utf-8")).items():
                found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def has_gpu() -> bool:
    """Return whether torch sees a GPU. A process of its own asks, which frees the GPU's memory at its end."""
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("first_gpu"), help="the folder of the results")
    parser.add_argument("--minutes", type=float, default=9, help="the limit; from 25 on, slow parts run too")
    parser.add_argument("--only", nargs="+", help="the names of the parts to run")
    parser.add_argument("--checks", action="store_true", help="check in place of measuring")
    parser.add_argument("--plans", type=Path, help="a file of `python -m tests.benchmarks.gpu --plan-only`")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models; this needs no GPU")
    options = parser.parse_args(arguments)
    is_long = bool(options.only) or (options.minutes >= 25 and not options.tiny)
    at_once, alone = list[Part](), list[Part]()
    if options.checks or options.only:
        at_once = [*checks(), *(beside_cpu() if is_long else ())]
        alone = [sample("run_resumed")]
    if not options.checks:
        alone += measurements(is_long, options.tiny, options.plans)
    if options.tiny:  # a CPU may need minutes for the imports of a part
        longer = max(1.0, options.minutes / 9)
        alone = [replace(part, limit_seconds=longer * part.limit_seconds) for part in alone]
    chosen = options.only or [part.name for part in (*at_once, *alone)]
    if unknown := set(chosen) - {part.name for part in (*at_once, *alone)}:
        parser.error(f"--only names {', '.join(sorted(unknown))}, which are no parts; leave them out")
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, but is {options.minutes}")
    if earlier := [name for name in chosen if (options.out / f"{name}.txt").exists()]:
        parser.error(f"--out is {options.out}, which has results of {', '.join(earlier)}; name another folder")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {options.out}, which cannot be made ({error.strerror}); name another folder")
    until = time.monotonic() + 60 * options.minutes - LEAST_SECONDS
    if not options.tiny and not has_gpu():
        parser.error("torch sees no GPU; see `python -m trainer doctor`")
    runner = Runner(options.out.resolve(), until)
    with handled((signal.SIGHUP, signal.SIGINT, signal.SIGTERM), runner.stop):
        with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 1) * 3 // 4))) as pool:
            list(pool.map(runner.run, (part for part in at_once if part.name in chosen)))
        for part in alone:
            if part.name in chosen:
                runner.run(part)
                runner.report(options.tiny)
    for names in (*SAME_LOSSES, *((f"{name}_cpu", name, LARGER.get(name, 1e-5)) for name in TRAININGS)):
        if set(names[:2]) <= set(chosen):
            runner.compare(*names)
    return int(runner.has_failed)


if __name__ == "__main__":
    sys.exit(main())
