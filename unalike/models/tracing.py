"""Finds the channel groups of a network by watching one forward pass. Knows no architectures.

Every entry of a parameter's axis gets a number, and every activation entry carries the number of
its channel; operations that move data move the numbers alike. Where two numbers meet (a sum, a
norm, the columns of a weight) they are the same channel; where channels must stay together (those
of an attention head, of a group) they are one unit. Units that occur in the same tensors form a
channel group.
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
    connected_components,
    distinct_pairs,
    varies,
)


class Untraceable(UserError):
    """The model has an operation that the tracer cannot follow."""


# names of aten operations by what they do with channels
MOVEMENTS = set(
    "permute transpose t expand slice select squeeze unsqueeze cat stack split split_with_sizes "
    "chunk unbind index index_select narrow flip roll repeat unfold numpy_T movedim "
    "diagonal".split()
)
SHAPE_PRESERVING = set(
    "clone detach alias contiguous _to_copy lift_fresh _softmax _log_softmax softmax "
    "native_dropout bernoulli cumsum dropout _conj bernoulli_ _safe_softmax "
    "native_layer_norm".split()
)
RESHAPES = {"view", "_unsafe_view", "_reshape_alias", "reshape"}
# with the position of the argument `dim`
REDUCTIONS = {
    **dict.fromkeys("mean sum amax amin max min var std var_mean logsumexp prod".split(), 1),
    "linalg_vector_norm": 2,
    "norm": 2,
}
POOLS = set(
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d avg_pool1d adaptive_avg_pool1d upsample_nearest1d "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d reflection_pad2d replication_pad2d "
    "grid_sampler_2d".split()
)
BATCH_NORMS = set(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm _batch_norm_with_update batch_norm".split()
)
ATTENTION = set(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_attention_math _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention scaled_dot_product_attention".split()
)
EMBEDDINGS = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}


def trace(model: nn.Module, x: Tensor | dict, fixed: Sequence[str] = ()) -> list[ChannelGroup]:
    """The channel groups of a model, in the order in which a pass over the rows `x` makes them.

    Args:
        fixed: names of modules whose inputs and outputs keep their width.
    Raises: Untraceable if an operation cannot be followed.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> (group,) = trace(net, torch.zeros(2, 3))
    >>> group.units, [(s.tensor, s.axis, s.is_output) for s in group.slices]
    (8, [('0.weight', 0, True), ('0.bias', 0, True), ('2.weight', 1, False)])
    """
    tracer = ChannelTracer(model.state_dict(keep_vars=True))
    with unfused_eval(model), tracer.module_hooks(model, fixed), tracer, torch.no_grad():
        tracer.label_all(x, FIXED)
        out = model(x)
    for tensor in tree_leaves(out):
        if isinstance(tensor, Tensor):
            tracer.mark_fixed(tracer.channel_of(tensor))
    return tracer.channel_groups()


@contextmanager
def unfused_eval(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without torch's fused attention, which hides its operations."""
    was_training = model.training
    had_fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        torch.backends.mha.set_fastpath_enabled(had_fastpath)


class ChannelTracer(TorchDispatchMode):
    """Carries channel numbers along with tensors.

    `labels[id(tensor)]` is, for an activation, one tensor of its shape with channel numbers; for a
    parameter, one such tensor per axis. A block is one axis of one parameter: its entries have
    consecutive numbers.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `OperationCounter`

    def __init__(self, state: dict[str, Tensor]):
        super().__init__()
        self.labels: dict[int, list[Tensor]] = {}
        self.alive: list[Tensor] = []  # keeps ids unique: they are reused once a tensor is freed
        self.blocks: list[tuple[list[str], int, int, int]] = []  # names, axis, first number, size
        self.output_blocks: dict[int, float] = {}  # blocks that produce channels, and when first
        self.input_blocks: set[int] = set()  # blocks that consume channels
        self.same: list[Tensor] = []  # pairs (2, n) of numbers of the same channel
        self.together: list[Tensor] = []  # pairs (2, n) that are removed together
        self.fixed: list[Tensor] = []  # numbers that cannot be removed
        self.layer = [""]  # names of the modules being executed, innermost last
        self.hidden = 0  # how many of them are fixed, so that nothing inside is followed
        self.clock = 0
        self.count = 1  # numbers in use; 0 is FIXED
        first_block: dict[int, int] = {}
        for name, tensor in state.items():
            if not tensor.dim():
                continue
            if id(tensor) not in self.labels:
                first_block[id(tensor)] = len(self.blocks)
                self._add_parameter(name, tensor)
            else:  # one tensor under two names
                for axis in range(tensor.dim()):
                    self.blocks[first_block[id(tensor)] + axis][0].append(name)
        self.first_numbers = torch.tensor([first for _, _, first, _ in self.blocks])

    def _add_parameter(self, name: str, tensor: Tensor) -> None:
        labels = []
        for axis, size in enumerate(tensor.shape):
            shape = [size if a == axis else 1 for a in range(tensor.dim())]
            numbers = torch.arange(self.count, self.count + size)
            labels.append(numbers.view(shape).expand(tensor.shape))
            self.blocks.append(([name], axis, self.count, size))
            self.count += size
        self.set_labels(tensor, *labels)

    # the forward pass

    @contextmanager
    def module_hooks(self, model: nn.Module, fixed: Sequence[str]) -> Iterator[None]:
        """Track which module is executed, and do not look inside fixed ones."""
        modules = dict(model.named_modules())
        unknown = [name for name in fixed if name not in modules]
        if unknown:
            names = ", ".join(name for name in modules if name)
            raise UserError(f"there is no layer {unknown[0]!r} to keep; there are: {names}")
        hooks = []
        for name, module in modules.items():

            def enter(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
                self.layer.append(name)
                if name not in fixed:
                    return
                self.hidden += 1
                for tensor in tree_leaves((args, kwargs)):
                    if isinstance(tensor, Tensor):
                        self.mark_fixed(self.channel_of(tensor))

            def leave(module: nn.Module, args: tuple, out: Any, name: str = name) -> None:
                self.layer.pop()
                if name in fixed:
                    self.hidden -= 1
                    self.label_all(out, FIXED)

            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave))
        try:
            yield
        except Exception as error:
            error.layer = self.layer[-1]  # type: ignore[attr-defined]  # for error messages
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not self.hidden and any(id(t) in self.labels for t in tensors):
            self.clock += 1
            self.follow(func, args, kwargs or {}, tensors, out)
        return out

    def follow(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], out: Any) -> None:
        """Label the outputs of an operation and note what it ties together."""
        full_name = func.overloadpacket.__name__
        in_place = full_name.endswith("_") and not full_name.endswith("__")
        name = full_name
        if in_place and full_name not in SHAPE_PRESERVING:
            name = full_name.rstrip("_")
        first = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(first, Tensor):
            return
        if name == "as_strided" and in_place and first.shape == args[0].shape:
            return  # only the layout in memory changes
        if name in RESHAPES:
            self.set_labels(out, *(label.reshape(out.shape) for label in self.labels_of(args[0])))
        elif name in MOVEMENTS:
            self.follow_movement(func, args, kwargs, out)
        elif name == "constant_pad_nd":
            self.set_labels(out, func(self.channel_of(args[0]), args[1], NONE))
        elif name in REDUCTIONS:
            label = self.reduce_labels(args, kwargs, REDUCTIONS[name])
            self.set_labels(first, label.reshape(first.shape))
        elif name in POOLS:
            self.set_labels(first, expand_over_positions(self.channels_of_map(args[0]), first))
        elif name == "mm":
            self.follow_matmul(args[0], args[1], None, first)
        elif name == "addmm":
            self.follow_matmul(args[1], args[2], args[0], first)
        elif name in ("bmm", "baddbmm"):
            self.follow_matmul(args[-2], args[-1], None, first)
        elif name == "convolution":
            self.follow_convolution(args[0], args[1], args[2], args[6], args[8], first)
        elif name in BATCH_NORMS:
            self.follow_norm(args[0], args[1:5], first)
        elif name == "native_group_norm":
            self.follow_norm(args[0], args[1:3], first, groups=args[6])
        elif name in EMBEDDINGS:
            columns = self.labels_of(args[0])[1][0]
            self.mark_output(columns)
            self.set_labels(first, columns.expand(first.shape))
        elif name in ATTENTION:
            self.follow_attention(args[0], args[1], args[2], first)
        elif name in SHAPE_PRESERVING or "rms_norm" in name or is_pointwise(func, name):
            self.follow_elementwise(tensors, first)
        elif not self.carries_channels(tensors):
            self.label_all(out, FIXED)  # whatever it does, its inputs cannot be removed
        elif first.is_floating_point() or first.is_complex():
            where = f"layer {self.layer[-1]!r}" if self.layer[-1] else "the model itself"
            raise Untraceable(
                f"the widths of this model cannot be found: {where} uses {full_name}, which the "
                "tracer cannot follow; put the operation in a module of its own and name it in "
                "`fixed`, and what goes in and out of it stays as wide"
            )

    # what kinds of operations do to channel numbers

    def follow_movement(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Permutations, slices, concatenations: do the same with the numbers."""
        if isinstance(args[0], tuple | list):
            labels = [self.channel_of(tensor) for tensor in args[0]]
            if func.overloadpacket.__name__ == "cat":
                labels = self.tie_positions(labels, *args[1:], **kwargs)
            self.set_labels(out, func(labels, *args[1:], **kwargs))
            return
        moved = [func(label, *args[1:], **kwargs) for label in self.labels_of(args[0])]
        if isinstance(out, tuple | list):
            for i, tensor in enumerate(out):
                self.set_labels(tensor, *(label[i] for label in moved))
        else:
            self.set_labels(out, *moved)

    def tie_positions(self, labels: list[Tensor], dim: int = 0) -> list[Tensor]:
        """Numbers of tensors before they are joined along an axis.

        Where that axis has positions, as a class token beside those of an image, the channels lie
        on another axis and are the same in all of the tensors.
        """
        parts = [label for label in labels if label.numel()]
        if len(parts) < 2:
            return labels
        axes = [axis for axis in range(parts[0].dim()) if axis != dim % parts[0].dim()]
        for label in parts:
            has_channels_elsewhere = any(varies(label, axis) for axis in axes)
            if varies(label, dim) or not has_channels_elsewhere:
                return labels
        channels = parts[0].narrow(dim, 0, 1)
        for label in parts:
            self.mark_output(label)  # a class token is a parameter that no layer owns
            self.mark_same(channels, label.narrow(dim, 0, 1))
        return [channels.expand(label.shape) if label.numel() else label for label in labels]

    def follow_elementwise(self, tensors: list[Tensor], out: Tensor) -> None:
        """Numbers that meet are the same channel.

        A parameter of several axes meets by the axis along which the others' channels differ.
        """
        result = torch.full(out.shape, NONE)
        labelled = [t for t in tensors if id(t) in self.labels]
        # activations first, large before small: they tell which axis is the channel
        labelled.sort(key=lambda t: (len(self.labels_of(t)) > 1, -t.numel()))
        for tensor in labelled:
            labels = self.labels_of(tensor)
            label = labels[-1]
            offset = out.dim() - tensor.dim()
            sizes = enumerate(tensor.shape, offset)
            if offset < 0 or any(size == 1 and varies(result, axis) for axis, size in sizes):
                continue  # one value for all channels belongs to none of them
            if len(labels) > 1 and bool((result > NONE).any()):
                axes = range(tensor.dim())
                axes_that_vary = [a for a in axes if varies(result, offset + a)]
                candidates = [a for a in axes_that_vary if tensor.shape[a] > 1]
                if len(candidates) != 1:
                    continue
                label = labels[candidates[0]]
            if len(labels) > 1 or self.is_parameter(tensor):
                self.mark_output(label)
            label = label.broadcast_to(out.shape)
            self.mark_same(result, label)
            result = torch.where(result > NONE, result, label)
        self.set_labels(out, result)

    def reduce_labels(self, args: tuple, kwargs: dict, dim_position: int) -> Tensor:
        """Numbers after a reduction: NONE where it goes over channels."""
        label = self.channel_of(args[0])
        dim = args[dim_position] if len(args) > dim_position else kwargs.get("dim")
        if isinstance(dim, int):
            dims = [dim]
        elif dim is None or dim == []:
            dims = list(range(label.dim()))
        else:
            dims = list(dim)
        high, low = label.amax(dims, keepdim=True), label.amin(dims, keepdim=True)
        return torch.where(high == low, high, NONE)

    def follow_matmul(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """(..., n, i) x (..., i, o); `b` is a parameter, or both are activations."""
        a_label = self.channel_of(a)
        if len(self.labels_of(b)) < 2:
            self._follow_product_of_activations(a_label, self.channel_of(b), out)
            return
        rows, columns = self.labels_of(b)
        if varies(rows, -2) or varies(columns, -1):
            rows, columns = columns, rows
        # now `rows` differ along axis -1, the outputs, and `columns` along axis -2, the inputs
        if varies(a_label, -2) and a_label.shape[-1] > 1 and not varies(a_label, -1):
            # a product over positions: channels stay
            self.set_labels(out, a_label[..., :, :1].expand(out.shape))
            return
        inputs = columns[..., :, 0].reshape(-1, columns.shape[-2])[0]
        outputs = rows[..., 0, :].reshape(-1, rows.shape[-1])[0]
        self.mark_input(inputs)
        self.mark_same(a_label, inputs)
        self.mark_output(outputs)
        self.set_labels(out, outputs.expand(out.shape))
        self.tie_parameter(bias, outputs)

    def _follow_product_of_activations(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """All channels of one product are one attention head."""
        head = torch.cat([a.flatten(-2), b.flatten(-2)], -1)
        self.mark_together(head, head.amax(-1, keepdim=True))
        columns = b[..., :1, :] if varies(b, -1) else a[..., :, :1]
        self.set_labels(out, columns.expand(out.shape))

    def follow_attention(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Fused attention over (n, heads, L, width): the channels of a head are one unit."""
        representative = self.channel_of(value).flatten(2)[..., :1]
        for tensor in (query, key, value):
            self.mark_together(self.channel_of(tensor).flatten(2), representative)
        self.set_labels(out, self.channel_of(value)[..., :1, :].expand(out.shape))

    def follow_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        groups: int,
        out: Tensor,
    ) -> None:
        axes = self.axis_numbers(weight)
        inputs, outputs = (axes[0], axes[1]) if transposed else (axes[1], axes[0])
        channels = self.channels_of_map(x)  # (n, channels)
        rows = len(channels)
        if groups == 1:
            self.mark_input(inputs)
            self.mark_same(channels, inputs)
        elif transposed:
            raise Untraceable(
                f"layer {self.layer[-1]!r} is a transposed convolution in groups, whose width "
                "cannot be changed: name it in `fixed`"
            )
        else:  # inputs and outputs of a group are one unit
            group_inputs = channels.unflatten(1, (groups, -1))
            group_outputs = outputs.view(groups, -1).expand(rows, groups, -1)
            unit = torch.cat([group_inputs, group_outputs], -1)
            self.mark_together(unit, unit.amax(-1, keepdim=True))
        self.mark_output(outputs)
        self.set_labels(out, expand_over_positions(outputs.expand(rows, -1), out))
        self.tie_parameter(bias, outputs)

    def follow_norm(
        self, x: Tensor, parameters: Sequence[Tensor | None], out: Tensor, groups: int = 1
    ) -> None:
        channels = self.channels_of_map(x)
        for parameter in parameters:
            self.tie_parameter(parameter, channels)
        if groups > 1:
            unit = channels.unflatten(1, (groups, -1))
            self.mark_together(unit, unit.amax(-1, keepdim=True))
        self.set_labels(out, self.channel_of(x))

    def tie_parameter(self, parameter: Tensor | None, channels: Tensor) -> None:
        """A bias, or the scale of a norm, has one entry per channel."""
        if parameter is not None and id(parameter) in self.labels:
            label = self.labels_of(parameter)[0]
            self.mark_output(label)
            self.mark_same(channels, label)

    # labels of tensors

    def set_labels(self, tensor: Any, *labels: Tensor) -> None:
        self.alive.append(tensor)
        self.labels[id(tensor)] = list(labels)

    def label_all(self, tensors: Any, number: int) -> None:
        """Give all entries of all tensors in a tree one channel number."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self.set_labels(tensor, torch.full(tensor.shape, number))

    def labels_of(self, tensor: Tensor) -> list[Tensor]:
        if id(tensor) in self.labels:
            return self.labels[id(tensor)]
        return [torch.full(tensor.shape, NONE)]

    def axis_numbers(self, weight: Tensor) -> list[Tensor]:
        """The numbers along each axis of a parameter, (size,) each."""
        numbers = []
        for axis, label in enumerate(self.labels_of(weight)):
            first = [slice(None) if a == axis else slice(0, 1) for a in range(label.dim())]
            numbers.append(label[tuple(first)].flatten())
        return numbers

    def channel_of(self, tensor: Tensor) -> Tensor:
        """Channel numbers of an activation; of a parameter used as one, those of its last axis."""
        labels = self.labels_of(tensor)
        if len(labels) > 1 or self.is_parameter(tensor):
            self.mark_output(labels[-1])
        return labels[-1]

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether the labels are those of a parameter of one axis, unchanged."""
        labels = self.labels_of(tensor)
        if len(labels) != 1 or labels[0].dim() != 1 or not labels[0].numel():
            return False
        start = (0, int(labels[0][0]), len(labels[0]))
        return any(start == (axis, first, size) for _, axis, first, size in self.blocks)

    def channels_of_map(self, x: Tensor) -> Tensor:
        """Channel numbers (n, channels) of a map (n, channels, ...)."""
        label = self.channel_of(x)
        if label.dim() == 2:
            return label
        flat = label.flatten(2)
        channels = flat.amax(-1, keepdim=True)  # NONE, the lowest, is padding around a map
        if bool(((flat != channels) & (flat != NONE)).any()):
            raise Untraceable(
                f"layer {self.layer[-1]!r} takes for channels what earlier layers take for "
                "positions: name it in `fixed`"
            )
        return channels[..., 0]

    def carries_channels(self, tensors: list[Tensor]) -> bool:
        """Whether any of the tensors has channels that could be removed."""
        for tensor in tensors:
            if any(bool((label > FIXED).any()) for label in self.labels_of(tensor)):
                return True
        return False

    # facts about channel numbers

    def mark_same(self, a: Tensor, b: Tensor) -> None:
        self.same.append(distinct_pairs(a, b, self.count))

    def mark_together(self, a: Tensor, b: Tensor) -> None:
        self.together.append(distinct_pairs(a, b, self.count))

    def mark_fixed(self, label: Tensor) -> None:
        self.fixed.append(label[label > NONE].unique())

    def mark_output(self, label: Tensor) -> None:
        """These entries of parameters produce channels."""
        for block in self.blocks_of(label):
            self.output_blocks.setdefault(block, self.clock)

    def mark_input(self, label: Tensor) -> None:
        """These entries of parameters consume channels."""
        self.input_blocks |= self.blocks_of(label)

    def blocks_of(self, label: Tensor) -> set[int]:
        numbers = label[label > FIXED].unique()
        blocks = torch.searchsorted(self.first_numbers, numbers, right=True) - 1
        return set(blocks.unique().tolist())

    # the result

    def channel_groups(self) -> list[ChannelGroup]:
        """Channel groups, in the order in which their units were first produced."""
        unit_of = connected_components(self.count, self.same + self.together)  # by number
        used = self.output_blocks.keys() | self.input_blocks
        fixed_units = self._fixed_units(unit_of, used)
        occurrences: dict[int, list[tuple[int, int]]] = {}  # of a unit: (block, entry)
        for block in sorted(used, key=lambda b: (self.output_blocks.get(b, math.inf), b)):
            _, _, first, size = self.blocks[block]
            for entry, unit in enumerate(unit_of[first : first + size].tolist()):
                if unit not in fixed_units:
                    occurrences.setdefault(unit, []).append((block, entry))
        # units that occur in the same blocks are one group
        alike: dict[tuple[int, ...], list[list[int]]] = {}
        for places in occurrences.values():
            blocks = tuple(block for block, _ in places)
            alike.setdefault(blocks, []).append([entry for _, entry in places])
        groups = [self._build_group(blocks, units) for blocks, units in self._by_time(alike)]
        # what no layer produces, none can leave out
        return [group for group in groups if any(s.is_output for s in group.slices)]

    def _fixed_units(self, unit_of: Tensor, used: set[int]) -> set[int]:
        """Units that cannot be removed: marked, or in parameters whose use was not followed."""
        numbers = [torch.tensor([FIXED]), *self.fixed]
        for block, (_, _, first, size) in enumerate(self.blocks):
            if block not in used:
                numbers.append(torch.arange(first, first + size))
        return set(unit_of[torch.cat(numbers)].tolist())

    def _by_time(self, alike: dict[tuple[int, ...], Any]) -> list[tuple[tuple[int, ...], Any]]:
        """Sorted by when the first of the blocks produced channels."""

        def first_output(item: tuple[tuple[int, ...], Any]) -> float:
            return min(self.output_blocks.get(block, math.inf) for block in item[0])

        return sorted(alike.items(), key=first_output)

    def _build_group(self, blocks: tuple[int, ...], units: list[list[int]]) -> ChannelGroup:
        entries = torch.tensor(units)  # (units, entries per unit)
        block_of_column = torch.tensor(blocks)
        slices = []
        for block in dict.fromkeys(blocks):
            names, axis, _, _ = self.blocks[block]
            columns = entries[:, block_of_column == block]
            for name in names:
                slices.append(AxisSlice(name, axis, columns, block in self.output_blocks))
        return ChannelGroup(len(units), tuple(slices))


def expand_over_positions(channels: Tensor, out: Tensor) -> Tensor:
    """Channel numbers (n, channels) for all positions of a map `out` (n, channels, ...)."""
    return channels.reshape(*channels.shape, *[1] * (out.dim() - 2)).expand(out.shape)


def is_pointwise(func: Any, name: str) -> bool:
    """Whether an operation, or an overload of it, works entry by entry."""
    if name in ("copy", "fill", "where", "masked_fill"):
        return True
    packet = getattr(torch.ops.aten, name)
    overloads = [func, *(getattr(packet, overload) for overload in packet.overloads())]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
