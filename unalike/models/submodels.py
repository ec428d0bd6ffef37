"""Narrower versions of a model: which units to keep, the narrow module, and copying between both.

`keep` has, for every channel group, the numbers of the units that stay, in ascending order.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from unalike.base.errors import UserError
from unalike.models.channel_groups import AxisSlice, ChannelGroup
from unalike.models.tracing import Untraceable, trace

State = dict[str, Tensor]
Keep = Sequence[Tensor]
# attributes in which modules keep their number of attention heads
HEADS = ("heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")
# attributes in which they keep the width of all heads
HEADS_WIDTH = ("split_size",)

# by architecture: tracing is slow, and many clients have the same one
_traced: dict[tuple, list[ChannelGroup]] = {}


def find_channel_groups(
    model: nn.Module, x: Tensor | dict, fixed: Sequence[str] = ()
) -> list[ChannelGroup]:
    """The channel groups of a model (`trace`), cached for models of the same architecture."""
    key = (architecture_key(model, x), tuple(fixed))
    if key not in _traced:
        _traced[key] = trace(model, x, fixed)
    return _traced[key]


def architecture_key(model: nn.Module, x: Tensor | dict) -> tuple:
    """Equal for models of the same layers, settings and shapes, on inputs of the same shape."""
    layers = tuple(
        (name, type(module), _plain_settings(module)) for name, module in model.named_modules()
    )
    inputs = x.items() if isinstance(x, dict) else [("x", x)]
    input_specs = tuple((name, tuple(rows.shape[1:]), rows.dtype) for name, rows in inputs)
    return layers, tuple(shapes(model.state_dict()).items()), input_specs


def _plain_settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    settings = []
    for name, value in vars(module).items():
        if isinstance(value, int | float | str | tuple) and name != "training":
            settings.append((name, repr(value)))
    return tuple(sorted(settings))


def kept_units(group: ChannelGroup, ratio: float) -> int:
    """How many units of a group a submodel of that width ratio has: ceil(ratio x units)."""
    if not 0 < ratio <= 1:
        raise UserError(
            f"a submodel's width is a ratio above 0 and at most 1, got {ratio:g}: {group.name} "
            f"would have {max(0, math.ceil(ratio * group.units))} of its {group.units} units"
        )
    return math.ceil(ratio * group.units - 1e-9)


def first_units(groups: Sequence[ChannelGroup], ratio: float) -> list[Tensor]:
    """Keep the first units of every group."""
    return [torch.arange(kept_units(group, ratio)) for group in groups]


def kept_entries(
    groups: Sequence[ChannelGroup], keep: Keep, shapes: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, Tensor]]:
    """Which entries stay, by tensor and axis, for the tensors that lose some."""
    masks: dict[tuple[str, int], Tensor] = {}
    for group, units in zip(groups, keep, strict=True):
        if not len(units):
            raise UserError(
                f"no unit of {group.name} is kept, and the layer would vanish: "
                f"keep one or more of {group.units}"
            )
        removed = torch.ones(group.units, dtype=torch.bool)
        removed[units] = False
        for s in group.slices:
            full = torch.ones(shapes[s.tensor][s.axis], dtype=torch.bool)
            mask = masks.setdefault((s.tensor, s.axis), full)
            mask[s.entries[removed].flatten()] = False
    kept: dict[str, dict[int, Tensor]] = {}
    for (name, axis), mask in masks.items():
        kept.setdefault(name, {})[axis] = mask.nonzero().flatten()
    return kept


def extract(state: Mapping[str, Tensor], groups: Sequence[ChannelGroup], keep: Keep) -> State:
    """The submodel's state: the kept units' part of a full state."""
    small = dict(state)
    for name, axes in kept_entries(groups, keep, shapes(state)).items():
        for axis, entries in axes.items():
            small[name] = small[name].index_select(axis, entries.to(small[name].device))
    return small


def expand(
    small: Mapping[str, Tensor],
    groups: Sequence[ChannelGroup],
    keep: Keep,
    into: Mapping[str, Tensor],
) -> State:
    """A full state: the kept units' part from `small`, the rest from `into`. Inverts `extract`."""
    kept = kept_entries(groups, keep, shapes(into))
    full = {}
    for name, target in into.items():
        if name not in kept:
            full[name] = small[name].to(target.device, copy=True)
            continue
        index = []
        for axis, size in enumerate(target.shape):
            entries = kept[name].get(axis, torch.arange(size))
            shape = [-1 if a == axis else 1 for a in range(target.dim())]
            index.append(entries.view(shape).to(target.device))
        full[name] = target.clone()
        full[name][tuple(index)] = small[name].to(target.device, target.dtype)
    return full


def count_units(
    small: Mapping[str, Tensor], groups: Sequence[ChannelGroup], full: Mapping[str, Tensor]
) -> list[int]:
    """How many units of each group a submodel's state has, by its shapes and the full state's."""
    groups_on_axis: dict[tuple[str, int], list[int]] = {}
    for i, group in enumerate(groups):
        for s in group.slices:
            groups_on_axis.setdefault((s.tensor, s.axis), []).append(i)
    counts = []
    for i, group in enumerate(groups):
        # a slice on an axis that no other group shares
        own = next(s for s in group.slices if groups_on_axis[s.tensor, s.axis] == [i])
        removed = full[own.tensor].shape[own.axis] - small[own.tensor].shape[own.axis]
        counts.append(group.units - removed // own.entries.shape[1])
    return counts


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def reindex_groups(groups: Sequence[ChannelGroup], keep: Keep) -> list[ChannelGroup]:
    """The channel groups of the submodel that has only the kept units."""
    sizes = _axis_sizes(groups)
    new_number: dict[tuple[str, int], Tensor] = {}  # of every entry of an axis; -1: removed
    for name, axes in kept_entries(groups, keep, sizes).items():
        for axis, entries in axes.items():
            numbers = torch.full((sizes[name][axis],), -1)
            numbers[entries] = torch.arange(len(entries))
            new_number[name, axis] = numbers
    small = []
    for group, units in zip(groups, keep, strict=True):
        slices = []
        for s in group.slices:
            entries = new_number[s.tensor, s.axis][s.entries[units]]
            slices.append(AxisSlice(s.tensor, s.axis, entries, s.is_output))
        small.append(ChannelGroup(len(units), tuple(slices)))
    return small


def _axis_sizes(groups: Sequence[ChannelGroup]) -> dict[str, list[int]]:
    """Sizes of the tensors' axes as far as groups reach; 1 for axes that no group is on."""
    sizes: dict[str, list[int]] = {}
    for group in groups:
        for s in group.slices:
            own = sizes.setdefault(s.tensor, [])
            own += [1] * (s.axis + 1 - len(own))
            own[s.axis] = max(own[s.axis], 1 + int(s.entries.max()))
    return sizes


def column_scales(
    groups: Sequence[ChannelGroup], own: Sequence[ChannelGroup], state: Mapping[str, Tensor]
) -> State:
    """By how much to multiply a submodel's columns so that fewer inputs give as large a sum.

    Args:
        groups: of the full model.
        own: of the submodel.
        state: of the submodel.
    Returns: by tensor that lost columns, factors of a shape that broadcasts to it.
    """
    scales: State = {}
    for full, small in zip(groups, own, strict=True):
        if small.units == full.units:
            continue
        for s in small.slices:
            if s.is_output:
                continue
            tensor = state[s.tensor]
            factors = torch.ones(tensor.shape[s.axis], dtype=torch.float64)
            factors.index_fill_(0, s.entries.flatten(), full.units / small.units)
            factors = factors.view([-1 if a == s.axis else 1 for a in range(tensor.dim())])
            scales[s.tensor] = scales[s.tensor] * factors if s.tensor in scales else factors
    return scales


class ConstantScale(nn.Module):
    """A parametrization: the parameter is what is trained times a constant."""

    constant: Tensor

    def __init__(self, constant: Tensor):
        super().__init__()
        self.register_buffer("constant", constant)

    def forward(self, trained: Tensor) -> Tensor:
        return trained * self.constant


@contextmanager
def rescale_columns(model: nn.Module, scales: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context, train columns divided by `scales`; the model's outputs do not change.

    Its tensors stay at their addresses, so captured CUDA graphs remain valid. A tensor that two
    layers share is divided once.
    """
    divided: dict[int, tuple[Tensor, Tensor]] = {}
    registered: list[tuple[nn.Module, str, list[str]]] = []
    try:
        for path, factors in scales.items():
            owner, _, name = path.rpartition(".")
            layer = model.get_submodule(owner)
            weight = getattr(layer, name)
            scale = ConstantScale(factors.to(weight))
            order = list(layer._parameters)
            # unsafe=True skips torch's trial run
            parametrize.register_parametrization(layer, name, scale, unsafe=True)
            registered.append((layer, name, order))
            if id(weight) not in divided:
                divided[id(weight)] = weight, scale.constant
                weight.detach().div_(scale.constant)
        yield
    finally:
        for layer, name, order in reversed(registered):
            parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
            # restore the order of parameters, by which an optimizer's state is stored
            for parameter_name in order:
                layer._parameters[parameter_name] = layer._parameters.pop(parameter_name, None)
        for weight, constant in divided.values():
            weight.detach().mul_(constant)


def narrow_model(
    model: nn.Module,
    groups: Sequence[ChannelGroup],
    keep: Keep,
    x: Tensor | dict | None = None,
    fixed: Sequence[str] = (),
) -> nn.Module:
    """A new module with only the kept units.

    Args:
        x: rows for a trial pass, which finds layers that rely on their full width.
        fixed: as in `trace`.
    Raises: UserError if the trial pass fails, naming the layer.
    """
    small = copy.deepcopy(model)
    state = extract(model.state_dict(), groups, keep)
    new: dict[int, nn.Parameter] = {}  # by the old one's id: shared parameters stay shared
    for path, module in small.named_modules():
        prefix = f"{path}." if path else ""
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(old) not in new:
                tensor = state[prefix + name].clone()
                new[id(old)] = nn.Parameter(tensor, requires_grad=old.requires_grad)
            module._parameters[name] = new[id(old)]
        for name, _ in module.named_buffers(recurse=False):
            if prefix + name in state:
                module._buffers[name] = state[prefix + name].clone()
    for module in small.modules():
        update_layer_sizes(module)
    for group, units in zip(groups, keep, strict=True):
        if max(s.entries.shape[1] for s in group.slices if s.is_output) > 1:
            set_head_count(small, group, len(units))
    if x is not None:
        check_submodel(small, reindex_groups(groups, keep), x, fixed)
        full_shape = output_shape(model, x)
        if output_shape(small, x) != full_shape:
            raise UserError(
                "this model cannot be made narrower: its output would no longer be "
                f"{full_shape}. A layer reckons with its full width; let it ask its weights, or "
                "name it in `fixed`"
            )
    return small


def output_shape(model: nn.Module, x: Tensor | dict) -> tuple[int, ...] | None:
    """The shape of the output for these rows; None if it is no tensor."""
    was_training = model.training
    with torch.no_grad():
        out = model.eval()(x)
    model.train(was_training)
    return tuple(out.shape) if isinstance(out, Tensor) else None


def check_submodel(
    small: nn.Module, groups: Sequence[ChannelGroup], x: Tensor | dict, fixed: Sequence[str] = ()
) -> None:
    """Raise UserError unless tracing the submodel finds the expected channel groups.

    Groups of a single unit cannot be found by tracing and are not checked.
    """
    try:
        traced = find_channel_groups(small, x, fixed)
    except Untraceable:
        raise
    except Exception as error:
        layer = getattr(error, "layer", "")
        where = f"in layer {layer!r} " if layer else ""
        raise UserError(
            f"this model cannot be made narrower: {where}{str(error).splitlines()[0]}. That "
            "layer, or one before it, reckons with its full width or does what the tracer cannot "
            "see; let it ask its weights, or name it in `fixed`"
        ) from None
    known: set[tuple] = set()
    for group in traced:
        known.update(_slice_key(s) for s in group.slices)
    for group in groups:
        if group.units > 1 and any(_slice_key(s) not in known for s in group.slices):
            raise UserError(
                f"this model cannot be made narrower at {group.name}: its layers take the fewer "
                "units for something else. Let them ask their weights for sizes, keep a number of "
                f"heads in an attribute called {HEADS[0]}, or name it in `fixed`"
            )


def _slice_key(s: AxisSlice) -> tuple:
    return s.tensor, s.axis, tuple(s.entries.flatten().tolist())


def update_layer_sizes(module: nn.Module) -> None:
    """Set a torch layer's size attributes from the shapes of its parameters, in place."""
    weight = getattr(module, "weight", None)
    match module:
        case nn.MultiheadAttention():
            update_attention_sizes(module)
        case _ if not isinstance(weight, Tensor):
            pass
        case _ if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of GPT-2
            vars(module).update(nx=weight.shape[0], nf=weight.shape[1])
        case nn.Linear():
            module.out_features, module.in_features = weight.shape
        case nn.modules.conv._ConvTransposeNd():
            module.in_channels = weight.shape[0]
            module.out_channels = weight.shape[1] * module.groups
        case nn.modules.conv._ConvNd():
            if module.groups > 1:
                module.groups = weight.shape[0] // (module.out_channels // module.groups)
            module.out_channels = weight.shape[0]
            module.in_channels = weight.shape[1] * module.groups
        case nn.modules.batchnorm._NormBase():
            module.num_features = len(weight)
        case nn.GroupNorm():
            module.num_groups = max(1, len(weight) * module.num_groups // module.num_channels)
            module.num_channels = len(weight)
        case nn.LayerNorm() | nn.RMSNorm():
            module.normalized_shape = tuple(weight.shape)
        case nn.Embedding() | nn.EmbeddingBag():
            module.embedding_dim = weight.shape[1]


def update_attention_sizes(module: nn.MultiheadAttention) -> None:
    """Set the sizes of torch's attention from the shapes of its parameters, in place."""
    module.head_dim = module.embed_dim // module.num_heads
    projection = module.in_proj_weight
    projection = module.q_proj_weight if projection is None else projection
    module.embed_dim = module.kdim = module.vdim = projection.shape[1]
    module.num_heads = max(1, module.embed_dim // module.head_dim)


def set_head_count(model: nn.Module, group: ChannelGroup, heads: int) -> None:
    """Set the number of attention heads in modules around the group's weights that store it."""
    modules = dict(model.named_modules())
    for s in group.slices:
        if not s.is_output:
            continue
        path = s.tensor.split(".")
        for depth in range(len(path)):
            owner = modules.get(".".join(path[:depth]))
            if owner is None or isinstance(owner, nn.MultiheadAttention):
                continue
            for name in HEADS:
                if getattr(owner, name, None) == group.units:
                    setattr(owner, name, heads)
                    _set_heads_width(owner, group.units, heads)


def _set_heads_width(owner: nn.Module, units: int, heads: int) -> None:
    """Where a module keeps the width of all its heads, make it that of so many."""
    for name in HEADS_WIDTH:
        width = getattr(owner, name, None)
        if isinstance(width, int) and not isinstance(width, bool):
            setattr(owner, name, width // units * heads)
