"""TensorBoard events of a run; the only module that imports the package tensorboard."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.errors import TrainerError
from trainer.features.trackers.packages import packages_of
from trainer.observe.observer import NumberObserver
from trainer.observe.records import BadStepRecord, EndRecord, RunInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard(NumberObserver):
    """Observer that writes scalars by step to `tensorboard/` in the run's folder, such as `train/loss`.

    Raises:
        UsageError: the package tensorboard is not installed. The constructor raises it, before training starts.
    """

    def __init__(self) -> None:
        with packages_of("tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter
        self._writer_class = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._folder = Path("tensorboard")
        self._is_broken = False  # an error is reported once
        self._loudly = threading.excepthook

    def start(self, run: RunInfo) -> None:
        """Open a new event file, which hides the points of earlier files that this run repeats."""
        first_step = 0 if run.resumed_from is None else run.resumed_from + 1
        self._folder = run.folder / "tensorboard"
        # The writer has a thread of its own, and Python would print its error as a traceback.
        threading.excepthook = self._quietly
        with self._writing():
            self._writer = self._writer_class(str(self._folder), purge_step=first_step, flush_secs=30)
            self._writer.add_text("recipe", f"```json\n{json.dumps(dict(run.recipe), indent=2)}\n```", first_step)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None, "a run starts before it is observed"
        with self._writing():
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def bad_step(self, record: BadStepRecord) -> None:
        assert self._writer is not None, "a run starts before it is observed"
        with self._writing():
            self._writer.add_text("bad_step", json.dumps(asdict(record)), record.step)

    def flush(self) -> None:
        if self._writer is not None:
            with self._writing():
                self._writer.flush()

    def end(self, record: EndRecord) -> None:
        self.close()

    def close(self) -> None:
        threading.excepthook = self._loudly
        writer, self._writer = self._writer, None  # a failed close is not repeated
        if writer is not None:
            # An error that was reported once must not hide the end of the run.
            with suppress(TrainerError) if self._is_broken else nullcontext(), self._writing():
                writer.close()

    def _quietly(self, error: threading.ExceptHookArgs) -> None:
        """Hide tracebacks of the writer's thread: the next event raises its error."""
        if type(error.thread).__name__ != "_AsyncWriterThread":
            self._loudly(error)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an `OSError` inside this context to a `TrainerError` with a remedy."""
        try:
            yield
        except OSError as error:
            self._is_broken = True
            raise TrainerError(
                f"{self._folder} can no longer be written ({error.strerror}); make room or restore the folder, then"
                " start the run again"
            ) from error
