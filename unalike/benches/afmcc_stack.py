"""How much faster AFMCC's alike clients train as one stacked program than one by one: 24 clients, the same visits."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from unalike.benches import Study
from unalike.benches.afmcc import scenario
from unalike.federation import Federation
from unalike.runs import prepare, quiet
from unalike.runs.folder import Folder
from unalike.scenarios import load


def run(study: Study) -> dict:
    """Seconds of the visits alone, with a first round of each left out of the count; nothing is measured or saved on the way."""
    rounds = 2 if study.quick else 6
    times = {stacked: seconds(study, rounds, stacked) for stacked in (True, False)}
    return {"clients": 9 if study.quick else 24, "rounds": rounds - 1, "seconds_stacked": times[True], "seconds_one_by_one": times[False],
            "times_faster": times[False] / times[True], "bar_times_faster": 8.0}


def seconds(study: Study, rounds: int, stacked: bool) -> float:
    made, algorithm = load(scenario(study, "mnist-usps"), settings=[f"rounds={rounds}", f"device={study.device}", *study.settings])
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(made, algorithm, Folder(Path(folder)), study.data_dir, quiet)
        threads = torch.get_num_threads()
        torch.set_num_threads(run.threads)
        engine = run.engine(run.folder.clients)
        host: Any = engine.host
        if not stacked:
            host.handle_all = lambda messages: {client: host.handle(client, message) for client, message in messages.items()}
        fed, moments = Federation(engine, run.training, run.terms, run.seed), []
        try:
            for number in algorithm.serve(fed):
                fed.finished = number
                moments.append(time.perf_counter())
            return moments[-1] - moments[0]
        finally:
            engine.close()
            torch.set_num_threads(threads)
