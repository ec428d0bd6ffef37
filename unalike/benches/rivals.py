"""FedMuscle against its rivals on `digits`: the same clients, first weights, labelled rows, public set and local epochs, three seeds.

Each rival's rate or weight is the best of several on other seeds (`rivals-rates`); fields that are not said are the methods' defaults.
"""

from unalike.benches import Row, Study, averages
from unalike.benches.muscle_vision import megabytes
from unalike.report import Run

METHODS: dict[str, str] = {
    "fedmuscle": "{name: fedmuscle, width: 32, align_rate: 0.003}",
    "fedmuscle, pairwise": "{name: fedmuscle, width: 32, align_rate: 0.003, loss: pairwise}",
    "fedmuscle, gramian": "{name: fedmuscle, width: 32, align_rate: 0.003, loss: gramian}",
    "fedmuscle, opinions": "{name: fedmuscle, width: 32, align_rate: 0.003, opinions: shared}",  # chosen on seeds 100 to 104 (LOG.md)
    "fedmuscle, no company": "{name: fedmuscle, width: 32, align_rate: 0.003, own: 3}",
    "sage": "{name: sage, flips: false, public_rate: 0.0003}",
    "fedhenn": "{name: fedhenn, eta: 0.1}",
    "cofed": "{name: cofed, public_rate: 0.0003}",
    "feddf": "{name: feddf, public_rate: 0.0003}",
    "fedrcl": "{name: fedrcl, weight: 0.03}",
    "simclr": "{name: simclr, flips: false, public_rate: 0.003}",
    "pseudolabel": "{name: pseudolabel, public_rate: 0.0001}",
}
PLAIN = ("evaluations=1", "checkpoint=1000")


def run(study: Study) -> dict:
    """Delta of each method with its losers, and what travels."""
    rows: dict[str, Row] = {
        name: ("digits", [*PLAIN, f"algorithm={told}"]) for name, told in METHODS.items()
    }
    made = {
        name: averages(runs, figures) for name, runs in study.runs(rows, seeds=range(3)).items()
    }
    ranked = sorted(made, key=lambda name: -made[name]["delta"])
    return {"rows": {name: made[name] for name in ranked}, "first": ranked[0]}


def figures(run: Run) -> dict[str, float]:
    """Mean gain in percent, how many lose, the worst gain, the mean value, and megabytes of a client and round both ways."""
    told, clients = run.results or {}, list(run.clients.values())
    gains = [c["gain"] for c in clients]
    return {
        "delta": told["delta"],
        "losers": sum(gain < 0 for gain in gains),
        "worst_gain": min(gains),
        "together": sum(c["value"] for c in clients) / len(clients),
        "alone": sum(c["alone"] for c in clients) / len(clients),
        "megabytes": megabytes(run),
    }
