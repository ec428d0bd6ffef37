"""FedMPT and its rivals with more and more clusters as clients: t = 10 to 100 % of the number of labels (the paper's Table 1)."""

from unalike.benches import Study
from unalike.benches.fedmpt import CLASSES, swept

SHARES = (10, 20, 40, 60, 80, 100)


def run(study: Study) -> dict:
    """A row for each method and share, curves of mAP, and what each method loses from the first share to the last."""
    told = swept(
        study,
        "clients, % of the number of labels",
        {t: [f"clients.0.count={t * CLASSES // 100}"] for t in SHARES},
    )
    first, last = str(SHARES[0]), str(SHARES[-1])
    return told | {
        "mAP_drop": {
            method: round(line[first] - line[last], 3)
            for method, line in told["curves"]["lines"].items()
            if first in line and last in line
        }
    }
