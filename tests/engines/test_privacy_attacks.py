"""Attacks of a server on clients with secret noise: it learns no more than epsilon allows."""

import math
import re

import pytest
import torch
from scipy.stats import beta
from test_leaks import EndpointProbe, described_by
from torch import nn

from unalike.base.message import decode, encode
from unalike.core.client import Client
from unalike.core.privacy import Privacy, epsilon, secret_normal
from unalike.core.signatures import describe_leaves
from unalike.tasks import Classification

NOISE, REPLIES, RUN = 2.0, 480, 4  # RUN: replies that the attacker puts together into one guess
DELTAS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
CONFIDENCE = 1 - 1e-6  # of each bound on a rate; about 200 are looked at in a test


def of_label(run, id, label):
    """A client with eight samples of one label."""
    x, y = torch.zeros(8, 3), torch.full((8,), label)
    return Client(
        id=id, model=lambda: nn.Linear(3, 2), task=Classification(2), train=(x, y), test=(x, y)
    )


def scores_of(folder, label):
    """How much each reply of a client with this label speaks for label 1, (REPLIES,).

    The server sends zeros and a learning rate with which every update is clipped. Then only the
    last bias learns, and the two data sets move it in opposite directions as far as they can.
    """
    probe = EndpointProbe(described_by(folder, of_label, id="a", label=label))
    probe.hello()
    privacy = {"noise": NOISE, "bound": 1.0, "delta": 1e-5, "entropy": "secret"}
    probe.begin(privacy=privacy, batch_size=8, optimizer="sgd", lr=100.0, epochs=1)
    first = probe.call("begin")["body"]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    scores = []
    for _ in range(REPLIES):
        parameters = probe.call("update", parameters=zeros)["body"]["parameters"]
        bias = parameters[list(zeros)[-1]]
        scores.append(float(bias[1] - bias[0]))
    return torch.tensor(scores, dtype=torch.float64)


def least_rate(hits, trials):
    """Clopper-Pearson bound: the rate is lower than this with probability 1 - CONFIDENCE."""
    return float(beta.ppf(1 - CONFIDENCE, hits, trials - hits + 1)) if hits else 0.0


def most_rate(hits, trials):
    return 1 - least_rate(trials - hits, trials)


def find_breaches(member, other, releases):
    """Thresholds at which P(guess | member) <= e^epsilon P(guess | other) + delta is refuted.

    Args:
        member, other: scores of the attacker for either data set, (trials,).
        releases: how many are in a score.
    """
    breaches = []
    for delta in DELTAS:
        limit = epsilon(NOISE, releases, delta)
        for threshold in torch.cat([member, other]).quantile(torch.linspace(0.1, 0.9, 9).double()):
            hits = int((member > threshold).sum())
            false_alarms = int((other > threshold).sum())
            allowed = math.exp(limit) * most_rate(false_alarms, len(other)) + delta
            if least_rate(hits, len(member)) > allowed:
                breaches.append((delta, limit, float(threshold), hits, false_alarms))
    return breaches


def attack(folder):
    """What a membership attack finds, by a single reply and by RUN replies together."""
    member, other = scores_of(folder / "one", 1), scores_of(folder / "two", 0)
    return {
        "single": find_breaches(member, other, 1),
        "composed": find_breaches(member.view(-1, RUN).sum(1), other.view(-1, RUN).sum(1), RUN),
    }


def test_a_membership_attack_has_no_more_success_than_epsilon_allows(tmp_path):
    assert attack(tmp_path) == {"single": [], "composed": []}


@pytest.mark.parametrize("weakness", ["half the noise", "twice the bound"])
def test_the_membership_attack_breaks_a_weaker_mechanism(tmp_path, monkeypatch, weakness):
    if weakness == "half the noise":
        halved = lambda shape: secret_normal(shape) / 2
        monkeypatch.setattr("unalike.core.privacy.secret_normal", halved)
    else:
        correct = Privacy.parameters
        weaker = {"bound": 2.0, "noise": NOISE / 2}
        monkeypatch.setattr(
            Privacy,
            "parameters",
            lambda self, *args: correct(self.model_copy(update=weaker), *args),
        )
    assert any(attack(tmp_path).values())


# what a reply tells beside its noised numbers


class Picky(nn.Module):
    """An encoder that fails on negative numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        if (x < 0).any():
            raise ValueError("expected numbers of at least 0")
        return self.layer(x)


DATASETS = {
    "plain": (lambda x: x, [0, 1, 2, 0, 1, 2, 0, 1]),
    "one label": (lambda x: x, [2] * 8),
    "zeros": (lambda x: x * 0, [0, 1, 2, 0, 1, 2, 0, 1]),
    "huge": (lambda x: x * 1e30, [0, 1, 2, 0, 1, 2, 0, 1]),
    "failing": (lambda x: torch.cat([x[:-1], -x[-1:]]), [0, 1, 2, 0, 1, 2, 0, 1]),
}


def with_data(run, id, dataset):
    change, labels = DATASETS[dataset]
    x = change(torch.rand(8, 3, generator=torch.Generator().manual_seed(0)))
    y = torch.tensor(labels)
    return Client(id=id, model=Picky, task=Classification(3), train=(x, y), test=(x, y))


def conversation(folder, dataset):
    """All that a curious server gets: everything as it is, of noised tensors only the form."""
    probe = EndpointProbe(described_by(folder, with_data, id="a", dataset=dataset))
    probe.hello()
    privacy = {"noise": 2.0, "bound": 1.0, "delta": 1e-5, "entropy": "secret"}
    probe.begin(privacy=privacy, batch_size=4, lr=1.0, epochs=2)
    first = probe.call("begin")["body"]
    first_name = next(iter(first))
    shorter = {name: tensor for name, tensor in first.items() if name != first_name}
    nan = {name: torch.full_like(tensor, math.nan) for name, tensor in first.items()}
    large = {name: torch.full_like(tensor, 9e5) for name, tensor in first.items()}
    for parameters in (first, large, nan, shorter, {}, first):
        probe.call("update", parameters=parameters)
    probe.call("receive", parameters=first)
    probe.call("appraise", parameters=first, common=False)
    for name in ("shape", "begin", "describe", "evaluate", "embed", "prepare", "no_such_operation"):
        probe.call(name)
    probe.request("save")
    seen = []
    for sent in probe.sent_bytes:
        reply = decode(sent)
        if "failure" in reply:
            reply["failure"] = re.sub("incident [0-9a-f]{12}$", "incident", reply["failure"])
        body = reply.get("body")
        if isinstance(body, dict) and "parameters" in body:
            body["parameters"] = describe_leaves(body["parameters"])
        seen.append((len(sent), encode(reply)))
    return seen


def test_nothing_but_noised_numbers_differs_between_two_data_sets(tmp_path):
    """Sizes, counts, `work`, metrics, hashes, refusals and incidents are the same for all data."""
    plain, *others = (conversation(tmp_path / name, name) for name in DATASETS)
    answered = [decode(reply) for _, reply in plain]
    assert sum("work" in reply for reply in answered) >= 5
    assert sum("failure" in reply for reply in answered) >= 5
    for name, other in zip(list(DATASETS)[1:], others, strict=True):
        assert other == plain, name
