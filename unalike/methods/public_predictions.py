"""What a model predicts for public rows, and the mean of predictions over clients by label name.

Labels are on axis 1: (n, labels), or (n, labels, CELLS, CELLS) for a dense task, whose map is
average-pooled, (n, labels, STEPS) if it is a sequence. A label means the same to all clients with
that label name and the same task, in the same variant.
"""

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from unalike.core.federation import Federation
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.methods.agreement import prediction_weights
from unalike.methods.public_data import blank_rows, public_samples
from unalike.tasks import Task

MIN_WEIGHT = 1e-6  # of a client in a mean
CELLS = 8  # height and width of a dense prediction that is sent
STEPS = 64  # length of one that is a sequence
Prediction = (
    Annotated[Tensor, Shape("public_rows", "labels")]
    | Annotated[Tensor, Shape("public_rows", "labels", CELLS, CELLS)]
    | Annotated[Tensor, Shape("public_rows", "labels", STEPS)]
)


def pool_dense(task: Task, output: Tensor) -> Tensor:
    """The output as it is sent: a dense map is averaged to a fixed number of positions."""
    if not task.dense:
        return output
    if task.dense_axes == 1:
        return adaptive_avg_pool1d(output, STEPS)
    return adaptive_avg_pool2d(output, CELLS)


def blank_prediction(program: ClientProgram) -> Tensor:
    """Zeros in the form of a prediction of all public rows."""
    task = program.client.task
    positions: tuple[int, ...] = ()
    if task.dense:
        positions = (STEPS,) if task.dense_axes == 1 else (CELLS, CELLS)
    return blank_rows(program, len(public_samples(program)), len(task.labels), *positions)


def likeliest_labels(task: Task, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest labels in the form of the task's targets, and the probability of each."""
    if task.multilabel:
        labels = (probabilities > 0.5).to(probabilities)
        return labels, torch.maximum(probabilities, 1 - probabilities)
    best = probabilities.max(1)
    return best.indices, best.values


def mask_unknown(task: Task, y: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Targets with all but the known ones marked as unknown, and the rows with any known one.

    Args:
        y: targets, first axis n.
        known: same shape as y, bool.
    Returns: targets like y, and row numbers.
    """
    any_known = known.flatten(1).any(1) if known.dim() > 1 else known
    return y.masked_fill(~known, task.unknown_label), any_known.nonzero()[:, 0]


def clients_with_labels(
    fed: Federation, candidates: Iterable[str], client: str
) -> list[tuple[str, list[int], list[int]]]:
    """For each candidate that shares labels with `client` (itself too, if it is one): its id, the
    indices of the shared labels at `client`, and their indices at the candidate."""
    info = fed.infos[client]
    sharing = []
    for candidate in candidates:
        other = fed.infos[candidate]
        if other.task != info.task or other.traits != info.traits:
            continue
        index_there = {label: index for index, label in enumerate(other.labels)}
        shared = [index for index, label in enumerate(info.labels) if label in index_there]
        if shared:
            indices = [index_there[info.labels[index]] for index in shared]
            sharing.append((candidate, shared, indices))
    return sharing


def average_by_label(fed: Federation, predictions: dict[str, Tensor], client: str) -> Tensor:
    """Mean prediction per label over all clients that have the label.

    With `robust`, clients of weight 0 (agreement.py) are left out; a label that only such clients
    have is averaged over them.

    Args:
        predictions: by client, labels on axis 1.
    Returns: same shape as the client's own prediction, floating point.
    """
    own = predictions[client]
    total = torch.zeros_like(own, dtype=own.dtype if own.is_floating_point() else torch.float32)
    count = torch.zeros(own.shape[1], dtype=total.dtype, device=own.device)
    weights = prediction_weights(fed, predictions)
    for other, own_labels, other_labels in clients_with_labels(fed, predictions, client):
        weight = 1.0 if weights[other] > 0 else MIN_WEIGHT
        total[:, own_labels] += weight * predictions[other][:, other_labels].to(total)
        count[own_labels] += weight
    return total / count.view(-1, *[1] * (own.dim() - 2))
