"""FedMuscle as printed on its Setup1, and how much of its gain is the baseline's weakness."""

from benchmarks.fedmuscle import curves, rows_of, table
from benchmarks.study import Study, benchmark

SETUP = "muscle-setup1"
# As many local epochs as the paper's 150 rounds of one, and a row of its Table 8.
ROUNDS = ("rounds=25", "epochs=6")

# muscle-r1: one round

PASSES = (1, 3, 5)


@benchmark("muscle-r1")
def bench_muscle_r1(study: Study) -> dict:
    """FedMuscle as printed with one round of 150 local epochs and T passes (Table 8, R = 1).

    `raw head` has the same with heads on raw features; its own local baseline has them, too.
    """
    one_round = ["rounds=1", "epochs=150"]
    settings = {f"T={passes}": [*one_round, f"passes={passes}"] for passes in PASSES}
    raw = f"algorithm={PRINTED_WITH.format('head_input: raw')}"
    settings["raw head, T=5"] = [*one_round, raw, "passes=5", "alone=true"]
    result = table(study, rows_of(study, settings, SETUP))
    lines = {"as printed": {passes: f"T={passes}" for passes in PASSES}}
    bars = {"delta_bars": {"T=1": 5.71, "T=3": 10.18, "T=5": 12.81}}
    return curves(result, "T", lines) | bars


# muscle-printed: one thing changed at a time, and clients alone

# The fields of fedmuscleplus that make it FedMuscle as printed, but for the alignment's optimizer,
# which is one of its own, and peers, which are drawn for each batch.
PRINTED_WITH = "{{name: fedmuscleplus, distill_public: never, final_model: aligned, {}}}"
PRINTED: dict[str, list[str]] = {
    "as printed": [],
    "raw head": [f"algorithm={PRINTED_WITH.format('head_input: raw')}", "alone=true"],
    "own optimizer": [f"algorithm={PRINTED_WITH.format('head_input: unit')}"],
    "own optimizer at 1e-4": [
        f"algorithm={PRINTED_WITH.format('head_input: unit, align_lr: 0.0001')}"
    ],
    "own optimizer, left as local": [
        "algorithm={name: fedmuscleplus, distill_public: never, head_input: unit, final_model: local}"
    ],
    "adapters in the last layers": [
        *(
            f"clients.{index}.model.adapted={stage}"
            for index, stage in enumerate((8, 7, 8, 8, 7, 6))
        ),
        "alone=true",
    ],
    "pairwise": ["algorithm.loss=pairwise"],
    "gramian": ["algorithm.loss=gramian"],
}
VARIANT = "benchmarks.variants"
ALONE: dict[str, list[str]] = {
    "alone, unit head": [f"algorithm={{name: {VARIANT}:Alone, head_input: unit}}"],
    "alone, raw head": [f"algorithm={{name: {VARIANT}:Alone}}"],
    "alone, head on the encoder": ["algorithm={name: local}"],
    "alone, probe": [f"algorithm={{name: {VARIANT}:Alone, backbone_lr_scale: 0}}"],
    "alone, raw head at 3e-4": [f"algorithm={{name: {VARIANT}:Alone}}", "lr=0.0003"],
}


@benchmark("muscle-printed")
def bench_muscle_printed(study: Study) -> dict:
    """What of FedMuscle's gain is the baseline: unit or raw heads, rate, optimizers, adapters, loss.

    FedMuscle as printed on `muscle-setup1`, then one thing changed at a time, and clients alone in
    several forms, all against clients alone with the printed model (unit vectors to the head).
    """
    settings = {name: [*ROUNDS, *values] for name, values in (PRINTED | ALONE).items()}
    return table(study, rows_of(study, settings, SETUP))


# muscle-headroom: what we ship, its parts, its loss, and rivals

HEADROOM = "muscle-headroom"
PARTS: dict[str, list[str]] = {
    "as shipped": [],
    "pairwise": ["algorithm.loss=pairwise"],
    "gramian": ["algorithm.loss=gramian"],
    "nobody aligned": ["algorithm.align_lr=1e-12"],
    "own start": ["algorithm.projection_init=random"],
    "own heads": ["algorithm.average_heads=never", "algorithm.mask_absent_classes=false"],
    "own opinions": ["algorithm.distill_public=never"],
    "one exchange a pass": ["sync=epoch"],
    "as printed": ["algorithm={name: fedmuscle}"],
}
RIVALS: dict[str, str] = {
    "feddf": "{name: feddf}",
    "cofed": "{name: cofed}",
    "pseudolabel": "{name: pseudolabel}",
    "sage": "{name: sage}",
    "simclr": "{name: simclr}",
    "fedhenn": "{name: fedhenn}",
    "fedrcl": "{name: fedrcl}",
    "feddf, shared start": f"{{name: {VARIANT}:FedDFWithParts, joint_start: true}}",
    "cofed, shared start": f"{{name: {VARIANT}:CoFEDWithParts, joint_start: true}}",
}


@benchmark("muscle-headroom")
def bench_muscle_headroom(study: Study) -> dict:
    """FedMusclePlus and its parts on `muscle-headroom`, and rivals with the rates they come with."""
    settings = dict(PARTS)
    for name, fields in RIVALS.items():
        settings[name] = [f"algorithm={fields}"]
    return table(study, rows_of(study, settings, HEADROOM))


# muscle-losses: each loss with a temperature of its own

LOSS_TEMPERATURES = (0.1, 0.2, 0.3, 0.5)


@benchmark("muscle-losses")
def bench_muscle_losses(study: Study) -> dict:
    """Muscle, pairwise and Gramian loss at several temperatures on `digits`.

    The lower temperature of the Muscle loss is 3/4 of the other, as printed.
    """
    rows = {}
    for loss in ("muscle", "pairwise", "gramian"):
        for upper in LOSS_TEMPERATURES:
            settings = [f"algorithm.loss={loss}", f"temperature={upper}"]
            settings.append(f"lower_temperature={0.75 * upper:g}")
            rows[f"{loss} at {upper}"] = ("digits", settings)
    return table(study, rows)
