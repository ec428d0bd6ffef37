"""Weights & Biases: a project for each scenario; W&B's own variables (WANDB_MODE ...) hold."""

from pathlib import Path

from unalike.tracking.tracker import Journal, Point, TrackedRun

STEP = "round"  # the x axis of all series


class WeightsAndBiases:
    """Series by `client/metric` over `round`, the config, report and results as an artifact."""

    def open(self, run: TrackedRun) -> set[Point]:
        """See `Tracker`."""
        import wandb

        self.journal = Journal(run, "wandb")
        self.new_artifact = wandb.Artifact
        self.run = wandb.init(
            project=run.project,
            name=run.name,
            id=self.journal.run_id(),
            resume="allow",
            config=run.parameters,
            dir=str(self.journal.path.parent),
        )
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        return self.journal.known

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        self.journal.add(values, step)
        self.run.log({**values, STEP: step})

    def close(self, files: list[Path], finished: bool) -> None:
        """See `Tracker`."""
        if files:
            artifact = self.new_artifact(f"report-{self.journal.id}", type="report")
            for file in files:
                artifact.add_file(str(file))
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=0 if finished else 1)
