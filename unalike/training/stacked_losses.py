"""Cross entropies of a stack of models without PyTorch's decomposition of them.

torch.func.vmap has no rule for the negative log-likelihood. It runs it step by step in Python, and
the first of these steps imports sympy: a third of a second of every process that trains stacks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEFAULTS = {
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


class CrossEntropies(TorchFunctionMode):
    """Within it, sums of cross entropies with class numbers are computed by `sum_entropies`."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy and len(args) >= 2 and not args[1].is_floating_point():
            options = DEFAULTS | dict(zip(DEFAULTS, args[2:], strict=False)) | kwargs
            plain = ("size_average", "reduce", "label_smoothing")
            if options["reduction"] == "sum" and not any(options[name] for name in plain):
                output, y = args[:2]
                return sum_entropies(output, y, options["weight"], options["ignore_index"])
        return function(*args, **kwargs)


def sum_entropies(
    output: Tensor, y: Tensor, weight: Tensor | None = None, ignored: int = -100
) -> Tensor:
    """What `F.cross_entropy` gives with `reduction="sum"`.

    Args:
        output: (n, classes, ...), before softmax.
        y: (n, ...), numbers of classes.
        weight: (classes,).
        ignored: number that marks rows that do not count.

    >>> output, y = torch.randn(4, 3), torch.tensor([0, 2, -1, 1])
    >>> own = sum_entropies(output, y, torch.ones(3), ignored=-1)
    >>> torch.allclose(own, F.cross_entropy(output, y, ignore_index=-1, reduction="sum"))
    True
    """
    counts = y != ignored
    known = torch.where(counts, y, 0)
    picked = output.log_softmax(1).gather(1, known.unsqueeze(1)).squeeze(1)
    if weight is not None:
        picked = picked * weight[known]
    return -torch.where(counts, picked, 0).sum()
