"""Tracking of a run with Trackio, local or on a Space; the only module that imports the package trackio."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

from trainer.base.errors import UsageError
from trainer.features.trackers.packages import packages_of
from trainer.features.trackers.tracking import Point, Tracker, best_values, tracked_config
from trainer.observe.records import EndRecord, RunInfo

_DEFAULT_PROJECT = "trainer"


class TrackioService:
    """A run of Trackio, in its own store (`TRACKIO_DIR`), or on the Space or server that its variables name.

    Trackio resumes runs by their names. The name therefore ends with the id.

    Raises:
        UsageError: the package trackio is not installed. The constructor raises it, before training starts.
    """

    name = "Trackio"
    word = "trackio"

    def __init__(self, project: str | None) -> None:
        with packages_of(self.word):
            import trackio
        self._trackio = trackio
        self._project = project or _DEFAULT_PROJECT
        self._run: Any = None

    def open(self, run: RunInfo, run_id: str | None) -> tuple[str, int]:
        own_id = run_id or secrets.token_hex(4)
        options = {"config": tracked_config(run), "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        resume = "never" if run_id is None else "must"
        # Trackio prints, but the standard output belongs to the console of the run.
        with redirect_stdout(io.StringIO()):
            try:
                self._run = self._trackio.init(self._project, name=f"{run.name}-{own_id}", resume=resume, **options)
            except ValueError as error:
                if run_id is None or "does not exist" not in str(error):
                    raise
                raise UsageError(
                    f"`tracking.json` in the run's folder names the Trackio run {run.name}-{own_id}, but the project"
                    f" {self._project} has none of that name; set TRACKIO_DIR as it was, or remove the file to begin a"
                    " new run there"
                ) from error
        return own_id, self._run._next_step

    def place(self) -> str:
        store = self._run.url or self._trackio.utils.TRACKIO_DIR
        return f"run {self._run.name} in {store}; `trackio show --project {self._project}` shows it"

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def finish(self, end: EndRecord) -> None:
        if best := best_values(end):
            self._run.log(best, step=end.step)
        with redirect_stdout(io.StringIO()):
            self._run.finish()

    def close(self) -> None:
        """Keep Trackio from finishing the run a second time when Python exits."""
        self._trackio.context_vars.current_run.set(None)


def tracker(project: str | None, note: Callable[[str], None]) -> Tracker:
    return Tracker(TrackioService(project), note)
