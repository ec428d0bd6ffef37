"""Own epochs after the last merge (`finetune`), and clients that begin with their own nets."""

from functools import partial

import pytest
import torch

import unalike
from unalike.algorithms import FedAvg, FedFomo, HeteroFL, SubFLOT
from unalike.base.errors import UserError
from unalike.models.submodels import extract, first_units

CLOSE = 1e-9
CAPACITIES = {"a": 1.0, "b": 0.5, "c": 0.25}


def narrow_clients(toys, **about):
    return [toys.client(id, capacity=share, **about) for id, share in CAPACITIES.items()]


def largest(one, other):
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


def test_own_epochs_follow_the_last_merge(toys, tmp_path, by_hand):
    """Two epochs of the task alone from the mean of the round, in orders that no round had."""
    method = FedAvg(finetune=2)
    clients = [toys.client("a"), toys.client("b", rows=30)]
    fed = toys.federation(tmp_path, method, clients, rounds=1)
    final = toys.serve(fed, method)
    (merged,) = fed.state["models"].values()
    for client in clients:
        program = by_hand.program(method, client, rounds=1)
        program.model.load_state_dict(merged)
        by_hand.train(program.model.parameters(), client, program.task_loss, epochs=(1, 2))
        assert largest(final[client.id], dict(program.model.state_dict())) < CLOSE


def test_clients_with_own_epochs_are_measured_by_their_own_models(toys, tmp_path):
    method = FedAvg(finetune=3)
    fed = toys.federation(tmp_path, method, [toys.client("a"), toys.client("b")], rounds=1)
    toys.serve(fed, method)
    assert method.evaluate(fed) == fed.call("evaluate", clients=fed.clients)
    assert method.keeps_own_models() and not FedAvg().keeps_own_models()


def test_submodels_are_fine_tuned_from_what_was_merged_last(toys, tmp_path):
    """At a rate of nearly 0 a client ends with its part of the server's last model."""
    method = HeteroFL(finetune=1, masked=False)
    fed = toys.federation(tmp_path, method, narrow_clients(toys), rounds=2)
    for _ in method.serve(fed):
        fed.finished = fed.round
    for program in fed.engine.host.programs.values():
        program.training = program.training.model_copy(update={"lr": 1e-12})
    method.finish(fed)
    for client, share in CAPACITIES.items():
        groups = method.channel_groups(fed, client)
        expected = extract(method.server_model(fed, client), groups, first_units(groups, share))
        final = fed.engine.host.programs[client].model.state_dict()
        assert largest(expected, final) < 1e-9


def test_a_method_whose_clients_keep_other_models_refuses_own_epochs(toys):
    clients = [toys.client("a"), toys.client("b")]
    with pytest.raises(UserError, match=r"finetune.*must be 0.*FedFomo"):
        unalike.run(FedFomo(finetune=1), clients)


def test_own_epochs_give_the_same_end_after_a_stop(toys, tmp_path):
    """A run that goes on from its last round fine-tunes once."""
    clients = [toys.client("a"), toys.client("b")]
    run = partial(unalike.run, FedAvg(finetune=2), clients, training=toys.training(rounds=2))
    whole = run(out=tmp_path / "whole")
    run(out=tmp_path / "stopped")
    (tmp_path / "stopped" / "results.json").unlink()
    again = run(out=tmp_path / "stopped", resume=True)
    assert toys.hashes(again) == toys.hashes(whole)


@pytest.mark.parametrize("method", [HeteroFL(start="own"), SubFLOT(start="own")])
def test_clients_may_begin_with_nets_of_their_own(toys, tmp_path, method):
    """Nothing is sent before a client has trained; later it is sent what was merged."""
    fed = toys.federation(tmp_path, method, narrow_clients(toys), rounds=2)
    fed.start_round(1)
    method.register_clients(fed)
    messages = method.build_messages(fed, fed.clients)
    assert all(message["parameters"] == {} for message in messages.values())
    fed.call("receive", per_client=messages)
    programs = fed.engine.host.programs
    for client, program in programs.items():
        own = program.fresh_copy().model.state_dict()
        first = next(name for name in own if name.endswith("weight"))
        rows = len(program.model.state_dict()[first])
        assert torch.equal(program.model.state_dict()[first], own[first][:rows])
        assert client == "a" or rows < len(own[first])
    for _ in method.serve(fed):
        pass
    assert all(m["parameters"] for m in method.build_messages(fed, fed.clients).values())


def test_own_narrow_nets_have_weights_as_initial_ones_of_their_width(toys, tmp_path):
    """Half the inputs: weights larger by the root of two."""
    method = HeteroFL(start="own")
    fed = toys.federation(tmp_path, method, narrow_clients(toys), rounds=1)
    fed.start_round(1)
    method.register_clients(fed)
    program = fed.engine.host.programs["b"]
    groups = program.channel_groups
    own = extract(program.fresh_copy().model.state_dict(), groups, first_units(groups, 0.5))
    start = program.own_start(program.units_at(0.5))
    ratios = {n: (start[n] / own[n]).mean().item() for n in own if own[n].dim() > 1}
    assert sorted({round(ratio, 6) for ratio in ratios.values()}) == [1.0, round(2**0.5, 6)]


def test_alone_clients_with_own_starts_begin_with_their_own_nets(toys):
    run = partial(unalike.run, clients=narrow_clients(toys), training=toys.training(rounds=1))
    own = run(HeteroFL(start="own", masked=False))
    given = run(HeteroFL(masked=False))
    values = lambda result: [client.local for client in result.clients.values()]
    assert values(own) != values(given)
