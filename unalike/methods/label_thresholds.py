"""A threshold for each label of a multi-label task, chosen on the clients' training rows.

A label is predicted above probability 0.5, but a model may rank well and be too modest or too bold.
Clients count, at thresholds of a grid, how often they would be right; the server adds the counts of
all and takes the threshold with the best F1 of each label. It becomes part of the model: the bias
of the label's output falls by the threshold, so that what was above it is above 0 now.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from unalike.base.types import Parameters

GRID = torch.linspace(-6, 6, 49, dtype=torch.float64)  # thresholds of logits, steps of 0.25


def count_hits(outputs: Tensor, y: Tensor) -> Tensor:
    """Counts of one batch, (labels, grid, 3): hits, guesses and present labels.

    Args:
        outputs: logits (n, labels).
        y: labels (n, labels): 1 present, 0 absent, below 0 or NaN unknown.
    """
    known, present = (y >= 0)[..., None], (y == 1)[..., None]
    guessed = (outputs[..., None].double() > GRID.to(outputs.device)) & known
    columns = [guessed & present, guessed, present.expand_as(guessed)]
    return torch.stack([column.sum(0) for column in columns], -1).double()


def best_thresholds(counts: Iterable[Tensor]) -> Tensor:
    """The threshold of each label, (labels,), with the best F1 over the summed counts.

    Of several that are equally good the one nearest to 0; 0 for a label that nobody has.

    >>> hits = count_hits(torch.tensor([[2.1], [1.1], [-3.0]]), torch.tensor([[1.0], [0.0], [0.0]]))
    >>> best_thresholds([hits])
    tensor([1.2500], dtype=torch.float64)
    """
    total = torch.stack(list(counts)).sum(0)
    hits, guesses, present = total.unbind(-1)
    f1 = 2 * hits / (guesses + present).clamp(min=1)
    ranked = f1 - 1e-9 * GRID.abs().to(f1)  # ties: the one nearest to 0
    best = GRID.to(f1)[ranked.argmax(1)]
    return torch.where(present[:, 0] > 0, best, torch.zeros_like(best))


def shift_outputs(parameters: Parameters, thresholds: Tensor) -> Parameters:
    """Parameters whose outputs are lower by the thresholds.

    Raises:
        ValueError: the head has no bias for each label.
    """
    names = [
        name
        for name, tensor in parameters.items()
        if name.startswith("head.") and name.endswith("bias") and tensor.shape == thresholds.shape
    ]
    if not names:
        raise ValueError(
            f"thresholds: training needs a head with a bias for each of {len(thresholds)} labels; "
            "leave it at half"
        )
    bias = parameters[names[-1]]
    return parameters | {names[-1]: bias - thresholds.to(bias)}
