"""Walks over a module's layers, parameters and buffers, remembered while its tree stays as it is.

`nn.Module.named_parameters` builds every name anew at each call. A federation of many small models
spends more time with that than with their arithmetic.
"""

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTE = "_remembered_tree"  # of a module: its ModuleTree
PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
PLAIN_TYPES = frozenset(PLAIN)
# What a layer may override to have another state than its parameters and buffers.
STATE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


class Kind:
    """Stands for a nested value, which takes longer to compare and to hash. See `kind_of`.

    Attributes:
        facts: what was found out about all that are of this kind, by name.
    """

    __slots__ = ("__weakref__", "facts", "value")

    def __init__(self, value: Hashable):
        self.value = value
        self.facts: dict[str, Any] = {}


_kinds: weakref.WeakValueDictionary[Hashable, Kind] = weakref.WeakValueDictionary()


def kind_of(value: Hashable) -> Kind:
    """What stands for this value and all that are equal to it, as long as anybody holds it.

    >>> one, other = kind_of(("a", 1)), kind_of(("a", 1))
    >>> one is other, one is kind_of(("a", 2))
    (True, False)
    """
    kind = _kinds.get(value)
    if kind is None:
        kind = _kinds[value] = Kind(value)
    return kind


class _Layer:
    """A layer as it was when its tree was read."""

    def __init__(self, name: str, layer: nn.Module):
        self.name = name
        self.layer = layer
        self.attributes: list[Any] = []
        self.attribute_names: list[str] = []
        self.kind: Kind | None = None

    def find_kind(self) -> Kind:
        """Its numbers and words; read anew where an attribute is another one than before."""
        attributes = vars(self.layer)
        try:
            same = list(attributes.values()) == self.attributes
        except (RuntimeError, ValueError):  # tensors and arrays do not say whether they are equal
            same = False
        if self.kind is None or not same or list(attributes) != self.attribute_names:
            self.attributes = list(attributes.values())
            self.attribute_names = list(attributes)
            self.kind = kind_of((self.name, type(self.layer), *_plain(attributes)))
        return self.kind


def _plain(attributes: dict[str, Any]) -> list[tuple[str, Hashable]]:
    found: list[tuple[str, Hashable]] = []
    for key, value in attributes.items():
        if type(value) in PLAIN_TYPES:
            found.append((key, value))
        elif isinstance(value, tuple):
            found.append((key, repr(value)))
    return found


class ModuleTree:
    """The layers of a module and the places of its parameters and buffers; see `tree_of`.

    Attributes:
        layers: the module itself first, as `modules()` gives them.
    """

    def __init__(self, model: nn.Module):
        records = [_Layer(name, layer) for name, layer in model.named_modules()]
        self._records = records
        self.layers = [record.layer for record in records]
        owners = {record.name: record.layer for record in records}
        self._parameters = [
            (name, owners[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, _ in model.named_parameters()
        ]
        self._buffers = [
            (name, owners[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, _ in model.named_buffers()
        ]
        self._state = _state_places(model)
        self._content = self._find_content()
        # Places where a parameter or buffer may come.
        self._absent: list[tuple[nn.Module, str, str]] = []
        for layer in self.layers:
            for own in ("_parameters", "_buffers"):
                for key, value in vars(layer)[own].items():
                    if value is None:
                        self._absent.append((layer, own, key))
        self._values: list[Any] = []
        self._kind: Kind | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module remembers nothing

    def __reduce__(self) -> Any:
        return type(None), ()

    def _find_content(self) -> list[Any]:
        """All layers and the names of what they hold."""
        content: list[Any] = []
        for layer in self.layers:
            content += layer._modules.values()
            content += layer._modules
            content += layer._parameters
            content += layer._buffers
            content += layer._state_dict_hooks
            content += layer._state_dict_pre_hooks
        return content

    def fits(self, module: nn.Module) -> bool:
        """Whether it is the tree of this module, which is still as it was.

        It does not fit where parameters are tied: walks give the first of them, whichever it is.
        """
        if module is not self.layers[0] or self._find_content() != self._content:
            return False
        if any(vars(layer)[own][key] is not None for layer, own, key in self._absent):
            return False
        tensors = {id(tensor) for tensor in self.tensors().values()}
        count = sum(len(layer._parameters) + len(layer._buffers) for layer in self.layers)
        return len(tensors) == count - len(self._absent) and id(None) not in tensors

    def parameters(self) -> dict[str, nn.Parameter]:
        """By full name, as `named_parameters()` gives them."""
        found = {name: owner._parameters[key] for name, owner, key in self._parameters}
        return found  # type: ignore[return-value]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by full name."""
        found: dict[str, Any] = dict(self.parameters())
        for name, owner, key in self._buffers:
            found[name] = owner._buffers[key]
        return found

    def state(self) -> dict[str, Tensor] | None:
        """What `state_dict()` gives, in its order; None where a layer has one of its own."""
        if self._state is None:
            return None
        return {name: vars(layer)[own][key].detach() for name, layer, own, key in self._state}

    def kind(self) -> Kind:
        """Equal for modules that differ in the values of parameters and buffers alone."""
        values: list[Any] = [record.find_kind() for record in self._records]
        for tensor in self.tensors().values():
            values += (tensor.shape, tensor.dtype, tensor.requires_grad)
        if self._kind is None or values != self._values:
            names = [name for name, _, _ in (*self._parameters, *self._buffers)]
            self._values = values
            self._kind = kind_of((*values, len(self._parameters), *names))
        return self._kind


def _state_places(model: nn.Module) -> list[tuple[str, nn.Module, str, str]] | None:
    """Names in the order of `state_dict()`, and where their tensors are."""
    records = list(model.named_modules(remove_duplicate=False))
    if len({id(layer) for _, layer in records}) < len(records):
        return None
    places = []
    for prefix, layer in records:
        kind = type(layer)
        if any(getattr(kind, name) is not getattr(nn.Module, name) for name in STATE_METHODS):
            return None
        if layer._state_dict_hooks or layer._state_dict_pre_hooks:
            return None
        for own in ("_parameters", "_buffers"):
            for key, value in vars(layer)[own].items():
                if value is not None and key not in layer._non_persistent_buffers_set:
                    places.append((f"{prefix}.{key}" if prefix else key, layer, own, key))
    return places


def tree_of(module: nn.Module) -> ModuleTree:
    """The tree of a module: the one that was read before, if nothing was added or taken away."""
    tree = vars(module).get(ATTRIBUTE)
    if tree is None or not tree.fits(module):
        tree = ModuleTree(module)
        vars(module)[ATTRIBUTE] = tree
    return tree


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their full names."""
    return tree_of(module).tensors()


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their full names."""
    return tree_of(module).parameters()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """What `module.state_dict()` gives."""
    state = tree_of(module).state()
    return module.state_dict() if state is None else state
