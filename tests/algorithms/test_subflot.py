"""SubFLOT's parts against their formulas, and other methods that send submodels."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import unalike
from unalike import Classification, Client, FederationConfig
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.feddropout import FedDropout
from unalike.algorithms.fedrolex import FedRolex
from unalike.algorithms.heterofl import HeteroFL
from unalike.algorithms.subflot import SubFLOT
from unalike.base.errors import UserError
from unalike.methods.submodels import SubmodelMethod
from unalike.models import MLP
from unalike.models.submodels import expand, extract, first_units, reindex_groups, rescale_columns

CAPACITIES = {"a": 1.0, "b": 0.5, "c": 0.25}


def net():
    """Linear layers with batch norm and a residual."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.inner, self.width = (
                nn.Linear(6, 8),
                nn.BatchNorm1d(8),
                nn.Linear(8, 8),
                8,
            )

        def forward(self, x):
            x = self.norm(self.first(x)).relu()
            return x + self.inner(x).relu()

    return Net()


def clients(toys, model=net, **about):
    return [
        toys.client(id, model=model, capacity=capacity, **about)
        for id, capacity in CAPACITIES.items()
    ]


def start_federation(toys, folder, algorithm, members):
    """A federation whose server knows everybody."""
    fed = toys.federation(folder, algorithm, members)
    fed.start_round(1)
    algorithm.register_clients(fed)
    return fed


def largest(one, other):
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


def test_cold_start_sends_the_first_units_at_the_announced_ratio(toys, tmp_path):
    algorithm = SubFLOT()
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    sent = algorithm.build_messages(fed, fed.active)
    whole = algorithm.server_model(fed, "a")
    for client, ratio in CAPACITIES.items():
        widths = algorithm.channel_groups(fed, client)
        expected = extract(whole, widths, first_units(widths, ratio))
        expected |= {
            name: expected[name] / ratio
            for name in ("encoder.inner.weight", "head.0.weight", "head.2.weight")
        }  # as strong
        assert largest(sent[client]["parameters"], expected) < 1e-12
        assert sent[client]["units"] == [max(1, int(ratio * width.units)) for width in widths]
    assert (
        len(whole["encoder.first.weight"]) == 8
        and len(sent["c"]["parameters"]["encoder.first.weight"]) == 2
    )


def test_otp_recovers_an_upload_that_is_the_permuted_server_model(toys, tmp_path):
    """Equal width, alpha = 1."""
    algorithm = SubFLOT(alpha=1.0)
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    whole, widths = algorithm.server_model(fed, "a"), algorithm.channel_groups(fed, "a")
    mixed = dict(whole)
    for width in widths:
        order = torch.randperm(width.units, generator=torch.Generator().manual_seed(3))
        for place in width.slices:
            index = torch.arange(mixed[place.tensor].shape[place.axis])
            index[place.entries.flatten()] = place.entries[order].flatten()
            mixed[place.tensor] = mixed[place.tensor].index_select(place.axis, index)
    assert largest(mixed, whole) > 0.01
    fed.archive["a"] = mixed
    fed.state |= {"merged": 0, "uploads": {"a": {"units": [w.units for w in widths], "round": 0}}}
    assert largest(algorithm.build_messages(fed, ["a"])["a"]["parameters"], mixed) < 1e-6
    half = replace(algorithm, alpha=0.25)
    fed.scratch.clear()
    fed.archive["a"] = {name: tensor + 0.001 for name, tensor in mixed.items()}
    sent = half.build_messages(fed, ["a"])["a"]["parameters"]
    expected = {
        n: 0.25 * t + 0.75 * (t + 0.001) if t.is_floating_point() else t for n, t in mixed.items()
    }
    assert largest(sent, expected) < 1e-6


@pytest.mark.parametrize("model", [net, lambda: MLP((6,), (32,), 8)])
def test_ota_of_one_narrow_client_computes_the_same(toys, tmp_path, model):
    algorithm = SubFLOT(solver="auto")
    fed = start_federation(toys, tmp_path, algorithm, clients(toys, model))
    sent = algorithm.build_messages(fed, ["b"])["b"]
    program = fed.engine.host.programs["b"]
    torch.manual_seed(0)
    small = program.build_submodel(sent["units"])
    small.load_state_dict(
        {
            n: t + 0.1 * torch.randn_like(t).abs() if t.is_floating_point() else t
            for n, t in sent["parameters"].items()
        }
    )
    whole = copy.deepcopy(fed.engine.host.programs["a"].model)
    algorithm.aggregate(fed, fed.state["group"]["b"], {"b": dict(small.state_dict())}, {"b": 1.0})
    whole.load_state_dict(algorithm.server_model(fed, "a"))
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(whole.eval()(x), small.eval()(x), atol=1e-6, rtol=0)


def test_picked_units_return_to_their_positions(toys, tmp_path):
    """Untrained submodels change nothing; trained ones change their own entries only."""
    algorithm = SubFLOT()
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    before, group = (
        {n: t.clone() for n, t in algorithm.server_model(fed, "a").items()},
        fed.state["group"]["b"],
    )
    sent = {
        c: message["parameters"]
        for c, message in algorithm.build_messages(fed, ["a", "b", "c"]).items()
    }
    algorithm.aggregate(fed, group, sent, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert largest(algorithm.server_model(fed, "a"), before) < 1e-12
    fed.start_round(2)
    moved = {n: t + 0.001 if t.is_floating_point() else t for n, t in sent["c"].items()}
    algorithm.aggregate(fed, group, {"c": moved}, {"c": 1.0})
    change = (
        algorithm.server_model(fed, "a")["encoder.first.weight"] - before["encoder.first.weight"]
    ).abs()
    assert float((change[:2] - 0.001).abs().max()) < 1e-9 and float(change[2:].max()) == 0


def test_at_full_width_without_penalty_it_is_fedavg(toys, tmp_path):
    """lambda = 0, rho = 0, alpha = 1, and steps so small that each neuron stays nearest itself."""
    alike = lambda: [toys.client(id, model=net) for id in "abc"]
    states = {}
    for name, algorithm in (("fedavg", FedAvg()), ("subflot", SubFLOT(alpha=1.0, penalty=0.0))):
        fed = toys.federation(tmp_path / name, algorithm, alike(), lr=1e-3, rounds=3)
        for finished in algorithm.serve(fed):
            fed.finished = finished
        (model,) = fed.state["models"].values()
        states[name] = {
            key: tensor
            for key, tensor in model.items()
            if "norm." not in key or key.endswith(("weight", "bias"))
        }
    assert largest(states["fedavg"], states["subflot"]) < 1e-6


def test_penalty_gradient_is_two_lambda_rho_times_the_drift(toys, tmp_path):
    algorithm = SubFLOT(penalty=3.0)
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    sent = algorithm.build_messages(fed, ["c"])["c"]
    fed.call("update", per_client={"c": sent})
    program = fed.engine.host.programs["c"]
    assert program.pruning_rate == pytest.approx(0.75)
    x, y = toys.blobs(5, 1)
    for p in program.model.parameters():
        p.data += 0.1
    origin = copy.deepcopy(program.model)
    origin.load_state_dict(sent["parameters"])
    more = program.training_scales()
    with rescale_columns(program.model, more), rescale_columns(origin, more):
        plain = torch.autograd.grad(
            program.task_loss(x.double(), y), list(program.model.parameters())
        )
        pulled = torch.autograd.grad(program.loss(x.double(), y), list(program.model.parameters()))
        for p, before, without, with_it in zip(
            program.model.parameters(), origin.parameters(), plain, pulled
        ):
            torch.testing.assert_close(
                with_it - without, 2 * 3.0 * 0.75 * (p - before), atol=1e-6, rtol=0
            )


def test_a_narrow_client_learns_at_the_pace_of_full_ones(toys, tmp_path):
    """Reparametrized, it computes the same; columns four times as large make an Adam step twice as
    large."""
    fed = start_federation(toys, tmp_path, SubFLOT(), clients(toys))
    sent = SubFLOT().build_messages(fed, ["c"])["c"]
    x, _ = toys.blobs(5, 1)
    ways = {}
    for level in (True, False):
        other = toys.federation(
            tmp_path / str(level), SubFLOT(level=level, penalty=0.0), clients(toys), batch_size=64
        )
        other.start_round(1)
        ways[level] = other.call("update", per_client={"c": sent})["c"]["parameters"]
    program = fed.engine.host.programs["c"]
    program.load_submodel(**sent)
    out, names = (
        program.model.eval()(x.double()),
        [name for name, _ in program.model.named_parameters()],
    )
    with rescale_columns(program.model, program.training_scales()):
        torch.testing.assert_close(program.model(x.double()), out)
        assert (
            largest(
                {"w": 2 * program.model.head[2].parametrizations.weight.original},
                {"w": sent["parameters"]["head.2.weight"]},
            )
            < 1e-12
        )
    assert sorted(name for name, _ in program.model.named_parameters()) == sorted(names)
    assert largest(program.model.state_dict(), sent["parameters"]) < 1e-12
    moved = {
        level: {n: (t - sent["parameters"][n]).abs().max() for n, t in way.items()}
        for level, way in ways.items()
    }
    assert float(moved[True]["head.2.weight"] / moved[False]["head.2.weight"]) == pytest.approx(
        2, rel=0.02
    )
    assert float(
        moved[True]["encoder.first.weight"] / moved[False]["encoder.first.weight"]
    ) == pytest.approx(1, rel=0.02)


def test_tensors_keep_their_addresses_from_round_to_round(toys, tmp_path):
    """A CUDA graph reads the same addresses: parameters, scales, and the round's start."""
    algorithm = SubFLOT(penalty=3.0)
    fed, addresses, distances = start_federation(toys, tmp_path, algorithm, clients(toys)), [], []
    program, recordings = fed.engine.host.programs["c"], []
    gradient_step = program.gradient_step

    def model_addresses():
        return [tensor.data_ptr() for tensor in program.model.state_dict().values()]

    def record(loss, scaler=None):
        recordings.append((loss.graph_safe, model_addresses()))
        return gradient_step(loss, scaler)

    program.gradient_step = record
    for round in (1, 2, 3):
        fed.start_round(round)
        sent = algorithm.build_messages(fed, ["c"])["c"]
        fed.call("update", per_client={"c": sent})
        addresses.append(
            model_addresses()
            + [
                tensor.data_ptr()
                for tensor in (*program.training_scales().values(), program.round_start)
            ]
        )
        program.load_submodel(**sent)
        with rescale_columns(program.model, program.training_scales()):
            distances.append(float(program.squared_drift()))
    assert (
        addresses[0] == addresses[1] == addresses[2]
        and recordings[0] == recordings[1] == recordings[2]
        and recordings[0][0]
    )
    assert distances == [0.0] * 3  # and it is where this round began, not the first


def test_shared_parameters_are_rescaled_once_and_restored_after_errors():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].weight = model[0].weight
    x, before, more = (
        torch.randn(3, 4).double(),
        model[0].weight.clone(),
        torch.full((1, 4), 2.0).double(),
    )
    out, column_scales = model(x), {"0.weight": more, "1.weight": more}
    with rescale_columns(model, column_scales):
        torch.testing.assert_close(model(x), out)
        torch.testing.assert_close(2 * model[0].parametrizations.weight.original, before)
    with pytest.raises(AttributeError), rescale_columns(model, column_scales | {"2.weight": more}):
        pass
    assert torch.equal(model[0].weight, before) and model[1].weight is model[0].weight
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_client_restored_from_disk_keeps_its_optimizer(toys, tmp_path, optimizer):
    """Reparametrized parameters have another order than plain ones; optimizer state is saved in the
    plain order."""
    ends = [
        toys.execute(
            tmp_path / str(alive),
            SubFLOT(),
            clients(toys),
            alone=True,
            alive=alive,
            rounds=3,
            optimizer=optimizer,
            lr=0.05,
            momentum=0.9 * (optimizer == "sgd"),
        )["clients"]
        for alive in (256, 1)
    ]
    assert [result["alone"] for result in ends[0].values()] == [
        result["alone"] for result in ends[1].values()
    ]
    assert all(result["alone"] is not None for result in ends[0].values())


def test_an_exported_masked_model_predicts_as_measured(toys, tmp_path):
    x, y = toys.blobs(60, 5)
    label_masks = {
        c: torch.isin(y, torch.tensor(labels)) for c, labels in {"a": [0, 1], "b": [2, 3]}.items()
    }
    members = [
        toys.client(c, model=net, train=(x[have], y[have]), test=(x[have], y[have]))
        for c, have in label_masks.items()
    ]
    results = unalike.run(
        SubFLOT(masked=True),
        members,
        training=toys.training(rounds=2),
        out=tmp_path / "run",
        alone=False,
    )["clients"]
    models = unalike.trained(tmp_path / "run", members)
    for c, have in label_masks.items():
        assert 100 * float(
            (models[c](x[have].double()).argmax(1) == y[have]).double().mean()
        ) == pytest.approx(results[c]["value"])
        assert not models[c](x.double())[
            :, [label for label in range(4) if label not in y[have]]
        ].any()
    pytest.importorskip("onnxscript")
    assert "model.onnx" in unalike.export(tmp_path / "run", "a", clients=members)[-1]


def test_a_step_of_sgd_changes_a_narrow_layer_as_much_as_a_full_one():
    """Columns four times as large, of a quarter of the units: divided by 2 in training."""
    moved = {}
    for units, root in ((64, 1.0), (16, 2.0)):
        layer, x = (
            nn.Sequential(nn.Linear(units, 3, bias=False)).double(),
            torch.ones(1, units).double(),
        )
        before = layer(x).detach()
        with rescale_columns(layer, {"0.weight": torch.full((1, units), root).double()}):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
            (layer(x) - before - 1).square().sum().backward()
            optimizer.step()
        moved[units] = layer(x).detach() - before
    torch.testing.assert_close(moved[16], moved[64])
    assert float(moved[64].min()) > 0.1


def test_a_restored_model_moves_to_the_device_of_the_uploads(toys, tmp_path, monkeypatch):
    """As after a resume with clients on a GPU; "meta" stands for one."""

    class Devices(Exception):
        pass

    def place_uploads(fed, model, states):
        raise Devices({tensor.device.type for tensor in model.values()})

    algorithm = SubmodelMethod()
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    sent = algorithm.build_messages(fed, ["c"])["c"]["parameters"]
    monkeypatch.setattr(algorithm, "place_uploads", place_uploads)
    with pytest.raises(Devices) as caught:
        algorithm.aggregate(
            fed,
            fed.state["group"]["c"],
            {"c": {name: tensor.to("meta") for name, tensor in sent.items()}},
            {"c": 1.0},
        )
    assert caught.value.args[0] == {"meta"}


def test_expanded_parameters_are_on_the_full_models_device(toys, tmp_path):
    """Narrowed or not; "meta" stands for a GPU."""
    fed = start_federation(toys, tmp_path, SubmodelMethod(), clients(toys))
    widths, model = (
        SubmodelMethod().channel_groups(fed, "c"),
        SubmodelMethod().server_model(fed, "c"),
    )
    keep = first_units(widths, 0.5)
    back = expand(
        extract(model, widths, keep),
        widths,
        keep,
        {name: tensor.to("meta") for name, tensor in model.items()},
    )
    assert {tensor.device.type for tensor in back.values()} == {"meta"}


def test_entries_are_averaged_over_clients_that_have_them(toys, tmp_path):
    algorithm = SubmodelMethod()
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    before = {n: t.clone() for n, t in algorithm.server_model(fed, "a").items()}
    sent = algorithm.build_messages(fed, ["b", "c"])
    filled = {
        c: {n: torch.full_like(t, value) for n, t in sent[c]["parameters"].items()}
        for c, value in (("b", 1), ("c", 4))
    }
    algorithm.aggregate(fed, fed.state["group"]["b"], filled, {"b": 2.0, "c": 1.0})
    after = algorithm.server_model(fed, "a")["encoder.first.weight"]
    assert (
        (after[:2] == 2).all()
        and (after[2:4] == 1).all()
        and torch.equal(after[4:], before["encoder.first.weight"][4:])
    )


def test_batch_norm_statistics_are_recomputed_on_the_clients_data(toys, tmp_path):
    """However far off those were that came down."""
    algorithm = SubFLOT()
    fed = start_federation(toys, tmp_path, algorithm, [toys.client("a", model=net, capacity=0.5)])
    message = algorithm.build_messages(fed, ["a"])["a"]
    message["parameters"]["encoder.norm.running_var"].fill_(1e6)
    reply = fed.call("update", per_client={"a": message})["a"]["parameters"]
    program = fed.engine.host.programs["a"]
    activations = program.model.encoder.first(
        program.client.to_device(
            program.client.train.rows(torch.arange(len(program.client.train)))[0]
        )
    )
    assert torch.allclose(
        reply["encoder.norm.running_mean"].double(), activations.detach().mean(0).double(), atol=0.1
    )
    assert (
        0.5
        < float(
            (
                reply["encoder.norm.running_var"].double() / activations.detach().var(0).double()
            ).mean()
        )
        < 2
    )
    assert program.model.encoder.norm.momentum == 0.1
    fed.call("receive", per_client={"a": message})
    assert float(program.model.encoder.norm.running_var.max()) < 1e3, (
        "also of a submodel that is only kept"
    )


@pytest.mark.parametrize(
    "method, rounds",
    [(FedRolex, {1: [1, 2], 7: [0, 7], 8: [0, 1]}), (HeteroFL, {1: [0, 1], 7: [0, 1]})],
)
def test_which_units_are_sent(toys, tmp_path, method, rounds):
    algorithm = method()
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    for number, units in rounds.items():
        fed.start_round(number)
        assert algorithm.select_units(fed, "c")[0].tolist() == units


def test_federated_dropout_draws_new_units_each_round(toys, tmp_path):
    algorithm = FedDropout()
    fed = start_federation(toys, tmp_path, algorithm, clients(toys))
    draws = set()
    for number in range(1, 9):
        fed.start_round(number)
        draws.add(tuple(algorithm.select_units(fed, "b")[0].tolist()))
        assert torch.equal(algorithm.select_units(fed, "b")[0], algorithm.select_units(fed, "b")[0])
    assert len(draws) > 4 and all(len(set(units)) == 4 for units in draws)


def test_heterofl_masks_absent_labels_and_scales_narrow_layers(toys, tmp_path):
    x, _ = toys.blobs(20, 5)
    one = toys.client(
        "a",
        model=net,
        capacity=0.5,
        train=(x, torch.arange(20) % 2),
        common=(x, torch.arange(20) % 4),
    )
    algorithm = HeteroFL()
    fed = start_federation(toys, tmp_path, algorithm, [one, toys.client("b", model=net)])
    fed.call("update", per_client=algorithm.build_messages(fed, ["a", "b"]))
    program = fed.engine.host.programs["a"]
    assert program.present().tolist() == [1, 1, 0, 0]
    log_loss, program.model = program.evaluate(common=True)["log_loss"], program.model.eval()
    assert not program.model(x.double())[:, 2:].any() and program.model(x.double())[:, :2].all()
    program.masks_output = False
    assert (
        program.model(x.double()).all() and log_loss == program.evaluate(common=True)["log_loss"]
    ), "of the common set it says what it thinks"
    hidden = program.model.encoder.first
    assert torch.allclose(hidden(x.double()), 2 * (x.double() @ hidden.weight.T + hidden.bias))
    assert not fed.engine.host.programs["b"].model.encoder.first._forward_hooks, (
        "of full width nothing is scaled"
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        HeteroFL(),
        FedRolex(masked=True),
        SubFLOT(masked=True),
        SubFLOT(masked=True, ota=False),
        SubFLOT(masked=True, solver="entropic"),
    ],
)
def test_masked_rows_of_the_last_layer_are_averaged_over_clients_with_the_label(
    toys, tmp_path, algorithm
):
    x, _ = toys.blobs(20, 5)
    labels = {
        "a": torch.arange(20) % 2,
        "b": torch.arange(20) % 2 + 1,
    }  # labels 0 and 1, 1 and 2; nobody has 3
    fed = start_federation(
        toys,
        tmp_path,
        algorithm,
        [toys.client(c, model=net, train=(x, y)) for c, y in labels.items()],
    )
    before = {n: t.clone() for n, t in algorithm.server_model(fed, "a").items()}
    ups = {
        c: {n: torch.full_like(t, value) for n, t in before.items()}
        for c, value in (("a", 1), ("b", 3))
    }
    algorithm.aggregate(fed, fed.state["group"]["a"], ups, {"a": 1.0, "b": 1.0})
    after, last = algorithm.server_model(fed, "a"), "head.2.weight"
    assert [float(row.mean()) for row in after[last][:3]] == pytest.approx(
        [1, 2, 3]
    ) and torch.equal(after[last][3], before[last][3])
    assert after["head.2.bias"][:3].tolist() == pytest.approx([1, 2, 3]) and float(
        after["head.0.weight"].mean()
    ) == pytest.approx(2)


def test_every_submodel_method_can_be_masked(toys, tmp_path):
    """A masked client never predicts labels that it lacks, and only then sends which it has."""
    x, y = toys.blobs(40, 5)
    few = toys.client("a", model=net, capacity=0.5, train=(x, y % 2), test=(x, y % 2))
    for masked in (True, False):
        algorithm = SubFLOT(masked=masked)
        fed = start_federation(
            toys, tmp_path / str(masked), algorithm, [few, toys.client("b", model=net)]
        )
        up = {
            c: reply["parameters"]
            for c, reply in fed.call(
                "update", per_client=algorithm.build_messages(fed, ["a", "b"])
            ).items()
        }
        algorithm.aggregate(fed, fed.state["group"]["a"], up, {"a": 1.0, "b": 1.0})
        program = fed.engine.host.programs["a"]
        assert list(fed.state.get("present", {})) == (["a", "b"] if masked else [])
        assert bool(program.model(x.double())[:, 2:].any()) is not masked
        if not masked:
            assert "sent only if" in str(fed.call("present", clients=["a"], quorum=0).failures["a"])


def test_masked_excludes_privacy():
    assert (
        "set algorithm.masked to false" in (HeteroFL().privacy_problem() or "")
        and HeteroFL(masked=False).privacy_problem() is None
    )


@pytest.mark.parametrize(
    "budget, capacity, ratio",
    [("width", 0.6, 0.6), ("memory", 0.3, 0.25), ("memory", 1.0, 1.0), ("flops", 0.4, 0.5)],
)
def test_a_budget_picks_the_width(toys, tmp_path, budget, capacity, ratio):
    algorithm = SubFLOT(budget=budget)
    fed = start_federation(
        toys,
        tmp_path,
        algorithm,
        [toys.client("a", model=net), toys.client("b", model=net, capacity=capacity)],
    )
    assert fed.state["ratio"]["b"] == ratio


def test_a_budget_too_small_is_refused_before_the_run(toys, tmp_path):
    with pytest.raises(
        UserError,
        match=r"client b has 0\.01 of the full model's memory, "
        r"and the smallest submodel needs 0\.\d+",
    ):
        toys.execute(
            tmp_path / "run",
            SubFLOT(budget="memory"),
            [toys.client("a", model=net), toys.client("b", model=net, capacity=0.01)],
        )


def test_a_client_may_change_its_capacity_between_rounds(toys, tmp_path):
    members = clients(toys)
    fed = toys.federation(tmp_path, algorithm := SubFLOT(), members, rounds=4)
    sizes = []
    for finished in algorithm.serve(fed):
        fed.finished = finished
        sizes.append(len(fed.engine.host.programs["b"].model.encoder.first.weight))
        members[1].capacity = 0.25 if finished == 1 else 0.75
    assert sizes == [4, 4, 2, 6] and not fed.failures
    assert fed.state["uploads"]["b"]["units"][0] == 6


def test_an_upload_of_another_shape_is_refused(toys, tmp_path, monkeypatch):
    update = SubFLOT.Program.update

    def truncated_update(self, parameters, units):
        reply = update(self, parameters, units)
        if self.client.id == "b" and self.round == 2:
            reply["parameters"] = {
                n: t[:1] if t.dim() else t for n, t in reply["parameters"].items()
            }
        return reply

    truncated_update.operation, truncated_update.sends = "changes", {}
    monkeypatch.setattr(SubFLOT.Program, "update", truncated_update)
    results = toys.execute(tmp_path / "run", SubFLOT(), clients(toys), rounds=3)
    (failure,) = results["failures"]
    assert (failure["client"], failure["round"]) == ("b", 2) and "other names or shapes" in failure[
        "reason"
    ]


def test_partial_participation_uses_the_last_upload_and_memory_is_bounded(toys, tmp_path):
    """With room for one upload, with room for all, and resumed: the same end."""
    from unalike.engines.store import Archive

    before = Archive.__init__.__defaults__
    results = []
    for limit in (2**30, 1):
        Archive.__init__.__defaults__ = (limit,)
        try:
            results.append(
                toys.execute(
                    tmp_path / str(limit),
                    SubFLOT(),
                    clients(toys),
                    rounds=6,
                    federation=FederationConfig(participation=0.6),
                )
            )
        finally:
            Archive.__init__.__defaults__ = before
    assert toys.hashes(results[0]) == toys.hashes(results[1])


def test_results_have_parameters_flops_and_bytes_and_time_depends_on_width(toys, tmp_path):
    slow = {"speed": 10.0, "latency": 0.0, "link": 1e12}
    results = toys.execute(tmp_path / "run", SubFLOT(), clients(toys, **slow), rounds=2)["clients"]
    assert (
        results["c"]["parameters"] < results["b"]["parameters"] / 2 < results["a"]["parameters"] / 4
    )
    assert results["c"]["flops"] < results["b"]["flops"] < results["a"]["flops"]
    assert results["a"]["round_flops"] == 3 * 20 * results["a"]["flops"]
    assert results["c"]["bytes"]["up"] < results["a"]["bytes"]["up"]
    alone = {
        id: toys.execute(
            tmp_path / id, SubFLOT(), [toys.client(id, model=net, capacity=c, **slow)], rounds=2
        )
        for id, c in CAPACITIES.items()
    }
    share = results["b"]["flops"] / results["a"]["flops"]
    assert alone["b"]["clock"] / alone["a"]["clock"] == pytest.approx(share, rel=1e-3)


def test_a_model_that_cannot_be_traced_is_refused_before_the_run(toys, tmp_path):
    class Odd(nn.Module):
        width = 8

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x):
            return torch.linalg.eigvalsh(self.layer(x).unsqueeze(-1) * self.layer(x).unsqueeze(-2))

    with pytest.raises(UserError, match=r"clients\.a .*cannot follow"):
        toys.execute(tmp_path / "run", SubFLOT(), [toys.client("a", model=Odd)])
    fed = start_federation(
        toys, tmp_path, SubFLOT(fixed=("encoder",)), [toys.client("a", model=Odd, capacity=0.5)]
    )
    assert not [
        p.tensor
        for w in SubFLOT().channel_groups(fed, "a")
        for p in w.slices
        if p.tensor.startswith("encoder")
    ], "the way out it names"


def test_without_otp_and_ota_it_sends_plain_submodels(toys, tmp_path):
    """Without OTP and OTA, plain submodels are sent and merged."""
    plain = toys.execute(tmp_path / "plain", SubmodelMethod(), clients(toys), rounds=2)
    bare = toys.execute(
        tmp_path / "bare",
        SubFLOT(otp=False, ota=False, penalty=0.0, inputs="barycentre"),
        clients(toys),
        rounds=2,
    )
    whole = toys.execute(tmp_path / "whole", SubFLOT(), clients(toys), rounds=2)
    assert toys.hashes(plain) == toys.hashes(bare) and toys.hashes(whole) != toys.hashes(bare)


def test_a_client_with_another_model_trains_by_itself(toys, tmp_path):
    members = [
        *clients(toys),
        Client(
            id="d",
            model=lambda: MLP((6,), (12,), 8),
            task=Classification(4),
            train=toys.blobs(20, 1),
            test=toys.blobs(20, 2),
            capacity=0.5,
            dtype=torch.float64,
        ),
    ]
    results = toys.execute(tmp_path / "run", SubFLOT(), members, rounds=2)
    assert not results["failures"] and results["clients"]["d"]["value"] is not None


def test_channel_groups_survive_the_message_format(toys, tmp_path):
    from unalike.base.message import decode, encode
    from unalike.methods.submodels import groups_from_message, groups_to_message

    fed = start_federation(toys, tmp_path, SubFLOT(), clients(toys))
    widths = SubFLOT().channel_groups(fed, "a")
    back = groups_from_message(
        decode(encode(groups_to_message(reindex_groups(widths, first_units(widths, 0.5)))))
    )
    assert all(
        torch.equal(p.entries, q.entries)
        for a, b in zip(back, reindex_groups(widths, first_units(widths, 0.5)))
        for p, q in zip(a.slices, b.slices)
    )


@pytest.mark.parametrize("method", [SubFLOT(), HeteroFL()])
def test_a_submodel_can_be_exported_and_rebuilt(toys, tmp_path, method):
    """What HeteroFL scales in a narrow model is scaled in the copy too."""
    results = unalike.run(
        algorithm=method,
        clients=clients(toys),
        training=toys.training(rounds=2),
        out=tmp_path / "run",
        alone=False,
    )
    unalike.export(results["folder"], "c", tmp_path / "home", onnx=False, clients=clients(toys))
    x, y = toys.client("c").test.rows(torch.arange(40))
    model = unalike.rebuild(tmp_path / "home", clients(toys))
    assert len(model.encoder.first.weight) == 2
    assert 100 * float((model(x.double()).argmax(1) == y).double().mean()) == pytest.approx(
        results["clients"]["c"]["value"]
    )
