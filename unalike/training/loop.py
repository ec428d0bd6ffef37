"""The training loop, the only one. Knows a model, a loss and rows; nothing of methods, clients or servers."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unalike.base.settings import Settings
from unalike.training.cuda_graphs import GraphedFunction

Positive = Annotated[int, Field(ge=1)]


class Training(Settings):
    """How much work everybody does and how; shared by every algorithm run on a scenario, so that comparisons do equal work."""

    RENAMED: ClassVar[dict[str, str]] = {
        "rate": "lr",
        "batch": "batch_size",
        "optimiser": "optimizer",
        "clip": "max_grad_norm",
    }

    rounds: Positive = 20
    epochs: Positive = 1  # local epochs a round
    batch_size: Positive = 32
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # SGD only
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None  # largest norm of a gradient


class Diverged(ValueError):
    """A loss that is no longer a number."""


def build_optimizer(
    parameters: Sequence[Tensor], training: Training, rate: float | None = None
) -> torch.optim.Optimizer:
    """Fused kernels do the same arithmetic in one call; they exist for floating parameters on CPU and CUDA."""
    rate = rate or training.lr
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    match training.optimizer:
        case "adamw":
            return torch.optim.AdamW(
                parameters, lr=rate, weight_decay=training.weight_decay, fused=fused
            )
        case "adam":
            return torch.optim.Adam(
                parameters, lr=rate, weight_decay=training.weight_decay, fused=fused
            )
        case _:
            return torch.optim.SGD(
                parameters,
                lr=rate,
                momentum=training.momentum,
                weight_decay=training.weight_decay,
                fused=fused,
            )


def batches(rows: int, batch: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Row numbers in batches, shuffled if there is a generator. A last batch of one row joins the one before it,
    since batch statistics of a single row do not exist.

    >>> [len(b) for b in batches(9, 4)], [len(b) for b in batches(10, 4)]
    ([4, 5], [4, 4, 2])
    """
    order = torch.arange(rows) if generator is None else torch.randperm(rows, generator=generator)
    starts = list(range(0, rows, batch))
    if len(starts) > 1 and rows - starts[-1] == 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], rows], strict=False):  # no rows: no batches
        yield order[start:end]


def step(loss: Tensor, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
    """One update from a loss."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    move(optimizer, clip)


def move(optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
    """One update from gradients that are there already."""
    if clip:
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], clip
        )
    optimizer.step()


def train(
    model: nn.Module,
    rows: int,
    gradient: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    orders: list[torch.Generator],
    batch: int,
    clip: float | None = None,
) -> float:
    """One epoch per generator in `orders` over `rows` samples; `gradient(index)` leaves that of a batch in the parameters and gives its
    loss. Returns the mean loss."""
    model.train()
    losses, sizes = [], []
    for order in orders:
        for index in batches(rows, batch, order):
            losses.append(gradient(index))  # stays on the device: no waiting for each step
            sizes.append(len(index))
            move(optimizer, clip)
    mean = float(torch.stack(losses) @ losses[0].new_tensor(sizes)) / sum(sizes) if losses else 0.0
    if not math.isfinite(mean):
        raise Diverged(
            f"the training loss became {mean}; lower training.lr (now {optimizer.param_groups[0]['lr']})"
        )
    return mean


class GraphedStep:
    """Forward and backward of a batch: `tape(x, y)` leaves the gradient of `loss(x, y)` in the model's parameters and gives the loss. If it
    `records`, they are played on a GPU."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], records: bool = True):
        self.model, self.loss, self.played = model, loss, GraphedFunction(self._run, records)
        self.begin()

    def begin(self) -> None:
        """To be called where the model may have other tensors than before: what was recorded with the old ones is forgotten."""
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self.played.records:
            return
        place = [t.data_ptr() for t in (*self.model.parameters(), *self.model.buffers())] + [
            len(self.parameters)
        ]
        if place != getattr(self, "place", place):
            self.played.forget()
        self.place = place

    def __call__(self, *inputs: Any) -> Tensor:
        loss, gradients = self.played(*inputs)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        return loss.clone() if loss.is_cuda else loss

    def _run(self, *inputs: Any) -> tuple[Tensor, list[Tensor | None]]:
        for p in self.parameters:
            p.grad = None
        value = self.loss(*inputs)
        value.backward()
        return value.detach(), [p.grad for p in self.parameters]


class Stack:
    """Alike models trained as one batched program: their parameters have one axis more, the arithmetic is that of one by one.

    `model` is the pattern, `parameters` are those of each. Models that draw random numbers or keep statistics in their forward pass
    (dropout, batch norm) cannot be stacked.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[dict[str, Tensor]],
        training: Training,
        rate: float | None = None,
    ):
        self.model, self.count, self.clip = model, len(parameters), training.max_grad_norm
        trained = {name: p.requires_grad for name, p in model.named_parameters()}
        self.turned = {
            name: turn(torch.stack([each[name].detach() for each in parameters]))
            .contiguous()
            .requires_grad_(moves)
            for name, moves in trained.items()
        }
        self.optimizer = build_optimizer(
            [p for p in self.turned.values() if p.requires_grad], training, rate
        )

    @property
    def parameters(self) -> dict[str, Tensor]:
        """(models, ...) each."""
        return {name: turn(p) for name, p in self.turned.items()}

    def step(self, loss: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """One update of each model by its `loss(model, *inputs)`; inputs have a first axis for the models. Returns the losses (models,)."""
        called = Called(self.model, loss)

        def one(parameters: dict[str, Tensor], *given: Any) -> Tensor:
            return torch.func.functional_call(
                called, {f"model.{name}": p for name, p in parameters.items()}, given
            )

        if self.count == 1:
            losses = one(*tree_map(lambda rows: rows.squeeze(0), (self.parameters, *inputs)))[None]
        else:
            losses = torch.func.vmap(one)(self.parameters, *inputs)
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        if self.clip:
            self._clip(self.clip)
        self.optimizer.step()
        return losses.detach()

    def _clip(self, largest: float) -> None:
        grads = [p.grad for p in self.turned.values() if p.grad is not None]
        norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
        shrink = (largest / (norms + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(shrink.reshape(-1, *[1] * (grad.dim() - 1)))

    def unstack(self) -> list[dict[str, Tensor]]:
        """The parameters of each model."""
        now = {
            name: p.detach().clone(memory_format=torch.contiguous_format)
            for name, p in self.parameters.items()
        }
        return [{name: p[i] for name, p in now.items()} for i in range(self.count)]


def turn(stacked: Tensor) -> Tensor:
    """Matrices of a stack, transposed; all else as it is. A batched product gives the gradient of a weight transposed, which an optimizer
    can only use as it is where the weight lies so too. Undoes itself."""
    return stacked.mT if stacked.ndim == 3 else stacked


class Recorded:
    """The steps of a stack from a fresh optimizer, recorded once and played again from other parameters: a GPU then does them without
    waiting for Python. The same arithmetic, for the same losses on the same inputs."""

    def __init__(self, stack: Stack, losses: Sequence[Callable[..., Tensor]], *inputs: Any):
        self.stack, self.losses, self.inputs = stack, losses, inputs
        for group in stack.optimizer.param_groups:
            group["capturable"] = True
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            aside
        ):  # lets every kernel be chosen, and the optimizer make its state
            self._go()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.ends = self._go()

    def _go(self) -> Tensor:
        for state in self.stack.optimizer.state.values():
            for value in state.values():
                value.zero_()
        for loss in self.losses:
            ends = self.stack.step(loss, *self.inputs)
        return ends

    def play(
        self, parameters: Sequence[dict[str, Tensor]]
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Parameters of each model after the steps, and its last loss."""
        with torch.no_grad():
            for name, p in self.stack.parameters.items():
                p.copy_(torch.stack([each[name] for each in parameters]))
        self.graph.replay()
        return self.stack.unstack(), self.ends.clone()


def draws(model: nn.Module) -> bool:
    """Whether a pass in training draws random numbers or counts statistics, so that it is another at each call.

    Layers that torch does not have, such as those that leave out whole paths, are known by a share to drop among their own numbers.
    """

    def one(layer: nn.Module) -> bool:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            return True
        shares = (
            [layer.p]
            if isinstance(layer, nn.modules.dropout._DropoutNd)
            else [
                value
                for name, value in vars(layer).items()
                if "drop" in name and isinstance(value, float)
            ]
        )
        return any(share > 0 for share in shares)

    return any(layer.training and one(layer) for layer in model.modules())


def counted(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Norms of a model in training that count statistics; those that never do, held ones for one, are left out."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and layer.training
        and layer.running_mean is not None
    ]


def remeasure(model: nn.Module, rows: Iterable[Any]) -> None:
    """Running statistics as they are on these batches of rows, with the weights there are now; all else is as in a test."""
    norms = counted(model.train())
    paces = [norm.momentum for norm in norms]
    model.eval()
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.train()
        with torch.no_grad():
            for x in rows:
                model(x)
    finally:
        for norm, pace in zip(norms, paces, strict=True):
            norm.momentum = pace
        model.train()


class Called(nn.Module):
    """A function of a model, as a module: what it does with the model's parameters can then be done with others."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self.model, *inputs)


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of several clients as one tensor (clients, most rows, ...), zeros where there are fewer, and which are there (clients, most).

    >>> pad([torch.ones(2, 3), torch.ones(1, 3)])[1]
    tensor([[1., 1.],
            [1., 0.]])
    """
    most = max(len(each) for each in rows)
    there = torch.stack([torch.arange(most, device=each.device) < len(each) for each in rows])
    if all(len(each) == most for each in rows):
        return torch.stack(list(rows)), there.to(rows[0].dtype)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True), there.to(rows[0].dtype)
