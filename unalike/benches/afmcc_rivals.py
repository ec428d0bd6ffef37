"""AFMCC against FMCSC, an averaged autoencoder, everyone alone and everyone's rows together, by dataset and ratio of clients."""

from collections.abc import Sequence

from unalike.benches import Study
from unalike.benches.afmcc import mixed, scenario, table

DATASETS = (
    "bdgp 1:1",
    "mnist-usps 1:1",
    "multi-fashion 1:1",
    "multi-fashion 1:1:1",
    "multi-fashion 0:1:1",
)


def run(study: Study) -> dict:
    """FMCSC by its own budget (pretraining, then 5 rounds), the others by AFMCC's visits and steps."""
    rows = {}
    for name in DATASETS:
        dataset, ratio = name.split()
        for method, settings in methods(dataset).items():
            rows[f"{name} {method}"] = (scenario(study, dataset), [*mixed(ratio), *settings])
    return table(study, rows, quick=("rounds=2", "epochs=1", "checkpoint=1000"))


def methods(dataset: str) -> dict[str, Sequence[str]]:
    budget = ("rounds=5", f"epochs={10 if dataset == 'bdgp' else 25}", "batch_size=256")
    return {
        "afmcc": (),
        "fmcsc": ("algorithm={name: fmcsc}", *budget),
        "fedavg": ("algorithm={name: fedavg}",),
        "local": ("algorithm={name: local}",),
        "centralised": ("pooled=true",),
    }
