"""What SubFLOT costs the server: seconds to extract and to merge one client's submodel of a ResNet-18, on the cores of this machine."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from unalike.matching import Matcher
from unalike.models.classics import ResNet18
from unalike.models.submodels import extract, first, renumbered, widths_of

RATIOS = (1.0, 0.75, 0.5, 0.25)


def run(quick: bool = False) -> dict:
    """Best of three for each width; `under` is the bar for both together. Plans are exact up to 512 units."""
    torch.manual_seed(0)
    model = nn.Sequential(ResNet18((3, 32, 32), 8 if quick else 64), nn.Linear(64 if quick else 512, 10))
    widths = widths_of(model, torch.zeros(1, 3, 32, 32))
    whole = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    rows = {}
    for ratio in RATIOS:
        keep = first(widths, ratio)
        own = renumbered(widths, keep)
        small = {name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor) if tensor.dim() > 1 else tensor
                 for name, tensor in extract(whole, widths, keep).items()}
        matcher = Matcher()
        otp = best(partial(matcher.carry, [whole], [small], widths, own))
        ota = best(partial(matcher.carry, [small], [whole], own, widths))
        rows[f"width {ratio:g}"] = {"otp": round(otp, 4), "ota": round(ota, 4), "both": round(otp + ota, 4)}
    mean = sum(row["both"] for row in rows.values()) / len(rows)
    return {"rows": rows, "seconds_a_client": round(mean, 4), "under": 0.5, "threads": torch.get_num_threads()}


def best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
