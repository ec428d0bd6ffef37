"""Published weights that stay as they are: they do not learn, and are in no state, message or checkpoint. Knows no tasks or clients."""

from typing import Any

from torch import nn


class Frozen(nn.Module):
    """An encoder some of whose weights may be held. Its `state_dict` leaves these out: whoever builds the encoder again has them again.

    It need not have a trunk (`find_trunk` in model.py): adapters may learn in every layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: frozenset[str] = frozenset()
        self.register_load_state_dict_post_hook(_not_missed)

    @property
    def has_fixed_trunk(self) -> bool:
        """Whether weights are held; then the output of a trunk, where there is one, never changes."""
        return bool(self.held)

    def hold(self) -> None:
        """From here on, weights that do not learn, and the statistics of layers that are `Still`, are left out."""
        still = {
            f"{name}.{key}"
            for name, module in self.named_modules()
            if isinstance(module, FrozenBatchNorm2d)
            for key, _ in module.named_buffers()
        }
        self.held = frozenset(
            still | {name for name, weight in self.named_parameters() if not weight.requires_grad}
        )

    def state_dict(self, *args: Any, **options: Any) -> Any:
        told = super().state_dict(*args, **options)
        for name in self.held:
            told.pop(options.get("prefix", "") + name, None)
        return told


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation by published statistics, in training as well: few rows of another kind would spoil them."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        return super().train(False)


def _not_missed(module: Frozen, keys: Any) -> None:
    keys.missing_keys[:] = [
        key
        for key in keys.missing_keys
        if not any(key == name or key.endswith(f".{name}") for name in module.held)
    ]
