"""FedL2G: the server learns guiding vectors that make local training better on held-out rows.

Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024,
https://arxiv.org/abs/2410.06490.

Every class has a vector v_y. Clients minimise their loss + the mean squared difference of their
logits to v_y (eq. 2). A client takes a gradient step of that loss on a study batch and sends the
gradient, with respect to v, of the plain loss on a quiz batch after the step (eq. 4 and 5); the
server averages these for each class and descends (eq. 6). `warm_up` such exchanges come before the
first training. Left out: guidance of features (FedL2G-f). Among clients with the same labels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.core.federation import Federation
from unalike.core.operations import operation, query
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.methods.prototypes import LabelExchange, label_group
from unalike.tasks import Task

Guides = Annotated[Tensor, Shape("labels", "labels")]


@dataclass
class FedL2G(LabelExchange):
    """Learnt logits of each class as guides.

    Args:
        server_lr: learning rate of the guiding vectors.
        warm_up: exchanges before the first training.
    """

    server_lr: Annotated[float, Field(gt=0)] = 0.01
    warm_up: Annotated[int, Field(ge=0)] = 50

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.single_label and not task.dense

    def serve(self, fed: Federation) -> Iterator[int]:
        parts = self.part_list()
        for round in fed.rounds():
            parts.before_local(fed)
            if round == 1:
                for _ in range(self.warm_up):
                    self.improve_guides(fed)
            losses = fed.call("follow", per_client=self.messages(fed))
            fed.log_metrics("train_loss", dict(losses))
            parts.after_local(fed)
            self.improve_guides(fed)
            parts.after_exchange(fed)
            yield round

    def messages(self, fed: Federation) -> dict[str, dict[str, Value]]:
        """Each active client's guides; drawn from a normal distribution at first."""
        guides = fed.state.setdefault("guides", {})
        messages: dict[str, dict[str, Value]] = {}
        for client in fed.active:
            group, labels = label_group(fed, client), len(fed.infos[client].labels)
            if group not in guides:
                generator = stream(fed.seed, "guides", group)
                guides[group] = torch.randn(labels, labels, generator=generator)
            messages[client] = {"guides": guides[group]}
        return messages

    def improve_guides(self, fed: Federation) -> None:
        """Descend the mean over clients of the gradient of each class's guide."""
        sums: dict[str, Any] = {}
        for client, gradient in fed.call("study", per_client=self.messages(fed)).items():
            present = gradient.abs().sum(1, keepdim=True) > 0
            total, count = sums.get(label_group(fed, client), (0.0, 0))
            sums[label_group(fed, client)] = (total + gradient.cpu(), count + present.cpu())
        for group, (total, count) in sums.items():
            guides = fed.state["guides"][group]
            mean = total / count.clamp(min=1)
            fed.state["guides"][group] = guides - self.server_lr * mean.to(guides)

    class Program(ClientProgram):
        algorithm: "FedL2G"

        @operation
        def follow(self, guides: Guides) -> float:
            """The local epochs of a round, with guides (labels, labels)."""
            self.guides = self.client.to_device(guides)
            return self.learn()

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            return self.guided_loss(self.model(x), y, self.guides)

        def guided_loss(self, output: Tensor, y: Tensor, guides: Tensor) -> Tensor:
            """Eq. 2."""
            targets = self.client.task.label_matrix(y).to(output) @ guides
            return self.error(output, y) + ((output - targets) ** 2).mean()

        @query
        def study(self, guides: Guides) -> Guides:
            """Gradient of the quiz loss with respect to the guides."""
            rows = len(self.client.train)
            size = min(self.training.batch_size, max(1, rows // 2))
            order = torch.randperm(rows)  # from the operation's own stream: others at each call
            study, quiz = order[:size], order[-size:]
            self.work += 2 * size
            self.model.eval()
            return self.quiz_gradient(self.client.to_device(guides), study, quiz)

        def quiz_gradient(self, guides: Tensor, study: Tensor, quiz: Tensor) -> Tensor:
            """d f(w - lr grad of eq. 2 on study rows; quiz rows) / d guides."""
            guides = guides.clone().requires_grad_()
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            x, y = (self.client.to_device(part) for part in self.training_batch(study))
            loss = self.guided_loss(self.model(x), y, guides)
            gradients = torch.autograd.grad(
                loss, list(trained.values()), create_graph=True, allow_unused=True
            )
            adapted = {}
            for (name, p), gradient in zip(trained.items(), gradients, strict=True):
                adapted[name] = p if gradient is None else p - self.training.lr * gradient
            x, y = (self.client.to_device(part) for part in self.training_batch(quiz))
            quiz_loss = self.error(functional_call(self.model, adapted, (x,)), y)
            return torch.autograd.grad(quiz_loss, guides)[0].detach()
