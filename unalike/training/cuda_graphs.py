"""CUDA graphs: GPU work that is captured once and replayed without waiting for Python.

A captured function must do the same at every call: it may depend on its inputs and on tensors that
are changed in place, and must never read values back (no `.item()`, no data-dependent branches).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from unalike.training.stacked import Stack

log = logging.getLogger(__name__)

SINGLE_TENSOR: Any = "one tensor"  # in the place of the tree of inputs


class GraphedFunction:
    """A function of tensors that is captured at its third call with the same input shapes.

    From then on the graph is replayed: its outputs are overwritten by the next call with these
    shapes. On a CPU, and where capture fails, the function is simply called.

    Args:
        function: takes and returns tensors, or trees of them.
        enabled: False never captures.
    """

    CAPTURE_AT = 3  # at which call with the same shapes
    MAX_GRAPHS = 2  # for how many different shapes
    shared_pool: Any = None  # memory of all these graphs: only one is replayed at a time

    def __init__(self, function: Callable[..., Any], enabled: bool = True):
        self.function = function
        self.enabled = enabled
        self.clear()

    def clear(self) -> None:
        """Drop all captured graphs."""
        self.calls: dict[Any, int] = {}  # by input signature
        self.graphs: dict[Any, tuple | None] = {}  # by input signature; None: capture failed

    def __call__(self, *inputs: Any) -> Any:
        if not self.enabled or not is_on_gpu(inputs):
            return self.function(*inputs)
        tree = SINGLE_TENSOR
        if len(inputs) == 1 and isinstance(inputs[0], Tensor):
            leaves = [inputs[0]]  # what `tree_flatten` gives, slowly
        else:
            leaves, tree = tree_flatten(inputs)
        key = input_signature(leaves, tree)
        if key not in self.graphs:
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] < self.CAPTURE_AT or len(self.graphs) >= self.MAX_GRAPHS:
                return self.function(*inputs)
            if tree is SINGLE_TENSOR:
                tree = tree_flatten(inputs)[1]
            self.graphs[key] = self._capture([leaf.detach().clone() for leaf in leaves], tree)
        captured = self.graphs[key]
        if captured is None:
            return self.function(*inputs)
        return self._replay(captured, leaves)

    def _capture(self, static_inputs: list[Tensor], tree: Any) -> tuple | None:
        """The graph, the tensors it reads its inputs from, and the tensors it writes."""
        GraphedFunction.shared_pool = GraphedFunction.shared_pool or new_memory_pool()
        captured = capture(
            lambda: self.function(*tree_unflatten(static_inputs, tree)), GraphedFunction.shared_pool
        )
        if captured is None:
            # CUDA takes a pool in which a capture failed for one that is still recording.
            GraphedFunction.shared_pool = None
            return None
        graph, outputs = captured
        return graph, static_inputs, outputs

    def _replay(self, captured: tuple, leaves: list[Tensor]) -> Any:
        graph, static_inputs, outputs = captured
        _copy_all(static_inputs, leaves)
        graph.replay()
        return outputs


class GraphedForward(GraphedFunction):
    """A graphed forward pass with a graphed backward pass, differentiable w.r.t. `parameters`.

    The output is valid until the next call with inputs of the same shapes. Forward and backward
    have a memory pool of their own, so that other graphs may run between them.
    """

    def __init__(
        self, function: Callable[..., Tensor], parameters: Sequence[Tensor], enabled: bool = True
    ):
        super().__init__(function, enabled)
        self.parameters = list(parameters)

    def clear(self) -> None:
        super().clear()
        self.pool: Any = None

    def _capture(self, static_inputs: list[Tensor], tree: Any) -> tuple | None:
        self.pool = self.pool or new_memory_pool()
        forward = capture(lambda: self.function(*tree_unflatten(static_inputs, tree)), self.pool)
        if forward is None:
            self.pool = None
            return None
        forward_graph, output = forward
        grad_output = torch.zeros_like(output)
        backward = capture(lambda: self._gradients(output, grad_output), self.pool)
        if backward is None:
            self.pool = None
            return None
        backward_graph, grads = backward
        return forward_graph, static_inputs, output.detach(), backward_graph, grad_output, grads

    def _gradients(self, output: Tensor, grad_output: Tensor) -> list[Tensor | None]:
        """The parameters' gradients, in memory as autograd would lay out their `.grad`."""
        grads = torch.autograd.grad(output, self.parameters, grad_output, allow_unused=True)
        laid_out: list[Tensor | None] = []
        for p, grad in zip(self.parameters, grads, strict=True):
            if grad is not None and grad.stride() != p.stride():
                grad = torch.empty_like(p).copy_(grad)
            laid_out.append(grad)
        return laid_out

    def _replay(self, captured: tuple, leaves: list[Tensor]) -> Tensor:
        return _GraphedForwardBackward.apply(captured, leaves, *self.parameters)

    def backward(self, output: Tensor, grad_output: Tensor) -> None:
        """What `output.backward(grad_output)` does, for an output of this function.

        The parameters must hold no gradient. A replayed pass does without autograd, whose thread
        would have to run Python.
        """
        captured = getattr(output.grad_fn, "backward_pass", None)
        if captured is None:
            output.backward(grad_output)
            return
        grads = _replay_backward(captured, grad_output)
        for p, grad in zip(self.parameters, grads, strict=True):
            p.grad = grad


class _GraphedForwardBackward(torch.autograd.Function):
    """A captured forward and backward pass as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, captured: tuple, leaves: list[Tensor], *parameters: Tensor) -> Tensor:
        graph, static_inputs, output = captured[:3]
        ctx.backward_pass = captured[3:]
        _copy_all(static_inputs, leaves)
        graph.replay()
        return output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        grads = _replay_backward(ctx.backward_pass, grad_output)
        # None twice: for `captured` and `leaves`
        return None, None, *(None if grad is None else grad.detach() for grad in grads)


def _replay_backward(captured: tuple, grad_output: Tensor) -> list[Tensor | None]:
    """The parameters' gradients, in memory that the next replay overwrites."""
    graph, static_grad_output, grads = captured
    static_grad_output.copy_(grad_output)
    graph.replay()
    return grads


class GraphedStep:
    """Forward and backward pass of a batch as one graph.

    `step(*inputs)` leaves the gradient of `loss(*inputs)` in the parameters' `.grad` and returns
    the loss, a scalar.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], enabled: bool = True):
        self.model = model
        self.loss = loss
        self.graphed = GraphedFunction(self._forward_backward, enabled)
        self.refresh()

    def refresh(self) -> None:
        """Forget captured graphs if the model's tensors were replaced. Call it before training."""
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self.graphed.enabled:
            return
        tensors = [*self.model.parameters(), *self.model.buffers()]
        addresses = [*(tensor.data_ptr() for tensor in tensors), len(self.parameters)]
        if addresses != getattr(self, "addresses", addresses):
            self.graphed.clear()
        self.addresses = addresses

    def __call__(self, *inputs: Any) -> Tensor:
        loss, gradients = self.graphed(*inputs)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        return loss.clone() if loss.is_cuda else loss  # a replay overwrites it

    def _forward_backward(self, *inputs: Any) -> tuple[Tensor, list[Tensor | None]]:
        for p in self.parameters:
            p.grad = None
        loss = self.loss(*inputs)
        loss.backward()
        return loss.detach(), [p.grad for p in self.parameters]


class RecordedSteps:
    """Several optimizer steps of a `Stack`, captured once and replayed from other parameters.

    Each replay starts with a fresh optimizer and uses the same losses and inputs.

    Args:
        losses: one per step, as `Stack.step` takes them.
        inputs: of every step.
    """

    def __init__(self, stack: Stack, losses: Sequence[Callable[..., Tensor]], *inputs: Any):
        self.stack = stack
        self.losses = losses
        self.inputs = inputs
        for group in stack.optimizer.param_groups:
            group["capturable"] = True
        # run once outside the graph: kernels are chosen and the optimizer allocates its state
        warmup = torch.cuda.Stream()
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            self._run()
        torch.cuda.current_stream().wait_stream(warmup)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.last_losses = self._run()

    def _run(self) -> Tensor:
        for state in self.stack.optimizer.state.values():
            for value in state.values():
                value.zero_()
        for loss in self.losses:
            last_losses = self.stack.step(loss, *self.inputs)
        return last_losses

    def replay(
        self, parameters: Sequence[dict[str, Tensor]]
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Run the steps from these parameters, a dict by name per model.

        Returns: each model's parameters after the steps, and its last loss, (models,).
        """
        with torch.no_grad():
            for name, p in self.stack.parameters.items():
                p.copy_(torch.stack([own[name] for own in parameters]))
        self.graph.replay()
        return self.stack.unstack(), self.last_losses.clone()


def is_on_gpu(inputs: Any) -> bool:
    """Whether the first tensor in a tree of them is on a GPU."""
    while not isinstance(inputs, Tensor):
        inputs = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]
    return inputs.is_cuda


def input_signature(leaves: list[Tensor], tree: Any) -> tuple:
    """What inputs must share to use one graph: tree structure with its names, shapes, dtypes."""
    return tree, *((leaf.shape, leaf.dtype) for leaf in leaves)


def new_memory_pool() -> Any:
    """A memory pool that graphs can share, kept alive by an empty graph that owns it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
    return graph


def capture(function: Callable[[], Any], pool: Any) -> tuple[Any, Any] | None:
    """Capture a function's GPU work without running it, in a pool of `new_memory_pool`.

    Returns: the graph and the function's outputs, which a replay fills; None, with a warning, if
        it cannot be captured, for instance because it reads values.
    """
    graph = torch.cuda.CUDAGraph()
    usual_stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, pool=pool.pool()):
            outputs = function()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        log.warning(
            "a pass cannot be recorded as a CUDA graph, so the GPU waits for Python: %s", first_line
        )
        torch.cuda.set_stream(usual_stream)  # a failed capture does not restore it
        torch.cuda.synchronize()
        new_memory_pool()  # only a successful capture unlocks the GPU's random numbers again
        return None
    return graph, outputs


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
