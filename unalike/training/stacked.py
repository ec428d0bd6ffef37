"""Models of one architecture trained as one batched program (torch.func.vmap)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unalike.training.loop import Training, build_optimizer


class Stack:
    """Models of one architecture whose parameters are stacked along a new first axis.

    Each model gets the arithmetic it would get alone, clipping included. Models with dropout or
    batch norm cannot be stacked (`is_stochastic`).

    Args:
        model: the architecture; its own parameters are not used.
        parameters: one dict of parameters by name per model.
        lr: instead of `training.lr`.
        lr_scales: learning rates by the start of a parameter's name, relative to the others'.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[dict[str, Tensor]],
        training: Training,
        lr: float | None = None,
        lr_scales: Mapping[str, float] | None = None,
    ):
        self.model = model
        self.count = len(parameters)
        self.max_grad_norm = training.max_grad_norm
        self.stored: dict[str, Tensor] = {}  # as the optimizer sees them: see _swap_matrix_axes
        for name, pattern in model.named_parameters():
            stacked = torch.stack([own[name].detach() for own in parameters])
            stacked = _swap_matrix_axes(stacked).contiguous()
            self.stored[name] = stacked.requires_grad_(pattern.requires_grad)
        self.optimizer = self._build_optimizer(training, lr, lr_scales or {})

    def _build_optimizer(
        self, training: Training, lr: float | None, lr_scales: Mapping[str, float]
    ) -> torch.optim.Optimizer:
        trained = {name: p for name, p in self.stored.items() if p.requires_grad}
        scaled: dict[str, list[Tensor]] = {prefix: [] for prefix in lr_scales}
        others: list[Tensor] = []
        for name, p in trained.items():
            prefix = next((prefix for prefix in lr_scales if name.startswith(prefix)), None)
            others.append(p) if prefix is None else scaled[prefix].append(p)
        optimizer = build_optimizer(others, training, lr)
        for prefix, parameters in scaled.items():
            rate = lr_scales[prefix] * optimizer.defaults["lr"]
            optimizer.add_param_group({"params": parameters, "lr": rate})
        return optimizer

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By name, (models, ...)."""
        return {name: _swap_matrix_axes(p) for name, p in self.stored.items()}

    def step(self, loss: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """One optimizer step of every model.

        Args:
            loss: `loss(model, *inputs)` of one model, a scalar.
            inputs: tensors, or trees of them, whose first axis runs over the models.
        Returns: the losses before the step, (models,).
        """
        module = _LossModule(self.model, loss)

        def loss_of_one(parameters: dict[str, Tensor], *own_inputs: Any) -> Tensor:
            named = {f"model.{name}": p for name, p in parameters.items()}
            return torch.func.functional_call(module, named, own_inputs)

        if self.count == 1:  # without vmap, which would only cost time
            single = tree_map(lambda rows: rows.squeeze(0), (self.parameters, *inputs))
            losses = loss_of_one(*single)[None]
        else:
            losses = torch.func.vmap(loss_of_one)(self.parameters, *inputs)
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        if self.max_grad_norm:
            self._clip_gradients(self.max_grad_norm)
        self.optimizer.step()
        return losses.detach()

    def _clip_gradients(self, max_norm: float) -> None:
        """Clip the gradient of each model by its own norm, as clip_grad_norm_ does for one."""
        grads = [p.grad for p in self.stored.values() if p.grad is not None]
        squares = [grad.flatten(1).square().sum(1) for grad in grads]
        norms = torch.stack(squares).sum(0).sqrt()  # (models,)
        factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factors.reshape(-1, *[1] * (grad.dim() - 1)))

    def unstack(self) -> list[dict[str, Tensor]]:
        """A copy of each model's parameters by name."""
        copies = {}
        for name, p in self.parameters.items():
            copies[name] = p.detach().clone(memory_format=torch.contiguous_format)
        return [{name: p[i] for name, p in copies.items()} for i in range(self.count)]


def _swap_matrix_axes(stacked: Tensor) -> Tensor:
    """Transpose stacked matrices (models, out, in); leave all else. It is its own inverse.

    The batched product's gradient of a weight is transposed in memory, and a fused optimizer
    accepts it without a copy only if the weight has the same layout.
    """
    return stacked.mT if stacked.ndim == 3 else stacked


class _LossModule(nn.Module):
    """`function(model, *inputs)` as a module, so that functional_call can swap parameters."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]):
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self.model, *inputs)
