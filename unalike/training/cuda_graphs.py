"""What a GPU records once and plays from then on, so that it does not wait for Python. Knows functions of tensors; nothing of training."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

log = logging.getLogger(__name__)


class GraphedFunction:
    """A function of tensors that a GPU records when inputs of their shapes come for the third time, and plays from then on: then it does
    not wait for Python. Elsewhere, and where it cannot be recorded, it is simply called.

    What it gives back is overwritten by its next call with these shapes. The function must do the same at each call: depend on nothing
    but its inputs and tensors that are changed in place, and never look at values.
    """

    SEEN, KEPT = 3, 2  # recorded at which time, and how many shapes
    shared: Any = None  # memory of all recordings: one is played at a time

    def __init__(self, function: Callable[..., Any], records: bool = True):
        self.function, self.records = function, records
        self.forget()

    def forget(self) -> None:
        self.seen: dict[Any, int] = {}
        self.kept: dict[Any, tuple | None] = {}  # by shapes; None: cannot be recorded

    def __call__(self, *inputs: Any) -> Any:
        if not self.records:
            return self.function(*inputs)
        leaves, form = tree_flatten(inputs)
        if not leaves[0].is_cuda:
            return self.function(*inputs)
        key = kind_of(leaves, form)
        if key not in self.kept:
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] < self.SEEN or len(self.kept) >= self.KEPT:
                return self.function(*inputs)
            self.kept[key] = self._record([leaf.detach().clone() for leaf in leaves], form)
        if (kept := self.kept[key]) is None:
            return self.function(*inputs)
        return self._play(kept, leaves)

    def _play(self, kept: tuple, leaves: list[Tensor]) -> Any:
        graph, given, ends = kept
        for leaf, new in zip(given, leaves, strict=True):
            leaf.copy_(new)
        graph.replay()
        return ends

    def _record(self, given: list[Tensor], form: Any) -> tuple | None:
        GraphedFunction.shared = GraphedFunction.shared or memory()
        made = captured(lambda: self.function(*tree_unflatten(given, form)), GraphedFunction.shared)
        return made and (made[0], given, made[1])


def kind_of(leaves: list[Tensor], form: Any) -> tuple:
    """What inputs must have in common for one recording: shapes, and how they lie in the tree; under other names they are other inputs."""
    return form, *((leaf.shape, leaf.dtype) for leaf in leaves)


class GraphedForward(GraphedFunction):
    """A pass of a model that is played, and its way back: what it gives leads back to `parameters` like that of any pass, until the next
    call with rows of this shape. Ahead and back are recorded apart, in memory of their own: passes of others may come between."""

    def __init__(
        self, function: Callable[..., Tensor], parameters: Sequence[Tensor], records: bool = True
    ):
        super().__init__(function, records)
        self.parameters = list(parameters)

    def forget(self) -> None:
        super().forget()
        self.own: Any = None

    def _record(self, given: list[Tensor], form: Any) -> tuple | None:
        self.own = self.own or memory()
        if (
            ahead := captured(lambda: self.function(*tree_unflatten(given, form)), self.own)
        ) is None:
            return None
        gradient = torch.zeros_like(ahead[1])
        back = captured(
            lambda: torch.autograd.grad(ahead[1], self.parameters, gradient, allow_unused=True),
            self.own,
        )
        return back and (ahead[0], given, ahead[1].detach(), back[0], gradient, back[1])

    def _play(self, kept: tuple, leaves: list[Tensor]) -> Tensor:
        return GraphedForwardBackward.apply(kept, leaves, *self.parameters)


class GraphedForwardBackward(torch.autograd.Function):
    """A recorded pass as one step of autograd's."""

    @staticmethod
    def forward(ctx: Any, kept: tuple, leaves: list[Tensor], *parameters: Tensor) -> Tensor:
        graph, given, ends = kept[:3]
        ctx.back = kept[3:]
        for leaf, new in zip(given, leaves, strict=True):
            leaf.copy_(new)
        graph.replay()
        return ends.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        graph, given, found = ctx.back
        given.copy_(gradient)
        graph.replay()
        return None, None, *(None if each is None else each.detach() for each in found)


def memory() -> Any:
    """Memory that recordings can share: that of a first one, which does nothing. Memory without a recording is gone for good."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
    return graph


def captured(function: Callable[[], Any], beside: Any) -> tuple[Any, Any] | None:
    """What a GPU is to do in a function, to be played, and where that leaves what it gives, in the memory of the recording `beside` it.
    Nothing is computed yet, and nothing is lost where it cannot be recorded, as where the function looks at values: None."""
    graph, usual = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, pool=beside.pool()):
            ends = function()
    except RuntimeError as problem:
        log.warning(
            "a pass cannot be recorded, so the GPU waits for Python at each: %s",
            str(problem).partition("\n")[0],
        )
        torch.cuda.set_stream(usual)  # a recording that fails does not go back to it
        torch.cuda.synchronize()
        memory()  # a recording that succeeds, or the GPU's random numbers stay closed
        return None
    return graph, ends
