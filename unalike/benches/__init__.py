"""Measurements of the package itself, a module each, with `run(quick)`, or `run(study)` where it is made of whole runs.

Either returns a dict that the caller writes down. A study knows scenarios and settings, nothing of what is measured in them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from unalike.base.errors import UserError
from unalike.report import Run, read

Row = tuple[str, Sequence[str]]  # a scenario and settings


@dataclass(frozen=True)
class Study:
    """How a bench makes its runs. Each is `unalike run SCENARIO ... --json` in a process of its own, `jobs` of them at a time."""

    quick: bool = False
    seeds: tuple[int, ...] | None = None
    jobs: int = 1
    device: str = "cpu"
    data_dir: str | None = None
    settings: tuple[str, ...] = ()  # for every run, after its own
    only: tuple[str, ...] = ()  # rows with any of these words in their name
    keep: str | None = (
        None  # a folder where finished runs stay: a bench that was cut off goes on with them
    )

    def runs(
        self,
        rows: Mapping[str, Row],
        quick: Sequence[str] = ("rounds=2",),
        seeds: Sequence[int] = range(5),
    ) -> dict[str, list[Run]]:
        """The runs of each row, one a seed; if quick, two rows with these settings and one seed."""
        chosen = {
            name: row
            for name, row in rows.items()
            if not self.only or any(word in name for word in self.only)
        }
        if not chosen:
            raise UserError(
                f"no row of this bench is called {' or '.join(self.only)}; its rows: {', '.join(rows)}"
            )
        wanted = [
            (name, scenario, [*settings, *(quick if self.quick else ()), *self.settings], seed)
            for name, (scenario, settings) in list(chosen.items())[: 2 if self.quick else None]
            for seed in (self.seeds or seeds)[: 1 if self.quick else None]
        ]
        found: dict[str, list[Run]] = {name: [] for name, *_ in wanted}
        with ThreadPoolExecutor(self.jobs) as pool:
            jobs = [
                pool.submit(self.once, scenario, settings, seed)
                for _, scenario, settings, seed in wanted
            ]
            try:
                for done, ((name, _, _, seed), job) in enumerate(zip(wanted, jobs, strict=True), 1):
                    found[name].append(made := job.result())
                    sys.stderr.write(
                        f"{done} of {len(wanted)}: {name}, seed {seed}, {(made.results or {})['seconds']:.1f} s\n"
                    )
            finally:
                pool.shutdown(cancel_futures=True)
        return found

    def once(self, scenario: str, settings: Sequence[str], seed: int) -> Run:
        """One run, as its folder tells it; if it was kept by this very code, it is not made again."""
        from unalike.runs.run_folder import commit

        kept = (
            Path(self.keep)
            / sha256(
                repr((commit(), scenario, tuple(settings), seed, self.device)).encode()
            ).hexdigest()[:16]
            if (self.keep)
            else None
        )
        if kept is not None and (kept / "results.json").is_file():
            return read(kept)
        root = str(Path(__file__).parents[2])
        around = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
        }
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "unalike.cli",
                "run",
                scenario,
                "--json",
                "--seed",
                str(seed),
                "--device",
                self.device,
                "--out",
                f"{folder}/run",
                *(["--data-dir", self.data_dir] if self.data_dir else []),
                *(word for setting in settings for word in ("--set", setting)),
            ]
            done = subprocess.run(command, capture_output=True, text=True, env=around)
            if done.returncode:
                told = done.stderr.strip().replace(folder, "...")[-2000:]
                raise UserError(
                    f"{' '.join(command[3:5])} with {' '.join(settings) or 'no settings'}, seed {seed}, failed:\n{told}"
                )
            if kept is not None:
                shutil.rmtree(f"{folder}/run/checkpoints", ignore_errors=True)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(f"{folder}/run", (partial := kept.with_suffix(f".{os.getpid()}")))
                partial.replace(kept)
            return read(f"{folder}/run")


def averages(runs: Sequence[Run], figures: Callable[[Run], dict[str, float]]) -> dict[str, Any]:
    """Mean and spread (standard deviation, from two runs on) of each figure, the seconds of a run, and the first figure of each seed."""
    each = [figures(run) for run in runs]
    told: dict[str, Any] = {}
    for name in each[0]:
        values = [its[name] for its in each]
        told |= {
            name: round(mean(values), 3),
            f"{name}_spread": round(stdev(values), 3) if len(values) > 1 else None,
        }
    first = next(iter(each[0]))
    return told | {
        "seconds": round(mean((run.results or {})["seconds"] for run in runs), 2),
        "seeds": {str(run.seed): round(its[first], 3) for run, its in zip(runs, each, strict=True)},
    }
