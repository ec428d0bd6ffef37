"""Who owns which modality: full, several, a single one, by ratio or by name."""

import pytest
import torch
import yaml

from unalike.errors import UserError
from unalike.scenarios import build, read
from unalike.tasks import Clustering

VIEWS = "digits_views"


def scenario(seed=0, **group):
    told = yaml.safe_load(f"""
        name: views
        algorithm: {{name: local}}
        data: {{name: {VIEWS}}}
        seed: {seed}
        clients: [{{id: c, count: 12, model: {{name: autoencoder}}}}]
    """)
    told["clients"][0] |= group
    return read(told, "views")[0]


def owned(**about):
    return [client.card().modalities for client in build.clients(scenario(**about))]


@pytest.mark.parametrize("ratio, counts", [((1, 1, 1), (4, 4, 4)), ((0, 1, 1), (0, 6, 6)), ((1, 1, 0), (6, 6, 0)), ((2, 0, 1), (8, 0, 4))])
def test_ratio(ratio, counts):
    kinds = [len(names) for names in owned(mix=dict(zip(("full", "multi", "single"), ratio)))]
    assert (kinds.count(3), kinds.count(2), kinds.count(1)) == counts


def test_drawn_by_seed_and_by_client():
    mix = {"single": 1}
    assert owned(mix=mix) == owned(mix=mix) != owned(mix=mix, seed=1)
    assert len(set(owned(mix=mix))) == 3


def test_by_name_and_all_if_not_said():
    every = owned()[0]
    assert len(every) == 3 and set(owned(modalities=[every[2], every[0]])) == {(every[0], every[2])}


def test_what_a_client_holds_is_what_is_scored():
    client = build.clients(scenario(mix={"single": 1}))[0]
    assert isinstance(client.task, Clustering) and len(client.test) == len(client.train)
    x, _ = client.train.rows(torch.arange(2))
    assert set(x) == set(client.card().modalities) and len(x) == 1


@pytest.mark.parametrize("group, sentence", [({"mix": {}}, "above 0"), ({"modalities": ["smell"]}, "no modality"), ])
def test_bad_input(group, sentence):
    with pytest.raises(UserError, match=sentence):
        owned(**group)


def test_no_modalities_to_choose_from():
    told = scenario(modalities=["x"])
    plain = told.model_copy(update={"data": told.data.model_copy(update={"name": "digits"})})
    plain = plain.model_copy(update={"clients": [plain.clients[0].model_copy(update={"target": "digit"})]})
    with pytest.raises(UserError, match="one kind of input"):
        build.clients(plain)
