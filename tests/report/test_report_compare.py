"""Comparisons: groups, pairs and intervals, against numbers worked out by hand and scipy's."""

import io
import json
import math
from functools import partial

import pytest
from rich.console import Console
from scipy import stats

from unalike.report import compare, show_comparison
from unalike.report.compare import interval
from unalike.tasks import Clustering


def test_the_interval_is_students():
    """Of 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.3027, so half a width of 4.3027 / √3 = 2.4841."""
    result = interval([1.0, 2.0, 3.0])
    assert (
        result["mean"] == 2
        and result["high"] - 2 == pytest.approx(2.4841, abs=1e-4)
        and result["n"] == 3
    )
    values = [61.2, 63.9, 60.1, 65.5, 62.0]
    low, high = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    assert (interval(values)["low"], interval(values)["high"]) == pytest.approx((low, high))


def test_one_value_has_no_interval():
    assert interval([5.0]) == {"mean": 5.0, "low": None, "high": None, "n": 1}
    assert interval([])["mean"] is None


def test_groups_and_paired_differences(make):
    """The shift of a seed moves every client alike, so it is the difference.

    1, 2 and 3 over the shared seeds 0, 1 and 2; seed 7 has no pair.
    """
    paths = [make(f"a{seed}", seed=seed, shift=10.0 * seed) for seed in range(3)]
    paths += [
        make(f"b{seed}", seed=seed, shift=10.0 * seed + seed + 1, algorithm="fedavg")
        for seed in (2, 0, 1)
    ]
    paths += [make("b7", seed=7, shift=400.0, algorithm="fedavg")]
    result = compare(paths)
    first, second = result["groups"]
    assert (first["label"], first["n"], second["label"], second["n"]) == (
        "fedmuscle",
        3,
        "fedavg",
        4,
    )
    (difference,) = result["differences"]
    assert sorted(difference["seeds"]) == [0, 1, 2] and difference["n"] == 3
    assert (difference["mean"], difference["high"]) == pytest.approx(
        (2.0, 2 + 4.302653 / math.sqrt(3))
    )
    assert difference["excludes_zero"] is False  # -0.48 to 4.48
    assert difference["clients"]["leaf"]["mean"] == pytest.approx(2.0)
    start = (83.0 + 88.9 + 66.1 + 41.0 + 81.7 + 49.5) / 6
    assert first["value"]["mean"] == pytest.approx(start + 10) and first["clients"]["leaf"][
        "mean"
    ] == pytest.approx(93.0)
    assert first["bytes"]["up"]["mean"] == 2_499_840 and first["seconds"]["mean"] == pytest.approx(
        20.1
    )
    assert first["losers"]["mean"] == pytest.approx(1 / 3)  # oak loses with seed 0 only
    json.dumps(result)


def test_paired_differences_are_clear_where_averages_overlap(make):
    """Seeds are far apart, but the second method is always one better."""
    paths = [
        make(f"a{seed}", seed=seed, algorithm="a", shift=20.0 * seed - 30) for seed in range(3)
    ]
    paths += [
        make(f"b{seed}", seed=seed, algorithm="b", shift=20.01 * seed - 29) for seed in range(3)
    ]
    result = compare(paths)
    assert result["groups"][0]["value"]["high"] > result["groups"][1]["value"]["low"]
    assert result["differences"][0]["excludes_zero"] is True


def test_equal_runs_do_not_differ(make):
    paths = [make(f"{name}{seed}", seed=seed, algorithm=name) for name in "ab" for seed in range(3)]
    assert compare(paths)["differences"][0]["excludes_zero"] is False


def test_settings_that_differ_make_groups(make):
    paths = [
        make("a", fields={"mu": 0.1}),
        make("b", fields={"mu": 1.0}),
        make("c", algorithm="fedavg"),
    ]
    assert [group["label"] for group in compare(paths)["groups"]] == [
        "fedmuscle mu=0.1",
        "fedmuscle mu=1.0",
        "fedavg",
    ]
    paths = [
        make("d"),
        make("e", training={"optimizer": {"name": "sgd", "rate": 0.1}}),
        make("f", federation={"sample": 0.5}),
    ]
    labels = [group["label"] for group in compare(paths)["groups"]]
    assert (
        labels[1] == "fedmuscle training.optimizer.rate=0.1 federation.sample=1.0"
        and len(set(labels)) == 3
    )
    paths = [
        make("g", federation={"task": {}}),
        make("h", federation={"task": {"criterion": "focal"}}),
    ]
    assert [group["fields"] for group in compare(paths)["groups"]] == [
        {"federation.task.criterion": result} for result in (None, "focal")
    ]


def test_other_clients_make_another_group_unless_made_in_python(make):
    few = {"leaf": ("cnn", "classification", "accuracy", 61.2, 83.0)}
    other = {"leaf": ("mlp", "classification", "accuracy", 61.2, 83.0)}
    result = compare([make("a", clients=few), make("b", clients=other)])
    assert [group["label"] for group in result["groups"]] == [
        "fedmuscle clients.leaf.model=cnn",
        "fedmuscle clients.leaf.model=mlp",
    ]
    result = compare(
        [make("c", clients=few, python=True), make("d", clients=other, python=True, seed=1)]
    )
    assert [group["n"] for group in result["groups"]] == [2]


def test_one_seed_has_no_interval_and_a_note_says_so(make):
    result = compare([make("a"), make("b", algorithm="fedavg", shift=5.0)])
    assert result["groups"][0]["value"]["low"] is None
    assert (
        result["differences"][0]["mean"] == pytest.approx(5.0)
        and result["differences"][0]["excludes_zero"] is None
    )
    assert "one seed only, so no interval" in printed(
        result
    ) and "one pair: too few to say" in printed(result)


def test_no_common_seed_gives_no_difference(make):
    result = compare([make("a", seed=0), make("b", seed=1, algorithm="fedavg")])
    assert result["differences"][0]["n"] == 0 and result["differences"][0]["mean"] is None
    assert "no seed in common" in printed(result) and "too few" not in printed(result)


def test_gains_over_different_baselines_are_pointed_out(make):
    as_ever = {
        "x": ("cnn", "classification", "accuracy", 50.0, 60.0),
        "y": ("mlp", "clustering", "NMI", 50.0, 40.0),
    }
    weaker = as_ever | {"y": ("mlp", "clustering", "NMI", 49.0, 40.0)}
    make = partial(make, clients=as_ever)
    result = compare(
        [
            make("a"),
            make("b", algorithm="fedavg", clients=weaker),
            make("c", algorithm="fedprox"),
            make("d", algorithm="local", seed=1, clients=weaker),
            make("e", algorithm="other", alone=False),
        ]
    )
    assert [difference["same_alone"] for difference in result["differences"]] == [
        False,
        True,
        None,
        True,
    ]
    text = " ".join(printed(result).split())
    assert "Local baselines of B differ from those of A" in text and "cannot be compared" in text
    assert "Local baselines" not in printed(compare([make("f"), make("g", seed=1)]))


def test_degraded_clients_are_marked_without_colour(make):
    text = printed(compare([make("a"), make("b", seed=1)]))
    assert text.count("▼") == 2 and "▼ 49.5" in text and "▼ worse than its local baseline" in text


def test_runs_without_a_local_baseline_compare_by_value(make):
    result = compare([make("a", alone=False), make("b", alone=False, seed=1)])
    assert (
        result["groups"][0]["delta"]["mean"] is None
        and result["groups"][0]["losers"]["mean"] is None
    )
    assert result["groups"][0]["value"]["n"] == 2 and "–" in printed(result)


def test_clients_without_a_value_everywhere_are_left_out_and_named(make):
    folder = make("b", algorithm="fedavg")
    results = json.loads((folder / "results.json").read_text())
    results["clients"]["oak"]["value"] = None
    (folder / "results.json").write_text(json.dumps(results))
    result = compare([make("a"), folder])
    assert result["left_out"] == ["oak"] and "oak" not in result["clients"]
    assert "Left out, for want of a value in every run: oak." in printed(result)


def test_what_cannot_be_compared_is_refused(make):
    whole = make("a")
    refused = [
        ([make("b", scenario="leaves")], "one scenario"),
        ([make("c", finished=False)], "has not finished"),
        ([], "two runs or more"),
        ([make("d")], "both fedmuscle with seed 0"),
        (
            [make("e", algorithm="x", clients={"z": ("m", "t", "m", 1.0, 2.0)})],
            "no client in common",
        ),
    ]
    for paths, why in refused:
        with pytest.raises(ValueError, match=why) as raised:
            compare([whole, *paths])
        assert "\n" not in str(raised.value)


def printed(result, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_comparison(result, console)
    return console.file.getvalue()


def test_many_groups_fit_in_eighty_columns(make):
    paths = [make(f"first{place}", fields={"mu": place}, shift=place) for place in range(7)]
    paths += [
        make(f"second{place}", seed=1, fields={"mu": place}, shift=place + 0.3)
        for place in range(2)
    ]
    text = printed(compare(paths))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "G − A" in text and "fedmuscle mu=6" in text


def test_the_terminal_shows_a_metric_of_each_label_by_group(make):
    paths = [
        make(name, algorithm=name, by_label={"even": {"f1": f1, "auc": 99.0}})
        for name, f1 in (("fednca", 61.0), ("fedavg", 72.5))
    ]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    show_comparison(compare(paths), console, label_metric="auc")
    lines = [line.split() for line in printed(compare(paths)).splitlines()]
    assert ["label,", "F1", "%", "A", "B"] in lines and ["even", "61.0", "72.5"] in lines
    text = console.file.getvalue()
    assert "label, AUC %" in text and "99.0" in text and "72.5" not in text
    assert "label," not in printed(compare([make("a"), make("b", seed=1)]))


def test_clustering_runs_are_compared_by_federation_metrics_too(make):
    paths = []
    for name, shift in (("a", 0), ("b", 5)):
        paths.append(
            make(
                name,
                algorithm=name,
                clients=dict.fromkeys("xy", ("m", "clustering", "acc", 50.0, 60.0)),
            )
        )
        file = paths[-1] / "results.json"
        scores = {"acc": 70.0 + shift, "nmi": 60.0}
        file.write_text(
            json.dumps(
                json.loads(file.read_text())
                | {
                    "metrics": {**scores, "joint": scores},
                    "federation_metrics": list(Clustering.federation_metrics),
                }
            )
        )
    result = compare(paths)
    assert [group["federation"]["joint acc"]["mean"] for group in result["groups"]] == [70, 75]
    console = Console(file=io.StringIO(), width=100, color_system=None)
    show_comparison(result, console)
    assert "joint nmi %" in console.file.getvalue() and "75.0" in console.file.getvalue()


def test_a_difference_is_positive_where_an_error_is_lower(make):
    """Errors of b are 5 lower than those of a: an improvement of 5."""
    paths = []
    for name, shift in (("a", 0.0), ("b", -5.0)):
        clients = dict.fromkeys("xy", ("m", "regression", "mae", 50.0, 60.0))
        paths.append(make(name, algorithm=name, clients=clients, shift=shift))
        file = paths[-1] / "results.json"
        results = json.loads(file.read_text())
        for entry in results["clients"].values():
            entry |= {"higher_is_better": False, "unit": ""}
        file.write_text(json.dumps(results))
    result = compare(paths)
    assert result["differences"][0]["mean"] == 5
    assert result["lower_is_better"] == ["x", "y"]
    text = printed(result)
    assert "mean difference " in text and "mean difference %" not in text
    assert "Lower is better for x and y" in text
