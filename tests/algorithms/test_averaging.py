"""FedAvg and FedProx against the loops written out by hand, in float64."""

import pytest
import torch

from unalike import Classification, FederationConfig
from unalike.algorithms import FedAvg, FedProx
from unalike.base.randomness import stream


def beginning(toys, client, seed=0):
    """A client's model before anything happened."""
    return FedAvg.Program(client, FedAvg(), toys.training(), seed).model


def by_hand(model, client, round, seed=0, epochs=1, anchor=None, mu=0.0):
    """A client's local epochs: fresh AdamW, batches of 8 in the order of its stream."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    x, y = client.train.rows(torch.arange(len(client.train)))
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=stream(seed, "order", client.id, round, epoch))
        for rows in order.split(8):
            loss = torch.nn.functional.cross_entropy(model(x[rows].double()), y[rows])
            if mu:
                loss = loss + mu / 2 * sum(
                    ((p - anchor[name]) ** 2).sum() for name, p in model.named_parameters()
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def rounds_by_hand(toys, clients, rounds, epochs=1, mu=0.0):
    """Parameters of the global model after so many rounds."""
    shared = {name: t.clone() for name, t in beginning(toys, clients[0]).state_dict().items()}
    for round in range(1, rounds + 1):
        trained = []
        for client in clients:
            model = beginning(toys, client)
            model.load_state_dict(shared)
            by_hand(
                model,
                client,
                round,
                epochs=epochs,
                anchor={name: t.clone() for name, t in shared.items()},
                mu=mu,
            )
            trained.append(model.state_dict())
        total = sum(len(c.train) for c in clients)
        shared = {
            name: sum(len(c.train) * t[name] for c, t in zip(clients, trained, strict=True)) / total
            for name in shared
        }
    return shared


def alike(toys):
    """Three clients of one shape and different size; no last batch of one."""
    return [toys.client("a", rows=20), toys.client("b", rows=12), toys.client("c", rows=36)]


@pytest.mark.parametrize("rounds, epochs", [(1, 1), (3, 2)])
def test_fedavg_is_the_loop_by_hand(rounds, epochs, toys, tmp_path):
    fed = toys.federation(tmp_path, FedAvg(), alike(toys), rounds=rounds, epochs=epochs)
    models = toys.serve(fed, FedAvg())
    shared = rounds_by_hand(toys, alike(toys), rounds, epochs)
    assert toys.apart(models, dict.fromkeys("abc", shared)) <= 1e-9
    assert (
        toys.apart(models, dict.fromkeys("abc", beginning(toys, alike(toys)[0]).state_dict()))
        > 1e-2
    )


def test_mean_weights_clients_by_samples_or_equally():
    replies = {"a": {"samples": 10}, "b": {"samples": 30}}
    assert FedAvg().client_weights(replies) == {"a": 10.0, "b": 30.0}
    assert FedAvg(mean="uniform").client_weights(replies) == {"a": 1.0, "b": 1.0}


def test_uniform_mean_is_the_plain_mean_of_the_clients(toys, tmp_path):
    """One round: every client trains from the same parameters, and all count the same."""
    fed = toys.federation(tmp_path, FedAvg(mean="uniform"), alike(toys), rounds=1)
    ends = toys.serve(fed, FedAvg(mean="uniform"))
    models = []
    for client in alike(toys):
        model = beginning(toys, client)
        model.load_state_dict(beginning(toys, alike(toys)[0]).state_dict())
        by_hand(model, client, 1)
        models.append(model.state_dict())
    expected = {name: sum(model[name] for model in models) / 3 for name in models[0]}
    assert toys.apart(ends, dict.fromkeys("abc", expected)) <= 1e-9


def test_fedprox_is_the_loop_by_hand(toys, tmp_path):
    models = toys.serve(
        toys.federation(tmp_path, FedProx(mu=0.5), alike(toys), rounds=2), FedProx(mu=0.5)
    )
    assert (
        toys.apart(models, dict.fromkeys("abc", rounds_by_hand(toys, alike(toys), 2, mu=0.5)))
        <= 1e-9
    )


def test_fedprox_without_mu_is_fedavg(toys, tmp_path):
    ends = [
        toys.serve(toys.federation(tmp_path / str(i), method, toys.clients()), method)
        for i, method in enumerate((FedAvg(), FedProx(mu=0), FedProx(mu=1.0)))
    ]
    assert toys.apart(ends[0], ends[1]) == 0
    assert toys.apart(ends[0], ends[2]) > 1e-4


def test_fedprox_gradient_is_mu_times_the_drift(toys):
    """d/dw of mu / 2 ||w - w_sent||^2 is mu (w - w_sent)."""
    gradients = {}
    for mu in (0.0, 0.3):
        program = FedProx.Program(toys.client("a"), FedProx(mu=mu), toys.training(), 0)
        program.round_start = {
            name: tensor.clone() for name, tensor in program.model.state_dict().items()
        }
        with torch.no_grad():
            for p in program.model.parameters():
                p += 0.1
        x, y = program.client.train.rows(torch.arange(8))
        program.loss(program.client.to_device(x), y).backward()
        gradients[mu] = [p.grad for p in program.model.parameters()]
    assert all(
        torch.allclose(with_term - without_term, torch.full_like(without_term, 0.3 * 0.1))
        for without_term, with_term in zip(*gradients.values(), strict=True)
    )


def test_clients_of_different_shapes_form_groups(toys, tmp_path):
    """a and b average with each other; c, of another shape, goes on from its own parameters."""
    clients = toys.clients()
    models = toys.serve(toys.federation(tmp_path / "all", FedAvg(), clients, rounds=2), FedAvg())
    assert toys.apart({"x": models["a"]}, {"x": models["b"]}) == 0
    pair = toys.serve(
        toys.federation(tmp_path / "pair", FedAvg(), toys.clients(2), rounds=2), FedAvg()
    )
    assert toys.apart(pair, {c: models[c] for c in "ab"}) == 0
    fed = toys.federation(tmp_path / "again", FedAvg(), toys.clients(), rounds=1)
    toys.serve(fed, FedAvg())
    assert (
        fed.state["group"]["a"] == fed.state["group"]["b"] != fed.state["group"]["c"]
        and len(fed.state["models"]) == 2
    )


def test_heads_with_other_labels_are_not_averaged(toys, tmp_path):
    """Three clients of one shape, the third with the same labels in another order."""
    names = [str(label) for label in range(4)]
    clients = [
        toys.client("a"),
        toys.client("b"),
        toys.client("c", task=Classification(names[::-1])),
    ]
    assert clients[0].task.labels == tuple(names)
    for method, groups in ((FedAvg(), 2), (toys.method("heterofl"), 2), (toys.method("fedrcl"), 1)):
        fed = toys.federation(tmp_path / type(method).__name__, method, clients, rounds=1)
        toys.serve(fed, method)
        assert (
            fed.state["group"]["a"] == fed.state["group"]["b"]
            and len(fed.state["models"]) == groups
        )


def test_a_group_of_one_trains_alone(toys, tmp_path):
    from unalike.models import MLP

    lone = toys.client("z", model=toys.partial(MLP, (6,), (5,), 8))
    models = toys.serve(
        toys.federation(tmp_path, FedAvg(), [*alike(toys), lone], rounds=2), FedAvg()
    )
    model = beginning(toys, lone)
    for round in (1, 2):
        by_hand(model, lone, round)
    assert toys.apart({"z": models["z"]}, {"z": model.state_dict()}) <= 1e-9


def test_clients_that_do_not_answer_are_left_out_of_the_mean(toys, tmp_path):
    """The mean is over those who replied: with one client too slow it is that of the other two."""
    slow = [
        toys.client("a", rows=20),
        toys.client("b", rows=12),
        toys.client("c", rows=36, speed=1e-3),
    ]
    fed = toys.federation(
        tmp_path, FedAvg(), slow, rounds=2, federation=FederationConfig(deadline=60)
    )
    models = toys.serve(fed, FedAvg())
    assert {f.client for f in fed.failures} == {"c"}
    assert (
        toys.apart(models, dict.fromkeys("abc", rounds_by_hand(toys, alike(toys)[:2], 2))) <= 1e-9
    ), "c leaves with the global model too"


def test_clients_that_missed_registration_join_later(toys, tmp_path):
    """c missed registration; its link works from the second round on, and then it takes part."""
    clients = [
        toys.client("a", rows=20),
        toys.client("b", rows=12),
        toys.client("c", rows=36, latency=100.0),
    ]
    fed = toys.federation(
        tmp_path, FedAvg(), clients, rounds=2, federation=FederationConfig(deadline=60)
    )
    for round in FedAvg().serve(fed):
        if round == 1:
            assert set(fed.state["group"]) == {"a", "b"}
            fed.engine.client_infos["c"] = toys.client("c", rows=36).info()
    assert set(fed.state["group"]) == {"a", "b", "c"} and len(fed.state["models"]) == 1
    assert fed.ledger.total("up", round=2, client="c", operation="update") > 0


def accuracy(model, samples):
    x, y = samples.rows(torch.arange(len(samples)))
    model.eval()
    return 100 * float((model(x.double()).argmax(1) == y).double().mean())


@pytest.mark.parametrize("name", ["fedavg", "local"])
@pytest.mark.parametrize("test", ["own", "common"])
def test_values_are_measured_on_the_common_or_own_test_set(name, test, toys, tmp_path):
    """Global models on the common test set, if any; personal ones on the client's own."""
    common = {"common": toys.blobs(60, 77)} if test == "common" else {}
    # own test sets of one class each, so that the two cannot be confused
    own = {id: (toys.blobs(40, 5)[0], torch.full((40,), k)) for k, id in enumerate("abc")}
    clients = [toys.client(id, test=own[id], **common) for id in "abc"]
    results = toys.execute(tmp_path / "run", toys.method(name), clients, rounds=2, alone=True)
    states = toys.states(tmp_path / "run")
    globally = name == "fedavg" and test == "common"
    for client in clients:
        entry, model = results["clients"][client.id], beginning(toys, client)
        model.load_state_dict(states[client.id])
        assert entry["value"] == pytest.approx(
            accuracy(model, client.common if globally else client.test)
        )
        assert entry["test"] == ("common" if globally else "own")
        if name == "local":
            assert entry["alone"] == entry["value"]
    assert (len({entry["value"] for entry in results["clients"].values()}) == 1) == globally
    if globally:  # alone is measured where together is
        assert all(entry["alone"] > 40 for entry in results["clients"].values())


def test_fedavg_ends_with_one_model(toys, tmp_path):
    results = toys.execute(
        tmp_path / "run",
        FedAvg(),
        alike(toys),
        rounds=2,
        federation=FederationConfig(participation=0.4),
    )
    assert len(set(toys.hashes(results).values())) == 1
