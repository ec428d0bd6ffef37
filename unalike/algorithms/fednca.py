"""FedNCA (neural collapse for several labels): one feature a class, drawn to prototypes that everyone shares, averaged like FedAvg.

Prototypes are a simplex, as far apart as can be and the same for all clients, so that clients with unlike labels do not pull classes to
unlike places. Each class asks the encoder's feature map for its own feature (attention, the prototypes as queries), since an image with
several labels has no one place to be drawn to.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unalike.core.federation import Federation, Replies
from unalike.core.operations import graph_safe, operation, sends
from unalike.losses.collapse import collapse, prototype_contrast, rejection, simplex_etf
from unalike.methods.averaging import Averaging, AveragingProgram, Parameters, Update
from unalike.models.model import Model
from unalike.tasks import MultiLabel, Task

LOOKED_AT = 256  # rows of a client whose features are measured after a round
NOTED = {
    "spread": "variance within / between",
    "alignment": "cosine to prototypes",
}  # the curves of neural collapse in the report


class Collapsing(Update):
    collapse: dict[str, float]


@dataclass
class FedNCA(Averaging):
    """Its ablation: ETF alone is disentangle=false, rejection=0, prototype=0; each can be switched by itself."""

    rejection: float = 0.01  # weight of the loss on features of absent classes
    margin: float = 0.3  # probability below which an absent class is let be
    prototype: float = 1.0  # weight of the contrast with the prototypes
    temperature: float = 0.07  # of that contrast
    disentangle: bool = True  # no: the mean feature stands for every class
    heads: int = 4  # of the attention
    scale: float = 10.0  # of the logits, where learning begins
    etf: Literal["frozen", "trainable"] = "frozen"
    mean: Literal["uniform", "samples"] = "uniform"  # how clients count in the average

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.multilabel

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        positive = {"temperature": self.temperature, "scale": self.scale, "heads": self.heads}
        problems = [
            (name, f"must be above 0, got {value:g}.")
            for name, value in positive.items()
            if not value > 0
        ]
        if not 0 <= self.margin < 1:
            problems.append(
                ("margin", f"is a probability, from 0 to below 1, got {self.margin:g}.")
            )
        return problems + [
            (name, f"must be at least 0, got {getattr(self, name):g}.")
            for name in ("rejection", "prototype")
            if not getattr(self, name) >= 0
        ]

    def weights(self, replies: Replies) -> dict[str, float]:
        return super().weights(replies) if self.mean == "samples" else dict.fromkeys(replies, 1.0)

    def note(self, fed: Federation, replies: Replies) -> None:
        super().note(fed, replies)
        for name, said in NOTED.items():
            if told := {
                client: reply["collapse"][name]
                for client, reply in replies.items()
                if name in (reply["collapse"] or {})
            }:
                fed.log_metrics(said, told)

    class Program(AveragingProgram):
        algorithm: "FedNCA"

        def build(self, encoder: nn.Module) -> Model:
            how, classes = self.algorithm, len(self.client.task.labels)
            sees = callable(getattr(encoder, "grid", None))
            if how.disentangle and not sees:
                raise ValueError(
                    f"FedNCA asks the feature map for each class: it needs an encoder with grid(x), {type(encoder).__name__} "
                    "has none; disentangle=false does without"
                )
            head = ClassHead(
                classes,
                self.encoder_width(encoder),
                how.heads if how.disentangle else 0,
                how.scale,
                how.etf == "trainable",
            )
            return Model(encoder, nn.Identity(), head, dense=sees)

        @graph_safe
        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Sums over a sample's classes, means over the batch."""
            how, task, head = self.algorithm, self.client.task, self.model.head
            assert isinstance(task, MultiLabel) and isinstance(
                head, ClassHead
            )  # as `tasks` and build() say
            f = head.features(self.model.features(x))
            logits = head.logits(f)
            loss = task.costs(logits.diagonal(dim1=-2, dim2=-1), y).sum(-1).mean()
            if how.rejection:
                loss = loss + how.rejection * rejection(logits, y, how.margin)
            if how.prototype:
                loss = loss + how.prototype * prototype_contrast(
                    f, head.prototypes, y, how.temperature
                )
            return loss

        @operation
        @sends(parameters="parameters", samples="open")
        def update(self, parameters: Parameters) -> Collapsing:
            return super().update(parameters) | {"collapse": self.collapsed()}

        def collapsed(self) -> dict[str, float]:
            """How near to neural collapse the features of some of its rows are."""
            head, data = self.model.head, self.client.train
            assert isinstance(head, ClassHead)
            x, y = data.labelled_batch(torch.arange(min(len(data), LOOKED_AT)))
            self.model.eval()
            with torch.no_grad():
                f = head.features(self.model.features(self.client.to_device(x)))
            self.model.train()
            return collapse(f, head.prototypes, self.client.to_device(y))


class ClassHead(nn.Module):
    """One feature a class from a feature map, compared with prototypes: (B, width, h, w) or (B, width) to logits (B, classes)."""

    def __init__(self, classes: int, width: int, heads: int, scale: float, trainable: bool):
        super().__init__()
        self.heads, etf = heads, simplex_etf(classes, width).float()
        if heads and width % heads:
            fit = max(count for count in range(1, heads) if width % count == 0)
            raise ValueError(
                f"the attention shares {width} channels among its heads: {heads} do not divide them, heads={fit} would"
            )
        if trainable:
            self.prototypes = nn.Parameter(etf)
        else:
            self.register_buffer(
                "prototypes", etf, persistent=False
            )  # everyone can make it: it neither travels nor changes
        if heads:
            self.queries, self.keys_values, self.out = (
                nn.Linear(width, width),
                nn.Linear(width, 2 * width),
                nn.Linear(width, width),
            )
        self.scale, self.bias = (
            nn.Parameter(torch.tensor(float(scale))),
            nn.Parameter(torch.zeros(classes)),
        )

    prototypes: Tensor

    def features(self, seen: Tensor) -> Tensor:
        """(B, classes, width)."""
        tokens = seen.flatten(2).mT if seen.ndim == 4 else seen[:, None]  # (B, tokens, width)
        if not self.heads:
            return tokens.mean(1, keepdim=True).expand(-1, len(self.prototypes), -1)
        split = lambda rows: rows.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        keys, values = self.keys_values(tokens).chunk(2, -1)
        queries = split(self.queries(self.prototypes)).expand(len(tokens), -1, -1, -1)
        found = scaled_dot_product_attention(
            queries, split(keys), split(values)
        )  # (B, heads, classes, width / heads)
        return self.out(found.transpose(1, 2).flatten(2))

    def logits(self, f: Tensor) -> Tensor:
        """(B, classes, classes): how much the feature for class k looks like class j."""
        return self.scale * (f @ self.prototypes.mT) + self.bias

    def forward(self, seen: Tensor) -> Tensor:
        return self.scale * (self.features(seen) * self.prototypes).sum(-1) + self.bias
