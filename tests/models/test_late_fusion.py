"""Late fusion: features are the mean over what a sample has, and classifiers may lack modalities."""

import pytest
import torch
import yaml

import unalike
from unalike import Classification, Client, FedAvg, FedMuscle, HeteroFL, Training, UserError
from unalike.models import build_encoder
from unalike.runs import run_scenario
from unalike.scenarios import build_clients, load

SHAPE = {"left": (4,), "right": (1, 8)}
ENCODERS = {"left": {"name": "mlp", "hidden": [8]}, "right": {"name": "cnn1d", "channels": [8]}}


def encoder():
    return build_encoder("late_fusion", SHAPE, {"encoders": ENCODERS, "width": 8})


def views(rows, seed, missing=0.4):
    """Two views of a class; every sample has at least one of them."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (rows,), generator=draws)
    sign = (2.0 * y - 1)[:, None]
    left = sign + torch.randn(rows, 4, generator=draws)
    right = (sign + torch.randn(rows, 8, generator=draws))[:, None]
    has_left = torch.rand(rows, generator=draws) > missing
    has_right = (torch.rand(rows, generator=draws) > missing) | ~has_left
    x = {"left": left, "right": right, "left?": has_left, "right?": has_right}
    return x, y


def test_features_are_the_mean_over_what_is_there():
    model = encoder().eval()
    x, _ = views(6, 0, missing=0)
    full = {name: x[name] for name in ("left", "right")}
    one, other = (model({name: full[name]}) for name in full)
    assert torch.allclose(model(full), (one + other) / 2, atol=1e-6)
    has_left = torch.tensor([True, False] * 3)
    mixed = model({**full, "left?": has_left})
    assert torch.allclose(mixed[has_left], model(full)[has_left], atol=1e-6)
    assert torch.allclose(mixed[~has_left], other[~has_left], atol=1e-6)


def test_what_is_missing_changes_nothing_even_if_it_is_not_a_number():
    model = encoder().eval()
    x, _ = views(20, 0)
    garbage = {**x, "left": x["left"].masked_fill(~x["left?"][:, None], float("nan"))}
    assert torch.equal(model(x), model(garbage))


@pytest.mark.parametrize(
    "method", [FedAvg(), FedMuscle(peers=1, batch=8, width=8), HeteroFL()], ids=str
)
def test_classifiers_learn_from_samples_that_lack_modalities(tmp_path, method):
    clients = []
    for i, id in enumerate("ab"):
        clients.append(
            Client(
                id, encoder, Classification(2), views(40, i), views(80, 9 + i), capacity=1 - i / 2
            )
        )
    options = {"public": views(16, 99)[0]} if method.needs_public else {}
    training = Training(rounds=3, epochs=3, batch_size=8, lr=0.01)
    results = unalike.run(method, clients, training=training, out=tmp_path / "run", **options)
    assert not results["failures"]
    assert all(entry["value"] > 75 for entry in results["clients"].values())
    assert clients[0].info().modalities == ("left", "right")


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4,), {}, "late_fusion takes inputs by modality"),
        (SHAPE, {"encoders": {"leftt": {"name": "mlp"}}}, 'no modality "leftt"'),
        (SHAPE, {"encoder": {"width": 8}}, "encoder of left needs a name"),
        (SHAPE, {"encoder": {"name": "cnn"}}, "cnn takes images"),
    ],
)
def test_what_does_not_fit_is_refused(shape, options, message):
    with pytest.raises(UserError, match=message):
        build_encoder("late_fusion", shape, options)


def test_a_modality_it_was_not_made_for_is_refused():
    with pytest.raises(UserError, match='"up" that its encoder was made without: it has left'):
        encoder()({"up": torch.zeros(2, 3)})


SCENARIO = """
name: views
algorithm: {name: fedmuscle, peers: 2, width: 16, batch: 16}
training: {rounds: 2, epochs: 2, batch_size: 16, lr: 0.003}
data: {name: digits_views, options: {labels: true}}
public: {size: 64}
clients:
  - {id: whole, model: &net {name: late_fusion, encoder: {name: mlp, hidden: [16]}, width: 16}, train: 60, test: 90}
  - {id: gaps, model: *net, missing: 0.4, train: 60, test: 90}
  - {id: left, model: *net, modalities: [left], train: 60, test: 90}
"""


def test_a_scenario_of_classifiers_with_missing_modalities(tmp_path):
    scenario, method = load("views", mapping=yaml.safe_load(SCENARIO))
    whole, gaps, left = build_clients(scenario)
    assert isinstance(gaps.task, Classification)
    for samples in (gaps.train, gaps.test):
        x, _ = samples.rows(torch.arange(len(samples)))
        present = torch.stack([x[f"{name}?"] for name in ("left", "right", "spectrum")])
        assert present.float().mean() == pytest.approx(0.6, abs=0.05) and present.any(0).all()
    assert set(whole.public.shape) == {"left", "right", "spectrum"}
    assert set(left.public.shape) == {"left"}, "it sees of public rows what it sees of its own"
    assert not torch.isin(whole.train.index, whole.test.index).any()
    results, _ = run_scenario(scenario, method, out=tmp_path / "run")
    assert not results["failures"] and len(results["clients"]) == 3
