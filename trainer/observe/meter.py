"""Rates over a logging interval, model FLOPs utilisation, and peak memory."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.observe.records import CHECKPOINT, COMPILATION, DEVICE, EVALUATION, ROWS, SAMPLING, STEP

if TYPE_CHECKING:
    import torch

_PAUSES = (EVALUATION, CHECKPOINT, SAMPLING)  # parts of the wall time that the rates leave out
# getrusage(2) counts in KiB on Linux and in bytes on macOS.
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model that decide its floating-point operations."""

    num_parameters: int  # without embedding tables, which are looked up and not multiplied
    num_layers: int
    hidden_size: int  # the number of heads times the size of a head
    num_frozen: int = 0  # of these parameters

    def flops_per_token(self, sequence_length: float) -> float:
        """Return the floating-point operations for one token, forward and backward.

        Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1; Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
        appendix B.

        Args:
            sequence_length: the number of tokens that attend to each other.
        """
        # A multiplication and an addition forward, and twice that backward. A frozen parameter has no gradient of its
        # own, but the gradient passes through it. A recomputation of activations does not count.
        of_parameters = 6 * self.num_parameters - 2 * self.num_frozen
        return of_parameters + 12 * self.num_layers * self.hidden_size * sequence_length


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of one device in FLOP/s; None if it is unknown.

    Args:
        device_name: the name from `torch.cuda.get_device_name`.
        precision: the recipe's `precision`: "fp32", "fp16" or "bf16".
    """
    if " MIG " in device_name:
        return None
    found = [row["teraflops"] for row in peaks().values() if re.search(row["names"], device_name)]
    return 1e12 * found[0][precision] if found and precision in found[0] else None


@cache
def peaks() -> dict[str, Any]:
    """Return the dense peaks of known devices in TFLOP/s by type, and a pattern of torch's names of each.

    The figures are those of data sheets without sparsity, `fp32` without TF32. The first pattern that a name has
    counts; a GPU slice (MIG) and laptop chips have none. The file lists variants with other figures first.
    """
    found: dict[str, Any] = json.loads((Path(__file__).parent / "peaks.json").read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Rates:
    """Means over one logging interval, over all ranks."""

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None  # None: the rows have no tokens
    mfu: float | None  # model FLOPs utilisation, 0 to 1
    seconds: Mapping[str, float]  # of this rank since the last `read`, by the parts of the wall time


class Meter:
    """Counter of the steps of a logging interval, and of the seconds of each part of its wall time.

    The clock runs from one `read` to the next, not from step to step: a GPU works asynchronously, and the host waits
    for it only when it reads the interval's loss. Read the loss first, then the meter.

    Args:
        model: the size of the model; None if its FLOPs are unknown.
        peak_flops: the peak of all ranks together, in FLOP/s; None if it is unknown.
    """

    def __init__(
        self,
        model: ModelSize | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._peak_flops, self._clock = model, peak_flops, clock
        self.trained = 0.0
        """Seconds of all steps until the last `read`."""
        self.begin()

    def begin(self) -> None:
        """Forget the time until now, such as that between the construction and the first step."""
        self._part, self._since = STEP, self._clock()
        self._restart()

    def _restart(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = self._samples = self._tokens = 0

    def add(self, samples: int, tokens: int) -> None:
        """Count one step; both arguments cover the global batch, `tokens` without padding."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def enter(self, part: str, before: str | None = None) -> None:
        """Count the time from now on as `part`; and that since the last call as `before`, if it is given."""
        now = self._clock()
        self._seconds[before or self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the time inside this context as `part`; rates leave out an evaluation, a checkpoint and a sample."""
        outer = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(outer)

    def compiled(self, seconds: float) -> None:
        """Count seconds of steps as compilation."""
        # torch measures compilations itself, and may count more seconds than the steps of this interval had.
        moved = min(seconds, self._seconds[STEP])
        self._seconds[STEP] -= moved
        self._seconds[COMPILATION] += moved

    def parts(self) -> dict[str, float]:
        """Return the seconds of this rank since the last `read`, by part."""
        self.enter(self._part)
        return {part: seconds for part, seconds in self._seconds.items() if seconds > 0}

    def read(self) -> Rates:
        """Return the rates since the last `read`; at least one step must lie between."""
        assert self._steps, "an interval without steps has no rates"
        parts = self.parts()
        working = sum(time for part, time in parts.items() if part not in _PAUSES)
        seconds = max(working, 1e-9)  # a clock may be too coarse for a tiny step
        self.trained += seconds
        rates = Rates(
            step_seconds=seconds / self._steps,
            samples_per_second=self._samples / seconds,
            tokens_per_second=self._tokens / seconds if self._tokens else None,
            mfu=self._mfu(seconds),
            seconds=parts,
        )
        self._restart()
        return rates

    def _mfu(self, seconds: float) -> float | None:
        if self._model is None or self._peak_flops is None or not self._tokens:
            return None
        # The mean length stands for the lengths of all rows.
        flops = self._tokens * self._model.flops_per_token(self._tokens / self._samples)
        return flops / seconds / self._peak_flops


class TimeLeft:
    """Estimate of the seconds until the last step from those since the first, with evaluations and checkpoints."""

    def __init__(self, first_step: int, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_step, self._total_steps, self._clock = first_step, total_steps, clock
        self._start = clock()

    def after(self, step: int) -> float | None:
        """Return the seconds left when `step` is done; None before the first step of this process is done."""
        done = step - self._first_step
        return (self._clock() - self._start) / done * (self._total_steps - step) if done > 0 else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes since the process started: of tensors on CUDA, else of the process."""
    if device.type == "cuda":
        import torch  # here, because observers load without it

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def of_slowest_reader(seconds: Mapping[str, float], rows: Sequence[float]) -> Mapping[str, float]:
    """Return the parts of this rank, with the rows of the rank that waits longest for them.

    The others wait for it in the collectives of the step.
    """
    longer = max(0.0, max(rows) - seconds.get(ROWS, 0.0))
    for part in (STEP, DEVICE):
        moved = min(longer, seconds.get(part, 0.0))
        if moved:
            seconds = {**seconds, part: seconds[part] - moved, ROWS: seconds.get(ROWS, 0.0) + moved}
            longer -= moved
    return seconds
