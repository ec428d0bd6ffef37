"""Tensors that a program's loss may read besides its model and the batch, found by looking.

They are the tensors in the attributes of the program, in dicts and lists there, in modules there
(a teacher, a former model), and in the closure of the loss.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from unalike.core.program import ClientProgram

PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
PLAIN_TYPES = frozenset(PLAIN)
# Attributes of a program that no loss reads, or that two programs have in common.
NOT_READ = {
    "algorithm",
    "axis_lengths",
    "client",
    "fold_replicas",
    "model",
    "optimizers",
    "round",
    "seed",
    "training",
    "work",
    "_all_inputs",
    "_graphed_steps",
}


class ProgramContext:
    """The tensors that a loss of a program may read, and what else it may read.

    Attributes:
        tensors: in an order that is the same for all programs of one `kind`.
        kind: names, numbers, strings and shapes; equal for programs that differ in tensors alone.
    """

    def __init__(self, program: "ClientProgram", loss: Callable[..., Tensor]):
        self.program = program
        self.unbound_loss = loss
        self.own_modules = set(program.model.modules())
        self.attributes = {
            name: value for name, value in vars(program).items() if name not in NOT_READ
        }
        self.cells = _closure_cells(loss)
        values = [*self.attributes.values(), *(cell.cell_contents for cell in self.cells)]
        self.leaves, self.tree = tree_flatten(values)
        self.tensors: list[Tensor] = []
        kinds = []
        for leaf in self.leaves:
            tensors = self._tensors_of(leaf)
            self.tensors += tensors.values()
            shapes = [(name, t.shape, t.dtype) for name, t in tensors.items()]
            kinds.append((type(leaf), *shapes) if not isinstance(leaf, PLAIN) else leaf)
        self.kind: Hashable = (tuple(self.attributes), str(self.tree), tuple(kinds))

    def _tensors_of(self, leaf: Any) -> dict[str, Tensor]:
        """The tensors in a leaf by name: itself, or those of a module that is not the model's."""
        if isinstance(leaf, Tensor):
            return {"": leaf}
        if isinstance(leaf, nn.Module) and leaf not in self.own_modules:
            return {**dict(leaf.named_parameters()), **dict(leaf.named_buffers())}
        return {}

    def loss(self, tensors: list[Tensor], x: Any, y: Tensor) -> Tensor:
        """The loss of a batch, with these tensors in the place of the program's own."""
        with self.replaced(tensors):
            return self.program.in_precision(self.unbound_loss)(x, y)

    @contextmanager
    def replaced(self, tensors: list[Tensor]) -> Iterator[None]:
        """The program with other tensors, in the order of `tensors`."""
        remaining = iter(tensors)
        leaves = []
        with ExitStack() as stack:
            for leaf in self.leaves:
                names = self._tensors_of(leaf)
                new = {name: next(remaining) for name in names}
                if isinstance(leaf, nn.Module) and new:
                    stack.enter_context(_reparametrize_module(leaf, new))
                leaves.append(new[""] if isinstance(leaf, Tensor) else leaf)
            values = tree_unflatten(leaves, self.tree)
            originals = tree_unflatten(self.leaves, self.tree)
            try:
                self._set(values)
                yield
            finally:
                self._set(originals)

    def _set(self, values: list[Any]) -> None:
        attributes = values[: len(self.attributes)]
        vars(self.program).update(zip(self.attributes, attributes, strict=True))
        for cell, value in zip(self.cells, values[len(attributes) :], strict=True):
            cell.cell_contents = value


def _closure_cells(loss: Callable[..., Tensor]) -> list[Any]:
    """The variables that a function takes from where it was defined."""
    function = getattr(loss, "__func__", loss)
    cells = getattr(function, "__closure__", None) or ()
    return [cell for cell in cells if not _is_empty(cell)]


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def model_kind(model: nn.Module) -> Hashable:
    """Equal for models that differ in the values of parameters and buffers alone."""
    layers = []
    for name, layer in model.named_modules():
        numbers = []
        for key, value in vars(layer).items():
            if type(value) in PLAIN_TYPES:
                numbers.append((key, value))
            elif isinstance(value, tuple):
                numbers.append((key, repr(value)))
        layers.append((name, type(layer), tuple(numbers)))
    parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    buffers = [(name, b.shape, b.dtype) for name, b in model.named_buffers()]
    return tuple(layers), tuple(parameters), tuple(buffers)
