"""Local epochs of several models of one architecture as one batched program (torch.func.vmap).

Each model has its own parameters, buffers, optimizer, data and order of rows, and gets the
arithmetic that it would get alone. Clients with fewer rows are padded, and those with fewer steps
wait for the others.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unalike.base.copying import copy_all, upload
from unalike.training.batching import batch_lengths
from unalike.training.cuda_graphs import GraphedFunction
from unalike.training.loop import Diverged
from unalike.training.stacked_convolution import PointwiseConvolutions
from unalike.training.stacked_losses import CrossEntropies
from unalike.training.stacked_optimizer import StackedOptimizer

# loss(context, x, y) of one model, whose parameters are those of the model at the call
ContextLoss = Callable[[list[Tensor], Any, Tensor], Tensor]


@dataclass
class Member:
    """One model of a stack, and what it is trained with.

    Attributes:
        model: its parameters and buffers are replaced by the trained ones.
        tensors: these, by full name.
        optimizer: as `optimizer_kind` allows it.
        read: inputs and labels of rows, (n, ...), on the model's device.
        batches: row numbers of each step.
        rows: how many rows there are.
        context: tensors that the loss depends on besides the model and the batch.
        in_memory: whether all rows may be read at once.
    """

    model: nn.Module
    tensors: dict[str, Tensor]
    optimizer: Optimizer
    read: Callable[[Tensor], tuple[Any, Tensor]]
    batches: list[Tensor]
    rows: int
    context: list[Tensor] = field(default_factory=list)
    in_memory: bool = True


class StackedEpochs:
    """Trains members of one kind. On a GPU some steps are captured once for all that come later.

    Args:
        model: one model of the kind; its own parameters are not used.
        optimizer: one optimizer of the kind.
        loss: of one model. It must not change anything nor draw random numbers.
        unknown_label: marks padded rows, which count for nothing in the loss.
        max_grad_norm: the gradient of each model is clipped to this norm.
        capture: whether a GPU may capture steps: the loss must depend on its arguments alone.
    """

    MAX_GRAPHS = 16  # for different numbers of models and steps and sizes of batches
    MAX_SPAN = 8  # steps in one graph

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: ContextLoss,
        unknown_label: int,
        max_grad_norm: float | None = None,
        capture: bool = False,
    ):
        self.module = _LossModule(model, loss)
        self.optimizer = StackedOptimizer(model, optimizer)
        self.trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self.unknown_label = unknown_label
        self.max_grad_norm = max_grad_norm
        # By name, with a first axis of models: what steps change or depend on.
        self.stacked: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}  # the same for all models
        self.compared: dict[str, list[tuple]] = {}  # versions of tensors that were found equal
        self.fixed_size = capture and any(p.is_cuda for p in model.parameters())
        self.graphed = GraphedFunction(self._steps, capture)
        self.graphed.MAX_GRAPHS = self.MAX_GRAPHS
        self.graphed.CAPTURE_AT = 2

    def use(self, model: nn.Module, loss: ContextLoss) -> None:
        """Take another model and loss of the same kind for what comes."""
        self.module.model = model
        self.module.function = loss

    def train(self, members: Sequence[Member]) -> list[float | Diverged]:
        """Train all members; returns the mean loss of each, over its samples."""
        longest_first = sorted(range(len(members)), key=lambda i: -len(members[i].batches))
        ordered = [members[i] for i in longest_first]
        self.load(ordered)
        rows = StackRows(ordered, self.unknown_label)
        means = mean_losses(self.take_steps(rows), rows.sizes)
        self.store(ordered)
        outcomes: dict[int, float | Diverged] = {}
        for i, mean in zip(longest_first, means, strict=True):
            finite = math.isfinite(mean)
            outcomes[i] = mean if finite else Diverged.at(mean, members[i].optimizer)
        return [outcomes[i] for i in range(len(members))]

    def train_from(
        self,
        start: dict[str, Tensor],
        own: Sequence[dict[str, Tensor]],
        context: Sequence[Tensor],
        optimizer: Optimizer,
        rows: "StackRows",
    ) -> Tensor:
        """Train models that begin at the same parameters; returns losses (steps, models).

        What comes of it is in `stacked`, until the next training.

        Args:
            start: parameters and buffers that all begin with, by full name, like those of `own`.
            own: parameters and buffers of each model, of which those in `start` are not read.
            context: tensors that the loss of all of them depends on besides.
            optimizer: one that took no step yet, like that of each model.
            rows: of all models, those with the most steps first.
        """
        self._load_from(start, own, context, optimizer)
        return self.take_steps(rows)

    def take_steps(self, rows: "StackRows") -> Tensor:
        """Take all steps of the models that are loaded; returns losses (steps, models)."""
        members = len(rows.counts)
        losses = []
        for start, stop in rows.spans(self.MAX_SPAN if self.fixed_size else 1):
            training = int((rows.counts > start).sum())
            # A captured graph has a fixed number of models: some of them only look on.
            models = members if self.fixed_size else training
            x, y = rows.batches(start, stop, models)
            active = None
            if training < models:
                steps = torch.arange(start, stop)
                active = (rows.counts[:, None] > steps).to(y.device, non_blocking=True)
            span_losses = self.graphed(x, y) if active is None else self.graphed(x, y, active)
            padding = span_losses.new_zeros(stop - start, members - training)
            losses.append(torch.cat([span_losses[:, :training], padding], dim=1))
        return torch.cat(losses)

    @torch.no_grad()
    def _load_from(
        self,
        start: dict[str, Tensor],
        own: Sequence[dict[str, Tensor]],
        context: Sequence[Tensor],
        optimizer: Optimizer,
    ) -> None:
        """Take the same parameters for all models, and a fresh optimizer; see `train_from`."""
        count = len(own)
        changing = {*self.trained, *changing_buffers(self.module.model)}
        begun = {name: start[name].detach() for name in own[0] if name in start}
        others = [{n: t for n, t in tensors.items() if n not in begun} for tensors in own]
        different, shared = compare_models(others, changing, self.compared)
        stacks = {name: _stack(values) for name, values in different.items()}
        for name, value in begun.items():
            if name in changing:
                # A single one keeps the strides that a captured step knows.
                rows = value[None] if count == 1 else value.expand(count, *value.shape)
                stacks[f"model.{name}"] = rows
            else:
                shared[f"model.{name}"] = value
        shared |= {f"context.{i}": tensor.detach() for i, tensor in enumerate(context)}
        state = self.optimizer.fresh_state(own[0], optimizer, count)
        fits = [
            _overwrite(self.stacked, stacks, copied=True),
            _overwrite(self.shared, shared),
            _overwrite(self.state, state),
        ]
        if not all(fits):
            self.graphed.clear()

    @torch.no_grad()
    def load(self, members: Sequence[Member]) -> None:
        """Take parameters, buffers, context and optimizer state of these models."""
        own = [member.tensors for member in members]
        changing = {*self.trained, *changing_buffers(members[0].model)}
        different, shared = compare_models(own, changing, self.compared)
        for number in range(len(members[0].context)):
            values = [member.context[number] for member in members]
            if all(value is values[0] for value in values):
                shared[f"context.{number}"] = values[0].detach()
            else:
                different[f"context.{number}"] = values
        state = self.optimizer.read_state(own, [member.optimizer for member in members])
        fits = [
            _overwrite_rows(self.stacked, different),
            _overwrite(self.shared, shared),
            _overwrite(self.state, state),
        ]
        if not all(fits):
            self.graphed.clear()

    def store(self, members: Sequence[Member]) -> None:
        """Give parameters, changed buffers and optimizer state back to their models."""
        own = [member.tensors for member in members]
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for name, stacked in self.stacked.items():
            kind, _, name = name.partition(".")
            if kind == "model":
                targets += [tensors[name] for tensors in own]
                values += stacked.unbind()
        copy_all(targets, values)
        self.optimizer.write_state(self.state, own, [member.optimizer for member in members])

    def losses_and_gradients(
        self, members: Sequence[Member], step: int = 0
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Losses (models,) and gradients (models, ...) of a step that is not taken."""
        self.load(members)
        x, y = StackRows(members, self.unknown_label).batches(step, step + 1, len(members))
        return self._forward_backward(tree_map(lambda rows: rows[:, 0], x), y[:, 0])

    def _steps(self, x: Any, y: Tensor, active: Tensor | None = None) -> Tensor:
        """Losses (steps, models) of some steps, which are taken.

        Args:
            x, y: (models, steps, rows, ...).
            active: (models, steps) bool: who takes which step. None: all take all.
        """
        losses = []
        for step in range(y.shape[1]):
            own_x = tree_map(lambda rows, step=step: rows[:, step], x)
            own_active = None if active is None else active[:, step]
            losses.append(self._step(own_x, y[:, step], own_active))
        return torch.stack(losses)

    def _step(self, x: Any, y: Tensor, active: Tensor | None) -> Tensor:
        models = len(y)
        losses, gradients = self._forward_backward(x, y)
        if self.max_grad_norm:
            clip_each(gradients, self.max_grad_norm)
        with torch.no_grad():
            parameters = {name: self.stacked[f"model.{name}"][:models] for name in self.trained}
            state = {name: value[:models] for name, value in self.state.items()}
            self.optimizer.step(parameters, gradients, state, active)
        return losses

    def _forward_backward(self, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Losses (models,) and gradients of as many models as there are batches."""
        models = len(y)
        alone = models == 1  # without vmap and a first axis, which would only cost time
        stacked = {name: t[0] if alone else t[:models] for name, t in self.stacked.items()}
        leaves = [stacked[f"model.{name}"].detach().requires_grad_() for name in self.trained]
        stacked |= {f"model.{name}": leaf for name, leaf in zip(self.trained, leaves, strict=True)}
        if alone:
            losses = self._loss_of_one(stacked, *tree_map(lambda rows: rows[0], (x, y)))[None]
        else:
            with PointwiseConvolutions() if y.is_cuda else nullcontext(), CrossEntropies():
                losses = torch.func.vmap(self._loss_of_one)(stacked, x, y)
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        if alone:
            gradients = tuple(None if own is None else own[None] for own in gradients)
        return losses.detach(), dict(zip(self.trained, gradients, strict=True))

    def _loss_of_one(self, own: dict[str, Tensor], x: Any, y: Tensor) -> Tensor:
        tensors = own | self.shared
        context_names = sorted(
            (name for name in tensors if name.startswith("context.")),
            key=lambda name: int(name.partition(".")[2]),
        )
        context = [tensors.pop(name) for name in context_names]
        return torch.func.functional_call(self.module, tensors, (context, x, y))


class StackRows:
    """The batches of all members, step by step, padded to one size."""

    def __init__(self, members: Sequence[Member], unknown_label: int):
        self.members = members
        self.unknown_label = unknown_label
        self._count_rows(members)
        if self.in_memory:
            parts = [member.read(torch.arange(member.rows)) for member in members]
            self._keep(parts, self._number_rows(members, int(self.sizes.max())))

    @classmethod
    def of_orders(
        cls,
        parts: Sequence[tuple[Any, Tensor]],
        orders: Sequence[Sequence[Tensor]],
        batch_size: int,
        unknown_label: int,
    ) -> Self:
        """The same from orders of all rows, without a tensor for every batch.

        Args:
            parts: inputs and labels of all rows of each model; those with the most steps first.
            orders: of each model, numbers of all rows (n,) for each epoch.
        """
        rows = cls.__new__(cls)
        rows.members = ()
        rows.unknown_label = unknown_label
        rows.in_memory = True
        lengths = [y.shape[0] for _, y in parts]
        sizes: dict[int, Tensor] = {}  # by the number of rows
        places: dict[int, Tensor] = {}
        epochs = len(orders[0])
        longest = max(batch_lengths(max(lengths), batch_size))
        for count in set(lengths):
            own = torch.tensor(batch_lengths(count, batch_size))
            sizes[count] = own.repeat(epochs)
            # Where in an order each row of each batch stands; padding repeats a batch's first.
            starts = (own.cumsum(0) - own)[:, None]
            columns = torch.arange(longest).expand(len(own), -1)
            places[count] = starts + torch.where(columns < own[:, None], columns, 0)
        steps = max(map(len, sizes.values()))
        rows.counts = torch.tensor([len(sizes[count]) for count in lengths])
        padded = {count: _pad(own, steps) for count, own in sizes.items()}
        rows.sizes = torch.stack([padded[count] for count in lengths])
        index = torch.empty(len(parts), steps, longest, dtype=torch.int64)
        for count in set(lengths):
            chosen = [i for i, length in enumerate(lengths) if length == count]
            flat = torch.stack([order for i in chosen for order in orders[i]])
            own_index = flat[:, places[count]].reshape(len(chosen), -1, longest)
            index[chosen, : own_index.shape[1]] = own_index
            index[chosen, own_index.shape[1] :] = own_index[:, :1]
        rows._keep(parts, index)
        return rows

    def _count_rows(self, members: Sequence[Member]) -> None:
        steps = max(len(member.batches) for member in members)
        sizes = torch.zeros(len(members), steps, dtype=torch.int64)
        for i, member in enumerate(members):
            sizes[i, : len(member.batches)] = torch.tensor([len(rows) for rows in member.batches])
        self.sizes = sizes
        self.counts = torch.tensor([len(member.batches) for member in members])
        self.in_memory = all(member.in_memory for member in members)

    def _number_rows(self, members: Sequence[Member], largest: int) -> Tensor:
        """Row numbers (members, steps, largest) of all batches."""
        steps = self.sizes.shape[1]
        padded = []
        for member in members:
            batches = [lengthen(rows, largest) for rows in member.batches]
            batches += batches[:1] * (steps - len(batches))
            padded += batches
        return torch.stack(padded).reshape(*self.sizes.shape, largest)

    def _keep(self, parts: Sequence[tuple[Any, Tensor]], index: Tensor) -> None:
        """Keep the rows of all members, and the row numbers of all batches."""
        lengths = {y.shape[0] for _, y in parts}
        longest = max(lengths)

        def stack(*rows: Tensor) -> Tensor:
            return torch.stack(rows if len(lengths) == 1 else [lengthen(r, longest) for r in rows])

        xs, ys = zip(*parts, strict=True)
        x = stack(*xs) if isinstance(xs[0], Tensor) else tree_map(stack, *xs)
        self.data = x, stack(*ys)
        largest = index.shape[2]
        device = self.data[1].device
        self.index = upload(index, device)
        self.numbers = torch.arange(len(parts), device=device)[:, None, None]
        self.padded = torch.arange(largest, device=device) >= upload(self.sizes, device)[:, :, None]

    def spans(self, longest: int) -> Iterator[tuple[int, int]]:
        """First and last (exclusive) step of steps that may be taken at once: up to `longest`, by
        the same members, with batches of one size. Their numbers are powers of two."""
        sizes = self.sizes.max(0).values.tolist()
        training = (self.counts[:, None] > torch.arange(len(sizes))).all(0).tolist()
        start = 0
        while start < len(sizes):
            length = 1
            while (
                self.in_memory
                and 2 * length <= min(longest, len(sizes) - start)
                and len({*zip(sizes[start:][: 2 * length], training[start:][: 2 * length])}) == 1
            ):
                length *= 2
            yield start, start + length
            start += length

    def batches(self, start: int, stop: int, models: int) -> tuple[Any, Tensor]:
        """Inputs and labels (models, steps, rows, ...); labels of padded rows are unknown.

        Members whose rows are not in memory are read one step at a time.
        """
        sizes = self.sizes[:models, start:stop]
        width = int(sizes.max())
        if self.in_memory:
            chosen = self.index[:models, start:stop, :width]
            numbers = self.numbers[:models]
            x, y = tree_map(lambda rows: rows[numbers, chosen], self.data)
            padded = self.padded[:models, start:stop, :width]
        else:
            parts = [member.read(member.batches[start]) for member in self.members[:models]]
            x, y = tree_map(
                lambda *rows: torch.stack([lengthen(r, width) for r in rows])[:, None], *parts
            )
            padded = torch.arange(width, device=y.device) >= sizes.to(y.device)[:, :, None]
        if int(sizes.min()) < width:
            y = torch.where(
                padded.reshape(*padded.shape, *[1] * (y.ndim - 3)), self.unknown_label, y
            )
        return x, y


class _LossModule(nn.Module):
    """A loss as a module that holds the model, so that functional_call can swap parameters."""

    def __init__(self, model: nn.Module, function: ContextLoss):
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, context: list[Tensor], x: Any, y: Tensor) -> Tensor:
        return self.function(context, x, y)


def clip_each(gradients: dict[str, Tensor | None], max_norm: float) -> None:
    """Clip the gradient of each model by its own norm, as clip_grad_norm_ does for one."""
    present = [gradient for gradient in gradients.values() if gradient is not None]
    squares = [gradient.flatten(1).square().sum(1) for gradient in present]
    norms = torch.stack(squares).sum(0).sqrt()  # (models,)
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in present:
        gradient.mul_(factors.reshape(-1, *[1] * (gradient.ndim - 1)))


def mean_losses(losses: Tensor, sizes: Tensor) -> list[float]:
    """The mean over the samples of each member, from losses (steps, members).

    Args:
        sizes: (members, steps), rows in each step; 0 in those that a member does not take.
    """
    weights = sizes.mT.double()
    means = (losses.double().cpu() * weights).sum(0) / weights.sum(0)
    return means.tolist()


@torch.no_grad()
def stack_models(
    own: Sequence[dict[str, Tensor]],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of models of one architecture.

    Args:
        own: of each model, by full name.
    Returns: by name after "model.": those stacked along a first axis of models, and those that are
        the same in all models.
    """
    different, shared = compare_models(own)
    return {name: torch.stack(values) for name, values in different.items()}, shared


def compare_models(
    own: Sequence[dict[str, Tensor]],
    always: Collection[str] = (),
    compared: dict[str, list[tuple]] | None = None,
) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Parameters and buffers that differ between models, of each, and those that are the same.

    Args:
        own: of each model, by full name.
        always: names that differ even where all models have equal values.
        compared: versions of tensors that were found equal before, which are not read again.
    Returns: both by name after "model.".
    """
    compared = {} if compared is None else compared
    different: dict[str, list[Tensor]] = {}
    shared: dict[str, Tensor] = {}
    for name in own[0]:
        values = [tensors[name] for tensors in own]
        if name in always or not _all_equal(name, values, compared):
            different[f"model.{name}"] = values
        else:
            shared[f"model.{name}"] = values[0].detach()
    return different, shared


def _all_equal(name: str, values: list[Tensor], compared: dict[str, list[tuple]]) -> bool:
    versions = [(value.data_ptr(), value._version) for value in values]
    if compared.get(name) == versions:
        return True
    equal = all(torch.equal(value, values[0]) for value in values[1:])
    if equal:
        compared[name] = versions
    return equal


def changing_buffers(model: nn.Module) -> set[str]:
    """Names of the running statistics of batch norms that are training."""
    names = set()
    for prefix, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            names |= {f"{prefix}.{name}".lstrip(".") for name, _ in layer.named_buffers()}
    return names


def _overwrite_rows(current: dict[str, Tensor], new: dict[str, list[Tensor]]) -> bool:
    """Copy values of several models into stacks that a captured graph may read; False if they are
    other stacks than before."""
    same = current.keys() == new.keys() and all(
        current[name].shape == (len(values), *values[0].shape)
        and current[name].dtype == values[0].dtype
        for name, values in new.items()
    )
    if not same or not any(values[0].is_cuda for values in new.values()):
        current.clear()
        current.update({name: _stack(values) for name, values in new.items()})
        return same
    rows = [row for name in new for row in current[name].unbind()]
    copy_all(rows, [value for values in new.values() for value in values])
    return True


def _stack(values: list[Tensor]) -> Tensor:
    """The values along a new first axis; a single one keeps its memory format."""
    return values[0].clone()[None] if len(values) == 1 else torch.stack(values)


def _overwrite(current: dict[str, Tensor], new: dict[str, Tensor], copied: bool = False) -> bool:
    """The same with values that are stacks already, or the same in all models.

    Args:
        copied: the values are changed later, so they are copied on a CPU, too.
    """
    same = current.keys() == new.keys() and all(
        current[name].shape == value.shape and current[name].dtype == value.dtype
        for name, value in new.items()
    )
    if not copied and not any(value.is_cuda for value in new.values()):
        current.clear()
        current.update(new)
        return same
    if not same:
        current.clear()
        current.update({name: _clone(value) for name, value in new.items()})
        return False
    copy_all([current[name] for name in new], list(new.values()))
    return True


def _clone(value: Tensor) -> Tensor:
    """A copy; a stack of a single value keeps its memory format."""
    return value[0].clone()[None] if value.ndim and len(value) == 1 else value.clone()


def _pad(values: Tensor, length: int) -> Tensor:
    """Values (n,) and zeros up to this number."""
    return nn.functional.pad(values, (0, length - len(values)))


def lengthen(rows: Tensor, length: int) -> Tensor:
    """The rows, and copies of the first, up to this number."""
    if len(rows) == length:
        return rows
    return torch.cat([rows, rows[:1].expand(length - len(rows), *rows.shape[1:])])
