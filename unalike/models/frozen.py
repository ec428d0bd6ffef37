"""Published weights that stay as they are: they do not learn, and are in no state, message or checkpoint. Knows no tasks or clients."""

from typing import Any

from torch import nn


class Frozen(nn.Module):
    """An encoder some of whose weights may be held. Its `state_dict` leaves these out: whoever builds the encoder again has them again.

    `trunk(x)`, where there is one, is what lies before the first weight that learns: where it is `fixed` its output never changes, so that
    it can be kept instead of the input, and `forward` takes either. Other encoders may have one too, such as those that number words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: frozenset[str] = frozenset()
        self.register_load_state_dict_post_hook(_not_missed)

    @property
    def fixed(self) -> bool:
        return bool(self.held)

    def hold(self) -> None:
        """From here on, weights that do not learn, and the statistics of layers that are `Still`, are left out."""
        still = {
            f"{name}.{key}"
            for name, module in self.named_modules()
            if isinstance(module, Still)
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


class Still(nn.BatchNorm2d):
    """Batch normalisation by published statistics, in training as well: few rows of another kind would spoil them."""

    def train(self, mode: bool = True) -> "Still":
        return super().train(False)


def _not_missed(module: Frozen, keys: Any) -> None:
    keys.missing_keys[:] = [
        key
        for key in keys.missing_keys
        if not any(key == name or key.endswith(f".{name}") for name in module.held)
    ]
