"""How many peers FedMuscle's clients are drawn to, and what travels (the paper's Table 5; `bytes` tells of its own form, too)."""

from unalike.benches import Study
from unalike.benches.muscle_vision import curves, scenario, table

PEERS: dict[int, list[str]] = {
    3: [],
    1: [],
    2: [],
    4: [],
    5: ["algorithm.samples=64"],
}  # of 32^5 combinations 64 are drawn


def run(study: Study) -> dict:
    told = table(
        study,
        {f"M={m}": (scenario(study), [f"algorithm.peers={m}", *more]) for m, more in PEERS.items()},
    )
    return curves(told, "M", {"FedMuscle": {m: f"M={m}" for m in PEERS}})
