"""Runs a bench by name and writes what it measured, with the machine and the commit beside it."""

import json
import os
import platform
import time
from pathlib import Path

from rich.console import Console

from unalike.cli.lists import bench, bench_names
from unalike.errors import UserError, unknown


def run(name: str, quick: bool, out: Path) -> None:
    if name not in bench_names():
        raise UserError(unknown("bench", name, bench_names()))
    import torch

    from unalike.runs.folder import commit
    begun = time.time()
    measured = bench(name).run(quick)
    told = {"bench": name, "quick": quick, "date": time.strftime("%Y-%m-%d"), "commit": commit(), "seconds": round(time.time() - begun, 1),
            "machine": f"{os.cpu_count()} cores, {torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()}",
            "torch": torch.__version__, **measured}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}{'-quick' if quick else ''}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    Console().print_json(json.dumps(told))
    Console().print(f"written to {path}", highlight=False)
