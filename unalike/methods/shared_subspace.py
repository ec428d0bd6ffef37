"""A joint space for representations, found in one step from what all see in the public set. Knows no methods and no engine.

Everyone tells the principal components of what its encoder makes of the public rows; the server takes those of all of them together, and
everyone fits its projection to these by least squares. So representations, and heads upon them, mean the same from the first round on.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation, query, sends
from unalike.core.signatures import Shape
from unalike.methods.public_data import PublicDataProgram

RIDGE = 0.3  # of the mean variance of a feature: how much of it least squares take for noise
GENTLY = "gently"  # the optimizer that is slower with the representation


class SharedSubspaceProgram(PublicDataProgram):
    """Tells an outline of what it sees, fits its projection to that of all, and may train without leaving it far behind."""

    @query
    @sends("rows")
    def outline(self) -> Annotated[Tensor, Shape("public_rows", "width")]:
        """Principal components of the public rows' features, of mean square length 1."""
        found = principal(self.seen(), self.algorithm.width)
        return (found / length(found)).to(self.client.dtype)

    def blank_outline(self) -> Tensor:
        return self.blank(len(self.public), self.algorithm.width)

    @operation
    def fit(self, target: Tensor) -> float:
        """The projection that comes nearest to the target, its numbers of mean square 1; how much of the target's variance it has."""
        layer = self.model.projection
        if not isinstance(layer, nn.Linear):
            raise ValueError("it has no linear projection that could be fitted to a joint space")
        if target.shape != (rows := (len(self.public), layer.out_features)):
            raise ValueError(
                f"a joint space of its public rows is {rows}, what came is {tuple(target.shape)}"
            )
        seen, target = self.seen(), target.to(self.client.device, torch.float64)
        mean = seen.mean(0)
        seen, target = seen - mean, target - target.mean(0)
        gram = seen.T @ seen
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        weight = torch.linalg.solve(gram, seen.T @ target)
        told = seen @ weight
        weight *= target.shape[1] ** 0.5 / length(told)
        layer.load_state_dict({"weight": weight.T, "bias": -mean @ weight})
        return float(1 - (told - target).square().sum() / target.square().sum())

    @operation
    def train_gently(self, epoch: int | None = None) -> float:
        """Local epochs that move the representation more slowly than the head, or not at all."""
        loss = self.task_loss if self.algorithm.backbone_lr_scale else self.head_loss
        return self.learn(
            None if epoch is None else range(epoch, epoch + 1), self.optimizer(GENTLY), loss
        )

    @graph_safe
    def head_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        """The task's, of a representation that stays as it is, statistics of batches too."""
        self.model.encoder.eval()
        with torch.no_grad():
            features = self.model.features(x)
        self.model.encoder.train()
        return self.error(self.model.head(features), y)

    def optimizer(
        self, name: str = "task", rate: float | None = None, fresh: bool = False
    ) -> torch.optim.Optimizer:
        made = super().optimizer(name, rate, fresh)
        if name == GENTLY and len(made.param_groups) == 1:
            (all,), head = made.param_groups, {id(p) for p in self.model.head.parameters()}
            made.param_groups[:] = [
                {
                    **all,
                    "params": [p for p in all["params"] if (id(p) in head) is its],
                    "lr": all["lr"] * share,
                }
                for its, share in ((True, 1.0), (False, self.algorithm.backbone_lr_scale))
            ]
        return made

    def seen(self) -> Tensor:
        """What the projection takes of every public row, one vector each, (|D|, features) in float64."""
        return self.look(
            lambda z: ((z.mean((-2, -1)) if self.model.dense else z).double(),), self.model.encode
        )[0]


def meet(fed: Federation, width: int) -> dict[str, float]:
    """Whoever is here for the first time fits its projection to the joint space, which the first ones found; how well each does."""
    met = fed.state.setdefault("met", [])
    new = [c for c in fed.active if c not in met]
    if new and "joint" not in fed.state:
        outlines = [
            told.to("cpu", torch.float64)
            for told in dict(
                fed.call("outline", per_client={c: {} for c in new}, quorum=0)
            ).values()
        ]
        if not outlines:
            return {}
        joint = principal(torch.cat(outlines, 1), width)
        fed.state["joint"] = (joint / length(joint)).to(torch.float32)
    told = (
        dict(fed.call("fit", per_client={c: {"target": fed.state["joint"]} for c in new}, quorum=0))
        if new
        else {}
    )
    met.extend(told)
    return told


def principal(rows: Tensor, width: int) -> Tensor:
    """Scores (n, width) of rows (n, features) on their first principal directions, the largest of each above 0; 0 where there are no more.

    >>> principal(torch.tensor([[3.0, 4.0], [-3.0, -4.0]]), 3)
    tensor([[ 5.,  0.,  0.],
            [-5.,  0.,  0.]])
    """
    rows = rows - rows.mean(0)
    if rows.shape[0] < rows.shape[1]:
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        scores = vectors * values.clamp(min=0).sqrt()
    else:
        scores = rows @ torch.linalg.eigh(rows.T @ rows)[1]
    scores = scores.flip(1)[:, :width]  # eigh has the smallest first
    scores = scores * scores.gather(0, scores.abs().argmax(0, keepdim=True)).sign()
    return nn.functional.pad(scores, (0, width - scores.shape[1]))


def length(rows: Tensor) -> Tensor:
    """Root of the mean square length of rows."""
    return rows.square().sum(1).mean().sqrt().clamp(min=torch.finfo(rows.dtype).tiny)
