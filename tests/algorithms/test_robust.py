"""Robust merging: what the rules compute, and that false updates neither end a run nor decide its model."""

import json
import math

import pytest
import torch

from unalike.algorithms import ALGORITHMS
from unalike.core.federation import MAX_MAGNITUDE
from unalike.core.program import ClientProgram
from unalike.engines.host import Host
from unalike.losses.kernels import cka, debiased_cka
from unalike.methods.agreement import agreement_weights
from unalike.methods.averaging import Averaging
from unalike.methods.peer_selection import select_peers
from unalike.methods.robust import Upload, cap_weights, merge_robustly

RULES = ["median", "trimmed", "clip", "krum"]
AVERAGING = [
    name
    for name, method in ALGORITHMS.items()
    if issubclass(method, Averaging) and method.serve is Averaging.serve and method.merges
]


def uploads(*values, masks=None):
    masks = masks or [None] * len(values)
    return [
        Upload(
            "abcdefgh"[i],
            {"w": torch.tensor(value, dtype=torch.float32)},
            None if mask is None else {"w": torch.tensor(mask, dtype=torch.float32)},
        )
        for i, (value, mask) in enumerate(zip(values, masks, strict=True))
    ]


def merged(rule, *values, masks=None, weights=None):
    model = {"w": torch.full_like(torch.tensor(values[0], dtype=torch.float32), 7.0)}
    weights = weights or dict.fromkeys("abcdefgh", 1.0)
    return merge_robustly(model, uploads(*values, masks=masks), weights, rule)["w"].tolist()


def test_the_median_of_every_entry():
    assert merged("median", [1.0, 10.0], [2.0, 20.0], [900.0, -900.0]) == [2.0, 10.0]
    assert merged("median", [1.0], [2.0], [4.0], [900.0]) == [3.0]


def test_the_trimmed_mean_leaves_one_of_five_out_at_each_end():
    assert merged("trimmed", [1.0], [2.0], [3.0], [4.0], [1e9]) == [3.0]


def test_clipping_moves_an_outlier_to_the_median_distance():
    """Median 2, distances 2, 1, 0, 1 and 98: the outlier goes to 2 + 1, and a to 2 - 1."""
    assert merged("clip", [0.0], [1.0], [2.0], [3.0], [100.0]) == [
        pytest.approx((1 + 1 + 2 + 3 + 3) / 5)
    ]


def test_krum_leaves_out_the_update_far_from_its_neighbours():
    """Weights count among the rest."""
    weights = {"a": 3.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1e9}
    assert merged("krum", [0.0], [1.0], [2.0], [3.0], [50.0], weights=weights) == [
        pytest.approx(1.0)
    ]


@pytest.mark.parametrize("rule", RULES)
def test_entries_are_merged_over_the_clients_that_have_them(rule):
    """The second entry only a, b and c have, the third none: it stays as it is."""
    masks = [[1, 1, 0]] * 3 + [[1, 0, 0]] * 2
    values = [[1.0, 5.0, 0.0], [1.0, 5.0, 0.0], [1.0, 5.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert merged(rule, *values, masks=masks) == [1.0, 5.0, 7.0]


@pytest.mark.parametrize("rule", RULES)
def test_one_false_update_does_little(rule):
    generator = torch.Generator().manual_seed(0)
    honest = torch.randn(5, 40, generator=generator)
    for false in (1e15, -1e6, 30.0):
        rows = [*honest.tolist(), [false] * 40]
        error = torch.tensor(merged(rule, *rows)) - honest.mean(0)
        assert error.norm() < honest.std(0).norm()


def test_integers_are_rounded():
    states = [Upload(c, {"n": torch.tensor(n)}) for c, n in zip("abc", (3, 4, 900), strict=True)]
    assert merge_robustly(states[0].parameters, states, {}, "median")["n"].item() == 4


def test_weights_are_capped_at_a_multiple_of_the_median():
    assert cap_weights({"a": 1.0, "b": 4.0}, 10.0) == {"a": 1.0, "b": 4.0}
    assert cap_weights({"a": 1.0, "b": 1e15}, 10.0) == {"a": 1.0, "b": 10.0}
    assert cap_weights({"a": 1.0, "b": 1e15}, None) == {"a": 1.0, "b": 1e15}
    assert cap_weights({}, 10.0) == {}


# Whole runs


def alike(toys, count=6):
    return [toys.client("abcdefgh"[i]) for i in range(count)]


def attacked(toys, monkeypatch, folder, change, method, clients=None, culprit="b", **options):
    """A run in which the culprit's updates are changed by `change(sent, parameters, round)`."""
    handle = Host.handle

    def changes(self, client, message):
        reply = handle(self, client, message)
        if client == culprit and message["operation"] == "update" and "body" in reply:
            body = dict(reply["body"])
            sent = message["body"]["parameters"]
            body["parameters"] = {
                name: change(sent[name], tensor, message["round"])
                if tensor.is_floating_point()
                else tensor
                for name, tensor in body["parameters"].items()
            }
            reply = {**reply, "body": body}
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(Host, "handle", changes)
        patch.setattr(Host, "_groups", lambda self, messages: [])
        return toys.execute(folder, method, clients or alike(toys), **{"rounds": 4, **options})


def honest_mean(results):
    values = [entry["value"] for id, entry in results["clients"].items() if id != "b"]
    return sum(values) / len(values)


@pytest.mark.parametrize("size", [1e300, 3e38, 1e14, 1e7])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_huge_parameters_exclude_their_client_and_nobody_else(
    toys, monkeypatch, tmp_path, size, count
):
    """Of float64 clients. The run ended, and named all but the culprit."""
    huge = lambda sent, got, round: torch.full_like(got, size)
    clients = alike(toys, count)
    method = toys.method("fedavg")
    results = attacked(toys, monkeypatch, tmp_path / "run", huge, method, clients)
    assert [f["client"] for f in results["failures"]] == ["b"]
    assert all(math.isfinite(results["clients"][id]["value"]) for id in "acdefg"[: count - 1])
    assert size < MAX_MAGNITUDE or "beyond 1e+15" in results["failures"][0]["reason"]


def test_where_everyone_diverges_after_a_merge_the_culprit_is_named(toys, monkeypatch, tmp_path):
    """Its update is too small to be refused and large enough that nobody can train from the mean.

    The merge is undone, the others go on from the model of before and none of them is blamed.
    """
    diverge = "the training loss became nan"
    handle = Host.handle

    def fails_from_large_parameters(self, client, message):
        parameters = message["body"].get("parameters", {})
        large = any(bool((t.abs() > 5).any()) for t in parameters.values())
        if message["operation"] == "update" and large:
            return {"number": message["number"], "failure": diverge}
        return handle(self, client, message)

    monkeypatch.setattr(Host, "handle", fails_from_large_parameters)
    far = lambda sent, got, round: sent + 500 * (got - sent) if round == 2 else got
    results = attacked(toys, monkeypatch, tmp_path / "run", far, toys.method("fedavg"), rounds=8)
    (lasting,) = [f for f in results["failures"] if f["lasting"]]
    assert lasting["client"] == "b" and "times as large as the median" in lasting["reason"]
    assert "5 of 5 other clients failed" in lasting["reason"]
    assert all(results["clients"][id]["value"] is not None for id in "acdef")
    honest = toys.execute(tmp_path / "honest", toys.method("fedavg"), alike(toys), rounds=8)
    assert honest_mean(results) > 0.9 * honest_mean(honest)


def test_a_false_number_of_samples_does_not_decide_the_model(toys, monkeypatch, tmp_path):
    """A million rows, of which it learns nothing: by its weight everyone would stay at the start."""
    learn = ClientProgram.learn

    def quick(self, *args, **kwargs):
        return 0.5 if len(self.client.train) == 10**6 else learn(self, *args, **kwargs)

    monkeypatch.setattr(ClientProgram, "learn", quick)
    rows = torch.zeros(1, 6).expand(10**6, 6)
    values = {}
    for max_weight in (None, 1.0):
        clients = alike(toys)
        clients[1] = toys.client("b", train=(rows, torch.zeros(10**6, dtype=torch.long)))
        method = toys.method("fedavg", max_weight=max_weight)
        results = toys.execute(tmp_path / str(max_weight), method, clients, rounds=8)
        values[max_weight] = honest_mean(results)
    assert values[1.0] > values[None] + 20


FLIP = lambda sent, got, round: sent - 8 * (got - sent)


@pytest.mark.parametrize("rule", RULES)
def test_a_flipped_update_does_less_with_every_rule(toys, monkeypatch, tmp_path, rule):
    train = {"rounds": 8}
    honest = toys.execute(tmp_path / "honest", toys.method("fedavg"), alike(toys), **train)
    plain = attacked(toys, monkeypatch, tmp_path / "0", FLIP, toys.method("fedavg"), **train)
    method = toys.method("fedavg", robust=rule)
    guarded = attacked(toys, monkeypatch, tmp_path / "1", FLIP, method, **train)
    assert honest_mean(guarded) > 0.9 * honest_mean(honest) > honest_mean(plain) + 10


@pytest.mark.parametrize("name", AVERAGING)
def test_every_averaging_method_merges_robustly(toys, tmp_path, name):
    """It ends, with other models than by the mean."""
    toy = type("Toys", (), {**vars(toys), **toys.toys_for(ALGORITHMS[name])})
    clients = lambda: [toy.client("abcd"[i]) for i in range(4)]
    hashes = []
    for rule in ("never", "median"):
        method = toys.method(name, robust=rule)
        results = toys.execute(tmp_path / rule, method, clients(), rounds=2)
        assert not results["failures"]
        hashes.append(results["clients"]["a"]["hash"])
    assert hashes[0] != hashes[1] or name.startswith(("linear", "zero"))


def test_a_method_that_merges_nothing_refuses_robust_merging(toys):
    for name in ("fedamp", "fedfomo"):
        ((field, sentence),) = toys.method(name, robust="median").check(4, 0)
        assert field == "robust" and "averages no updates" in sentence
        assert toys.method(name).check(4, 0) == []


# Peers of methods on a public set


def test_unrelated_rows_have_no_debiased_alignment():
    """Though there are more columns than rows, at which the biased one is near 1."""
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randn(200, 2, 16, 64, generator=draw, dtype=torch.float64)
    kernels = pairs @ pairs.mT
    values = torch.stack([debiased_cka(a, b) for a, b in kernels])
    assert values.mean().abs() < 0.02
    assert torch.stack([cka(a, b) for a, b in kernels]).mean() > 0.5
    assert debiased_cka(kernels[0, 0], 3 * kernels[0, 0]).item() == pytest.approx(1)
    assert debiased_cka(kernels[0, 0], torch.ones(16, 16).double()) == 0


def test_a_client_that_agrees_with_nobody_is_left_out(toys, tmp_path):
    draw = torch.Generator().manual_seed(0)
    public = torch.randn(64, 6, generator=draw)
    views = {c: public @ torch.randn(6, 16, generator=draw) for c in "abcde"}
    views["f"] = torch.randn(64, 16, generator=draw)
    fed = toys.federation(tmp_path, toys.method("fedmuscle"), alike(toys))
    fed.round = 1
    weights = agreement_weights(fed, views)
    assert weights["f"] == 0 and all(weights[c] > 0.5 for c in "abcde")
    peers = select_peers(fed, views, 3, weights=weights)
    assert all("f" not in names and len(names) == 3 for names in peers.values())


@pytest.mark.parametrize("name", ["fedmuscle", "fedhenn", "feddf", "sage", "cofed"])
def test_methods_on_a_public_set_report_the_weight_of_each_peer(toys, tmp_path, name):
    method = toys.method(name, robust="agreement")
    results = toys.execute(tmp_path / "run", method, alike(toys, 4), rounds=2)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    weights = [e["values"] for e in events if e.get("name") == "peer_weight"]
    assert not results["failures"] and weights and set(weights[0]) == set("abcd")


def test_rows_of_the_opposite_sign_are_left_out_where_all_are_in_one_space(toys, tmp_path):
    """Their kernel is that of honest rows."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(64, 16, generator=draw)
    views = {c: common + torch.randn(64, 16, generator=draw) for c in "abcdef"}
    views["f"] = -views["f"]
    fed = toys.federation(tmp_path, toys.method("fedmuscle"), alike(toys))
    assert min(agreement_weights(fed, views).values()) > 0.5
    weights = agreement_weights(fed, views, one_space=True)
    assert weights["f"] == 0 and min(weights[c] for c in "abcde") > 0.5


@pytest.mark.parametrize("factor", [1e6, 1e-3])
def test_rows_of_another_length_are_left_out_where_all_are_in_one_space(toys, tmp_path, factor):
    """Directions are all that a loss sees of them, so that nothing else would."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(64, 16, generator=draw)
    views = {c: common + torch.randn(64, 16, generator=draw) for c in "abcdef"}
    views["f"] = factor * views["f"]
    fed = toys.federation(tmp_path, toys.method("fedmuscle"), alike(toys))
    weights = agreement_weights(fed, views, one_space=True)
    assert weights["f"] == 0 and min(weights[c] for c in "abcde") > 0.5
    assert min(agreement_weights(fed, views).values()) > 0.5, "predictions may have any length"


def test_false_representations_are_no_ones_peers(toys, monkeypatch, tmp_path):
    handle = Host.handle
    draw = torch.Generator().manual_seed(0)

    def lies(self, client, message):
        reply = handle(self, client, message)
        if client == "b" and isinstance(reply.get("body"), torch.Tensor):
            rows = torch.randn(reply["body"].shape, generator=draw, dtype=reply["body"].dtype)
            reply = {**reply, "body": torch.nn.functional.normalize(rows, dim=-1)}
        return reply

    monkeypatch.setattr(Host, "handle", lies)
    monkeypatch.setattr(Host, "_groups", lambda self, messages: [])
    method = toys.method("fedmuscle", robust="agreement", batch=24, passes=3)
    toys.execute(tmp_path / "run", method, alike(toys), rounds=6)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    weights = [e["values"] for e in events if e.get("name") == "peer_weight"]
    assert weights[-1]["b"] == 0 and min(weights[-1][c] for c in "acdef") > 0
