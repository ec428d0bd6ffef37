"""Encoders of time series and tables: shapes, missing values, narrowing, and what is refused."""

import pytest
import torch
from torch import nn

import unalike
from unalike import Classification, Client, FedMuscle, Training, UserError
from unalike.models import build_encoder
from unalike.models.flops import count_flops
from unalike.models.submodels import first_units, narrow_model
from unalike.models.tracing import trace

NAN = float("nan")
SERIES = {
    "cnn1d": {"channels": [8, 16], "width": 8},
    "gru1d": {"width": 8},
    "transformer1d": {"patch": 4, "depth": 1, "heads": 2, "width": 8},
}


@pytest.mark.parametrize("name", SERIES)
def test_features_are_the_mean_over_steps(name):
    encoder = build_encoder(name, (3, 16), SERIES[name]).eval()
    x = torch.randn(5, 3, 16)
    assert encoder(x).shape == (5, 8)
    assert torch.allclose(encoder.grid(x).mean(-1), encoder(x))
    assert encoder.grid(x).shape[:2] == (5, 8)


def test_a_convolution_that_does_not_pool_and_a_gru_keep_every_step():
    for name, options in (("cnn1d", {"pool": False}), ("gru1d", {})):
        assert build_encoder(name, (3, 17), options).grid(torch.randn(2, 3, 17)).shape[2] == 17


def test_a_gru_sees_steps_before_and_after():
    encoder = build_encoder("gru1d", (1, 9), {}).eval()
    x = torch.randn(1, 1, 9)
    changed = x.clone()
    changed[..., 4] += 1
    difference = (encoder.grid(x) - encoder.grid(changed)).abs().amax((0, 1))
    assert (difference > 0).all()


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_the_1d_convolution_can_be_narrowed(norm, ratio):
    torch.manual_seed(0)
    encoder = build_encoder("cnn1d", (3, 16), {"channels": [8, 32], "width": 16, "norm": norm})
    model = nn.Sequential(encoder, nn.Linear(16, 4)).eval()
    x = torch.randn(2, 3, 16)
    groups = trace(model, x)
    assert [group.units for group in groups] == [8, 8 if norm == "group" else 32, 16]
    small = narrow_model(model, groups, first_units(groups, ratio), x)
    assert small(x).shape == (2, 4)
    assert count_flops(small, x) < count_flops(model, x) * ratio * 1.3


@pytest.mark.parametrize("name", ["transformer1d", "table"])
def test_others_can_be_narrowed_too(name):
    if name == "table":
        encoder = build_encoder(name, (3,), {"categories": [0, 0, 3], "width": 16})
        x = torch.tensor([[0.5, NAN, 2.0], [1.0, 2.0, NAN]])
    else:
        encoder = build_encoder(name, (3, 16), SERIES[name])
        x = torch.randn(2, 3, 16)
    model = nn.Sequential(encoder, nn.Linear(encoder.width, 4)).eval()
    groups = trace(model, x)
    small = narrow_model(model, groups, first_units(groups, 0.5), x)
    assert small(x).shape == (2, 4)
    assert count_flops(small, x) < count_flops(model, x)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("cnn1d", (16,), {}, r"time series of shape \(channels, steps\), got \(16,\)"),
        ("cnn1d", (3, 16), {"kernel": 4}, "odd kernel"),
        ("cnn1d", (3, 2), {"channels": [4, 4, 4]}, "3 stages do not fit 2 steps"),
        ("cnn1d", (3, 16), {"norm": "layer"}, 'norm "none", "batch" or "group"'),
        ("gru1d", (3, 4, 4), {}, "time series"),
        ("transformer1d", (3, 15), {}, "4 must divide its 15 steps"),
        ("transformer1d", (3, 16), {"heads": 3}, "3 heads do not divide width 32"),
        ("table", (3, 4), {}, r"rows of columns, \(columns,\), got \(3, 4\)"),
        ("table", (3,), {"categories": [0, 2]}, "each of 3 columns.*got 2"),
        ("table", (2,), {"categories": [0, 1]}, "0 categories .numbers., or 2 and more"),
    ],
)
def test_what_does_not_fit_is_refused(name, shape, options, message):
    with pytest.raises(UserError, match=message):
        build_encoder(name, shape, options)


def test_a_missing_number_is_not_the_same_as_a_zero():
    encoder = build_encoder("table", (2,), {}).eval()
    features = encoder(torch.tensor([[0.0, 1.0], [NAN, 1.0]]))
    assert features.isfinite().all()
    assert not torch.allclose(features[0], features[1])


def test_missing_and_unknown_categories_have_one_embedding_of_their_own():
    encoder = build_encoder("table", (1,), {"categories": [3]}).eval()
    codes = torch.tensor([[0.0], [1.0], [2.0], [NAN], [7.0], [-1.0], [float("inf")]])
    features = encoder(codes)
    assert torch.equal(features[3:], features[3:4].expand(4, -1))
    assert len(features[:4].unique(dim=0)) == 4


def rows(count, seed):
    """Two numbers and a category, a fifth of them missing; the class follows from the category."""
    draws = torch.Generator().manual_seed(seed)
    code = torch.randint(3, (count,), generator=draws)
    x = torch.cat([torch.randn(count, 2, generator=draws), code[:, None].float()], 1)
    x[torch.rand(count, 3, generator=draws) < 0.2] = NAN
    return x, (code == 1).long()


def test_tables_with_missing_values_are_private_and_public(tmp_path):
    options = {"categories": [0, 0, 3], "hidden": [16], "width": 8}
    clients = [
        Client(
            id,
            lambda: build_encoder("table", (3,), options),
            Classification(2),
            train=rows(30, i),
            test=rows(60, 10 + i),
        )
        for i, id in enumerate("ab")
    ]
    training = Training(rounds=4, epochs=3, batch_size=8, lr=0.01)
    method = FedMuscle(peers=1, batch=8, width=8)
    results = unalike.run(method, clients, training=training, public=rows(16, 99)[0], out=tmp_path)
    assert not results["failures"]
    assert all(entry["value"] > 70 for entry in results["clients"].values())


def test_another_encoder_with_missing_values_in_the_public_set_is_refused():
    x, y = rows(8, 0)
    with pytest.raises(UserError, match=r"in the public set .* NaN or infinity"):
        Client("a", nn.Linear(3, 4), Classification(2), train=(x, y), public=x)
    table = build_encoder("table", (3,), {})
    assert Client("a", table, Classification(2), train=(x, y), public=x).public is not None
