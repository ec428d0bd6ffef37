"""Shared initialisation of projections: all representations start in one subspace.

Each client sends the principal components of its encoder's features of the public rows. The server
takes the principal components of all of these together, and every client fits its projection to
them by ridge regression. So representations, and heads on them, mean the same to all clients from
the first round on.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from unalike.core.federation import Federation
from unalike.core.operations import operation, query, sends
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.methods.parts import Part
from unalike.methods.public_data import blank_rows, predict_public, public_samples
from unalike.models.model import mean_over_positions

RIDGE = 0.3  # weight of the penalty, in units of a feature's mean variance


class SharedSubspaceProgram(ClientProgram):
    """Sends principal components of the public rows, and fits its projection to those of all.

    The method has `width`, to which the model's projection leads.
    """

    algorithm: Any

    def public_features(self) -> Tensor:
        """What the projection gets for each public row, (public rows, features), float64. The map
        of a dense task is averaged."""

        def pool(features: Tensor) -> tuple[Tensor]:
            return ((mean_over_positions(features) if self.model.dense else features).double(),)

        return predict_public(self, pool, self.model.encode)[0]

    @query
    @sends("rows")
    def outline(self) -> Annotated[Tensor, Shape("public_rows", "width")]:
        """Principal components of the public rows' features, of root mean square length 1."""
        components = principal_components(self.public_features(), self.algorithm.width)
        return (components / rms_length(components)).to(self.client.dtype)

    def blank_outline(self) -> Tensor:
        return blank_rows(self, len(public_samples(self)), self.algorithm.width)

    @operation
    def fit(self, target: Tensor) -> float:
        """Fit the projection to the shared subspace by ridge regression; its outputs have mean
        square 1.

        Args:
            target: (public rows, width).
        Returns: the share of the target's variance that the projection explains.
        """
        layer = self.model.projection
        if not isinstance(layer, nn.Linear):
            raise ValueError("expected a linear projection to fit to the shared subspace, got none")
        shape = (len(public_samples(self)), layer.out_features)
        if target.shape != shape:
            raise ValueError(f"expected a shared subspace of {shape}, got {tuple(target.shape)}")
        features = self.public_features()
        target = target.to(self.client.device, torch.float64)
        mean = features.mean(0)
        features = features - mean
        target = target - target.mean(0)
        gram = features.T @ features
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        weight = torch.linalg.solve(gram, features.T @ target)
        fitted = features @ weight
        weight *= target.shape[1] ** 0.5 / rms_length(fitted)
        layer.load_state_dict({"weight": weight.T, "bias": -mean @ weight})
        return float(1 - (fitted - target).square().sum() / target.square().sum())


def fit_shared_subspace(fed: Federation) -> dict[str, float]:
    """Fit the projections of clients that take part for the first time. The clients of the first
    round determine the subspace; later ones fit to it.

    Returns: the explained variance of each client that was fitted.
    """
    fitted = fed.state.setdefault("met", [])
    new = [c for c in fed.active if c not in fitted]
    if not new:
        return {}
    if "joint" not in fed.state:
        outlines = fed.call("outline", per_client={c: {} for c in new}, quorum=0)
        if not outlines:
            return {}
        all_components = [outline.to("cpu", torch.float64) for outline in outlines.values()]
        width = all_components[0].shape[1]  # an outline is as wide as a projection
        subspace = principal_components(torch.cat(all_components, 1), width)
        fed.state["joint"] = (subspace / rms_length(subspace)).to(torch.float32)
    targets = {c: {"target": fed.state["joint"]} for c in new}
    explained = dict(fed.call("fit", per_client=targets, quorum=0))
    fitted.extend(explained)
    return explained


class SharedProjectionInit(Part):
    """Fits the projections of new clients to the shared subspace before their first local epoch."""

    def before_local(self, fed: Federation) -> None:
        fed.log_metrics("joint_fit", fit_shared_subspace(fed))


def principal_components(rows: Tensor, width: int) -> Tensor:
    """Scores of rows (n, features) on their first principal directions, (n, width).

    The entry of the largest magnitude in each column is positive. Columns are 0 where there are
    fewer directions than `width`.

    >>> principal_components(torch.tensor([[3.0, 4.0], [-3.0, -4.0]]), 3)
    tensor([[ 5.,  0.,  0.],
            [-5.,  0.,  0.]])
    """
    rows = rows - rows.mean(0)
    if rows.shape[0] < rows.shape[1]:
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        scores = vectors * values.clamp(min=0).sqrt()
    else:
        scores = rows @ torch.linalg.eigh(rows.T @ rows)[1]
    scores = scores.flip(1)[:, :width]  # eigh sorts by ascending eigenvalue
    scores = scores * scores.gather(0, scores.abs().argmax(0, keepdim=True)).sign()
    return nn.functional.pad(scores, (0, width - scores.shape[1]))


def rms_length(rows: Tensor) -> Tensor:
    """Root of the mean squared length of rows (n, features): a scalar above 0."""
    return rows.square().sum(1).mean().sqrt().clamp(min=torch.finfo(rows.dtype).tiny)
