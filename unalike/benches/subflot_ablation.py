"""SubFLOT without its parts: extraction by transport (OTP), the penalty (SAR), merging by transport (OTA); the paper's ablation."""

from unalike.benches import Study
from unalike.benches.subflot import scenario, table

SKEWED = "data.partition={name: dirichlet, alpha: 0.1, minimum: 20}"
WITHOUT = {"all parts": [], "without OTP": ["otp=false"], "without SAR": ["penalty=0"], "without OTA": ["ota=false"],
           "not levelled": ["level=false"],
           "spread plans": ["solver=auto"], "spread plans, barycentre": ["solver=auto", "inputs=barycentre"],
           "entropic plans": ["solver=entropic"]}
PAPER = {"all parts": 83.78, "without OTP": 83.21, "without SAR": 82.77, "without OTA": 81.41}


def run(study: Study) -> dict:
    """CIFAR-10, Dirichlet 0.1."""
    skew = [] if study.quick else [SKEWED]
    return table(study, {name: (scenario(study), [*skew, *settings]) for name, settings in WITHOUT.items()}, PAPER)
