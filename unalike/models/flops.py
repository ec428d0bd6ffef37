"""Floating-point operations of a forward pass."""

from collections import OrderedDict
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from unalike.models.tracing import unfused_eval

MAX_KNOWN = 256  # architectures whose count is kept
_known: OrderedDict[Any, int] = OrderedDict()


def count_flops(model: nn.Module, x: Tensor | dict) -> int:
    """Floating-point operations of a forward pass over the rows `x`, as torch counts them.

    Equal architectures on inputs of equal shape are counted once per process: a thousand clients
    with one architecture cost one pass.
    """
    architecture = architecture_key(model)
    if architecture is None:
        return _count(model, x)
    key = (architecture, _input_key(x))
    if key not in _known:
        _known[key] = _count(model, x)
        if len(_known) > MAX_KNOWN:
            _known.popitem(last=False)
    return _known[key]


def _count(model: nn.Module, x: Tensor | dict) -> int:
    counter = OperationCounter()
    # with gradients: without them layers take fused paths that are counted differently
    with unfused_eval(model), torch.enable_grad(), counter:
        model(x)
    return counter.total


class OperationCounter(TorchDispatchMode):
    """Adds up the floating-point operations of what runs inside it, by torch's own formulas.

    Does what torch.utils.flop_counter.FlopCounterMode does without its counts by module, and
    without the import of torch._dynamo (see `unalike.training.eager`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def architecture_key(model: nn.Module) -> tuple | None:
    """A hashable description of a model: classes, settings and shapes of all its modules.

    Models with equal keys compute the same operations. None where a module holds anything that
    cannot be compared by value (an object, a closure, a hook): nothing can be said of it then.
    """
    parts: list[Any] = []
    for name, module in model.named_modules():
        settings: list[Any] = []
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                shapes = [(n, None if t is None else t.shape) for n, t in value.items()]
                settings.append((key, tuple(shapes)))
            elif key == "_modules":
                settings.append((key, tuple(value)))
            elif isinstance(value, dict | set) and not value:
                continue  # no hooks
            elif _is_comparable(value):
                settings.append((key, (type(value), value)))
            else:
                return None
        parts.append((name, type(module), tuple(settings)))
    return tuple(parts)


def _is_comparable(value: Any) -> bool:
    """Whether equal values mean equal behaviour."""
    if isinstance(value, tuple):
        return all(_is_comparable(item) for item in value)
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not hasattr(value, "__wrapped__")
    plain = (bool, int, float, str, type(None), torch.dtype, BuiltinFunctionType)
    return isinstance(value, plain)


def _input_key(x: Any) -> tuple:
    if isinstance(x, dict):
        return tuple((name, _input_key(value)) for name, value in sorted(x.items()))
    return (x.shape, x.dtype, x.device)
