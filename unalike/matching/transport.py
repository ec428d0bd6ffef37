"""One network's parameters in the places of another's neurons, layer by layer. Knows widths (where units show), no architectures."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unalike.matching.solvers import Solver, plans

if TYPE_CHECKING:
    from unalike.models.widths import Place, Width

State = dict[str, Tensor]
Inputs = Literal["mass", "barycentre"]


@dataclass
class Matcher:
    """Carries networks over to the units of others, of the same kind but perhaps of other widths.

    What makes a unit (rows, bias, norm) becomes the mean of the source's units that go there. What takes units in (columns) is by `inputs`
    shared out among the units that its source goes to ("mass": a network made wider so computes the same), or becomes their mean, as in
    OTFusion ("barycentre": outputs then grow with the ratio of the widths).
    """

    inputs: Inputs = "mass"
    solver: Solver = "auto"
    share: float = 0.05                 # of the median cost, for entropic plans
    holds: int = 256                    # plans of so many pairs are kept
    known: OrderedDict[Hashable, list[Tensor]] = field(default_factory=OrderedDict)

    def carry(self, sources: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]], source_widths: Sequence["Width"],
              target_widths: Sequence["Width"], keys: Sequence[Hashable] | None = None) -> list[State]:
        """Each source in the places of its target's units, all of the same two shapes; several are matched at once.

        With `keys`, a plan for the same key is not made again.
        """
        found = [self.known[key] for key in keys] if keys is not None and all(key in self.known for key in keys) else None
        pairs = [Pair(dict(source), target, source_widths, target_widths, self.inputs)
                 for source, target in zip(sources, targets, strict=True)]
        for i in range(len(source_widths)):
            if found is None:
                costs = torch.stack([pair.cost(i) for pair in pairs])
                made: Sequence[Tensor] = list(plans(costs, self.solver, self.share))
            else:
                made = [each[i] for each in found]
            for pair, plan in zip(pairs, made, strict=True):
                pair.add(plan)
        for key, pair in zip(keys or (), pairs):
            self.known[key] = pair.plans
            self.known.move_to_end(key)
        while len(self.known) > self.holds:
            self.known.popitem(last=False)
        return [pair.result() for pair in pairs]


@dataclass
class Pair:
    """A source on its way to a target: its tensors, and the plans (units of the source, of the target) found so far."""

    source: State
    target: Mapping[str, Tensor]
    source_widths: Sequence["Width"]
    target_widths: Sequence["Width"]
    inputs: Inputs

    def __post_init__(self) -> None:
        self.plans: list[Tensor] = []
        self.gaps = False                                               # some unit of the target has none of the source
        self.parts: list[Parts] = []
        self.taken: set[str] = set()                                    # tensors whose columns have been carried over
        self.places: dict[tuple[str, bool], list[Shown]] = {}           # by tensor, and whether it makes the units
        for j, (of, to) in enumerate(zip(self.source_widths, self.target_widths, strict=True)):
            for a, b in zip(of.places, to.places, strict=True):
                self.places.setdefault((a.tensor, a.made), []).append((j, a, b))

    def add(self, plan: Tensor) -> None:
        self.plans.append(plan)
        self.gaps |= bool((plan.sum(0) == 0).any())
        self.parts.append(parts(plan))

    def cost(self, i: int) -> Tensor:
        """(units, units): how far each unit of the source is from each of the target, by the weights that make them and their biases,
        as far as all they take in is matched already (a residual stream is matched where it begins)."""
        rows: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name in neurons(self.source_widths[i], self.source):
            if any(j >= len(self.plans) for j, _, _ in self.places.get((name, False), ())):
                continue
            self.take(name)
            for j, of, to in self.places[name, True]:
                if j == i:
                    rows[0].append(units(self.source[name], of))
                    rows[1].append(units(self.target[name], to).to(self.source[name].device))
        if not rows[0]:
            return torch.zeros(self.source_widths[i].units, self.target_widths[i].units)
        own, other = torch.cat(rows[0], 1), torch.cat(rows[1], 1)
        if self.gaps:                                                   # what the source takes nothing in from tells nothing
            other = other * (own != 0).any(0)
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
        here = self.places.get((name, made), [])
        for axis in sorted({of.axis for _, of, _ in here}):
            maps = [(self.parts[j], self.scale(j, made), of.entries, to.entries) for j, of, to in here if of.axis == axis]
            self.source[name] = along(self.source[name], axis, maps, self.target[name].shape[axis])

    def scale(self, i: int, made: bool) -> int:
        """What makes columns of a plan sum to 1, or its rows."""
        return self.source_widths[i].units if self.inputs == "mass" and not made else self.target_widths[i].units


Shown = tuple[int, "Place", "Place"]         # which width, where in the source, where in the target
Parts = tuple[Tensor, Tensor]                # of each unit of a target: which of the source's, and how much of each; (units, most parts)


def parts(plan: Tensor) -> Parts:
    """The entries of a plan (n, m) that are not 0, by column: an exact one has few."""
    to, of = plan.T.cpu().nonzero().T
    first = torch.searchsorted(to, torch.arange(plan.shape[1]))
    slot = torch.arange(len(to)) - first[to]
    which, much = (torch.zeros(plan.shape[1], int(slot.max()) + 1, dtype=kind) for kind in (torch.int64, plan.dtype))
    which[to, slot], much[to, slot] = of, plan.cpu()[of, to]
    return which, much


def units(tensor: Tensor, place: "Place") -> Tensor:
    """(units, everything in the tensor that is of each)."""
    return tensor.movedim(place.axis, 0)[place.entries.to(tensor.device)].flatten(1)


def neurons(width: "Width", state: Mapping[str, Tensor]) -> list[str]:
    """Tensors that make the units of a width: weights, and biases beside them; norms go with their channel and tell nothing."""
    made = dict.fromkeys(place.tensor for place in width.places if place.made)
    weights = [name for name in made if state[name].dim() > 1]
    layers = {name.rpartition(".")[0] for name in weights}
    return [name for name in made if name in weights or name.rpartition(".")[0] in layers] if weights else list(made)


def along(tensor: Tensor, axis: int, maps: Sequence[tuple[Parts, int, Tensor, Tensor]], size: int) -> Tensor:
    """A tensor with the units of one axis mapped: parts, their scale, entries of the units in source and in target; others stay."""
    most = max(which.shape[1] for (which, _), _, _, _ in maps)
    index, weight = torch.zeros(most, size, dtype=torch.int64), torch.zeros(most, size, dtype=torch.float64)
    free, there = torch.ones(tensor.shape[axis], dtype=torch.bool), torch.ones(size, dtype=torch.bool)
    for (which, much), scale, of, to in maps:
        free[of.flatten()] = there[to.flatten()] = False
        count, each = which.shape[1], to.shape[1]
        index[:count, to.flatten()] = of[which].permute(1, 0, 2).flatten(1)
        weight[:count, to.flatten()] = (scale * much.double()).T.repeat_interleave(each, 1)
    index[0, there], weight[0, there] = free.nonzero().flatten(), 1.0
    if most > 16:                                                           # a dense plan: one product
        matrix = torch.zeros(size, tensor.shape[axis], dtype=torch.float64).scatter_add_(1, index.T, weight.T).to(tensor)
        return torch.tensordot(matrix, tensor, ([1], [axis])).movedim(0, axis)
    out: Tensor | None = None
    shape = [-1 if a == axis else 1 for a in range(tensor.dim())]
    for chosen, part in zip(index, weight, strict=True):
        rows = tensor.index_select(axis, chosen.to(tensor.device))
        if not torch.allclose(part, torch.ones_like(part), rtol=0, atol=1e-12):
            rows *= part.to(tensor).view(shape)
        out = rows if out is None else out.add_(rows)
    return tensor if out is None else out
