"""Stacks of clients: optimizers, padding, batch norm, context, and what falls back."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn

from unalike.algorithms import ALGORITHMS
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fedprox import FedProx
from unalike.core import stacking
from unalike.core.program_context import ProgramContext
from unalike.core.stacking import Stacks
from unalike.methods.averaging import AveragingProgram
from unalike.models import build_encoder
from unalike.models.encoders import MLP
from unalike.training.loop import Training, build_optimizer
from unalike.training.stacked_epochs import Member, StackedEpochs, StackRows
from unalike.training.stacked_optimizer import StackedOptimizer, optimizer_kind

DOUBLE = torch.float64


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double()


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "sgd", "weight_decay": 0.1},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        {"optimizer": "adam", "weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
)
def test_a_stacked_optimizer_steps_as_torch_does(fields):
    """Models with other learning rates and step counts; the last one takes no second step."""
    training = Training(lr=0.1, **fields)
    models = [linear(seed) for seed in range(3)]
    optimizers = [
        build_optimizer(list(m.parameters()), training, 0.1 * (i + 1)) for i, m in enumerate(models)
    ]
    gradients = torch.randn(4, 3, 2, 3, dtype=DOUBLE)  # (steps, models, ...)

    def step_alone(i, step):
        models[i].weight.grad = gradients[step, i]
        models[i].bias.grad = None
        optimizers[i].step()

    step_alone(0, 0)  # it has a past
    stacked = StackedOptimizer(models[0], optimizers[0])
    state = stacked.read_state([dict(m.named_parameters()) for m in models], optimizers)
    parameters = {
        name: torch.stack([m.get_parameter(name).detach() for m in models])
        for name in ("weight", "bias")
    }
    for step in (1, 2):
        active = None if step == 1 else torch.tensor([True, True, False])
        stacked.step(parameters, {"weight": gradients[step], "bias": None}, state, active)
        for i in range(3):
            if step == 1 or i < 2:
                step_alone(i, step)
    for i, model in enumerate(models):
        assert torch.allclose(parameters["weight"][i], model.weight, rtol=1e-12)
        assert torch.equal(parameters["bias"][i], model.bias)
    # the state goes back, and each goes on alone
    copies = [linear(9) for _ in range(3)]
    for model, copy in zip(models, copies):
        copy.load_state_dict(model.state_dict())
    others = [
        build_optimizer(list(m.parameters()), training, 0.1 * (i + 1)) for i, m in enumerate(copies)
    ]
    stacked.write_state(state, [dict(m.named_parameters()) for m in copies], others)
    for i in range(3):
        step_alone(i, 3)
        copies[i].weight.grad = gradients[3, i]
        others[i].step()
        assert torch.allclose(copies[i].weight, models[i].weight, rtol=1e-6)


def test_optimizers_of_another_kind_are_not_stacked():
    model = linear(0)
    named = dict(model.named_parameters())
    parameters = list(model.parameters())
    assert optimizer_kind(named, torch.optim.SGD(parameters, 0.1, momentum=0.9)) is not None
    assert (
        optimizer_kind(named, torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)) is None
    )
    assert optimizer_kind(named, torch.optim.Adam(parameters, amsgrad=True)) is None
    assert optimizer_kind(named, torch.optim.Adagrad(parameters)) is None
    one = optimizer_kind(named, torch.optim.Adam(parameters, lr=0.1))
    assert one == optimizer_kind(named, torch.optim.Adam(parameters, lr=0.2))
    assert one != optimizer_kind(named, torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1))


@pytest.fixture
def compare(toys, tmp_path, monkeypatch, caplog):
    """Runs clients as a stack and one by one; returns how far they end apart, and the stacks."""
    caplog.set_level(logging.INFO, logger="unalike.core.stacking")
    sizes = Counter()
    take_steps = StackedEpochs.take_steps

    def count(self, rows):
        sizes[len(rows.counts)] += 1
        return take_steps(self, rows)

    monkeypatch.setattr(StackedEpochs, "take_steps", count)

    def run(algorithm, clients, **changed):
        results = {}
        for mode in ("never", "always"):
            options = {"rounds": 2, "epochs": 2, "optimizer": "adam"} | changed
            results[mode] = toys.execute(
                tmp_path / mode, algorithm, clients(), options={"stack": mode}, **options
            )
        states = [toys.states(tmp_path / mode) for mode in ("never", "always")]
        return toys.apart(*states), dict(sizes), results

    return run


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))


def test_batch_norm_is_stacked_among_clients_of_equal_rows(compare, toys):
    rows = {"a": 20, "b": 20, "d": 23, "e": 23, "f": 17}
    apart, sizes, _ = compare(
        FedAvg(), lambda: [toys.client(id, rows=n, model=normed) for id, n in rows.items()]
    )
    assert apart <= 1e-9
    assert sizes == {2: 4, 1: 2}  # a and b, d and e, and f, in two rounds


def test_clients_without_padding_of_a_loss_over_the_batch_are_grouped_by_rows(compare, toys):
    class Contrast(FedAvg):
        class Program(AveragingProgram):
            def loss(self, x, y):
                z = self.model.features(x)
                return super().loss(x, y) + (z @ z.mT).logsumexp(1).mean()

    apart, sizes, _ = compare(
        Contrast(), lambda: [toys.client(id, rows=20 + 3 * (i // 2)) for i, id in enumerate("abcd")]
    )
    assert apart <= 1e-9
    assert sizes == {2: 4}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_clients_with_fewer_steps_wait_where_a_graph_has_a_fixed_size(
    optimizer, compare, toys, monkeypatch
):
    """As on a GPU, where those that are done take part in every step and are left as they are."""
    init = StackedEpochs.__init__

    def fix_size(self, *args):
        init(self, *args)
        self.fixed_size = True

    monkeypatch.setattr(StackedEpochs, "__init__", fix_size)
    apart, sizes, _ = compare(
        FedAvg(),
        lambda: [toys.client(id, rows=10 + 9 * i) for i, id in enumerate("abcd")],
        optimizer=optimizer,
        momentum=0.9,
    )
    assert apart <= 1e-9
    assert sizes == {4: 2}


@pytest.mark.parametrize("longest, lengths", [(1, [1] * 7), (4, [4, 1, 2]), (2, [2, 2, 1, 2])])
def test_steps_are_taken_at_once_while_members_and_sizes_stay(longest, lengths):
    """Two members of 22 and 14 rows, two epochs in batches of 8, one more of the first alone."""
    epochs = [torch.arange(22).split(8), torch.arange(14).split(8)]
    batches = [[*epochs[0] * 2, torch.arange(6)], [*epochs[1] * 2]]
    x = torch.arange(22.0)[:, None]
    members = [
        Member(
            nn.Linear(1, 1),
            {},
            None,
            lambda rows: (x[rows], rows.long()),
            own,
            rows,
        )
        for own, rows in zip(batches, (22, 14), strict=True)
    ]
    rows = StackRows(members, -1)
    spans = list(rows.spans(longest))
    assert [stop - start for start, stop in spans] == lengths
    at_once = [rows.batches(start, stop, 2) for start, stop in spans]
    for step in range(7):
        own_x, y = rows.batches(step, step + 1, 2)
        (start, _), (span_x, span_y) = next(
            (span, batch)
            for span, batch in zip(spans, at_once, strict=True)
            if span[0] <= step < span[1]
        )
        assert torch.equal(own_x[:, 0], span_x[:, step - start])
        assert torch.equal(y[:, 0], span_y[:, step - start])
        for i, own in enumerate(batches):
            seen = y[i, 0][y[i, 0] != -1].tolist()
            assert seen == (own[step].tolist() if step < len(own) else [])


def test_large_models_use_the_steps_of_their_kind_one_after_another(compare, toys, monkeypatch):
    monkeypatch.setattr("unalike.core.stacking.CPU_STACK", 1)
    apart, sizes, _ = compare(FedAvg(), lambda: [toys.client(id) for id in "abcd"])
    assert apart <= 1e-12
    assert sizes == {1: 8}


def test_tensors_and_modules_that_a_program_holds_are_stacked_with_it(compare, toys):
    """A mask of each client, a number of all, a frozen teacher and what a closure holds."""

    class Held(FedProx):
        class Program(FedProx.Program):
            def update(self, parameters):
                mark = float(sum(map(ord, self.client.id)))
                self.held = {"mask": torch.full((4,), mark / 100, dtype=DOUBLE), "power": 2}
                self.teacher = nn.Linear(8, 8, dtype=DOUBLE).requires_grad_(False)
                nn.init.constant_(self.teacher.weight, mark / 1000)
                return super().update(parameters)

            update.operation = "changes"
            update.sends = AveragingProgram.update.sends

            def learn(self, epochs=None, optimizer=None, loss=None):
                shift = torch.full((), ord(self.client.id) / 100, dtype=DOUBLE)

                def closed(x, y):
                    z = self.model.features(x)
                    distance = ((self.teacher(z) - z) ** 2).mean() + shift * z.mean()
                    output = self.model.head(z) * self.held["mask"] ** self.held["power"]
                    drift = self.algorithm.mu * self.squared_drift()
                    return self.client.task.loss(output, y) + distance + drift

                return super().learn(epochs, optimizer, closed)

    apart, sizes, _ = compare(Held(mu=0.3), lambda: [toys.client(id) for id in "abcd"])
    assert apart <= 1e-9
    assert sizes == {4: 2}


@pytest.mark.parametrize("trick", ["random", "branch", "dropout", "other data", "in place"])
def test_what_cannot_be_stacked_trains_one_by_one_and_says_so(trick, compare, toys, caplog):
    class Tricky(FedAvg):
        class Program(AveragingProgram):
            def loss(self, x, y):
                if trick == "random":
                    x = x + 0.01 * torch.randn(x.shape[1:], dtype=x.dtype)
                if trick == "in place":
                    self.held = getattr(self, "held", torch.zeros((), dtype=DOUBLE))
                    self.held.add_(x.mean())
                    return super().loss(x, y) * (1 + self.held)
                if trick == "branch" and float(x.sum()) > 0:
                    x = x * 2
                if trick == "other data":
                    return super().loss(x, y) * float(self.client.train.x.sum())
                return super().loss(x, y)

    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3)) if trick == "dropout" else toys.mlp
    apart, sizes, _ = compare(Tricky(), lambda: [toys.client(id, model=model) for id in "abcd"])
    assert apart == 0
    assert sizes == {}
    if trick != "dropout":
        assert "train one by one" in caplog.text
        assert len(caplog.records) == 1


def test_one_client_diverges_and_the_others_go_on(toys, tmp_path):
    clients = [toys.client(id) for id in "abcd"]
    x, y = toys.blobs(20, 1)
    clients[2] = toys.client("c", train=(x * 1e200, y))
    results = toys.execute(
        tmp_path / "run", FedAvg(), clients, options={"stack": "always"}, federation=None
    )
    assert {failure["client"] for failure in results["failures"]} == {"c"}
    assert results["clients"]["a"]["value"] > 30


def test_a_frozen_backbone_is_kept_once(toys, monkeypatch, tmp_path):
    frozen = MLP((6,), (8,), 8).requires_grad_(False)
    stacks = []
    load = StackedEpochs.load

    def look(self, members):
        load(self, members)
        stacks.append((set(self.stacked), set(self.shared)))

    monkeypatch.setattr(StackedEpochs, "load", look)
    clients = [toys.client(id, model=frozen) for id in "abcd"]
    toys.execute(tmp_path / "run", FedAvg(), clients, options={"stack": "always"})
    assert all(name.startswith(("model.head", "context")) for name in stacks[0][0])
    assert any(name.startswith("model.encoder") for name in stacks[0][1])


def test_automatic_stacks_are_for_many_small_models_on_a_cpu():
    small, large = nn.Linear(10, 10), nn.Linear(1000, 1000)
    auto = Stacks("auto")
    assert auto.is_worthwhile(small, 16) and not auto.is_worthwhile(small, 15)
    assert not auto.is_worthwhile(large, 16)
    assert not auto.is_worthwhile(nn.Conv2d(1, 1, 3), 16)
    assert Stacks("always").is_worthwhile(large, 2)


def test_programs_that_differ_in_a_number_are_of_another_kind(toys):
    method = ALGORITHMS["fedavg"]()
    programs = [method.Program(toys.client(id), method, Training(), 0) for id in "ab"]
    kinds = lambda: [ProgramContext(p, p.loss).kind for p in programs]
    assert kinds()[0] == kinds()[1]
    programs[0].scale = 1.0
    programs[1].scale = 2.0
    assert kinds()[0] != kinds()[1]
    programs[1].scale = 1.0
    assert kinds()[0] == kinds()[1]


def test_a_loss_that_changes_with_the_round_is_checked_in_each(compare, toys):
    """From the second round on it depends on how many rows a batch has, padded ones too."""

    class Later(FedAvg):
        class Program(AveragingProgram):
            def loss(self, x, y):
                own = super().loss(x, y)
                return own if self.round == 1 else own + self.model(x).square().sum()

    rows = {"a": 20, "b": 23, "d": 20, "e": 23}
    apart, _, _ = compare(Later(), lambda: [toys.client(id, rows=n) for id, n in rows.items()])
    assert apart <= 1e-9


@pytest.mark.parametrize("name", ["cnn", "vgg11", "resnet18", "efficientnet"])
def test_networks_of_images_run_as_a_stack(name):
    """torch.func.vmap knows no memory layouts: ResNet-18 trained one by one for that alone."""
    options = {"weights": "none", "size": 64} if name == "efficientnet" else {}
    models = [build_encoder(name, (3, 32, 32), options).double() for _ in range(2)]
    images = torch.rand(2, 4, 3, 32, 32, dtype=torch.float64)
    parameters, buffers = torch.func.stack_module_state(models)

    def forward(parameters, buffers, x):
        return torch.func.functional_call(models[0], (parameters, buffers), x)

    together = torch.func.vmap(forward)(parameters, buffers, images)
    for output, model, x in zip(together, models, images, strict=True):
        assert torch.allclose(output, model(x), atol=1e-9)


@pytest.mark.parametrize("wrong", [False, True])
def test_float64_decides_where_a_stack_in_float32_differs(
    wrong, compare, toys, monkeypatch, caplog
):
    """Rounding in a deep network looks like a wrong stack in float32."""

    class Hidden(FedAvg):
        class Program(AveragingProgram):
            def loss(self, x, y):
                factor = 1 + 1e-5 * ord(self.client.id) if wrong else 1
                return super().loss(x, y) * factor

    find_difference = stacking.find_difference

    def find(alone, together):
        rounded = alone[0][0].dtype == torch.float32
        return "far apart" if rounded else find_difference(alone, together)

    monkeypatch.setattr(stacking, "find_difference", find)

    def clients():
        return [toys.client(id, dtype=torch.float32) for id in "abcd"]

    apart, sizes, _ = compare(Hidden(), clients)
    assert apart <= 1e-5
    assert sizes == ({} if wrong else {4: 2})
    assert ("train one by one" in caplog.text) == wrong
