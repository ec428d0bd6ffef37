"""Which labels the clients of a simulation hold, for the report. A server never sees this."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, stack

from unalike.core.client import Client
from unalike.core.lazy_clients import LazyClients
from unalike.data import Tensors

MAX_MATRICES = 5  # co-occurrence matrices of single clients that are recorded


def label_statistics(clients: Sequence[Client]) -> dict[str, Any] | None:
    """Count the labels each client holds and, of multi-label clients, which occur together.

    Returns: None where clients are elsewhere, are lazy, have different labels, or read data on
        demand.
        Otherwise `labels` (names), `counts` (by client, one per label), and of multi-label tasks
        `together` (labels x labels, summed over clients) and `pairs` (the same of a few clients).
    """
    if not clients or isinstance(clients, LazyClients):
        return None
    task = clients[0].task
    if not task.classifies or task.dense:
        return None
    if any(client.task.labels != task.labels for client in clients):
        return None
    counts: dict[str, list[int]] = {}
    pairs: dict[str, Tensor] = {}
    for client in clients:
        if not isinstance(client.train, Tensors) or client.train.y is None:
            return None
        y = client.train.y[client.train.index]
        marks = task.label_matrix(y).long()
        counts[client.id] = marks.sum(0).tolist()
        if task.multilabel:
            pairs[client.id] = marks.mT @ marks
    together = stack(list(pairs.values())).sum(0).tolist() if pairs else None
    examples = list(pairs.items())[:MAX_MATRICES]
    return {
        "labels": task.labels,
        "counts": counts,
        "together": together,
        "pairs": {id: matrix.tolist() for id, matrix in examples},
    }
