"""Distillation of public logits among clients with common labels."""

import math

import pytest
import torch

from unalike import Classification, FedMusclePlus, MultiLabel
from unalike.base.randomness import stream
from unalike.core.privacy import Privacy
from unalike.methods.distillation import distill_public


def test_distillation_brings_predictions_of_clients_with_common_labels_together(toys, tmp_path):
    """At the learning rate of the alignment. Other clients are neither called nor changed."""
    other = toys.client("d", task=Classification(["p", "q", "r", "s"]))
    method = toys.method("fedmuscleplus", distill_public="all", align_lr=0.01, decay=True)
    fed = toys.federation(
        tmp_path / "run",
        method,
        [toys.client("a"), toys.client("b", model=toys.noisy), other],
        rounds=3,
    )
    fed.start_round(2)
    fed.call("train")
    programs = fed.engine.host.programs
    before = {name: tensor.clone() for name, tensor in programs["d"].model.state_dict().items()}
    opinions = {c: programs[c].opinion() for c in "ab"}
    mean = (opinions["a"] + opinions["b"]) / 2
    for _ in range(5):
        losses = distill_public(fed)
    for c in "ab":
        assert (programs[c].opinion() - mean).norm() < (opinions[c] - mean).norm()
        assert programs[c].optimizers["public"].param_groups[0]["lr"] == pytest.approx(
            0.01 * (1 + math.cos(math.pi / 3)) / 2
        )
    assert losses.keys() == set("ab") and all(
        torch.equal(programs["d"].model.state_dict()[name], t) for name, t in before.items()
    )


def test_distillation_among_multilabel_clients_only(toys, tmp_path):
    """A classifier has to name one of its classes, whatever a public row shows."""
    labels = lambda id: (
        torch.randn(12, 6, generator=stream(0, id)).double(),
        torch.ones(12, 2).double(),
    )
    tagged = [
        toys.client(id, task=MultiLabel(["sun", "sea"]), train=labels(id), test=labels(id))
        for id in "cd"
    ]
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscleplus", distill_public="multilabel"),
        [*toys.clients(2), *tagged],
    )
    fed.start_round(1)
    fed.call("train")
    assert distill_public(fed, multilabel_only=True).keys() == set("cd")
    assert distill_public(fed).keys() == set("abcd")


def test_by_default_clients_distil_but_with_the_safeguard_or_privacy(toys, tmp_path):
    def sends_logits(name, **settings):
        method = toys.method("fedmuscleplus", distill_public="auto")
        toys.execute(tmp_path / name, method, toys.clients(), **settings)
        return ",opinion," in (tmp_path / name / "ledger.csv").read_text()

    assert FedMusclePlus().distill_public == "auto"
    assert sends_logits("plain")
    assert not sends_logits("guarded", safeguard=True)
    assert not sends_logits("private", privacy=Privacy(noise=1.0))
