"""The table in the terminal, and the verdict in words."""

import doctest
import io

import pytest
from rich.console import Console

from unalike.report import formatting, outcome, show
from unalike.tasks import Clustering, MultiLabel


def printed(results, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(results, console)
    return console.file.getvalue()


def test_docstring_examples_hold():
    assert doctest.testmod(formatting).failed == 0
    assert doctest.testmod(outcome).failed == 0


@pytest.mark.parametrize("how", [{}, {"safeguard": True}, {"alone": False}])
def test_eighty_columns_hold_everything(make_results, how):
    text = printed(make_results(**how))
    assert max(map(len, text.splitlines())) <= 80
    for whole in (
        "leaf",
        "bert-mini",
        "classification",
        "accuracy",
        "83.0",
        "2.5 MB up, 2.55 MB down",
        "20.1 s",
    ):
        assert whole in text
    assert ("+35.6 %" in text) == how.get("alone", True)


def test_even_forty_columns_hold_every_number(make_results):
    text = printed(make_results(safeguard=True), width=48)
    assert max(map(len, text.splitlines())) <= 48
    for whole in ("83.0", "61.2", "+35.6 %", "−4.8 %"):
        assert whole in text


def private(results):
    for place, entry in enumerate(results["clients"].values()):
        entry["privacy"] = {"epsilon": 7.25 + place, "delta": 1e-5, "releases": 20 + place}
    return results | {"privacy": {"epsilon": None, "delta": 1e-5, "releases": 25}}


def test_epsilon_of_each_client_and_of_the_worst_is_shown(make_results):
    text = printed(private(make_results(safeguard=True)))
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("7.25", "12.2", "epsilon unbounded at most, delta 1e-05, 25 releases", "+35.6 %"):
        assert whole in text
    assert "epsilon" not in printed(make_results())


def test_degraded_worst_and_failed_clients_are_named(make_results):
    text = printed(
        make_results(
            failures=[
                {"client": "reed", "round": 3, "operation": "align", "reason": "out of memory"}
            ],
            safeguard=True,
        )
    )
    for whole in (
        "1 of 6: oak",
        "oak −4.8 %",
        "reed failed at align in round 3: out of memory",
        "52.0 local",
    ):
        assert whole in text


def test_missed_rounds_are_counted_and_are_no_failures(make_results):
    away = [
        {
            "client": client,
            "round": at,
            "operation": "train",
            "reason": "dropped out",
            "lasting": False,
        }
        for client, at in (("leaf", 1), ("reed", 2), ("reed", 3))
    ]
    text = printed(make_results(failures=away))
    assert "missed     rounds: reed 2 and leaf 1 (dropped out)" in text and "failures" not in text


def test_many_clients_show_the_worst_first(make_results):
    many = {
        f"c{place}": ("cnn", "classification", "accuracy", 50.0, 50.0 + place)
        for place in range(100)
    }
    text = printed(make_results(many))
    assert (
        "c0 " in text
        and "c39 " in text
        and "c99" not in text
        and "40 smallest gains of 100" in text
    )


def test_a_name_cannot_steer_the_terminal(make_results):
    text = printed(
        make_results({"a\x1b[31m[bold]b\n": ("cnn", "classification", "accuracy", 50.0, 60.0)})
    )
    assert "\x1b" not in text and "[bold]b" in text.replace("\n", "").replace(" ", "")


def test_the_verdict_says_how_many_gained_and_lost(make_results):
    six = {
        f"c{place}": ("cnn", "classification", "accuracy", 50.0, 60.0 + place) for place in range(6)
    }
    assert (
        outcome.verdict(make_results(six))
        == "Six clients trained together; all gained; mean gain +25.0 %; the least gain is c0 +20.0 %."
    )
    assert (
        outcome.verdict(make_results())
        == "Six clients trained together; five gained, one lost (oak −4.8 %); mean gain +18.7 %."
    )
    assert "so gains are not known; the worst is reed with mIoU 41.0" in outcome.verdict(
        make_results(alone=False)
    )
    level = make_results({"x": ("cnn", "t", "m", 50.0, 50.0)})
    assert (
        outcome.verdict(level)
        == "One client trained by itself; none gained, one stayed level; mean gain 0.0 %."
    )


def test_equal_failures_are_one_sentence():
    again = [
        {"client": "a", "round": at, "operation": "fit", "reason": "gone"} for at in (1, 2, 2, 4)
    ]
    assert outcome.describe_failures(again) == ["a failed at fit in rounds 1, 2 and 4: gone"]
    assert outcome.describe_failures([{**again[0], "round": at} for at in range(9)]) == [
        "a failed at fit in 9 rounds, 0 to 8: gone"
    ]


def clustered(results):
    """The same of clients that cluster, the last without labels and with one modality only."""
    scores = {"acc": 71.26, "nmi": 65.0, "ari": 60.5}
    for entry in results["clients"].values():
        entry |= {"task": "clustering", "labelled": False, "modalities": ["left", "right"]}
    entry |= {"value": None, "gain": None, "alone": None, "modalities": ["left"]}
    return results | {
        "metrics": {**scores, "joint": {**scores, "acc": 69.9}},
        "federation_metrics": list(Clustering.federation_metrics),
    }


def test_multilabel_runs_show_more_than_one_federation_metric(make_results):
    results = make_results()
    for entry in results["clients"].values():
        entry["task"] = "multilabel"
    results["federation_metrics"] = list(MultiLabel.federation_metrics)
    results["metrics"] = {
        "micro_f1": 21.7,
        "macro_f1": 8.44,
        "mAP": 49.1,
        "macro_auc": 82.3,
        "CF1": 9.0,
        "micro_auc": None,
    }
    assert "federation macro f1 8.4, auc 82.3; mAP 49.1, CF1 9.0\n" in printed(results)


def test_clustering_shows_federation_metrics_and_modalities(make_results):
    text = printed(clustered(make_results()))
    assert (
        "federation acc 71.3, nmi 65.0, ari 60.5; joint acc 69.9, nmi 65.0, ari 60.5\n" in text
        and "left, right" in text
    )
    assert "federation" not in printed(make_results()) and "modalities" not in printed(
        make_results()
    )


def test_missing_labels_are_the_reason_for_missing_gains(make_results):
    nothing = clustered(make_results({"x": ("m", "t", "m", 1.0, 2.0)}, safeguard=True))
    nothing |= {"safeguard": {"delta": None, "losers": None}}
    assert "not known: no client could be measured, there are no labels" in printed(
        nothing
    ) and "None" not in printed(nothing)
    assert outcome.verdict(nothing) == "One client trained by itself."
    assert formatting.describe_privacy({"delta": 1e-5, "releases": 1}).endswith("1 release")


def errors(results):
    """The same clients with a metric that should fall: their values are errors, in no unit."""
    for entry in results["clients"].values():
        entry |= {"metric": "mae", "higher_is_better": False, "unit": ""}
        entry["alone"], entry["value"] = 0.5, 0.0123
        entry["gain"] = 97.5
    return results | {"delta": 97.5, "losers": 0}


def test_an_error_that_falls_is_a_gain_and_is_no_percentage(make_results):
    text = printed(errors(make_results()))
    assert "mae" in text and "0.0123" in text and "+97.5 %" in text
    assert "degraded   0 of 6" in text


def test_without_a_baseline_the_worst_error_is_the_highest(make_results):
    results = errors(make_results(alone=False))
    for place, entry in enumerate(results["clients"].values()):
        entry |= {"alone": None, "gain": None, "value": 0.1 * (place + 1)}
    assert outcome.worst_client(results) == "oak with mae 0.6"
    assert outcome.verdict(results).endswith("the worst is oak with mae 0.6.")


def test_metrics_of_unlike_direction_or_unit_have_no_worst_client(make_results):
    results = make_results(alone=False)
    results["clients"]["oak"] |= {"higher_is_better": False, "unit": ""}
    assert outcome.worst_client(results) is None
    assert outcome.common_unit(results["clients"]) == ""
