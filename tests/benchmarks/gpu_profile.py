"""Profiles of trainings on one GPU: where the time of a step goes, how many kernels it has, and who waits.

    python -m tests.benchmarks.gpu_profile --json profile.json --cases "BERT-base, no dropout"

Steps run under `torch.cuda.set_sync_debug_mode`, which reports each operation that lets the host wait for the GPU. Then
torch's profiler records steps. `--tiny` checks this script on a CPU, where nothing waits.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.gpu import BASE, LARGE, LLAMA, WARM_UP, Case, Device, apart, begun, run_steps, shrunk
from trainer.base.disk import replace_text

GRAPHS = "keyed dropout, CUDA graphs"
CASES = {
    "BERT-large, CUDA graphs": Case("BERT-large", LARGE, 384, 32, GRAPHS),
    "Llama 1B, CUDA graphs": Case("Llama 1B", LLAMA, 2048, 2, GRAPHS),
    "BERT-base, CUDA graphs": Case("BERT-base", BASE, 128, 32, GRAPHS),
    **{
        f"BERT-base, {variant}": Case("BERT-base", BASE, 128, 32, variant)
        for variant in ("keyed dropout", "torch's dropout", "no dropout")
    },
}
PROFILED = 4
"""The steps that the profiler records."""
SHOWN = 25
"""The operations of a profile that are kept, those with the most time first."""


@contextmanager
def waits_counted(device: Device) -> Iterator[Counter[str]]:
    """Count the operations in this context that let the host wait for the GPU, by their line of Python."""
    found: Counter[str] = Counter()
    if not device.is_gpu:
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(f"{one.filename}:{one.lineno}" for one in caught if "synchronizing" in str(one.message))


def profiled(case: Case) -> dict[str, Any]:
    """Train a case, and return its waits and the times of its operations, in seconds of one step."""
    device = Device.of_ranks()
    engine, batches = begun(case, device)
    run_steps(engine, batches[:WARM_UP])
    timed, recorded = batches[WARM_UP:-PROFILED], batches[-PROFILED:]
    started = device.now()
    with waits_counted(device) as waits:
        read, issued = run_steps(engine, timed)
    read()
    step_seconds = (device.now() - started) / len(timed)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_gpu else [])]
    with profile(activities=activities) as record:
        run_steps(engine, recorded)[0]()
        device.now()
    rows = []
    for event in record.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if on_device or not device.is_gpu:
            seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) * 1e-6
            rows.append((event.key, event.count / PROFILED, seconds / PROFILED))
    rows.sort(key=lambda row: -row[2])
    return {
        "step_seconds": step_seconds,
        "host_seconds": issued / len(timed),
        "busy_seconds": sum(seconds for *_, seconds in rows),
        "operations_a_step": sum(calls for _, calls, _ in rows),
        "waits": dict(waits),
        "operations": [dict(zip(("name", "calls", "seconds"), row, strict=True)) for row in rows[:SHOWN]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("profile.json"), help="the file of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check this script; works without a GPU")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES), help="the trainings to record")
    options = parser.parse_args(arguments)
    results = {}
    for name in options.cases:
        case = CASES[name]
        if options.tiny:  # a CPU captures no graphs
            case = replace(shrunk(case), variant=case.variant.removesuffix(", CUDA graphs"))
        results[name] = apart(partial(profiled, case))
        shown = {key: value for key, value in results[name].items() if key != "operations"}
        print(f"{name}: {json.dumps(shown)}", flush=True)
        replace_text(options.json, json.dumps(results, indent=2) + "\n")
    return int(any("error" in found or found.get("waits") for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
