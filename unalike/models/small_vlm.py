"""A small real model that sees and reads: EfficientNet-lite0 and MiniLM-L6, brought together on Flickr8k. Knows nothing of its training."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from unalike.models.efficientnet import EfficientNetLite
from unalike.models.minilm import MiniLM
from unalike.models.vlm import DualEncoder, stored

SHIPPED = Path(__file__).parent / "weights" / "vlm-small.safetensors"


class SmallVLM(DualEncoder):
    """EfficientNet-lite0 and MiniLM-L6 with published weights, and two linear layers into one space that `unalike train-vlm` made.

    Images are enlarged to `size`, a 32nd of it places a side; the whole is the mean of its places. `weights` is "shipped" or a file of
    those two layers. Needs `pip install unalike[hub,weights]`.
    """

    def __init__(self, shape: Sequence[int], size: int = 224, weights: str = "shipped"):
        held = stored(SHIPPED if weights == "shipped" else Path(weights), "small")
        if (
            missing := {"seen.weight", "seen.bias", "told.weight", "told.bias", "scale"}
            - held.keys()
        ):
            raise ValueError(
                f"{weights} has no {sorted(missing)[0]}: `unalike train-vlm small --out FILE` makes the layers of vlm-small"
            )
        eye, reader = EfficientNetLite(shape, size=size), MiniLM()
        width = len(held["seen.bias"])
        super().__init__(
            eye,
            reader,
            nn.Linear(eye.width, width),
            nn.Linear(reader.width, width),
            shape,
            scale=held["scale"].item(),
        )
        for name, layer in (("seen", self.seen), ("told", self.told)):
            layer.load_state_dict({part: held[f"{name}.{part}"] for part in ("weight", "bias")})
