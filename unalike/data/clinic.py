"""Three outcomes of scikit-learn's 442 diabetes patients. Needs no file.

Data: Efron et al. 2004, Least angle regression, https://arxiv.org/abs/math/0406456
"""

import torch

from unalike.data.table import Table
from unalike.tasks import Classification, Regression, Survival

SPLIT_SEED = 442  # fixes which rows are train and which test, and how long patients are followed
TRAIN_ROWS = 300
SEX = 1  # the column that holds a category
ADVANCED = 150.0  # points of progression that count as advanced disease
FOLLOW_UP = (0.5, 2.0)  # years, drawn evenly


def clinic(folder: str | None = None) -> Table:
    """Ten baseline measurements of 442 patients with diabetes; 300 to train, 142 to test.

    Columns are age, sex (0 or 1), body mass index, blood pressure and six blood values; all but sex
    have mean 0 and deviation 1 over the training rows. Encoder: `table` with categories
    [0, 2, 0, 0, 0, 0, 0, 0, 0, 0].

    Targets, all from the disease's progression within a year, as three clinics might record it:
        progression: the score itself (regression).
        severity: slow, middle or fast, a third of the training rows each (classification).
        advanced: years until the disease has advanced by 150 points if it goes on at its speed,
            150 / progression, unless follow-up ended before (survival). Times of the end of
            follow-up are generated: the data have none.
    """
    from sklearn.datasets import load_diabetes

    raw = load_diabetes(scaled=False)
    x = torch.from_numpy(raw.data)
    score = torch.from_numpy(raw.target)
    draws = torch.Generator().manual_seed(SPLIT_SEED)
    order = torch.randperm(len(x), generator=draws)
    train, test = order[:TRAIN_ROWS].sort().values, order[TRAIN_ROWS:].sort().values
    sex = x[:, SEX] - 1
    x = (x - x[train].mean(0)) / x[train].std(0)
    x[:, SEX] = sex
    thirds = torch.quantile(score[train], torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    years = ADVANCED / score
    shortest, longest = FOLLOW_UP
    follow_up = shortest + (longest - shortest) * torch.rand(
        len(x), generator=draws, dtype=torch.float64
    )
    event = years <= follow_up
    return Table(
        x=x.float(),
        targets={
            "progression": score.float(),
            "severity": torch.bucketize(score, thirds),
            "advanced": torch.stack([torch.minimum(years, follow_up), event], 1).float(),
        },
        tasks={
            "progression": Regression(
                ("progression",), mean=score[train].mean().item(), std=score[train].std().item()
            ),
            "severity": Classification(("slow", "middle", "fast")),
            "advanced": Survival(("advanced disease",)),
        },
        train=train,
        test=test,
    )
