"""Averaging of heads among clients with the same task and labels."""

import pytest
import torch

from unalike import Classification, FederationConfig
from unalike.algorithms import FedMusclePlus
from unalike.core.operations import query, sends
from unalike.methods.group_averaging import HeadAveraging, average_groups
from unalike.methods.parts import train_locally


def test_heads_are_averaged_among_clients_with_the_same_task_and_labels(toys, tmp_path):
    """Weighted by samples, whatever their encoders are; no other head moves, and no encoder
    does."""
    other = toys.client("d", task=Classification(["p", "q", "r", "s"]))
    method = toys.method("fedmuscleplus", average_heads="round")
    fed = toys.federation(
        tmp_path / "run",
        method,
        [toys.client("a", rows=10), toys.client("b", rows=30, model=toys.noisy), other],
    )
    fed.start_round(1)
    fed.call("train")
    programs = fed.engine.host.programs
    before = {
        c: {name: tensor.clone() for name, tensor in programs[c].model.state_dict().items()}
        for c in programs
    }
    average_groups(fed)
    after = {c: programs[c].model.state_dict() for c in programs}
    heads = [name for name in before["a"] if name.startswith("head.")]
    mean = {name: 0.25 * before["a"][name] + 0.75 * before["b"][name] for name in heads}
    assert heads and all(torch.allclose(after[c][name], mean[name]) for c in "ab" for name in heads)
    assert all(
        torch.equal(after[c][name], tensor)
        for c in "abd"
        for name, tensor in before[c].items()
        if c == "d" or name not in heads
    )


def test_heads_may_be_averaged_after_every_local_epoch(outcome, toys, tmp_path):
    """With one local epoch it equals averaging once per round; a client that averages with nobody
    trains as in one call."""
    assert (
        toys.apart(
            outcome(average_heads="round", training={"epochs": 1}),
            outcome(average_heads="epoch", training={"epochs": 1}),
        )
        == 0
    )
    assert (
        toys.apart(
            outcome(average_heads="round", training={"epochs": 3}),
            outcome(average_heads="epoch", training={"epochs": 3}),
        )
        > 1e-3
    )
    method = toys.method("fedmuscleplus", average_heads="epoch")
    clients = lambda: [*toys.clients(2), toys.client("d", task=Classification(tuple("wxyz")))]
    fed, plain = (
        toys.federation(tmp_path / name, method, clients(), epochs=3)
        for name in ("united", "plain")
    )
    calls, call = [], fed.call
    fed.call = lambda operation, **about: calls.append(operation) or call(operation, **about)
    for federation in (fed, plain):
        federation.start_round(1)
    train_locally(fed, "train", HeadAveraging(every_epoch=True))
    plain.call("train")
    assert calls == ["train", "kind_of", "give", "take", "train", "give", "take", "train"]
    ends = [
        {c: program.model.state_dict() for c, program in federation.engine.host.programs.items()}
        for federation in (fed, plain)
    ]
    assert all(torch.equal(ends[0]["d"][name], tensor) for name, tensor in ends[1]["d"].items())
    apart = [(end["a"]["head.0.weight"] - end["b"]["head.0.weight"]).norm() for end in ends]
    assert 0 < apart[0] < apart[1]


@pytest.mark.parametrize("keep", ["local", "aligned"])
def test_the_local_final_model_has_a_head_of_its_own(keep, outcome):
    final = outcome(average_heads="round", final_model=keep)
    assert torch.equal(final["a"]["head.0.weight"], final["c"]["head.0.weight"]) == (
        keep == "aligned"
    )


def test_a_client_takes_only_parameters_that_are_averaged(toys, tmp_path):
    fed = toys.federation(
        tmp_path / "run", toys.method("fedmuscleplus", average_heads="round"), toys.clients()
    )
    fed.start_round(1)
    fed.call("train")
    program = fed.engine.host.programs["a"]
    for parameters in (
        {},
        dict(program.model.state_dict()),
        {name: tensor[:1] for name, tensor in program.averaged_parameters().items()},
    ):
        with pytest.raises(ValueError, match="expected the parameters that are averaged"):
            program.take(parameters)


def test_a_client_whose_only_partner_fails_keeps_its_head(toys, tmp_path, monkeypatch):
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscleplus", average_heads="round"),
        toys.clients(2),
        federation=FederationConfig(quorum=0.5),
    )
    fed.start_round(1)
    fed.call("train")
    calls, call = [], fed.call
    fed.call = lambda operation, **about: calls.append(operation) or call(operation, **about)

    @query
    @sends("parameters")
    def give(self):
        if self.client.id == "b":
            raise ValueError("no disk")
        return self.averaged_parameters()

    monkeypatch.setattr(FedMusclePlus.Program, "give", give)
    average_groups(fed)
    assert calls == ["kind_of", "give"] and fed.active == ["a"]
