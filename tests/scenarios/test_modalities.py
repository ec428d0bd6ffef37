"""Which modalities clients have: all, several or a single one, by ratio or by name."""

import pytest
import torch
import yaml

from unalike.base.errors import UserError
from unalike.scenarios import build_clients, parse_scenario
from unalike.tasks import Clustering

VIEWS = "digits_views"


def scenario(seed=0, **group):
    mapping = yaml.safe_load(f"""
        name: views
        algorithm: {{name: local}}
        data: {{name: {VIEWS}}}
        seed: {seed}
        clients: [{{id: c, count: 12, model: {{name: autoencoder}}}}]
    """)
    mapping["clients"][0] |= group
    return parse_scenario(mapping, "views")[0]


def modalities_of(**about):
    return [client.info().modalities for client in build_clients(scenario(**about))]


@pytest.mark.parametrize(
    "ratio, counts",
    [
        ((1, 1, 1), (4, 4, 4)),
        ((0, 1, 1), (0, 6, 6)),
        ((1, 1, 0), (6, 6, 0)),
        ((2, 0, 1), (8, 0, 4)),
    ],
)
def test_the_mix_sets_how_many_clients_have_all_several_or_one_modality(ratio, counts):
    kinds = [
        len(names) for names in modalities_of(mix=dict(zip(("full", "multi", "single"), ratio)))
    ]
    assert (kinds.count(3), kinds.count(2), kinds.count(1)) == counts


def test_modalities_are_drawn_by_seed_and_client():
    mix = {"single": 1}
    assert modalities_of(mix=mix) == modalities_of(mix=mix) != modalities_of(mix=mix, seed=1)
    assert len(set(modalities_of(mix=mix))) == 3


def test_modalities_by_name_and_all_by_default():
    every = modalities_of()[0]
    assert len(every) == 3 and set(modalities_of(modalities=[every[2], every[0]])) == {
        (every[0], every[2])
    }


def test_clustering_is_scored_on_the_training_rows():
    client = build_clients(scenario(mix={"single": 1}))[0]
    assert isinstance(client.task, Clustering) and len(client.test) == len(client.train)
    x, _ = client.train.rows(torch.arange(2))
    assert set(x) == set(client.info().modalities) and len(x) == 1


@pytest.mark.parametrize(
    "group, sentence",
    [
        ({"mix": {}}, "above 0"),
        ({"modalities": ["smell"]}, "no modality"),
        ({"modalities": ["left", "left"]}, '"left" is listed twice'),
        ({"missing": 0.7}, "must be at most 0.6667"),
        ({"missing": 0.1, "mix": {"single": 1}}, "must be at most 0: every sample"),
        ({"missing": 0.6, "modalities": ["left", "right"]}, "must be at most 0.5"),
    ],
)
def test_invalid_modalities_are_reported(group, sentence):
    with pytest.raises(UserError, match=sentence):
        modalities_of(**group)


@pytest.mark.parametrize("share", [0.2, 0.5, 2 / 3])
def test_a_share_of_modalities_is_missing_and_every_sample_keeps_one(share):
    one, again, other = (
        build_clients(scenario(missing=share, seed=seed))[0].train for seed in (0, 0, 1)
    )
    marks = torch.stack([one.x[name] for name in ("left?", "right?", "spectrum?")])
    assert abs((~marks).double().mean() - share) < 0.002 and marks.any(0).all()
    assert all(
        (one.x[name][~one.x[f"{name}?"]] == 0).all() for name in ("left", "right", "spectrum")
    )
    assert torch.equal(one.x["left?"], again.x["left?"]) and not torch.equal(
        one.x["left?"], other.x["left?"]
    )


def test_a_single_modality_is_never_missing():
    client = build_clients(scenario(missing=0.5, mix={"full": 1, "single": 1}))[-1]
    assert len(client.info().modalities) == 1 and all(
        client.train.x[f"{name}?"].all() for name in client.info().modalities
    )


def test_pooled_is_one_client_with_all_rows_and_modalities():
    base = scenario(mix={"full": 1, "single": 1})
    apart, (together,) = (
        build_clients(base),
        build_clients(base.model_copy(update={"pooled": True})),
    )
    assert together.info().modalities == ("left", "right", "spectrum") and len(
        together.train
    ) == sum(len(c.train) for c in apart)
    at = 0
    for client in apart:
        x, y = client.train.rows(torch.arange(len(client.train)))
        rows, labels = together.train.rows(torch.arange(at, at := at + len(client.train)))
        assert torch.equal(y, labels) and all(torch.equal(rows[name], x[name]) for name in x)
        assert {name for name in ("left", "right", "spectrum") if rows[f"{name}?"].all()} == set(x)
        assert all(
            name in x or not rows[f"{name}?"].any() for name in ("left", "right", "spectrum")
        )


def test_pooled_clients_with_a_single_kind_of_input():
    base = scenario(target="digit", train=20, model={"name": "mlp"})
    base = base.model_copy(
        update={"data": base.data.model_copy(update={"name": "digits"}), "pooled": True}
    )
    (one,) = build_clients(base)
    assert one.train.rows(torch.arange(2))[0].shape == (2, 1, 8, 8) and len(one.train) == 240


def test_pooled_needs_one_kind_of_client():
    base = scenario()
    other = base.clients[0].model_copy(
        update={"id": "d", "model": base.clients[0].model.model_copy(update={"width": 5})}
    )
    with pytest.raises(UserError, match="pooled   clients that differ"):
        build_clients(base.model_copy(update={"pooled": True, "clients": [*base.clients, other]}))


def test_a_dataset_without_modalities_rejects_modality_settings():
    base = scenario(modalities=["x"])
    plain = base.model_copy(update={"data": base.data.model_copy(update={"name": "digits"})})
    plain = plain.model_copy(
        update={"clients": [plain.clients[0].model_copy(update={"target": "digit"})]}
    )
    with pytest.raises(UserError, match="one kind of input"):
        build_clients(plain)
    thin = plain.model_copy(
        update={
            "clients": [plain.clients[0].model_copy(update={"modalities": None, "missing": 0.2})]
        }
    )
    with pytest.raises(UserError, match="no modalities to choose"):
        build_clients(thin)
