"""AFMCC without its parts: the contrast (A), the constraint (B), the client's own weights (C); the paper's Table 3b."""

from unalike.benches import Study
from unalike.benches.afmcc import scenario, table

WITHOUT = {
    "all parts": [],
    "without A": ["alpha=0"],
    "without B": ["beta=0"],
    "without C": ["weights=uniform"],
}
PAPER = {"all parts": 93.9, "without A": 55.5, "without B": 93.0, "without C": 83.4}


def run(study: Study) -> dict:
    """BDGP, F/S 1:1."""
    return table(
        study, {name: (scenario(study), settings) for name, settings in WITHOUT.items()}, PAPER
    )
