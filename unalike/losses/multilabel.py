"""Losses of multi-label outputs, entry by entry, where some labels may be unknown.

output (..., labels) are logits; y has the same shape: 1 present, 0 absent, below 0 or NaN unknown.
Losses have that shape, too, and are 0 where the label is unknown: `known_mean` averages them;
`.sum(-1).mean()` is a sum over a sample's labels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def binary_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """-log p where present, -log (1 - p) where absent, p = sigmoid(output).

    Args:
        output: logits (B, labels).
        y: (B, labels): 1 present, 0 absent, NaN or -1 unknown.
    Returns: the cost of each entry, (B, labels).

    >>> binary_cross_entropy(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, -1.0]]))
    tensor([[0.6931, 0.6931, 0.0000]])
    """
    known, target = _target(output, y)
    return F.binary_cross_entropy_with_logits(output, target, reduction="none") * known


def focal(output: Tensor, y: Tensor, gamma: float = 2.0) -> Tensor:
    """Cross entropy times (1 - p_t)^gamma, p_t the probability of the true label.

    Args:
        output: logits (B, labels).
        y: (B, labels): 1 present, 0 absent, NaN or -1 unknown.
        gamma: exponent; 0 is the cross entropy.
    Returns: the cost of each entry, (B, labels).
    Reference: Lin et al. 2017, eq. 4, https://arxiv.org/abs/1708.02002

    >>> output, y = torch.ones(1, 2), torch.ones(1, 2)
    >>> bool((focal(output, y, gamma=0.0) == binary_cross_entropy(output, y)).all())
    True
    """
    return asymmetric(output, y, gamma, gamma, 0.0)


def asymmetric(
    output: Tensor, y: Tensor, negative: float = 4.0, positive: float = 1.0, margin: float = 0.05
) -> Tensor:
    """Focal loss with an exponent for each side; absent labels below `margin` cost nothing.

    With p_m = max(p - margin, 0): -(1 - p)^positive log p where present, -p_m^negative log (1 -
    p_m) where absent.

    Args:
        output: logits (B, labels).
        y: (B, labels): 1 present, 0 absent, NaN or -1 unknown.
        negative: exponent of absent labels.
        positive: exponent of present labels.
        margin: probability below which an absent label costs nothing.
    Returns: the cost of each entry, (B, labels).
    Reference: Ridnik et al. 2021, eq. 4 to 7, https://arxiv.org/abs/2009.14119
    """
    for name, power in (("negative", negative), ("positive", positive)):
        # between 0 and 1 the slope is infinite where the prediction is perfect
        if not (power == 0 or power >= 1):
            raise ValueError(f"the focusing exponent {name} must be 0 or at least 1, got {power}")
    if not 0 <= margin < 1:
        raise ValueError(f"the margin of a probability lies from 0 to below 1, got {margin}")
    known, target = _target(output, y)
    shifted = (output.sigmoid() - margin).clamp(min=0)
    missed = (-output).sigmoid()  # 1 - p, without cancellation
    # log (1 - p_m)
    absent = (missed + margin).clamp(max=1).log() if margin else F.logsigmoid(-output)
    if_present = target * missed**positive * F.logsigmoid(output)
    if_absent = (1 - target) * shifted**negative * absent
    return -(if_present + if_absent) * known


def known_mean(costs: Tensor, y: Tensor) -> Tensor:
    """The mean loss of the known entries, a scalar; 0 if none is known.

    Args:
        costs: of each entry, (B, labels).
        y: (B, labels): 1 present, 0 absent, NaN or -1 unknown.
    """
    return costs.sum() / (y >= 0).sum().clamp(min=1)


def _target(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are known, and the labels with 0 in place of unknown ones."""
    if output.shape != y.shape:
        raise ValueError(
            "every output needs its label: both have one shape, "
            f"got {tuple(output.shape)} and {tuple(y.shape)}"
        )
    known = y >= 0  # false for NaN
    return known, torch.where(known, y, 0.0).to(output.dtype)
