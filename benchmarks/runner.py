"""Runs a benchmark by name and writes what it measured, with the machine and the commit beside it."""

import hashlib
import inspect
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import load_benchmarks
from benchmarks.study import Study
from unalike.base.errors import Interrupted, UserError, unknown_name
from unalike.base.integrity import write_whole
from unalike.report.mpl import CLIENT_COLOURS, COLOURS, new_figure
from unalike.runs.environment import hash_of_the_code
from unalike.runs.run_folder import commit
from unalike.runs.sweep import parse_seeds

OPTIONS_OF_RUNS = ("seeds", "device", "settings", "only", "minutes")
BEAT = 20.0  # seconds after which a bench that makes no runs says that it goes on
BENCHMARKS = Path(__file__).parent
WIDEST = 9  # columns; wider tables are transposed


def run(
    name: str, out: Path, seeds: str | None, build: Callable[..., Study] = Study, **options: Any
) -> None:
    """Run the benchmark and write `out/NAME.json`, and an SVG where it has curves.

    Args:
        build: makes the study of `seeds` and `options`.
    Raises: UserError for an unknown name, or options that this benchmark has no use for.
    """
    benchmarks = load_benchmarks()
    if name not in benchmarks:
        raise UserError(unknown_name("bench", name, list(benchmarks)))
    study = build(seeds=parse_seeds(seeds) if seeds else None, **options)
    function = benchmarks[name]
    makes_runs = "study" in inspect.signature(function).parameters
    unused = [key for key in OPTIONS_OF_RUNS if getattr(study, key) != getattr(Study, key)]
    if unused and not makes_runs:
        raise UserError(
            f"bench {name} makes no runs of a scenario, so it takes no {', '.join(unused)}"
        )
    start = time.time()
    measured = function(study) if makes_runs else measure(name, function, study)
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    result: dict[str, Any] = {
        "bench": name,
        "quick": study.quick,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "seconds": round(time.time() - start, 1),
        "machine": f"{os.cpu_count()} cores, {processor}",
        "torch": torch.__version__,
    }
    if makes_runs:
        result["jobs"] = study.jobs
        result["device"] = study.device
        result["settings"] = list(study.settings)
        if study.minutes is not None:
            result |= {"minutes": study.minutes, "left_out": study.left_out}
    result |= measured
    out.mkdir(parents=True, exist_ok=True)
    # a file with some of the rows never has the name of the whole
    words = "".join("-" + re.sub("[^a-z0-9]+", "-", word.lower()) for word in study.only)
    path = out / f"{name}{words}{'-quick' if study.quick else ''}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if "curves" in result:
        draw(result["curves"], path.with_suffix(".svg"))
    show(result)
    Console().print(f"written to {path}", highlight=False)


def measure(name: str, function: Callable[[bool], dict], study: Study) -> dict:
    """Make or recall what a bench measures that makes no runs; it goes one after another.

    Raises: Interrupted on Ctrl-C.
    """
    kept = None
    if study.keep is not None:
        key = repr((hash_of_the_code(BENCHMARKS), hash_of_the_code(), name, study.quick))
        kept = Path(study.keep) / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if kept.is_file():
            return json.loads(kept.read_text())
    if study.jobs > 1:
        sys.stderr.write(f"{name} measures in one process: --jobs {study.jobs} changes nothing\n")
    ended = threading.Event()
    start = time.time()

    def beat() -> None:
        while not ended.wait(BEAT):
            sys.stderr.write(f"{name}: measuring for {time.time() - start:.0f} s\n")

    threading.Thread(target=beat, daemon=True).start()
    try:
        measured = function(study.quick)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped. {name} keeps nothing before its end.") from None
    finally:
        ended.set()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps(measured).encode())
    return measured


def show(result: dict) -> None:
    """Print rows as a table, transposed where it would be too wide, and the rest as JSON."""
    rows = result.get("rows")
    if not isinstance(rows, dict) or not rows:  # a benchmark may count rows of its own
        Console().print_json(json.dumps(result))
        return
    about = {key: value for key, value in result.items() if key != "rows"}
    Console().print_json(json.dumps(about))
    columns = [
        key
        for key, value in next(iter(rows.values())).items()
        if not isinstance(value, dict | list) and not key.endswith("_spread")
    ]
    cells = [["", *(key.replace("_", " ") for key in columns)]]
    for name, row in rows.items():
        cells.append([name, *(format_cell(row, key) for key in columns)])
    if len(columns) > WIDEST:
        cells = [list(column) for column in zip(*cells, strict=True)]
    table = Table(*cells[0], box=None, padding=(0, 1, 0, 0))
    for line in cells[1:]:
        table.add_row(*line)
    Console().print(table)


def format_cell(row: dict, key: str) -> str:
    """A value with its spread, where there is one.

    >>> format_cell({"acc": 93.21, "acc_spread": 0.52}, "acc"), format_cell({}, "acc")
    ('93.21 ±0.5', '')
    """
    if row.get(key) is None:
        return ""
    if isinstance(row[key], str):
        return str(row[key])
    spread = row.get(f"{key}_spread")
    return f"{row[key]:.4g}" + (f" ±{spread:.1f}" if spread is not None else "")


def draw(curves: dict, path: Path) -> None:
    """Plot `curves["lines"]`, {name: {x: y}}, as an SVG beside the JSON; `scale: log` on both axes."""
    plot, ((axis,),) = new_figure(4.0)
    plot.set_facecolor("white")
    for i, (name, line) in enumerate(curves["lines"].items()):
        axis.plot(
            [float(x) for x in line],
            list(line.values()),
            "o-" if i < len(CLIENT_COLOURS) else "o--",
            markersize=3,
            label=name,
            color=COLOURS[CLIENT_COLOURS[i % len(CLIENT_COLOURS)]][0],
        )
    if curves.get("scale") == "log":
        axis.set_xscale("log")
        axis.set_yscale("log")
    axis.set_xlabel(curves["across"])
    axis.set_ylabel(curves["up"])
    axis.legend(frameon=False, fontsize=8)
    plot.savefig(path, format="svg", metadata={"Date": None})
