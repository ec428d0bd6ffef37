"""FedMPT and its rivals where 10 to 90 % of the labels are not told (the paper's Table 2)."""

from unalike.benches import Study
from unalike.benches.fedmpt import swept

SHARES = (10, 30, 50, 70, 90)


def run(study: Study) -> dict:
    """A row for each method and share, curves of mAP, and the lead on PromptFL at the last."""
    told = swept(
        study,
        "labels that are not told, %",
        {share: [f"clients.0.masked={share / 100}"] for share in SHARES},
    )
    ours, theirs = (
        told["rows"].get(f"{method}, {SHARES[-1]} %") for method in ("fedmpt", "promptfl")
    )
    if ours and theirs:
        told |= {
            "mAP_lead_on_promptfl": round(ours["mAP"] - theirs["mAP"], 3),
            "mAP_lead_on_promptfl_bar": 5.0,
        }
    return told
