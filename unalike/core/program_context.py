"""Tensors that a program's loss may read besides its model and the batch, found by looking.

They are the tensors in the attributes of the program, in dicts and lists there, in modules there
(a teacher, a former model), and in the closure of the loss.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from unalike.base.module_tree import PLAIN, PLAIN_TYPES, tensors_of

if TYPE_CHECKING:
    from unalike.core.program import ClientProgram

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
    "known_kind",
    "training",
    "work",
    "_all_inputs",
    "_fresh_optimizer",
    "_graphed_steps",
}


class ProgramContext:
    """The tensors that a loss of a program may read, and what else it may read.

    Args:
        layers: of the program's model, where they are known.

    Attributes:
        tensors: in an order that is the same for all programs of one `kind`.
        kind: names, numbers, strings and shapes; equal for programs that differ in tensors alone.
    """

    def __init__(
        self,
        program: "ClientProgram",
        loss: Callable[..., Tensor],
        layers: Iterable[nn.Module] | None = None,
    ):
        self.program = program
        self.unbound_loss = loss
        self.own_modules = set(layers or program.model.modules())
        self.attributes = {
            name: value for name, value in vars(program).items() if name not in NOT_READ
        }
        self.cells = _closure_cells(loss)
        self.values = [*self.attributes.values(), *(cell.cell_contents for cell in self.cells)]
        self.leaves: list[Any] = []
        form: list[Hashable] = [tuple(self.attributes)]
        for value in self.values:
            _flatten(value, self.leaves, form)
        self.tensors: list[Tensor] = []
        for leaf in self.leaves:
            if isinstance(leaf, PLAIN):
                form.append(leaf)
                continue
            tensors = self._tensors_of(leaf)
            self.tensors += tensors.values()
            form.append((type(leaf),))
            form += [(name, t.shape, t.dtype) for name, t in tensors.items()]
        self.kind: Hashable = tuple(form)

    def _tensors_of(self, leaf: Any) -> dict[str, Tensor]:
        """The tensors in a leaf by name: itself, or those of a module that is not the model's."""
        if isinstance(leaf, Tensor):
            return {"": leaf}
        if isinstance(leaf, nn.Module) and leaf not in self.own_modules:
            return tensors_of(leaf)
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
            tree = tree_flatten(self.values)[1]
            values = tree_unflatten(leaves, tree)
            originals = tree_unflatten(self.leaves, tree)
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


def _flatten(value: Any, leaves: list[Any], form: list[Hashable]) -> None:
    """Append the leaves of a value, in the order of `tree_flatten`, and what says its form."""
    kind = type(value)
    if kind in PLAIN_TYPES or isinstance(value, (Tensor, nn.Module)):
        leaves.append(value)
        form.append(".")
    elif kind is dict:
        form.append((dict, *value))
        for item in value.values():
            _flatten(item, leaves, form)
    elif kind is list or kind is tuple:
        form.append((kind, len(value)))
        for item in value:
            _flatten(item, leaves, form)
    else:
        others, tree = tree_flatten(value)
        leaves += others
        form.append(str(tree))
