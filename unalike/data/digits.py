"""scikit-learn's 1797 handwritten digits, with several targets. Needs no file."""

import torch
from torch import Tensor

from unalike.data.table import Table
from unalike.tasks import Classification, MultiLabel, Retrieval, Segmentation

SPLIT_SEED = 1797  # fixes which rows are train and which test, for every run
TRAIN_ROWS = 1200

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ATTRIBUTES = {
    "even": (0, 2, 4, 6, 8),
    "at least five": (5, 6, 7, 8, 9),
    "has a loop": (0, 6, 8, 9),
    "prime": (2, 3, 5, 7),
}


def load_digits_table(folder: str | None = None) -> Table:
    """Images (1797, 1, 8, 8) in [0, 1]; 1200 train and 597 test rows, stratified by digit.

    Targets: "digit" (classification), "attributes" of the digit (multi-label), and "ink", the
    pixels of at least half darkness (segmentation; it can be read off the image itself). The folder
    is not used.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    raw = load_digits()
    x = torch.from_numpy(raw.images).float().div(16).unsqueeze(1)
    digit = torch.from_numpy(raw.target).long()
    attributes = [torch.isin(digit, torch.tensor(digits)) for digits in ATTRIBUTES.values()]
    train, test = train_test_split(
        range(len(x)), train_size=TRAIN_ROWS, stratify=raw.target, random_state=SPLIT_SEED
    )
    return Table(
        x=x,
        targets={
            "digit": digit,
            "attributes": torch.stack(attributes, 1).float(),
            "ink": (x[:, 0] >= 0.5).long(),
        },
        tasks={
            "digit": Classification(DIGITS),
            "attributes": MultiLabel(tuple(ATTRIBUTES)),
            "ink": Segmentation(("background", "ink")),
        },
        train=torch.tensor(sorted(train)),
        test=torch.tensor(sorted(test)),
    )


def digits_captions(folder: str | None = None) -> Table:
    """Digits ("image") with generated captions ("caption") of six words, numbers from 1 to 35.

    A caption says which digit it is, how much ink it has, how wide, how tall, how slanted and how
    low it is. Rows and split are those of `digits`. Targets: "pair" (retrieval) and "digit".
    """
    plain = load_digits_table()
    assert isinstance(plain.x, Tensor)
    x, position = plain.x[:, 0], torch.arange(8.0)
    ink = x.sum((1, 2))[:, None]
    across, down = x.sum(1) / ink, x.sum(2) / ink  # (n, 8), share of the ink per column and row
    centre_x, centre_y = (across * position).sum(1), (down * position).sum(1)
    slant = (
        x * (position[:, None] - centre_y[:, None, None]) * (position - centre_x[:, None, None])
    ).sum((1, 2))
    measures = (x.mean((1, 2)), _spread(across), _spread(down), slant, centre_y)
    words = [plain.targets["digit"] + 1]
    for i, measure in enumerate(measures):
        fifths = torch.quantile(measure[plain.train], torch.tensor([0.2, 0.4, 0.6, 0.8]))
        words.append(torch.bucketize(measure, fifths) + 11 + 5 * i)
    return Table(
        x={"image": plain.x, "caption": torch.stack(words, 1)},
        targets={"pair": torch.arange(len(x)), "digit": plain.targets["digit"]},
        tasks={"pair": Retrieval(), "digit": plain.tasks["digit"]},
        train=plain.train,
        test=plain.test,
    )


def _spread(share: Tensor) -> Tensor:
    """Standard deviation (n,) of positions 0 to 7 with weights (n, 8) that sum to 1."""
    position = torch.arange(8.0)
    mean = (share * position).sum(1)
    return ((share * position.square()).sum(1) - mean.square()).clamp(min=0).sqrt()
