"""Clients of one kind as one object, from the server's message through training to the reply.

An operation that is written for one client may have a second form for a whole stack of them
(`@stacked`, core/operations.py). It is used where several clients of one kind are sent the same.
What is in Python runs once then, whatever the number of clients: parameters are loaded by
expanding those that were sent, and replies are rows of one block of memory for each tensor.

Whether clients are of one kind is found as for any stack (core/stacking.py), in an ordinary
training before. What does not fit runs as ever: client by client, in lockstep.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unalike.base.blocks import split_block
from unalike.base.copying import copy_all
from unalike.base.message import Value
from unalike.base.module_tree import tensors_of, tree_of
from unalike.base.randomness import stream
from unalike.base.types import Parameters
from unalike.core.program_context import ProgramContext
from unalike.core.stacking import IN_MEMORY, Kind, LocalEpochs, Stacks, find_program_kind
from unalike.training.stacked_epochs import StackRows, mean_losses

if TYPE_CHECKING:
    from unalike.core.program import ClientProgram


class NotTogether(Exception):
    """These clients cannot be one object; they run one by one, or in lockstep."""


class ClientStack:
    """Programs that run an operation at once.

    Args:
        programs: of clients with one `batching_key`; they have entered the round.
        stacks: what is known of kinds of clients.

    Attributes:
        trained: parameters and buffers that `learn` changed, (clients, ...), by full name.
    """

    def __init__(self, programs: Sequence["ClientProgram"], stacks: Stacks):
        self.programs = programs
        self.stacks = stacks
        self.sent: Parameters = {}
        self.start: Parameters = {}  # the same, in the form of the model's own
        self.trained: Parameters = {}
        self.rows: dict[str, tuple[Tensor, ...]] = {}  # of each block of `trained`

    def load(self, parameters: Parameters) -> None:
        """Begin with these parameters and buffers; all others are each client's own."""
        own = tensors_of(self.programs[0].model)
        for name, tensor in own.items():
            if name not in parameters:
                continue
            if parameters[name].shape != tensor.shape:
                raise NotTogether(f"{name} has another shape than was sent")
            self.start[name] = _like(parameters[name], tensor)
        self.sent = parameters

    def learn(self) -> list[float]:
        """Train this round's local epochs with fresh optimizers; returns the mean losses.

        Raises:
            NotTogether: the clients are not of one kind, or one of them diverges. Nothing has
                changed then.
        """
        work, kind = self._find_kind()
        data = [_whole_rows(program) for program in self.programs]
        sizes = [y.shape[0] for _, y in data]
        read: list[tuple[list[int], Tensor, Tensor]] = []
        for group in self._groups(work, kind, sizes):
            rows = StackRows.of_orders(
                [data[i] for i in group],
                [_orders(self.programs[i], sizes[i]) for i in group],
                work.program.training.batch_size,
                kind.trainer.unknown_label,
            )
            own = self._own_tensors(group)
            assert work.context is not None
            losses = kind.trainer.train_from(
                self.start, own, work.context.tensors, work.optimizer, rows
            )
            self._take(kind.trainer.stacked, group)
            read.append((group, losses, rows.sizes))
        # On a GPU only now: reading a loss waits for all that was computed before.
        means = [math.nan] * len(sizes)
        for group, losses, steps in read:
            for i, mean in zip(group, mean_losses(losses, steps), strict=True):
                means[i] = mean
        if not all(map(math.isfinite, means)):
            raise NotTogether("the loss of a client is not finite")
        for program, size in zip(self.programs, sizes, strict=True):
            program.work += size * program.training.epochs
        return means

    def _own_tensors(self, group: list[int]) -> list[Parameters]:
        """Parameters and buffers of some models; those of the first one where all were sent."""
        first = tensors_of(self.programs[0].model)
        if first.keys() <= self.start.keys():
            return [first] * len(group)
        return [tensors_of(self.programs[i].model) for i in group]

    def _find_kind(self) -> tuple[LocalEpochs, Kind]:
        """What trains these clients, checked in an ordinary training before."""
        first = self.programs[0]
        work = LocalEpochs(first, first.optimizer(fresh=True), first.loss, list)
        if work.kind() is None:
            raise NotTogether("they train one by one")
        kind = self.stacks.find_kind(work)
        if not kind.usable:
            raise NotTogether("they were not checked yet, or train one by one")
        assert work.context is not None
        sent = {id(tensor) for tensor in self.sent.values()}
        if any(id(tensor) not in sent for tensor in work.context.tensors):
            raise NotTogether("their losses depend on tensors of their own")
        for program in self.programs:
            if program.known_kind is not first.known_kind:
                tree = tree_of(program.model)
                context = ProgramContext(program, program.loss, tree.layers)
                program.known_kind = find_program_kind(program, program.loss, context, tree)
            if program.known_kind is not first.known_kind:
                raise NotTogether("they are of several kinds")
        return work, kind

    def _groups(self, work: LocalEpochs, kind: Kind, sizes: list[int]) -> Iterable[list[int]]:
        """Numbers of the programs that train at once; those with the most rows first."""
        largest = self.stacks.largest_stack(kind, work)
        alone = largest == 1 or len(set(sizes)) == 1
        if not alone and kind.paddable is None:
            raise NotTogether("whether batches can be padded was not checked yet")
        groups: dict[int, list[int]] = {}
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            groups.setdefault(0 if alone or kind.paddable else sizes[i], []).append(i)
        for group in groups.values():
            for start in range(0, len(group), largest):
                yield group[start : start + largest]

    @torch.no_grad()
    def _take(self, stacked: dict[str, Tensor], group: list[int]) -> None:
        """Copy what was trained, before the next group is."""
        whole = group == list(range(len(self.programs)))
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for full_name, values in stacked.items():
            kind, _, name = full_name.partition(".")
            if kind != "model":
                continue
            if whole:
                self.trained[name] = values.clone()
                continue
            if name not in self.rows:
                block = _new_block(values[0], len(self.programs))
                self.trained[name], self.rows[name] = block, block.unbind()
            targets += [self.rows[name][i] for i in group]
            sources += values.unbind()
        copy_all(targets, sources)

    def state(self, names: Iterable[str]) -> Parameters:
        """Parameters and buffers (clients, ...) of these names, as they are now."""
        blocks = {}
        for name in names:
            if name in self.trained:
                blocks[name] = self.trained[name]
            elif name in self.start:
                value = self.start[name]
                blocks[name] = value.expand(len(self.programs), *value.shape).clone()
            else:
                own_values = [tensors_of(program.model)[name] for program in self.programs]
                blocks[name] = torch.stack([value.detach() for value in own_values])
        return blocks

    def keep(self, names: Iterable[str]) -> None:
        """Give each client's model what it has now of these names."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        names = [name for name in names if name in self.trained or name in self.start]
        if not names:
            return
        own = [tensors_of(program.model) for program in self.programs]
        for name in names:
            targets += [tensors[name] for tensors in own]
            if name in self.trained:
                values += self.trained[name].unbind()
            else:
                values += [self.start[name]] * len(own)
        copy_all(targets, values)


@torch.no_grad()
def _like(value: Tensor, own: Tensor) -> Tensor:
    """A tensor with the dtype, device and order of axes in memory of another of its shape."""
    value = value.detach().to(own)
    return value if value.stride() == own.stride() else torch.empty_like(own).copy_(value)


def _whole_rows(program: "ClientProgram") -> tuple[Any, Tensor]:
    """All inputs and labels that a client trains on, on its device. Nobody may change them."""
    data = program.samples("train")
    if not isinstance(data, IN_MEMORY):
        raise NotTogether("their samples are not in memory")
    x, y = data.all_rows()
    if y is None:
        raise NotTogether("they have no labels")
    return program.client.to_device(x), program.client.to_device(y)


def _orders(program: "ClientProgram", rows: int) -> list[Tensor]:
    """The order of rows in each epoch, as `ClientProgram.learn` has it."""
    id, round = program.client.id, program.round
    epochs = range(program.training.epochs)
    streams = [stream(program.seed, "order", id, round, epoch) for epoch in epochs]
    return [torch.randperm(rows, generator=source) for source in streams]


def _new_block(first: Tensor, count: int) -> Tensor:
    """Memory for so many tensors like this one, in its order of axes."""
    return first.new_empty_strided((count, *first.shape), (first.numel(), *first.stride()))


class StackedReplies:
    """The replies of the clients of a stack.

    Args:
        columns: the fields of all replies: tensors (clients, ...), dicts of them, or lists with
            one number or word for each client.
        count: of clients.

    Attributes:
        bodies: one for each client; tensors are rows of the blocks.
        magnitudes: no number in a body is larger. Not finite if one in it is not.
    """

    def __init__(self, columns: dict[str, Any], count: int):
        self.bodies: list[dict[str, Value]] = [{} for _ in range(count)]
        self.problems: dict[Any, str | None] = {}  # by what a reply is checked against
        norms: list[Tensor] = []
        largest = [0.0] * count
        for key, column in columns.items():
            if isinstance(column, dict):
                rows = [_split(block, count, norms) for block in column.values()]
                for i, body in enumerate(self.bodies):
                    body[key] = {name: own[i] for name, own in zip(column, rows, strict=True)}
                continue
            values = column
            if isinstance(column, Tensor):
                values = _split(column, count, norms)
            elif len({type(value) for value in column}) != 1:
                raise NotTogether(f"the replies have several kinds of {key}")
            elif isinstance(column[0], float):
                largest = [_larger(*pair) for pair in zip(largest, map(abs, column), strict=True)]
            for body, value in zip(self.bodies, values, strict=True):
                body[key] = value
        if norms:
            found = torch.stack(norms).amax(0).tolist()  # NaN if one is
            largest = [_larger(*pair) for pair in zip(largest, found, strict=True)]
        self.magnitudes = largest


def _split(block: Tensor, count: int, norms: list[Tensor]) -> list[Tensor]:
    """The rows of a block; appends their norms, (clients,), if they are real numbers."""
    if len(block) != count:
        raise ValueError(f"expected a tensor with {count} rows, got {tuple(block.shape)}")
    if block.is_floating_point():
        axes = tuple(range(1, block.ndim))
        norms.append(torch.linalg.vector_norm(block, dim=axes).double() if axes else block.abs())
    return split_block(block)


def _larger(one: float, other: float) -> float:
    """The larger of two numbers; NaN if one is."""
    return one if one > other or math.isnan(one) else other
