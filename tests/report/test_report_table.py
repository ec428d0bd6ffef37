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


def test_words_keep_their_examples():
    assert doctest.testmod(formatting).failed == 0
    assert doctest.testmod(outcome).failed == 0


@pytest.mark.parametrize("how", [{}, {"safeguard": True}, {"alone": False}])
def test_eighty_columns_hold_everything(told, how):
    text = printed(told(**how))
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


def test_even_forty_columns_hold_every_number(told):
    text = printed(told(safeguard=True), width=48)
    assert max(map(len, text.splitlines())) <= 48
    for whole in ("83.0", "61.2", "+35.6 %", "−4.8 %"):
        assert whole in text


def private(results):
    for place, its in enumerate(results["clients"].values()):
        its["privacy"] = {"epsilon": 7.25 + place, "delta": 1e-5, "releases": 20 + place}
    return results | {"privacy": {"epsilon": None, "delta": 1e-5, "releases": 25}}


def test_epsilon_of_each_client_and_of_the_worst_is_shown(told):
    text = printed(private(told(safeguard=True)))
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("7.25", "12.2", "epsilon unbounded at most, delta 1e-05, 25 releases", "+35.6 %"):
        assert whole in text
    assert "epsilon" not in printed(told())


def test_degraded_worst_and_failed_clients_are_named(told):
    text = printed(
        told(
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


def test_who_missed_rounds_is_counted_and_not_among_the_failures(told):
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
    text = printed(told(failures=away))
    assert "missed     rounds: reed 2 and leaf 1 (dropped out)" in text and "failures" not in text


def test_many_clients_show_the_worst_first(told):
    many = {
        f"c{place}": ("cnn", "classification", "accuracy", 50.0, 50.0 + place)
        for place in range(100)
    }
    text = printed(told(many))
    assert (
        "c0 " in text
        and "c39 " in text
        and "c99" not in text
        and "40 smallest gains of 100" in text
    )


def test_a_name_cannot_steer_the_terminal(told):
    text = printed(told({"a\x1b[31m[bold]b\n": ("cnn", "classification", "accuracy", 50.0, 60.0)}))
    assert "\x1b" not in text and "[bold]b" in text.replace("\n", "").replace(" ", "")


def test_the_verdict_tells_who_gained(told):
    six = {
        f"c{place}": ("cnn", "classification", "accuracy", 50.0, 60.0 + place) for place in range(6)
    }
    assert (
        outcome.verdict(told(six))
        == "Six clients trained together; all gained; mean gain +25.0 %; the least gain is c0 +20.0 %."
    )
    assert (
        outcome.verdict(told())
        == "Six clients trained together; five gained, one lost (oak −4.8 %); mean gain +18.7 %."
    )
    assert "so gains are not known; the worst is reed with mIoU 41.0" in outcome.verdict(
        told(alone=False)
    )
    level = told({"x": ("cnn", "t", "m", 50.0, 50.0)})
    assert (
        outcome.verdict(level)
        == "One client trained by itself; none gained, one stayed level; mean gain 0.0 %."
    )


def test_failures_of_one_kind_are_told_once():
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
    for its in results["clients"].values():
        its |= {"task": "clustering", "labelled": False, "modalities": ["left", "right"]}
    its |= {"value": None, "gain": None, "alone": None, "modalities": ["left"]}
    return results | {
        "metrics": {**scores, "joint": {**scores, "acc": 69.9}},
        "federation_metrics": list(Clustering.federation_metrics),
    }


def test_several_labels_are_told_by_more_than_one_figure(told):
    results = told()
    for its in results["clients"].values():
        its["task"] = "multilabel"
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


def test_clustering_shows_everyone_together_and_who_owns_what(told):
    text = printed(clustered(told()))
    assert (
        "federation acc 71.3, nmi 65.0, ari 60.5; joint acc 69.9, nmi 65.0, ari 60.5\n" in text
        and "left, right" in text
    )
    assert "federation" not in printed(told()) and "modalities" not in printed(told())


def test_what_nobody_could_measure_is_said(told):
    nothing = clustered(told({"x": ("m", "t", "m", 1.0, 2.0)}, safeguard=True))
    nothing |= {"safeguard": {"delta": None, "losers": None}}
    assert "not known: no client could be measured, there are no labels" in printed(
        nothing
    ) and "None" not in printed(nothing)
    assert outcome.verdict(nothing) == "One client trained by itself."
    assert formatting.describe_privacy({"delta": 1e-5, "releases": 1}).endswith("1 release")


def errors(results):
    """The same clients with a metric that should fall: their values are errors, in no unit."""
    for its in results["clients"].values():
        its |= {"metric": "mae", "higher_is_better": False, "unit": ""}
        its["alone"], its["value"] = 0.5, 0.0123
        its["gain"] = 97.5
    return results | {"delta": 97.5, "losers": 0}


def test_an_error_that_falls_is_a_gain_and_is_no_percentage(told):
    text = printed(errors(told()))
    assert "mae" in text and "0.0123" in text and "+97.5 %" in text
    assert "degraded   0 of 6" in text


def test_without_a_baseline_the_worst_error_is_the_highest(told):
    results = errors(told(alone=False))
    for place, its in enumerate(results["clients"].values()):
        its |= {"alone": None, "gain": None, "value": 0.1 * (place + 1)}
    assert outcome.worst_client(results) == "oak with mae 0.6"
    assert outcome.verdict(results).endswith("the worst is oak with mae 0.6.")


def test_metrics_of_unlike_direction_or_unit_have_no_worst_client(told):
    results = told(alone=False)
    results["clients"]["oak"] |= {"higher_is_better": False, "unit": ""}
    assert outcome.worst_client(results) is None
    assert outcome.common_unit(results["clients"]) == ""
