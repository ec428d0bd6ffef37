"""Sweeps: runs of a scenario over a grid of settings, the best one, and its result on new seeds."""

import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unalike.base.errors import UserError, unknown_name
from unalike.base.lock import is_locked, lock
from unalike.report import compare
from unalike.report.compare import interval
from unalike.report.sweep_plot import plot_scores
from unalike.runs.environment import hash_of_the_code
from unalike.runs.search import Search, Settings, Space, is_range
from unalike.scenarios import load, load_mapping

CRITERIA = ("value", "delta")
WAIT = 0.5  # seconds between looks at a run that an earlier sweep left running


@dataclass(frozen=True)
class GridRun:
    """One run of a sweep.

    Attributes:
        settings: `key=value`, as of `--set`.
        seed: of the run.
        folder: where it is kept; its name follows from scenario, settings, seed and code.
    """

    settings: tuple[str, ...]
    seed: int
    folder: Path


@dataclass
class Sweep:
    """A grid of settings, or a search over them, to be run in subprocesses.

    Args:
        scenario: a shipped scenario or a YAML file.
        grid: `key=value,value`, each as of `--set`; with `trials` also `key=low..high`.
        keep: folder for all runs. Runs that are there and finished are not made again; one that
            was stopped is resumed.
        seeds: for choosing the best setting.
        report_seeds: for its result; by default as many that follow the others.
        by: "value": mean gain of clients over the first setting of the grid, with the same seed.
            "delta": mean gain over the local baseline of each run, which changes with settings
            such as the learning rate.
        algorithm: another method than the scenario's.
        jobs: runs at a time.
        options: more options of `unalike run`, such as ["--device", "cuda"].
        tell: takes a line of progress.
        trials: search with so many trials (Optuna), instead of running the whole grid.
    Raises: UserError where a setting is not one of the scenario, or there is nothing to choose.
    """

    scenario: str
    grid: list[str]
    keep: Path
    seeds: tuple[int, ...] = (0,)
    report_seeds: tuple[int, ...] | None = None
    by: str = "value"
    algorithm: str | None = None
    jobs: int = 1
    options: list[str] = field(default_factory=list)
    tell: Callable[[str], None] = lambda line: None
    trials: int | None = None

    def __post_init__(self) -> None:
        if self.by not in CRITERIA:
            raise UserError(unknown_name("criterion", self.by, CRITERIA))
        if self.report_seeds is None:
            first = max(self.seeds) + 1
            self.report_seeds = tuple(range(first, first + len(self.seeds)))
        self.points: list[Settings] = []
        if self.trials is None:
            for text in self.grid:
                if is_range(text):
                    raise UserError(f"--set {text} is a range, which is searched: add --trials 20")
            self.points = list(itertools.product(*(split_values(text) for text in self.grid)))
        self.space = Space(self.grid, split_values)
        if len(self.points or self.space.corners()) < 2 or not self.grid:
            raise UserError(
                "a sweep needs two settings or more to choose from: --set lr=0.001,0.003"
            )
        for settings in self.points or self.space.corners():  # all mistakes before the first run
            load(self.scenario, self.algorithm, list(settings))
        self.processes: set[subprocess.Popen] = set()
        self.stopped = threading.Event()
        self.count = 0

    def run(self) -> dict[str, Any]:
        """Make all runs that are missing, and write sweep.json and best.yaml.

        Returns: a dict with
            choice: comparison of all settings on the seeds for choosing, see `compare`.
            best: settings of the best one.
            scores: {"mean", "low", "high", "n"} of each setting, by which it was chosen.
            failed: settings that were left out, with the reason.
            report: the best setting on the seeds for reporting: paths, value and delta.
        """
        self.keep.mkdir(parents=True, exist_ok=True)
        with lock(self.keep):
            return self._run()

    def _run(self) -> dict[str, Any]:
        extra = len(self.report_seeds or ())
        if self.trials is None:
            runs = self.grid_runs(self.points)
            errors = self.make(runs, extra)
        else:
            runs, errors = self.search(self.trials, extra)
        failed = {describe(run.settings): errors[run] for run in runs if run in errors}
        finished = [run for run in runs if describe(run.settings) not in failed]
        if not finished:
            reason = next(iter(failed.values()))
            raise UserError(f"every setting failed; the first: {reason}")
        choice, scores = self.choose(finished)
        best = max(scores, key=lambda settings: scores[settings]["mean"])
        reports = [self.grid_run(best, seed) for seed in self.report_seeds or ()]
        errors = self.make(reports)
        named = {describe(settings): score for settings, score in scores.items()}
        result = {
            "scenario": self.scenario,
            "by": self.by,
            "seeds": list(self.seeds),
            "best": list(best),
            "scores": named,
            "failed": failed | {f"seed {run.seed}": error for run, error in errors.items()},
            "report": summarise([run for run in reports if run not in errors]),
            "choice": choice,
        }
        first = next(run for run in finished if run.settings == best)
        shutil.copyfile(first.folder / "config.yaml", self.keep / "best.yaml")
        (self.keep / "sweep.json").write_text(json.dumps(result, indent=1) + "\n")
        plot_scores(named, describe(best), self.by, self.keep / "sweep.svg")
        return result

    def grid_runs(self, points: list[Settings]) -> list[GridRun]:
        """Return the runs of some settings, each once, on all seeds for choosing."""
        return [
            self.grid_run(point, seed) for point in dict.fromkeys(points) for seed in self.seeds
        ]

    def search(self, trials: int, extra: int) -> tuple[list[GridRun], dict[GridRun, str]]:
        """Make the runs of trials, batch after batch; return all runs, and those that failed."""
        search = Search(self.space, self.keep, self.jobs, trials)
        tried: list[Settings] = search.tried()
        errors: dict[GridRun, str] = {}
        self.count = len(self.grid_runs(tried))
        while batch := search.next_batch():
            points = [settings for _, settings in batch]
            new = [run for run in self.grid_runs(points) if run.settings not in tried]
            total = len(self.seeds) * trials + extra
            errors |= self.make(new, total - self.count - len(new))
            tried += [point for point in dict.fromkeys(points) if point not in tried]
            for number, settings in batch:
                search.tell(number, self.score(settings, tried))
        runs = self.grid_runs(tried)
        errors |= self.make([run for run in runs if not has_finished(run) and run not in errors])
        return runs, errors

    def score(self, settings: Settings, tried: list[Settings]) -> float | None:
        """Return what a trial is judged by; None where a run of it failed.

        Args:
            settings: of the trial.
            tried: of all trials; values are gains over the first of them that did not fail.
        """
        finished = [point for point in tried if all(map(has_finished, self.grid_runs([point])))]
        if settings not in finished:
            return None
        if self.by == "value" and settings == finished[0]:
            return 0.0
        compared = [finished[0], settings]
        if len(self.grid_runs(compared)) < 2:  # one run alone cannot be compared
            return summarise(self.grid_runs(compared))["delta"]["mean"]
        return self.choose(self.grid_runs(compared))[1][settings]["mean"]

    def grid_run(self, settings: tuple[str, ...], seed: int) -> GridRun:
        """Return the run of one setting and seed. Other code has another folder."""
        mapping = load_mapping(self.scenario)
        key = repr((hash_of_the_code(), mapping, self.algorithm, settings, seed, self.options))
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        name = re.sub(r"[^\w.=-]+", "_", "-".join([*settings, f"s{seed}"]))[:80]
        return GridRun(settings, seed, self.keep / f"{name}-{digest}")

    def make(self, runs: list[GridRun], extra: int = 0) -> dict[GridRun, str]:
        """Make runs, `jobs` at a time; return those that failed, with the reason."""
        total = self.count + len(runs) + extra
        errors: dict[GridRun, str] = {}

        def make_one(run: GridRun) -> None:
            start = time.time()
            error = self.make_run(run)
            if error:
                errors[run] = error
            self.count += 1
            what = f"failed: {error}" if error else f"{time.time() - start:.1f} s"
            self.tell(f"{self.count} of {total}: {describe(run.settings)}, seed {run.seed}, {what}")

        with ThreadPoolExecutor(self.jobs) as pool:
            jobs = [pool.submit(make_one, run) for run in runs]
            try:
                for job in jobs:
                    job.result()
            except BaseException:  # Ctrl-C: runs save what they have and end
                self.stopped.set()
                for job in jobs:
                    job.cancel()
                for process in list(self.processes):
                    process.terminate()
                raise
        return errors

    def make_run(self, run: GridRun) -> str | None:
        """Make or resume one run, unless it has finished; return why it failed."""
        while is_locked(run.folder):  # left running by a sweep that was killed
            if self.stopped.wait(WAIT):
                return "stopped"
        if has_finished(run):
            return None
        command = [sys.executable, "-m", "unalike"]
        if (run.folder / "config.yaml").exists():
            command += ["resume", str(run.folder), "--json"]
        else:
            command += ["run", self.scenario, "--json", "--seed", str(run.seed)]
            command += ["--out", str(run.folder), *self.options]
            if self.algorithm is not None:
                command += ["--algorithm", self.algorithm]
            for setting in run.settings:
                command += ["--set", setting]
        if self.stopped.is_set():
            return "stopped"
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.processes.add(process)
        _, stderr = process.communicate()
        self.processes.discard(process)
        if process.returncode == 0:
            return None
        lines = stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        return next((line for line in lines if line.startswith("unalike: ")), lines[-1])

    def choose(self, runs: list[GridRun]) -> tuple[dict, dict[tuple[str, ...], dict]]:
        """Return the comparison of all settings, and the score of each."""
        choice = compare([run.folder for run in runs])
        first = choice["groups"][0]["label"]
        if self.by == "value" and len(choice["groups"]) > 1:
            choice = compare([run.folder for run in runs], against=first)
        settings = {str(run.folder): run.settings for run in runs}
        scores = {}
        for group in choice["groups"]:
            if group["delta"]["mean"] is None:
                raise UserError("these runs have no local baseline: choose by value")
            scores[settings[group["paths"][0]]] = group["delta"]
        return choice, scores


def has_finished(run: GridRun) -> bool:
    """Return whether a run has its results."""
    return (run.folder / "results.json").exists()


def summarise(runs: list[GridRun]) -> dict[str, Any]:
    """Return folders, seeds, mean value over clients and mean gain of runs of one setting."""
    results = [json.loads((run.folder / "results.json").read_text()) for run in runs]
    values = []
    for own in results:
        known = [e["value"] for e in own["clients"].values() if e["value"] is not None]
        values.append(sum(known) / len(known))
    return {
        "seeds": [run.seed for run in runs],
        "paths": [str(run.folder) for run in runs],
        "value": interval(values),
        "delta": interval([own["delta"] for own in results if own["delta"] is not None]),
    }


def describe(settings: tuple[str, ...]) -> str:
    """Return settings as one text."""
    return " ".join(settings)


def split_values(text: str) -> list[str]:
    """Return the settings that `key=value,value` stands for; commas in brackets do not count.

    >>> split_values("lr=0.1,0.2"), split_values("hidden=[8,8],[4]")
    (['lr=0.1', 'lr=0.2'], ['hidden=[8,8]', 'hidden=[4]'])
    """
    key, equals, values = text.partition("=")
    if not equals or not key:
        raise UserError(f'--set takes key=value,value, got "{text}"')
    parts = [""]
    depth = 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if not all(part.strip() for part in parts):
        raise UserError(f'--set takes values between commas, got "{text}"')
    return [f"{key}={part.strip()}" for part in dict.fromkeys(parts)]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds that numbers and ranges stand for.

    >>> parse_seeds("0-2,7")
    (0, 1, 2, 7)
    """
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise UserError(f'--seeds takes numbers and ranges, such as 0-4 or 100,101, got "{text}"')
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(seeds))
