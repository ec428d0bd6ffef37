"""Per-FedAvg: the averaged model is one from which a gradient step leads to a good personal one.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning: A Meta-Learning Approach", NeurIPS
2020, https://arxiv.org/abs/2002.07948.

Clients minimise F_i(w) = f_i(w - alpha grad f_i(w)) (eq. 3): the inner gradient is of one half of a
batch and the outer of the other, and the other way round. `order: first` (FO, Sec. 5) treats the
inner gradient as a constant, `exact` differentiates through it; the finite differences of HF are
left out. A client ends with the averaged model after `adaptation_steps` gradient steps on all of
its samples.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from unalike.methods.personal import FineTuning, FineTuningProgram
from unalike.tasks import Task
from unalike.training.batching import batches
from unalike.training.eager import SGD
from unalike.training.loop import Positive

SMALLEST_SPLIT = 4  # rows from which a batch is halved; batch norm needs two rows in each half


@dataclass
class PerFedAvg(FineTuning):
    """Federated averaging of the meta-gradient of eq. 3.

    Args:
        inner_lr: alpha, of the inner gradient step.
        order: "first" treats the inner gradient as a constant, "exact" differentiates through it.
        adaptation_steps: gradient steps of each client on all of its samples at the end.
    """

    inner_lr: Annotated[float, Field(gt=0)] = 0.01
    order: Literal["first", "exact"] = "first"
    adaptation_steps: Positive = 1

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired

    class Program(FineTuningProgram):
        algorithm: "PerFedAvg"

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """F_i of a batch: each half gives the inner gradient for the other (eq. 3)."""
            whole = slice(None)
            if len(y) < SMALLEST_SPLIT:
                return self.meta_loss(x, y, whole, whole)
            halves = slice(len(y) // 2), slice(len(y) // 2, None)
            return (self.meta_loss(x, y, *halves) + self.meta_loss(x, y, *halves[::-1])) / 2

        def meta_loss(self, x: Tensor | dict, y: Tensor, inner: slice, outer: slice) -> Tensor:
            """f(w - alpha grad f(w; inner rows); outer rows)."""
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            exact = self.algorithm.order == "exact"
            inner_loss = self.error(self.model(take(x, inner)), y[inner])
            gradients = torch.autograd.grad(
                inner_loss, list(trained.values()), create_graph=exact, allow_unused=True
            )
            adapted = {}
            for (name, p), gradient in zip(trained.items(), gradients, strict=True):
                adapted[name] = p if gradient is None else p - self.algorithm.inner_lr * gradient
            output = functional_call(self.model, adapted, (take(x, outer),))
            return self.error(output, y[outer])

        def fine_tune(self) -> None:
            """Gradient steps of size alpha on the loss of all samples."""
            trained = [p for p in self.model.parameters() if p.requires_grad]
            optimizer = SGD(trained, lr=self.algorithm.inner_lr)
            rows = len(self.client.train)
            self.model.train()
            for _ in range(self.algorithm.adaptation_steps):
                optimizer.zero_grad()
                for index in batches(rows, self.training.batch_size):
                    x, y = self.training_batch(index)
                    loss = self.task_loss(self.client.to_device(x), self.client.to_device(y))
                    (loss * len(index) / rows).backward()
                optimizer.step()
                self.work += rows


def take(x: Tensor | dict, rows: slice) -> Tensor | dict:
    """Some rows of inputs, which may be given by modality."""
    return {name: part[rows] for name, part in x.items()} if isinstance(x, dict) else x[rows]
