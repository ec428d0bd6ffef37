"""Methods that average one model for alike clients against their formulas, in float64."""

import copy

import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from unalike import Training
from unalike.algorithms import (
    MOON,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedNova,
    FedYogi,
    Scaffold,
)
from unalike.algorithms.fednova import step_norm

CLOSE = 1e-9
SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}


def pair(toys):
    """Two clients of one shape and different size."""
    return [toys.client("a", rows=20), toys.client("b", rows=12)]


def serve(toys, folder, method, rounds=3, **training):
    """The model that both clients end with."""
    fed = toys.federation(folder, method, pair(toys), rounds=rounds, **training)
    ends = toys.serve(fed, method)
    assert toys.apart({"x": ends["a"]}, {"x": ends["b"]}) == 0
    return ends["a"]


def rounds_by_hand(toys, by_hand, server_step, local_loss=None, rounds=3, after=None, sgd=False):
    """The shared parameters after so many rounds.

    Args:
        server_step: `(x, states)` to the next x.
        local_loss: `(model, client, sent, x, y)` to a loss; default: cross entropy.
        after: `(model, client, sent)`, called when a client has trained.
    """
    x = copy.deepcopy(dict(by_hand.program(FedAvg(), pair(toys)[0]).model.state_dict()))
    local_loss = local_loss or (lambda model, c, sent, rows, y: cross_entropy(model(rows), y))
    for round in range(1, rounds + 1):
        states = []
        for client in pair(toys):
            model = by_hand.program(FedAvg(), client).model
            model.load_state_dict(x)
            loss = lambda rows, y, m=model, c=client, x=x: local_loss(m, c.id, x, rows, y)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if sgd else None
            by_hand.train(model.parameters(), client, loss, round, optimizer=optimizer)
            if after:
                after(model, client.id, x)
            states.append(copy.deepcopy(dict(model.state_dict())))
        x = server_step(x, states)
    return x


@pytest.mark.parametrize("method", [FedAdam, FedYogi, FedAdagrad])
def test_adaptive_servers_are_algorithm_2(method, toys, by_hand, tmp_path):
    beta1 = 0.0 if method is FedAdagrad else 0.9
    memory = {}

    def step(x, states):
        moved = {}
        for name, value in x.items():
            delta = sum(state[name] - value for state in states) / len(states)
            m, v = memory.get(name, (torch.zeros_like(value), torch.full_like(value, 1e-6)))
            m = beta1 * m + (1 - beta1) * delta
            if method is FedAdam:
                v = 0.99 * v + 0.01 * delta**2
            elif method is FedYogi:
                v = v - 0.01 * delta**2 * torch.sign(v - delta**2)
            else:
                v = v + delta**2
            memory[name] = (m, v)
            moved[name] = value + 0.05 * m / (v.sqrt() + 1e-3)
        return moved

    end = serve(toys, tmp_path, method(server_lr=0.05))
    assert toys.apart({"x": end}, {"x": rounds_by_hand(toys, by_hand, step)}) <= CLOSE


def test_fedavgm_keeps_momentum(toys, by_hand, tmp_path):
    memory = {}

    def step(x, states):
        mean = by_hand.mean(states, [20, 12])
        for name in x:
            memory[name] = 0.7 * memory.get(name, 0) + mean[name] - x[name]
        return {name: x[name] + memory[name] for name in x}

    end = serve(toys, tmp_path, FedAvgM(momentum=0.7))
    assert toys.apart({"x": end}, {"x": rounds_by_hand(toys, by_hand, step)}) <= CLOSE


def test_server_optimizers_average_batch_norm_statistics(toys, tmp_path):
    fed = toys.federation(tmp_path, FedAvgM(), pair(toys))
    fed.state["models"] = {"g": {"running_var": torch.tensor([1.0]), "w": torch.tensor([1.0])}}
    states = {"a": {"running_var": torch.tensor([3.0]), "w": torch.tensor([3.0])}}
    for expected in (3.0, 4.8):  # momentum 0.9: 1 + 2, then 3 + 0.9 * 2 + 0
        FedAvgM().aggregate(fed, "g", states, {"a": 1.0})
        model = fed.state["models"]["g"]
        assert model["running_var"].item() == 3.0
        assert model["w"].item() == pytest.approx(expected)


def test_fednova_normalises_by_local_steps(toys, by_hand, tmp_path):
    """20 and 12 samples in batches of 8: 3 and 2 steps; p = 20 / 32 and 12 / 32."""
    p, steps = [20 / 32, 12 / 32], [3, 2]
    effective = sum(share * count for share, count in zip(p, steps, strict=True))

    def step(x, states):
        return {
            name: value
            - effective
            * sum(
                share * (value - state[name]) / count
                for share, count, state in zip(p, steps, states, strict=True)
            )
            for name, value in x.items()
        }

    end = serve(toys, tmp_path, FedNova())
    assert toys.apart({"x": end}, {"x": rounds_by_hand(toys, by_hand, step)}) <= CLOSE


def test_fednova_counts_momentum_as_the_sum_of_its_weights():
    """||a||_1 = sum over steps k of (1 - rho^(tau - k)) / (1 - rho)."""
    training = Training(optimizer="sgd", momentum=0.9, batch_size=8, epochs=2)
    literal = sum(sum(0.9**j for j in range(6 - k)) for k in range(6))
    assert step_norm(20, training) == pytest.approx(literal, abs=CLOSE)


def test_feddyn_is_eq_1_and_algorithm_1(toys, by_hand, tmp_path):
    alpha, linear, h = 0.2, {}, {}

    def loss(model, client, sent, x, y):
        value = cross_entropy(model(x), y)
        for name, w in model.named_parameters():
            value = value + alpha / 2 * ((w - sent[name]) ** 2).sum()
            if client in linear:
                value = value - (linear[client][name] * w).sum()
        return value

    def after(model, client, sent):
        before = linear.get(client, {})
        linear[client] = {
            name: before.get(name, 0) - alpha * (w.detach() - sent[name])
            for name, w in model.named_parameters()
        }

    def step(x, states):
        for name in x:
            h[name] = h.get(name, 0) - alpha / 2 * sum(state[name] - x[name] for state in states)
        return {name: sum(state[name] for state in states) / 2 - h[name] / alpha for name in x}

    end = serve(toys, tmp_path, FedDyn(alpha=alpha))
    expected = rounds_by_hand(toys, by_hand, step, loss, after=after)
    assert toys.apart({"x": end}, {"x": expected}) <= CLOSE


def test_moon_contrasts_with_the_sent_and_the_last_local_model(toys, by_hand, tmp_path):
    mu, tau, last = 2.0, 0.5, {}

    def loss(model, client, sent, x, y):
        value = cross_entropy(model(x), y)
        if client not in last:
            return value
        other = copy.deepcopy(model)
        other.load_state_dict(sent)
        z = model.encoder(x)
        near = (cosine_similarity(z, other.encoder(x).detach()) / tau).exp()
        far = (cosine_similarity(z, last[client].encoder(x).detach()) / tau).exp()
        return value - mu * (near / (near + far)).log().mean()

    def after(model, client, sent):
        last[client] = copy.deepcopy(model)

    step = lambda x, states: by_hand.mean(states, [20, 12])
    end = serve(toys, tmp_path, MOON(mu=mu, temperature=tau))
    expected = rounds_by_hand(toys, by_hand, step, loss, after=after)
    assert toys.apart({"x": end}, {"x": expected}) <= CLOSE


@pytest.mark.parametrize("option", ["II", "I"])
def test_scaffold_corrects_gradients(option, toys, by_hand, tmp_path):
    """Option II with SGD; option I, the gradient at x, with AdamW."""
    own, c, changes = {}, {}, {}

    def gradient_at(model, client, sent):
        copied = copy.deepcopy(model)
        copied.load_state_dict(sent)
        data = next(each for each in pair(toys) if each.id == client).train
        x, y = data.rows(torch.arange(len(data)))
        found = by_hand.gradients(cross_entropy(copied(x.double()), y), copied.parameters())
        return dict(zip((n for n, _ in copied.named_parameters()), found, strict=True))

    def loss(model, client, sent, x, y):
        value = cross_entropy(model(x), y)
        mine = own.get(client, {})
        for name, w in model.named_parameters():
            value = value + ((c.get(name, 0) - mine.get(name, 0)) * w).sum()
        return value

    def after(model, client, sent):
        steps = {"a": 3, "b": 2}[client]
        mine, new = own.get(client, {}), {}
        if option == "I":
            new = gradient_at(model, client, sent)
        else:
            for name, y in model.named_parameters():
                moved = (sent[name] - y.detach()) / (steps * 0.1)
                new[name] = mine.get(name, 0) - c.get(name, 0) + moved
        changes[client] = {name: new[name] - mine.get(name, 0) for name in new}
        own[client] = new

    def step(x, states):
        for name in x:
            c[name] = c.get(name, 0) + sum(change[name] for change in changes.values()) / 2
        return by_hand.mean(states, [1, 1])

    end = serve(toys, tmp_path, Scaffold(), **(SGD if option == "II" else {}))
    expected = rounds_by_hand(toys, by_hand, step, loss, after=after, sgd=option == "II")
    assert toys.apart({"x": end}, {"x": expected}) <= CLOSE
