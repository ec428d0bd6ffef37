"""How active the units of a model are on some rows: what comes out of their activation function.

A unit's output is followed from its layer through norms and sums to the first activation function,
which is where the pruning literature counts zeros (APoZ, https://arxiv.org/abs/1607.03250).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unalike.models.channel_groups import ChannelGroup
from unalike.models.tracing import unfused_eval

ACTIVATIONS = {
    "relu", "relu6", "elu", "gelu", "silu", "mish", "leaky_relu", "hardswish", "hardtanh", "celu",
    "selu", "sigmoid", "tanh", "softplus",
}  # fmt: skip


def measure_activity(
    model: nn.Module, groups: Sequence[ChannelGroup], batches: Iterable[Tensor | dict]
) -> list[Tensor]:
    """How active the units are on some batches, after their activation function.

    Units that meet no activation function, such as those of a last layer, are measured as their
    layer gives them.

    Returns: (units, 2) per group: the mean of the positive outputs, and the share of outputs that
        are not positive.
    """
    layers = [_Units(group) for group in groups]  # what layers give
    active = [_Units(group) for group in groups]  # what activation functions give
    follow = _Follow(active)
    hooks = []
    for number, group in enumerate(groups):
        for path in {s.tensor.rpartition(".")[0] for s in group.slices if s.is_output}:
            layer = model.get_submodule(path)
            entries = next(
                s.entries for s in group.slices if s.is_output and s.tensor.startswith(f"{path}.")
            )
            hooks.append(layer.register_forward_hook(follow.marker(number, entries, layers)))
    try:
        with unfused_eval(model), torch.no_grad():
            for x in batches:
                with follow:
                    model(x)
                follow.origin.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return [
        (after if after.count else before).mean()
        for before, after in zip(layers, active, strict=True)
    ]


class _Units:
    """Sums over the outputs of the units of a group."""

    def __init__(self, group: ChannelGroup):
        self.sums = torch.zeros(group.units, 2, dtype=torch.float64)
        self.count = 0

    def add(self, output: Tensor, axis: int, entries: Tensor) -> None:
        """Outputs (..., channels, ...) with channels on an axis; entries: (units, of each)."""
        channels = output.detach().movedim(axis, 0)
        values = channels[entries.to(output.device)].flatten(1).double().cpu()  # (units, values)
        self.sums += torch.stack([values.relu().sum(1), (values <= 0).sum(1)], 1)
        self.count += values.shape[1]

    def mean(self) -> Tensor:
        return self.sums / max(self.count, 1)


class _Follow(TorchFunctionMode):
    """Follows outputs of layers through operations that keep their shape.

    Attributes:
        origin: by id of a tensor: the tensor, which must stay alive, its group, the axis of
            channels and the entries of the units on it.
    """

    def __init__(self, active: list[_Units]):
        super().__init__()
        self.active = active
        self.origin: dict[int, tuple[Tensor, int, int, Tensor]] = {}

    def marker(
        self, number: int, entries: Tensor, layers: list[_Units]
    ) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook of a layer whose outputs are units of the group of this number."""

        def mark(layer: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                return
            normalises = isinstance(layer, nn.modules.batchnorm._NormBase | nn.GroupNorm)
            convolves = isinstance(layer, nn.modules.conv._ConvNd)
            axis = 1 if convolves or normalises else -1
            if output.shape[axis] <= int(entries.max()):
                return
            if not normalises and not isinstance(layer, nn.LayerNorm | nn.RMSNorm):
                layers[number].add(output, axis, entries)
            self.origin[id(output)] = output, number, axis, entries

        return mark

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation; its output has the origin of an input of the same shape."""
        known = [self.origin.get(id(arg)) for arg in args if isinstance(arg, Tensor)]
        output = func(*args, **(kwargs or {}))
        origin = next((found for found in known if found is not None), None)
        if origin is None or not isinstance(output, Tensor):
            return output
        tensor, number, axis, entries = origin
        if output.shape != tensor.shape or not output.is_floating_point():
            return output
        if getattr(func, "__name__", "").rstrip("_") in ACTIVATIONS:
            self.active[number].add(output, axis, entries)
            self.origin.pop(id(output), None)  # of an operation in place
        else:
            self.origin[id(output)] = output, number, axis, entries
        return output
