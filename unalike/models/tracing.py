"""What is tied to what in a network, found by watching one forward pass. Knows tensors and operations, no architectures.

Every entry of a parameter's axis gets a number, and every activation carries the number of the channel it is; whatever moves data moves
the numbers alike. Where two meet (a sum, a norm, the rows a weight takes in) they are one channel; where they must go together (the
channels of a head, of a group) they are one unit. Units that show in the same places are one width of the network.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unalike.base.errors import UserError
from unalike.models.channel_groups import (
    FIXED,
    NONE,
    AxisSlice,
    ChannelGroup,
    components,
    pairs,
    varies,
)


class Untraceable(UserError):
    """An operation that cannot be followed."""


MOVES = {
    "permute",
    "transpose",
    "t",
    "expand",
    "slice",
    "select",
    "squeeze",
    "unsqueeze",
    "cat",
    "stack",
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "index",
    "index_select",
    "narrow",
    "flip",
    "roll",
    "repeat",
    "unfold",
    "numpy_T",
    "movedim",
    "diagonal",
}
SAME = {
    "clone",
    "detach",
    "alias",
    "contiguous",
    "_to_copy",
    "lift_fresh",
    "_softmax",
    "_log_softmax",
    "softmax",
    "native_dropout",
    "bernoulli",
    "cumsum",
    "dropout",
    "_conj",
    "bernoulli_",
    "_safe_softmax",
}
SHAPES = {"view", "_unsafe_view", "_reshape_alias", "reshape"}
REDUCES = {
    "mean": 1,
    "sum": 1,
    "amax": 1,
    "amin": 1,
    "max": 1,
    "min": 1,
    "var": 1,
    "std": 1,
    "var_mean": 1,
    "logsumexp": 1,
    "prod": 1,
    "linalg_vector_norm": 2,
    "norm": 2,
}
POOLS = {
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "avg_pool1d",
    "adaptive_avg_pool1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "reflection_pad2d",
    "replication_pad2d",
    "grid_sampler_2d",
}
BATCH_NORMS = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_batch_norm_with_update",
    "batch_norm",
}
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "scaled_dot_product_attention",
}


def trace(model: nn.Module, x: Tensor | dict, fixed: Sequence[str] = ()) -> list[ChannelGroup]:
    """The widths of a model, in the order in which a pass over the rows `x` makes them; modules named in `fixed` stay as they are.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [(w.units, [(p.tensor, p.axis, p.is_output) for p in w.places]) for w in trace(net, torch.zeros(2, 3))]
    [(8, [('0.weight', 0, True), ('0.bias', 0, True), ('2.weight', 1, False)])]
    """
    follower = Follower(model.state_dict(keep_vars=True))
    with unfused_eval(model), follower.watching(model, fixed), follower, torch.no_grad():
        follower.hold(x, FIXED)
        out = model(x)
    for tensor in tree_leaves(out):
        if isinstance(tensor, Tensor):
            follower.fix(follower.channel(tensor))
    return follower.widths()


@contextmanager
def unfused_eval(model: nn.Module) -> Iterator[None]:
    """Evaluation, operation by operation: torch's attention has a shortcut that does everything in one."""
    was, fast = model.training, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        yield
    finally:
        model.train(was)
        torch.backends.mha.set_fastpath_enabled(fast)


class Follower(TorchDispatchMode):
    """Carries numbers along with tensors. `labels` of an activation are one tensor of its shape, of a parameter one for each axis."""

    def __init__(self, state: dict[str, Tensor]):
        super().__init__()
        self.labels: dict[int, list[Tensor]] = {}
        self.held: list[Tensor] = []  # an id is a tensor's only as long as it lives
        self.blocks: list[tuple[list[str], int, int, int]] = []  # names, axis, first number, length
        self.made: dict[int, float] = {}  # blocks that make channels, and when first
        self.taken: set[int] = set()  # blocks that take channels in
        self.same: list[Tensor] = []  # pairs (2, n) of numbers that are one channel
        self.together: list[Tensor] = []  # pairs that stay or go together
        self.stay: list[Tensor] = []
        self.layer, self.blind, self.clock, count = [""], 0, 0, 1
        known: dict[int, int] = {}
        for name, tensor in state.items():
            if tensor.dim() and id(tensor) not in self.labels:
                known[id(tensor)], its = len(self.blocks), []
                for axis, size in enumerate(tensor.shape):
                    shape = [size if a == axis else 1 for a in range(tensor.dim())]
                    its.append(torch.arange(count, count + size).view(shape).expand(tensor.shape))
                    self.blocks.append(([name], axis, count, size))
                    count += size
                self.put(tensor, *its)
            elif tensor.dim():  # one tensor under two names
                for axis in range(tensor.dim()):
                    self.blocks[known[id(tensor)] + axis][0].append(name)
        self.count = count
        self.starts = torch.tensor([first for _, _, first, _ in self.blocks])

    # the pass

    @contextmanager
    def watching(self, model: nn.Module, keep: Sequence[str]) -> Iterator[None]:
        """Knows which layer is at work, for what is told; sees nothing inside those that stay as they are."""
        modules = dict(model.named_modules())
        if strange := [name for name in keep if name not in modules]:
            raise UserError(
                f"there is no layer {strange[0]!r} to keep; there are: {', '.join(name for name in modules if name)}"
            )
        hooks = []
        for name, module in modules.items():

            def enters(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
                self.layer.append(name)
                self.blind += name in keep
                if name in keep:
                    for tensor in tree_leaves((args, kwargs)):
                        if isinstance(tensor, Tensor):
                            self.fix(self.channel(tensor))

            def leaves(module: nn.Module, args: tuple, out: Any, name: str = name) -> None:
                self.layer.pop()
                self.blind -= name in keep
                if name in keep:
                    self.hold(out, FIXED)

            hooks += [
                module.register_forward_pre_hook(enters, with_kwargs=True),
                module.register_forward_hook(leaves),
            ]
        try:
            yield
        except Exception as error:
            error.layer = self.layer[-1]  # type: ignore[attr-defined]     # where it was, for what is told
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not self.blind and any(id(t) in self.labels for t in tensors):
            self.clock += 1
            self.follow(func, args, kwargs or {}, tensors, out)
        return out

    def follow(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], out: Any) -> None:
        name = func.overloadpacket.__name__
        plain = name if name in SAME else name.rstrip("_") if not name.endswith("__") else name
        first = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(first, Tensor):
            return
        if plain in SHAPES:
            self.put(out, *(label.reshape(out.shape) for label in self.of(args[0])))
        elif plain in MOVES:
            self.move(func, args, kwargs, out)
        elif plain == "constant_pad_nd":
            self.put(out, func(self.channel(args[0]), args[1], NONE))
        elif plain in REDUCES:
            self.put(first, self.reduce(args, kwargs, REDUCES[plain]).reshape(first.shape))
        elif plain in POOLS:
            self.put(first, self.spread(self.channels(args[0]), first))
        elif plain == "mm":
            self.multiply(args[0], args[1], None, first)
        elif plain == "addmm":
            self.multiply(args[1], args[2], args[0], first)
        elif plain in ("bmm", "baddbmm"):
            self.multiply(args[-2], args[-1], None, first)
        elif plain == "convolution":
            self.convolve(args[0], args[1], args[2], args[6], args[8], first)
        elif plain in BATCH_NORMS:
            self.normalise(args[0], args[1:5], first)
        elif plain == "native_group_norm":
            self.normalise(args[0], args[1:3], first, groups=args[6])
        elif plain in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
            columns = self.of(args[0])[1][0]
            self.makes(columns)
            self.put(first, columns.expand(first.shape))
        elif plain in ATTENTION:
            for other in args[:2]:
                self.unite(
                    self.channel(other).flatten(2), self.channel(args[2]).flatten(2)[..., :1]
                )
            self.unite(self.channel(args[2]).flatten(2), self.channel(args[2]).flatten(2)[..., :1])
            self.put(first, self.channel(args[2])[..., :1, :].expand(first.shape))
        elif (
            plain in SAME
            or plain == "native_layer_norm"
            or "rms_norm" in plain
            or self.pointwise(func, plain)
        ):
            self.meet(tensors, first)
        elif not any(
            bool((label > FIXED).any()) for tensor in tensors for label in self.of(tensor)
        ):
            self.hold(out, FIXED)  # whatever it does, what goes in stays as wide
        elif first.is_floating_point() or first.is_complex():
            where = f"layer {self.layer[-1]!r}" if self.layer[-1] else "the model itself"
            raise Untraceable(
                f"the widths of this model cannot be found: {where} uses {name}, which the tracer cannot follow; put the "
                f"operation in a module of its own and name it in `fixed`, and what goes in and out of it stays as wide"
            )

    # what operations do to the numbers

    def move(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if isinstance(args[0], tuple | list):
            self.put(out, func([self.channel(t) for t in args[0]], *args[1:], **kwargs))
            return
        moved = [func(label, *args[1:], **kwargs) for label in self.of(args[0])]
        for i, tensor in enumerate(out if isinstance(out, tuple | list) else [out]):
            self.put(
                tensor, *(each[i] if isinstance(out, tuple | list) else each for each in moved)
            )

    def meet(self, tensors: list[Tensor], out: Tensor) -> None:
        """Entry by entry: what meets is one channel. A parameter meets by the axis along which the others' channels differ."""
        made = torch.full(out.shape, NONE)
        for tensor in sorted(
            (t for t in tensors if id(t) in self.labels),
            key=lambda t: (len(self.of(t)) > 1, -t.numel()),
        ):
            its, label, before = self.of(tensor), self.of(tensor)[-1], out.dim() - tensor.dim()
            if before < 0 or any(
                size == 1 and varies(made, before + axis) for axis, size in enumerate(tensor.shape)
            ):
                continue  # one value for all channels is none of them
            if len(its) > 1 and bool((made > NONE).any()):
                chosen = [
                    k
                    for k in range(tensor.dim())
                    if tensor.shape[k] > 1 and varies(made, before + k)
                ]
                if len(chosen) != 1:
                    continue
                label = its[chosen[0]]
            if len(its) > 1 or self.parameter(tensor):
                self.makes(label)
            label = label.broadcast_to(out.shape)
            self.tie(made, label)
            made = torch.where(made > NONE, made, label)
        self.put(out, made)

    def reduce(self, args: tuple, kwargs: dict, at: int) -> Tensor:
        """Over channels there is no channel any more; over anything else it stays."""
        label = self.channel(args[0])
        over = args[at] if len(args) > at else kwargs.get("dim")
        over = (
            list(range(label.dim()))
            if over is None or over == []
            else [over]
            if isinstance(over, int)
            else list(over)
        )
        high, low = label.amax(over, keepdim=True), label.amin(over, keepdim=True)
        return torch.where(high == low, high, NONE)

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """(..., n, i) x (..., i, o); `b` a parameter, or both activations."""
        left = self.channel(a)
        if len(self.of(b)) < 2:
            right = self.channel(b)
            together = torch.cat(
                [left.flatten(-2), right.flatten(-2)], -1
            )  # all of one product: a head
            self.unite(together, together.amax(-1, keepdim=True))
            columns = right[..., :1, :] if varies(right, -1) else left[..., :, :1]
            self.put(out, columns.expand(out.shape))
            return
        rows, columns = self.of(b)
        if varies(rows, -2) or varies(columns, -1):
            rows, columns = (
                columns,
                rows,
            )  # now `rows` differ along -1, the outputs, and `columns` along -2
        if (
            varies(left, -2) and left.shape[-1] > 1 and not varies(left, -1)
        ):  # it mixes positions, the channel stays
            self.put(out, left[..., :, :1].expand(out.shape))
            return
        taken, made = (
            columns[..., :, 0].reshape(-1, columns.shape[-2])[0],
            rows[..., 0, :].reshape(-1, rows.shape[-1])[0],
        )
        self.takes(taken)
        self.tie(left, taken)
        self.makes(made)
        self.put(out, made.expand(out.shape))
        self.bias(bias, made)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        groups: int,
        out: Tensor,
    ) -> None:
        its, into = [label.flatten() for label in self.starts_of(weight)], self.channels(x)
        taken, made = (its[0], its[1]) if transposed else (its[1], its[0])
        if groups == 1:
            self.takes(taken)
            self.tie(into, taken)
        else:
            if transposed:
                raise Untraceable(
                    f"layer {self.layer[-1]!r} is a transposed convolution in groups, whose width cannot be changed: "
                    "name it in `fixed`"
                )
            each = torch.cat(
                [
                    into.unflatten(1, (groups, -1)),
                    made.view(groups, -1).expand(len(into), groups, -1),
                ],
                -1,
            )
            self.unite(each, each.amax(-1, keepdim=True))
        self.makes(made)
        self.put(out, self.spread(made.expand(len(into), -1), out))
        self.bias(bias, made)

    def normalise(
        self, x: Tensor, parameters: Sequence[Tensor | None], out: Tensor, groups: int = 1
    ) -> None:
        into = self.channels(x)
        for parameter in parameters:
            self.bias(parameter, into)
        if groups > 1:
            each = into.unflatten(1, (groups, -1))
            self.unite(each, each.amax(-1, keepdim=True))
        self.put(out, self.channel(x))

    def bias(self, parameter: Tensor | None, channels: Tensor) -> None:
        if parameter is not None and id(parameter) in self.labels:
            self.makes(self.of(parameter)[0])
            self.tie(channels, self.of(parameter)[0])

    # numbers

    def put(self, tensor: Any, *labels: Tensor) -> None:
        self.held.append(tensor)
        self.labels[id(tensor)] = list(labels)

    def hold(self, tensors: Any, label: int) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self.put(tensor, torch.full(tensor.shape, label))

    def of(self, tensor: Tensor) -> list[Tensor]:
        return (
            self.labels[id(tensor)]
            if id(tensor) in self.labels
            else [torch.full(tensor.shape, NONE)]
        )

    def starts_of(self, weight: Tensor) -> list[Tensor]:
        """The numbers along each axis of a parameter, without the other axes."""
        its = self.of(weight)
        return [
            label[tuple(slice(None) if a == axis else slice(0, 1) for a in range(label.dim()))]
            for axis, label in enumerate(its)
        ]

    def channel(self, tensor: Tensor) -> Tensor:
        """Of a parameter used as if it were an activation, the last axis is the channel."""
        if len(its := self.of(tensor)) > 1 or self.parameter(tensor):
            self.makes(its[-1])
        return its[-1]

    def parameter(self, tensor: Tensor) -> bool:
        """Whether it is, as it is, one of the state's."""
        label = self.of(tensor)
        return (
            len(label) == 1
            and label[0].dim() == 1
            and label[0].numel() > 0
            and any(
                int(label[0][0]) == first and size == len(label[0]) and axis == 0
                for _, axis, first, size in self.blocks
            )
        )

    def channels(self, x: Tensor) -> Tensor:
        """(n, channels) of a map (n, channels, ...)."""
        label = self.channel(x)
        if label.dim() == 2:
            return label
        flat = label.flatten(2)
        if bool((flat != flat[..., :1]).any()):
            raise Untraceable(
                f"layer {self.layer[-1]!r} takes for channels what earlier layers take for positions: name it in `fixed`"
            )
        return flat[..., 0]

    def spread(self, channels: Tensor, out: Tensor) -> Tensor:
        return channels.reshape(*channels.shape, *[1] * (out.dim() - 2)).expand(out.shape)

    def tie(self, a: Tensor, b: Tensor) -> None:
        self.same.append(pairs(a, b, self.count))

    def unite(self, a: Tensor, b: Tensor) -> None:
        self.together.append(pairs(a, b, self.count))

    def fix(self, label: Tensor) -> None:
        self.stay.append(label[label > NONE].unique())

    def makes(self, label: Tensor) -> None:
        for block in self.blocks_of(label):
            self.made.setdefault(block, self.clock)

    def takes(self, label: Tensor) -> None:
        self.taken |= self.blocks_of(label)

    def blocks_of(self, label: Tensor) -> set[int]:
        numbers = label[label > FIXED].unique()
        return set((torch.searchsorted(self.starts, numbers, right=True) - 1).unique().tolist())

    @staticmethod
    def pointwise(func: Any, plain: str) -> bool:
        variants = [
            func,
            *(
                getattr(getattr(torch.ops.aten, plain), o)
                for o in getattr(torch.ops.aten, plain).overloads()
            ),
        ]
        return any(torch.Tag.pointwise in f.tags for f in variants) or plain in (
            "copy",
            "fill",
            "where",
            "masked_fill",
        )

    # what was found

    def widths(self) -> list[ChannelGroup]:
        one = components(self.count, self.same + self.together)
        used = self.made.keys() | self.taken
        still = torch.cat(
            [
                torch.tensor([FIXED]),
                *self.stay,
                *(
                    torch.arange(first, first + size)
                    for i, (_, _, first, size) in enumerate(self.blocks)
                    if i not in used
                ),
            ]
        )
        fixed = set(one[still].tolist())
        found: dict[int, list[tuple[int, int]]] = {}  # unit: (block, entry)
        for block in sorted(used, key=lambda b: (self.made.get(b, math.inf), b)):
            _, _, first, size = self.blocks[block]
            for entry, unit in enumerate(one[first : first + size].tolist()):
                if unit not in fixed:
                    found.setdefault(unit, []).append((block, entry))
        alike: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
        for where in found.values():
            alike.setdefault(tuple(block for block, _ in where), []).append(where)
        made = []
        for blocks, units in sorted(
            alike.items(), key=lambda item: min(self.made.get(b, math.inf) for b in item[0])
        ):
            entries = torch.tensor([[entry for _, entry in unit] for unit in units])
            of = torch.tensor(blocks)
            made.append(
                ChannelGroup(
                    len(units),
                    tuple(
                        AxisSlice(name, self.blocks[b][1], entries[:, of == b], b in self.made)
                        for b in dict.fromkeys(blocks)
                        for name in self.blocks[b][0]
                    ),
                )
            )
        return [
            width for width in made if any(place.is_output for place in width.slices)
        ]  # what no layer makes, none can leave out
