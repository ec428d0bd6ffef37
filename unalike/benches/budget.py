"""How much of the gain is a head start: Delta on `digits` when everybody, alone and together, trains longer on its labels."""

from statistics import mean

from unalike.benches import Study

BUDGETS = {
    "20 rounds x 1 epoch": (20, 1),
    "20 x 2": (20, 2),
    "20 x 5": (20, 5),
    "30 x 5": (30, 5),
    "20 x 10": (20, 10),
}


def run(study: Study) -> dict:
    """Mean over seeds of Delta and of the values alone and together, and the worst gain of all."""
    rows = {
        name: ("digits", ["evaluations=1", f"rounds={rounds}", f"epochs={epochs}"])
        for name, (rounds, epochs) in BUDGETS.items()
    }
    told = {}
    for name, runs in study.runs(rows, seeds=range(3)).items():
        results = [run.results or {} for run in runs]
        every = [c for run in runs for c in run.clients.values()]
        told[name] = {
            "delta": mean(r["delta"] for r in results),
            "worst_gain": min(c["gain"] for c in every),
            "losers": sum(r["losers"] for r in results),
            "alone": mean(c["alone"] for c in every),
            "together": mean(c["value"] for c in every),
        }
    return {"by_budget": told}
