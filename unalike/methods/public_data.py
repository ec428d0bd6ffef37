"""Training on a public, unlabelled dataset: how a client reads it, and a round that methods share.

Every client holds the same rows, perhaps as different samples (an image here, its caption there).
Functions take the client's program first; its algorithm has the fields `batch` and `passes`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.randomness import stream
from unalike.core.algorithm import Sharing
from unalike.core.federation import Federation
from unalike.core.program import ClientProgram
from unalike.data.device_cache import DeviceCache
from unalike.data.public_order import PublicOrder
from unalike.data.samples import Samples
from unalike.methods.agreement import PeerRule
from unalike.methods.group_averaging import averaged_groups
from unalike.methods.parts import TakesParts, train_locally
from unalike.methods.sharing import clients_by_label
from unalike.training.batching import batches
from unalike.training.loop import Positive, train

PREDICTION_BATCH = 256  # rows per forward pass without gradients

LearningRate = Annotated[float, Field(gt=0)]


def public_samples(program: ClientProgram) -> Samples:
    """The client's copy of the public set.

    Raises: ValueError where it has none.
    """
    if program.client.public is None:
        raise ValueError("the client has no public set, which this method needs; give it `public`")
    return program.client.public


def public_batch(program: ClientProgram, rows: Tensor, raw: bool = False) -> Any:
    """Inputs of some public rows on the client's device.

    Args:
        program: the client's half of the method.
        rows: row numbers, (n,).
        raw: the samples themselves, not what a frozen trunk makes of them; for methods that
            augment samples.
    """
    samples = public_samples(program)
    if raw:
        samples = getattr(samples, "raw", samples)
    x = samples.rows(rows)[0]
    if isinstance(samples, DeviceCache) and samples.transform is not None:
        return program.client.to_device(x)  # features of a trunk, which resized its inputs itself
    return program.client.public_to_device(x)


def public_batches(program: ClientProgram, epoch: int) -> list[Tensor]:
    """Row numbers of each batch of a pass in this round: the same for all clients."""
    settings: Any = program.algorithm
    rows = len(public_samples(program))
    most = getattr(settings, "pass_rows", None)
    return _batches(rows, settings.batch, program.seed, program.round, epoch, most)


@lru_cache(maxsize=8)
def _batches(
    rows: int, batch: int, seed: int, round: int, epoch: int, most: int | None
) -> list[Tensor]:
    return PublicOrder(rows, batch, seed).batches(round, epoch, most)


def predict_public(
    program: ClientProgram,
    transform: Callable[[Tensor], tuple[Tensor, ...]],
    forward: Callable[[Any], Tensor] | None = None,
    rows: Tensor | None = None,
) -> list[Tensor]:
    """Results of `transform` on the model's outputs for public rows, without gradients.

    Args:
        program: the client's half of the method.
        transform: output of a batch to tensors whose first axis is the row.
        forward: what to call on inputs instead of the whole model.
        rows: row numbers, (n,); None: all.
    """
    forward = forward or program.model
    rows = torch.arange(len(public_samples(program))) if rows is None else rows
    in_batches = rows.split(PREDICTION_BATCH)
    public_samples(program).read_ahead(in_batches)
    program.model.eval()
    with torch.no_grad():
        parts = [transform(forward(public_batch(program, index))) for index in in_batches]
    program.work += len(rows) / 3
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def train_on_public(
    program: ClientProgram,
    loss: Callable[..., Tensor],
    inputs: Callable[[Tensor], tuple],
    rows: Tensor | None = None,
) -> float | None:
    """This round's `passes` over the public set, with the method's `public_optimizer`.

    Args:
        program: the client's half of the method.
        loss: called with what `inputs` returns.
        inputs: arguments of the loss for some row numbers, (n,).
        rows: train on these rows only.
    Returns: the mean loss; None where there are fewer than two rows.
    """
    settings: Any = program.algorithm
    rows = torch.arange(len(public_samples(program))) if rows is None else rows.cpu()
    if len(rows) < 2:
        return None
    orders = [
        stream(program.seed, "public", program.round, epoch) for epoch in range(settings.passes)
    ]
    program.work += len(rows) * len(orders)
    names = [(program.round, epoch) for epoch in range(settings.passes)]
    public_samples(program).read_ahead(
        rows[index]
        for name in names
        for index in batches(len(rows), settings.batch, stream(program.seed, "public", *name))
    )
    step = program.gradient_step(loss)
    return train(
        program.model,
        len(rows),
        lambda index: step(*inputs(rows[index])),
        settings.public_optimizer(program, "public"),
        orders,
        settings.batch,
        program.training.max_grad_norm,
    )


def with_targets(program: ClientProgram, y: Tensor) -> Callable[[Tensor], tuple[Any, Tensor]]:
    """`inputs` for `train_on_public`: samples and their targets, given for all rows in `y`."""
    return lambda rows: (public_batch(program, rows), y[rows.to(y.device)])


def blank_rows(program: ClientProgram, rows: int, *shape: int) -> Tensor:
    """Zeros (rows, *shape): the form of a reply, for a client with privacy that has failed."""
    return torch.zeros(rows, *shape, dtype=program.client.dtype, device=program.client.device)


@dataclass
class PublicTraining(TakesParts):
    """Each round: local epochs on labels, then `learn_from_public`, which a method writes.

    The last round has no public part, so that every client ends with a head that has seen its own
    labels last.

    Args:
        batch: public rows per batch.
        passes: passes over the public set per round.
        public_lr: learning rate on public rows; None: that of the local epochs.
        robust: whether predictions that agree with nobody's are left out of means; see
            `unalike.methods.agreement`.
    """

    needs_public: ClassVar[bool] = True
    RENAMED: ClassVar[dict[str, str]] = {"public_rate": "public_lr"}

    batch: int = 32
    passes: Positive = 1
    public_lr: LearningRate | None = None
    robust: PeerRule = field(default="never", kw_only=True)

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        return check_batch(self.batch, public_rows)

    def sharing(self, fed: Federation) -> Sharing | None:
        """All share the public set; those that distil, only what clients with their labels say."""
        groups = dict(super().sharing(fed) or {})
        if getattr(self.Program, "distils_by_label", False):
            by_label = clients_by_label(fed)
            groups = {"public predictions": by_label} if by_label else {}
        return groups | averaged_groups(self, fed)

    def serve(self, fed: Federation) -> Iterator[int]:
        parts = self.part_list()
        for round in fed.rounds():
            parts.before_local(fed)
            fed.log_metrics("train_loss", train_locally(fed, "train", parts))
            parts.after_local(fed)
            if round < fed.training.rounds:
                fed.log_metrics("public_loss", self.learn_from_public(fed, round))
                parts.after_exchange(fed)
            yield round

    def public_optimizer(self, program: ClientProgram, name: str) -> torch.optim.Optimizer:
        """A client's optimizer on the public set, kept between rounds."""
        return program.optimizer(name, self.public_lr)

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        """The public part of a round. Returns each client's loss on the public set."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what is learnt from the public set: "
            "write learn_from_public(fed, round)"
        )


def check_batch(batch: int, public_rows: int) -> list[tuple[str, str]]:
    """Problems with a batch size, as (field, sentence)."""
    if batch < 2:
        return [
            ("batch", f"must be at least 2, got {batch}: batch statistics need more than one row.")
        ]
    if public_rows < batch:
        return [
            (
                "batch",
                f"the public set has {public_rows} rows, fewer than a batch of {batch}. "
                "Lower algorithm.batch or raise public.size.",
            )
        ]
    return []
