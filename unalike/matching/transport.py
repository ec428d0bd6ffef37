"""Carries the parameters of one network over to the neurons of another, layer by layer.

After OTFusion (Singh and Jaggi 2020, https://arxiv.org/abs/1910.05653). The units of a channel
group are matched by the weights that produce them, after the inputs of these weights have been
matched; then the tensors of the source are rewritten in terms of the target's units. Several pairs
of networks are matched in one batch: tensors have a leading axis `pairs`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unalike.base.types import Parameters
from unalike.matching.solvers import Solver, solve_plans
from unalike.models.channel_groups import AxisSlice, ChannelGroup

Inputs = Literal["mass", "barycentre"]
LARGE = 2**15  # entries of a tensor from which gathering copies less pair by pair
MAX_SPARSE = 16  # source units per target unit up to which a map is a sum of gathers


@dataclass
class Matcher:
    """Carries networks over to the units of others of the same kind, perhaps of other widths.

    Args:
        inputs: how columns, which take units in, are carried over. "mass": a unit's columns are
            shared out among the target units that it goes to, so a network made wider computes the
            same. "barycentre": they are averaged, as in OTFusion; outputs then grow with the ratio
            of the widths. Rows, biases and norms, which produce units, are always averaged.
        solver, entropy: of the transport plans (`solve_plans`).
        cache_size: number of pairs whose plans are kept.
    """

    inputs: Inputs = "mass"
    solver: Solver = "auto"
    entropy: float = 0.05
    cache_size: int = 256
    cache: OrderedDict[Hashable, list[Tensor]] = field(default_factory=OrderedDict)

    def transport(
        self,
        sources: Sequence[Mapping[str, Tensor]],
        targets: Sequence[Mapping[str, Tensor]],
        source_groups: Sequence[ChannelGroup],
        target_groups: Sequence[ChannelGroup],
        keys: Sequence[Hashable] | None = None,
    ) -> list[Parameters]:
        """Rewrite each source in terms of its target's units.

        Args:
            sources: parameters of networks of one shape.
            targets: as many networks, of one shape.
            source_groups, target_groups: channel groups of the two shapes, in the same order.
            keys: names of the pairs; plans of a name that is cached are not computed again.
        Returns: parameters in the shape of the targets.
        """
        cached = None
        if keys is not None and all(key in self.cache for key in keys):
            cached = [self.cache[key] for key in keys]
        alignment = Alignment(
            stack_states(sources), stack_states(targets), source_groups, target_groups, self.inputs
        )
        for i in range(len(source_groups)):
            if cached is None:
                plans = solve_plans(alignment.cost(i), self.solver, self.entropy)
            else:
                plans = torch.stack([pair_plans[i] for pair_plans in cached])
            alignment.add_plans(plans)
        for n, key in enumerate(keys or ()):
            self.cache[key] = [plans[n] for plans in alignment.plans]
            self.cache.move_to_end(key)
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)
        return unstack_state(alignment.result(), len(sources))

    def pop_reached(
        self, key: Hashable, groups: Sequence[ChannelGroup], target: Mapping[str, Tensor]
    ) -> Parameters:
        """Which entries of a target a cached plan reached; the plan is then forgotten.

        Args:
            groups: channel groups of the target.
        Returns: masks of 1 and 0, with axes of size 1 where all entries are alike.
        """
        masks: Parameters = {}
        for plan, group in zip(self.cache.pop(key), groups, strict=True):
            reached = (plan.sum(0) > 0).double().cpu()  # (units,)
            lines: dict[Hashable, Tensor] = {}  # all tensors of a norm share one
            for part in group.slices:
                tensor = target[part.tensor]
                size = tensor.shape[part.axis]
                line_key = (size, entries_key(part))
                if line_key not in lines:
                    line = torch.ones(size, dtype=torch.float64)
                    line[part.entries.flatten()] = reached.repeat_interleave(part.entries.shape[1])
                    lines[line_key] = line.to(tensor.device)
                mask = lines[line_key].view(axis_shape(part.axis, tensor.dim()))
                masks[part.tensor] = masks[part.tensor] * mask if part.tensor in masks else mask
        for name, tensor in target.items():
            if name not in masks:
                masks[name] = tensor.new_ones([1] * tensor.dim(), dtype=torch.float64)
        return {name: masks[name] for name in target}


class UnitParts(NamedTuple):
    """A plan by target unit: which source units it consists of, and how much of each."""

    unit: Tensor  # (pairs, target units, parts), padded with 0
    amount: Tensor  # same shape, padded with 0


class SlicePair(NamedTuple):
    """The entries of one channel group along one axis of a tensor, in source and target."""

    group: int  # number of the channel group
    source: AxisSlice
    target: AxisSlice


# How the entries of an axis of the target come from the source's: a matrix (pairs, size, before),
# or a sum of gathers, each an index (pairs, size) and weights (pairs, size), None for all 1.
AxisMap = Tensor | list[tuple[Tensor, Tensor | None]]


class Alignment:
    """Sources that are being rewritten in terms of their targets' units.

    Channel groups are handled in order: `cost(i)`, then `add_plans` with plans for it; `result()`
    after the last.

    Args:
        source, target: stacked parameters (pairs, ...); `source` is changed.
    """

    def __init__(
        self,
        source: Parameters,
        target: Parameters,
        source_groups: Sequence[ChannelGroup],
        target_groups: Sequence[ChannelGroup],
        inputs: Inputs,
    ):
        self.source, self.target = source, target
        self.source_groups, self.target_groups = source_groups, target_groups
        self.inputs = inputs
        self.plans: list[Tensor] = []  # by group, (pairs, source units, target units)
        self.parts: list[UnitParts] = []  # the same plans by target unit
        # (pairs, 1, 1): some unit of the target has no partner in the source.
        self.has_gaps: Tensor | None = None
        self.moved_columns: set[str] = set()  # tensors whose columns have been carried over
        self.axis_maps: dict[Hashable, AxisMap] = {}  # many axes share one
        # By tensor, and whether it produces the units or takes them in.
        self.slices: dict[tuple[str, bool], list[SlicePair]] = {}
        for j, (before, after) in enumerate(zip(source_groups, target_groups, strict=True)):
            for a, b in zip(before.slices, after.slices, strict=True):
                self.slices.setdefault((a.tensor, a.is_output), []).append(SlicePair(j, a, b))

    def add_plans(self, plans: Tensor) -> None:
        """Add the plans (pairs, source units, target units) of the next channel group."""
        gaps = (plans.sum(1) == 0).any(1)[:, None, None]
        if self.has_gaps is not None:
            gaps = self.has_gaps | gaps.to(self.has_gaps.device)
        self.has_gaps = gaps
        self.plans.append(plans)
        self.parts.append(split_plans(plans))

    def cost(self, i: int) -> Tensor:
        """Distances of units of channel group i, (pairs, source units, target units).

        Units are compared by the weights and biases that produce them, of layers whose inputs are
        all matched already; a residual stream is thus matched where it begins.
        """
        own_rows: list[Tensor] = []
        other_rows: list[Tensor] = []
        for name in producing_tensors(self.source_groups[i], self.source):
            columns = self.slices.get((name, False), [])
            if any(pair.group >= len(self.plans) for pair in columns):
                continue
            self.move_columns(name)
            for pair in self.slices[name, True]:
                if pair.group == i:
                    rows = unit_rows(self.source[name], pair.source)
                    own_rows.append(rows)
                    other_rows.append(unit_rows(self.target[name], pair.target).to(rows.device))
        if not own_rows:
            pairs = len(next(iter(self.source.values())))
            return torch.zeros(pairs, self.source_groups[i].units, self.target_groups[i].units)
        own, other = torch.cat(own_rows, 2), torch.cat(other_rows, 2)
        if self.has_gaps is not None:
            # Inputs that have no partner in the source say nothing about its units.
            other = other * ((own != 0).any(1, keepdim=True) | ~self.has_gaps.to(own.device))
        return torch.cdist(own, other)

    def result(self) -> Parameters:
        """The sources in terms of the targets' units."""
        for name in self.source:
            self.move_columns(name)
            self.move(name, is_output=True)
        return self.source

    def move_columns(self, name: str) -> None:
        """Carry a tensor's columns over, once."""
        if name not in self.moved_columns:
            self.moved_columns.add(name)
            self.move(name, is_output=False)

    def move(self, name: str, is_output: bool) -> None:
        """Carry over the axes of a tensor that hold units which it produces or takes in."""
        pairs = self.slices.get((name, is_output), [])
        for axis in sorted({pair.source.axis for pair in pairs}):
            on_axis = [pair for pair in pairs if pair.source.axis == axis]
            tensor = self.source[name]
            before, size = tensor.shape[axis + 1], self.target[name].shape[axis + 1]
            entries = [
                (pair.group, entries_key(pair.source), entries_key(pair.target)) for pair in on_axis
            ]
            key = (is_output, before, size, tensor.dtype, *entries)
            if key not in self.axis_maps:
                self.axis_maps[key] = self.build_axis_map(on_axis, is_output, before, size, tensor)
            self.source[name] = apply_axis_map(tensor, axis, self.axis_maps[key])

    def build_axis_map(
        self, pairs: Sequence[SlicePair], is_output: bool, before: int, size: int, like: Tensor
    ) -> AxisMap:
        """Where every entry of an axis of the target comes from.

        Entries that belong to no unit keep their order.

        Args:
            before, size: length of the axis in the source and in the target.
            like: a tensor with the device and dtype of the map.
        """
        count = len(self.parts[pairs[0].group].unit)
        most = max(self.parts[pair.group].unit.shape[2] for pair in pairs)
        index = torch.zeros(count, most, size, dtype=torch.int64)
        weight = torch.zeros(count, most, size, dtype=torch.float64)
        free_before = torch.ones(before, dtype=torch.bool)
        free_after = torch.ones(size, dtype=torch.bool)
        for group, source, target in pairs:
            parts = self.parts[group]
            slots, entries_per_unit = parts.unit.shape[2], target.entries.shape[1]
            to = target.entries.flatten()
            free_before[source.entries.flatten()] = False
            free_after[to] = False
            index[:, :slots, to] = source.entries[parts.unit].transpose(1, 2).flatten(2)
            amount = (self.plan_scale(group, is_output) * parts.amount.double()).mT
            weight[:, :slots, to] = amount.repeat_interleave(entries_per_unit, 2)
        index[:, 0, free_after] = free_before.nonzero().flatten()
        weight[:, 0, free_after] = 1.0
        if most > MAX_SPARSE:
            matrix = torch.zeros(count, size, before, dtype=torch.float64)
            return matrix.scatter_add_(2, index.mT, weight.mT).to(like)
        is_one = [bool(((part - 1).abs() <= 1e-12).all()) for part in weight.transpose(0, 1)]
        index, weight = index.to(like.device), weight.to(like)
        return [(index[:, n], None if one else weight[:, n]) for n, one in enumerate(is_one)]

    def plan_scale(self, i: int, is_output: bool) -> int:
        """The factor that makes a plan's columns sum to 1 or, for shared-out inputs, its rows."""
        if self.inputs == "mass" and not is_output:
            return self.source_groups[i].units
        return self.target_groups[i].units


def entries_key(part: AxisSlice) -> bytes:
    """Equal for slices whose units have the same entries."""
    return bytes(str(part.entries.shape[1]), "ascii") + part.entries.numpy().tobytes()


def stack_states(states: Sequence[Mapping[str, Tensor]]) -> Parameters:
    """Parameters of several networks with a leading axis for the networks."""
    stacked = {}
    for name in states[0]:
        stacked[name] = torch.stack([state[name] for state in states])
    return stacked


def unstack_state(stacked: Parameters, count: int) -> list[Parameters]:
    """Parameters of each of several stacked networks."""
    states = []
    for n in range(count):
        states.append({name: tensor[n] for name, tensor in stacked.items()})
    return states


def axis_shape(axis: int, dim: int) -> list[int]:
    """A shape that lets a vector broadcast along one axis of a tensor."""
    return [-1 if a == axis else 1 for a in range(dim)]


def split_plans(plans: Tensor) -> UnitParts:
    """The nonzero entries of plans (pairs, n, m) by target unit; an exact plan has few."""
    plans = plans.cpu()
    pair, to, source = plans.mT.nonzero().T
    units = len(plans) * plans.shape[2]  # target units of all pairs, numbered
    unit = pair * plans.shape[2] + to
    # Position of every entry among those of its unit; `unit` is sorted.
    slot = torch.arange(len(unit)) - torch.searchsorted(unit, torch.arange(units))[unit]
    slots = int(slot.max()) + 1
    index = torch.zeros(units, slots, dtype=torch.int64)
    amount = torch.zeros(units, slots, dtype=plans.dtype)
    index[unit, slot] = source
    amount[unit, slot] = plans[pair, source, to]
    return UnitParts(index.unflatten(0, (len(plans), -1)), amount.unflatten(0, (len(plans), -1)))


def unit_rows(tensor: Tensor, part: AxisSlice) -> Tensor:
    """Everything in a stacked tensor that belongs to each unit, (pairs, units, numbers)."""
    return tensor.movedim(part.axis + 1, 1)[:, part.entries.to(tensor.device)].flatten(2)


def producing_tensors(group: ChannelGroup, stacked: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors by which units are compared: weights that produce them, and biases.

    Norms are left out, unless there is nothing else: they say nothing about which unit is which.
    """
    names = dict.fromkeys(part.tensor for part in group.slices if part.is_output)
    # A vector has two axes here, the first for the pairs.
    weights = [name for name in names if stacked[name].dim() > 2]
    if not weights:
        return list(names)
    layers = {name.rpartition(".")[0] for name in weights}
    return [name for name in names if name in weights or name.rpartition(".")[0] in layers]


def apply_axis_map(tensor: Tensor, axis: int, axis_map: AxisMap) -> Tensor:
    """Stacked tensors (pairs, ...) with the entries of one axis mapped."""
    if isinstance(axis_map, Tensor):
        rows = tensor.movedim(axis + 1, 1)
        mapped = axis_map @ rows.reshape(*rows.shape[:2], -1)
        return mapped.reshape(*axis_map.shape[:2], *rows.shape[2:]).movedim(1, axis + 1)
    shape = axis_shape(axis, tensor.dim() - 1)
    total: Tensor | None = None
    for index, weight in axis_map:
        rows = gather_axis(tensor, axis, index)
        if weight is not None:
            rows = rows.mul_(weight.view(len(tensor), *shape))
        total = rows if total is None else total.add_(rows)
    assert total is not None
    return total


def gather_axis(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    """Entries `index` (pairs, size) along one axis of stacked tensors (pairs, ...)."""
    shape = [*tensor.shape]
    shape[axis + 1] = index.shape[1]
    if tensor[0].numel() <= LARGE:
        line = index.view(len(index), *axis_shape(axis, tensor.dim() - 1))
        return tensor.gather(axis + 1, line.expand(shape))
    out = tensor.new_empty(shape)
    for source, chosen, result in zip(tensor, index, out, strict=True):
        torch.index_select(source, axis, chosen, out=result)
    return out
