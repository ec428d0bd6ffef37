"""How a benchmark makes its runs: rows (a scenario with settings) times seeds, each run in a process of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from unalike.base.errors import Interrupted, UserError
from unalike.report import Run, read
from unalike.runs.environment import hash_of_the_code
from unalike.scenarios import load_mapping

Row = tuple[str, Sequence[str]]  # a scenario and its settings
BENCHMARKS: dict[str, Callable[..., dict]] = {}
ROOT = Path(__file__).parents[1]
PROCESSES: set[subprocess.Popen[str]] = set()  # runs that are going on


def benchmark(name: str) -> Callable[[Callable[..., dict]], Callable[..., dict]]:
    """Register a function as the benchmark of that name.

    A benchmark made of whole runs takes a `Study`, any other takes `quick`, a bool. Both return
    what is written to `results/NAME.json`. The first line of the docstring is its summary.
    """

    def register(function: Callable[..., dict]) -> Callable[..., dict]:
        BENCHMARKS[name] = function
        return function

    return register


class OutOfTime(Exception):
    """A run that was not finished in the time of its bench."""


@dataclass(frozen=True)
class Study:
    """Settings of a benchmark made of runs, each `unalike run SCENARIO ... --json`.

    Attributes:
        quick: two rows, one seed, small settings: to see that the benchmark works.
        seeds: instead of the benchmark's own.
        jobs: runs at a time.
        settings: `key=value` for every run, after the row's own.
        only: run rows whose name contains one of these words.
        keep: folder for finished runs; an interrupted benchmark goes on with them.
        minutes: what is not finished by then, or fails, is left out, as on a machine that is lent.
        left_out: such runs.
    """

    quick: bool = False
    seeds: tuple[int, ...] | None = None
    jobs: int = 1
    device: str = "cpu"
    data_dir: str | None = None
    settings: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    keep: str | None = None
    minutes: float | None = None
    left_out: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def runs(
        self,
        rows: Mapping[str, Row],
        quick: Sequence[str] = ("rounds=2",),
        seeds: Sequence[int] = range(5),
    ) -> dict[str, list[Run]]:
        """Run every row with every seed; `quick` are the settings of a quick benchmark.

        Returns: the runs of each row, in the order of the seeds; rows that were left out are not
            among them.
        Raises: UserError if `only` matches no row, or a run fails.
        """
        names = [name for name in rows if self.selects(name)]
        if not names:
            words = " or ".join(self.only)
            raise UserError(f"no row of this bench is called {words}; its rows: {', '.join(rows)}")
        seeds = self.seeds or seeds
        extra = list(self.settings)
        if self.quick:
            names, seeds, extra = names[:2], seeds[:1], [*quick, *extra]
        runs: dict[str, list[Run]] = {name: [] for name in names}
        with ThreadPoolExecutor(self.jobs) as pool:
            jobs = []
            submitted: dict[Any, Future[Run]] = {}  # rows with the same settings share their runs
            for name in names:
                scenario, settings = rows[name]
                for seed in seeds:
                    key = (scenario, *settings, seed)
                    if key not in submitted:
                        arguments = scenario, [*settings, *extra], seed
                        submitted[key] = pool.submit(self.once, *arguments)
                    jobs.append((name, seed, submitted[key]))
            finished = 0
            try:
                for count, (name, seed, job) in enumerate(jobs, 1):
                    run = self._finished(f"{name}, seed {seed}", job)
                    if run is None:
                        continue
                    finished += 1
                    runs[name].append(run)
                    seconds = (run.results or {})["seconds"]
                    sys.stderr.write(
                        f"{count} of {len(jobs)}: {name}, seed {seed}, {seconds:.1f} s\n"
                    )
            except KeyboardInterrupt:
                kept = (
                    f"{finished} of {len(jobs)} runs are in {self.keep}: the same command goes on"
                )
                if self.keep is None:
                    kept = f"{finished} of {len(jobs)} runs are lost: --keep FOLDER keeps them"
                raise Interrupted(f"stopped. {kept}.") from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(PROCESSES):  # of a bench that failed or was stopped
                    process.kill()
        return {name: finished for name, finished in runs.items() if finished}

    def _finished(self, name: str, job: "Future[Run]") -> Run | None:
        """The run, once it is over; None where it is left out."""
        try:
            return job.result()
        except (OutOfTime, UserError) as error:
            if self.minutes is None:
                raise
            self.left_out.append(name)
            sys.stderr.write(f"left out: {name}: {error}\n")
            return None

    def seconds_left(self) -> float | None:
        """How long a run may still take.

        Raises: OutOfTime if there is nothing left.
        """
        if self.minutes is None:
            return None
        left = self.started + 60 * self.minutes - time.monotonic()
        if left <= 0:
            raise OutOfTime(f"the {self.minutes:g} minutes are over")
        return left

    def selects(self, name: str) -> bool:
        """Whether `only` lets this row run."""
        return not self.only or any(word in name for word in self.only)

    def once(self, scenario: str, settings: Sequence[str], seed: int) -> Run:
        """One run, read from its folder; one kept by the same code and scenario is not made again."""
        folder_kept = None
        if self.keep:
            folder_kept = Path(self.keep) / self.run_key(scenario, settings, seed)
            if (folder_kept / "results.json").is_file():
                return read(folder_kept)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            command = [
                sys.executable,
                "-m",
                "unalike.cli",
                "run",
                scenario,
                "--json",
                "--no-report",
            ]
            command += ["--seed", str(seed), "--device", self.device, "--out", str(out)]
            if self.data_dir:
                command += ["--data-dir", self.data_dir]
            for setting in settings:
                command += ["--set", setting]
            try:
                returncode, stderr = run_process(command, self.seconds_left())
            except subprocess.TimeoutExpired:
                raise OutOfTime(f"stopped after {self.minutes:g} minutes") from None
            if returncode:
                error = stderr.strip().replace(folder, "...")[-2000:]
                raise UserError(
                    f"run {scenario} with {' '.join(settings) or 'no settings'}, "
                    f"seed {seed}, failed:\n{error}"
                )
            made_by = (read(out).results or {})["environments"][-1]["code"]
            if made_by != hash_of_the_code():
                raise UserError("the code was changed while this bench was running: start it again")
            if folder_kept is not None:
                shutil.rmtree(out / "checkpoints", ignore_errors=True)
                folder_kept.parent.mkdir(parents=True, exist_ok=True)
                partial = folder_kept.with_suffix(f".{os.getpid()}")
                shutil.copytree(out, partial)
                partial.replace(folder_kept)
            return read(out)

    def run_key(self, scenario: str, settings: Sequence[str], seed: int) -> str:
        """What a run is kept under: a hash of the code, the scenario as it reads, and the settings."""
        described = load_mapping(scenario)
        key = repr((hash_of_the_code(), described, tuple(settings), seed, self.device))
        return sha256(key.encode()).hexdigest()[:16]


def run_process(command: list[str], seconds: float | None = None) -> tuple[int, str]:
    """Run a command that ends with this bench; return its exit code and what it wrote to stderr.

    Raises: subprocess.TimeoutExpired if it took more than so many seconds; it is killed.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,  # Ctrl-C comes to us, and we end it
    )
    PROCESSES.add(process)
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    finally:
        PROCESSES.discard(process)
    return process.returncode, stderr


def environment() -> dict[str, str]:
    """The environment of a run: this checkout first on the path, one thread."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
    }


def averages(runs: Sequence[Run], figures: Callable[[Run], dict[str, float]]) -> dict[str, Any]:
    """Mean and standard deviation of each figure over the runs of a row.

    Returns: `{name, name_spread}` for each figure (the spread is None for one run), the mean
        `seconds` of a run, the first figure of each seed under `seeds`, and its `budget`.
    """
    measured = [figures(run) for run in runs]
    summary: dict[str, Any] = {}
    for name in measured[0]:
        values = [figure[name] for figure in measured]
        summary[name] = round(mean(values), 3)
        summary[f"{name}_spread"] = round(stdev(values), 3) if len(values) > 1 else None
    first = next(iter(measured[0]))
    summary["seconds"] = round(mean((run.results or {})["seconds"] for run in runs), 2)
    summary["seeds"] = {
        str(run.seed): round(figure[first], 3) for run, figure in zip(runs, measured, strict=True)
    }
    summary["budget"] = budget(runs[0])
    return summary


def budget(run: Run) -> dict[str, float]:
    """How much a client trains: `rows` (mean over clients), `steps` and `rate_x_steps`.

    Steps are those of a client with that many rows that takes part in every round, own epochs at
    the end included. `rate_x_steps` is the learning rate times steps, for SGD over 1 - momentum:
    how far a constant gradient would carry the weights.
    """
    results = run.results or {}
    start = next((event for event in run.events if event["event"] == "start"), {})
    samples = [client.get("samples", 0) for client in start.get("clients", {}).values()]
    training = run.config.get("training", {})
    if not sum(samples) or not {"epochs", "batch_size", "lr"} <= training.keys():
        return {}
    rows = mean(samples)
    algorithm = run.config.get("algorithm")
    own = algorithm.get("finetune", 0) if isinstance(algorithm, dict) else 0
    epochs = results["rounds"] * training["epochs"] + own
    steps = epochs * ceil(rows / training["batch_size"])
    momentum = training.get("momentum", 0.0) if training.get("optimizer") == "sgd" else 0.0
    return {
        "rows": round(rows, 1),
        "steps": steps,
        "rate_x_steps": round(training["lr"] * steps / (1 - momentum), 4),
    }


def megabytes(run: Run) -> float:
    """Traffic of a client and round, both ways, in MB."""
    results = run.results or {}
    total = results["bytes"]["up"] + results["bytes"]["down"]
    return total / results["rounds"] / len(run.clients) / 1e6
