"""AFMCC with fewer samples for each client, and with fewer and more clients: the paper's Figure 5."""

from unalike.benches import Study
from unalike.benches.afmcc import scenario, table

SAMPLES, CLIENTS = (25, 50, 100, 150, 200), (4, 8, 12, 16, 24, 32, 48, 64)


def run(study: Study) -> dict:
    """BDGP, F/S 1:1, 2500 samples: 12 clients with so many samples each, or all samples dealt to so many clients."""
    samples = {
        f"{count} samples": (scenario(study), [f"clients.0.train={count}"]) for count in SAMPLES
    }
    return table(
        study,
        samples
        | {
            f"{count} clients": (scenario(study), [f"clients.0.count={count}"]) for count in CLIENTS
        },
    )
