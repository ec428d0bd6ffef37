"""MLflow: one experiment per scenario, in the store that MLFLOW_TRACKING_URI names."""

import logging
import time
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from unalike.tracking.points import safe_name
from unalike.tracking.tracker import Journal, Point, TrackedRun

TAG = "unalike.run"
MAX_PARAMETERS = 100  # in one call
MAX_METRICS = 1000
MAX_LENGTH = 6000  # characters of a parameter


class MLflow:
    """Metrics by `client/metric`, parameters from the config, report and results as artifacts."""

    def open(self, run: TrackedRun) -> set[Point]:
        """See `Tracker`."""
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self.client = MlflowClient()
        experiment = self._experiment(run.project)
        # Our own name for the run is on disk first: a run is found again whenever it was killed.
        tag = Journal(run, "mlflow").run_id()
        found = self.client.search_runs([experiment], f"tags.`{TAG}` = '{tag}'")
        if found:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
        else:
            created = self.client.create_run(experiment, tags={TAG: tag}, run_name=run.name)
            self.id = created.info.run_id
        known = set(found[0].data.params) if found else set()
        parameters = [
            Param(name, str(value)[:MAX_LENGTH])
            for name, value in run.parameters.items()
            if name not in known
        ]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self.client.log_batch(self.id, params=parameters[start : start + MAX_PARAMETERS])
        return self._read_points() if found else set()

    def _experiment(self, name: str) -> str:
        """Return the id of the experiment of this name; create it where there is none."""
        for _ in range(2):
            experiment = self.client.get_experiment_by_name(name)
            if experiment is not None:
                return experiment.experiment_id
            location = artifact_folder(self.client.tracking_uri, name)
            try:
                return self.client.create_experiment(name, artifact_location=location)
            except MlflowException:  # another run created it meanwhile
                time.sleep(0.5)
        raise RuntimeError(f"MLflow's experiment {name} can neither be found nor created")

    def _read_points(self) -> set[Point]:
        points: set[Point] = set()
        for name in self.client.get_run(self.id).data.metrics:
            history = self.client.get_metric_history(self.id, name)
            points |= {(name, metric.step) for metric in history}
        return points

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.id, metrics=metrics[start : start + MAX_METRICS])

    def close(self, files: list[Path], finished: bool) -> None:
        """See `Tracker`."""
        for file in files:
            self.client.log_artifact(self.id, str(file))
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


def artifact_folder(store: str, experiment: str) -> str | None:
    """Return where the files of an experiment belong: beside a SQLite store.

    MLflow itself would put them into `mlruns` of the current folder, wherever the store is.

    Args:
        store: the tracking URI.
        experiment: its name.
    Returns: None for other stores, which MLflow and its server choose the place for.
    """
    if not store.startswith("sqlite:"):
        return None
    from sqlalchemy.engine import make_url

    file = make_url(store).database
    if not file or file == ":memory:":
        return None
    return (Path(file).resolve().parent / "mlruns" / safe_name(experiment)).as_uri()
