"""Which learning rate on the public set, or weight of an added loss, suits each rival on `digits`: seeds 100 and 101, none of the reported.

FedMuscle's rate was chosen in the same way, on seeds 100 to 104 (docs/fedmuscle.md).
"""

from unalike.benches import Row, Study, averages
from unalike.benches.rivals import METHODS, PLAIN, figures

TRIED: dict[str, tuple[str, tuple[float, ...]]] = {
    **dict.fromkeys(
        ("sage", "cofed", "feddf", "simclr", "pseudolabel"),
        ("public_rate", (0.0001, 0.0003, 0.001, 0.003, 0.01)),
    ),
    "fedhenn": ("eta", (0.01, 0.1, 1.0)),
    "fedrcl": ("weight", (0.03, 0.1, 0.3, 1.0)),
}


def run(study: Study) -> dict:
    """Delta of each try, and for each method the best field and value."""
    rows: dict[str, Row] = {}
    for name, (field, values) in TRIED.items():
        for value in values:
            rows[f"{name}, {field} {value:g}"] = (
                "digits",
                [*PLAIN, f"algorithm={METHODS[name]}", f"algorithm.{field}={value}"],
            )
    made = {
        name: averages(runs, figures) for name, runs in study.runs(rows, seeds=(100, 101)).items()
    }
    best = lambda name: max(
        (row for row in made if row.startswith(f"{name},")),
        key=lambda row: made[row]["delta"],
        default=None,
    )
    return {"rows": made, "best": {name: best(name) for name in TRIED}}
