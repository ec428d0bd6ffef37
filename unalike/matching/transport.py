"""One network's parameters in the places of another's neurons, layer by layer. Knows widths (where units show), no architectures."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unalike.matching.solvers import Solver, plans

if TYPE_CHECKING:
    from unalike.models.channel_groups import AxisSlice, ChannelGroup

State = dict[str, Tensor]
Inputs = Literal["mass", "barycentre"]
LARGE = 2**15  # entries of a tensor


@dataclass
class Matcher:
    """Carries networks over to the units of others, of the same kind but perhaps of other widths.

    What makes a unit (rows, bias, norm) becomes the mean of the source's units that go there. What takes units in (columns) is by `inputs`
    shared out among the units that its source goes to ("mass": a network made wider so computes the same), or becomes their mean, as in
    OTFusion ("barycentre": outputs then grow with the ratio of the widths).
    """

    inputs: Inputs = "mass"
    solver: Solver = "auto"
    share: float = 0.05  # of the median cost, for entropic plans
    holds: int = 256  # plans of so many pairs are kept
    known: OrderedDict[Hashable, list[Tensor]] = field(default_factory=OrderedDict)

    def carry(
        self,
        sources: Sequence[Mapping[str, Tensor]],
        targets: Sequence[Mapping[str, Tensor]],
        source_widths: Sequence["ChannelGroup"],
        target_widths: Sequence["ChannelGroup"],
        keys: Sequence[Hashable] | None = None,
    ) -> list[State]:
        """Each source in the places of its target's units, all of the same two shapes; several are matched at once.

        With `keys`, a plan for the same key is not made again.
        """
        found = (
            [self.known[key] for key in keys]
            if keys is not None and all(key in self.known for key in keys)
            else None
        )
        pairs = Pairs(stacked(sources), stacked(targets), source_widths, target_widths, self.inputs)
        for i in range(len(source_widths)):
            pairs.add(
                plans(pairs.cost(i), self.solver, self.share)
                if found is None
                else torch.stack([each[i] for each in found])
            )
        for n, key in enumerate(keys or ()):
            self.known[key] = [plan[n] for plan in pairs.plans]
            self.known.move_to_end(key)
        while len(self.known) > self.holds:
            self.known.popitem(last=False)
        made = pairs.result()
        return [{name: tensor[n] for name, tensor in made.items()} for n in range(len(sources))]

    def reached(
        self, key: Hashable, widths: Sequence["ChannelGroup"], target: Mapping[str, Tensor]
    ) -> State:
        """Which entries of a target got something by a plan that is known, and is forgotten with that: 1 or 0, with axes of size 1 where
        all are alike."""
        found: State = {}
        for plan, width in zip(self.known.pop(key), widths, strict=True):
            there, lines = (plan.sum(0) > 0).double().cpu(), {}
            for place in width.slices:
                tensor = target[place.tensor]
                if (
                    form := (tensor.shape[place.axis], spelled(place))
                ) not in lines:  # norms' tensors are all alike
                    line = torch.ones(tensor.shape[place.axis], dtype=torch.float64)
                    line[place.entries.flatten()] = there.repeat_interleave(place.entries.shape[1])
                    lines[form] = line.to(tensor.device)
                mask = lines[form].view(
                    [-1 if axis == place.axis else 1 for axis in range(tensor.dim())]
                )
                found[place.tensor] = found[place.tensor] * mask if place.tensor in found else mask
        return {
            name: found[name]
            if name in found
            else tensor.new_ones([1] * tensor.dim(), dtype=torch.float64)
            for name, tensor in target.items()
        }


@dataclass
class Pairs:
    """Sources on their way to targets: tensors (pairs, ...), and the plans (pairs, units of the source, of the target) found so far."""

    source: State
    target: State
    source_widths: Sequence["ChannelGroup"]
    target_widths: Sequence["ChannelGroup"]
    inputs: Inputs

    def __post_init__(self) -> None:
        self.plans: list[Tensor] = []
        self.gaps: Tensor | None = (
            None  # (pairs, 1, 1): some unit of the target has none of the source
        )
        self.parts: list[Parts] = []
        self.taken: set[str] = set()  # tensors whose columns have been carried over
        self.maps: dict[Hashable, Map] = {}  # of axes, many of which are alike
        self.slices: dict[
            tuple[str, bool], list[Shown]
        ] = {}  # by tensor, and whether it makes the units
        for j, (of, to) in enumerate(zip(self.source_widths, self.target_widths, strict=True)):
            for a, b in zip(of.slices, to.slices, strict=True):
                self.slices.setdefault((a.tensor, a.is_output), []).append((j, a, b))

    def add(self, plan: Tensor) -> None:
        empty = (plan.sum(1) == 0).any(1)[:, None, None]
        self.gaps = empty if self.gaps is None else self.gaps | empty.to(self.gaps.device)
        self.plans.append(plan)
        self.parts.append(parts(plan))

    def cost(self, i: int) -> Tensor:
        """(pairs, units, units): how far each unit of a source is from each of its target, by the weights that make them and their biases,
        as far as all they take in is matched already (a residual stream is matched where it begins)."""
        rows: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name in neurons(self.source_widths[i], self.source):
            if any(j >= len(self.plans) for j, _, _ in self.slices.get((name, False), ())):
                continue
            self.take(name)
            for j, of, to in self.slices[name, True]:
                if j == i:
                    rows[0].append(units(self.source[name], of))
                    rows[1].append(units(self.target[name], to).to(self.source[name].device))
        if not rows[0]:
            return torch.zeros(
                len(next(iter(self.source.values()))),
                self.source_widths[i].units,
                self.target_widths[i].units,
            )
        own, other = torch.cat(rows[0], 2), torch.cat(rows[1], 2)
        if self.gaps is not None:  # what the source takes nothing in from tells nothing
            other = other * ((own != 0).any(1, keepdim=True) | ~self.gaps.to(own.device))
        return torch.cdist(own, other)

    def take(self, name: str) -> None:
        """Carry a tensor's columns over, once."""
        if name not in self.taken:
            self.taken.add(name)
            self.move(name, made=False)

    def result(self) -> State:
        for name in self.source:
            self.take(name)
            self.move(name, made=True)
        return self.source

    def move(self, name: str, made: bool) -> None:
        here = self.slices.get((name, made), [])
        for axis in sorted({of.axis for _, of, _ in here}):
            shown = [each for each in here if each[1].axis == axis]
            tensor, size = self.source[name], self.target[name].shape[axis + 1]
            key = (
                made,
                tensor.shape[axis + 1],
                size,
                tensor.dtype,
                *((j, spelled(of), spelled(to)) for j, of, to in shown),
            )
            if key not in self.maps:
                parts = [
                    (self.parts[j], self.scale(j, made), of.entries, to.entries)
                    for j, of, to in shown
                ]
                self.maps[key] = mapped(parts, tensor.shape[axis + 1], size, tensor)
            self.source[name] = along(tensor, axis, self.maps[key])

    def scale(self, i: int, made: bool) -> int:
        """What makes columns of a plan sum to 1, or its rows."""
        return (
            self.source_widths[i].units
            if self.inputs == "mass" and not made
            else self.target_widths[i].units
        )


Shown = tuple[
    int, "AxisSlice", "AxisSlice"
]  # which width, where in the source, where in the target
Parts = tuple[
    Tensor, Tensor
]  # of each unit of a target: which of the source's, how much of each; (pairs, units, most)
Map = (
    Tensor | list[tuple[Tensor, Tensor | None]]
)  # (pairs, size, before); or sums of entries (pairs, size) by weights, None: 1


def spelled(place: "AxisSlice") -> bytes:
    """Equal where units have the same entries."""
    return bytes(str(place.entries.shape[1]), "ascii") + place.entries.numpy().tobytes()


def stacked(states: Sequence[Mapping[str, Tensor]]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def parts(plan: Tensor) -> Parts:
    """The entries of plans (pairs, n, m) that are not 0, by column: an exact one has few."""
    plan = plan.cpu()
    pair, to, of = plan.mT.nonzero().T
    column = pair * plan.shape[2] + to
    slot = (
        torch.arange(len(column))
        - torch.searchsorted(column, torch.arange(len(plan) * plan.shape[2]))[column]
    )
    which, much = (
        torch.zeros(len(plan) * plan.shape[2], int(slot.max()) + 1, dtype=kind)
        for kind in (torch.int64, plan.dtype)
    )
    which[column, slot], much[column, slot] = of, plan[pair, of, to]
    return which.unflatten(0, (len(plan), -1)), much.unflatten(0, (len(plan), -1))


def units(tensor: Tensor, place: "AxisSlice") -> Tensor:
    """(pairs, units, everything in the tensor that is of each)."""
    return tensor.movedim(place.axis + 1, 1)[:, place.entries.to(tensor.device)].flatten(2)


def neurons(width: "ChannelGroup", state: Mapping[str, Tensor]) -> list[str]:
    """Tensors that make the units of a width: weights, and biases beside them; norms go with their channel and tell nothing.
    Of several networks at once: a vector has two axes here."""
    made = dict.fromkeys(place.tensor for place in width.slices if place.is_output)
    weights = [name for name in made if state[name].dim() > 2]
    layers = {name.rpartition(".")[0] for name in weights}
    return (
        [name for name in made if name in weights or name.rpartition(".")[0] in layers]
        if weights
        else list(made)
    )


def mapped(
    maps: Sequence[tuple[Parts, int, Tensor, Tensor]], before: int, size: int, like: Tensor
) -> Map:
    """Where each entry of an axis of a target comes from: parts of units, their scale, entries in source and in target; others stay."""
    pairs, most = len(maps[0][0][0]), max(which.shape[2] for (which, _), _, _, _ in maps)
    index, weight = (
        torch.zeros(pairs, most, size, dtype=torch.int64),
        torch.zeros(pairs, most, size, dtype=torch.float64),
    )
    free, there = torch.ones(before, dtype=torch.bool), torch.ones(size, dtype=torch.bool)
    for (which, much), scale, of, to in maps:
        free[of.flatten()] = there[to.flatten()] = False
        count, each = which.shape[2], to.shape[1]
        index[:, :count, to.flatten()] = of[which].transpose(1, 2).flatten(2)
        weight[:, :count, to.flatten()] = (scale * much.double()).mT.repeat_interleave(each, 2)
    index[:, 0, there], weight[:, 0, there] = free.nonzero().flatten(), 1.0
    if most > 16:  # a dense plan: one product
        return (
            torch.zeros(pairs, size, before, dtype=torch.float64)
            .scatter_add_(2, index.mT, weight.mT)
            .to(like)
        )
    plain = [bool(((part - 1).abs() <= 1e-12).all()) for part in weight.transpose(0, 1)]
    index, weight = index.to(like.device), weight.to(like)
    return [(index[:, n], None if as_is else weight[:, n]) for n, as_is in enumerate(plain)]


def along(tensor: Tensor, axis: int, how: Map) -> Tensor:
    """Tensors (pairs, ...) with the entries of one axis mapped."""
    if isinstance(how, Tensor):
        rows = tensor.movedim(axis + 1, 1)
        return (
            (how @ rows.reshape(*rows.shape[:2], -1))
            .reshape(*how.shape[:2], *rows.shape[2:])
            .movedim(1, axis + 1)
        )
    shape = [-1 if a == axis else 1 for a in range(tensor.dim() - 1)]
    out: Tensor | None = None
    for index, weight in how:
        rows = entries(tensor, axis, index, shape)
        rows = rows if weight is None else rows.mul_(weight.view(len(tensor), *shape))
        out = rows if out is None else out.add_(rows)
    assert out is not None
    return out


def entries(tensor: Tensor, axis: int, index: Tensor, shape: Sequence[int]) -> Tensor:
    """Of each of (pairs, ...) the entries (pairs, size) of an axis: at once where calls cost more than copying."""
    whole = [*tensor.shape]
    whole[axis + 1] = index.shape[1]
    if tensor[0].numel() <= LARGE:
        return tensor.gather(axis + 1, index.view(len(index), *shape).expand(whole))
    out = tensor.new_empty(whole)
    for each, chosen, place in zip(tensor, index, out, strict=True):
        torch.index_select(each, axis, chosen, out=place)
    return out
