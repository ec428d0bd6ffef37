"""FedMuscle on `muscle-multimodal`, where clients see, mark pixels or read: gains over training alone (the paper's Table 2), and M = 9."""

from unalike.benches import Study
from unalike.benches.muscle_vision import scenario, table

FREE = "safeguard=false"
ROWS: dict[str, list[str]] = {
    "as shipped": [],  # M=3, and who shares its head with nobody may stay alone
    "muscle, M=3": [FREE],
    "pairwise, M=3": [FREE, "algorithm.loss=pairwise"],
    "own heads, M=3": [FREE, "algorithm.heads=own"],
    "muscle, M=9": [
        FREE,
        "algorithm.peers=9",
    ],  # of 32^9 combinations 64 are drawn for each row and batch
}


def run(study: Study) -> dict:
    return table(
        study,
        {name: (scenario(study, "muscle-multimodal"), settings) for name, settings in ROWS.items()},
    ) | {"delta_bar": 0.0}
