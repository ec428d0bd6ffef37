"""What SubFLOT costs the server: seconds to extract and to merge one client's submodel of a ResNet-18; on a GPU beside a client's round."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from unalike.algorithms.subflot import SubFLOT
from unalike.benches import Study
from unalike.benches.fednca_cost import wait
from unalike.matching import Matcher
from unalike.methods.averaging import Parameters
from unalike.methods.submodels import mean_of_held
from unalike.models.channel_groups import Width
from unalike.models.classics import ResNet18
from unalike.models.submodels import extract, first, narrow, renumbered, widths_of
from unalike.training.loop import Training, build_optimizer, step

RATIOS = (1.0, 0.75, 0.5, 0.25)
ROWS, EPOCHS, BATCH = (
    1875,
    5,
    256,
)  # a client's round in the paper: three quarters of a twentieth of CIFAR-10
CLIENTS = 5  # of each width, as in the scenarios; they are matched together


def run(study: Study) -> dict:
    """For each width the best of three, for one of five clients, with the plans SubFLOT makes unless told otherwise; `under` is the bar
    for both together. On a GPU also what share of a client's training it is."""
    torch.manual_seed(0)
    method, quick, device = SubFLOT(), study.quick, study.device
    model = nn.Sequential(
        ResNet18((3, 32, 32), 8 if quick else 64), nn.Linear(64 if quick else 512, 10)
    ).to(device)
    widths = widths_of(model, torch.zeros(1, 3, 32, 32, device=device))
    whole = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    rows = {}
    for ratio in RATIOS:
        keep = first(widths, ratio)
        own = renumbered(widths, keep)
        small = [
            {
                name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor)
                if tensor.dim() > 1
                else tensor
                for name, tensor in extract(whole, widths, keep).items()
            }
            for _ in range(CLIENTS)
        ]
        matcher = Matcher(method.inputs, method.solver)
        otp = best(partial(matcher.carry, [whole] * CLIENTS, small, widths, own), device) / CLIENTS
        ota = best(partial(merged, matcher, small, whole, own, widths), device) / CLIENTS
        rows[f"width {ratio:g}"] = {
            "otp": round(otp, 4),
            "ota": round(ota, 4),
            "both": round(otp + ota, 4),
        }
        if torch.device(device).type == "cuda":
            trained = best(partial(practice, narrow(model, widths, keep)), device)
            rows[f"width {ratio:g}"] |= {
                "training": round(trained, 4),
                "percent": round(100 * (otp + ota) / trained, 2),
            }
    mean = sum(row["both"] for row in rows.values()) / len(rows)
    told = {
        "rows": rows,
        "solver": method.solver,
        "seconds_a_client": round(mean, 4),
        "under": 0.5,
        "threads": torch.get_num_threads(),
    }
    if training := sum(row.get("training", 0) for row in rows.values()):
        told |= {
            "percent_of_training": round(100 * mean * len(rows) / training, 2),
            "percent_of_training_bar": 10.0,
        }
    return told


def practice(model: nn.Module) -> None:
    """A client's round on rows that mean nothing."""
    device = next(model.parameters()).device
    x, y = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)
    optimizer = build_optimizer(list(model.train().parameters()), Training(optimizer="sgd"))
    for _ in range(EPOCHS * -(-ROWS // BATCH)):
        step(nn.functional.cross_entropy(model(x), y), optimizer)


def merged(
    matcher: Matcher,
    small: list[Parameters],
    whole: Parameters,
    own: list[Width],
    widths: list[Width],
) -> None:
    """OTA of uploads of one width."""
    matcher.known.clear()
    keys = [str(n) for n in range(len(small))]
    carried = zip(keys, matcher.carry(small, [whole] * len(small), own, widths, keys), strict=True)
    mean_of_held(
        whole,
        ((key, state, matcher.reached(key, widths, whole)) for key, state in carried),
        dict.fromkeys(keys, 1.0),
    )


def best(work: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - begun)
    return min(times)
