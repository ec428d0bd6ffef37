"""Runs a bench by name and writes what it measured, with the machine and the commit beside it."""

import inspect
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unalike.base.errors import UserError, unknown_name
from unalike.benches import Study
from unalike.cli.lists import bench, bench_names


def run(name: str, out: Path, seeds: str | None, **options: Any) -> None:
    if name not in bench_names():
        raise UserError(unknown_name("bench", name, bench_names()))
    study = Study(seeds=numbers(seeds) if seeds else None, **options)
    made = bench(name).run
    whole_runs = "study" in inspect.signature(made).parameters
    given = [
        key
        for key in ("seeds", "jobs", "device", "settings", "only", "keep")
        if getattr(study, key) != getattr(Study, key)
    ]
    if given and not whole_runs:
        raise UserError(
            f"bench {name} makes no runs of a scenario, so it takes no {', '.join(given)}"
        )
    import torch

    from unalike.runs.run_folder import commit

    begun = time.time()
    measured = made(study) if whole_runs else made(study.quick)
    how = (
        {"jobs": study.jobs, "device": study.device, "settings": list(study.settings)}
        if whole_runs
        else {}
    )
    told = {
        "bench": name,
        "quick": study.quick,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "seconds": round(time.time() - begun, 1),
        "machine": f"{os.cpu_count()} cores, {torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()}",
        "torch": torch.__version__,
        **how,
        **measured,
    }
    out.mkdir(parents=True, exist_ok=True)
    part = "".join(
        f"-{re.sub('[^a-z0-9]+', '-', word.lower())}" for word in study.only
    )  # some rows never pass for all
    path = out / f"{name}{part}{'-quick' if study.quick else ''}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    if "curves" in told:
        draw(told["curves"], path.with_suffix(".svg"))
    show(told)
    Console().print(f"written to {path}", highlight=False)


def show(told: dict) -> None:
    """The rows of a study as a table, lying on its side where it would be too wide; what else was measured as it is."""
    rows = told.get("rows")
    if not isinstance(rows, dict) or not rows:  # a bench may count rows of its own
        Console().print_json(json.dumps(told))
        return
    Console().print_json(json.dumps({key: value for key, value in told.items() if key != "rows"}))
    names = [
        key
        for key, value in next(iter(rows.values())).items()
        if not isinstance(value, dict) and not key.endswith("_spread")
    ]
    cells = [["", *(key.replace("_", " ") for key in names)]]
    for name, row in rows.items():
        spreads = {
            key: f" ±{row[f'{key}_spread']:.1f}" if row.get(f"{key}_spread") is not None else ""
            for key in names
        }
        cells.append(
            [
                name,
                *(
                    f"{row[key]:.4g}{spreads[key]}" if row.get(key) is not None else ""
                    for key in names
                ),
            ]
        )
    if len(names) > 9:
        cells = [list(column) for column in zip(*cells, strict=True)]
    table = Table(*cells[0], box=None, padding=(0, 1, 0, 0))
    for line in cells[1:]:
        table.add_row(*line)
    Console().print(table)


def draw(curves: dict, path: Path) -> None:
    """A line for each of `lines`, {what is across: what is up}, as an SVG beside the JSON."""
    from unalike.report.mpl import CLIENTS, COLOURS, figure

    drawn, ((axis,),) = figure(4.0)
    drawn.set_facecolor("white")
    for i, (name, line) in enumerate(curves["lines"].items()):
        axis.plot(
            [float(at) for at in line],
            list(line.values()),
            "o-" if i < len(CLIENTS) else "o--",
            markersize=3,
            label=name,
            color=COLOURS[CLIENTS[i % len(CLIENTS)]][0],
        )
    axis.set_xlabel(curves["across"])
    axis.set_ylabel(curves["up"])
    axis.legend(frameon=False, fontsize=8)
    drawn.savefig(path, format="svg", metadata={"Date": None})


def numbers(text: str) -> tuple[int, ...]:
    """
    >>> numbers("0-2,7")
    (0, 1, 2, 7)
    """
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise UserError(f'--seeds takes numbers and ranges, such as 0-4 or 100,101, got "{text}"')
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return tuple(seed for part in ends for seed in range(part[0], part[-1] + 1))
