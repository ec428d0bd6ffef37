"""Personalised methods for alike models against their formulas written out, in float64."""

import copy
from math import exp

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from unalike.algorithms import (
    APFL,
    Ditto,
    FedALA,
    FedAMP,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedBN,
    FedFomo,
    FedPer,
    FedRep,
    FedRoD,
    LGFedAvg,
    PerFedAvg,
    PFedMe,
)

CLOSE = 1e-9


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def pair(toys, model=None):
    """Two clients of one shape and different size."""
    model = model or toys.mlp
    return [toys.client("a", rows=20, model=model), toys.client("b", rows=12, model=model)]


def shared_from(first, models, names):
    """Give all models the parameters of the first one that have such a name."""
    initial = {n: t.clone() for n, t in first.state_dict().items() if names(n)}
    for model in models:
        model.load_state_dict(initial, strict=False)


def serve(toys, folder, method, clients, rounds=2, **training):
    return toys.serve(toys.federation(folder, method, clients, rounds=rounds, **training), method)


def rounds_by_hand(toys, by_hand, method, clients, names, local, rounds=2):
    """Parameters after so many rounds of averaging of the parameters with such names."""
    models = [by_hand.program(method, c).model for c in clients]
    shared_from(models[0], models, names)
    for round in range(1, rounds + 1):
        for client, model in zip(clients, models, strict=True):
            local(client, model, round)
        parts = [{n: t for n, t in m.state_dict().items() if names(n)} for m in models]
        mean = by_hand.mean(parts, [len(c.train) for c in clients])
        for model in models:
            model.load_state_dict(mean, strict=False)
    return {c.id: m.state_dict() for c, m in zip(clients, models, strict=True)}


def plain(by_hand):
    """Local epochs on the cross entropy."""

    def local(client, model, round):
        by_hand.train(model.parameters(), client, lambda x, y: cross_entropy(model(x), y), round)

    return local


def in_body(name):
    return not name.startswith("head.")


def test_fedper_averages_bodies_and_leaves_heads(toys, by_hand, tmp_path):
    ends = serve(toys, tmp_path, FedPer(), pair(toys))
    expected = rounds_by_hand(toys, by_hand, FedPer(), pair(toys), in_body, plain(by_hand))
    assert toys.apart(ends, expected) <= CLOSE
    assert (ends["a"]["head.2.weight"] - ends["b"]["head.2.weight"]).abs().max() > 1e-3


def test_fedrep_trains_the_head_then_the_body(toys, by_hand, tmp_path):
    def local(client, model, round):
        loss = lambda x, y: cross_entropy(model(x), y)
        by_hand.train(model.head.parameters(), client, loss, round, epochs=(1, 2))
        by_hand.train(model.encoder.parameters(), client, loss, round)

    method = FedRep(head_epochs=2)
    ends = serve(toys, tmp_path, method, pair(toys))
    expected = rounds_by_hand(toys, by_hand, method, pair(toys), in_body, local)
    assert toys.apart(ends, expected) <= CLOSE


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))


def test_fedbn_keeps_batch_norm_local(toys, by_hand, tmp_path):
    names = lambda name: not name.startswith("encoder.1.")
    ends = serve(toys, tmp_path, FedBN(), pair(toys, with_batch_norm))
    expected = rounds_by_hand(
        toys, by_hand, FedBN(), pair(toys, with_batch_norm), names, plain(by_hand)
    )
    assert toys.apart(ends, expected) <= CLOSE
    assert (ends["a"]["encoder.1.weight"] - ends["b"]["encoder.1.weight"]).abs().max() > 1e-3


def test_fedbabu_trains_bodies_with_one_fixed_head_then_fine_tunes_all(toys, by_hand, tmp_path):
    def local(client, model, round):
        loss = lambda x, y: cross_entropy(model(x), y)
        by_hand.train(model.encoder.parameters(), client, loss, round)

    method, clients = FedBABU(fine_tuning_epochs=2), pair(toys)
    models = [by_hand.program(method, c).model for c in clients]
    assert toys.apart({"x": models[0].head.state_dict()}, {"x": models[1].head.state_dict()}) == 0
    averaged = rounds_by_hand(toys, by_hand, method, clients, in_body, local)
    expected = {}
    for client, model in zip(clients, models, strict=True):
        model.load_state_dict(averaged[client.id])
        loss = lambda x, y, model=model: cross_entropy(model(x), y)
        by_hand.train(model.parameters(), client, loss, round=2, epochs=(1, 2))
        expected[client.id] = model.state_dict()
    assert toys.apart(serve(toys, tmp_path, method, clients), expected) <= CLOSE


def test_lgfedavg_averages_heads_of_unlike_models(toys, by_hand, tmp_path):
    method = LGFedAvg(width=5)
    clients = [toys.client("a"), toys.client("b", rows=12, model=with_batch_norm)]
    ends = serve(toys, tmp_path, method, clients)
    in_head = lambda name: name.startswith("head.")
    expected = rounds_by_hand(toys, by_hand, method, clients, in_head, plain(by_hand))
    assert toys.apart(ends, expected) <= CLOSE


def test_fedavgft_is_fedavg_with_local_epochs_at_the_end(toys, by_hand, tmp_path):
    method, clients = FedAvgFT(fine_tuning_epochs=2), pair(toys)
    fedavg = serve(toys, tmp_path / "fedavg", FedAvg(), clients)
    expected = {}
    for client in clients:
        model = by_hand.program(method, client).model
        model.load_state_dict(fedavg[client.id])
        loss = lambda x, y, model=model: cross_entropy(model(x), y)
        by_hand.train(model.parameters(), client, loss, round=2, epochs=(1, 2))
        expected[client.id] = model.state_dict()
    assert toys.apart(serve(toys, tmp_path / "tuned", method, clients), expected) <= CLOSE


def test_fine_tuning_for_an_evaluation_leaves_the_client_as_it_was(toys, by_hand):
    program = by_hand.program(FedAvgFT())
    before = copy.deepcopy(program.model.state_dict())
    tuned = program.appraise(program.model.state_dict(), common=False)
    assert toys.apart({"a": before}, {"a": dict(program.model.state_dict())}) == 0
    assert tuned["accuracy"] > program.evaluate()["accuracy"] and program.work == 0


def test_ditto_is_fedavg_and_a_model_near_it(toys, by_hand, tmp_path):
    clients, lam = pair(toys), 0.5
    shared = [by_hand.program(FedAvg(), c).model for c in clients]
    shared_from(shared[0], shared, lambda name: True)
    own = copy.deepcopy(shared)
    for round in (1, 2):
        for client, w, v in zip(clients, shared, own, strict=True):
            sent = copy.deepcopy(w.state_dict())
            plain(by_hand)(client, w, round)

            def loss(x, y, v=v, sent=sent):
                drift = sum(((p - sent[n]) ** 2).sum() for n, p in v.named_parameters())
                return cross_entropy(v(x), y) + lam / 2 * drift

            by_hand.train(v.parameters(), client, loss, round)
        mean = by_hand.mean([w.state_dict() for w in shared], [20, 12])
        for w in shared:
            w.load_state_dict(mean)
    expected = {c.id: v.state_dict() for c, v in zip(clients, own, strict=True)}
    assert toys.apart(serve(toys, tmp_path, Ditto(lam=lam), clients), expected) <= CLOSE


def test_apfl_has_the_gradients_of_the_paper(by_hand):
    """w: grad f(w); v: alpha grad f(v_bar); alpha: <v - w, grad f(v_bar)>."""
    program = by_hand.program(APFL(alpha=0.3))
    w, v = program.exchanged, copy.deepcopy(program.model)
    with torch.no_grad():
        for p in v.parameters():
            p += 0.1 * torch.randn_like(p)
    program.mixture, program.own = program.model, v
    program.alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    x, y = by_hand.batch(program)
    loss = program.loss(x, y)
    pairs = dict(w.named_parameters())
    mixed = {n: (0.3 * p + 0.7 * pairs[n]).detach() for n, p in v.named_parameters()}
    mixed = {n: t.requires_grad_() for n, t in mixed.items()}
    at_mixture = by_hand.gradients(
        cross_entropy(functional_call(program.mixture, mixed, (x,)), y), mixed.values()
    )
    at_w = by_hand.gradients(cross_entropy(w(x), y), w.parameters())
    for got, expected in zip(by_hand.gradients(loss, w.parameters()), at_w, strict=True):
        assert (got - expected).abs().max() <= CLOSE
    for got, expected in zip(by_hand.gradients(loss, v.parameters()), at_mixture, strict=True):
        assert (got - 0.3 * expected).abs().max() <= CLOSE
    along = zip(v.parameters(), w.parameters(), at_mixture, strict=True)
    expected = sum(((p - q) * g).sum() for p, q, g in along)
    assert (by_hand.gradients(loss, [program.alpha])[0] - expected).abs() <= CLOSE


def test_apfl_ends_with_the_mixture(toys, by_hand):
    program = by_hand.program(APFL(alpha=0.3, adaptive=False))
    program.update(program.shared())
    own, shared = program.memory["own"], program.shared()
    for name, p in program.model.named_parameters():
        assert (p - (0.3 * own[name] + 0.7 * shared[name])).abs().max() <= CLOSE


def test_pfedme_takes_k_steps_then_follows_the_envelope(by_hand):
    method = PFedMe(lam=2.0, steps=3, personal_lr=0.1)
    program = by_hand.program(method)
    program.personal = program.model
    x, y = by_hand.batch(program)
    theta = [p.detach().clone() for p in program.model.parameters()]
    with torch.no_grad():
        for p in program.exchanged.parameters():
            p += 0.1
    w = [p.detach().clone() for p in program.exchanged.parameters()]
    literal = copy.deepcopy(program.model)
    for _ in range(3):
        for p, value in zip(literal.parameters(), theta, strict=True):
            p.data = value
        found = by_hand.gradients(cross_entropy(literal(x), y), literal.parameters())
        triples = zip(theta, found, w, strict=True)
        theta = [t - 0.1 * (g + 2.0 * (t - q)) for t, g, q in triples]
    got = by_hand.gradients(program.loss(x, y), program.exchanged.parameters())
    for gradient, t, q, p in zip(got, theta, w, program.model.parameters(), strict=True):
        assert (gradient - 2.0 * (q - t)).abs().max() <= CLOSE
        assert (p - t).abs().max() <= CLOSE


def test_pfedme_server_moves_by_beta(toys, tmp_path):
    fed = toys.federation(tmp_path, PFedMe(beta=0.25), [toys.client("a")])
    fed.state["models"] = {"g": {"w": torch.tensor([0.0, 4.0])}}
    PFedMe(beta=0.25).aggregate(fed, "g", {"a": {"w": torch.tensor([4.0, 0.0])}}, {"a": 1.0})
    assert fed.state["models"]["g"]["w"].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("order", ["first", "exact"])
def test_perfedavg_has_the_gradient_of_eq_3(order, by_hand):
    """Exact: (I - alpha H) g at the adapted parameters; first order: g."""
    program = by_hand.program(PerFedAvg(inner_lr=0.2, order=order))
    x, y = by_hand.batch(program, 4)
    w = {n: p.detach() for n, p in program.model.named_parameters()}
    names = list(w)
    f = lambda p, rows: cross_entropy(functional_call(program.model, p, (x[rows],)), y[rows])
    expected = {n: torch.zeros_like(t) for n, t in w.items()}
    for inner, outer in (([0, 1], [2, 3]), ([2, 3], [0, 1])):
        step = torch.func.grad(f)(w, inner)
        adapted = {n: w[n] - 0.2 * step[n] for n in names}
        g = torch.func.grad(f)(adapted, outer)
        if order == "exact":
            _, curved = torch.func.jvp(lambda p, i=inner: torch.func.grad(f)(p, i), (w,), (g,))
            g = {n: g[n] - 0.2 * curved[n] for n in names}
        expected = {n: expected[n] + g[n] / 2 for n in names}
    got = by_hand.gradients(program.loss(x, y), program.model.parameters())
    for name, gradient in zip(names, got, strict=True):
        assert (gradient - expected[name]).abs().max() <= CLOSE


def test_perfedavg_adapts_by_a_step_on_all_samples(by_hand):
    program = by_hand.program(PerFedAvg(inner_lr=0.2))
    x, y = by_hand.batch(program, 20)
    literal = copy.deepcopy(program.model)
    found = by_hand.gradients(cross_entropy(literal(x), y), literal.parameters())
    program.fine_tune()
    for p, q, g in zip(program.model.parameters(), literal.parameters(), found, strict=True):
        assert (p - (q - 0.2 * g)).abs().max() <= CLOSE


def test_fedrod_has_a_balanced_and_an_empirical_loss(toys, by_hand):
    x, y = toys.blobs(20, 5)
    y = torch.where(y == 3, 0, y)  # classes 0, 1, 2, 3: 10, 5, 5 and no samples
    program = by_hand.program(FedRoD(), toys.client("a", train=(x, y)))
    x, y = by_hand.batch(program)
    model = program.model
    z = model.encoder(x)
    adjusted = model.head(z)[:, :3] + torch.tensor([10.0, 5.0, 5.0], dtype=torch.float64).log()
    fixed = model.head(z).detach() + model.personal_head(z.detach())
    literal = (
        -adjusted.log_softmax(1)[range(8), y].mean() - fixed.log_softmax(1)[range(8), y].mean()
    )
    loss = program.loss(x, y)
    assert (loss - literal).abs() <= CLOSE
    pairs = zip(*(by_hand.gradients(f, model.parameters()) for f in (loss, literal)), strict=True)
    assert all((got - expected).abs().max() <= CLOSE for got, expected in pairs)
    assert (model(x) - model.head(z) - model.personal_head(z)).abs().max() <= CLOSE


def test_fedamp_weights_models_by_attention():
    """Distances 4 and 9: exp(-d / sigma) / sigma times alpha; the rest is its own."""
    models = {
        "a": {"w": torch.tensor([0.0, 0.0])},
        "b": {"w": torch.tensor([2.0, 0.0])},
        "c": {"w": torch.tensor([0.0, 3.0])},
    }
    shares = FedAMP(alpha=0.5, sigma=2.0).attention(models, "a")
    assert shares["b"] == pytest.approx(0.25 * exp(-2.0), abs=CLOSE)
    assert shares["c"] == pytest.approx(0.25 * exp(-4.5), abs=CLOSE)
    assert shares["a"] == pytest.approx(1 - shares["b"] - shares["c"], abs=CLOSE)
    strong = FedAMP(alpha=1e4, sigma=2.0).attention(models, "a")
    assert strong["a"] == pytest.approx(0, abs=CLOSE) and strong["b"] / strong[
        "c"
    ] == pytest.approx(exp(2.5))


def test_fedamp_pulls_towards_the_mixture(by_hand):
    program = by_hand.program(FedAMP(lam=3.0, alpha=0.5))
    program.round_start = {n: p.detach() - 0.1 for n, p in program.model.named_parameters()}
    x, y = by_hand.batch(program)
    drift = sum(0.1**2 * p.numel() for p in program.model.parameters())
    literal = cross_entropy(program.model(x), y) + 3.0 / (2 * 0.5) * drift
    assert (program.loss(x, y) - literal).abs() <= CLOSE


def test_fedfomo_weights_models_by_gain_per_distance(toys, by_hand):
    program = by_hand.program(FedFomo(validation=0.25))
    own = copy.deepcopy(program.model.state_dict())
    others = [{n: t + 0.3 * torch.randn_like(t) for n, t in own.items()} for _ in range(6)]
    data = program.split[1]
    x, y = data.rows(torch.arange(len(data)))
    assert len(data) == 5 and len(program.samples("train")) == 15
    loss = lambda state: cross_entropy(functional_call(program.model, state, (x.double(),)), y)
    raw = []
    for other in others:
        distance = sum(((other[n] - own[n]) ** 2).sum() for n in own).sqrt()
        raw.append(max(0.0, float((loss(own) - loss(other)) / distance)))
    assert 0 < sum(value > 0 for value in raw) < 6
    expected = [value / sum(raw) for value in raw]
    assert program.weigh(others) == pytest.approx(expected, abs=CLOSE)


def test_fedala_learns_weights_by_the_gradient_of_eq_5(by_hand):
    program = by_hand.program(FedALA(eta=0.7, share=0.4), batch_size=8)
    names = program.mixed_names()
    assert names == {"head.2.weight", "head.2.bias"}
    own = {n: p.detach().clone() for n, p in program.model.named_parameters() if n in names}
    gap = {n: 0.5 * torch.randn_like(t) for n, t in own.items()}
    weights = {n: torch.full_like(t, 0.5) for n, t in own.items()}
    literal = {n: t.clone().requires_grad_() for n, t in weights.items()}
    seen = []
    usual = program.training_batch
    program.training_batch = lambda rows: seen.append(usual(rows)) or seen[-1]
    program.learn_weights(own, gap, weights, 0)
    ((x, y),) = seen  # 8 of 20 rows: one batch
    mixture = {n: own[n] + gap[n] * literal[n] for n in own}
    loss = cross_entropy(functional_call(program.model, mixture, (x.double(),)), y)
    for name, gradient in zip(own, by_hand.gradients(loss, literal.values()), strict=True):
        expected = (0.5 - 0.7 * gradient).clamp(0, 1)
        assert (weights[name] - expected).abs().max() <= CLOSE


def test_fedala_takes_lower_layers_over(toys, by_hand):
    program = by_hand.program(FedALA())
    program.start(program.shared())
    sent = {n: t + 1.0 for n, t in program.shared().items()}
    own = copy.deepcopy(program.model.state_dict())
    program.receive(sent)
    for name, tensor in program.model.state_dict().items():
        if name in program.mixed_names():
            expected = own[name] + (sent[name] - own[name]) * program.memory["weights"][name]
        else:
            expected = sent[name]
        assert (tensor - expected).abs().max() <= CLOSE
