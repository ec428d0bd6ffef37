"""SubFLOT among 50 and 100 clients of which a tenth takes part in a round, against methods that send submodels."""

from unalike.benches import Study
from unalike.benches.subflot import GROUPS, METHODS, SMALL, scenario, table

CLIENTS = (50, 100)
SHOWN = (
    "subflot",
    "heterofl",
    "heterofl, unmasked",
    "fedrolex",
    "feddropout",
    "fedavg, full width",
)


def run(study: Study) -> dict:
    """As many clients of each width as can be."""
    counts = {
        n: [f"clients.{i}.count={n // len(GROUPS) + (i < n % len(GROUPS))}" for i in GROUPS]
        for n in CLIENTS
    }
    some = [] if study.quick else ["federation.participation=0.1"]
    return table(
        study,
        {
            f"{dataset} {n} clients {name}": (
                scenario(study, dataset),
                [*METHODS[name], *counts[n], *some],
            )
            for dataset in SMALL
            for n in CLIENTS
            for name in SHOWN
        },
    )
