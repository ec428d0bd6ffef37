"""FedNCA: multi-label federated learning with a shared neural-collapse geometry.

Peng et al., "Neural Collapse-Inspired Multi-Label Federated Learning under Label-Distribution
Skew", 2025, https://arxiv.org/abs/2509.12544 (FedNCA-ML).

All clients share fixed class prototypes, a simplex of unit vectors as far apart as possible (ETF),
so that clients with different labels do not pull a class to different places. An image with
several labels has no single feature to align, so attention with the prototypes as queries extracts
one feature per class from the encoder's feature map. Clients minimise the task loss and two
regularisers on these features, and the server averages as FedAvg does.

Written from the abstract and the losses of the paper; docs/fednca.md says what we filled in.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unalike.base.types import Parameters
from unalike.core.federation import Federation, Replies
from unalike.core.operations import graph_safe, operation, sends
from unalike.losses.collapse import collapse, prototype_contrast, rejection, simplex_etf
from unalike.methods.averaging import Averaging, AveragingProgram, Update
from unalike.models.model import Model
from unalike.tasks import MultiLabel, Task

MEASURED_ROWS = 256  # training rows of a client whose features are measured after a round
# Measures of neural collapse, and what the report calls their curves.
CURVES = {"spread": "variance within / between", "alignment": "cosine to prototypes"}


class CollapseUpdate(Update):
    """An update, with measures of neural collapse."""

    collapse: dict[str, float]


@dataclass
class FedNCA(Averaging):
    """FedAvg with class-wise features, fixed prototypes and two regularisers.

    Ablation: the ETF classifier alone is disentangle=false, rejection=0, prototype=0.

    Args:
        rejection: weight of the loss on features of absent classes.
        margin: probability up to which that loss is 0.
        prototype: weight of the contrast with the prototypes.
        temperature: of that contrast.
        disentangle: a feature for each class; False: one mean feature for all classes.
        heads: of the attention.
        scale: initial scale of the logits.
        etf: whether the classifier's prototypes are frozen or trainable.
        attention_init: how the attention begins: as torch's "linear" layers, or as its authors do,
            by "xavier" with zero biases.
        mean: weight of a client: the same for all ("uniform"), or its number of "samples".
    """

    rejection: NonNegativeFloat = 0.01
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.3
    prototype: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.07
    disentangle: bool = True
    heads: PositiveInt = 4
    scale: PositiveFloat = 10.0
    etf: Literal["frozen", "trainable"] = "frozen"
    attention_init: Literal["linear", "xavier"] = "linear"
    mean: Literal["samples", "uniform"] = "uniform"

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.multilabel

    def record_round(self, fed: Federation, replies: Replies) -> None:
        super().record_round(fed, replies)
        for name, title in CURVES.items():
            values = {
                client: reply["collapse"][name]
                for client, reply in replies.items()
                if name in (reply["collapse"] or {})
            }
            if values:
                fed.log_metrics(title, values)

    class Program(AveragingProgram):
        algorithm: "FedNCA"

        def build(self, encoder: nn.Module) -> Model:
            method = self.algorithm
            has_grid = callable(getattr(encoder, "grid", None))
            if method.disentangle and not has_grid:
                raise ValueError(
                    "FedNCA extracts class features from a feature map: it needs an encoder with "
                    f"grid(x), {type(encoder).__name__} has none; disentangle=false does without"
                )
            head = ClassHead(
                classes=len(self.client.task.labels),
                width=self.encoder_width(encoder),
                heads=method.heads if method.disentangle else 0,
                scale=method.scale,
                trainable=method.etf == "trainable",
            )
            if method.attention_init == "xavier" and head.heads:
                head.init_xavier()
            return Model(encoder, nn.Identity(), head, dense=has_grid)

        @graph_safe
        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Task loss and both regularisers: sums over classes, means over the batch."""
            method, task, head = self.algorithm, self.client.task, self.model.head
            # `serves` and build() ensure both.
            assert isinstance(task, MultiLabel) and isinstance(head, ClassHead)
            f = head.features(self.model.features(x))
            logits = head.logits(f)
            loss = task.costs(logits.diagonal(dim1=-2, dim2=-1), y).sum(-1).mean()
            if method.rejection:
                loss = loss + method.rejection * rejection(logits, y, method.margin)
            if method.prototype:
                contrast = prototype_contrast(f, head.prototypes, y, method.temperature)
                loss = loss + method.prototype * contrast
            return loss

        @operation
        @sends(parameters="parameters", samples="open")
        def update(self, parameters: Parameters) -> CollapseUpdate:
            return {**super().update(parameters), "collapse": self.measure_collapse()}

        def measure_collapse(self) -> dict[str, float]:
            """How near the features of the first training rows are to neural collapse."""
            head, data = self.model.head, self.client.train
            assert isinstance(head, ClassHead)
            x, y = data.labelled_batch(torch.arange(min(len(data), MEASURED_ROWS)))
            self.model.eval()
            with torch.no_grad():
                f = head.features(self.model.features(self.client.to_device(x)))
            self.model.train()
            return collapse(f, head.prototypes, self.client.to_device(y))


class ClassHead(nn.Module):
    """One feature per class, compared with the prototypes.

    Takes a feature map (B, width, h, w) or features (B, width), gives logits (B, classes).

    Args:
        heads: attention heads; 0 uses the mean feature for every class.
        scale: initial scale of the logits.
        trainable: whether the prototypes are learnt.
    """

    prototypes: Tensor  # w, (classes, width)

    def __init__(self, classes: int, width: int, heads: int, scale: float, trainable: bool):
        super().__init__()
        self.heads = heads
        etf = simplex_etf(classes, width).float()
        if heads and width % heads:
            divisor = max(count for count in range(1, heads) if width % count == 0)
            raise ValueError(
                f"the attention splits {width} channels among its heads: {heads} do not divide "
                f"them, heads={divisor} would"
            )
        if trainable:
            self.prototypes = nn.Parameter(etf)
        else:
            # Not persistent: every client can compute it, so it is neither saved nor sent.
            self.register_buffer("prototypes", etf, persistent=False)
        if heads:
            self.queries = nn.Linear(width, width)
            self.keys_values = nn.Linear(width, 2 * width)
            self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.bias = nn.Parameter(torch.zeros(classes))

    def init_xavier(self) -> None:
        """Initialise the attention as torch's own is: xavier over the stacked projection of
        queries, keys and values, zero biases."""
        width = self.queries.in_features
        bound = (6 / (width + 3 * width)) ** 0.5
        for layer in (self.queries, self.keys_values):
            nn.init.uniform_(layer.weight, -bound, bound)
        for layer in (self.queries, self.keys_values, self.out):
            nn.init.zeros_(layer.bias)

    def features(self, grid: Tensor) -> Tensor:
        """f: one feature per class, (B, classes, width)."""
        tokens = grid.flatten(2).mT if grid.ndim == 4 else grid[:, None]  # (B, tokens, width)
        if not self.heads:
            return tokens.mean(1, keepdim=True).expand(-1, len(self.prototypes), -1)
        keys, values = self.keys_values(tokens).chunk(2, -1)
        queries = self.split_heads(self.queries(self.prototypes)).expand(len(tokens), -1, -1, -1)
        # (B, heads, classes, width / heads)
        attended = scaled_dot_product_attention(
            queries, self.split_heads(keys), self.split_heads(values)
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def split_heads(self, rows: Tensor) -> Tensor:
        """(..., n, width) to (..., heads, n, width / heads)."""
        return rows.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def logits(self, f: Tensor) -> Tensor:
        """(B, classes, classes): entry (b, k, j) compares the feature for class k with class j."""
        return self.scale * (f @ self.prototypes.mT) + self.bias

    def forward(self, grid: Tensor) -> Tensor:
        return self.scale * (self.features(grid) * self.prototypes).sum(-1) + self.bias
