"""SGD, Adam and AdamW of several models at once, each with its own learning rate and step count.

The arithmetic is that of torch.optim, entry by entry. State is taken over from the optimizer of
each model and handed back to it.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from unalike.training import eager

# State of a parameter in torch.optim, without the number of steps.
MOMENTS = {SGD: ("momentum_buffer",), Adam: ("exp_avg", "exp_avg_sq")}
MOMENTS[AdamW] = MOMENTS[Adam]
# Classes with the same arithmetic as one of torch.optim.
SAME_AS: dict[type, type] = {eager.SGD: SGD, eager.Adam: Adam, eager.AdamW: AdamW}
# Options that are computed here. All others must be off.
COMPUTED = {"params", "lr", "initial_lr", "weight_decay", "momentum", "betas", "eps", "fused"}
IGNORED = {"foreach", "capturable"}  # another way to do the same arithmetic


def optimizer_kind(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> Hashable | None:
    """Equal for optimizers that can be stacked; None if this one cannot.

    Learning rates and numbers of steps may differ.

    Args:
        parameters: of its model, by full name.
    """
    kind_of_step = torch_class(optimizer)
    if kind_of_step not in MOMENTS:
        return None
    names = {id(p): name for name, p in parameters.items()}
    kind = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in IGNORED}
        decoupled = options.pop("decoupled_weight_decay", False)
        if decoupled and kind_of_step is not AdamW:
            return None
        if any(options[key] for key in options.keys() - COMPUTED):
            return None
        if any(id(p) not in names for p in group["params"]):
            return None
        computed = [
            (key, options[key])
            for key in sorted(COMPUTED - {"params", "lr", "initial_lr"})
            if key in options
        ]
        kind.append((tuple(names[id(p)] for p in group["params"]), tuple(computed)))
    return kind_of_step, tuple(kind)


def torch_class(optimizer: Optimizer) -> type:
    """The class of torch.optim whose arithmetic an optimizer has; its own class for all others."""
    return SAME_AS.get(type(optimizer), type(optimizer))


class StackedOptimizer:
    """The optimizers of several models, whose parameters are stacked along a first axis.

    Args:
        model: one of the models.
        optimizer: its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        names = {p: name for name, p in model.named_parameters()}
        self.type = torch_class(optimizer)
        self.groups = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            self.groups.append({**options, "names": [names[p] for p in group["params"]]})
        with_state = self.type is not SGD or any(group["momentum"] for group in self.groups)
        self.moments = MOMENTS[self.type] if with_state else ()
        self.updated: set[str] = set()  # names of parameters that had a gradient

    def read_state(
        self, by_name: Sequence[Mapping[str, Tensor]], optimizers: Sequence[Optimizer]
    ) -> dict[str, Tensor]:
        """All state, with a first axis of models: learning rates, step counts and moments.

        Args:
            by_name: parameters of each model.
        """
        state: dict[str, Tensor] = {}
        for number, group in enumerate(self.groups):
            device = by_name[0][group["names"][0]].device if group["names"] else None
            rates = [o.param_groups[number]["lr"] for o in optimizers]
            state[f"lr.{number}"] = torch.tensor(rates, dtype=torch.float64, device=device)
            for name in group["names"]:
                parameters = [own[name] for own in by_name]
                entries = [o.state.get(p, {}) for o, p in zip(optimizers, parameters, strict=True)]
                for moment in self.moments:
                    if all(entry.get(moment) is None for entry in entries):
                        first = parameters[0].detach()
                        zeros = first.new_zeros(len(parameters), *first.shape)
                        state[f"{moment}.{name}"] = zeros
                        continue
                    values = [
                        p.detach().new_zeros(p.shape)
                        if entry.get(moment) is None
                        else entry[moment]
                        for entry, p in zip(entries, parameters, strict=True)
                    ]
                    state[f"{moment}.{name}"] = torch.stack(values)
                if self.type is not SGD:
                    if not any(entries):
                        zeros = torch.zeros(len(entries), dtype=torch.float64, device=device)
                        state[f"step.{name}"] = zeros
                        continue
                    steps = [torch.as_tensor(entry.get("step", 0.0)) for entry in entries]
                    on_device = [step.to(device, torch.float64) for step in steps]
                    state[f"step.{name}"] = torch.stack(on_device)
        return state

    def fresh_state(
        self, tensors: Mapping[str, Tensor], optimizer: Optimizer, count: int
    ) -> dict[str, Tensor]:
        """What `read_state` gives for so many models whose optimizers took no step yet.

        Args:
            tensors: parameters of one of the models.
            optimizer: one of them; it must have no state.
        """
        state: dict[str, Tensor] = {}
        for number, group in enumerate(self.groups):
            device = tensors[group["names"][0]].device if group["names"] else None
            rate = optimizer.param_groups[number]["lr"]
            state[f"lr.{number}"] = torch.full((count,), rate, dtype=torch.float64, device=device)
            for name in group["names"]:
                first = tensors[name].detach()
                for moment in self.moments:
                    state[f"{moment}.{name}"] = first.new_zeros(count, *first.shape)
                if self.type is not SGD:
                    zeros = torch.zeros(count, dtype=torch.float64, device=device)
                    state[f"step.{name}"] = zeros
        return state

    def write_state(
        self,
        state: dict[str, Tensor],
        by_name: Sequence[Mapping[str, Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Hand the state back to the optimizer of each model."""
        if not self.moments:
            return
        for group in self.groups:
            for name in group["names"]:
                if name not in self.updated:
                    continue  # it never had a gradient
                keys = [*self.moments, "step"] if self.type is not SGD else self.moments
                values = {key: state[f"{key}.{name}"].clone() for key in keys}
                if "step" in values:
                    values["step"] = values["step"].float()
                    if not group.get("fused"):
                        values["step"] = values["step"].cpu()
                parts = {key: value.unbind() for key, value in values.items()}
                for i, (own, optimizer) in enumerate(zip(by_name, optimizers, strict=True)):
                    optimizer.state[own[name]] = {key: part[i] for key, part in parts.items()}

    def step(
        self,
        parameters: dict[str, Tensor],
        gradients: dict[str, Tensor | None],
        state: dict[str, Tensor],
        active: Tensor | None = None,
    ) -> None:
        """One step of every model, in place. All tensors have a first axis of models.

        Args:
            gradients: by name; None where a loss does not depend on a parameter.
            state: of `read_state`.
            active: (models,) bool: which models take the step. None: all.
        """
        for number, group in enumerate(self.groups):
            lr = state[f"lr.{number}"]
            present = {n: g for n in group["names"] if (g := gradients[n]) is not None}
            self.updated.update(present)
            if self.type is SGD and not (self.moments or group["weight_decay"]) and active is None:
                _plain_sgd([parameters[name] for name in present], list(present.values()), lr)
                continue
            for name, gradient in present.items():
                p = parameters[name]
                own = {moment: state[f"{moment}.{name}"] for moment in self.moments}
                if self.type is SGD:
                    new = _sgd(p, gradient, own, lr, group, active)
                else:
                    own["step"] = state[f"step.{name}"]
                    decoupled = self.type is AdamW
                    new = _adam(p, gradient, own, lr, group, active, decoupled)
                _assign(p, new, active)


def _plain_sgd(parameters: list[Tensor], gradients: list[Tensor], lr: Tensor) -> None:
    """A step of SGD without momentum and weight decay, of all parameters, in place."""
    if not parameters:
        return
    if len(lr) == 1:  # few kernels for a large model of many tensors
        rate = lr[0].to(parameters[0].dtype)
        torch._foreach_sub_(parameters, torch._foreach_mul(gradients, rate))
        return
    rates = {p.dtype: lr.to(p.dtype) for p in parameters}
    for p, gradient in zip(parameters, gradients, strict=True):
        p.addcmul_(gradient, _like(rates[p.dtype], p), value=-1)


def _sgd(
    p: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    lr: Tensor,
    group: dict[str, Any],
    active: Tensor | None,
) -> Tensor:
    """The parameter after a step of SGD; its momentum is updated in place."""
    if group["weight_decay"]:
        gradient = gradient.add(p, alpha=group["weight_decay"])
    if state:
        buffer = state["momentum_buffer"]
        _assign(buffer, (buffer * group["momentum"]).add_(gradient), active)
        gradient = buffer
    return p.addcmul(gradient, _like(lr, p), value=-1)


def _adam(
    p: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    lr: Tensor,
    group: dict[str, Any],
    active: Tensor | None,
    decoupled: bool,
) -> Tensor:
    """The parameter after a step of Adam or AdamW; moments and step count are updated in place."""
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    mean, square, steps = state["exp_avg"], state["exp_avg_sq"], state["step"]
    _assign(steps, steps + 1, active)
    if decay and decoupled:
        p = p * _like(1 - lr * decay, p)
    elif decay:
        gradient = gradient.add(p, alpha=decay)
    _assign(mean, mean.lerp(gradient, 1 - beta1), active)
    _assign(square, (square * beta2).addcmul_(gradient, gradient, value=1 - beta2), active)
    correction = (1 - beta2**steps).sqrt()
    deviation = square.sqrt().div_(_like(correction, p)).add_(group["eps"])
    rate = lr / (1 - beta1**steps)
    return p.addcmul(mean / deviation, _like(rate, p), value=-1)


def _assign(target: Tensor, value: Tensor, active: Tensor | None) -> None:
    """Copy a value (models, ...) in place, of active models only."""
    if active is not None:
        value = torch.where(active.reshape(-1, *[1] * (target.ndim - 1)), value, target)
    target.copy_(value)


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """(models,) as a factor of a tensor (models, ...)."""
    return values.to(tensor.dtype).reshape(-1, *[1] * (tensor.ndim - 1))
