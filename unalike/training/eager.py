"""The optimizers of torch.optim without the import of PyTorch's compiler.

torch.optim imports torch._dynamo, and sympy with it, at the first optimizer: a second of CPU time
in every process, only to say that compiled code must not reach into the optimizer. The classes here
do without, since no training loop of ours is compiled. They run the same code otherwise.
"""

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

# Methods that torch.optim wraps, so that its compiler leaves them out.
GUARDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


class Eager(Optimizer):
    """Base of the classes below: the methods of `Optimizer` as they are without their wrappers."""


class SGD(Eager, torch.optim.SGD):
    """torch.optim.SGD."""


class Adam(Eager, torch.optim.Adam):
    """torch.optim.Adam."""


class AdamW(Eager, torch.optim.AdamW):
    """torch.optim.AdamW."""


def _unwrap() -> None:
    for name in GUARDED:
        setattr(Eager, name, inspect.unwrap(getattr(Optimizer, name)))
    for kind in (SGD, Adam, AdamW):
        step: Any = inspect.unwrap(kind.step)
        kind.step = torch.no_grad()(step)  # type: ignore[method-assign]


_unwrap()
