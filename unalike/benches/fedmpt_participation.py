"""FedMPT and its rivals where 10 to 90 % of the clients take part in a round (the paper's Figure 6b)."""

from unalike.benches import Study
from unalike.benches.fedmpt import swept

SHARES = (10, 30, 50, 70, 90)


def run(study: Study) -> dict:
    """A row for each method and share, and curves of mAP."""
    return swept(
        study,
        "clients in a round, %",
        {share: [f"federation.participation={share / 100}"] for share in SHARES},
    )
