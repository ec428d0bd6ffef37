"""FedALA: clients learn, entry by entry, how much of the global model to take over.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023,
https://arxiv.org/abs/2212.01197.

Before local training a client sets its last layers to theta + (theta_global - theta) * W (eq. 3),
all others to the global ones (eq. 4), and learns W in [0, 1] by gradient steps of size eta on a
share of its samples (eq. 5): until it converges the first time, for one pass afterwards. `layers`
counts layers with parameters, the paper's blocks. Left out: nothing.
"""

from dataclasses import dataclass
from statistics import pstdev
from typing import Annotated

import torch
from pydantic import Field
from torch.func import functional_call

from unalike.base.randomness import stream
from unalike.base.types import Parameters
from unalike.core.operations import operation
from unalike.methods.personal import STARTED, PersonalModel, PersonalProgram
from unalike.tasks import Task
from unalike.training.batching import batches
from unalike.training.loop import Positive

RECENT = 10  # losses whose spread decides whether W has converged
MOST_PASSES = 30  # of the first time


@dataclass
class FedALA(PersonalModel):
    """Adaptive local aggregation, then federated averaging.

    Args:
        eta: learning rate of the weights W.
        share: s, the share of the samples that W is learnt on.
        layers: p, how many of the last layers are mixed.
        threshold: spread of losses at which W has converged.
    """

    eta: Annotated[float, Field(gt=0)] = 1.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    layers: Positive = 1
    threshold: Annotated[float, Field(gt=0)] = 0.1

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired

    class Program(PersonalProgram):
        algorithm: "FedALA"

        @operation
        def receive(self, parameters: Parameters) -> None:
            """Adaptive local aggregation of what was sent; the first time it is taken as it is."""
            first = STARTED not in self.memory
            self.start(parameters)
            if not first:
                self.aggregate_locally(parameters)

        def aggregate_locally(self, parameters: Parameters) -> None:
            """Learn W, and load the mixture."""
            mixed = self.mixed_names()
            own = {n: p.detach().clone() for n, p in self.model.named_parameters() if n in mixed}
            self.model.load_state_dict(
                {n: t for n, t in parameters.items() if n not in mixed}, strict=False
            )
            gap = {n: parameters[n].to(own[n]) - own[n] for n in own}
            weights = self.memory.get("weights") or {n: torch.ones_like(t) for n, t in own.items()}
            losses: list[float] = []
            for number in range(1 if "weights" in self.memory else MOST_PASSES):
                losses.append(self.learn_weights(own, gap, weights, number))
                if len(losses) > RECENT and pstdev(losses[-RECENT:]) < self.algorithm.threshold:
                    break
            self.memory["weights"] = weights
            mixture = {n: own[n] + gap[n] * weights[n] for n in own}
            self.model.load_state_dict(mixture, strict=False)

        def learn_weights(
            self, own: Parameters, gap: Parameters, weights: Parameters, number: int
        ) -> float:
            """One pass over a share of the samples; changes W in place, returns the last loss."""
            count = max(1, round(self.algorithm.share * len(self.client.train)))
            order = stream(self.seed, "aggregation", self.client.id, self.round, number)
            rows = torch.randperm(len(self.client.train), generator=order)[:count]
            self.work += count
            self.model.train()
            for index in batches(count, self.training.batch_size):
                x, y = self.training_batch(rows[index])
                mixture = {n: (own[n] + gap[n] * weights[n]).requires_grad_() for n in own}
                output = functional_call(self.model, mixture, (self.client.to_device(x),))
                loss = self.error(output, self.client.to_device(y))
                gradients = torch.autograd.grad(loss, list(mixture.values()))
                for name, gradient in zip(mixture, gradients, strict=True):
                    step = self.algorithm.eta * gradient * gap[name]
                    weights[name] = (weights[name] - step).clamp(0, 1)
            return float(loss.detach())

        def mixed_names(self) -> set[str]:
            """Names of the parameters of the last layers."""
            layers = [
                {f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False)}
                for path, layer in self.model.named_modules()
            ]
            trained = [names for names in layers if names]
            return set().union(*trained[-self.algorithm.layers :])
