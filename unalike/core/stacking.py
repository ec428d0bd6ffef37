"""Local epochs and evaluations of clients of one kind, run at once as a stack of models.

Clients are of one kind if their programs differ in tensors and data alone: one architecture, task,
method, optimizer, and equal numbers and strings in the attributes of their programs. Tensors that
a program holds (the parameters that it was sent, masks, prototypes) are stacked with its model, so
no method has to know of stacks.

A kind is checked when it is first met: losses and gradients of the stack must be those of the
clients one by one. Clients of a kind that does not pass train one by one; the reason is logged.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unalike.base.lockstep import ALONE, Work
from unalike.base.module_tree import Kind as FoundKind
from unalike.base.module_tree import ModuleTree, kind_of, tensors_of, tree_of
from unalike.base.randomness import generator_states
from unalike.core.program_context import ProgramContext
from unalike.data.device_cache import DeviceCache
from unalike.data.samples import Samples, Tensors
from unalike.models.flops import count_flops
from unalike.training.batch_norm import has_batch_statistics, has_dropout
from unalike.training.batching import batches
from unalike.training.precision import AUTOCAST, exact_arithmetic
from unalike.training.stacked_epochs import Member, StackedEpochs, lengthen, stack_models
from unalike.training.stacked_optimizer import optimizer_kind

if TYPE_CHECKING:
    from unalike.core.client import Client
    from unalike.core.program import ClientProgram

log = logging.getLogger(__name__)

Mode = Literal["auto", "always", "never"]
FirstStep = tuple[Tensor, list[Tensor | None]]  # a client's loss and gradients
MAX_KINDS = 32  # that are remembered, those met last
# On a CPU a stack saves Python's time and no arithmetic: it is for many small models of matrices.
# Stacked convolutions take three times as long there as one by one.
CPU_CLIENTS = 16
CPU_PARAMETERS = 100_000
CPU_STACK = 64  # models in a stack: more leave the cache
GPU_STACK = 256
# On a GPU a stack saves the time between kernels. A step of so many operations fills it anyway.
GPU_STEP_FLOPS = 5e10
# Largest relative difference between a stack and its clients one by one. In float32 rounding alone
# may be more, a twentieth of the gradient in a deep network: then float64 decides.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOWER_PRECISION = 5e-2


class Metering:
    """Collects what a client's task measures, batch by batch."""

    def __init__(self, client: "Client"):
        self.meter = client.task.full_meter()
        # Dense outputs are large to copy: they are measured on the GPU.
        on_gpu = torch.device(client.device).type == "cuda"
        self.device = client.device if client.task.dense and on_gpu else "cpu"

    def add(self, output: Tensor, y: Tensor | None) -> None:
        """Outputs and labels of a batch."""
        assert y is not None
        self.meter.add(output.to(self.device), y.to(self.device))

    def result(self) -> dict[str, float]:
        """Every metric; undefined ones are left out."""
        return {name: value for name, value in self.meter.result().items() if math.isfinite(value)}

    def by_label(self) -> list[dict[str, float]]:
        """Metrics of each label, undefined ones left out; empty where the task has none."""
        meter = getattr(self.meter, "meter", self.meter)  # within the one of a user's score
        found = meter.by_label() if hasattr(meter, "by_label") else []
        return [{n: value for n, value in label.items() if math.isfinite(value)} for label in found]


class LocalEpochs(Work):
    """The local epochs of one client.

    Args:
        optimizer: of the program's model.
        loss: what is minimised, `loss(x, y)`.
        orders: makes one generator per epoch, which shuffles the rows.
    """

    def __init__(
        self,
        program: "ClientProgram",
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        orders: Callable[[], list[torch.Generator]],
    ):
        self.program = program
        self.optimizer = optimizer
        self.loss = loss
        self.orders = orders
        self.context: ProgramContext | None = None
        self.tree: ModuleTree | None = None
        self._kind: Hashable | None = None

    def kind(self) -> Hashable | None:
        if self.context is None:
            self.tree = tree_of(self.program.model)
            self.context = ProgramContext(self.program, self.loss, self.tree.layers)
            self._kind = self._find_kind(self.context, self.tree)
        return self._kind

    def _find_kind(self, context: ProgramContext, tree: ModuleTree) -> Hashable | None:
        own = find_program_kind(self.program, self.loss, context, tree)
        self.program.known_kind = own
        optimizer = optimizer_kind(tree.parameters(), self.optimizer)
        if own is None or optimizer is None:
            return None
        return self.program.round, kind_of((own, optimizer))

    @classmethod
    def run_together(cls, works: Sequence["LocalEpochs"], room: Any) -> Sequence[Any]:
        return room.train(works)

    def read(self, index: Tensor) -> tuple[Any, Tensor]:
        """Inputs and labels of training rows, on the client's device."""
        x, y = self.program.training_batch(index)
        return self.program.client.to_device(x), self.program.client.to_device(y)

    def member(self) -> Member:
        """The client as a member of a stack."""
        assert self.context is not None and self.tree is not None
        data = self.program.samples("train")
        assert data is not None
        steps: list[Tensor] = []
        for order in self.orders():
            steps += batches(len(data), self.program.training.batch_size, order)
        return Member(
            model=self.program.model,
            tensors=self.tree.tensors(),
            optimizer=self.optimizer,
            read=self.read,
            batches=steps,
            rows=len(data),
            context=self.context.tensors,
            in_memory=isinstance(data, IN_MEMORY),
        )

    def first_step(self, member: Member) -> FirstStep:
        """Loss and gradients of the first batch; the model stays as it was."""
        model = self.program.model
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = self.program.in_precision(self.loss)(*self.read(member.batches[0]))
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return loss.detach(), list(gradients)


def find_program_kind(
    program: "ClientProgram",
    loss: Callable[[Any, Tensor], Tensor],
    context: ProgramContext,
    tree: ModuleTree,
) -> FoundKind | None:
    """Equal for programs that can train as a stack if their optimizers can; None: never."""
    client = program.client
    data = program.samples("train")
    if data is None or not len(data):
        return None
    if getattr(loss, "__self__", program) is not program:
        return None
    if not all(layer.training for layer in tree.layers):
        program.model.train()
    # A loss of the user's knows nothing of padded rows.
    if program.training.accumulate > 1 or callable(client.task.criterion):
        return None
    model_kind = tree.kind()
    if "dropout" not in model_kind.facts:
        model_kind.facts["dropout"] = has_dropout(program.model)
    if model_kind.facts["dropout"] or program.precision == "float16":
        return None
    own = (
        type(program),
        id(program.algorithm),
        client.task,
        str(client.device),
        client.dtype,
        str(data.shape),
        isinstance(data, IN_MEMORY),
        getattr(loss, "__func__", loss).__qualname__,
        model_kind,
        context.kind,
    )
    return kind_of(own)


def reads_round(work: LocalEpochs, member: Member) -> bool:
    """Whether a loss looks at the number of the round, in its first step."""
    program: Any = work.program
    own_class = type(program)
    reads: list[int] = []

    def read(self: Any) -> int:
        reads.append(1)
        return vars(self)["round"]

    # A property stands before an attribute of the same name.
    program.__class__ = type(own_class.__name__, (own_class,), {"round": property(read)})
    try:
        work.first_step(member)
    finally:
        program.__class__ = own_class
    return bool(reads)


class Evaluation(Work):
    """The metrics of a model on the samples of one client."""

    def __init__(self, model: nn.Module, data: Samples, client: "Client", batch_size: int):
        self.model = model
        self.data = data
        self.client = client
        self.batch_size = batch_size
        self._kind: Hashable | None = None

    def kind(self) -> Hashable | None:
        if not isinstance(self.data, IN_MEMORY):
            return None
        if self._kind is None:
            self._kind = (
                str(self.client.device),
                self.client.dtype,
                str(self.data.shape),
                self.client.task.dense,
                tree_of(self.model).kind(),
            )
        return self._kind

    @classmethod
    def run_together(cls, works: Sequence["Evaluation"], room: Any) -> Sequence[Any]:
        return room.evaluate(works)


IN_MEMORY = (Tensors, DeviceCache)


@dataclass
class Kind:
    """What is known of a kind of clients that train.

    Attributes:
        trainer: trains stacks of them.
        usable: whether stacks give what clients give one by one; None: not tried.
        paddable: whether that holds for batches of unequal size; None: not tried.
        flops: floating-point operations of a step of one client; None: not counted.
        follows_round: whether the loss looks at the round: then each is checked by itself.
        round: that was checked last.
    """

    trainer: StackedEpochs
    usable: bool | None = None
    paddable: bool | None = None
    flops: float | None = None
    follows_round: bool = False
    round: int | None = None


class Stacks:
    """Runs works of one kind at once, and remembers what it learnt of each kind.

    Args:
        mode: "always", "never", or "auto": on a GPU, and for many small models on a CPU.
    """

    def __init__(self, mode: Mode = "auto"):
        self.mode = mode
        self.kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self.reported: set[str] = set()

    def train(self, works: Sequence[LocalEpochs]) -> list[Any]:
        """The mean loss of each, or an exception, or `ALONE` for those that must train alone."""
        answers: list[Any] = [ALONE] * len(works)
        if not self.is_worthwhile(works[0].program.model, len(works)):
            return answers
        kind = self.find_kind(works[0])
        members = [work.member() for work in works]
        for group in self._groups(kind, works, members):
            outcomes = self._train_group(kind, works[0], [members[i] for i in group])
            for i, outcome in zip(group, outcomes, strict=True):
                answers[i] = outcome
        return answers

    def is_worthwhile(self, model: nn.Module, clients: int) -> bool:
        """Whether so many clients with models like this one should train as a stack."""
        if self.mode != "auto":
            return self.mode == "always"
        parameters = list(model.parameters())
        if any(p.is_cuda for p in parameters):
            return True
        small = sum(p.numel() for p in parameters) <= CPU_PARAMETERS
        return clients >= CPU_CLIENTS and small and all(p.ndim <= 2 for p in parameters)

    def find_kind(self, work: LocalEpochs) -> Kind:
        """What is known of a kind, whatever the round."""
        program, context = work.program, work.context
        assert context is not None
        capture = bool(getattr(work.loss, "graph_safe", False))
        kind_of_round: Any = work.kind()
        key: FoundKind = kind_of_round[1]
        if key not in self.kinds:
            self.kinds[key] = Kind(build_trainer(work, capture))
        self.kinds.move_to_end(key)
        while len(self.kinds) > MAX_KINDS:
            self.kinds.popitem(last=False)
        kind = self.kinds[key]
        if kind.follows_round and kind.round != program.round:
            kind.usable = kind.paddable = None
        kind.round = program.round
        kind.trainer.use(program.model, context.loss)
        return kind

    def _groups(
        self, kind: Kind, works: Sequence[LocalEpochs], members: list[Member]
    ) -> Iterator[list[int]]:
        """Numbers of works that train at once: all if padding is possible, else by rows."""
        rows = [member.rows for member in members]
        largest = self.largest_stack(kind, works[0])
        # PyTorch's default on a GPU is TF32 in convolutions: too coarse to compare with.
        with exact_arithmetic():
            if kind.usable is None:
                kind.usable = self._check(kind, works[:largest], members[:largest])
            if kind.usable and largest > 1 and len(set(rows)) > 1 and kind.paddable is None:
                kind.paddable = self._check_padding(kind, works, members)
        if not kind.usable:
            return
        groups: dict[int, list[int]] = {}
        for i in sorted(range(len(rows)), key=lambda i: rows[i]):
            groups.setdefault(0 if kind.paddable else rows[i], []).append(i)
        for group in groups.values():
            for start in range(0, len(group), largest):
                yield group[start : start + largest]

    def largest_stack(self, kind: Kind, work: LocalEpochs) -> int:
        """How many models to train at once. On a GPU one is enough if it is large: its captured
        steps serve all clients of the kind, one after another. Lower precision is for large
        models, and torch.func.vmap ignores autocast in linear layers: also one."""
        if work.program.precision in AUTOCAST:
            return 1
        if torch.device(work.program.client.device).type == "cpu":
            return CPU_STACK
        if kind.flops is None:
            program = work.program
            rows = program.training.batch_size
            kind.flops = 3 * rows * count_flops(program.model, work.read(torch.arange(1))[0])
        return max(1, min(GPU_STACK, int(GPU_STEP_FLOPS // max(kind.flops, 1))))

    def _train_group(self, kind: Kind, work: LocalEpochs, members: list[Member]) -> Sequence[Any]:
        try:
            return kind.trainer.train(members)
        except Exception as error:
            # Nothing was written to the models yet: one by one, only the culprit fails.
            self.report(work.program, f"{type(error).__name__}: {error}")
            return [ALONE] * len(members)

    def _check(
        self, kind: Kind, works: Sequence[LocalEpochs], members: list[Member]
    ) -> bool | None:
        """Whether losses and gradients of a stack are those of the clients one by one."""
        before = generator_states()
        held = [vars(work.program).copy() for work in works]
        tensors = [tensor for work in works if work.context for tensor in work.context.tensors]
        versions = [tensor._version for tensor in tensors]
        copies = [tensor.detach().clone() for tensor in tensors]
        try:
            kind.follows_round = reads_round(works[0], members[0])
            alone = [work.first_step(member) for work, member in zip(works, members, strict=True)]
        except Exception:  # the culprit will be found one by one
            return None
        finally:
            changed = [i for i, tensor in enumerate(tensors) if tensor._version != versions[i]]
            with torch.no_grad():
                for i in changed:
                    tensors[i].copy_(copies[i])
            kinds = [ProgramContext(work.program, work.loss).kind for work in works]
            for work, attributes in zip(works, held, strict=True):
                vars(work.program).clear()
                vars(work.program).update(attributes)
        after = generator_states()
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            self.report(works[0].program, "its loss draws random numbers")
            return False
        if changed:
            self.report(works[0].program, "its loss changes tensors of the program")
            return False
        if any(w.context is None or w.context.kind != k for w, k in zip(works, kinds, strict=True)):
            return None  # the loss fills a cache of the program: it will be filled next time
        return self._gradients_agree(kind, works, members, alone)

    def _check_padding(
        self, kind: Kind, works: Sequence[LocalEpochs], members: list[Member]
    ) -> bool:
        """Whether that also holds if every other client has a row less in its batch."""
        if has_batch_statistics(works[0].program.model):
            return False
        cut = []
        for i, member in enumerate(members):
            first = member.batches[0]
            kept = first[:-1] if i % 2 and len(first) > 1 else first
            cut.append(replace(member, batches=[kept]))
        alone = [work.first_step(member) for work, member in zip(works, cut, strict=True)]
        return self._gradients_agree(kind, works, cut, alone)

    def _gradients_agree(
        self,
        kind: Kind,
        works: Sequence[LocalEpochs],
        members: list[Member],
        alone: list[FirstStep],
    ) -> bool:
        """Whether a stack has these losses and gradients, in float64 if not in float32."""
        program = works[0].program
        try:
            problem = find_difference(alone, kind.trainer.losses_and_gradients(members))
            if problem and program.client.dtype == torch.float32:
                with in_float64(works):
                    alone = [w.first_step(member) for w, member in zip(works, members, strict=True)]
                    trainer = build_trainer(works[0], capture=False)
                    problem = find_difference(alone, trainer.losses_and_gradients(members))
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if problem:
            self.report(program, problem)
        return not problem

    def report(self, program: "ClientProgram", reason: str) -> None:
        """Log once for a method and task why its clients do not train as a stack."""
        subject = f"{type(program.algorithm).__name__}, {program.client.task.name}"
        if subject not in self.reported:
            self.reported.add(subject)
            log.info("%s: clients train one by one, not as a stack: %s", subject, reason)

    def evaluate(self, works: Sequence[Evaluation]) -> list[Any]:
        """The metrics of each, or `ALONE` for those that must be measured alone."""
        answers: list[Any] = [ALONE] * len(works)
        if not self.is_worthwhile(works[0].model, len(works)):
            return answers
        on_cpu = torch.device(works[0].client.device).type == "cpu"
        largest = CPU_STACK if on_cpu else GPU_STACK
        in_order = sorted(range(len(works)), key=lambda i: len(works[i].data))
        for start in range(0, len(works), largest):
            group = in_order[start : start + largest]
            if len(group) == 1:
                continue
            try:
                metrics = evaluate_stack([works[i] for i in group])
            except Exception:  # what cannot be stacked, or a client that fails: one by one
                continue
            for i, result in zip(group, metrics, strict=True):
                answers[i] = result
        return answers


def evaluate_stack(works: Sequence[Evaluation]) -> list[dict[str, float]]:
    """Metrics of several models of one kind, each on its own samples.

    Raises:
        ValueError: the stack does not give what the first model gives alone.
    """
    model = works[0].model  # runs for all
    was_training = model.training
    model.eval()
    try:
        stacked, shared = stack_models([tensors_of(work.model) for work in works])
        meters = [Metering(work.client) for work in works]
        with torch.no_grad():
            for step, rows in enumerate(_padded_batches(works)):
                x = _read_stack(works, rows)
                output = _forward(model, stacked, shared, x)
                if step == 0:
                    with exact_arithmetic():
                        first = _forward(model, stacked, shared, x)[0]
                        alone = model(tree_map(lambda t: t[0], x))
                    if not is_close(first, alone):
                        raise ValueError("a stack has another output than one of its models alone")
                for i, (work, meter) in enumerate(zip(works, meters, strict=True)):
                    own = rows[rows < len(work.data)]
                    if len(own):
                        meter.add(output[i, : len(own)], work.data.rows(own)[1])
        return [meter.result() for meter in meters]
    finally:
        model.train(was_training)


def _padded_batches(works: Sequence[Evaluation]) -> Iterator[Tensor]:
    """Row numbers in batches, up to the largest number of rows that a client has."""
    largest = max(len(work.data) for work in works)
    return batches(largest, max(works[0].batch_size, 256))


def _read_stack(works: Sequence[Evaluation], rows: Tensor) -> Any:
    """Inputs (models, rows, ...) of each client; those with fewer rows repeat some."""
    parts = []
    for work in works:
        own = rows[rows < len(work.data)]
        x, _ = work.data.rows(own if len(own) else rows[:1] * 0)
        parts.append(work.client.to_device(x))
    return tree_map(lambda *each: torch.stack([lengthen(t, len(rows)) for t in each]), *parts)


def _forward(
    model: nn.Module, stacked: dict[str, Tensor], shared: dict[str, Tensor], x: Any
) -> Tensor:
    def forward_one(own: dict[str, Tensor], own_x: Any) -> Tensor:
        named = {name.removeprefix("model."): tensor for name, tensor in (own | shared).items()}
        return torch.func.functional_call(model, named, (own_x,))

    return torch.func.vmap(forward_one)(stacked, x)


def build_trainer(work: LocalEpochs, capture: bool) -> StackedEpochs:
    """A trainer of stacks of a client's kind."""
    program, context = work.program, work.context
    assert context is not None
    return StackedEpochs(
        program.model,
        work.optimizer,
        context.loss,
        program.client.task.unknown_label,
        program.training.max_grad_norm,
        capture,
    )


@contextmanager
def in_float64(works: Sequence[LocalEpochs]) -> Iterator[None]:
    """Within it, clients compute in float64: models, tensors of programs, and inputs."""
    attributes = [vars(work.program).copy() for work in works]
    clients = {id(work.program.client): work.program.client for work in works}
    tensors: dict[int, Tensor] = {}
    for work in works:
        assert work.tree is not None and work.context is not None
        for tensor in [*work.tree.tensors().values(), *work.context.tensors]:
            if tensor.dtype == torch.float32:
                tensors[id(tensor)] = tensor
    values = {key: tensor.data for key, tensor in tensors.items()}
    try:
        for tensor in tensors.values():
            tensor.data = tensor.data.double()
        for client in clients.values():
            client.dtype = torch.float64
        yield
    finally:
        for key, tensor in tensors.items():
            tensor.data = values[key]
        for client in clients.values():
            client.dtype = torch.float32
        for work, before in zip(works, attributes, strict=True):
            vars(work.program).clear()
            vars(work.program).update(before)


def find_difference(
    alone: Sequence[FirstStep], together: tuple[Tensor, dict[str, Tensor | None]]
) -> str | None:
    """How losses and gradients of a stack differ from those of its clients; None: by rounding."""
    losses, gradients = together
    for i, (loss, own) in enumerate(alone):
        stacked = [None if gradient is None else gradient[i] for gradient in gradients.values()]
        if not (is_close(losses[i], loss) and gradients_are_close(stacked, own)):
            apart = largest_difference([losses[i], *stacked], [loss, *own])
            return f"its loss or its gradient is another one in a stack (up to {apart:.2g} apart)"
    return None


def is_close(one: Tensor, other: Tensor, scale: float | None = None) -> bool:
    """Whether tensors differ by rounding alone, or both are not finite.

    Args:
        scale: size of the numbers that they were computed from; default: their own.
    """
    tolerance = TOLERANCE.get(one.dtype, LOWER_PRECISION)
    if scale is None:
        scale = float(other.abs().max()) if other.numel() else 0.0
    if not math.isfinite(scale):
        return not bool(one.isfinite().all())
    return bool(torch.allclose(one, other.to(one), rtol=tolerance, atol=tolerance * scale))


def largest_difference(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """The largest difference between tensors of two lists."""
    pairs = zip(one, other, strict=True)
    return max(
        (float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None),
        default=0.0,
    )


def gradients_are_close(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Whether two gradients differ by rounding alone. None: the loss does not depend on it."""
    present = [gradient for gradient in other if gradient is not None]
    scale = max((float(gradient.abs().max()) for gradient in present), default=0.0)
    for a, b in zip(one, other, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and not is_close(a, b, scale):
            return False
    return True
