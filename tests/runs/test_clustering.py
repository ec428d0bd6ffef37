"""Runs of clients that cluster: with or without labels, and what they take home."""

import json

import pytest
import torch

import unalike
from unalike import Clustering, Training
from unalike.algorithms import ALGORITHMS
from unalike.models import Autoencoder
from unalike.tasks import clustering_scores

METHODS = [name for name, method in ALGORITHMS.items() if method.serves(Clustering)]
WHOLE = {"left": (3,), "right": (3,)}


def client(toys, id, label=None, owns=("left", "right")):
    """A client that owns some of two modalities; `label` of all its samples, or the true ones."""
    x, y = toys.blobs(24, sum(map(ord, id)))
    given = {"left": x[:, :3], "right": x[:, 3:]}
    y = y if label is None else None if label == "none" else torch.full_like(y, label)
    return unalike.Client(
        id,
        toys.partial(Autoencoder, WHOLE, (8,), 4),
        Clustering(toys.classes),
        dtype=torch.float64,
        train=({name: given[name].double() for name in owns}, y),
    )


def run(toys, folder, name, clients, **options):
    training = Training(rounds=2, batch_size=32, lr=0.02)
    return unalike.run(
        toys.method(name, pretraining=5) if name == "fmcsc" else toys.method(name),
        clients,
        training=training,
        out=folder,
        **options,
    )


@pytest.mark.parametrize("name", METHODS)
def test_labels_are_not_needed(toys, tmp_path, name, capsys):
    results = run(toys, tmp_path / "none", name, [client(toys, "a", "none"), client(toys, "b", -1)])
    assert (
        {entry["value"] for entry in results["clients"].values()} == {None}
        and results["metrics"] == {}
        and not results["failures"]
    )
    assert results["delta"] is None and results["losers"] is None
    unalike.show(results)
    assert "None" not in capsys.readouterr().out and (tmp_path / "none" / "report.html").exists()
    some = run(
        toys, tmp_path / "some", name, [client(toys, "a", "none"), client(toys, "b")], alone=False
    )
    assert (
        some["clients"]["a"]["value"] is None
        and some["clients"]["b"]["value"] > 0
        and some["metrics"]["joint"]["acc"] > 0
    )
    assert some["clients"]["a"]["modalities"] == ["left", "right"]
    page = (tmp_path / "some" / "report.html").read_text()
    assert "left, right" in page and "Federation" in page and "joint acc" in page


@pytest.mark.parametrize("name", METHODS)
def test_a_modality_unknown_to_the_model_is_named(toys, tmp_path, name):
    strange = client(toys, "b")
    strange.train.x["lefft"] = strange.train.x.pop("left")
    with pytest.raises(
        ValueError, match=r'clients.b   its data have a modality "lefft" .* Did you mean "left"'
    ):
        run(toys, tmp_path / "run", name, [client(toys, "a"), strange])


@pytest.mark.parametrize("name", METHODS)
def test_missing_values_are_reported_with_their_modality(toys, tmp_path, name):
    hurt = client(toys, "b")
    hurt.train.x["left"][:2, 1] = torch.nan
    results = run(
        toys, tmp_path / "run", name, [client(toys, "a"), hurt, client(toys, "c")], alone=False
    )
    assert {f["client"] for f in results["failures"]} == {"b"}
    assert results["failures"][0]["reason"].startswith(
        'modality "left" has NaN or infinity in 2 of 24 samples: fill them in'
    )


@pytest.mark.parametrize("name", METHODS)
def test_an_exported_model_gives_the_clusters_it_was_scored_by(toys, tmp_path, name):
    clients = [client(toys, "a"), client(toys, "b", owns=("left",)), client(toys, "../c")]
    results = run(toys, tmp_path / "run", name, clients, alone=False)
    models = unalike.trained(tmp_path / "run", clients)
    for owner in clients:
        x, y = owner.train.rows(torch.arange(24))
        scores = clustering_scores(models[owner.id](x).argmax(-1), y)
        assert scores["acc"] == pytest.approx(results["clients"][owner.id]["value"])
    as_onnx = name == "afmcc"  # which takes seconds
    lines = unalike.export(tmp_path / "run", "../c", onnx=as_onnx, clients=clients)
    (place,) = (tmp_path / "run" / "exports").iterdir()  # and nowhere else
    assert json.loads((place / "unalike.json").read_text())["client"] == "../c"
    if as_onnx:
        assert "left: float64 (rows, 3); right: float64 (rows, 3)" in lines[-1]
    assert torch.equal(unalike.rebuild(place, clients)(x), models["../c"](x))
