"""Tracking of a run with Weights & Biases, online or offline; the only module that imports the package wandb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import UsageError
from trainer.features.trackers.packages import packages_of
from trainer.features.trackers.tracking import END_SECONDS, Point, Tracker, best_values, tracked_config
from trainer.observe.records import EndRecord, RunInfo

if TYPE_CHECKING:
    import wandb

_START_SECONDS = 30.0
_PROBE, _ROOM_BYTES = ".room", 1 << 16


def settings(**changes: Any) -> dict[str, Any]:
    """Return settings under which the library records its input only, and collects no other data."""
    return {
        "host": "",  # the machine's name
        "console": "off",  # the run's output
        "save_code": False,
        "disable_code": True,
        "disable_git": True,
        "disable_job_creation": True,
        "x_disable_meta": True,  # command line, Python, operating system
        "x_disable_machine_info": True,
        "x_disable_stats": True,  # load and memory of the machine
        "x_save_requirements": False,  # installed packages
        "silent": True,
        "init_timeout": _START_SECONDS,
        "finish_timeout": END_SECONDS,
        "finish_timeout_raises": True,
        **changes,
    }


class WandbService:
    """A run of W&B, with its files in `wandb/` in the run's folder.

    Offline (`WANDB_MODE=offline`), each part of a resumed run has its own folder with the same run id.

    Raises:
        UsageError: the package wandb is not installed. The constructor raises it, before training starts.
    """

    name = "W&B"
    word = "wandb"

    def __init__(self, project: str | None) -> None:
        with packages_of(self.word):
            import wandb
        self._wandb = wandb
        self._project = project
        self._run: wandb.Run  # from `open` on

    def open(self, run: RunInfo, run_id: str | None) -> tuple[str, int]:
        chosen = self._wandb.setup(settings=self._wandb.Settings(**settings())).settings
        is_online = chosen.mode not in ("offline", "dryrun", "disabled")
        # A prompt would wait for a keyboard, which a batch job lacks.
        if is_online and not self._wandb.login(prompt=False, verify=False):
            raise UsageError(
                '`logging.to` holds "wandb", but there is no login to W&B; set WANDB_API_KEY or run `wandb login`, or'
                " set WANDB_MODE=offline to keep the run in its folder"
            )
        self._run = self._wandb.init(
            project=self._project,
            name=run.name,
            id=run_id,
            # Offline, no server knows the run; its parts have one id.
            resume="allow" if run_id is not None and is_online else None,
            dir=run.folder,
            config=tracked_config(run),
            allow_val_change=True,  # a resumed run may have another layout
            settings=self._wandb.Settings(**settings()),
        )
        return str(self._run.id), self._run.starting_step

    def place(self) -> str:
        if self._run.disabled:
            return "disabled by WANDB_MODE; nothing is kept"
        if self._run.offline:
            folder = Path(self._run.dir).parent
            return f"offline in {folder}; `wandb sync {folder}` sends it"
        return self._run.url or f"run {self._run.id}"

    def write(self, points: Sequence[Point]) -> None:
        self._require_room()
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def _require_room(self) -> None:
        """Raise the error of a folder that cannot be written; offline, the library loses points without a word."""
        if not self._run.offline or self._run.disabled:
            return
        # Beside the files of the run, because another disk may have room.
        probe = Path(self._run.dir).parent / _PROBE
        try:
            probe.write_bytes(bytes(_ROOM_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def finish(self, end: EndRecord) -> None:
        self._require_room()
        self._run.summary.update({"outcome": end.outcome, **best_values(end)})
        if end.outcome == "stopped":
            self._run.mark_preempting()  # with a non-zero exit code: preempted, so it can be resumed
        self._run.finish(exit_code=end.exit_code)

    def close(self) -> None:
        """End the library's own process, `wandb-core`."""
        self._wandb.teardown()


def tracker(project: str | None, note: Callable[[str], None]) -> Tracker:
    return Tracker(WandbService(project), note)
