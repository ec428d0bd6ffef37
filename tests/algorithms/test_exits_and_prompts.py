"""DepthFL, ScaleFL, FedAWA, FedPGP, PosCoOp, FedLGT and FedMLP against their formulas, in float64."""

from math import exp, log

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy

from unalike.algorithms import DepthFL, FedAWA, FedLGT, FedMLP, FedPGP, PosCoOp, ScaleFL
from unalike.algorithms.fedawa import weighting_cost
from unalike.algorithms.fedmlp import mean_prototypes, prototypes_of, tag
from unalike.methods.early_exits import cut_after, exit_layers
from unalike.tasks import MultiLabel

CLOSE = 1e-9


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def unit(v):
    return v / v.norm()


def kl_by_hand(p, q):
    """KL of two rows of logits, summed term by term."""
    p, q = p.softmax(-1), q.softmax(-1)
    return sum(float(a) * log(float(a) / float(b)) for a, b in zip(p, q, strict=True))


# early exits


def test_exits_are_evenly_spread_and_layers_behind_are_cut():
    encoder = nn.Sequential(nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]))
    assert exit_layers(encoder, 2) == ["0.2", "0.4"]
    cut_after(encoder, "0.2")
    assert sorted(encoder.state_dict()) == sorted(
        f"0.{i}.{name}" for i in range(3) for name in ("weight", "bias")
    )


@pytest.mark.parametrize(("capacity", "exits"), [(1.0, 3), (0.5, 2), (0.1, 1)])
def test_a_client_holds_the_share_of_exits_that_it_can_train(toys, by_hand, capacity, exits):
    model = by_hand.program(DepthFL(), toys.client("a", capacity=capacity)).model
    x = toys.blobs(5, 1)[0].double()
    outputs = model.exits(x)
    assert len(outputs) == exits and len(model.head) == exits
    torch.testing.assert_close(model(x), sum(outputs) / exits, rtol=0, atol=CLOSE)


def test_depthfl_adds_mutual_distillation_over_pairs(toys, by_hand):
    program = by_hand.program(DepthFL())
    x, y = by_hand.batch(program, 4)
    exits = [exit.detach() for exit in program.model.exits(x)]
    expected = sum(float(cross_entropy(exit, y)) for exit in exits)
    for i in range(3):
        for j in range(3):
            if i != j:
                rows = [kl_by_hand(exits[j][n], exits[i][n]) for n in range(4)]
                expected += sum(rows) / 4 / 2
    assert abs(float(program.loss(x, y)) - expected) <= CLOSE


@pytest.mark.parametrize("round", [1, 2])
def test_scalefl_weighs_exits_by_depth_and_distils_after_a_quarter(toys, by_hand, round):
    program = by_hand.program(ScaleFL(gamma=0.2, temperature=2.0), rounds=4)
    program.round = round
    x, y = by_hand.batch(program, 4)
    exits = [exit.detach() for exit in program.model.exits(x)]
    expected = 0.0
    for number, exit in enumerate(exits, 1):
        cost = float(cross_entropy(exit, y))
        if round > 1:
            rows = [kl_by_hand(exits[-1][n] / 2, exit[n] / 2) for n in range(4)]
            cost += 0.2 * 4 * sum(rows) / 4
        expected += number * cost / 6
    assert abs(float(program.loss(x, y)) - expected) <= CLOSE


def test_a_tensor_is_averaged_over_the_clients_that_have_it(toys, tmp_path):
    """Sizes 20 and 12: a layer that both have moves to the weighted mean, a deep one to a's."""
    method = DepthFL()
    clients = [toys.client("a", rows=20), toys.client("b", rows=12, capacity=0.1)]
    fed = toys.federation(tmp_path, method, clients, rounds=1)
    sent = {}
    average = method.aggregate

    def watch(fed, group, states, weights):
        sent.update(states)
        average(fed, group, states, weights)

    method.aggregate = watch
    for finished in method.serve(fed):
        fed.finished = finished
    (model,) = fed.state["models"].values()
    shared = [name for name in sent["a"] if name in sent["b"]]
    alone = [name for name in sent["a"] if name not in sent["b"]]
    assert shared and alone and len(sent["b"]) == len(shared)
    for name in shared:
        expected = (20 * sent["a"][name] + 12 * sent["b"][name]) / 32
        assert (model[name] - expected).abs().max() <= CLOSE
    for name in alone:
        assert torch.equal(model[name], sent["a"][name])


# FedAWA


def test_fedawa_minimises_spread_and_turn():
    start = torch.randn(6, dtype=torch.float64)
    models = start + torch.randn(3, 6, dtype=torch.float64)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    mean = sum(w * (m - start) for w, m in zip(weights, models, strict=True))
    expected = 0.0
    for w, m in zip(weights, models, strict=True):
        turn = 1 - float(m @ start / (m.norm() * start.norm()))
        expected += float(w) * (float(((m - start) - mean).pow(2).sum().sqrt()) + turn)
    assert abs(float(weighting_cost(weights, models, start)) - expected) <= CLOSE


def test_fedawa_first_step_moves_logits_by_the_rate_and_averages_with_them(toys, tmp_path):
    """Adam's first step is the rate, against the sign of the gradient."""
    method = FedAWA(server_lr=0.3)
    fed = toys.federation(tmp_path, method, [toys.client("a", rows=20), toys.client("b", rows=12)])
    start = {"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    states = {"a": {"w": start["w"] + 1.0}, "b": {"w": start["w"] + torch.tensor([0.0, 5.0])}}
    fed.state["models"] = {"g": start}
    method.aggregate(fed, "g", states, {"a": 20.0, "b": 12.0})
    logits = torch.tensor([20 / 32, 12 / 32], dtype=torch.float64, requires_grad=True)
    models = torch.stack([states[c]["w"] for c in "ab"])
    (slope,) = torch.autograd.grad(weighting_cost(logits.softmax(0), models, start["w"]), logits)
    after = (logits - 0.3 * slope.sign()).detach()
    assert torch.allclose(torch.tensor(list(fed.state["logits"].values())).double(), after)
    share = float(after.softmax(0)[0])
    expected = share * states["a"]["w"] + (1 - share) * states["b"]["w"]
    assert (fed.state["models"]["g"]["w"] - expected).abs().max() <= 1e-7


# prompts


@pytest.fixture
def prompted(toys):
    """A program of a method on a client with a vision-language model, and two rows."""

    def build(method):
        client = toys.toys_for(type(method))["client"]("a")
        program = method.Program(client, method, toys.training(), 0)
        for p in program.model.parameters():
            p.data += 0.3 * torch.randn(p.shape, dtype=p.dtype)
        x, y = client.train.rows(torch.arange(2))
        return program, program.model.look(program.client.to_device(x)), y.double()

    return build


def read_prompt(model, context, label):
    """Text feature of "[context] label"."""
    words = torch.cat([context, model.embed(model.tokens([label])[0])[0]])
    return model.read(words[None], torch.ones(1, len(words), dtype=torch.bool))[0]


def test_poscoop_compares_patches_with_a_prompt_and_a_vector(prompted):
    program, x, _ = prompted(PosCoOp(tokens=2))
    head, model = program.model.head, program.model.encoder
    for row in range(2):
        for label in range(4):
            present = unit(read_prompt(model, head.tokens[label], str(label)))
            absent = unit(head.absent[label])
            pairs = []
            for patch in x["patches"][row]:
                pairs.append((float(20 * unit(patch) @ present), float(20 * unit(patch) @ absent)))
            total = sum(exp(p) for p, _ in pairs)
            expected = 5 * sum(exp(p) / total * (p - n) for p, n in pairs)
            assert abs(float(program.model(x)[row, label]) - expected) <= 1e-8


def test_fedpgp_adds_a_low_rank_to_the_shared_prompt(prompted):
    program, x, y = prompted(FedPGP(tokens=2, rank=1, mu=0.7, temperature=0.5))
    head, model = program.model.head, program.model.encoder
    own = head.tokens + torch.outer(head.down[:, 0], head.up[0])
    contrast, texts = 0.0, []
    for label in range(4):
        texts.append(read_prompt(model, own, str(label)))
        shared = read_prompt(model, head.tokens, str(label))
        frozen = model.texts([f"a photo of a {label}"])[0]
        positive = exp(float(unit(shared) @ unit(frozen)) / 0.5)
        negative = exp(float(unit(shared) @ unit(texts[-1])) / 0.5)
        contrast -= log(positive / (positive + negative)) / 4
    output = head.verdict(model.similarity(x["whole"], torch.stack(texts)))
    expected = float(program.error(output, y)) + 0.7 * contrast
    assert abs(float(program.loss(x, y)) - expected) <= CLOSE
    assert set(program.shared()) == set(program.model.state_dict()) - {"head.down", "head.up"}


def test_fedlgt_learns_unknown_labels_and_tells_the_others(prompted):
    """With everything sure, the hidden labels are those drawn; their states are 0."""
    program, x, y = prompted(FedLGT(heads=2, unsure=0.0))
    program.sent = program.model.head
    torch.manual_seed(6)
    loss = float(program.loss(x, y))
    torch.manual_seed(6)
    hidden = torch.rand(2, 1) > torch.rand(2, 4)
    assert 0 < int(hidden.sum()) < 8
    states = torch.zeros(2, 4, dtype=torch.int64)
    for row in range(2):
        for label in range(4):
            if not hidden[row, label]:
                states[row, label] = 2 if y[row, label] == 1 else 1
    p = program.model.head(program.model.encoder, **x, states=states).sigmoid()
    expected = float(binary_cross_entropy(p[hidden], y[hidden]))
    assert abs(loss - expected) <= CLOSE


def test_fedlgt_hides_what_the_sent_model_is_unsure_of(prompted):
    program, x, y = prompted(FedLGT(heads=2, unsure=0.5))  # everything is unsure
    program.sent = program.model.head
    p = program.model(x).sigmoid()
    assert abs(float(program.loss(x, y)) - float(binary_cross_entropy(p, y))) <= CLOSE


# FedMLP


def test_fedmlp_prototypes_are_means_without_and_with_a_label():
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
    y = torch.tensor([[1.0, -1.0], [1.0, 0.0], [0.0, -1.0]])
    prototypes, counts = prototypes_of(features, y)
    assert counts.tolist() == [[1, 2], [1, 0]]
    assert prototypes[0].tolist() == [[0.0, 2.0], [2.0, 0.0]]
    assert prototypes[1].tolist() == [[3.0, 0.0], [0.0, 0.0]]
    other = {"prototypes": torch.ones(2, 2, 2), "counts": torch.tensor([[3.0, 0.0], [1.0, 1.0]])}
    mean = mean_prototypes({"a": {"prototypes": prototypes, "counts": counts}, "b": other})
    assert mean[0, 0].tolist() == [0.75, 1.25]  # (0, 2) once and (1, 1) three times
    assert mean[1, 1].tolist() == [1.0, 1.0]


def test_fedmlp_tags_the_surest_unknown_entries():
    """Four unknown entries, a quarter on either side: one absent, one present, two left."""
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, 0.6], [1.0, 0.0]])
    y = torch.tensor([[-1.0], [-1.0], [-1.0], [-1.0], [1.0]])
    prototypes = torch.tensor([[[0.0, 2.0], [5.0, 0.0]]])
    labels = tag(features, y, prototypes, FedMLP(tagged=0.25))
    assert labels[:, 0].tolist() == [1.0, 0.0, -1.0, -1.0, 1.0]
    assert torch.equal(tag(features, y, torch.zeros(1, 2, 2), FedMLP(tagged=0.25)), y)


def test_fedmlp_follows_the_sent_model_where_a_label_is_unknown(toys):
    method = FedMLP(consistency=0.5)
    client = toys.toys_for(FedMLP)["client"]("a")
    program = method.Program(client, method, toys.training(), 0)
    other = method.Program(toys.toys_for(FedMLP)["client"]("b"), method, toys.training(), 0)
    program.sent = other.model
    x, y = client.train.rows(torch.arange(3))
    x, y = x.double(), y.double()
    y[0, 1] = y[2, 3] = -1.0
    p, goal = program.model(x).sigmoid(), other.model(x).sigmoid()
    apart = ((p[0, 1] - goal[0, 1]) ** 2 + (p[2, 3] - goal[2, 3]) ** 2) / 2
    expected = MultiLabel(4).loss(program.model(x), y) + 0.5 * apart
    assert abs(float(program.loss(x, y)) - float(expected)) <= CLOSE
