"""What alpha, beta and lambda do to AFMCC, one at a time, the others as shipped: the paper's Figure 4."""

from unalike.benches import Study
from unalike.benches.afmcc import scenario, table

POWERS = (0.0001, 0.001, 0.01, 0.1, 1.0)
VALUES = {
    "alpha": ("alpha", POWERS),
    "beta": ("beta", POWERS),
    "lambda": ("flexibility", (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
}


def run(study: Study) -> dict:
    """BDGP, F/S 1:1."""
    return table(
        study,
        {
            f"{name} {value:g}": (scenario(study), [f"{field}={value}"])
            for name, (field, values) in VALUES.items()
            for value in values
        },
    )
