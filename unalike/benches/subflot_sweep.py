"""SubFLOT by its settings, one at a time: alpha, lambda, and one pruning rate for everybody; the paper's Figures 4 and 5."""

from unalike.benches import Study
from unalike.benches.subflot import GROUPS, SMALL, scenario, table

ALPHAS, PENALTIES, RATES = (
    (0.0, 0.25, 0.5, 0.75, 1.0),
    (0.0, 0.001, 0.01, 0.1, 1.0),
    (0.0, 0.25, 0.5, 0.75),
)


def run(study: Study) -> dict:
    """CIFAR-10 and AG News; by rate also HeteroFL."""
    rows = {f"alpha {value:g}": [f"alpha={value}"] for value in ALPHAS}
    rows |= {f"lambda {value:g}": [f"penalty={value}"] for value in PENALTIES}
    for rate in RATES:
        narrow = [f"clients.{i}.capacity={1 - rate}" for i in GROUPS]
        rows |= {
            f"rate {rate:g}": narrow,
            f"rate {rate:g} heterofl": ["algorithm={name: heterofl, masked: false}", *narrow],
        }
    return table(
        study,
        {
            f"{dataset} {name}": (scenario(study, dataset), settings)
            for dataset in SMALL
            for name, settings in rows.items()
        },
    )
