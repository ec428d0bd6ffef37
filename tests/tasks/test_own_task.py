"""A task that the package does not know, defined by a user: it runs with every method that fits."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unalike
from unalike import FedAvg, FedMuscle, Local, Training
from unalike.algorithms import ALGORITHMS
from unalike.tasks import TASKS, Task, find_task


@dataclass(frozen=True)
class Counting(Task):
    """Predict a count: output (B, 1) the logarithm of its rate, y (B,) floats."""

    labels: tuple[str, ...] = ("count",)

    name: ClassVar[str] = "counting"
    metric: ClassVar[str] = "deviance"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = ""

    def loss(self, output, y):
        return F.poisson_nll_loss(output[:, 0], y)

    def imitate(self, output, teacher):
        return F.mse_loss(output, teacher)

    def check(self, y):
        if bool((y < 0).any()):
            raise ValueError("counts are at least 0")

    def meter(self):
        return CountingMeter()

    @classmethod
    def finish(cls, fed):
        fed.log_metrics("finished", dict.fromkeys(fed.clients, 1.0))


class CountingMeter:
    def __init__(self):
        self.losses = []

    def add(self, output, y):
        self.losses.append(F.poisson_nll_loss(output[:, 0], y, full=True, reduction="none"))

    def result(self):
        return {"deviance": torch.cat(self.losses).mean().item()}


def counts(rows, seed):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=draws)
    return x, torch.poisson((x @ torch.tensor([0.8, -0.5, 0.3])).exp(), generator=draws)


def encoder():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU())


def clients():
    return [
        unalike.Client(id, encoder, Counting(), train=counts(12, place), test=counts(60, 9 + place))
        for place, id in enumerate("abc")
    ]


@pytest.mark.parametrize(
    ("method", "public"),
    [
        (Local(), None),
        (FedAvg(), None),
        (FedMuscle(peers=2, batch=8, width=8), counts(16, 99)[0]),
    ],
)
def test_an_unlisted_task_runs(tmp_path, method, public):
    assert "counting" not in TASKS
    training = Training(rounds=3, batch_size=8, lr=0.02)
    results = unalike.run(method, clients(), training=training, public=public, out=tmp_path / "run")
    assert not results["failures"]
    for entry in results["clients"].values():
        assert entry["metric"] == "deviance" and entry["unit"] == ""
        assert (entry["value"] < entry["alone"]) == (entry["gain"] > 0)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"finished"' in events, "its part at the server is called, too"


def test_traits_decide_which_methods_serve_it():
    served = {name for name, method in ALGORITHMS.items() if method.serves(Counting)}
    assert "fedavg" in served and "feddf" in served
    assert "pseudolabel" not in served and "fednca" not in served and "afmcc" not in served


def test_a_task_is_found_by_its_name():
    assert find_task("counting") is Counting
    assert find_task("regression") is TASKS["regression"]
    assert find_task("nobody knows it") is Task
