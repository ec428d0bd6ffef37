"""Local epochs, rounds and passes of FedMuscle at equal local work, 150 epochs (the paper's Table 8)."""

from unalike.benches import Study
from unalike.benches.muscle_vision import curves, scenario, table

ROUNDS, PASSES = (1, 10, 25), (1, 3, 5)


def run(study: Study) -> dict:
    """Clients alone do the same 150 epochs whatever the rounds, so that one row's clients alone serve all."""
    settings = {
        f"R={rounds}, T={passes}": [
            f"rounds={rounds}",
            f"epochs={150 // rounds}",
            f"passes={passes}",
        ]
        for rounds in reversed(ROUNDS)
        for passes in PASSES
    }
    told = table(study, {name: (scenario(study), each) for name, each in settings.items()})
    return curves(
        told,
        "R",
        {
            f"T={passes}": {rounds: f"R={rounds}, T={passes}" for rounds in ROUNDS}
            for passes in PASSES
        },
    )
