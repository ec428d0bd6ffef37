"""Size of FedMuscle's public set against what travels (the paper's Figure 4), and which set it is."""

from unalike.benches import Study
from unalike.benches.muscle_vision import curves, scenario, table

SIZES, PASSES = (5000, 2500, 1000, 300), (1, 3)


def run(study: Study) -> dict:
    """A public set cut from a client's dataset leaves it other labelled rows: such rows are trained alone too."""
    settings = {
        f"|D|={size}, T={passes}": [
            "public.data=flickr8k",
            f"public.size={size}",
            f"passes={passes}",
        ]
        for size in SIZES
        for passes in PASSES
    }
    settings["VOC, |D|=4000"] = ["public.data=voc2012", "public.size=4000", "alone=true"]
    settings["Caltech-101, |D|=4000"] = ["public.data=caltech101", "public.size=4000", "alone=true"]
    told = table(study, {name: (scenario(study), each) for name, each in settings.items()})
    lines = {
        f"T={passes}": [row for size in SIZES if (row := f"|D|={size}, T={passes}") in told["rows"]]
        for passes in PASSES
    }
    return curves(
        told,
        "megabytes of a client and round",
        {name: {told["rows"][row]["megabytes"]: row for row in its} for name, its in lines.items()},
    )
