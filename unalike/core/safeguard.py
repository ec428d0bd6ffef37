"""The safeguard: a client decides by labels that a model never saw which model to keep.

A model that was trained on all labels of a client cannot be evaluated on them, and a few held-out
samples say little. So the client keeps fold replicas: copies of its program, each trained without
one fold of the labels. A replica runs every request that the client runs, and its replies are
dropped. At the end the log-loss of the replicas on the folds they never saw estimates that of the
federated model; replicas trained alone on the same folds estimate that of the local model.

Replicas are of no use where clients are sent what was made from their own labels, as in averaging.
There a share of a client's rows is held out of everything from the start (`hold_out`), and both
models are judged on it.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unalike.base.lockstep import run_each
from unalike.base.randomness import stream
from unalike.core.client import Client, HeldOut
from unalike.core.operations import operation_scope
from unalike.data.samples import Samples

if TYPE_CHECKING:
    from unalike.core.program import ClientProgram

REQUIREMENT = (
    "safeguard is for methods whose clients get nothing made from their own labels, and for those "
    "that average one model or its submodels"
)
# In a program's memory: it received something computed from its own labels, so replicas would
# know of labels they must not see. In the server's state: the list of such clients.
NOT_CROSS_VALIDATED = "not_cross_validated"
FOLDS = 3
HELD_OUT_SHARE = 0.2  # of a client's rows, where models are judged on rows held out
BLOCKS = 20  # a fold's losses are compared in at most so many blocks of rows
MARGIN = 1.5  # standard errors by which the federated model must be better


@dataclass(frozen=True)
class Decision:
    """Which model to keep.

    Attributes:
        name: "together" for the federated model, "alone" for the one trained alone.
        state: its parameters.
        log_loss: cross-validated, of both, and the standard error of their difference ("doubt");
            empty where the decision was not made by them.
    """

    name: Literal["together", "alone"]
    state: dict[str, Tensor]
    log_loss: dict[str, float]


def exclude_from_cross_validation(state: dict, clients: Iterable[str]) -> None:
    """Record in the server's state that these clients receive something of their own labels.

    They keep the federated model: it cannot be cross-validated.
    """
    state[NOT_CROSS_VALIDATED] = sorted({*state.get(NOT_CROSS_VALIDATED, []), *clients})


def hold_out(client: Client, seed: int) -> Client:
    """The client with a share of its training rows, drawn at random, held out of everything.

    A client with so few rows that none would be held out stays as it is.
    """
    rows = len(client.train)
    count = round(HELD_OUT_SHARE * rows)
    if not 0 < count < rows:
        return client
    order = torch.randperm(rows, generator=stream(seed, "held out", client.id))
    held, rest = order[:count].sort().values, order[count:].sort().values
    return dataclasses.replace(
        client,
        train=client.train.subset(rest),
        held_out=HeldOut(client.train.subset(held), client.train),
    )


def split_folds(program: "ClientProgram", count: int) -> list[Tensor]:
    """Rows of the client's training data, cut at random into folds.

    Returns: indices of each fold; none where there would be nothing left to train on.
    """
    rows = len(program.client.train)
    order = torch.randperm(rows, generator=stream(program.seed, "folds", program.client.id))
    return [order[i::count] for i in range(count)] if rows > count else []


def build_fold_replicas(program: "ClientProgram", count: int = FOLDS) -> list["ClientProgram"]:
    """A program with the same initial weights for each fold that it does not see."""
    replicas = []
    train = program.client.train
    for fold in split_folds(program, count):
        training_rows = torch.tensor(sorted(set(range(len(train))) - set(fold.tolist())))
        client = dataclasses.replace(program.client, train=train.subset(training_rows))
        replicas.append(program.fresh_copy(client))
    return replicas


def safeguard(program: "ClientProgram", rounds: Sequence[int]) -> Decision:
    """Decide between the federated model and one that is trained alone now.

    The federated model is kept if its cross-validated log-loss is lower by more than MARGIN
    standard errors, or if it cannot be cross-validated because the client received something
    computed from its own labels.

    Args:
        rounds: those that the client took part in.
    """
    if program.memory.get(NOT_CROSS_VALIDATED):
        return Decision("together", copy.deepcopy(program.model.state_dict()), {})
    if program.client.held_out is not None:
        return decide_by_held_out_rows(program, program.client.held_out, rounds)
    fresh = build_fold_replicas(program, len(program.fold_replicas))
    trained = run_each([partial(train_alone, p, rounds) for p in (program.fresh_copy(), *fresh)])
    alone, replicas_alone = trained[0], trained[1:]
    log_loss: dict[str, float] = {}
    federated_wins = False
    if program.fold_replicas:
        log_loss, federated_wins = compare_losses(
            cross_validate(program, replicas_alone),
            cross_validate(program, program.fold_replicas),
        )
    if federated_wins:
        return Decision("together", copy.deepcopy(program.model.state_dict()), log_loss)
    return Decision("alone", copy.deepcopy(alone.model.state_dict()), log_loss)


def compare_losses(alone: Tensor, federated: Tensor) -> tuple[dict[str, float], bool]:
    """The mean losses and the standard error of their difference, and whether the second wins.

    Args:
        alone, federated: log-losses of the same blocks of rows, (blocks,).
    Returns: empty and False where losses are not finite or too few.
    """
    gain = alone - federated
    standard_error = float(gain.std() / len(gain) ** 0.5)
    if not (math.isfinite(float(gain.sum())) and math.isfinite(standard_error)):
        return {}, False
    log_loss = {
        "alone": float(alone.mean()),
        "together": float(federated.mean()),
        "doubt": standard_error,
    }
    return log_loss, float(gain.mean()) > MARGIN * standard_error


def decide_by_held_out_rows(
    program: "ClientProgram", held_out: HeldOut, rounds: Sequence[int]
) -> Decision:
    """Decide by the log-loss on rows that neither model saw.

    The federated model is compared with one that is trained alone on the same rows as it was. A
    client that does not keep it trains alone once more, on all its rows.
    """
    alone = train_alone(program.restart(program.client), rounds)
    losses = [
        scaled_losses(program, [predict(judged, held_out.rows)]) for judged in (alone, program)
    ]
    log_loss, federated_wins = compare_losses(*losses)
    if federated_wins:
        return Decision("together", copy.deepcopy(program.model.state_dict()), log_loss)
    everything = dataclasses.replace(program.client, train=held_out.everything, held_out=None)
    alone = train_alone(program.restart(everything), rounds)
    return Decision("alone", copy.deepcopy(alone.model.state_dict()), log_loss)


def train_alone(program: "ClientProgram", rounds: Sequence[int]) -> "ClientProgram":
    """Train a program exactly like the local baseline of a run does."""
    for number in rounds:
        with operation_scope(program, "train", number, turn=0) as train:
            train()
    return program


def cross_validate(program: "ClientProgram", replicas: list["ClientProgram"]) -> Tensor:
    """Log-losses, (blocks,), of the replicas on the folds they never saw."""
    folds = split_folds(program, len(replicas))
    predictions = [
        predict(replica, program.client.train, fold)
        for replica, fold in zip(replicas, folds, strict=True)
    ]
    return scaled_losses(program, predictions)


Prediction = tuple[list[Tensor], list[Tensor]]  # outputs and labels, a tensor each per block


def predict(program: "ClientProgram", data: Samples, rows: Tensor | None = None) -> Prediction:
    """Outputs of a program's model for some rows, all by default, and their labels, in blocks."""
    rows = torch.arange(len(data)) if rows is None else rows
    client = program.client
    size = max(math.ceil(len(rows) / BLOCKS), client.task.rows_per_loss)
    outputs, labels = [], []
    program.model.eval()
    with torch.no_grad():
        for block in rows.split(size):
            x, y = data.labelled_batch(block)
            outputs.append(program.model(client.to_device(x)).cpu())
            labels.append(client.to_device(y).cpu())
    return outputs, labels


def scaled_losses(program: "ClientProgram", predictions: Iterable[Prediction]) -> Tensor:
    """Log-losses, (blocks,), of predictions.

    Where the size of an output is its confidence, all are multiplied by the one scale that suits
    them best, so that a model that is right but over-confident does not lose against one that is
    less right but modest.
    """
    task = program.client.task
    pairs = []
    for outputs, labels in predictions:
        pairs += list(zip(outputs, labels, strict=True))

    def losses_at(scale: float) -> Tensor:
        return torch.stack([task.loss(output * scale, y) for output, y in pairs])

    if not task.has_confidence:
        return losses_at(1.0)
    candidates = [losses_at(2.0 ** (power / 2)) for power in range(-10, 3)]
    return min(candidates, key=lambda losses: float(losses.mean()))
