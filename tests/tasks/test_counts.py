"""Metrics from counts against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from unalike.tasks import Classification, MultiLabel, Segmentation
from unalike.tasks.counts import area_under_roc, average_precision

EXACT = {"rel": 0, "abs": 1e-12}


@pytest.mark.parametrize("seed", range(4))
def test_classification_is_measured_as_by_scikit_learn(seed):
    draw = torch.Generator().manual_seed(seed)
    classes = 2 + 3 * seed  # with many classes and few rows, some occur nowhere
    output = torch.randn(40, classes, generator=draw, dtype=torch.float64)
    y = torch.randint(-1, classes, (40,), generator=draw)
    meter = Classification(classes).meter()
    for rows in torch.arange(40).split(16):
        meter.add(output[rows], y[rows])
    known = y >= 0
    truth, predicted = y[known].numpy(), output[known].argmax(1).numpy()
    result = meter.result()
    f1 = metrics.f1_score(truth, predicted, average="macro", zero_division=0)
    log_loss = metrics.log_loss(truth, output[known].softmax(1).numpy(), labels=range(classes))
    assert result["accuracy"] == pytest.approx(
        100 * metrics.accuracy_score(truth, predicted), **EXACT
    )
    assert result["macro_f1"] == pytest.approx(100 * f1, **EXACT)
    assert result["log_loss"] == pytest.approx(log_loss, **EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_rankings_are_measured_as_by_scikit_learn_ties_included(seed):
    draw = np.random.default_rng(seed)
    truth = draw.random(50) < 0.3
    truth[:2] = [True, False]
    scores = draw.integers(0, 4 + 20 * seed, 50) / 7
    expected = metrics.average_precision_score(truth, scores)
    assert average_precision(truth, scores) == pytest.approx(expected, **EXACT)
    assert area_under_roc(truth, scores) == pytest.approx(
        metrics.roc_auc_score(truth, scores), **EXACT
    )


def test_multilabel_means_are_those_of_scikit_learn():
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(60, 5, generator=draw, dtype=torch.float64)
    y = (torch.rand(60, 5, generator=draw) < 0.4).double()
    meter = MultiLabel(5).meter()
    meter.add(output, y)
    result = meter.result()
    truth, scores = y.numpy(), output.numpy()
    predicted = scores > 0
    expected = {
        "micro_f1": metrics.f1_score(truth, predicted, average="micro"),
        "macro_f1": metrics.f1_score(truth, predicted, average="macro"),
        "mAP": metrics.average_precision_score(truth, scores, average="macro"),
        "macro_auc": metrics.roc_auc_score(truth, scores, average="macro"),
        "micro_auc": metrics.roc_auc_score(truth, scores, average="micro"),
        "exact": metrics.accuracy_score(truth, predicted),
    }
    for name, value in expected.items():
        assert result[name] == pytest.approx(100 * value, **EXACT), name


def test_pixels_are_counted_as_by_scikit_learn():
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(3, 4, 5, 5, generator=draw)
    y = torch.randint(0, 4, (3, 5, 5), generator=draw)
    y[0, 0] = 255  # unknown
    meter = Segmentation(4).meter()
    meter.add(output, y)
    known = y != 255
    truth, predicted = y[known].numpy(), output.argmax(1)[known].numpy()
    assert meter.confusion.tolist() == metrics.confusion_matrix(truth, predicted).tolist()
    miou = metrics.jaccard_score(truth, predicted, average="macro")
    assert meter.result()["miou"] == pytest.approx(100 * miou, **EXACT)


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        average_precision(np.array([True, False]), np.array([np.nan, 0.0]))
