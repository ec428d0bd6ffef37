"""FedMuscle where clients of one task have unlike labels, with 4, 8 and 12 clients (the paper's Table 4)."""

import json

from unalike.benches import Study
from unalike.benches.muscle_vision import curves, scenario, table
from unalike.scenarios import raw


def run(study: Study) -> dict:
    """Whoever is left out, the others hold the same rows and begin alike, so that clients alone are those of the whole federation."""
    which, counts = scenario(study, "muscle-noniid"), (6, 5, 4) if study.quick else (12, 8, 4)
    everyone = raw(which)["clients"]
    some = {count: [f"clients={json.dumps(everyone[:count])}"] for count in counts}
    rows = {f"heads shared, N={count}": (which, settings) for count, settings in some.items()}
    rows |= {
        f"as printed, N={count}": (which, [*settings, "algorithm={name: fedmuscle}"])
        for count, settings in some.items()
    }
    lines = {
        how: {count: f"{how}, N={count}" for count in counts}
        for how in ("heads shared", "as printed")
    }
    return curves(table(study, rows), "clients", lines)
