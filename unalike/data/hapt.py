"""HAPT: activities and postural transitions of 30 persons with a phone at the waist.

Reyes-Ortiz et al. 2016, https://archive.ics.uci.edu/dataset/341
"""

from itertools import pairwise

import numpy as np
import torch

from unalike.data.files import find_file, open_npz
from unalike.data.table import Table
from unalike.tasks import Classification

SOURCE = (
    "https://archive.ics.uci.edu/dataset/341: raw signals at 50 Hz in `x` (n, 6), `label` "
    "(-1 none, 1 to 12), `user`, `experiment`"
)
WINDOW = 128  # readings, 2.56 s
STEP = 64  # windows overlap by half
ACTIVITIES = (
    "walking",
    "walking upstairs",
    "walking downstairs",
    "sitting",
    "standing",
    "lying",
    "stand to sit",
    "sit to stand",
    "sit to lie",
    "lie to sit",
    "stand to lie",
    "lie to stand",
)


def hapt(folder: str | None = None) -> Table:
    """Windows of 2.56 s of 30 persons: accelerometer and gyroscope, 6 channels, 128 steps each.

    Windows overlap by half and lie within one activity; readings without a label are left out.
    Everyone did the protocol at least twice: the first time is to train, the others to test, so
    that no reading is in both. Channels have mean 0 and deviation 1 over the training rows.
    Targets: "activity" (12 classes) and "person", by which rows can be partitioned. Needs
    hapt_raw.npz.
    """
    with open_npz(find_file("hapt", folder, ("hapt_raw.npz",), SOURCE)) as arrays:
        signal = arrays["x"].astype(np.float32)
        columns = [arrays[name].astype(np.int64) for name in ("label", "user", "experiment")]
    label, user, experiment = columns
    starts = window_starts(np.stack(columns, 1))
    starts = starts[label[starts] > 0]
    x = torch.from_numpy(signal[starts[:, None] + np.arange(WINDOW)]).mT.contiguous()
    persons = np.unique(user)
    person = torch.from_numpy(np.searchsorted(persons, user[starts]))
    first_time = torch.from_numpy(experiment[starts] == 0)
    train = first_time.nonzero()[:, 0]
    mean = x[train].mean((0, 2), keepdim=True)
    std = x[train].std((0, 2), keepdim=True)
    return Table(
        x=(x - mean) / std,
        targets={"activity": torch.from_numpy(label[starts] - 1), "person": person},
        tasks={
            "activity": Classification(ACTIVITIES),
            "person": Classification(tuple(f"person {number}" for number in persons)),
        },
        train=train,
        test=(~first_time).nonzero()[:, 0],
    )


def window_starts(columns: np.ndarray) -> np.ndarray:
    """First readings of all windows that lie within a stretch of equal columns.

    Args:
        columns: (n, columns), e.g. the label and the person of each reading.

    >>> window_starts(np.repeat([[1], [2], [3]], [200, 127, 128], axis=0))
    array([  0,  64, 327])
    """
    changes = (columns[1:] != columns[:-1]).any(1).nonzero()[0] + 1
    borders = [0, *changes.tolist(), len(columns)]
    parts = []
    for begin, end in pairwise(borders):
        parts.append(np.arange(begin, end - WINDOW + 1, STEP))
    return np.concatenate(parts)
