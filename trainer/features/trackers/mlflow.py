"""Tracking of a run with an MLflow store or server; the only module that imports the package mlflow."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainer.base.batches import batches
from trainer.base.errors import UsageError
from trainer.base.text import dotted_leaves, without_secrets
from trainer.features.trackers.packages import packages_of
from trainer.features.trackers.tracking import Point, Tracker, best_values, tracked_config
from trainer.observe.records import EndRecord, RunInfo
from trainer.ranks.environment import library_settings

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_PLACE = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")
_SHORT_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # else minutes for a server that is away
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
}
_DEFAULT_EXPERIMENT = "Default"  # MLflow's own default
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "SCHEDULED"}  # SCHEDULED: the run continues later
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # maximum numbers of one request


class MLflowService:
    """A run of MLflow, stored in `mlflow.db` in the run's folder unless MLFLOW_TRACKING_URI names another place.

    Raises:
        UsageError: the package mlflow is not installed. The constructor raises it, before training starts.
    """

    name = "MLflow"
    word = "mlflow"

    def __init__(self, experiment: str | None) -> None:
        self._uri, experiment_name = library_settings(*_PLACE, defaults=_SHORT_LIMITS)
        with packages_of(self.word):
            import mlflow.tracking
            import sqlalchemy  # noqa: F401  the local store needs it, and mlflow-skinny does not install it
        for logger in ("mlflow", "alembic"):
            logging.getLogger(logger).setLevel(logging.WARNING)  # otherwise a new store logs a line for each table
        self._mlflow = mlflow
        self._experiment = experiment or experiment_name or _DEFAULT_EXPERIMENT
        self._client: MlflowClient  # from `open` on
        self._run_id = ""
        self._held: dict[str, int] = {}

    def open(self, run: RunInfo, run_id: str | None) -> tuple[str, int]:
        self._uri = self._uri or f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        # Only the client is used: MLflow's global run would record git, user, host and script.
        self._client = client = self._mlflow.tracking.MlflowClient(self._uri, registry_uri=self._uri)
        if run_id is None:
            known = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
            self._run_id = client.create_run(str(experiment), run_name=run.name).info.run_id
            parameters = [
                # Names have the characters that MLflow accepts.
                self._mlflow.entities.Param(
                    re.sub(r"[^\w.\-/ ]", "_", key), value if isinstance(value, str) else json.dumps(value)
                )
                for key, value in dotted_leaves(tracked_config(run)).items()
            ]
            for some in batches(parameters, lambda _: 1, _MOST_PARAMETERS):
                client.log_batch(self._run_id, params=some)
        else:
            self._run_id = run_id
            self._held = self._last_steps(client)
            client.update_run(run_id, status="RUNNING")
        return self._run_id, 0  # `_held` tells the steps of each metric

    def _last_steps(self, client: MlflowClient) -> dict[str, int]:
        """Return the last step of each metric of an earlier part of this run.

        Raises:
            UsageError: the run does not exist.
        """
        try:
            names = client.get_run(self._run_id).data.metrics
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise UsageError(
                f"`tracking.json` in the run's folder names the MLflow run {self._run_id}, but"
                f" {without_secrets(self._uri)} has none of that id; set MLFLOW_TRACKING_URI as it was, or remove the"
                " file to begin a new run there"
            ) from error
        return {
            # `data.metrics` has values without steps, so these come from the history.
            name: max(metric.step for metric in client.get_metric_history(self._run_id, name))
            for name in names
            if not name.startswith("best/")
        }

    def place(self) -> str:
        return f"run {self._run_id} in {without_secrets(self._uri)}"

    def write(self, points: Sequence[Point]) -> None:
        """Write points, except steps that the store already holds from an earlier part of the run."""
        metrics = [
            self._mlflow.entities.Metric(name, value, round(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
            if point.step > self._held.get(name, -1)
        ]
        for some in batches(metrics, lambda _: 1, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)
            self._held.update((metric.key, metric.step) for metric in some)  # not sent again if a later batch fails

    def finish(self, end: EndRecord) -> None:
        for name, value in best_values(end).items():
            self._client.log_metric(self._run_id, name, value, step=end.step)
        self._client.set_terminated(self._run_id, _STATUSES[end.outcome])

    def close(self) -> None:
        """Do nothing: no connection stays open."""


def tracker(experiment: str | None, note: Callable[[str], None]) -> Tracker:
    return Tracker(MLflowService(experiment), note)
