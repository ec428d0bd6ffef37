"""Rows of the public set at a time in FedMuscle (the paper's Figure 5)."""

from unalike.benches import Study
from unalike.benches.muscle_vision import curves, scenario, table

BATCHES = (32, 8, 16, 64, 128)


def run(study: Study) -> dict:
    told = table(
        study, {f"B={batch}": (scenario(study), [f"algorithm.batch={batch}"]) for batch in BATCHES}
    )
    return curves(told, "B", {"FedMuscle": {batch: f"B={batch}" for batch in BATCHES}})
