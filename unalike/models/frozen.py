"""Weights that do not learn: not trained, saved or sent.

`exclude_frozen` leaves them out of an encoder's `state_dict`, which is what methods send and what
is saved. Whoever builds the encoder again gets the same weights.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_include_frozen: ContextVar[bool] = ContextVar("include_frozen", default=False)


class Frozen(nn.Module):
    """An encoder that may have frozen weights; `state_dict` leaves them out.

    It need not have a trunk (`find_trunk`): adapters may learn in every layer.
    """

    frozen_names: frozenset[str] = frozenset()

    @property
    def has_fixed_trunk(self) -> bool:
        """Whether weights are frozen; a trunk's output, if there is a trunk, then never changes."""
        return bool(self.frozen_names)

    def exclude_frozen(self) -> None:
        """From now on leave out of `state_dict` what does not learn."""
        exclude_frozen(self)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that always uses its stored statistics, in training too."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        return super().train(False)


def exclude_frozen(module: nn.Module) -> None:
    """From now on leave out of a module's `state_dict` what does not learn, in place.

    These are parameters without gradient and the statistics of `FrozenBatchNorm2d` layers. Other
    buffers stay: they may move in training, as the statistics of batch norms do.

    >>> net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    >>> exclude_frozen(net)
    >>> list(net.state_dict())
    ['1.weight', '1.bias']
    """
    names = set()
    for name, weight in module.named_parameters(remove_duplicate=False):
        if not weight.requires_grad:
            names.add(name)
    for path, layer in module.named_modules():
        if isinstance(layer, FrozenBatchNorm2d):
            names |= {f"{path}.{buffer}" for buffer, _ in layer.named_buffers()}
    if names and not getattr(module, "frozen_names", None):
        module.register_state_dict_post_hook(_remove_frozen_keys)
        module.register_load_state_dict_post_hook(_ignore_frozen_keys)
    if names or isinstance(module, Frozen):
        module.frozen_names = frozenset(names)  # type: ignore[assignment]


def whole_state(module: nn.Module, keep_vars: bool = False) -> dict[str, Tensor]:
    """The `state_dict` of a module, with what is frozen.

    >>> net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False))
    >>> exclude_frozen(net)
    >>> list(net.state_dict()), list(whole_state(net))
    ([], ['0.weight', '0.bias'])
    """
    with including_frozen():
        return module.state_dict(keep_vars=keep_vars)


@contextmanager
def including_frozen() -> Iterator[None]:
    """Within the context, `state_dict` has what is frozen and `load_state_dict` asks for it."""
    token = _include_frozen.set(True)
    try:
        yield
    finally:
        _include_frozen.reset(token)


def hash_frozen(module: nn.Module) -> str:
    """Hash of what `state_dict` leaves out, 16 hexadecimal digits; empty where that is nothing."""
    learns = module.state_dict().keys()
    digest = hashlib.sha256()
    count = 0
    for name, tensor in sorted(whole_state(module).items()):
        if name not in learns:
            count += 1
            digest.update(f"{name}:{tuple(tensor.shape)}".encode())
            values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if count else ""


def _remove_frozen_keys(module: nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
    """After `state_dict`: leave out what is frozen."""
    if not _include_frozen.get():
        for name in module.frozen_names:  # type: ignore[union-attr]
            state.pop(prefix + name, None)


def _ignore_frozen_keys(module: nn.Module, keys: Any) -> None:
    """After `load_state_dict`: frozen weights are not missing."""
    if _include_frozen.get():
        return
    frozen: Any = module.frozen_names
    suffixes = tuple(f".{name}" for name in frozen)
    keys.missing_keys[:] = [
        key for key in keys.missing_keys if key not in frozen and not key.endswith(suffixes)
    ]
