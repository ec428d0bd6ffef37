"""Representations of public batches that a client sends in one call and aligns in a later one."""

from functools import cached_property
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn

from unalike.base.randomness import scope
from unalike.core.operations import operation, sends
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.methods.public_data import (
    blank_rows,
    predict_public,
    public_batch,
    public_batches,
)
from unalike.methods.quantization import dequantize, quantize
from unalike.models.model import Model
from unalike.training.batch_norm import is_stochastic
from unalike.training.cuda_graphs import GraphedForward
from unalike.training.loop import apply_gradients, step

USE_CUDA_GRAPHS = True

# Representations of public rows, (B, d), as they are or rounded.
Views = (
    Annotated[Tensor, Shape("rows", "columns")]
    | Annotated[Tensor, Shape("rows", "columns", whole=True)]
)


class Aligned(TypedDict):
    """The loss on a batch before the step, and representations of the next batch after it."""

    loss: float
    views: Views


class PublicAlignmentProgram(ClientProgram):
    """Sends representations, keeps the autograd graph of the last ones, and aligns them.

    The method is an `Alignment`.
    """

    algorithm: Any
    # Of the batch computed last: (round, epoch, batch), and representations (B, d). Only a cache.
    graph: tuple[tuple[int, int, int], Tensor] | None = None

    def build(self, encoder: nn.Module) -> Model:
        """The encoder, a projection to d if needed, and the task's head."""
        width = self.algorithm.width
        before = self.encoder_width(encoder)
        linear = self.always_projects() or before != width
        projection = nn.Linear(before, width) if linear else nn.Identity()
        dense = self.client.task.dense
        return Model(encoder, projection, self.head(width), dense, unit=self.unit_head())

    def unit_head(self) -> bool:
        """Whether the head gets unit vectors, as the loss does."""
        return False

    def always_projects(self) -> bool:
        """Whether an encoder gets a projection even where it has the width d already."""
        return False

    def alignment_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the alignment: that of the local epochs."""
        return self.optimizer()

    @operation
    @sends("rows")
    def represent(self, epoch: int, batch: int) -> Views:
        """Representations (B, d) of a public batch."""
        self.work += len(public_batches(self, epoch)[batch]) / 3
        self.graph = None  # an older graph must be gone before a GPU can capture the next pass
        z = self.compute_representation(epoch, batch)
        self.graph = ((self.round, epoch, batch), z)
        return quantize(z.detach(), self.algorithm.message_dtype)

    def represent_next(self, epoch: int, batch: int) -> Tensor:
        """Representations of the batch after this one; no rows after the last."""
        if batch + 1 < len(public_batches(self, epoch)):
            return self.represent(epoch, batch + 1)
        none = torch.zeros(0, self.algorithm.width, dtype=self.client.dtype)
        return quantize(none, self.algorithm.message_dtype)

    @operation
    @sends("rows")
    def represent_all(self, epoch: int) -> Views:
        """Representations of all public rows of a pass, in rising order."""
        rows = self.pass_order(epoch)
        z = predict_public(self, lambda z: (z,), self.model.represent, rows)[0]
        return quantize(z, self.algorithm.message_dtype)

    @operation
    def align_all(self, epoch: int, peers: list[Tensor], temperatures: dict) -> float:
        """A pass of alignment towards peers' representations of its rows, in rising order, which
        stay as they were when it began. Returns the mean loss."""
        losses = []
        order = self.pass_order(epoch)
        for batch, rows in enumerate(public_batches(self, epoch)):
            self.work += len(rows) / 3
            z = self.compute_representation(epoch, batch)
            places = torch.searchsorted(order, rows)
            losses.append(self.step_towards(z, [peer[places] for peer in peers], temperatures))
            del z  # while its graph lives, a GPU cannot capture the next backward pass
        return sum(losses) / len(losses)

    @operation
    @sends("rows")
    def align(self, epoch: int, batch: int, gradient: Tensor) -> Views:
        """Line 11 from dL/dZ, (B, d): backward and one step. Returns Z of the next batch."""
        optimizer = self.alignment_optimizer()
        optimizer.zero_grad(set_to_none=True)
        z = self.recall(epoch, batch)
        self.work += len(z)
        self.graphed_forward.backward(z, self.unpack(gradient, z))
        apply_gradients(optimizer, self.training.max_grad_norm)
        del z  # while its graph lives, a GPU cannot capture the next backward pass
        return self.represent_next(epoch, batch)

    @operation
    @sends(views="rows")
    def align_to_peers(
        self, epoch: int, batch: int, peers: list[Tensor], temperatures: dict
    ) -> Aligned:
        """Line 11 from the peers' representations, (B, d) each."""
        loss = self.step_towards(self.recall(epoch, batch), peers, temperatures)
        return {"loss": loss, "views": self.represent_next(epoch, batch)}

    @operation
    @sends(views="rows")
    def align_to_aggregate(self, epoch: int, batch: int, s: Tensor, log_alpha: Tensor) -> Aligned:
        """Line 11 as printed: from S (B^M, d) and log alpha (B^M,), eq. 5."""
        z = self.recall(epoch, batch)
        loss = self.step(self.algorithm.contrast.aggregate_value(z, s, log_alpha), len(z))
        del z
        return {"loss": loss, "views": self.represent_next(epoch, batch)}

    def blank_align(self, epoch: int, batch: int, **arguments: Any) -> Tensor:
        return self.blank_represent(epoch, batch + 1)

    def blank_align_to_peers(self, epoch: int, batch: int, **arguments: Any) -> dict[str, Any]:
        return {"loss": None, "views": self.blank_represent(epoch, batch + 1)}

    blank_align_to_aggregate = blank_align_to_peers

    def step_towards(self, z: Tensor, peers: list[Tensor], temperatures: dict) -> float:
        """One step on the loss of z (B, d) against peers, (B, d) each. Returns the loss."""
        contrast = self.algorithm.contrast
        draws = contrast.draw_samples(len(peers), len(z))
        peers = [self.unpack(peer, z) for peer in peers]
        return self.step(contrast.value(z, peers, temperatures, draws), len(z))

    def unpack(self, sent: Tensor, z: Tensor) -> Tensor:
        """What the server sent for z, with its device and dtype."""
        dtype = self.algorithm.message_dtype
        return dequantize(sent, dtype, self.algorithm.width, z.dtype).to(z.device)

    def pass_order(self, epoch: int) -> Tensor:
        """Numbers of the public rows of a pass, in rising order."""
        return torch.cat(public_batches(self, epoch)).sort().values

    def step(self, loss: Tensor, rows: int) -> float:
        """One step of the alignment's optimizer. Returns the loss."""
        self.work += rows
        optimizer = self.alignment_optimizer()
        step(loss, optimizer, self.training.max_grad_norm)
        return float(loss.detach())

    def blank_represent(self, epoch: int, batch: int) -> Tensor:
        batches = public_batches(self, epoch)
        rows = len(batches[batch]) if batch < len(batches) else 0
        return blank_rows(self, rows, self.algorithm.width)

    def blank_represent_all(self, epoch: int) -> Tensor:
        return blank_rows(self, len(self.pass_order(epoch)), self.algorithm.width)

    def compute_representation(self, epoch: int, batch: int) -> Tensor:
        """Representations (B, d) of a public batch, with gradients."""
        rows = public_batches(self, epoch)[batch]
        if not self.model.training:  # train() visits all modules, which costs as much as a step
            self.model.train()
        with scope(self.seed, "represent", self.client.id, self.round, epoch, batch):
            return self.graphed_forward(public_batch(self, rows))

    def recall(self, epoch: int, batch: int) -> Tensor:
        """Representations (B, d) of a batch with their graph: the kept ones or, in another process,
        computed again with the same randomness, without a second update of running statistics."""
        cached = self.graph
        self.graph = None
        if cached is not None and cached[0] == (self.round, epoch, batch):
            return cached[1]
        buffers = []
        for module in self.model.modules():
            buffers += [(module, *named) for named in module.named_buffers(recurse=False)]
        for module, name, buffer in buffers:
            # The graph holds the copies, so that restoring in place would invalidate it.
            setattr(module, name, buffer.clone())
        z = self.compute_representation(epoch, batch)
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        return z

    @cached_property
    def graphed_forward(self) -> GraphedForward:
        """The forward pass up to the representation; captured on a GPU unless it is random."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        enabled = USE_CUDA_GRAPHS and not is_stochastic(self.model.train())
        return GraphedForward(self.model.represent, trainable, enabled)
