"""Narrower versions of a model: which units to keep, the module they make, and what goes from one to the other. Knows no clients.

`keep` says for each width which units stay: a tensor of their numbers, in ascending order.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from unalike.base.errors import UserError
from unalike.models.channel_groups import AxisSlice, ChannelGroup
from unalike.models.tracing import Untraceable, trace, unfused_eval

State = dict[str, Tensor]
Keep = Sequence[Tensor]
HEADS = ("heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")


_found: dict[
    tuple, list[ChannelGroup]
] = {}  # by kind of model: tracing takes longer than all else, and clients are many


def find_channel_groups(
    model: nn.Module, x: Tensor | dict, fixed: Sequence[str] = ()
) -> list[ChannelGroup]:
    """The widths of a model (`trace`), found once for all that are built alike."""
    if (key := (kind(model, x), tuple(fixed))) not in _found:
        _found[key] = trace(model, x, fixed)
    return _found[key]


def kind(model: nn.Module, x: Tensor | dict) -> tuple:
    """Equal for models of the same layers with the same settings and shapes, on inputs of the same shape."""
    plain = lambda module: tuple(
        sorted(
            (name, repr(value))
            for name, value in vars(module).items()
            if isinstance(value, int | float | str | tuple) and name != "training"
        )
    )
    layers = tuple((name, type(module), plain(module)) for name, module in model.named_modules())
    given = x.items() if isinstance(x, dict) else [("x", x)]
    return (
        layers,
        tuple(shapes(model.state_dict()).items()),
        tuple((name, tuple(rows.shape[1:]), rows.dtype) for name, rows in given),
    )


def kept_units(width: ChannelGroup, ratio: float) -> int:
    """Units of a width at a ratio, rounded up: n_i = ceil((1 - rho) n)."""
    if not 0 < ratio <= 1:
        raise UserError(
            f"a submodel's width is a ratio above 0 and at most 1, got {ratio:g}: {width.name} would have "
            f"{max(0, math.ceil(ratio * width.units))} of its {width.units} units"
        )
    return math.ceil(ratio * width.units - 1e-9)


def first_units(widths: Sequence[ChannelGroup], ratio: float) -> list[Tensor]:
    """The first units of every width."""
    return [torch.arange(kept_units(width, ratio)) for width in widths]


def entries(
    widths: Sequence[ChannelGroup], keep: Keep, shapes: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, Tensor]]:
    """Which entries of which axes stay, for every tensor that loses some."""
    there: dict[tuple[str, int], Tensor] = {}
    for width, units in zip(widths, keep, strict=True):
        if not len(units):
            raise UserError(
                f"no unit of {width.name} is kept, and the layer would vanish: keep one or more of {width.units}"
            )
        gone = torch.ones(width.units, dtype=torch.bool)
        gone[units] = False
        for place in width.slices:
            mask = there.setdefault(
                (place.tensor, place.axis),
                torch.ones(shapes[place.tensor][place.axis], dtype=torch.bool),
            )
            mask[place.entries[gone].flatten()] = False
    left: dict[str, dict[int, Tensor]] = {}
    for (name, axis), mask in there.items():
        left.setdefault(name, {})[axis] = mask.nonzero().flatten()
    return left


def extract(state: Mapping[str, Tensor], widths: Sequence[ChannelGroup], keep: Keep) -> State:
    """The kept units' part of a state."""
    left, small = entries(widths, keep, shapes(state)), dict(state)
    for name, axes in left.items():
        for axis, chosen in axes.items():
            small[name] = small[name].index_select(axis, chosen.to(small[name].device))
    return small


def expand(
    small: Mapping[str, Tensor],
    widths: Sequence[ChannelGroup],
    keep: Keep,
    into: Mapping[str, Tensor],
) -> State:
    """A full state: the kept units' part from `small`, the rest from `into`. What `extract` took, this puts back."""
    left, full = entries(widths, keep, shapes(into)), {}
    for name, held in into.items():
        if name not in left:
            full[name] = small[name].to(held.device, copy=True)
            continue
        where = [
            left[name]
            .get(axis, torch.arange(size))
            .view([-1 if a == axis else 1 for a in range(held.dim())])
            .to(held.device)
            for axis, size in enumerate(held.shape)
        ]
        full[name] = held.clone()
        full[name][tuple(where)] = small[name].to(held.device, held.dtype)
    return full


def count_units(
    small: Mapping[str, Tensor], widths: Sequence[ChannelGroup], full: Mapping[str, Tensor]
) -> list[int]:
    """How many units of each width a submodel's state has, from its shapes and those of the full state."""
    shown: dict[tuple[str, int], list[int]] = {}
    for i, width in enumerate(widths):
        for place in width.slices:
            shown.setdefault((place.tensor, place.axis), []).append(i)
    counts = []
    for i, width in enumerate(widths):
        own = next(
            p for p in width.slices if shown[p.tensor, p.axis] == [i]
        )  # an axis that is no other's
        gone = full[own.tensor].shape[own.axis] - small[own.tensor].shape[own.axis]
        counts.append(width.units - gone // own.entries.shape[1])
    return counts


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def reindex_groups(widths: Sequence[ChannelGroup], keep: Keep) -> list[ChannelGroup]:
    """The widths of the submodel that has only the kept units."""
    sizes = {
        (p.tensor, p.axis): 1
        + int(
            max(
                q.entries.max()
                for w in widths
                for q in w.slices
                if (q.tensor, q.axis) == (p.tensor, p.axis)
            )
        )
        for width in widths
        for p in width.slices
    }
    most: dict[str, list[int]] = {}
    for (name, axis), size in sizes.items():
        its = most.setdefault(name, [])
        its += [1] * (axis + 1 - len(its))
        its[axis] = size
    rank: dict[tuple[str, int], Tensor] = {}
    for name, axes in entries(widths, keep, most).items():
        for axis, chosen in axes.items():
            rank[name, axis] = torch.full((most[name][axis],), -1)
            rank[name, axis][chosen] = torch.arange(len(chosen))
    return [
        ChannelGroup(
            len(units),
            tuple(
                AxisSlice(p.tensor, p.axis, rank[p.tensor, p.axis][p.entries[units]], p.is_output)
                for p in width.slices
            ),
        )
        for width, units in zip(widths, keep, strict=True)
    ]


def column_scales(
    widths: Sequence[ChannelGroup], own: Sequence[ChannelGroup], state: Mapping[str, Tensor]
) -> State:
    """How many times as strong the columns of a submodel must be to give as much as the full model's, for it takes in fewer units:
    by tensor, of a shape that can be multiplied with it. `own` are its widths, `state` its tensors; only those that lose columns."""
    found: State = {}
    for whole, small in zip(widths, own, strict=True):
        for place in (
            place for place in small.slices if not place.is_output and small.units < whole.units
        ):
            shape = [-1 if axis == place.axis else 1 for axis in range(state[place.tensor].dim())]
            more = torch.ones(state[place.tensor].shape[place.axis], dtype=torch.float64)
            more = more.index_fill_(0, place.entries.flatten(), whole.units / small.units).view(
                shape
            )
            found[place.tensor] = found[place.tensor] * more if place.tensor in found else more
    return found


class Times(nn.Module):
    """A parameter as a product of what is trained and a constant."""

    constant: Tensor

    def __init__(self, constant: Tensor):
        super().__init__()
        self.register_buffer("constant", constant)

    def forward(self, trained: Tensor) -> Tensor:
        return trained * self.constant


@contextmanager
def rescale_columns(model: nn.Module, column_scales: Mapping[str, Tensor]) -> Iterator[None]:
    """For a while, the model trains its columns divided by these, and computes what it did. Its tensors stay where they are, so that what
    was recorded with them goes on; one that two layers share is divided once."""
    divided: dict[int, tuple[Tensor, Tensor]] = {}
    done: list[tuple[nn.Module, str, list[str]]] = []
    try:
        for path, more in column_scales.items():
            owner, _, name = path.rpartition(".")
            layer = model.get_submodule(owner)
            weight = getattr(layer, name)
            times, order = Times(more.to(weight)), list(layer._parameters)
            parametrize.register_parametrization(
                layer, name, times, unsafe=True
            )  # unsafe: it is not tried
            done.append((layer, name, order))
            if id(weight) not in divided:
                divided[id(weight)] = weight, times.constant
                weight.detach().div_(times.constant)
        yield
    finally:
        for layer, name, order in reversed(done):
            parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
            for each in order:  # as they were: an optimizer's state is kept by their numbers
                layer._parameters[each] = layer._parameters.pop(each, None)
        for weight, constant in divided.values():
            weight.detach().mul_(constant)


def narrow_model(
    model: nn.Module,
    widths: Sequence[ChannelGroup],
    keep: Keep,
    x: Tensor | dict | None = None,
    fixed: Sequence[str] = (),
) -> nn.Module:
    """A module of its own with only the kept units. With rows `x` it is tried: a layer that reckons with the full width is named."""
    small = copy.deepcopy(model)
    state = extract(model.state_dict(), widths, keep)
    new: dict[int, nn.Parameter] = {}
    for path, module in small.named_modules():
        at = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            held = new.setdefault(
                id(parameter),
                nn.Parameter(state[at + name].clone(), requires_grad=parameter.requires_grad),
            )
            module._parameters[name] = held
        for name, _ in module.named_buffers(recurse=False):
            if at + name in state:
                module._buffers[name] = state[at + name].clone()
    for module in small.modules():
        resize(module)
    for width, units in zip(widths, keep, strict=True):
        if max(place.entries.shape[1] for place in width.slices if place.is_output) > 1:
            set_head_count(small, width, len(units))
    if x is not None:
        check_submodel(small, reindex_groups(widths, keep), x, fixed)
        if output_shape(small, x) != (full := output_shape(model, x)):
            raise UserError(
                f"this model cannot be made narrower: its output would no longer be {full}. A layer reckons with its full "
                "width; let it ask its weights, or name it in `fixed`"
            )
    return small


def output_shape(model: nn.Module, x: Tensor | dict) -> tuple[int, ...] | None:
    """The shape of the output for these rows, None where it is no tensor."""
    was = model.training
    with torch.no_grad():
        out = model.eval()(x)
    model.train(was)
    return tuple(out.shape) if isinstance(out, Tensor) else None


def check_submodel(
    small: nn.Module, widths: Sequence[ChannelGroup], x: Tensor | dict, fixed: Sequence[str] = ()
) -> None:
    """Raises a UserError unless a pass over the rows finds the widths that are to be there; of a single unit there is nothing to find."""
    try:
        found = find_channel_groups(small, x, fixed)
    except Untraceable:
        raise
    except Exception as error:
        where = f"in layer {layer!r} " if (layer := getattr(error, "layer", "")) else ""
        raise UserError(
            f"this model cannot be made narrower: {where}{str(error).splitlines()[0]}. That layer, or one before it, reckons "
            "with its full width or does what the tracer cannot see; let it ask its weights, or name it in `fixed`"
        ) from None
    there = {
        (p.tensor, p.axis, tuple(p.entries.flatten().tolist()))
        for width in found
        for p in width.slices
    }
    for width in (width for width in widths if width.units > 1):
        if any(
            (p.tensor, p.axis, tuple(p.entries.flatten().tolist())) not in there
            for p in width.slices
        ):
            raise UserError(
                f"this model cannot be made narrower at {width.name}: its layers take the fewer units for something else. Let "
                f"them ask their weights for sizes, keep a number of heads in an attribute called {HEADS[0]}, or name it in "
                "`fixed`"
            )


def resize(module: nn.Module) -> None:
    """What a layer says of itself, from the shapes of its parameters."""
    weight = getattr(module, "weight", None)
    match module:
        case nn.MultiheadAttention():
            module.head_dim, full = module.embed_dim // module.num_heads, module.in_proj_weight
            module.embed_dim = module.kdim = module.vdim = (
                full.shape[1] if full is not None else module.q_proj_weight.shape[1]
            )
            module.num_heads = max(1, module.embed_dim // module.head_dim)
        case _ if not isinstance(weight, Tensor):
            pass
        case nn.Linear():
            module.out_features, module.in_features = weight.shape
        case nn.modules.conv._ConvTransposeNd():
            module.in_channels, module.out_channels = (
                weight.shape[0],
                weight.shape[1] * module.groups,
            )
        case nn.modules.conv._ConvNd():
            if module.groups > 1:
                module.groups = weight.shape[0] // (module.out_channels // module.groups)
            module.out_channels, module.in_channels = (
                weight.shape[0],
                weight.shape[1] * module.groups,
            )
        case nn.modules.batchnorm._NormBase():
            module.num_features = len(weight)
        case nn.GroupNorm():
            if module.num_groups > 1:
                module.num_groups = len(weight) // (module.num_channels // module.num_groups)
            module.num_channels = len(weight)
        case nn.LayerNorm() | nn.RMSNorm():
            module.normalized_shape = tuple(weight.shape)
        case nn.Embedding() | nn.EmbeddingBag():
            module.embedding_dim = weight.shape[1]


def set_head_count(model: nn.Module, width: ChannelGroup, heads: int) -> None:
    """The number of heads, where a module around their weights keeps it."""
    modules = dict(model.named_modules())
    for place in width.slices:
        path = place.tensor.split(".")
        for depth in range(len(path)):
            owner = modules.get(".".join(path[:depth]))
            for name in HEADS:
                if (
                    place.is_output
                    and getattr(owner, name, None) == width.units
                    and not isinstance(owner, nn.MultiheadAttention)
                ):
                    setattr(owner, name, heads)


def measure_activity(
    model: nn.Module, widths: Sequence[ChannelGroup], batches: Iterable[Tensor | dict]
) -> list[Tensor]:
    """(units, 2) of each width: the mean of what its layer gives above 0, and the share of it that is not above 0, over some batches."""
    found = [torch.zeros(width.units, 2, dtype=torch.float64) for width in widths]
    seen = [0] * len(widths)
    hooks = []
    for i, width in enumerate(widths):
        place = next(p for p in width.slices if p.is_output)
        layer = model.get_submodule(place.tensor.rpartition(".")[0])

        def look(
            layer: nn.Module, given: Any, out: Any, i: int = i, place: AxisSlice = place
        ) -> None:
            if not isinstance(out, Tensor):
                return
            axis = 1 if isinstance(layer, nn.modules.conv._ConvNd) else -1
            rows = (
                out.detach()
                .movedim(axis, 0)[place.entries.to(out.device)]
                .flatten(1)
                .double()
                .cpu()
            )  # (units, everything of each)
            found[i] += torch.stack([rows.relu().sum(1), (rows <= 0).sum(1)], 1)
            seen[i] += rows.shape[1]

        hooks.append(layer.register_forward_hook(look))
    try:
        with unfused_eval(model), torch.no_grad():
            for x in batches:
                model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return [each / max(count, 1) for each, count in zip(found, seen, strict=True)]
