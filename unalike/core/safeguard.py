"""Nobody loses: a client decides, from its own labelled data alone, which model to keep. Knows nothing of servers or engines.

A model that has seen all labels cannot be judged on them, a few held-out images are noise, and a student of such a model inherits
what it memorised. So the client keeps shadows: the same side, without one fold of the labels each. A shadow does whatever the
client is told to do, by the same messages, and its replies are dropped. In the end the shadows' log-loss on the folds they never
saw is what taking part was worth, and shadows trained alone tell what staying alone is worth.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unalike.base.randomness import stream
from unalike.core.operations import run_operation

if TYPE_CHECKING:
    from unalike.core.algorithm import ClientProgram

FOR_WHOM = "safeguard is for methods whose clients keep their own model and get nothing made from their own labels"
UNJUDGED = "unjudged"  # in a side's memory: something came down that was made from its own labels, which shadows must not know. In the
# server's state: to whom
FOLDS = 3
BLOCKS = 20  # of a fold at most, whose losses are compared
MARGIN = 1.5  # standard errors by which together must be better


@dataclass(frozen=True)
class Decision:
    name: Literal["together", "alone"]
    state: dict[str, Tensor]
    log_loss: dict[
        str, float
    ]  # cross-validated, and the standard error of their difference; empty: it was not judged by them


def unjudge(state: dict, clients: Iterable[str]) -> None:
    """Note in the server's state that these are sent what was made from their own labels."""
    state[UNJUDGED] = sorted({*state.get(UNJUDGED, []), *clients})


def folds(program: "ClientProgram", count: int) -> list[Tensor]:
    """Rows of the client's labelled data, cut at random into folds; none where a fold would leave nothing to learn from."""
    rows = len(program.client.train)
    order = torch.randperm(rows, generator=stream(program.seed, "folds", program.client.id))
    return [order[i::count] for i in range(count)] if rows > count else []


def build_fold_replicas(program: "ClientProgram", count: int = FOLDS) -> list["ClientProgram"]:
    """The same side with the same first weights, once for each fold that it does not see."""
    made = []
    for held in folds(program, count):
        kept = torch.tensor(sorted(set(range(len(program.client.train))) - set(held.tolist())))
        client = dataclasses.replace(program.client, train=program.client.train.subset(kept))
        made.append(program.fresh_copy(client))
    return made


def safeguard(program: "ClientProgram", rounds: Sequence[int]) -> Decision:
    """Together if its cross-validated log-loss is lower by more than MARGIN standard errors, else alone. `rounds` are those it was here.
    Who cannot be judged keeps what was learnt together."""
    if program.memory.get(UNJUDGED):
        return Decision("together", copy.deepcopy(program.model.state_dict()), {})
    alone = train_alone(program.fresh_copy(), rounds)
    candidates, scores = {"alone": alone.model, "together": program.model}, {}
    best: Literal["together", "alone"] = "alone"
    if program.fold_replicas:
        losses = {
            "alone": judge(
                program,
                [
                    train_alone(shadow, rounds)
                    for shadow in build_fold_replicas(program, len(program.fold_replicas))
                ],
            ),
            "together": judge(program, program.fold_replicas),
        }
        better = losses["alone"] - losses["together"]
        doubt = float(better.std() / len(better) ** 0.5)
        if math.isfinite(float(better.sum())) and math.isfinite(doubt):
            scores = {name: float(loss.mean()) for name, loss in losses.items()} | {"doubt": doubt}
            best = "together" if float(better.mean()) > MARGIN * doubt else "alone"
    return Decision(best, copy.deepcopy(candidates[best].state_dict()), scores)


def train_alone(program: "ClientProgram", rounds: Sequence[int]) -> "ClientProgram":
    """The work of local training, to the bit: what the results call alone."""
    for number in rounds:
        run_operation(program, "train", number, 0, {})
    return program


def judge(program: "ClientProgram", judged: list["ClientProgram"]) -> Tensor:
    """Log-losses of the shadows on the folds they never saw, in blocks of rows, after the one scaling of all their outputs that
    suits them best: a model that is right but too sure of itself is not to lose against one that is wrong modestly."""
    outputs, labels = [], []
    for shadow, held in zip(judged, folds(program, len(judged)), strict=True):
        shadow.model.eval()
        with torch.no_grad():
            for rows in held.split(-(-len(held) // BLOCKS)):
                x, y = program.client.train.labelled_batch(rows)
                outputs.append(shadow.model(program.client.to_device(x)).cpu())
                labels.append(program.client.to_device(y).cpu())

    def scaled(scale: float) -> Tensor:
        return torch.stack(
            [
                program.client.task.loss(output * scale, y)
                for output, y in zip(outputs, labels, strict=True)
            ]
        )

    # Only scores of classes can be too sure of themselves; other outputs stay as they are.
    powers = range(-10, 3) if program.client.task.classifies else (0,)
    return min(
        (scaled(2.0 ** (power / 2)) for power in powers),
        key=lambda losses: float(losses.mean()),
    )
