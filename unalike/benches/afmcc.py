"""AFMCC's clustering by dataset and ratio of full, multi- and single-modality clients: the paper's Tables 2 and 3a."""

from collections.abc import Mapping, Sequence
from typing import Any

from unalike.benches import Row, Study, averages
from unalike.report import Run

PAPER = {  # ACC, NMI, ARI; F/S, or F/M/S
    "bdgp 2:1": (95.7, 87.2, 89.7),
    "bdgp 1:1": (93.9, 82.3, 85.4),
    "bdgp 1:2": (90.7, 75.3, 78.3),
    "mnist-usps 2:1": (98.0, 94.5, 95.5),
    "mnist-usps 1:1": (96.5, 91.2, 92.3),
    "mnist-usps 1:2": (94.3, 86.9, 87.8),
    "multi-fashion 2:1": (93.4, 87.7, 86.5),
    "multi-fashion 1:1": (91.8, 84.5, 83.5),
    "multi-fashion 1:2": (87.8, 79.3, 76.5),
    "multi-fashion 1:1:1": (91.8, 85.1, 83.6),
    "multi-fashion 0:1:1": (87.1, 80.5, 75.6),
    "multi-fashion 1:1:0": (96.2, 92.4, 92.0),
}
QUICK = ("rounds=2", "starts=1", "pretraining=2", "steps=1", "checkpoint=1000")
PLAIN = ("alone=false", "evaluations=1")


def run(study: Study) -> dict:
    """A row for each line of the tables. The Multi-Fashion here was built by us: its numbers are not comparable with the paper's."""
    rows = {}
    for name in PAPER:
        dataset, ratio = name.split()
        rows[name] = (scenario(study, dataset), mixed(ratio))
    return table(study, rows, {name: acc for name, (acc, _, _) in PAPER.items()})


def scenario(study: Study, dataset: str = "bdgp") -> str:
    return "afmcc-digits" if study.quick else f"afmcc-{dataset}"


def mixed(ratio: str) -> list[str]:
    """The setting for clients F/S or F/M/S."""
    mix = zip(
        ("full", "single") if ratio.count(":") == 1 else ("full", "multi", "single"),
        ratio.split(":"),
        strict=True,
    )
    return [f"clients.0.mix={{{', '.join(f'{kind}: {part}' for kind, part in mix)}}}"]


def table(
    study: Study,
    rows: Mapping[str, Row],
    paper: Mapping[str, float] | None = None,
    quick: Sequence[str] = QUICK,
) -> dict[str, Any]:
    """Mean and spread of both protocols for each row, beside the paper's ACC where it has one."""
    made = study.runs(
        {name: (scenario, [*PLAIN, *settings]) for name, (scenario, settings) in rows.items()},
        quick,
    )
    return {
        "rows": {
            name: averages(runs, figures)
            | ({"paper_acc": paper[name]} if paper and name in paper else {})
            for name, runs in made.items()
        }
    }


def figures(run: Run) -> dict[str, float]:
    """ACC, NMI and ARI by the federated protocol and by k-means on everyone's features together."""
    told = (run.results or {})["metrics"]
    return {name: told[name] for name in ("acc", "nmi", "ari")} | {
        f"joint_{name}": told["joint"][name] for name in ("acc", "nmi", "ari")
    }
