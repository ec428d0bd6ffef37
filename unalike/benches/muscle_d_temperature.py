"""Width of FedMuscle's representations and its two temperatures (the paper's Figure 11)."""

from unalike.benches import Study
from unalike.benches.muscle_vision import scenario, table

TEMPERATURES = ((0.1, 0.075), (0.3, 0.225), (0.5, 0.375))


def run(study: Study) -> dict:
    """Another width is another model alone as well: such rows are trained alone too."""
    settings: dict[str, list[str]] = {"d=256, 0.2 and 0.15": []}
    for upper, lower in TEMPERATURES:
        settings[f"d=256, {upper} and {lower}"] = [f"temperature={upper}", f"lower_temperature={lower}"]
    settings |= {f"d={width}": [f"algorithm.width={width}", "alone=true"] for width in (64, 128, 512)}
    return table(study, {name: (scenario(study), each) for name, each in settings.items()})
