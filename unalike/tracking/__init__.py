"""Trackers: a run's curves, settings and report in TensorBoard, MLflow, W&B or Trackio.

A tracker is one file here and one entry in TRACKERS. Its package is imported when it is used.
"""

from importlib import import_module
from importlib.util import find_spec

from unalike.base.errors import UserError, unknown_name
from unalike.tracking.tracker import Tracker

# Name: the module here with the class of that tracker.
TRACKERS = {
    "tensorboard": "TensorBoard",
    "mlflow": "MLflow",
    "wandb": "WeightsAndBiases",
    "trackio": "Trackio",
}


def check_trackers(names: list[str]) -> list[str]:
    """Return `names`.

    Raises: UserError for a name that is unknown or whose package is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise UserError(unknown_name("tracker", name, TRACKERS))
        if find_spec(name) is None:
            raise UserError(
                f"the tracker {name} needs its package: pip install 'unalike[{name}]'; "
                "or track the run later, with `unalike track RUN`"
            )
    return names


def build_tracker(name: str) -> Tracker:
    """Build the tracker of this name; this imports its package."""
    return getattr(import_module(f"unalike.tracking.{name}"), TRACKERS[name])()
