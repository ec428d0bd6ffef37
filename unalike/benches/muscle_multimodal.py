"""FedMuscle on `muscle-multimodal`, where clients see, mark pixels or read: gains over training alone (the paper's Table 2), and M = 9."""

from unalike.benches import Study
from unalike.benches.muscle_vision import scenario, table

ROWS: dict[str, list[str]] = {
    "muscle, M=3": [], "pairwise, M=3": ["algorithm.loss=pairwise"],
    "own heads, M=3": ["algorithm.heads=own"],
    "guarded": ["safeguard=true"],                      # who shares its head with nobody may stay alone
    "muscle, M=9": ["algorithm.peers=9"],               # of 32^9 combinations 64 are drawn for each row and batch
}


def run(study: Study) -> dict:
    return table(study, {name: (scenario(study, "muscle-multimodal"), settings) for name, settings in ROWS.items()}) | {"delta_bar": 0.0}
