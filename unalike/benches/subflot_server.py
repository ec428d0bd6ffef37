"""What SubFLOT costs the server: seconds to extract and to merge one client's submodel of a ResNet-18, on the cores of this machine."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from unalike.algorithms.subflot import SubFLOT, mean_of_held
from unalike.averaging import Parameters
from unalike.matching import Matcher
from unalike.models.classics import ResNet18
from unalike.models.submodels import extract, first, renumbered, widths_of
from unalike.models.widths import Width

RATIOS = (1.0, 0.75, 0.5, 0.25)


def run(quick: bool = False) -> dict:
    """Best of three for each width, with the plans SubFLOT makes unless told otherwise; `under` is the bar for both together."""
    torch.manual_seed(0)
    method = SubFLOT()
    model = nn.Sequential(ResNet18((3, 32, 32), 8 if quick else 64), nn.Linear(64 if quick else 512, 10))
    widths = widths_of(model, torch.zeros(1, 3, 32, 32))
    whole = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    rows = {}
    for ratio in RATIOS:
        keep = first(widths, ratio)
        own = renumbered(widths, keep)
        small = {name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor) if tensor.dim() > 1 else tensor
                 for name, tensor in extract(whole, widths, keep).items()}
        matcher = Matcher(method.inputs, method.solver)
        otp = best(partial(matcher.carry, [whole], [small], widths, own))
        ota = best(partial(merged, matcher, small, whole, own, widths))
        rows[f"width {ratio:g}"] = {"otp": round(otp, 4), "ota": round(ota, 4), "both": round(otp + ota, 4)}
    mean = sum(row["both"] for row in rows.values()) / len(rows)
    return {"rows": rows, "solver": method.solver, "seconds_a_client": round(mean, 4), "under": 0.5, "threads": torch.get_num_threads()}


def merged(matcher: Matcher, small: Parameters, whole: Parameters, own: list[Width], widths: list[Width]) -> None:
    """OTA of one upload: where units are picked, which entries it holds is carried over too, by the same plan."""
    matcher.known.clear()
    [carried] = matcher.carry([small], [whole], own, widths, ["up"])
    if matcher.solver == "picked":
        [held] = matcher.carry([{name: torch.ones_like(tensor) for name, tensor in small.items()}], [whole], own, widths, ["up"])
        mean_of_held(whole, {"one": carried}, {"one": held}, {"one": 1.0})


def best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
