"""Clients as one object from the message to the reply: the same numbers, and what falls back."""

from collections import Counter

import pytest
import torch
from torch import nn

from unalike import FederationConfig
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fedprox import FedProx
from unalike.base.blocks import find_block, split_block
from unalike.core.client_stack import NotTogether, StackedReplies, _like, _new_block
from unalike.core.operations import find_stacked_form
from unalike.core.program import ClientProgram
from unalike.engines.host import Host
from unalike.methods.averaging import AveragingProgram, mean_states
from unalike.training.batching import batches
from unalike.training.stacked_epochs import Member, StackedEpochs, StackRows


@pytest.fixture
def compare(toys, tmp_path, monkeypatch):
    """Runs clients one by one and as one object; returns how far apart, and members at once."""
    at_once = []
    train_from = StackedEpochs.train_from

    def count(self, start, own, *args):
        at_once.append(len(own))
        return train_from(self, start, own, *args)

    monkeypatch.setattr(StackedEpochs, "train_from", count)

    def run(algorithm, clients, **changed):
        for mode in ("never", "always"):
            options = {"rounds": 3, "epochs": 2, "optimizer": "adam"} | changed
            toys.execute(tmp_path / mode, algorithm, clients(), options={"stack": mode}, **options)
        ledgers = [(tmp_path / mode / "ledger.csv").read_bytes() for mode in ("never", "always")]
        assert ledgers[0] == ledgers[1]
        return toys.apart(*(toys.states(tmp_path / m) for m in ("never", "always"))), at_once

    return run


def clients_of(toys, count=4, **fields):
    return lambda: [toys.client(id, rows=20, **fields) for id in "abcdefgh"[:count]]


@pytest.mark.parametrize("fields", [{}, {"momentum": 0.9, "optimizer": "sgd"}])
def test_clients_as_one_object_end_as_one_by_one(compare, toys, fields):
    apart, at_once = compare(FedProx(mu=0.5), clients_of(toys), **fields)
    assert apart <= 1e-9
    assert at_once == [4, 4]  # in the first round they are checked


def test_large_models_train_one_after_another_into_one_block(compare, toys, monkeypatch):
    monkeypatch.setattr("unalike.core.stacking.CPU_STACK", 1)
    apart, at_once = compare(FedAvg(), clients_of(toys))
    assert apart <= 1e-9
    assert at_once == [1] * 8


def test_batch_norm_of_each_client_is_its_own(compare, toys):
    def normed():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))

    rows = {"a": 20, "b": 23, "c": 20, "d": 23}
    apart, at_once = compare(
        FedAvg(), lambda: [toys.client(id, rows=n, model=normed) for id, n in rows.items()]
    )
    assert apart <= 1e-9
    assert at_once == [2, 2, 2, 2]  # those with equally many rows


def test_parameters_that_are_not_shared_stay_with_their_clients(compare, toys):
    class Bodies(FedAvg):
        personalised = True

        def shares(self, name):
            return not name.startswith("head.")

    apart, at_once = compare(
        Bodies(), clients_of(toys), federation=FederationConfig(participation=0.5)
    )
    assert apart <= 1e-9
    assert at_once


class Remembers(FedAvg):
    class Program(AveragingProgram):
        def loss(self, x, y):
            return super().loss(x, y) + 0 * self.anchor.sum()

        def build(self, encoder):
            self.anchor = torch.ones(2, dtype=torch.float64)
            return super().build(encoder)


class TrainsElse(FedAvg):
    class Program(AveragingProgram):
        def train_round(self):
            return self.learn(optimizer=self.optimizer(fresh=True))


@pytest.mark.parametrize("algorithm", [Remembers(), TrainsElse()])
def test_tensors_or_steps_of_their_own_run_in_lockstep(compare, toys, algorithm):
    apart, at_once = compare(algorithm, clients_of(toys))
    assert apart <= 1e-9
    assert not at_once


def test_the_form_holds_for_classes_that_keep_what_it_does():
    assert find_stacked_form(AveragingProgram, "update") is AveragingProgram.update_stack
    assert find_stacked_form(FedProx.Program, "update") is AveragingProgram.update_stack
    assert find_stacked_form(TrainsElse.Program, "update") is None
    assert find_stacked_form(AveragingProgram, "receive") is None


def test_safeguard_and_privacy_keep_clients_apart(compare, toys):
    _, at_once = compare(FedAvg(), clients_of(toys), safeguard=True)
    assert not at_once


def test_a_client_that_diverges_fails_by_itself(toys, tmp_path):
    clients = [toys.client(id, rows=20) for id in "abcd"]
    bad = toys.client("e", rows=20)
    bad.train.x[3] = float("nan")
    results = toys.execute(
        tmp_path / "run", FedAvg(), [*clients, bad], rounds=3, options={"stack": "always"}
    )
    assert {failure["client"] for failure in results["failures"]} == {"e"}


def test_python_runs_once_for_all_clients(toys, tmp_path, monkeypatch):
    calls = Counter()
    for owner, name in ((ClientProgram, "learn"), (Host, "handle")):
        function = getattr(owner, name)

        def counted(*args, function=function, name=name, **named):
            calls[name] += 1
            return function(*args, **named)

        monkeypatch.setattr(owner, name, counted)
    found = {}
    for rounds in (1, 4):
        calls.clear()
        clients = [toys.client(id, rows=20) for id in "abcd"]
        toys.execute(
            tmp_path / str(rounds),
            FedAvg(),
            clients,
            rounds=rounds,
            options={"stack": "always"},
            federation=FederationConfig(evaluations=1),
        )
        found[rounds] = dict(calls)
    assert found[4]["learn"] == found[1]["learn"] == 4


def test_a_run_that_was_stopped_ends_the_same_to_the_bit(toys, tmp_path):
    """The round after a stop is in lockstep, where the whole run has one object."""

    class Stop(BaseException):
        pass

    def stop(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise Stop

    def clients():
        rows = [20 + 3 * (i % 2) for i in range(20)]
        return [toys.client(f"c{i}", rows=n, dtype=torch.float32) for i, n in enumerate(rows)]

    options = {"rounds": 4, "options": {"stack": "always"}}
    with pytest.raises(Stop):
        toys.execute(tmp_path / "cut", FedAvg(), clients(), watch=stop, **options)
    toys.execute(tmp_path / "cut", FedAvg(), clients(), **options)
    toys.execute(tmp_path / "whole", FedAvg(), clients(), **options)
    assert toys.apart(toys.states(tmp_path / "cut"), toys.states(tmp_path / "whole")) == 0


@pytest.mark.parametrize("lengths", [[8, 8], [9, 5, 13, 4], [1, 2]])
def test_orders_give_the_batches_of_their_members(lengths):
    """Batches of 4; a last one of one row joins the one before."""
    lengths = sorted(lengths, reverse=True)
    data = [(torch.randn(n, 3), torch.randint(5, (n,))) for n in lengths]
    orders = [[torch.randperm(n) for _ in range(2)] for n in lengths]
    members = []
    for (x, y), own in zip(data, orders, strict=True):
        steps = [order[rows] for order in own for rows in batches(len(x), 4)]
        read = lambda rows, x=x, y=y: (x[rows], y[rows])
        members.append(Member(None, {}, None, read, steps, len(x)))
    one, other = StackRows(members, -1), StackRows.of_orders(data, orders, 4, -1)
    assert torch.equal(one.counts, other.counts) and torch.equal(one.sizes, other.sizes)
    for start, stop in one.spans(1):
        models = int((one.counts > start).sum())
        for mine, theirs in zip(
            one.batches(start, stop, models), other.batches(start, stop, models), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_replies_are_rows_of_blocks_with_their_largest_numbers():
    block = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    columns = {"parameters": {"w": block}, "samples": [5, 6], "loss": [0.5, -9.0]}
    replies = StackedReplies(columns, 2)
    assert replies.magnitudes == [5.0, 9.0]  # ||(3, 4)|| = 5
    first, second = replies.bodies
    assert (first["samples"], second["loss"]) == (5, -9.0)
    first["parameters"]["w"] += 1  # a reply may be changed as any other
    assert second["parameters"]["w"].tolist() == [1.0, 0.0]
    columns["loss"] = [float("nan"), 0.0]
    assert not StackedReplies(columns, 2).magnitudes[0] <= 1e15
    with pytest.raises(NotTogether):
        StackedReplies({"loss": [1.0, None]}, 2)


def test_blocks_keep_the_order_of_axes_of_their_tensors():
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    block = _new_block(image, 5)
    assert block.shape == (5, 2, 3, 4, 4)
    assert all(row.is_contiguous(memory_format=torch.channels_last) for row in block)
    assert block.untyped_storage().nbytes() == 5 * image.numel() * 4
    sent = image.contiguous()
    own = _like(sent, image)
    assert torch.equal(own, sent) and own.stride() == image.stride()


def test_low_precision_trains_one_model_at_a_time(compare, toys):
    apart, at_once = compare(
        FedAvg(),
        lambda: [toys.client(id, rows=20, dtype=torch.float32) for id in "abcd"],
        precision="bfloat16",
        optimizer="sgd",
    )
    assert apart <= 0.02
    assert at_once == [1] * 8


def test_the_mean_of_rows_of_a_block_is_that_of_tensors():
    """(1 * 0 + 3 * 4) / 4 = 3 and (1 * 4 + 3 * 8) / 4 = 7; counters are rounded."""
    block, counters = torch.tensor([[0.0, 4.0], [4.0, 8.0]]), torch.tensor([2, 3])
    rows, counts = split_block(block), split_block(counters)
    states = {c: {"w": rows[i], "n": counts[i]} for i, c in enumerate("ab")}
    mean = mean_states(states, {"a": 1.0, "b": 3.0})
    assert mean["w"].tolist() == [3.0, 7.0] and mean["n"].item() == 3
    assert find_block([rows[0], torch.zeros(2)]) is None
    other_order = mean_states({"b": states["b"], "a": states["a"]}, {"a": 1.0, "b": 3.0})
    assert other_order["w"].tolist() == [3.0, 7.0]
