"""ChestX-ray14: radiographs with 14 findings. https://nihcc.app.box.com/v/ChestXray-NIHCC"""

import torch

from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import Broken, decode_images, hold_out_fifth, rows_where
from unalike.data.table import Table
from unalike.tasks import MultiLabel

SOURCE = (
    "https://nihcc.app.box.com/v/ChestXray-NIHCC: the first batch at 128x128 as JPEG bytes in "
    "`jpeg` and `off`, `y` (n, 14), `patient` (n,), `classes`"
)
SPLIT_SEED = 14
TRAIN_SHARE = 0.75  # of the patients


def chestxray14(
    folder: str | None = None,
    broken: Broken = "refuse",
    choosing: bool = False,
    background: bool = False,
) -> Table:
    """ChestX-ray14, the first official batch at 128x128: 4999 grey radiographs, 14 findings.

    All radiographs of a patient are to train or all to test; three quarters of the 1335 patients
    are to train. More than half of the radiographs have no finding. Needs
    chestxray14_first_128_gray_jpeg.npz. `broken` as in voc2012; with `choosing`, a fifth of the
    training rows, which may share patients with the others, is to test; with `background`, a 15th
    label "no finding" is present where no other is.
    """
    files = ("chestxray14_first_128_gray_jpeg.npz",)
    with open_npz(find_file("chestxray14", folder, files, SOURCE)) as arrays:
        x, good = decode_images(arrays["jpeg"], arrays["off"], broken)
        y = torch.from_numpy(arrays["y"][good]).float()
        patient = torch.from_numpy(arrays["patient"][good])
        classes = [name.replace("_", " ").lower() for name in arrays["classes"].tolist()]
    if background:
        y = torch.cat([y, (y.sum(1, keepdim=True) == 0).float()], 1)
        classes.append("no finding")
    patients = patient.unique()
    order = torch.randperm(len(patients), generator=torch.Generator().manual_seed(SPLIT_SEED))
    trained_on = patients[order[: round(TRAIN_SHARE * len(patients))]]
    is_train = torch.isin(patient, trained_on)
    train, test = rows_where(is_train), rows_where(~is_train)
    if choosing:
        train, test = hold_out_fifth(train)
    return Table(
        x=x[:, :1].contiguous(),  # the three channels of a grey image are equal
        targets={"findings": y},
        tasks={"findings": MultiLabel(tuple(classes))},
        train=train,
        test=test,
    )
