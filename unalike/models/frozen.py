"""Pretrained weights that stay as published: not trained, saved or sent."""

from typing import Any

from torch import nn


class Frozen(nn.Module):
    """An encoder that may have frozen weights; `state_dict` leaves them out.

    Whoever builds the encoder again loads the same published weights. It need not have a trunk
    (`find_trunk`): adapters may learn in every layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen_names: frozenset[str] = frozenset()
        self.register_load_state_dict_post_hook(_ignore_frozen_keys)

    @property
    def has_fixed_trunk(self) -> bool:
        """Whether weights are frozen; a trunk's output, if there is a trunk, then never changes."""
        return bool(self.frozen_names)

    def exclude_frozen(self) -> None:
        """From now on leave out of `state_dict` what does not learn.

        These are parameters without gradient and the statistics of `FrozenBatchNorm2d` layers.
        """
        names = {name for name, weight in self.named_parameters() if not weight.requires_grad}
        for path, module in self.named_modules():
            if isinstance(module, FrozenBatchNorm2d):
                names |= {f"{path}.{buffer}" for buffer, _ in module.named_buffers()}
        self.frozen_names = frozenset(names)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        for name in self.frozen_names:
            state.pop(options.get("prefix", "") + name, None)
        return state


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that always uses its stored statistics, in training too."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        return super().train(False)


def _ignore_frozen_keys(module: Frozen, keys: Any) -> None:
    """After `load_state_dict`: frozen weights are not missing."""
    frozen = module.frozen_names
    suffixes = tuple(f".{name}" for name in frozen)
    keys.missing_keys[:] = [
        key for key in keys.missing_keys if key not in frozen and not key.endswith(suffixes)
    ]
