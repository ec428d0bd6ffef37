"""What the safeguard saves and costs: `digits` where taking part helps, and under two settings where it hurts."""

from statistics import mean

from unalike.benches import Study

SETTINGS = {
    "as shipped": [],
    "one optimizer for task and alignment": ["optimizers=one", "align_rate=null"],
    "rates three times too high": ["lr=0.003", "align_rate=0.01"],
}


def run(study: Study) -> dict:
    """Delta, number of losers and worst gain with and without, over all clients and seeds."""
    rows = {
        name: ("digits", ["evaluations=1", "safeguard=true", *settings])
        for name, settings in SETTINGS.items()
    }
    told: dict[str, dict] = {}
    for name, runs in study.runs(rows, seeds=range(3)).items():
        every = [c for run in runs for c in run.clients.values()]
        told[name] = {
            "clients_and_seeds": len(every),
            "kept_alone": sum(c["kept"] == "alone" for c in every),
        }
        for program, key in (("without", "gain"), ("with", "safeguarded_gain")):
            gains = [c[key] for c in every]
            told[name][program] = {
                "delta": mean(gains),
                "losers": sum(g < 0 for g in gains),
                "worst_gain": min(gains),
            }
    return {"by_setting": told}
