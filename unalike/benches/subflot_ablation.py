"""SubFLOT without its parts: extraction by transport (OTP), the penalty (SAR), merging by transport (OTA); the paper's ablation."""

from unalike.benches import Study
from unalike.benches.subflot import SMALL, scenario, table

SKEWED = "data.partition={name: dirichlet, alpha: 0.1, minimum: 20}"
WITHOUT = {
    "all parts": [],
    "without OTP": ["otp=false"],
    "without SAR": ["penalty=0"],
    "without OTA": ["ota=false"],
    "not levelled": ["level=false"],
    "spread plans": ["solver=auto"],
    "spread plans, barycentre": ["solver=auto", "inputs=barycentre"],
    "entropic plans": ["solver=entropic"],
}
PAPER = {
    "cifar10 all parts": 83.78,
    "cifar10 without OTP": 83.21,
    "cifar10 without SAR": 82.77,
    "cifar10 without OTA": 81.41,
}


def run(study: Study) -> dict:
    """CIFAR-10, Dirichlet 0.1, and AG News as it is, Dirichlet 0.5."""
    skew = {} if study.quick else {"cifar10": [SKEWED]}
    return table(
        study,
        {
            f"{dataset} {name}": (scenario(study, dataset), [*skew.get(dataset, []), *settings])
            for dataset in SMALL
            for name, settings in WITHOUT.items()
        },
        PAPER,
    )
