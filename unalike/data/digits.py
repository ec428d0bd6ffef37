"""The embedded dataset: scikit-learn's 1797 handwritten digits, with three targets. Needs no download and no folder."""

import torch
from torch import Tensor

from unalike.data.table import Table
from unalike.tasks import Classification, MultiLabel, Retrieval, Segmentation

SPLIT_SEED = 1797  # fixes which rows are train and which test, for every run
TRAIN_ROWS = 1200

ATTRIBUTES = {
    "even": (0, 2, 4, 6, 8),
    "at least five": (5, 6, 7, 8, 9),
    "has a loop": (0, 6, 8, 9),
    "prime": (2, 3, 5, 7),
}


def load_digits_table(folder: str | None = None) -> Table:
    """Images (1797, 1, 8, 8) in [0, 1]; 1200 train and 597 test rows, stratified by digit. The folder is not used.

    Targets: "digit" (classification), "attributes" of the digit (multi-label), and "ink", the pixels of at least
    half darkness (segmentation; it can be read off the image itself).
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
            "digit": Classification(
                ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
            ),
            "attributes": MultiLabel(tuple(ATTRIBUTES)),
            "ink": Segmentation(("background", "ink")),
        },
        train=torch.tensor(sorted(train)),
        test=torch.tensor(sorted(test)),
    )


def digits_captions(folder: str | None = None) -> Table:
    """Digits ("image") with what a program says of them ("caption"): which digit, how much ink, how wide, how tall, how it leans, how low.

    Captions are six word numbers from 1 to 35; rows and split are those of `digits`. Targets: "pair" (retrieval) and "digit".
    """
    plain = load_digits_table()
    assert isinstance(plain.x, Tensor)
    x, place = plain.x[:, 0], torch.arange(8.0)
    across, down = (
        x.sum(1) / x.sum((1, 2))[:, None],
        x.sum(2) / x.sum((1, 2))[:, None],
    )  # (n, 8) each, where the ink is
    spread = lambda share: (
        ((share * place.square()).sum(1) - (share * place).sum(1).square()).clamp(min=0).sqrt()
    )
    middle, centre = (across * place).sum(1), (down * place).sum(1)
    lean = (x * (place[:, None] - centre[:, None, None]) * (place - middle[:, None, None])).sum(
        (1, 2)
    )
    words = [plain.targets["digit"] + 1]
    for i, said in enumerate((x.mean((1, 2)), spread(across), spread(down), lean, centre)):
        fifths = torch.quantile(said[plain.train], torch.tensor([0.2, 0.4, 0.6, 0.8]))
        words.append(torch.bucketize(said, fifths) + 11 + 5 * i)
    return Table(
        x={"image": plain.x, "caption": torch.stack(words, 1)},
        targets={"pair": torch.arange(len(x)), "digit": plain.targets["digit"]},
        tasks={"pair": Retrieval(), "digit": plain.tasks["digit"]},
        train=plain.train,
        test=plain.test,
    )
