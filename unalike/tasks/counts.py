"""Metrics from counts: F1 of classes, average precision and area under the ROC curve.

The values are those of scikit-learn; its functions spend a millisecond per call on validation,
which is longer than a small client's forward pass.
"""

import numpy as np
import torch
from torch import Tensor


def confusion_matrix(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Count pairs of labels and predictions.

    Args:
        truth: labels from 0 to classes - 1, of any shape.
        predicted: predictions, of the same shape.
    Returns: (classes, classes) int64, truth by prediction.

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
    tensor([[1, 0],
            [1, 1]])
    """
    pairs = truth.flatten() * classes + predicted.flatten()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def ranking_counts(truth: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count present and absent samples at or above each distinct score, highest first.

    Args:
        truth: (n,) bool, whether the label is present.
        scores: (n,), the higher the surer.
    Raises: ValueError where a score is NaN or infinite.
    """
    if not np.isfinite(scores).all():
        raise ValueError("a score is NaN or infinite: the model diverged, lower training.lr")
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    last_of_equal = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    present = np.cumsum(truth[order])[last_of_equal]
    return present, 1 + last_of_equal - present


def average_precision(truth: np.ndarray, scores: np.ndarray) -> float:
    """Precision at each distinct score, weighted by the recall that it adds.

    Args: as for `ranking_counts`; at least one label is present.

    >>> average_precision(np.array([True, False, True]), np.array([3.0, 2.0, 1.0]))
    0.8333333333333333
    """
    present, absent = ranking_counts(truth, scores)
    added_recall = np.diff(present, prepend=0) / present[-1]
    return float(np.sum(added_recall * present / (present + absent)))


def area_under_roc(truth: np.ndarray, scores: np.ndarray) -> float:
    """The share of pairs of a present and an absent sample that are ranked right; ties count half.

    Args: as for `ranking_counts`; labels are present and absent at least once each.

    >>> area_under_roc(np.array([True, False, True, False]), np.array([4.0, 3.0, 2.0, 2.0]))
    0.625
    """
    present, absent = ranking_counts(truth, scores)
    added_absent = np.diff(absent, prepend=0)
    mean_present = (present + np.append(0, present[:-1])) / 2
    return float(np.sum(added_absent * mean_present) / (present[-1] * absent[-1]))
