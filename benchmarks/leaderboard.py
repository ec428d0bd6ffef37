"""The leaderboard: every method that fits a setting, tuned alike, on the same clients and budget.

Settings are the scenario files of `leaderboard_settings`; what is tuned is in
`leaderboard_grid.yaml`. For each method and setting the learning rate is chosen first, then one
field of the method's own, by the mean over two seeds that are not reported. What is reported is the
last round of three other seeds.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from benchmarks.baselines import round_of
from benchmarks.leaderboard_page import write_page, write_tables
from benchmarks.leaderboard_tables import setting_table, summarize_ranks
from benchmarks.study import ROOT, OutOfTime, Study, benchmark
from unalike.algorithms import ALGORITHMS
from unalike.base.errors import UserError
from unalike.runs.api import create_folder, prepare
from unalike.scenarios import load
from unalike.scenarios import rows as scenario_rows

FOLDER = Path(__file__).parent / "leaderboard_settings"
GRID = yaml.safe_load((Path(__file__).parent / "leaderboard_grid.yaml").read_text())
SEEDS = (0, 1, 2)
QUICK = ("rounds=1", "epochs=1")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A method on a setting.

    Attributes:
        device, data_dir: as for `unalike run`.
        keep: folder of finished runs.
        extra: settings of every run.
        runs_missing: whether a run that is not kept is made; else it raises `NotMeasured`.
        deadline: no run starts after this time of `time.monotonic`; it raises `OutOfTime`.
    """

    setting: str
    method: str
    device: str
    data_dir: str | None
    keep: str
    extra: tuple[str, ...] = ()
    runs_missing: bool = True
    deadline: float | None = None

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.setting}.yaml"

    def run(self, settings: Sequence[str], seed: int) -> Figures:
        """A run's figures, measured or read; `problem` tells what does not fit, or failed."""
        return self._recall((tuple(settings), self.extra, seed), self._measure, settings, seed)

    def operations(self, settings: Sequence[str]) -> Figures:
        """Floating-point operations of a round, in millions: a client's mean, and the server's."""
        return self._recall((tuple(settings), self.extra, "operations"), self._count, settings)

    def _recall(self, what: tuple, measure: Callable[..., Figures], *given: Any) -> Figures:
        """What was kept under this name; else measure it, and keep it."""
        key = sha256(repr((self.file.read_text(), self.method, *what)).encode()).hexdigest()[:16]
        kept = kept_runs(self.keep)
        if key not in kept:
            if not self.runs_missing:
                raise NotMeasured(f"{self.setting}, {self.method}")
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise OutOfTime(f"{self.setting}, {self.method}")
            about = {"setting": self.setting, "method": self.method, "settings": list(given[0])}
            about |= {"seed": what[-1], "device": self.device}
            kept[key] = {"key": key, **about, **measure(*given)}
            with (Path(self.keep) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(kept[key]) + "\n")
        return kept[key]

    def _count(self, settings: Sequence[str]) -> Figures:
        settings = [f"algorithm={{name: {self.method}}}", *self.extra, *settings]
        try:
            found = round_of(str(self.file), settings, self.data_dir, self.device)
        except Exception as error:  # of one method; the others go on
            return {"problem": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
        clients = len(found) - 2  # beside "clients" and "server"
        return {"client": round(found["clients"] / clients, 3), "server": found["server"]}

    def _measure(self, settings: Sequence[str], seed: int) -> Figures:
        settings = [f"algorithm={{name: {self.method}}}", *self.extra, *settings]
        source = str(self.file)
        try:
            scenario, algorithm = load(source, settings=settings, seed=seed, device=self.device)
            execution = prepare(scenario, algorithm, None, self.data_dir, source)
        except UserError as error:
            reason = str(error).partition("\n")[2] or str(error)
            return {"problem": "misfit", "reason": " ".join(reason.split())[:300]}
        try:
            with tempfile.TemporaryDirectory() as folder:
                create_folder(execution, Path(folder) / "run", scenario.model_dump(mode="json"))
                results = execution.execute()
        except Exception as error:  # of one method; the others go on
            return {"problem": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
        values = {id: entry["value"] for id, entry in results["clients"].items()}
        if any(value is None for value in values.values()):
            return {"problem": "failed", "reason": "a client was not measured"}
        return {
            "values": values,
            "score": mean(values.values()),
            "seconds": results["seconds"],
            "megabytes": sum(results["bytes"].values()) / results["rounds"] / len(values) / 1e6,
            "works_alone": results.get("sharing") == {},
        }


class NotMeasured(Exception):
    """A run that is not kept, where none is to be made."""


@cache
def kept_runs(folder: str) -> dict[str, Figures]:
    """The finished runs in a folder, by key."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    runs = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        for text in path.read_text().splitlines():
            if text.endswith("}"):  # the last line of a process that was stopped may be cut
                line = json.loads(text)
                runs[line["key"]] = line
    return runs


def choose_and_report(cell: Cell, seeds: Sequence[int]) -> dict[str, Any]:
    """Choose the learning rate, then the method's own field, and run the reported seeds.

    Returns: `chosen` settings and `runs`; or why the method does not fit, as `misfit`.
    """
    torch.set_num_threads(1)
    cache_tables()
    search = GRID["search"].get(cell.setting, GRID["search"]["default"])
    base_lr = load(str(cell.file))[0].training.lr
    rates = [[f"training.lr={base_lr * rate:.6g}"] for rate in GRID["rates"]]
    first = cell.run(rates[0], search["seeds"][0])
    if first.get("problem") == "misfit":
        return {"misfit": first["reason"]}
    best = best_settings(cell, rates, search["seeds"])
    for field, values in GRID["own"].get(cell.method, {}).items():
        if search["own"]:
            others = [[*best, f"algorithm.{field}={json.dumps(value)}"] for value in values]
            best = best_settings(cell, [best, *others], search["seeds"])
    return {"chosen": best, "runs": [cell.run(best, seed) for seed in seeds]}


def operations_of(cell: Cell, found: Mapping[str, Any]) -> Figures:
    """Operations of a round with the chosen settings; empty where they are not counted."""
    try:
        return cell.operations(found["chosen"]) if "chosen" in found else {}
    except (NotMeasured, OutOfTime):
        return {}


def best_settings(cell: Cell, tried: Sequence[list[str]], seeds: Sequence[int]) -> list[str]:
    """The settings with the best mean score over these seeds, the first of equal ones."""
    return max(tried, key=lambda settings: mean_score([cell.run(settings, s) for s in seeds]))


def mean_score(runs: Sequence[Mapping[str, Any]]) -> float:
    """Mean score; that of a failed run is 0."""
    return mean(run.get("score", 0.0) for run in runs)


def cache_tables() -> None:
    """Read each dataset once in this process instead of once for every run."""
    if not hasattr(scenario_rows.load_dataset, "cache_info"):
        scenario_rows.load_dataset = cache(scenario_rows.load_dataset)  # type: ignore[assignment]


def cells_of(study: Study, keep: str) -> Iterator[Cell]:
    """The cells that `--only` selects, setting by setting in its order.

    The methods that everyone asks for come first.
    """
    settings = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    order = {name: 0 for name in GRID["first"]} | {name: 2 for name in GRID["last"]}
    methods = sorted(ALGORITHMS, key=lambda name: order.get(name, 1))
    some_settings = [name for name in study.only if name in settings] or settings
    some_methods = [name for name in methods if name in study.only] or methods
    extra = (*(QUICK if study.quick else ()), *study.settings)
    deadline = None if study.minutes is None else study.started + 60 * study.minutes
    for setting in some_settings:
        for method in some_methods:
            if skip_reason(setting, method) is None:
                yield Cell(
                    setting,
                    method,
                    study.device,
                    study.data_dir,
                    keep,
                    extra,
                    deadline=deadline,
                )


def skip_reason(setting: str, method: str) -> str | None:
    """Why a method that would fit a setting is not run on it; None: it is."""
    for entry in GRID["skip"]:
        if setting in entry["settings"] and method in entry["methods"]:
            return entry["reason"]
    return None


@benchmark("leaderboard")
def bench_leaderboard(study: Study) -> dict:
    """Every method that fits, on six settings, its learning rate and one field chosen on other seeds.

    `--only NAME` selects settings or methods, `--keep FOLDER` goes on with finished runs.
    """
    seeds = study.seeds or (SEEDS[:1] if study.quick else SEEDS)
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cells = list(cells_of(study, study.keep or folder))
        context = get_context("spawn")  # CUDA does not survive a fork
        with ProcessPoolExecutor(study.jobs, mp_context=context) as pool:
            futures = {pool.submit(choose_and_report, cell, seeds): cell for cell in cells}
            done = list(finished(study, futures))
            # last, since nobody is ranked by operations
            counts = [pool.submit(operations_of, cell, found) for cell, found in done]
            for (cell, found), count in zip(done, counts, strict=True):
                found["operations"] = count.result()
                measured.setdefault(cell.setting, {})[cell.method] = found
    return tables_of(measured)


def finished(
    study: Study, futures: Mapping["Future[Figures]", Cell]
) -> Iterator[tuple[Cell, Figures]]:
    """What is found of each cell, as it comes; `study.left_out` names those that time was short for.

    When the study's minutes are over no run starts, and those that go on come to their end: on a
    GPU that processes share, one that is killed may spoil the others.
    """
    for count, future in enumerate(as_completed(futures), 1):
        cell = futures[future]
        name = f"{cell.setting}, {cell.method}"
        try:
            found = future.result()
        except OutOfTime:
            study.left_out.append(name)
            continue
        outcome = found.get("misfit") or f"{mean_score(found['runs']):.2f}"
        sys.stderr.write(f"{count} of {len(futures)}: {name}: {outcome}\n")
        yield cell, found


@benchmark("leaderboard-tables")
def bench_leaderboard_tables(study: Study) -> dict:
    """The leaderboard of the runs that `--keep FOLDER` holds, without making any; writes docs/leaderboard.html and .md.

    Methods of which a run is missing are named under `missing`.
    """
    if not study.keep:
        raise UserError("bench leaderboard-tables reads finished runs: --keep FOLDER")
    measured: dict[str, dict[str, Any]] = {}
    missing: dict[str, list[str]] = {}
    for cell in cells_of(study, study.keep):
        try:
            found = choose_and_report(replace(cell, runs_missing=False), study.seeds or SEEDS)
            found["operations"] = operations_of(replace(cell, runs_missing=False), found)
            measured.setdefault(cell.setting, {})[cell.method] = found
        except NotMeasured:
            missing.setdefault(cell.setting, []).append(cell.method)
    missing = {setting: missing.get(setting, []) for setting in measured}
    result = tables_of(measured) | {"missing": missing}
    write_page(result, ROOT / "docs" / "leaderboard.html")
    write_tables(result, ROOT / "docs" / "leaderboard.md")
    return result


def tables_of(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A table for each setting, and mean ranks over settings."""
    settings = {name: setting_table(measured[name]) for name in sorted(measured)}
    return {"settings": settings, "ranks": summarize_ranks(settings)}
