"""Clustering methods beside AFMCC: autoencoders alone or averaged, FMCSC, and bad input."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from unalike import Clustering, FederationConfig
from unalike.algorithms import ALGORITHMS
from unalike.algorithms.fmcsc import FMCSC, mutual_information
from unalike.base.errors import UserError
from unalike.core.runtime import ClientRuntime
from unalike.losses.clustering import class_correlation_loss, reconstruction
from unalike.losses.contrastive import nt_xent
from unalike.models.autoencoder import Autoencoder, with_masks

SHAPE = {"left": (3,), "right": (3,)}


def clients(toys, owned=("left right", "left right", "left", "right"), rows=24):
    members = []
    for id, names in zip("abcd", owned, strict=False):
        x, y = toys.blobs(rows, ord(id))
        x = {
            name: part
            for name, part in (("left", x[:, :3]), ("right", x[:, 3:]))
            if name in names.split()
        }
        members.append(
            toys.client(
                id,
                model=lambda: Autoencoder(SHAPE, (8,), 4),
                task=Clustering(4),
                train=(x, y),
                test=(x, y),
                public=None,
            )
        )
    return members


def build_program(method, client, toys):
    return method.Program(client, method, toys.training(), 0)


@pytest.mark.parametrize("name", ["local", "fedavg", "fedprox", "fmcsc", "afmcc"])
def test_both_protocols_are_reported(name, toys, tmp_path):
    members = clients(toys)
    samples = members[0].train
    members[0] = replace(
        members[0], train=({**samples.x, "right?": torch.arange(24) % 4 > 0}, samples.y)
    )  # samples lack a modality
    results = toys.execute(tmp_path / "run", toys.method(name), members, rounds=2, alone=True)
    # Alone, features of different clients have nothing in common: each is scored by itself.
    protocols = {"joint"} if name == "local" else {"joint", "first"}
    assert not results["failures"]
    assert set(results["metrics"]) == {"acc", "nmi", "ari"} | protocols
    assert set(results["metrics"]["joint"]) == {"acc", "nmi", "ari"}
    assert all(
        set(result["metrics"]) == {"acc", "nmi", "ari"} and result["alone"] is not None
        for result in results["clients"].values()
    )


def test_local_is_as_good_as_alone(toys, tmp_path):
    results = toys.execute(
        tmp_path / "run", toys.method("local"), clients(toys), rounds=2, alone=True
    )
    assert all(result["value"] == result["alone"] for result in results["clients"].values())


@pytest.mark.parametrize("name", ["local", "fedavg"])
def test_clients_with_labels_may_take_part(name, toys, tmp_path):
    results = toys.execute(
        tmp_path / "run", toys.method(name), [*clients(toys)[:2], toys.client("e")], rounds=2
    )
    assert not results["failures"] and set(results["clients"]["a"]["metrics"]) == {
        "acc",
        "nmi",
        "ari",
    }
    assert (
        results["clients"]["e"]["metrics"]["accuracy"] == results["metrics"]["accuracy"]
        and "joint" not in results["metrics"]
    )


def test_alone_a_client_minimises_the_error_of_its_autoencoder(toys):
    for name in ("local", "fedavg", "fedprox"):
        program = build_program(ALGORITHMS[name](), clients(toys)[0], toys)
        x, y = program.client.train.labelled_batch(torch.arange(10))
        h = program.model.encoder(program.client.to_device(x))
        by_hand = sum(
            reconstruction(program.client.to_device(x[v]), program.model.encoder.decoders[v](h))
            for v in x
        )
        assert torch.allclose(
            program.task_loss(program.client.to_device(x), program.client.to_device(y)),
            by_hand,
            rtol=1e-12,
        )


def test_averaging_helps_autoencoders_find_clusters(toys, tmp_path):
    results = toys.execute(
        tmp_path / "run",
        toys.method("fedavg"),
        clients(toys, ["left right"] * 4),
        rounds=10,
        epochs=3,
    )
    assert results["metrics"]["acc"] > 60 and results["metrics"]["joint"]["acc"] > 60


# who cannot cluster


@pytest.mark.parametrize("name", ["local", "fedavg", "fmcsc", "afmcc"])
@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda x, y: ({name: rows[:3] for name, rows in x.items()}, y[:3]),
            "clients.b   it has 3 samples, fewer than the 4 clusters to find",
        ),
        (
            lambda x, y: (x | {"left": torch.ones(24, 3)}, y),
            'clients.b   its modality "left" is the same in all its samples',
        ),
        (
            lambda x, y: ({**x, "left?": torch.arange(24) < 1}, y),
            'clients.b   its modality "left" is the same in all its samples',
        ),
    ],
)
def test_data_that_cannot_be_clustered_are_refused_before_the_run(
    name, change, message, toys, tmp_path
):
    members = clients(toys)
    members[1] = replace(members[1], train=change(members[1].train.x, members[1].train.y))
    with pytest.raises(UserError, match=message):
        toys.execute(tmp_path / "run", toys.method(name), members)


def test_a_client_needs_a_modality_and_equal_numbers_of_rows(toys):
    one = clients(toys)[0]
    with pytest.raises(ValueError, match="client a, train: there is no modality"):
        replace(one, train=({}, one.train.y))
    with pytest.raises(
        ValueError,
        match=r"client a, train: .*same number of rows, got {'left': 24, 'right': 20, 'y': 24}",
    ):
        replace(
            one,
            train=({"left": one.train.x["left"], "right": one.train.x["right"][:20]}, one.train.y),
        )


def test_other_models_and_the_safeguard_are_refused(toys, tmp_path):
    for name in ("local", "fedavg", "fmcsc"):
        with pytest.raises(UserError, match="clustering needs the model autoencoder, got MLP"):
            toys.execute(tmp_path / name, toys.method(name), [toys.client("a", task=Clustering(4))])
    with pytest.raises(UserError, match="safeguard judges by a client's own labels; client a"):
        toys.execute(tmp_path / "safe", toys.method("local"), clients(toys), safeguard=True)


# FMCSC


def mlp(layers, x):
    """Two layers with a ReLU between them, written out."""
    return (x @ layers[0].weight.mT + layers[0].bias).clamp(min=0) @ layers[2].weight.mT + layers[
        2
    ].bias


def views_of(program, x):
    """Codes of both views and the fused feature, written out."""
    net = program.model.encoder
    z = {v: net.auto.encoders[v](x[v] if v in x else torch.zeros(10, 3).double()) for v in SHAPE}
    return net, z, normalize(mlp(net.common, torch.cat([z["left"], z["right"]], 1)), dim=-1)


def some_rows(program):
    return program.client.to_device(program.client.train.rows(torch.arange(10))[0])


def test_loss_of_several_views_by_hand(toys):
    program = build_program(FMCSC(constraint=0.5), clients(toys)[0], toys)
    x = some_rows(program)
    net, z, h = views_of(program, x)
    by_hand = sum(
        reconstruction(x[v], net.auto.decoders[v](z[v])) + nt_xent(h, mlp(net.view[v], z[v]), 0.5)
        for v in x
    )
    by_hand = by_hand + 0.5 * class_correlation_loss(
        (h @ program.model.head.weight.mT).softmax(-1), 0.3
    )
    assert torch.allclose(program.loss(x, torch.zeros(10)), by_hand, rtol=1e-12) and torch.allclose(
        program.model.features(x), h
    )


def test_loss_of_a_single_view_by_hand(toys):
    program = build_program(FMCSC(), clients(toys)[2], toys)
    x = some_rows(program)
    other = {name: t + 0.3 for name, t in program.model.state_dict().items()}
    net, z, h = views_of(program, x)
    rebuilt = reconstruction(x["left"], net.auto.decoders["left"](z["left"]))
    assert torch.allclose(
        program.loss(x, torch.zeros(10)), rebuilt
    )  # alone there is nobody to follow
    program.sent_model = other
    sent = build_program(FMCSC(), clients(toys)[2], toys)
    sent.model.load_state_dict(other)
    near, far = (
        (h * to).sum(-1).div(0.5).exp()
        for to in (sent.model.features(x), normalize(z["left"], dim=-1))
    )
    assert torch.allclose(
        program.loss(x, torch.zeros(10)), rebuilt - (near / (near + far)).log().mean(), rtol=1e-12
    )


def test_clients_with_several_views_distil_into_models_for_fewer(toys):
    method = FMCSC(teaching=200)
    program, one = (
        build_program(method, clients(toys)[0], toys),
        build_program(method, clients(toys)[2], toys),
    )
    first = {name: t.clone() for name, t in program.shared().items()}
    reply = ClientRuntime(program).perform(
        "update", 1, 0, {"models": {"left,right": first, "left": first}, "start": {}}
    )
    assert (
        set(reply["models"]) == set(reply["weights"]) == {"left,right", "left"}
        and min(reply["weights"].values()) >= 0
    )
    assert all(
        torch.equal(t, reply["models"]["left,right"][name]) for name, t in program.shared().items()
    )  # it keeps its own
    x = program.all_inputs()
    goal = program.model.features(x)

    def far(model):
        one.model.load_state_dict(model)
        return (one.model.features({"left": x["left"]}) - goal).square().mean()

    assert far(reply["models"]["left"]) < 0.5 * far(first)


def test_pretraining_goes_from_client_to_client(toys, tmp_path):
    method = FMCSC(pretraining=3)
    members = clients(toys, ["left", "left right", "right"])
    fed = toys.federation(tmp_path / "a", method, members)
    fed.start_round(1)
    method.register_clients(fed)
    parameters = {}
    for client in (members[1], members[0], members[2]):  # most views first
        runtime = ClientRuntime(build_program(method, client, toys))
        parameters = runtime.perform("pretrain", 1, 0, {"given": parameters})
    assert set(fed.state["models"]) == {"left,right", "left", "right"}
    assert all(
        torch.equal(t, parameters[n])
        for model in fed.state["models"].values()
        for n, t in model.items()
    )


def test_models_by_view_are_averaged_by_mutual_information(toys, tmp_path, monkeypatch):
    method = FMCSC(pretraining=1)
    fed = toys.federation(tmp_path / "a", method, clients(toys))
    got, call = {}, fed.call
    monkeypatch.setattr(
        fed,
        "call",
        lambda operation, **about: (
            got.setdefault(operation, call(operation, **about))
            if operation == "update"
            else call(operation, **about)
        ),
    )
    next(method.serve(fed))
    replies = got["update"]
    for views, members in (("left,right", "ab"), ("left", "abc"), ("right", "abd")):
        weights = {c: replies[c]["weights"][views] for c in members}
        by_hand = sum(
            w * replies[c]["models"][views]["encoder.common.0.weight"] for c, w in weights.items()
        ) / sum(weights.values())
        assert torch.allclose(
            fed.state["models"][views]["encoder.common.0.weight"], by_hand, rtol=1e-9
        )
        assert {c for c in replies if views in replies[c]["models"]} == set(members)


def test_a_missing_view_is_encoded_as_rows_of_zeros(toys):
    """One row of zeros stands for all: fused features and reconstruction are the same."""
    program = build_program(FMCSC(), clients(toys)[2], toys)
    encoder = program.encoder
    x = program.all_inputs()
    zeros = torch.zeros(len(x["left"]), 3, dtype=x["left"].dtype)
    full = {"left": x["left"], "right": zeros}
    codes, by_hand = encoder.codes(x), encoder.codes(full)
    assert len(codes["right"]) == 1
    assert torch.allclose(encoder.fused(codes), encoder.fused(by_hand), rtol=1e-12)
    both = with_masks(full)
    assert torch.allclose(
        program.reconstruction_loss(both, codes),
        program.reconstruction_loss(both, by_hand),
        rtol=1e-12,
    )


def watch_updates(fed):
    """Messages and replies of `update`, one pair for each call."""
    asked = []
    call = fed.call

    def watch(operation, **arguments):
        replies = call(operation, **arguments)
        if operation == "update":
            asked.append((arguments["per_client"], replies))
        return replies

    fed.call = watch
    return asked


def test_as_in_the_program_clients_train_in_turn(toys, tmp_path):
    """Who has both views goes on where the last one ended; so do those with one, round by round."""
    method = FMCSC(pretraining=1, teaching=1, arrangement="program")
    fed = toys.federation(tmp_path / "a", method, clients(toys))
    asked = watch_updates(fed)
    rounds = method.serve(fed)
    next(rounds)
    assert [list(messages) for messages, _ in asked] == [["a"], ["b"], ["c"], ["d"]]
    both = "left,right"
    trained = asked[0][1]["a"]["own"]
    distilled = [asked[i][1][c] for i, c in enumerate("ab")]
    for name, tensor in trained.items():
        assert torch.equal(tensor, asked[1][0]["b"]["models"][both][name])
        assert torch.equal(
            asked[2][1]["c"]["models"]["left"][name], asked[3][0]["d"]["start"][name]
        )
    for views in (both, "left"):  # in the first round those with one view do not count
        weights = [reply["weights"][views] for reply in distilled]
        name = "encoder.common.0.weight"
        summed = sum(w * r["models"][views][name] for w, r in zip(weights, distilled, strict=True))
        mean = summed / sum(weights)
        assert torch.allclose(fed.state["models"][views][name], mean, rtol=1e-9)
    next(rounds)
    last, first = asked[3][1]["d"]["models"]["right"], asked[6][0]["c"]["start"]
    assert all(torch.equal(tensor, first[name]) for name, tensor in last.items())


def test_as_in_the_program_missing_views_are_rebuilt_as_zeros(toys):
    x = some_rows(build_program(FMCSC(), clients(toys)[2], toys))
    losses = {}
    for arrangement in ("paper", "program"):
        program = build_program(FMCSC(arrangement=arrangement), clients(toys)[2], toys)
        losses[arrangement] = program.task_loss(x, torch.zeros(10))
        rebuilt = program.encoder.auto.decoders["right"](program.encoder.codes(x)["right"])
    assert torch.allclose(losses["program"], losses["paper"] + rebuilt.square().mean())


def test_as_in_the_program_every_epoch_has_a_new_optimizer(toys):
    """Adam's first step is as long as the rate in every weight, so steps never get shorter."""
    method = FMCSC(arrangement="program")
    training = toys.training(epochs=3, batch_size=24, optimizer="adam", lr=0.01, weight_decay=0.0)
    program = method.Program(clients(toys)[2], method, training, 0)
    weights = program.model.encoder.auto.encoders["left"][0].weight
    seen = [weights.detach().clone()]
    learn = program.learn

    def watch(*arguments, **named):
        result = learn(*arguments, **named)
        seen.append(weights.detach().clone())
        return result

    program.learn = watch
    program.train_round()
    assert len(seen) == 4
    for before, after in pairwise(seen):
        assert (after - before).abs().max().item() == pytest.approx(0.01, rel=1e-3)


def test_view_features_may_keep_their_length_in_the_contrast():
    """Each of four rows has a dot product of 2 with its partner and of 0 with the two others."""
    z = torch.eye(2, dtype=torch.float64)
    loss = nt_xent(z, 2 * z, temperature=1.0, cosine=False)
    assert loss.item() == pytest.approx(math.log(math.exp(2) + 2) - 2)
    assert nt_xent(z, 2 * z, temperature=1.0).item() == pytest.approx(math.log(math.e + 2) - 1)


def test_information_weights_may_be_multiplied_by_samples(toys, tmp_path):
    """12 and 4 samples, information 2 and 4; without any information all weights are equal."""
    members = [
        replace(c, train=c.train.subset(torch.arange(n)))
        for c, n in zip(clients(toys, ["left right"] * 2), (12, 4), strict=True)
    ]
    fed = toys.federation(tmp_path, FMCSC(), members)
    replies = {"a": {"weights": {"left": 2.0}}, "b": {"weights": {"left": 4.0}}}
    assert FMCSC().information_weights(fed, "left", replies) == {"a": 2.0, "b": 4.0}
    by_samples = FMCSC(mean="samples").information_weights(fed, "left", replies)
    assert by_samples == {"a": 24.0, "b": 16.0}
    assert FMCSC().information_weights(fed, "right", replies) == {"a": 1.0, "b": 1.0}


def test_mutual_information():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.rand(20000, generator=draw), torch.rand(20000, generator=draw)
    assert mutual_information(a, a) == pytest.approx(torch.tensor(10.0).log().item(), abs=0.01)
    assert (
        mutual_information(a, b)
        < 0.01
        < mutual_information(a, a + b)
        == pytest.approx(mutual_information(a + b, a))
    )
    assert mutual_information(torch.zeros(5), a[:5]) == 0


def test_too_few_clients_in_the_relay_miss_the_quorum(toys, tmp_path):
    members = clients(toys, ["left right"] * 3)
    members[1].train.x["left"][0] = float("nan")
    with pytest.raises(
        RuntimeError, match="pretrain, round 1: 2 of 3 clients replied, the quorum is 3"
    ):
        toys.execute(
            tmp_path / "run", FMCSC(pretraining=2), members, federation=FederationConfig(quorum=1.0)
        )
