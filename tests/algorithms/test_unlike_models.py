"""Methods for unlike models without public data against their formulas, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, kl_div, mse_loss

from unalike import Classification, MultiLabel
from unalike.algorithms import FD, FML, FedGen, FedGH, FedKD, FedL2G, FedMRL, FedProto, FedTGP
from unalike.algorithms.fedtgp import build_network, class_gap, margin_loss, prototypes_of
from unalike.methods.prototypes import class_means, squared_distance_to
from unalike.models.encoders import CNN

CLOSE = 1e-9
WIDTH = 5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def pair(toys):
    """Two clients of different architectures."""
    return [toys.client("a"), toys.client("b", rows=12, model=toys.noisy)]


def test_prototypes_are_means_of_features_by_class(toys, by_hand):
    program = by_hand.program(FedProto(width=WIDTH))
    x, y = by_hand.batch(program, 20)
    z = program.model.projection(program.model.encoder(x))
    means, counts = class_means(program, program.model.features)
    assert means.shape == (4, WIDTH) and counts.tolist() == [5, 5, 5, 5]
    for label in range(4):
        assert (means[label] - z[y == label].mean(0)).abs().max() <= CLOSE


def test_distance_to_prototypes_counts_labels_without_one_as_zero():
    targets, z = double(3, WIDTH), double(4, WIDTH)
    y = torch.tensor([0, 2, 1, 0])
    known = torch.tensor([1.0, 1.0, 0.0])
    literal = 0.0
    for row, label in zip(z, y, strict=True):
        if known[label]:
            literal += ((row - targets[label]) ** 2).mean() / 4
    labels = Classification(3).label_matrix(y)
    assert (squared_distance_to(targets, known, z, labels) - literal).abs() <= CLOSE


def test_distance_to_prototypes_of_several_labels_is_the_mean_over_them():
    targets, z = double(2, WIDTH), double(1, WIDTH)
    labels = MultiLabel(2).label_matrix(torch.ones(1, 2))
    literal = (mse_loss(z[0], targets[0]) + mse_loss(z[0], targets[1])) / 2
    assert (squared_distance_to(targets, torch.ones(2), z, labels) - literal).abs() <= CLOSE


def test_fedproto_loss_is_eq_7(by_hand):
    program = by_hand.program(FedProto(width=WIDTH, lam=0.3))
    program.targets, program.known = double(4, WIDTH), torch.ones(4)
    x, y = by_hand.batch(program)
    z = program.model.projection(program.model.encoder(x))
    literal = cross_entropy(program.model.head(z), y) + 0.3 * mse_loss(z, program.targets[y])
    assert (program.loss(x, y) - literal).abs() <= CLOSE


@pytest.mark.parametrize("mean, expected", [("samples", 1.0), ("uniform", 2.0)])
def test_fedproto_averages_by_label_name_weighted_by_samples(mean, expected, toys, tmp_path):
    """Label "x": 0 of 3 samples and 4 of 1 sample, wherever it stands; "z" has nobody."""
    first = toys.client("a", task=Classification(["x", "y", "z", "w"]))
    second = toys.client("b", task=Classification(["y", "x", "z", "w"]))
    method = FedProto(width=1, mean=mean)
    fed = toys.federation(tmp_path, method, [first, second])
    column = lambda *values: torch.tensor(values)[:, None]
    replies = {
        "a": {"prototypes": column(0.0, 7.0, 0.0, 0.0), "counts": torch.tensor([3.0, 1, 0, 0])},
        "b": {"prototypes": column(9.0, 4.0, 0.0, 0.0), "counts": torch.tensor([1.0, 1, 0, 0])},
    }
    method.aggregate(fed, replies)
    message = method.build_message(fed, "b")
    assert message["prototypes"][:, 0].tolist() == [8.0, expected, 0.0, 0.0]
    assert message["known"].tolist() == [1, 1, 0, 0]


def test_fedtgp_margin_loss_is_eq_6():
    rows, y, prototypes, margin = double(6, WIDTH), torch.arange(6) % 3, double(3, WIDTH), 0.7
    literal = 0.0
    for row, label in zip(rows, y, strict=True):
        distances = [(row - p).norm() for p in prototypes]
        own = (-(distances[label] + margin)).exp()
        others = sum((-d).exp() for j, d in enumerate(distances) if j != label)
        literal -= (own / (own + others)).log() / 6
    assert (margin_loss(rows, y, prototypes, margin) - literal).abs() <= CLOSE


def test_fedtgp_margin_is_the_largest_distance_to_a_nearest_class():
    """Means 0, 1 and 5 on a line: nearest 1, 1 and 4."""
    rows = torch.tensor([[-1.0], [1.0], [1.0], [5.0]], dtype=torch.float64)
    assert class_gap(rows, torch.tensor([0, 0, 1, 2])) == pytest.approx(4.0, abs=CLOSE)


def test_fedtgp_server_trains_its_network(toys, tmp_path):
    method = FedTGP(width=WIDTH, server_epochs=20, server_lr=0.1)
    fed = toys.federation(tmp_path, method, pair(toys))
    rows, y, network = double(8, WIDTH), torch.arange(8) % 4, build_network(4, WIDTH).double()
    margin = min(class_gap(rows, y), 100.0)
    before = margin_loss(rows, y, prototypes_of(network), margin)
    method.train_network(network, rows, y, fed)
    assert margin_loss(rows, y, prototypes_of(network), margin) < before - 0.1


def test_fedgh_server_head_takes_a_gradient_step_on_prototypes(toys, tmp_path):
    method = FedGH(width=WIDTH, server_lr=0.5)
    fed = toys.federation(tmp_path, method, [toys.client("a")], batch_size=8)
    rows, y = double(4, WIDTH), torch.arange(4)
    replies = {"a": {"prototypes": rows, "counts": torch.ones(4)}}
    head = nn.Linear(WIDTH, 4).double()
    fed.state["heads"] = {"classification": copy.deepcopy(dict(head.state_dict()))}
    cross_entropy(head(rows), y).backward()
    method.aggregate(fed, replies)
    message = method.build_message(fed, "a")
    expected = {n: (p - 0.5 * p.grad).detach() for n, p in head.named_parameters()}
    assert toys.apart({"x": message}, {"x": expected}) <= CLOSE


def test_fedgh_clients_train_from_the_global_head(toys, by_hand):
    program = by_hand.program(FedGH(width=WIDTH))
    weight, bias = double(4, WIDTH), double(4)
    literal = copy.deepcopy(program.model)
    literal.head.load_state_dict({"weight": weight, "bias": bias})
    loss = lambda x, y: cross_entropy(literal(x), y)
    program.round = 1
    reply = program.update(weight, bias)
    by_hand.train(literal.parameters(), program.client, loss)
    assert toys.apart({"x": program.model.state_dict()}, {"x": literal.state_dict()}) <= CLOSE
    assert reply["counts"].tolist() == [5, 5, 5, 5]


def test_fd_distils_mean_logits_of_others(toys, by_hand, tmp_path):
    program = by_hand.program(FD(lam=0.4))
    program.targets, program.known = double(4, 4), torch.ones(4)
    x, y = by_hand.batch(program)
    output = program.model(x)
    literal = cross_entropy(output, y) + 0.4 * cross_entropy(output, program.targets[y].softmax(1))
    assert (program.loss(x, y) - literal).abs() <= CLOSE
    clients = [toys.client(c) for c in "abc"]
    fed = toys.federation(tmp_path, FD(), clients)
    sent = {c: {"prototypes": double(4, 4), "counts": torch.ones(4)} for c in "abc"}
    sent["b"]["counts"] = torch.tensor([0.0, 1, 1, 1])
    FD().aggregate(fed, sent)
    message = FD().build_message(fed, "a")
    mean = (sent["b"]["prototypes"] + sent["c"]["prototypes"]) / 2
    mean[0] = sent["c"]["prototypes"][0]
    assert (message["prototypes"] - mean).abs().max() <= CLOSE


def test_fd_of_several_labels_is_binary_cross_entropy(by_hand, toys):
    x, y = toys.blobs(20, 1)
    several = nn.functional.one_hot(y, 4).float()
    client = toys.client("a", task=MultiLabel(4), train=(x, several), test=(x, several))
    program = by_hand.program(FD(lam=1.0), client)
    program.targets, program.known = double(4, 4), torch.ones(4)
    rows = program.client.to_device(x[:8])
    output = program.model(rows)
    bce = nn.functional.binary_cross_entropy_with_logits
    literal = bce(output, program.targets[y[:8]].sigmoid())
    task = bce(output, several[:8].double())
    assert (program.loss(rows, several[:8].double()) - task - literal).abs() <= CLOSE


def gradients_agree(by_hand, program, literal, loss):
    modules = [program.own, program.exchanged]
    for module in modules:
        got = by_hand.gradients(loss, module.parameters())
        expected = by_hand.gradients(literal, module.parameters())
        for one, other in zip(got, expected, strict=True):
            assert (one - other).abs().max() <= CLOSE


def divergence(student, teacher):
    """KL(teacher || student), mean over rows, the teacher fixed."""
    return kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")


def test_fml_is_mutual_learning(by_hand):
    program = by_hand.program(FML(alpha=0.7, beta=0.2, width=WIDTH))
    program.own = program.model
    x, y = by_hand.batch(program)
    own, common = program.own(x), program.exchanged(x)
    literal = 0.7 * cross_entropy(own, y) + 0.3 * divergence(own, common)
    literal = literal + 0.2 * cross_entropy(common, y) + 0.8 * divergence(common, own)
    gradients_agree(by_hand, program, literal, program.loss(x, y))


def test_fedkd_weighs_distillation_by_the_task_losses(by_hand):
    program = by_hand.program(FedKD(width=WIDTH))
    program.own, program.map = program.model, nn.Linear(WIDTH, 8, bias=False).double()
    x, y = by_hand.batch(program)
    h, h_small = program.own.encoder(x), program.exchanged.encoder(x)
    own, small = program.own.head(h), program.exchanged.head(h_small)
    task = cross_entropy(own, y) + cross_entropy(small, y)
    scale = task.detach()
    literal = task + divergence(own, small) / scale + divergence(small, own) / scale
    literal = literal + 2 * mse_loss(h, program.map(h_small)) / scale
    gradients_agree(by_hand, program, literal, program.loss(x, y))


def test_common_model_is_a_cnn_for_images(toys, by_hand):
    images = toys.client(
        "a",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8)),
        train=(torch.rand(20, 1, 8, 8), torch.arange(20) % 4),
        test=None,
    )
    assert isinstance(by_hand.program(FML(), images).exchanged.encoder, CNN)


def test_unlike_clients_average_the_common_model(toys, tmp_path):
    fed = toys.federation(tmp_path, FML(), pair(toys), rounds=1)
    toys.serve(fed, FML())
    assert len(fed.state["models"]) == 1


def test_fedmrl_predicts_from_fused_and_from_coarse_features(by_hand):
    program = by_hand.program(FedMRL(sub_width=3))
    model = program.model
    x, y = by_hand.batch(program)
    fused = model.projection(torch.cat([model.common_encoder(x), model.encoder(x)], 1))
    literal = cross_entropy(model.head(fused), y) + cross_entropy(
        model.common_head(fused[:, :3]), y
    )
    assert (program.loss(x, y) - literal).abs() <= CLOSE
    assert (model(x) - model.head(fused)).abs().max() <= CLOSE
    assert {name.split(".")[0] for name in program.shared()} == {"common_encoder", "common_head"}


def test_fedgen_generator_learns_the_mean_logits_of_all_heads():
    method = FedGen(width=WIDTH, noise=2, hidden=7, diversity=0.5)
    generator = method.build_generator(3).double()
    heads = [{"head.weight": double(3, WIDTH), "head.bias": double(3)} for _ in range(2)]
    z, y = double(4, 2), torch.tensor([0, 2, 1, 0])
    features = generator(torch.cat([z, torch.eye(3, dtype=torch.float64)[y]], 1))
    shares = [0.25, 0.75]
    logits = sum(
        share * (features @ head["head.weight"].T + head["head.bias"])
        for share, head in zip(shares, heads, strict=True)
    )
    apart = sum(
        (features[i] - features[j]).abs().mean() * (z[i] - z[j]).norm() / 16
        for i in range(4)
        for j in range(4)
        if i != j
    )
    literal = cross_entropy(logits, y) + 0.5 * torch.exp(-apart)
    got = method.generator_loss(generator, heads, torch.tensor(shares).double(), z, y)
    assert (got - literal).abs() <= CLOSE


def test_fedgen_clients_learn_generated_features(by_hand):
    method = FedGen(width=WIDTH)
    program = by_hand.program(method)
    x, y = by_hand.batch(program)
    plain = cross_entropy(program.model(x), y)
    program.synthetic = None
    assert (program.loss(x, y) - plain).abs() <= CLOSE
    generator = dict(method.build_generator(4).state_dict())
    features, labels = program.draw_features(generator, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert features.shape == (20, WIDTH) and labels.unique().tolist() == [1]
    program.synthetic = (features, labels)
    literal = plain + cross_entropy(program.model.head(features), labels)
    assert (program.loss(x, y) - literal).abs() <= CLOSE


def test_fedl2g_sends_the_gradient_of_the_quiz_with_respect_to_the_guides(by_hand):
    """By finite differences of the literal two steps."""
    program = by_hand.program(FedL2G(), lr=0.3)
    guides, study, quiz = double(4, 4), torch.arange(6), torch.arange(10, 18)
    w = {n: p.detach() for n, p in program.model.named_parameters()}
    (x, y), (x_quiz, y_quiz) = (program.training_batch(rows) for rows in (study, quiz))

    def quiz_loss(guides):
        def guided(w):
            output = functional_call(program.model, w, (x.double(),))
            return cross_entropy(output, y) + mse_loss(output, guides[y])

        step = torch.func.grad(guided)(w)
        moved = {n: w[n] - 0.3 * step[n] for n in w}
        return cross_entropy(functional_call(program.model, moved, (x_quiz.double(),)), y_quiz)

    expected = torch.func.grad(quiz_loss)(guides)
    got = program.quiz_gradient(guides, study, quiz)
    assert (got - expected).abs().max() <= CLOSE and expected.abs().max() > 1e-4


def test_fedl2g_server_descends_the_mean_of_each_class(toys, tmp_path, monkeypatch):
    method = FedL2G(server_lr=0.5)
    fed = toys.federation(tmp_path, method, [toys.client("a"), toys.client("b")])
    before = method.messages(fed)["a"]["guides"].clone()
    gradients = {"a": torch.ones(4, 4), "b": torch.full((4, 4), 3.0)}
    gradients["b"][0] = 0.0  # b has no sample of class 0
    monkeypatch.setattr(fed, "call", lambda *args, **kwargs: gradients)
    method.improve_guides(fed)
    step = before - method.messages(fed)["a"]["guides"]
    assert torch.allclose(step[:, 0], torch.tensor([0.5, 1.0, 1.0, 1.0]))
