"""HAPT: activities and postural transitions of 30 persons with a phone at the waist.

Reyes-Ortiz et al. 2016, https://archive.ics.uci.edu/dataset/341
"""

from itertools import pairwise
from typing import Literal

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


def hapt(
    folder: str | None = None, split: Literal["recordings", "stretches"] = "recordings"
) -> Table:
    """Windows of 2.56 s of 30 persons: accelerometer and gyroscope, 6 channels, 128 steps each.

    Windows overlap by half and lie within one activity; readings without a label are left out.
    Channels have mean 0 and deviation 1 over the training rows. Targets: "activity" (12 classes)
    and "person", by which rows can be partitioned. Needs hapt_raw.npz.

    Args:
        split: everyone did the protocol at least twice, the second time with the phone where they
            put it. "recordings": the first time is to train, the others to test. "stretches":
            every other stretch of an activity is to test, in each recording. No reading is in both.
    """
    with open_npz(find_file("hapt", folder, ("hapt_raw.npz",), SOURCE)) as arrays:
        signal = arrays["x"].astype(np.float32)
        columns = [arrays[name].astype(np.int64) for name in ("label", "user", "experiment")]
    label, user, experiment = columns
    starts = window_starts(np.stack(columns, 1))
    starts = starts[label[starts] > 0]
    if split == "recordings":
        to_test = experiment[starts] > 0
    else:
        to_test = every_other_stretch(np.stack(columns, 1), starts)
    x = torch.from_numpy(signal[starts[:, None] + np.arange(WINDOW)]).mT.contiguous()
    persons = np.unique(user)
    person = torch.from_numpy(np.searchsorted(persons, user[starts]))
    train = torch.from_numpy(~to_test).nonzero()[:, 0]
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
        test=torch.from_numpy(to_test).nonzero()[:, 0],
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


def every_other_stretch(columns: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Which windows lie in the second, fourth, ... stretch of equal columns that has windows.

    Args:
        columns: (n, columns), as in `window_starts`.
        starts: first readings of windows.

    >>> columns = np.repeat([[1], [2], [1], [1]], 128, axis=0)
    >>> every_other_stretch(columns, np.array([0, 128, 256]))
    array([False, False,  True])
    """
    changes = (columns[1:] != columns[:-1]).any(1)
    stretches = np.concatenate([[0], changes.cumsum()])[starts]
    seen: dict[tuple[int, ...], int] = {}  # stretches of these columns so far
    is_even = {}
    for stretch, start in zip(stretches, starts, strict=True):
        if stretch not in is_even:
            kind = tuple(columns[start])
            is_even[stretch] = seen.get(kind, 0) % 2 == 1
            seen[kind] = seen.get(kind, 0) + 1
    return np.array([is_even[stretch] for stretch in stretches], dtype=bool)
