"""FedMPT without condition prompts, adapters, transport or gate (the paper's Table 4)."""

from unalike.benches import Study
from unalike.benches.fedmpt import table

PARTS = ("prompts", "adapters", "transport", "gate")
KEPT = {  # as in the table, and the paper's mAP on VOC 2007 with CLIP
    ("prompts",): 87.08,
    ("adapters",): 84.40,
    ("prompts", "adapters"): 87.62,
    ("prompts", "transport"): 89.35,
    ("prompts", "adapters", "transport"): 89.64,
    ("prompts", "adapters", "gate"): 87.89,
    PARTS: 90.10,
}


def run(study: Study) -> dict:
    """A row for each set of parts that are kept."""
    told = table(
        study,
        {
            f"fedmpt, {' '.join(kept)}": [
                f"algorithm.{part}=false" for part in PARTS if part not in kept
            ]
            for kept in KEPT
        },
    )
    for kept, paper in KEPT.items():
        if row := told["rows"].get(f"fedmpt, {' '.join(kept)}"):
            row["paper"] = paper
    return told
