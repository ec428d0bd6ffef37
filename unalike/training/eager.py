"""The optimizers of torch.optim without the import of PyTorch's compiler, and with less Python.

torch.optim imports torch._dynamo, and sympy with it, at the first optimizer: a second of CPU time
in every process, only to say that compiled code must not reach into the optimizer. The classes here
do without, since no training loop of ours is compiled. They run the same code otherwise.

A step of torch's fused Adam spends more time on its checks than on its kernel, where models are
small or a GPU does the arithmetic. Once it took its first step, ours calls the same kernel at once.
"""

import inspect
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer

# Methods that torch.optim wraps, so that its compiler leaves them out.
GUARDED = ("add_param_group", "load_state_dict", "state_dict")
# Options of Adam that a fused step without torch's checks does not know.
UNUSUAL = ("amsgrad", "maximize", "differentiable", "capturable")


class Eager(Optimizer):
    """Base of the classes below: the methods of `Optimizer` as they are without their wrappers."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove all gradients, or set them to zero."""
        if not set_to_none:
            inspect.unwrap(Optimizer.zero_grad)(self, set_to_none=False)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class SGD(Eager, torch.optim.SGD):
    """torch.optim.SGD."""


class EagerAdam(Eager, torch.optim.Adam):
    """Base of Adam and AdamW: a fused step without checks, wherever torch's would do just that."""

    def step(self, closure: Any = None) -> Any:
        """One step, with the gradients that the parameters hold."""
        kernels = None if closure is not None or self._is_watched() else self._kernel_inputs()
        if kernels is None:
            return _torch_step(self, closure)
        with torch.no_grad():
            for group, tensors in kernels:
                torch._foreach_add_(tensors[-1], 1)
                function = torch._fused_adam_
                if group["decoupled_weight_decay"]:
                    function = torch._fused_adamw_
                parameters, gradients, means, squares, steps = tensors
                function(
                    parameters,
                    gradients,
                    means,
                    squares,
                    [],  # of amsgrad
                    steps,
                    amsgrad=False,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap it: `_torch_step` is

    def _is_watched(self) -> bool:
        """Whether a step has hooks, is profiled, or gets the scale of a `GradScaler`."""
        hooks = chain(
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        )
        scaled = hasattr(self, "grad_scale") or hasattr(self, "found_inf")
        return scaled or any(True for _ in hooks) or torch.autograd._profiler_enabled()

    def _kernel_inputs(self) -> list[tuple[dict[str, Any], tuple[list[Tensor], ...]]] | None:
        """For each group its parameters with a gradient, their gradients and their state.

        Returns: None where a group needs more than one kernel, or has no state yet.
        """
        kernels: list[tuple[dict[str, Any], tuple[list[Tensor], ...]]] = []
        for group in self.param_groups:
            numbers = (group["lr"], *group["betas"])
            if not group["fused"] or any(map(group.get, UNUSUAL)):
                return None
            if any(isinstance(number, Tensor) for number in numbers):
                return None
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients: list[Any] = [p.grad for p in parameters]
            states = [self.state[p] for p in parameters]
            kinds = {(p.device, p.dtype) for p in parameters}
            if not all(states) or len(kinds) > 1 or any(g.is_sparse for g in gradients):
                return None
            means = [state["exp_avg"] for state in states]
            squares = [state["exp_avg_sq"] for state in states]
            steps = [state["step"] for state in states]
            kernels.append((group, (parameters, gradients, means, squares, steps)))
        return kernels


class Adam(EagerAdam):
    """torch.optim.Adam."""


class AdamW(EagerAdam, torch.optim.AdamW):
    """torch.optim.AdamW."""


def _torch_step_of(kind: type[Optimizer]) -> Any:
    """A step as torch takes it, without the wrapper of its compiler."""
    step: Any = inspect.unwrap(kind.step)
    return torch.no_grad()(step)


# With hooks and the profiler's mark.
_torch_step = Optimizer.profile_hook_step(_torch_step_of(torch.optim.Adam))


def _unwrap() -> None:
    for name in GUARDED:
        setattr(Eager, name, inspect.unwrap(getattr(Optimizer, name)))
    SGD.step = _torch_step_of(torch.optim.SGD)  # type: ignore[method-assign]


_unwrap()
