"""FedNCA: head and loss by hand, fixed prototypes, switches, diagnostics, bad input."""

import json
import math
from functools import partial

import pytest
import torch
from torch import nn

from unalike import Client
from unalike.algorithms.fednca import ClassHead, FedNCA
from unalike.base.errors import Problems
from unalike.losses import prototype_contrast, rejection, simplex_etf
from unalike.models import CNN, MLP
from unalike.report import curves, read
from unalike.scenarios import load
from unalike.tasks import MultiLabel
from unalike.training.loop import Training

LABELS = 5


def data(rows=12, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 1, 8, 8, generator=source), torch.randint(
        2, (rows, LABELS), generator=source
    ).float()


SMALL = partial(CNN, (1, 8, 8), (4, 8), 16)


def client(id="a", model=SMALL, **about):
    defaults = {"task": MultiLabel(LABELS), "train": data(12, ord(id)), "test": data(8, 99)}
    return Client(id=id, model=model, dtype=torch.float64, **(defaults | about))


def build_program(method=None, one=None, **training):
    method = method or FedNCA()
    return method.Program(
        one or client(), method, Training(rounds=2, batch_size=4, lr=0.01, **training), 0
    )


def test_the_attention_may_begin_as_its_authors_does():
    """Bounds of torch's own attention, whose projection is one matrix: sqrt(6 / (d + 3 d))."""
    program = build_program(FedNCA(attention_init="xavier"))
    head = program.model.head
    width = head.queries.in_features
    bound = (6 / (4 * width)) ** 0.5
    for layer in (head.queries, head.keys_values):
        assert 0.8 * bound < layer.weight.abs().max() <= bound
    for layer in (head.queries, head.keys_values, head.out):
        assert not layer.bias.any()
    assert build_program(FedNCA()).model.head.queries.bias.any()


def test_the_head_is_one_attention_with_the_prototypes_as_queries():
    """Against torch's own module: no residual, no norm, no further layers."""
    head = ClassHead(LABELS, 16, 4, 10.0, False).double()
    own = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    keys, values = head.keys_values.weight.chunk(2)
    own.in_proj_weight.data = torch.cat([head.queries.weight, keys, values])
    own.in_proj_bias.data = torch.cat([head.queries.bias, head.keys_values.bias])
    own.out_proj.load_state_dict(head.out.state_dict())
    grid = torch.randn(3, 16, 2, 3, dtype=torch.float64)
    tokens = grid.flatten(2).mT
    torch.testing.assert_close(
        head.features(grid), own(head.prototypes.expand(3, -1, -1), tokens, tokens)[0]
    )


def test_a_class_is_predicted_by_its_own_feature():
    head = ClassHead(LABELS, 16, 4, 10.0, False).double()
    head.bias.data.normal_()
    grid = torch.randn(3, 16, 2, 3, dtype=torch.float64)
    f, w = head.features(grid), head.prototypes
    for b, k in ((0, 1), (2, 4)):
        assert head(grid)[b, k].item() == pytest.approx((10 * w[k] @ f[b, k] + head.bias[k]).item())
        for j in range(LABELS):
            assert head.logits(f)[b, k, j].item() == pytest.approx(
                (10 * w[j] @ f[b, k] + head.bias[j]).item()
            )
    torch.testing.assert_close(head(grid), head.logits(f).diagonal(dim1=-2, dim2=-1))


def test_loss_is_the_sum_of_its_terms_and_each_can_be_switched_off():
    x, y = data(6)
    y[0] = -1  # an all-unknown row
    x, y = x.double(), y.double()
    program = build_program()
    f = program.model.head.features(program.model.features(x))
    logits = program.model.head.logits(f)
    entries = [
        (z, t)
        for zs, ts in zip(program.model(x).tolist(), y.tolist())
        for z, t in zip(zs, ts)
        if t >= 0
    ]
    bce = sum(math.log1p(math.exp(-z if t == 1 else z)) for z, t in entries) / 6
    parts = (
        0.01 * rejection(logits, y, 0.3).item(),
        prototype_contrast(f, simplex_etf(LABELS, 16), y, 0.07).item(),
    )
    assert parts[0] > 0 and parts[1] > 0
    for on in ((1, 1), (0, 1), (1, 0), (0, 0)):
        switched = build_program(FedNCA(rejection=0.01 * on[0], prototype=float(on[1])))
        assert switched.loss(x, y).item() == pytest.approx(
            bce + on[0] * parts[0] + on[1] * parts[1], rel=1e-5
        )


def test_without_a_present_label_the_loss_is_the_task_loss():
    x, _ = data(6)
    absent = torch.zeros(6, LABELS, dtype=torch.float64)
    assert build_program().loss(x.double(), absent).item() == pytest.approx(
        LABELS * build_program().task_loss(x.double(), absent).item()
    )


def test_frozen_prototypes_never_change_and_trainable_ones_do(toys, tmp_path):
    for etf in ("frozen", "trainable"):
        method = FedNCA(etf=etf)
        fed = toys.federation(tmp_path / etf, method, [client("a"), client("b")], rounds=3)
        toys.serve(fed, method)
        heads = [fed.engine.host.programs[c].model.head for c in "ab"]
        same = [
            torch.equal(head.prototypes, simplex_etf(LABELS, 16).float().double()) for head in heads
        ]
        assert same == [etf == "frozen"] * 2
        assert ("head.prototypes" in fed.state["models"][fed.state["group"]["a"]]) == (
            etf == "trainable"
        )


def test_mean_is_uniform_by_default():
    replies = {"a": {"samples": 10}, "b": {"samples": 30}}
    assert FedNCA().client_weights(replies) == {"a": 1, "b": 1} and FedNCA(
        mean="samples"
    ).client_weights(replies) == {"a": 10, "b": 30}


def test_without_disentanglement_all_classes_share_one_feature():
    program = build_program(
        FedNCA(disentangle=False), client(model=partial(MLP, (1, 8, 8), (8,), 16))
    )
    x = data(3)[0].double()
    f = program.model.head.features(program.model.features(x))
    assert torch.equal(f[:, 0], program.model.encoder(x)) and torch.equal(f[:, 0], f[:, 4])
    torch.testing.assert_close(
        program.model(x),
        10 * program.model.encoder(x) @ simplex_etf(LABELS, 16).float().double().mT,
    )


def test_collapse_is_logged_each_round(toys, tmp_path):
    nobody = (
        data()[0],
        torch.zeros(12, LABELS),
    )  # a client without a single present label takes part all the same
    results = toys.execute(
        tmp_path / "run", FedNCA(), [client("a"), client("b"), client("c", train=nobody)], rounds=2
    )
    notes = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    noted = {
        (event["round"], event["name"]): event["values"]
        for event in notes
        if event["event"] == "note"
    }
    assert not results["failures"]
    for number in (1, 2):
        assert (
            set(noted[number, "variance within / between"])
            == set(noted[number, "cosine to prototypes"])
            == {"a", "b"}
        )
        assert set(noted[number, "train_loss"]) == set("abc")
    figure = curves.plot_logged_metrics(read(tmp_path / "run"))
    assert (
        figure.caption
        == "By round and client: train loss, variance within / between and cosine to prototypes."
    )


@pytest.mark.parametrize(
    ("method", "about", "message"),
    [
        (
            FedNCA(),
            {"model": partial(CNN, (1, 8, 8), (4,), 4)},
            "5 classes need 5 channels or more .* have 4: widen the encoder",
        ),
        (
            FedNCA(),
            {"model": partial(CNN, (1, 8, 8), (4,), 18)},
            "18 channels among its heads: 4 do not divide them, heads=3 would",
        ),
        (
            FedNCA(),
            {"model": partial(MLP, (1, 8, 8))},
            r"needs an encoder with grid\(x\), MLP has none; disentangle=false",
        ),
        (
            FedNCA(),
            {"task": MultiLabel(1), "train": (data()[0], data()[1][:, :1])},
            "2 classes or more, got 1",
        ),
    ],
)
def test_impossible_settings_are_refused_before_the_run(method, about, message, toys, tmp_path):
    with pytest.raises(Problems, match=message):
        toys.execute(tmp_path / "run", method, [client(**({"test": None} | about))])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("margin=1.5", "must be below 1, got 1.5"),
        ("temperature=0", "must be above 0, got 0"),
        ("rejection=-1", "must be at least 0, got -1"),
    ],
)
def test_fields_out_of_range_are_refused(setting, message):
    with pytest.raises(Problems, match=f"algorithm.{setting.split('=')[0]} .*{message}"):
        load("fednca-digits", settings=[f"algorithm.{setting}"])


def test_the_benchmark_measures_its_baselines(tmp_path, monkeypatch):
    from unalike.cli.benchmarks import benchmark_module
    from unalike.report import read
    from unalike.runs import run_scenario
    from unalike.scenarios import load

    bench = benchmark_module("fednca")
    Study = bench.Study
    tiny = [
        "rounds=1",
        "epochs=1",
        "data.options={train: 40, test: 20}",
        "clients.0.model={name: cnn, width: 16}",
    ]
    once = lambda study, scenario, settings, seed: read(
        run_scenario(
            *load("fednca-digits", settings=[*settings, *tiny], seed=seed),
            out=tmp_path / f"{len([*tmp_path.iterdir()])}",
        )[1]
    )
    monkeypatch.setattr(Study, "once", once)
    chosen = ("ETF alone, alpha 0.1", "fedavg, ASL, alpha 0.5", "centralised")
    study = Study(seeds=(0,), only=tuple(f"lesions: {name}" for name in chosen))
    rows = bench.bench_fednca(study)["rows"]
    assert len(rows) == 3 and all(set(bench.SHOWN) <= set(row) for row in rows.values())
    tables = [row["by_label"] for row in rows.values()]
    assert all("f1" in metrics for table in tables for metrics in table.values()) and any(tables)


def test_the_cost_is_a_ratio():
    from unalike.cli.benchmarks import benchmark_module

    bench = benchmark_module("fednca")
    result = bench.bench_fednca_cost(bench.Study(quick=True))
    assert result["ratio"] > 0 and result["plain_ms"] > 0
