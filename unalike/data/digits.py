"""The embedded dataset: scikit-learn's 1797 handwritten digits, with three targets. Needs no download and no folder."""

import torch

from unalike.data.table import Table
from unalike.tasks import Classification, MultiLabel, Segmentation

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
    train, test = train_test_split(range(len(x)), train_size=TRAIN_ROWS, stratify=raw.target, random_state=SPLIT_SEED)
    return Table(
        x=x,
        targets={"digit": digit, "attributes": torch.stack(attributes, 1).float(), "ink": (x[:, 0] >= 0.5).long()},
        tasks={
            "digit": Classification(("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")),
            "attributes": MultiLabel(tuple(ATTRIBUTES)),
            "ink": Segmentation(("background", "ink")),
        },
        train=torch.tensor(sorted(train)),
        test=torch.tensor(sorted(test)),
    )
