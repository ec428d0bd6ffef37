"""Nobody loses: a client decides, from its own labelled data alone, which model to keep. Knows nothing of servers or engines.

A model that has seen all labels cannot be judged on them, and a few held-out images are noise. So each candidate is judged as a
teacher: for every fold a student starts from the client's first weights, learns the labels outside the fold and imitates the
candidate's answers on unlabelled inputs, and is scored by its log-loss inside the fold. All candidates go through the same
procedure, and only what they know beyond the labels can tell them apart.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unalike.client import Client
from unalike.data.samples import Samples
from unalike.randomness import stream
from unalike.training import batches, optimiser_for, step

if TYPE_CHECKING:
    from unalike.algorithm import ClientSide


STEPS, WIDE, RATE = 80, 48, 3e-3       # of a student; quick ones, since there are folds x candidates of them


@dataclass(frozen=True)
class Kept:
    name: str                          # "together" or "alone"
    state: dict[str, Tensor]
    log_loss: dict[str, float]         # cross-validated, per candidate


def safeguard(side: "ClientSide", folds: int) -> Kept:
    """The candidate with the lowest cross-validated log-loss; alone wins a tie."""
    fresh = type(side)(side.client, side.algorithm, side.training, side.seed)
    start = copy.deepcopy(fresh.model.state_dict())
    for fresh.round in range(1, side.training.rounds + 1):
        fresh.learn(loss=fresh.task_loss)
    candidates = {"alone": fresh.model.state_dict(), "together": side.model.state_dict()}
    candidates = {name: copy.deepcopy(state) for name, state in candidates.items()}
    scores = {name: judge(side, start, state, folds) for name, state in candidates.items()}
    best = min(scores, key=lambda name: (scores[name], name != "alone"))
    return Kept(best, candidates[best], scores)


def judge(side: "ClientSide", start: dict[str, Tensor], teacher: dict[str, Tensor], folds: int) -> float:
    """Mean log-loss of the students of one teacher, each on the fold it never saw."""
    client, data = side.client, side.client.train
    inputs = client.public if client.public is not None else data
    model = copy.deepcopy(side.model)
    model.load_state_dict(teacher)
    answers = predict(model, inputs, client)
    order = torch.randperm(len(data), generator=stream(side.seed, "folds", client.id))
    folds = min(folds, len(data))
    total = 0.0
    for fold in range(folds):
        held = order[fold::folds]
        kept = order[~torch.isin(order, held)]
        if not len(kept):                   # one sample only: nothing to learn from outside its fold
            return float("inf")
        model.load_state_dict(start)
        teach(side, model, kept, inputs, answers, fold)
        meter = client.task.meter()
        meter.add(predict(model, data.take(held), client), data.rows(held)[1])
        total += meter.result()["log_loss"] * len(held)
    return total / len(data)


def teach(side: "ClientSide", model: nn.Module, kept: Tensor, inputs: Samples, answers: Tensor, fold: int) -> None:
    """A student's training: in each step some labels, and the teacher's answers on some unlabelled inputs."""
    client, data, training = side.client, side.client.train, side.training
    optimiser = optimiser_for([p for p in model.parameters() if p.requires_grad], training, rate=RATE)
    labelled: list[Tensor] = []
    unlabelled: list[Tensor] = []
    model.train()
    for at in range(STEPS):
        labelled = labelled or list(batches(len(kept), WIDE, stream(side.seed, "relabel", client.id, fold, at)))
        unlabelled = unlabelled or list(batches(len(inputs), WIDE, stream(side.seed, "imitate", client.id, fold, at)))
        rows, seen = kept[labelled.pop()], unlabelled.pop()
        x, y = (client.place(part) for part in data.rows(rows))
        answered = model(client.place(inputs.rows(seen)[0]))
        loss = client.task.loss(model(x), y) + client.task.imitate(answered, client.place(answers[seen]))
        step(loss, optimiser, training.clip)


def predict(model: nn.Module, data: Samples, client: Client) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([model(client.place(data.rows(rows)[0])).cpu() for rows in batches(len(data), 256)])
