"""TensorBoard: event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from unalike.report.folder import check_inside
from unalike.tracking.tracker import Point, TrackedRun

FOLDER = "tensorboard"


class TensorBoard:
    """Scalars by `client/metric`, settings under HPARAMS. Has no files: the report stays beside."""

    def open(self, run: TrackedRun) -> set[Point]:
        """See `Tracker`."""
        folder = run.folder / FOLDER
        check_inside(folder, run.folder)
        known = read_points(folder) if folder.exists() else None
        self.writer = SummaryWriter(str(folder))
        if known is None:
            for summary in hparams(_simple(run.parameters), {}):
                self.writer._get_file_writer().add_summary(summary)
        return known or set()

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, files: list[Path], finished: bool) -> None:
        """See `Tracker`."""
        self.writer.close()


def read_points(folder: Path) -> set[Point]:
    """Return the points in the event files of a folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    points: set[Point] = set()
    for name in events.Tags()["scalars"]:
        points |= {(name, point.step) for point in events.Scalars(name)}
    return points


def _simple(parameters: dict[str, Any]) -> dict[str, Any]:
    """Numbers and booleans as they are, everything else as text, as HPARAMS takes them."""
    simple = {}
    for name, value in parameters.items():
        simple[name] = value if isinstance(value, (bool, int, float)) else str(value)
    return simple
