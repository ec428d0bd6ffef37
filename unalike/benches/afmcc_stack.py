"""How much faster AFMCC's alike clients train as one stacked program than one by one: 24 clients, the same visits."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from unalike.algorithms import afmcc
from unalike.benches import Study
from unalike.benches.afmcc import scenario
from unalike.core.federation import Federation
from unalike.runs import prepare
from unalike.runs.run_folder import Folder
from unalike.scenarios import load


def run(study: Study) -> dict:
    """Seconds of a round of visits, the first two left out: there steps are seen for the first time and, on a GPU, recorded. One by one is
    a client after the other without recordings. Nothing is measured or saved on the way."""
    rounds = 3 if study.quick else 8
    times = {
        how: seconds(study, rounds, how)
        for how in ("stacked and recorded", "stacked", "one by one")
    }
    return {
        "clients": 9 if study.quick else 24,
        "rounds": rounds - 2,
        "seconds_a_round": times,
        "times_faster": times["one by one"] / times["stacked and recorded"],
        "bar_times_faster": 8.0,
    }


def seconds(study: Study, rounds: int, how: str) -> float:
    made, algorithm = load(
        scenario(study, "mnist-usps"),
        settings=[f"rounds={rounds}", f"device={study.device}", *study.settings],
    )
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(made, algorithm, Folder(Path(folder)), study.data_dir, made.name)
        threads, records = torch.get_num_threads(), afmcc.RECORDS
        torch.set_num_threads(run.threads)
        engine: Any = run.engine(run.folder.clients)
        host = engine.host
        if how == "one by one":
            host.handle_all = lambda messages: {
                client: host.handle(client, message) for client, message in messages.items()
            }
        fed, moments = Federation(engine, run.training, run.federation, run.seed), []
        try:
            afmcc.RECORDS = records if "recorded" in how else 0
            for number in algorithm.serve(fed):
                fed.finished = number
                moments.append(time.perf_counter())
            return (moments[-1] - moments[1]) / (rounds - 2)
        finally:
            engine.close()
            afmcc.RECORDS = records
            torch.set_num_threads(threads)
