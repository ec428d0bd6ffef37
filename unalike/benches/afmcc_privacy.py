"""What privacy costs: AFMCC's accuracy against epsilon (Figure 5c) on BDGP, noise solved for the uploads of the run; quick: on digits."""

import tempfile
from pathlib import Path

import torch

from unalike.privacy import noise_for
from unalike.runs import run_scenario
from unalike.scenarios import load

EPSILONS = (5, 10, 20, 40, 80)
BOUNDS = (0.01, 0.1, 1.0)      # an undisturbed visit moves a model by about 1
DELTA = 1e-5


def run(quick: bool = False) -> dict:
    """ACC by FMCSC's protocol, mean over seeds, for each bound; beside it what is reached without privacy, and with the first weights."""
    name, seeds = ("afmcc-digits", [0]) if quick else ("afmcc-bdgp", [0, 1, 2])
    epsilons, bounds, more = (EPSILONS[::2], BOUNDS[:1], ["rounds=3", "starts=5"]) if quick else (EPSILONS, BOUNDS, [])

    def acc(*settings: str) -> dict:
        told = [once(name, [*more, *settings], seed) for seed in seeds]
        return {"acc": sum(r["metrics"]["acc"] for r in told) / len(told), "each": [r["metrics"]["acc"] for r in told],
                **({"epsilon": told[0]["privacy"]["epsilon"]} if "privacy" in told[0] else {})}

    scenario, _ = load(name, settings=more)
    sent = scenario.training.rounds + 1         # by the client that also pretrains
    by_bound = {str(bound): {str(epsilon): {"noise": (noise := noise_for(epsilon, sent, DELTA)),
                                            **acc(f"privacy.noise={noise}", f"privacy.bound={bound}", f"privacy.delta={DELTA}")}
                             for epsilon in epsilons} for bound in bounds}
    return {"scenario": name, "releases": sent, "delta": DELTA, "without": acc(),
            "first_weights": acc("privacy.noise=0", "privacy.bound=1.0e-12"), "by_bound": by_bound}


def once(name: str, settings: list[str], seed: int) -> dict:
    scenario, algorithm = load(name, settings=["weights=uniform", "evaluations=1", *settings], seed=seed, alone=False,
                               device="cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        return run_scenario(scenario, algorithm, out=Path(folder) / "run")[0]
