"""FD: federated distillation of the mean logits of each class.

Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", 2018, https://arxiv.org/abs/1811.11479.

Clients send the mean logits of their samples of each class. A client is sent the mean of those of
all others (Algorithm 1), and minimises its loss + lambda times the cross entropy to the softmax of
its sample's class's mean. Among clients with the same labels. The paper does not tell lambda. Left
out: federated augmentation.
"""

from dataclasses import dataclass
from typing import Annotated, TypedDict

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from unalike.base.message import Value
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.methods.averaging import LabelMask
from unalike.methods.prototypes import LabelExchange, class_means, label_group

Logits = Annotated[Tensor, Shape("labels", "labels")]


class LogitUpdate(TypedDict):
    """A client's reply: mean logits and number of samples of each label."""

    prototypes: Logits
    counts: LabelMask
    loss: float


@dataclass
class FD(LabelExchange):
    """Mean logits of others as targets.

    Args:
        lam: weight of the cross entropy to the others' mean logits; the paper does not tell it.
    """

    lam: NonNegativeFloat = 1.0

    def build_message(self, fed: Federation, client: str) -> dict[str, Value]:
        """For each label the mean over other clients that have samples of it."""
        sent = fed.state.get("logits", {})
        group = label_group(fed, client)
        others = [sent[c] for c in sent if c != client and label_group(fed, c) == group]
        if not others:
            return {"prototypes": None, "known": None}
        example = others[0]["prototypes"]
        logits = torch.stack([other["prototypes"].to(example) for other in others])
        present = torch.stack([other["counts"].to(example) > 0 for other in others])
        total = (logits * present[..., None]).sum(0)
        owners = present.sum(0)
        mean = total / owners.clamp(min=1)[:, None]
        return {"prototypes": mean, "known": (owners > 0).to(example)}

    def aggregate(self, fed: Federation, replies: Replies) -> None:
        """Keep what each client sent last."""
        fed.state.setdefault("logits", {}).update(
            {c: {k: reply[k] for k in ("prototypes", "counts")} for c, reply in replies.items()}
        )

    class Program(ClientProgram):
        algorithm: "FD"

        @operation
        def update(self, prototypes: Logits | None, known: LabelMask | None) -> LogitUpdate:
            """The local epochs of a round, with mean logits as targets.

            Args:
                prototypes: mean logits of each label, of others; None before there are any.
                known: 1 for labels that have them.
            """
            labels = len(self.client.task.labels)
            zeros = torch.zeros(labels, labels)
            self.targets = self.client.to_device(zeros if prototypes is None else prototypes)
            self.known = self.client.to_device(zeros[0] if known is None else known)
            loss = self.learn()
            means, counts = class_means(self, self.model)
            return {"prototypes": means, "counts": counts, "loss": loss}

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            task = self.client.task
            output = self.model(x)
            pairs = task.label_matrix(y).to(output) * self.known  # (n, labels)
            probabilities = task.probabilities(self.targets)
            if task.single_label:
                costs = -output.log_softmax(1) @ probabilities.mT
            else:
                present, absent = logsigmoid(output), logsigmoid(-output)
                costs = -(present @ probabilities.mT + absent @ (1 - probabilities).mT)
                costs = costs / len(task.labels)
            distilled = (pairs * costs).sum() / task.label_matrix(y).sum().clamp(min=1)
            return self.error(output, y) + self.algorithm.lam * distilled
