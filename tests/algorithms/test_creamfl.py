"""CreamFL: clients with images, texts or both and a model at the server; formulas by hand, resume."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import unalike
from unalike import Classification, Client, Training
from unalike.algorithms import ALGORITHMS
from unalike.algorithms.creamfl import ensemble
from unalike.base.errors import UserError
from unalike.methods.public_data import public_batch
from unalike.models import build_encoder
from unalike.tasks import Retrieval

SHAPE = {"image": (1, 4, 4), "text": (3,)}
PAIR = {
    "image": {"name": "mlp", "hidden": [8], "width": 8},
    "text": {"name": "gru", "words": 20, "embedding": 4, "width": 8},
}


def rows(count, seed):
    """What an image shows is said in its text."""
    y = torch.arange(count) % 4
    draw = torch.Generator().manual_seed(seed)
    image = torch.eye(4)[y].repeat_interleave(4, 1).view(count, 1, 4, 4) + 0.1 * torch.randn(
        count, 1, 4, 4, generator=draw
    )
    more = (image[:, 0, 0, 0] > 0).long()
    return image, torch.stack([y + 1, more + 6, y + 9], 1), y


def federation():
    image, text, y = rows(16, 1)
    public_image, read, _ = rows(12, 2)
    both, public = {"image": image, "text": text}, {"image": public_image, "text": read}
    pair = lambda width: partial(build_encoder, "pair", SHAPE, {**PAIR, "width": width})
    clients = [
        Client(
            "sees",
            partial(build_encoder, "mlp", (1, 4, 4), {"width": 8}),
            Classification(4),
            (image, y),
            (image, y),
            public_image,
        ),
        Client(
            "reads",
            partial(build_encoder, "gru", (3,), {"words": 20, "embedding": 4, "width": 8}),
            Classification(4),
            (text, y),
            (text, y),
            read,
        ),
        Client(
            "both", pair(8), Retrieval(), (both, torch.arange(16)), (both, torch.arange(16)), public
        ),
    ]
    return clients, Client(
        "server",
        pair(16),
        Retrieval(),
        (public, torch.arange(12)),
        (both, torch.arange(16)),
        public,
    )


def run(folder, contrast="cream", rounds=2, resume=False, watch=None, server=True, **fields):
    clients, own = federation()
    more = {"watch": watch} if watch else {}
    return unalike.run(
        ALGORITHMS["creamfl"](width=8, batch=6, contrast=contrast, **fields),
        clients,
        server=own if server else None,
        training=Training(rounds=rounds, batch_size=8, lr=0.01),
        out=folder,
        alone=False,
        resume=resume,
        **more,
    )


def test_the_servers_model_learns_from_clients(tmp_path):
    computed = {
        contrast: run(tmp_path / contrast, contrast) for contrast in ("none", "cream", "muscle")
    }
    assert all(not entry["failures"] for entry in computed.values())
    assert len({entry["server"]["hash"] for entry in computed.values()}) == 3
    assert set(computed["cream"]["server"]["metrics"]) >= {"recall", "i2t_R@1", "t2i_R@10"}
    assert (
        computed["none"]["bytes"]["down"]
        < computed["cream"]["bytes"]["down"]
        == computed["muscle"]["bytes"]["down"]
    )
    assert "server" not in run(tmp_path / "without", server=False)
    clients, _ = federation()
    sees = unalike.run(
        ALGORITHMS["creamfl"](width=8, batch=6),
        clients,
        server=clients[0],
        training=Training(rounds=2),
        out=tmp_path / "b",
        alone=False,
    )
    assert "accuracy" in sees["server"]["metrics"]  # a server that only sees


@pytest.mark.parametrize("contrast", ["cream", "muscle"])
def test_losses_on_the_public_set_can_be_captured_in_cuda_graphs(contrast):
    """They work on tensors without values, where texts are cut to a fixed length."""
    _, own = federation()
    model = partial(
        build_encoder, "pair", SHAPE, {**PAIR, "text": {**PAIR["text"], "length": 3}, "width": 8}
    )
    method = ALGORITHMS["creamfl"](width=8, batch=6, contrast=contrast)
    program = method.Program(replace(own, model=model), method, Training(), 0)
    views, x = program.tell(), public_batch(program, torch.arange(6))
    goals, lists = (
        {kind: view[:6] for kind, view in views.items()},
        [view[:6] for view in views.values()],
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert (
            program.regularisation_loss(x, goals, goals).shape
            == program.server_loss(x, torch.arange(6), goals, lists).shape
            == ()
        )
    looks = method.Program(own, method, Training(), 0)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
        looks.regularisation_loss(
            x, goals, goals
        )  # without a length a batch is as long as its longest text


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("contrast", ["cream", "muscle"])
def test_the_servers_model_survives_a_crash(contrast, tmp_path):
    def stop(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise Stopped

    whole = run(tmp_path / "whole", contrast, rounds=3)
    with pytest.raises(Stopped):
        run(tmp_path / "cut", contrast, rounds=3, watch=stop)
    cut = run(tmp_path / "cut", contrast, rounds=3, resume=True)
    assert cut["server"] == whole["server"] and cut["clients"] == whole["clients"]


def test_the_ensemble_weights_clients_by_how_well_they_identify_a_row():
    one, other = (
        torch.eye(3).double(),
        torch.eye(3).double()[[1, 0, 2]],
    )  # `other` takes rows 0 and 1 for each other
    computed = ensemble([one, other], torch.eye(3).double())
    own_share, other_share = (
        torch.tensor([1.0, 0, 0]).double().log_softmax(0)[i].exp() for i in (0, 1)
    )
    assert torch.allclose(
        computed[0],
        own_share / (own_share + other_share) * one[0]
        + other_share / (own_share + other_share) * other[0],
    )
    assert torch.allclose(computed[2], one[2])
    assert torch.allclose(ensemble([one, other], None), (one + other) / 2)


def test_clients_send_representations_of_the_kinds_they_have(toys):
    method = ALGORITHMS["creamfl"](width=8, batch=6)
    clients, own = federation()
    entry = [
        set(method.Program(client, method, toys.training(), 0).tell()) for client in (*clients, own)
    ]
    assert entry == [{"image"}, {"text"}, {"image", "text"}, {"image", "text"}]


def test_clients_move_towards_the_known_representations(toys):
    method = ALGORITHMS["creamfl"](width=8, batch=6, public_lr=0.05, passes=20)
    for contrast in ("cream", "muscle"):
        method.contrast = contrast
        program = method.Program(federation()[0][0], method, toys.training(), 0)
        known = {
            kind: torch.nn.functional.normalize(
                torch.randn(12, 8, generator=torch.Generator().manual_seed(i)), dim=-1
            )
            for i, kind in enumerate(("image", "text"))
        }
        far = [float((program.tell()["image"] * known[kind]).sum(-1).mean()) for kind in known]
        program.round = 1
        program.learn_from_known(known)
        near = [float((program.tell()["image"] * known[kind]).sum(-1).mean()) for kind in known]
        assert all(b > a + 0.1 for a, b in zip(far, near, strict=True)), contrast


def test_input_that_does_not_fit_is_refused(tmp_path):
    clients, _ = federation()
    method = ALGORITHMS["creamfl"](width=8, batch=6)
    image, _, _ = rows(8, 3)
    lost = Client(
        "lost",
        partial(build_encoder, "mlp", (1, 4, 4), {"width": 8}),
        Retrieval(),
        (image, torch.arange(8)),
        None,
        image[:12],
    )
    with pytest.raises(UserError, match="retrieval needs images and texts by name"):
        unalike.run(method, [lost], out=tmp_path / "a")
    with pytest.raises(UserError, match=r"server must be made by unalike\.Client"):
        unalike.run(method, clients, server="large", out=tmp_path / "c")


def test_the_shipped_scenario_has_clients_with_images_and_with_pairs(tmp_path):
    from unalike.runs import run_scenario
    from unalike.scenarios import load

    small = [
        "rounds=1",
        "epochs=1",
        "public.size=40",
        "clients.sees.train=20",
        "clients.both.train=20",
        "clients.both.test=40",
    ]
    results, _ = run_scenario(
        *load("creamfl-digits", settings=[*small, "contrast=muscle"]), out=tmp_path / "run"
    )
    assert {client["task"] for client in results["clients"].values()} == {
        "classification",
        "retrieval",
    } and not results["failures"]
    assert results["server"]["metrics"]["recall"] > 0


SCENARIO = """
name: pairs
algorithm: {name: creamfl, width: 8, batch: 16}
training: {rounds: 1, batch_size: 16}
data: {name: digits_captions}
public: {size: 40}
server: {id: server, model: &model {name: pair, width: 8, image: {name: cnn, channels: [4], width: 8},
         text: {name: gru, words: 40, embedding: 4, width: 8}}, target: pair, test: 50}
clients:
  - {id: both, count: 2, model: *model, target: pair, train: 20, test: 50}
"""


def test_a_scenario_may_give_the_server_a_model(tmp_path):
    from unalike.runs import run_scenario
    from unalike.scenarios import build_clients, build_server, load

    (tmp_path / "pairs.yaml").write_text(SCENARIO)
    scenario, method = load(str(tmp_path / "pairs.yaml"))
    own = build_server(scenario)
    assert len(own.train) == 40 and torch.equal(
        own.train.index, build_clients(scenario)[0].public.index
    )
    results, _ = run_scenario(scenario, method, out=tmp_path / "run")
    assert results["server"]["metrics"]["recall"] > 0 and not results["failures"]
    for was, now, message in (
        ("size: 40", "size: 4000", "must be below 1200"),
        ("public: {size: 40}", "", "learns from the public set: add `public`"),
        ("pair, test: 50}\nclients", "word}\nclients", "no target .word"),
    ):
        (tmp_path / "bad.yaml").write_text(SCENARIO.replace(was, now))
        with pytest.raises(UserError, match=message):
            run_scenario(*load(str(tmp_path / "bad.yaml")), out=tmp_path / "bad")
