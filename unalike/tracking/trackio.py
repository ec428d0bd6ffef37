"""Trackio: a project for each scenario, where Trackio keeps them; `trackio show` shows them."""

from pathlib import Path

from unalike.tracking.tracker import Journal, Point, TrackedRun


class Trackio:
    """Series by `client/metric` over rounds, the config, report and results as artifacts."""

    def open(self, run: TrackedRun) -> set[Point]:
        """See `Tracker`."""
        import trackio

        self.journal = Journal(run, "trackio")
        self.run = trackio.init(
            project=run.project,
            name=f"{run.name}-{self.journal.run_id()}",  # Trackio knows runs by name only
            config=run.parameters,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return self.journal.known

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        self.journal.add(values, step)
        self.run.log(dict(values), step=step)

    def close(self, files: list[Path], finished: bool) -> None:
        """See `Tracker`."""
        for file in files:
            name = f"{file.stem}-{self.journal.id}"
            self.run.log_artifact(str(file), name=name, type="report")
        self.run.finish()
