"""The run at Weights & Biases, or in a folder to send there later; the only room that imports the package wandb."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import UsageError
from trainer.observe.observer import packages_of
from trainer.observe.records import EndRecord, RunInfo
from trainer.observe.tracking import END_SECONDS, Point, best_values, tracked_config
from trainer.ranks.environment import forbid_telemetry

if TYPE_CHECKING:
    import wandb

_START_SECONDS = 30.0


def settings(**changes: Any) -> dict[str, Any]:
    """The library's settings: it records what it is given, and collects nothing by itself."""
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
    """A run of W&B; its files lie in `wandb/` in the run's folder.

    Offline (`WANDB_MODE=offline`), each part of a run that was stopped and goes on is a folder of its own with the same
    run's id.

    Raises:
        UsageError: the package wandb is not installed. Said at construction, before anything is trained.
    """

    name = "W&B"
    word = "wandb"

    def __init__(self, project: str | None) -> None:
        forbid_telemetry()
        with packages_of(self.word):
            import wandb
        self._wandb = wandb
        self._project = project
        self._run: wandb.Run | None = None
        self._first_step = 0

    def open(self, run: RunInfo, run_id: str | None) -> str:
        chosen = self._wandb.setup(settings=self._wandb.Settings(**settings())).settings
        is_online = chosen.mode not in ("offline", "dryrun", "disabled")
        if is_online and not self._wandb.login(prompt=False, verify=False):
            raise UsageError(
                '`logging.to` holds "wandb", but there is no login to W&B; set WANDB_API_KEY or run `wandb login`, or'
                " set WANDB_MODE=offline to keep the run in its folder"
            )
        self._run = self._wandb.init(
            project=self._project,
            name=run.name,
            id=run_id,
            resume="allow" if run_id is not None and is_online else None,
            dir=run.folder,
            config=tracked_config(run),
            allow_val_change=True,  # of a run that goes on with another layout
            settings=self._wandb.Settings(**settings()),
        )
        self._first_step = self._run.starting_step
        return str(self._run.id)

    def place(self) -> str:
        assert self._run is not None, "it is opened first"
        if self._run.disabled:
            return "keeps nothing, as WANDB_MODE says"
        if self._run.offline:
            folder = Path(self._run.dir).parent
            return f"offline in {folder}; `wandb sync {folder}` sends it"
        return self._run.url or f"run {self._run.id}"

    def write(self, points: Sequence[Point]) -> None:
        """Adds points; a step that the service holds already, of before the checkpoint was loaded, stays as it is."""
        assert self._run is not None, "it is opened first"
        for point in points:
            if point.step >= self._first_step:
                self._run.log(dict(point.values), step=point.step)

    def finish(self, end: EndRecord) -> None:
        assert self._run is not None, "it is opened first"
        self._run.summary.update({"outcome": end.outcome, **best_values(end)})
        if end.outcome == "stopped":
            self._run.mark_preempting()  # with an exit code other than 0: preempted, so that it may go on
        self._run.finish(exit_code=end.exit_code)

    def close(self) -> None:
        """Ends the library's own process, `wandb-core`."""
        self._wandb.teardown()
