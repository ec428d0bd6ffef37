"""Width of FedMuscle's representations and its two temperatures (the paper's Figure 11)."""

from unalike.benches import Study
from unalike.benches.muscle_vision import curves, scenario, table

TEMPERATURES, WIDTHS = ((0.1, 0.075), (0.3, 0.225), (0.5, 0.375)), (64, 128, 512)
SHIPPED = "d=256, 0.2 and 0.15"


def run(study: Study) -> dict:
    """Another width is another model alone as well: such rows are trained alone too."""
    settings: dict[str, list[str]] = {SHIPPED: []}
    for upper, lower in TEMPERATURES:
        settings[f"d=256, {upper} and {lower}"] = [
            f"temperature={upper}",
            f"lower_temperature={lower}",
        ]
    settings |= {f"d={width}": [f"algorithm.width={width}", "alone=true"] for width in WIDTHS}
    told = table(study, {name: (scenario(study), each) for name, each in settings.items()})
    return curves(
        told, "d", {"FedMuscle": {256: SHIPPED} | {width: f"d={width}" for width in WIDTHS}}
    )
