"""What can be known of a gain before any training: nearness of the public set against measured gains."""

import json
from math import log10
from statistics import mean

import torch

from benchmarks.study import ROOT, Study, benchmark
from unalike.runs.prospects import CLOSEST, features_of, kernel_cosine, mean_alignment
from unalike.scenarios import build_clients, load

# Public set: its settings, and the row and file of `results/` with the gains of `muscle-vision`'s
# clients: heads averaged once a round, align_lr 0.0003, before the shared start of projections.
MEASURED = {
    "VOC": (["public.size=4000"], "muscle-public", "VOC, |D|=4000"),
    "Flickr8k": (
        ["public.data=flickr8k", "public.size=5000"],
        "muscle-public",
        "|D|=5000, T=1",
    ),
    "Caltech-101": (
        ["public.data=caltech101", "public.size=4000"],
        "muscle-public",
        "Caltech-101, |D|=4000",
    ),
    "VOC and Caltech-101": (
        ["public.data=[voc2012, caltech101]", "public.size=8000"],
        "muscle-map-4000-of-voc",
        "4000 of VOC, 4000 of Caltech-101",
    ),
    "images of a program": (
        ["public.data=generated", "public.size=5000"],
        "muscle-map-of-a-program",
        "public images of a program",
    ),
}


@benchmark("muscle-prospects")
def bench_muscle_prospects(study: Study) -> dict:
    """How far nearness and fit, measured before any training, tell the gains of `muscle-vision`.

    Of each public set and client: both figures and the gain that was measured. `line` is gain by
    -log10(1 - nearness), with its error for public sets that it was not made from, beside that of
    the mean gain of the others.
    """
    rows: dict[str, dict] = {}
    points = []
    for name, (settings, file, row) in MEASURED.items():
        gains = json.loads((ROOT / "results" / f"{file}.json").read_text())["rows"][row]["gains"]
        scenario, _ = load("muscle-vision", settings=settings, seed=0, device=study.device)
        clients = build_clients(scenario, study.data_dir)
        kernels, near = {}, {}
        for client in clients:
            own, public = features_of(client, client.encoder(0), 0)
            kernels[client.id] = public @ public.mT
            near[client.id] = kernel_cosine(own, public)
        for client in clients:
            rows[f"{name}, {client.id}"] = {
                "nearness": round(near[client.id], 4),
                "fit": round(mean_alignment(client.id, kernels) or 0.0, 3),
                "gain": gains[client.id],
            }
            points.append((name, near[client.id], gains[client.id]))
    return {"rows": rows, "line": fit_line(points)}


def fit_line(points: list[tuple[str, float, float]]) -> dict[str, float]:
    """Line of gain by -log10(1 - nearness) through points (public set, nearness, gain)."""
    sets = [name for name, _, _ in points]
    x = [-log10(max(1 - near, CLOSEST)) for _, near, _ in points]
    y = torch.tensor([gain for _, _, gain in points], dtype=torch.float64)
    inputs = torch.stack([torch.ones_like(y), torch.tensor(x, dtype=torch.float64)], 1)
    intercept, slope = torch.linalg.lstsq(inputs, y).solution.tolist()
    squares, of_mean = [], []
    for left_out in dict.fromkeys(sets):
        kept = torch.tensor([name != left_out for name in sets])
        weights = torch.linalg.lstsq(inputs[kept], y[kept]).solution
        squares += (inputs[~kept] @ weights - y[~kept]).square().tolist()
        of_mean += (y[kept].mean() - y[~kept]).square().tolist()
    correlation = torch.corrcoef(torch.stack([inputs[:, 1], y]))[0, 1]
    return {
        "intercept": round(intercept, 2),
        "slope": round(slope, 2),
        "error": round(mean(squares) ** 0.5, 2),
        "error_of_the_mean": round(mean(of_mean) ** 0.5, 2),
        "correlation": round(float(correlation), 2),
    }
