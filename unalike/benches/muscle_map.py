"""When FedMuscle helps: strength of the encoders, number of labels, nearness of the public set, what learns, and how hard it is aligned."""

from unalike.benches import Study
from unalike.benches.muscle_vision import scenario, table

CLIENTS = range(6)
ENCODERS = {  # weak to strong, alone; each for every client
    "from scratch": "{name: cnn, channels: [32, 64, 128, 128], width: 128, norm: group}",
    "random weights, whole": "{name: efficientnet, weights: none, size: 96}",
    "lite0 to stage 5": "{name: efficientnet, stage: 5, size: 96, adapters: 16, adapted: 5}",
    "lite0": "{name: efficientnet, size: 96, adapters: 16, adapted: 8}",
    "lite0 at 192 pixels": "{name: efficientnet, size: 192, adapters: 16, adapted: 8}",
}
LEARNING = {  # of lite0, little to all
    "last stages learn": "{name: efficientnet, size: 96, adapters: 16, adapted: 6}",
    "every stage learns": "{name: efficientnet, size: 96, adapters: 16, adapted: 1}",
    "all learns": "{name: efficientnet, size: 96}",
}
LABELS = {
    "a quarter of the labels": (50, 50, 50, 25, 25, 12),
    "four times the labels": (800, 800, 800, 400, 400, 200),
}
LEFT = 3300  # public photographs of VOC where its clients have four times the labels
NEAR = {
    "public Flickr8k": ["public.data=flickr8k", "public.size=4000"],
    "public Caltech-101": ["public.data=caltech101", "public.size=3000"],
    "public VOC and Caltech-101": ["public.data=[voc2012, caltech101]", "public.size=4000"],
    "Flickr8k, guarded": ["public.data=flickr8k", "public.size=4000", "safeguard=true"],
    "4000 of VOC, 4000 of Caltech-101": ["public.data=[voc2012, caltech101]", "public.size=8000"],
    "public images of a program": ["public.data=generated", "public.size=5000"],
    "some of every client's kind": [
        "public.data=[voc2012, caltech101, cifar10]",
        "public.size=4000",
    ],
}
ALIGNED = {  # harder and gentler than shipped
    "align_rate 1e-3": ["align_rate=0.001"],
    "align_rate 3e-5": ["align_rate=0.00003"],
    "temperature 0.5": ["temperature=0.5", "lower_temperature=0.4"],
    "temperature 0.07": ["temperature=0.07", "lower_temperature=0.05"],
    "local epochs teach all": ["local=1.0"],
    "local epochs teach heads": ["local=0.0"],
    "left as aligned": ["keep=aligned"],
    "heads shared, one optimizer": ["algorithm={name: fedmuscle, heads: shared, optimizers: one}"],
}


def run(study: Study) -> dict:
    """The scenario as it is, then one thing changed at a time; rows with other models, labels or labelled rows are trained alone too."""
    settings: dict[str, list[str]] = {"as shipped": []}
    if study.quick:
        return table(study, {name: ("digits", each) for name, each in (settings | ALIGNED).items()})
    for name, model in (ENCODERS | LEARNING).items():
        settings[name] = [*(f"clients.{i}.model={model}" for i in CLIENTS), "alone=true"]
    for name, counts in LABELS.items():
        settings[name] = [
            *(f"clients.{i}.train={count}" for i, count in zip(CLIENTS, counts, strict=True)),
            "alone=true",
            *([f"public.size={LEFT}"] if counts[0] > 200 else []),
        ]
    settings |= {name: [*each, "alone=true"] for name, each in NEAR.items()} | ALIGNED
    return table(study, {name: (scenario(study), each) for name, each in settings.items()})
