"""The only training loop. Knows a model, a loss and row numbers; no methods, clients or servers."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.base.registry import import_object, is_own_name
from unalike.base.settings import Settings
from unalike.training.batching import batches
from unalike.training.eager import SGD, Adam, AdamW
from unalike.training.precision import Precision

Positive = Annotated[int, Field(ge=1)]

OPTIMIZERS = ("adamw", "adam", "sgd")


def check_optimizer(value: Any) -> Any:
    """A known name, `module:name`, or a function. Raises: PydanticCustomError otherwise."""
    if value in OPTIMIZERS or is_own_name(value) or callable(value):
        return value
    expected = "'adamw', 'adam', 'sgd' or module:name"
    raise PydanticCustomError("literal_error", "must be one", {"expected": expected})


OptimizerName = Annotated[
    str | Callable[..., torch.optim.Optimizer], BeforeValidator(check_optimizer)
]


class Training(Settings):
    """How much each client trains, and with which optimizer.

    All algorithms run on a scenario share it, so that comparisons do equal work.

    Args:
        rounds: number of rounds.
        epochs: local epochs per round.
        batch_size: rows per gradient step.
        optimizer: "adamw", "adam" or "sgd"; or a function of `(parameters, lr=, weight_decay=,
            **optimizer_options)` that returns an optimizer, in a file as `module:name`, such as
            `torch.optim:RMSprop`.
        optimizer_options: further arguments of an optimizer of your own.
        lr: learning rate.
        weight_decay: of the optimizer.
        decay_vectors: whether biases, norms and other vectors and scalars decay, too.
        momentum: of SGD.
        max_grad_norm: gradients are clipped to this norm; None: not at all.
        precision: of forward and backward passes; weights and their updates are float32. Anything
            but float32 also lays images out channels last on a GPU.
        accumulate: batches whose gradients make one step, in local training.
        schedule: how the learning rate of every optimizer changes from round to round: see
            `lr_factor`.
        warmup: rounds in which the learning rate rises to its value.
        step_every: rounds between two steps of the schedule "step".
        step_factor: of one such step.
    """

    RENAMED: ClassVar[dict[str, str]] = {
        "rate": "lr",
        "batch": "batch_size",
        "optimiser": "optimizer",
        "clip": "max_grad_norm",
    }

    rounds: Positive = 20
    epochs: Positive = 1
    batch_size: Positive = 32
    optimizer: OptimizerName = "adamw"
    optimizer_options: dict[str, Any] = {}
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    decay_vectors: bool = True
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    precision: Precision = "float32"
    accumulate: Positive = 1
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    step_every: Positive = 10
    step_factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate changes at all."""
        return self.schedule != "constant" or self.warmup > 0

    def lr_factor(self, round: int) -> float:
        """By what the learning rate is multiplied in a round, in (0, 1].

        It depends on the round's number only, so that a run that is resumed goes on as before.
        After the warm-up, "cosine" and "linear" fall towards 0, which they would reach in the
        round after the last.

        >>> [Training(rounds=4, schedule="linear").lr_factor(round) for round in (1, 2, 3, 4)]
        [1.0, 0.75, 0.5, 0.25]
        """
        position = max(round, 1) - 1  # rounds done before this one
        if position < self.warmup:
            return (position + 1) / (self.warmup + 1)
        if self.schedule == "step":
            return self.step_factor ** ((position - self.warmup) // self.step_every)
        length = max(self.rounds - self.warmup, 1)
        progress = min((position - self.warmup) / length, (length - 1) / length)
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1 - progress if self.schedule == "linear" else 1.0


class Diverged(ValueError):
    """The training loss became NaN or infinite."""

    @classmethod
    def at(cls, loss: float, optimizer: torch.optim.Optimizer) -> Self:
        """A mean loss that is not finite, reached with this optimizer."""
        lr = optimizer.param_groups[0]["lr"]
        return cls(f"the training loss became {loss}; lower training.lr (now {lr})")


def build_optimizer(
    parameters: Sequence[Tensor], training: Training, lr: float | None = None
) -> torch.optim.Optimizer:
    """The optimizer that `training` names, with its learning rate or another one.

    Fused kernels do the same arithmetic in one call. They exist for floating-point parameters on
    CPU and CUDA only.
    """
    lr = lr or training.lr
    decay = training.weight_decay
    if training.optimizer not in OPTIMIZERS:
        return build_own_optimizer(parameters, training, lr)
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    groups: Any = parameters if training.decay_vectors else decay_groups(parameters)
    match training.optimizer:
        case "adamw":
            return AdamW(groups, lr=lr, weight_decay=decay, fused=fused)
        case "adam":
            return Adam(groups, lr=lr, weight_decay=decay, fused=fused)
        case _:
            return SGD(groups, lr=lr, momentum=training.momentum, weight_decay=decay, fused=fused)


def copy_optimizer(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[Tensor]
) -> torch.optim.Optimizer | None:
    """A new optimizer like one that took no step yet, without its checks of every option.

    Returns: None where there is none to copy, or it is one of other parameters.
    """
    if optimizer is None or optimizer.state:
        return None
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if own != {id(p) for p in parameters}:
        return None
    copied = object.__new__(type(optimizer))
    # Hooks are dicts: each optimizer has its own.
    for name, value in vars(optimizer).items():
        vars(copied)[name] = value.copy() if isinstance(value, dict) else value
    copied.param_groups = [
        {**group, "params": list(group["params"])} for group in optimizer.param_groups
    ]
    return copied


def decay_groups(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: matrices and kernels decay, vectors and scalars do not."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_own_optimizer(
    parameters: Sequence[Tensor], training: Training, lr: float
) -> torch.optim.Optimizer:
    """The optimizer of a function of the user's. Raises: UserError where it returns none."""
    own = training.optimizer
    function = import_object(own) if isinstance(own, str) else own
    options = {"lr": lr, "weight_decay": training.weight_decay, **training.optimizer_options}
    optimizer = function(parameters, **options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"training.optimizer: {own} must return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, training: Training, round: int) -> None:
    """Give every parameter group the learning rate of a round, by the schedule."""
    if not training.has_schedule:
        return
    factor = training.lr_factor(round)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def step(
    loss: Tensor, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
) -> None:
    """Backward pass of a loss and one optimizer step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    apply_gradients(optimizer, max_grad_norm)


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """One optimizer step with the gradients that the parameters hold, clipped first if asked.

    Args:
        scaler: what the loss was multiplied by; steps with infinite gradients are left out.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    if max_grad_norm:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def train(
    model: nn.Module,
    rows: int,
    gradient: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    orders: list[torch.Generator],
    batch_size: int,
    max_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> float:
    """Train for one epoch over `rows` samples per generator in `orders`.

    Args:
        gradient: takes row numbers (n,), leaves their gradient in the parameters' `.grad` and
            returns their loss, a scalar (see `GraphedStep`).
        orders: one generator per epoch; it shuffles the rows.
        scaler: what `gradient` multiplies the loss by, in float16.
    Returns: the mean loss over all samples.
    Raises: Diverged if that is not finite.
    """
    model.train()
    losses, sizes = [], []
    for order in orders:
        for index in batches(rows, batch_size, order):
            losses.append(gradient(index))  # stays on the device: reading it would stall a GPU
            sizes.append(len(index))
            apply_gradients(optimizer, max_grad_norm, scaler)
    if not losses:
        return 0.0
    mean = float(torch.stack(losses) @ losses[0].new_tensor(sizes)) / sum(sizes)
    if not math.isfinite(mean):
        raise Diverged.at(mean, optimizer)
    return mean


def accumulate_gradients(
    model: nn.Module, gradient: Callable[[Tensor], Tensor], batch_size: int, index: Tensor
) -> Tensor:
    """Leave the gradient of the mean loss over several batches in the parameters' `.grad`.

    Args:
        gradient: as `train` takes it.
        batch_size: rows that are passed to it at once.
        index: row numbers of all batches, (n,).
    Returns: the mean loss, a scalar.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums: list[Tensor | None] = [None] * len(parameters)
    loss = torch.zeros(())
    for part in batches(len(index), batch_size):
        share = len(part) / len(index)
        own = gradient(index[part])
        loss = loss.to(own) + own * share
        for i, p in enumerate(parameters):
            if p.grad is not None:
                before = sums[i]
                sums[i] = p.grad * share if before is None else before + p.grad * share
    for p, mean in zip(parameters, sums, strict=True):
        p.grad = mean
    return loss
