"""Baselines of FedMuscle: votes, means and losses by hand, and runs with tasks of every kind."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unalike import Classification, Client, MultiLabel, Segmentation
from unalike.algorithms import ALGORITHMS, cofed
from unalike.algorithms.fedrcl import pool
from unalike.algorithms.pseudolabel import select_surest
from unalike.base.errors import Problems
from unalike.core.runtime import ClientRuntime
from unalike.losses.kernels import cka
from unalike.methods.group_averaging import average_groups
from unalike.methods.public_data import public_batch, public_batches
from unalike.methods.public_predictions import (
    CELLS,
    average_by_label,
    clients_with_labels,
    mask_unknown,
)
from unalike.models import build_encoder
from unalike.scenarios.validate import validate_algorithm

BASELINES = ["fedhenn", "feddf", "cofed", "fedrcl", "sage", "simclr", "pseudolabel"]
IMAGE, TEXT = (1, 8, 8), (6,)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def diverse_clients(rows=12, public=20):
    """Five clients: two classify images, the others have multi-label images, masks and texts.

    Row i of the public set is an image, and a text for the client with texts.
    """
    images, words = draw(rows, *IMAGE), draw(rows, *TEXT).mul(3).long().abs()
    public_images, read = draw(public, *IMAGE), draw(public, *TEXT).mul(3).long().abs()
    y = torch.arange(rows)
    encoder = lambda name, shape, **options: partial(
        build_encoder, name, shape, {"width": 8} | options
    )
    definitions = {
        "ann": (
            encoder("mlp", IMAGE, hidden=[8]),
            Classification(["cat", "dog", "cow"]),
            images,
            y % 3,
            public_images,
        ),
        "bob": (
            encoder("cnn", IMAGE, channels=[4]),
            Classification(["dog", "cow", "cat"]),
            images,
            y % 3,
            public_images,
        ),
        "cid": (
            encoder("transformer", IMAGE, depth=1, heads=2),
            MultiLabel(["cat", "sky"]),
            images,
            (draw(rows, 2) > 0).float(),
            public_images,
        ),
        "dot": (
            encoder("cnn", IMAGE, channels=[4]),
            Segmentation(["cat", "sky"]),
            images,
            (images[:, 0] > 0).long(),
            public_images,
        ),
        "eve": (
            encoder("fasttext", TEXT, words=20, embedding=4),
            Classification(["sport", "news"]),
            words,
            y % 2,
            read,
        ),
    }
    return [
        Client(
            id,
            model,
            task,
            train=(x, labels),
            test=(x, labels),
            public=(unlabelled, None),
            dtype=torch.float64,
        )
        for id, (model, task, x, labels, unlabelled) in definitions.items()
    ]


def program_of(method, client, toys, **changed):
    algorithm = toys.method(method, **changed)
    return algorithm.Program(client, algorithm, toys.training(), 0)


@pytest.mark.parametrize(
    "name, fields",
    [
        *((name, {}) for name in (*BASELINES, "fedmuscle")),
        ("fedmuscleplus", {"distill_public": "all"}),
    ],
)
def test_baselines_run_with_different_tasks_labels_models_and_modalities(
    name, fields, toys, tmp_path
):
    results = toys.execute(
        tmp_path / "run", toys.method(name, **fields), diverse_clients(), rounds=3, alone=True
    )
    assert not results["failures"] and all(
        entry["gain"] is not None for entry in results["clients"].values()
    )


def test_the_last_round_has_no_public_part(toys, tmp_path):
    """One round: as alone; of two, the first has a public part."""
    for name in ("feddf", "sage", "simclr", "pseudolabel"):
        for rounds in (1, 2):
            fed = toys.federation(
                tmp_path / f"{name}{rounds}", toys.method(name), toys.clients(), rounds=rounds
            )
            toys.serve(fed, toys.method(name))
            steps = [
                program.optimizers.get("public") for program in fed.engine.host.programs.values()
            ]
            assert all(steps) if rounds == 2 else not any(steps), name


# labels by name


def infos(**labels):
    return SimpleNamespace(
        infos={
            id: SimpleNamespace(task=task, labels=names, traits=("labelled",))
            for id, (task, names) in labels.items()
        },
        algorithm=None,
    )


def test_labels_are_matched_by_name_within_a_task():
    fed = infos(
        a=("classification", ("cat", "dog")),
        b=("classification", ("dog", "owl")),
        c=("multilabel", ("cat", "dog")),
    )
    predictions = {
        "a": torch.tensor([[1.0, 2.0]]),
        "b": torch.tensor([[4.0, 6.0]]),
        "c": torch.tensor([[90.0, 90.0]]),
    }
    assert average_by_label(fed, predictions, "a").tolist() == [[1, 3]] and average_by_label(
        fed, predictions, "b"
    ).tolist() == [[3, 6]]
    assert average_by_label(fed, predictions, "c").tolist() == [[90, 90]] and clients_with_labels(
        fed, predictions, "b"
    ) == [
        ("a", [0], [1]),
        ("b", [0, 1], [0, 1]),
    ]


def test_dense_predictions_are_pooled_before_they_are_sent(toys):
    dense, flat = (
        program_of("feddf", client, toys).opinion()
        for client in (diverse_clients()[3], diverse_clients()[0])
    )
    assert dense.shape == (20, 2, CELLS, CELLS) and flat.shape == (20, 3)
    assert dense.mean(1).abs().max() < 1e-12 and flat.mean(1).abs().max() < 1e-12


# FedHeNN


def test_fedhenn_adds_the_distance_to_the_mean_kernel(toys):
    program = program_of("fedhenn", toys.client("a"), toys, eta=0.5)
    program.round, kernel = 4, draw(8, 8).double()
    rows = public_batch(program, public_batches(program, 0)[0])
    z = program.model.represent(rows)
    assert torch.equal(program.kernel(), (z @ z.mT).detach())
    x, y = program.client.train.rows(torch.arange(5))
    x = program.client.to_device(x)
    losses = []
    program.learn = lambda loss: losses.append(loss(x, y))
    program.follow(kernel)
    centring = torch.eye(8).double() - 1 / 8
    a, b = centring @ (z @ z.mT) @ centring, centring @ kernel @ centring
    by_hand = program.task_loss(x, y) + 0.5 * math.sqrt(4) * (
        1 - (a * b).sum() / (a.norm() * b.norm())
    )
    assert torch.allclose(losses[0], by_hand)


def test_cka_is_invariant_to_scale_and_shift():
    z = draw(6, 3).double()
    kernel = z @ z.mT
    assert float(cka(kernel, 7 * kernel)) == pytest.approx(1) and float(
        cka(kernel, (z + 5) @ (z + 5).mT)
    ) == pytest.approx(1)
    assert float(cka(kernel, torch.ones(6, 6).double())) == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="two square kernels of one size"):
        cka(kernel, kernel[:5])


# FedDF


def test_feddf_averages_identical_architectures_and_distils_among_common_labels(toys, tmp_path):
    method = toys.method("feddf")
    other = toys.client(
        "d", task=Classification(["p", "q", "r", "s"])
    )  # shape of a and b, other labels
    fed = toys.federation(tmp_path / "run", method, [*toys.clients(), other])
    fed.start_round(1)
    fed.call("train")
    programs = fed.engine.host.programs
    before = {
        c: {n: t.clone() for n, t in programs[c].model.state_dict().items()} for c in programs
    }
    calls = []
    call, fed.call = (
        fed.call,
        lambda operation, **about: calls.append((operation, about)) or call(operation, **about),
    )
    average_groups(fed)
    mean = {name: (before["a"][name] + before["b"][name]) / 2 for name in before["a"]}
    assert all(
        torch.allclose(programs[c].model.state_dict()[name], mean[name])
        for c in "ab"
        for name in mean
    )
    assert all(
        torch.equal(programs[c].model.state_dict()[name], tensor)
        for c in "cd"
        for name, tensor in before[c].items()
    )
    method.learn_from_public(fed, 1)
    teachers = next(about["per_client"] for operation, about in calls if operation == "distil")
    assert set(teachers) == set("abc")  # d has nobody to learn from
    assert next(about["clients"] for operation, about in calls if operation == "opinion") == list(
        "abc"
    )  # nor to tell
    assert torch.equal(teachers["a"]["teacher"], teachers["c"]["teacher"])


# CoFED


def voted(toys, client, logits):
    program = program_of("cofed", client, toys)
    return program.votes_from(logits)


def test_cofed_votes_where_the_best_guess_is_clearly_ahead(toys):
    ann, cid = diverse_clients()[0], diverse_clients()[2]
    logits = torch.tensor([[0.6, 0.2, 0.2], [0.5, 0.3, 0.2]]).log()
    assert voted(toys, ann, logits).tolist() == [[1, 0, 0], [0, 0, 0]]
    assert voted(toys, cid, torch.tensor([[0.7, 0.6], [0.3, 0.1]]).logit()).tolist() == [
        [1, 0],
        [-1, -1],
    ]


def test_cofed_counts_votes_of_clients_that_have_the_label(toys, monkeypatch):
    method, got = toys.method("cofed"), {}
    votes = {
        "a": [[1, 0], [0, 1], [1, 0]],
        "b": [[1, 0], [1, 0], [0, 0]],
        "c": [[1, 0], [0, 0], [0, 0]],
        "d": [[1, 0], [0, 0], [0, 0]],
    }
    fed = infos(**{id: ("classification", ("x", "y")) for id in votes})
    fed.call = lambda name, per_client=None: (
        got.update(per_client) or {}
        if per_client
        else {c: torch.tensor(v, dtype=torch.int8) for c, v in votes.items()}
    )
    method.learn_from_public(fed, 1)
    assert got["a"]["votes"].tolist() == [[1, 0], [0, 0], [0, 0]]  # 1/4 is not above 0.3


def test_cofed_trains_on_rows_with_one_class_and_all_classes_equally_often(toys, monkeypatch):
    ann, got = diverse_clients()[0], {}
    program = program_of("cofed", ann, toys)
    monkeypatch.setattr(
        cofed, "train_on_public", lambda program, loss, inputs, rows: got.update(rows=rows)
    )
    votes = torch.zeros(20, 3, dtype=torch.int8)
    votes[:15, 0], votes[15:17, 1], votes[18, :2] = 1, 1, 1  # 18 is two things, 17 and 19 nothing
    torch.manual_seed(0)
    program.learn_votes(votes)
    assert len(got["rows"]) == 17 and not {17, 18, 19} & set(got["rows"].tolist())
    assert (
        sum(15 <= row < 17 for row in got["rows"].tolist()) >= 5
    )  # 2 of 17 rows, half of the draws


# SAGE


def test_sage_mixes_two_pseudo_labels_by_confidence(toys):
    program = program_of("sage", diverse_clients()[0], toys, threshold=0.9)
    own = torch.tensor([[0.95, 0.05, 0.0], [0.5, 0.5, 0.0], [0.6, 0.4, 0.0]]).double()
    all_ = torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.95, 0.05], [0.2, 0.8, 0.0]]).double()
    target, sure = program.target(own, all_)
    assert target[0].tolist() == pytest.approx([0.5, 0.5, 0])  # 0.05 apart: half and half
    assert target[1].tolist() == [0, 1, 0] and sure.tolist() == [True, True, False]
    several = program_of("sage", diverse_clients()[2], toys, threshold=0.9)
    target, sure = several.target(torch.tensor([[0.95, 0.5]]), torch.tensor([[0.05, 0.02]]))
    assert target[0].tolist() == [1, 0] and sure.all()


# pseudo-labelling


def test_pseudolabel_uses_the_surest_labels_of_each_kind(toys):
    sure = torch.tensor([[0.99, 0.6], [0.98, 0.9], [0.97, 0.7]])
    program = program_of("pseudolabel", diverse_clients()[2], toys)
    kinds = program.label_kinds(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]))
    assert select_surest(sure, kinds, 0.5).tolist() == [[True, False], [True, True], [False, True]]
    y, rows = mask_unknown(
        program.client.task,
        torch.ones(3, 2),
        torch.tensor([[True, False], [False, False], [True, True]]),
    )
    assert y.tolist() == [[1, -1], [-1, -1], [1, 1]] and rows.tolist() == [0, 2]
    dense = program_of("pseudolabel", diverse_clients()[3], toys)
    y, _ = mask_unknown(dense.client.task, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2) > 0)
    assert y.unique().tolist() == [255]


def test_pseudolabel_share_grows_to_all_before_the_last_round(toys):
    method = ALGORITHMS["pseudolabel"]()
    assert [method.share_in(round, 6) for round in range(1, 6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0]
    )


# SimCLR, FedRCL


def test_simclr_trains_the_encoder_and_not_the_head(toys):
    program = program_of("simclr", toys.client("a"), toys)
    before = {name: tensor.clone() for name, tensor in program.model.state_dict().items()}
    ClientRuntime(program).perform("contrast", 1, 0, {})
    moved = {
        name.split(".")[0]
        for name, tensor in program.model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    assert moved == {"encoder", "compared"}
    alone = program_of("local", toys.client("a"), toys).model.state_dict()
    assert all(
        torch.equal(before[name], tensor) for name, tensor in alone.items()
    )  # begins where everyone begins alone


def test_fedrcl_contrasts_at_several_depths(toys):
    program = program_of(
        "fedrcl",
        toys.client("a", model=lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(10)))),
        toys,
    )
    assert [list(program.model.encoder).index(layer) for layer in program.contrasted_layers()] == [
        1,
        3,
        5,
        7,
    ]
    assert pool(torch.ones(2, 3, 4, 4)).shape == (2, 3) and pool(torch.ones(2, 5, 3)).shape == (
        2,
        3,
    )


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("feddf", "passes", 0),
        ("feddf", "public_lr", -1.0),
        ("cofed", "margin", 1.0),
        ("sage", "threshold", 2.0),
        ("fedhenn", "eta", -1.0),
        ("simclr", "temperature", 0.0),
        ("pseudolabel", "steps", 0),
        ("fedrcl", "depths", 0),
        ("fedhenn", "batch", 1),
        ("sage", "batch", 99),
    ],
)
def test_bad_fields_are_refused(name, field, value):
    method = ALGORITHMS[name](**({} if name == "fedrcl" else {"batch": 8}) | {field: value})
    try:
        problems = validate_algorithm(method).check(3, 24)
    except Problems as error:
        problems = [(field.removeprefix("algorithm."), text) for field, text in error.problems]
    ((where, sentence),) = problems
    assert where == field and sentence
