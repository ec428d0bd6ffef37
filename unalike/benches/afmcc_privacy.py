"""What privacy costs: AFMCC's accuracy against epsilon (the paper's Figure 5c), noise solved for the uploads of the run."""

from unalike.benches import Study
from unalike.benches.afmcc import scenario, table
from unalike.core.privacy import noise_for
from unalike.scenarios import load

EPSILONS = (5, 10, 20, 40, 80)
BOUNDS = (0.01, 0.1, 1.0)  # an undisturbed visit moves a model by about 1
DELTA = 1e-5


def run(study: Study) -> dict:
    """BDGP, F/S 1:1, all models counting the same. Beside each bound and epsilon: nothing protected, and the first weights untrained."""
    name = scenario(study)
    sent = load(name)[0].training.rounds + 1  # by the client that also pretrains
    private = lambda noise, bound: [
        f"privacy.noise={noise}",
        f"privacy.bound={bound}",
        f"privacy.delta={DELTA}",
    ]
    rows = {"without": [], "first weights": private(0, 1e-12)}
    for epsilon in EPSILONS:
        noise = noise_for(epsilon, sent, DELTA)
        rows |= {f"epsilon {epsilon}, bound {bound:g}": private(noise, bound) for bound in BOUNDS}
    made = table(
        study, {row: (name, ["weights=uniform", *settings]) for row, settings in rows.items()}
    )
    return made | {"releases": sent, "delta": DELTA}
