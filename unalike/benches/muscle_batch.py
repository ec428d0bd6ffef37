"""Rows of the public set at a time in FedMuscle (the paper's Figure 5)."""

from unalike.benches import Study
from unalike.benches.muscle_vision import scenario, table


def run(study: Study) -> dict:
    return table(study, {f"B={batch}": (scenario(study), [f"algorithm.batch={batch}"]) for batch in (32, 8, 16, 64, 128)})
