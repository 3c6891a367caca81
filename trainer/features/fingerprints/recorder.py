"""The record of a rank: one line of JSON for the weights at the start, and one for each of the first steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor

from trainer.base.distribution import versions
from trainer.checkpoint.owner import require_no_link
from trainer.engine.engine import nothing
from trainer.engine.native import NativeEngine
from trainer.engine.results import StepResult
from trainer.engine.state import BUFFER_PREFIX, MODEL_PREFIX
from trainer.features.fingerprints.modules import Call, ModuleRecorder, Record
from trainer.features.fingerprints.numbers import of_part
from trainer.observe.meter import Meter
from trainer.parallel.mesh import AXES, ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.parallel.placement import PIPELINE_AXIS
from trainer.parallel.shards.boxes import TensorPart, tensor_part
from trainer.training.assembly import Assembly
from trainer.training.run_tool import RunTool

FORMAT = 1
STEPS = 16
"""The steps that are recorded, from the first one of the training."""

_KINDS = (MODEL_PREFIX, BUFFER_PREFIX)
Numbers = list[list[Any]]
"""Name, part and numbers of each tensor."""


class Fingerprints(RunTool):
    """The fingerprints of a run; its hooks go after the last recorded step."""

    _file: TextIO | None = None
    _failure: str | None = None

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        self._step = parts.progress.step
        if self._step >= STEPS:
            return
        self._parts, self._mesh = parts, parts.mesh
        # DeepSpeed averages over the data ranks, so its engine multiplies the loss by their number.
        self._factor = parts.mesh.size("dp") if parts.plan.strategy.package else 1
        self._file = self._open(Path(parts.recipe.checkpoint.folder) / "fingerprints")
        if self._file is None:
            return
        self._write({"step": self._step, "weights": self._weights()})
        self._before = self._copies()
        self._modules = ModuleRecorder(parts.built, parts.mesh, parts.recipe.parallel.sequence)
        if isinstance(parts.engine, NativeEngine):
            parts.engine.to_graphs = None  # a captured graph runs no hooks
        self._begin_step = parts.engine.begin_step
        # An attribute of this one engine, because a step has no other place between its gradients and its update.
        parts.engine.begin_step = self._recorded_step  # type: ignore[method-assign]

    def news(self) -> list[str]:
        failure, self._failure = self._failure, None
        return [failure] if failure else []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _recorded_step(
        self, batch: RankBatch, before_update: Callable[[], object] = nothing
    ) -> Callable[[], StepResult]:
        if self._step == STEPS:
            self._modules.close()
            del self._before
            vars(self._parts.engine).pop("begin_step")
            return self._begin_step(batch, before_update)
        self._step += 1
        real = [microbatch for microbatch in batch.microbatches if not microbatch.filler]
        self._modules.begin({row for microbatch in real for row in microbatch.text_rows.tolist()})
        gradients: Numbers = []

        def record_gradients() -> object:
            gradients.extend(self._gradients())
            return before_update()

        read = self._begin_step(batch, record_gradients)
        modules = self._modules
        step, forward, backward = self._step, modules.forward, modules.backward
        changes = self._changes()
        is_written = False

        def result() -> StepResult:
            nonlocal is_written
            numbers = read()
            if not is_written:
                is_written = True
                scale = numbers.loss_scale or 1.0
                self._write(
                    {
                        "step": step,
                        "loss": numbers.loss,
                        "grad_norm": numbers.grad_norm,
                        "learning_rate": numbers.learning_rate,
                        "forward": _calls(forward, 1.0),
                        "backward": _calls(backward, scale * self._factor),
                        "gradients": [[name, part, _scaled(one, scale)] for name, part, one in gradients],
                        "update": changes,
                    }
                )
            return numbers

        return result

    def _state_parts(self) -> Iterable[TensorPart]:
        state = self._parts.engine.state()
        return (part for part in state.parts if part.name.startswith(_KINDS) and _has_numbers(part))

    def _weights(self) -> Numbers:
        state = self._parts.engine.state()
        frozen = (part for part in state.frozen() if _has_numbers(part))
        return [self._entry(part, of_part(part)) for part in (*self._state_parts(), *frozen)]

    def _copies(self) -> dict[str, dict[int, Tensor]]:
        return {
            part.name: {index: box.view.detach().clone() for index, box in enumerate(part.boxes)}
            for part in self._state_parts()
        }

    @torch.no_grad()
    def _changes(self) -> Numbers:
        changes = [self._entry(part, of_part(part, self._before[part.name])) for part in self._state_parts()]
        self._before = self._copies()
        return changes

    @torch.no_grad()
    def _gradients(self) -> Numbers:
        """Return the numbers of complete gradients; DeepSpeed has consumed its own by then."""
        engine, found = self._parts.engine, []
        for label, parameter in engine.parameters.items():
            placement = engine.placements[label]
            if parameter.grad is not None and not placement.is_copy:
                part = tensor_part(placement.name, parameter.grad, placement, self._mesh)
                found.append(self._entry(part, of_part(part)))
        return found

    def _entry(self, part: TensorPart, numbers: list[float]) -> list[Any]:
        name = part.name.removeprefix(MODEL_PREFIX)
        return [name, _place(self._mesh, [a for a in AXES if a not in (*part.replicated_over, PIPELINE_AXIS)]), numbers]

    def _open(self, folder: Path) -> TextIO | None:
        require_no_link(folder)
        file = folder / f"rank-{self._mesh.rank:05d}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = _lines_until(file, self._step) if self._step else []
            opened = file.open("w", encoding="utf-8")
            opened.writelines(kept)
        except OSError as error:
            self._failure = f"the fingerprints cannot be written to {folder} ({error.strerror})"
            return None
        self._file = opened
        if not kept:
            self._write(self._header())
        return opened

    def _header(self) -> dict[str, Any]:
        parts, mesh = self._parts, self._mesh
        device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
        return {
            "fingerprints": FORMAT,
            "recipe": parts.recipe.name,
            "layout": parts.plan.layout.sizes,
            "strategy": parts.recipe.parallel.strategy,
            "precision": parts.recipe.precision,
            "sent_in": parts.recipe.parallel.communication.gradients,
            "tolerances": parts.recipe.optimizer.tolerances,  # of an optimizer that rounds
            "identity": parts.saved.identity,
            "rank": mesh.rank,
            "world_size": mesh.world_size,
            "axes": {axis: [mesh.index(axis), mesh.size(axis)] for axis in AXES},
            "modules": {
                name: type(module).__name__ for part in parts.built for name, module in part.model.named_modules()
            },
            "device": device,
            "versions": versions(),
        }

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not end the training
            self._failure, self._file = f"the fingerprints cannot be written ({error.strerror})", None


def _place(mesh: ParallelMesh, axes: Iterable[str]) -> str:
    """Return the place of a part along the axes that cut its tensor; ranks with the same place are replicas."""
    return " ".join(f"{axis}={mesh.index(axis)}" for axis in axes if mesh.size(axis) > 1)


def _has_numbers(part: TensorPart) -> bool:
    return all(box.view.is_floating_point() for box in part.boxes)


def _calls(records: Mapping[Call, Record], scale: float) -> list[list[Any]]:
    return [
        [*call, record.width, record.is_shared, {row: _scaled(numbers, scale) for row, numbers in record.rows.items()}]
        for call, record in records.items()
    ]


def _scaled(numbers: list[float], scale: float) -> list[float]:
    """Return the numbers of a tensor divided by a scale, with 12 digits."""
    elements, squares, *projections = numbers
    values = (squares / scale**2, *(one / scale for one in projections))
    return [elements, *(float(f"{value:.12g}") for value in values)]


def _lines_until(file: Path, step: int) -> list[str]:
    """Return the lines of a record until a step, from which a run resumes."""
    kept = []
    with suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if json.loads(line).get("step", 0) > step:
                break
            kept.append(line)
    return kept
