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
from torch import Tensor

from unalike.randomness import stream
from unalike.training import batches, optimiser_for, step

if TYPE_CHECKING:
    from unalike.algorithm import ClientSide


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
    client, training, data = side.client, side.training, side.client.train
    inputs = client.public if client.public is not None else data
    model = copy.deepcopy(side.model)
    model.load_state_dict(teacher)
    answers = predict(model, inputs, client)
    order = torch.randperm(len(data), generator=stream(side.seed, "folds", client.id))
    total, seen = 0.0, 0
    for fold in range(min(folds, len(data))):
        held = order[fold::folds]
        kept = order[~torch.isin(order, held)]
        if not len(kept):
            continue
        model.load_state_dict(start)
        optimiser = optimiser_for([p for p in model.parameters() if p.requires_grad], training)
        labelled: list[Tensor] = []
        model.train()
        for epoch in range(EPOCHS):
            for rows in batches(len(inputs), training.batch, stream(side.seed, "imitate", client.id, fold, epoch)):
                if not labelled:
                    labelled = list(batches(len(kept), training.batch, stream(side.seed, "relabel", client.id, fold, epoch)))
                x, y = (client.place(part) for part in data.rows(kept[labelled.pop()]))
                loss = client.task.loss(model(x), y)
                loss = loss + client.task.imitate(model(client.place(inputs.rows(rows)[0])), answers[rows].to(client.device))
                step(loss, optimiser, training.clip)
        x, y = data.rows(held)
        meter = client.task.meter()
        model.eval()
        with torch.no_grad():
            meter.add(model(client.place(x)).cpu(), y)
        total, seen = total + meter.result()["log_loss"] * len(held), seen + len(held)
    return total / max(seen, 1)


EPOCHS = 6      # passes of a student over the unlabelled inputs


def predict(model: torch.nn.Module, data: object, client: object) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([model(client.place(data.rows(rows)[0])).cpu() for rows in batches(len(data), 256)])
