"""Multi-view datasets, from .npz or .mat files, and digits that need no file.

All are for clustering, or with `labels: true` for classification.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.data.files import find_file, open_npz
from unalike.data.table import Table
from unalike.tasks import Classification, Clustering
from unalike.tasks.task import label_names

VIEW_LISTS = ("X", "x", "data", "fea", "views")  # names that files have for a list of views
CLASS_KEYS = ("Y", "y", "gt", "labels", "label", "truth", "gnd")  # and for the classes

MFLVC = "https://github.com/SubmissionsIn/MFLVC (data/README.txt)"
FMCSC = "https://github.com/5Martina5/FMCSC (data.zip)"
SPLIT_SEED = 15  # fixes which rows are train and which test where classes are learnt
TEST_SHARE = 3  # every third row at random is to test
COMPLETER = "https://github.com/XLearning-SCU/2021-CVPR-Completer (data/Scene-15.mat)"


def mnist_usps(folder: str | None = None, crop: bool = True, labels: bool = False) -> Table:
    """5000 handwritten digits, each from MNIST (784) and USPS (256), in [0, 1], 10 classes.

    Needs MNIST_USPS.npz or .mat, which holds the 16x16 USPS digits in the middle of 28x28.

    Args:
        crop: cut them out, as AFMCC's Table 4 counts features; without it both views have 784
            features, as in FMCSC's code.
        labels: learn the classes from labels (`multiview_table`).
    """
    files = ("MNIST_USPS.npz", "MNIST_USPS.mat")
    path = find_file("mnist_usps", folder, files, f"{MFLVC} or {FMCSC}")
    x, y = read_views(path, ("mnist", "usps"))
    if crop and x["usps"].shape[1] == 28 * 28:
        x["usps"] = x["usps"].reshape(-1, 28, 28)[:, 6:22, 6:22].flatten(1)
    return multiview_table(x, y, "pixels", labels)


def bdgp(folder: str | None = None, labels: bool = False) -> Table:
    """2500 images of fly embryos: visual (1750) and text (79) features, 5 classes.

    Each column is in [0, 1]. Needs BDGP.npz or .mat.
    """
    path = find_file("bdgp", folder, ("BDGP.npz", "BDGP.mat"), f"{MFLVC} or {FMCSC}")
    return load_multiview(path, ("visual", "text"), labels=labels)


def multi_fashion(folder: str | None = None, labels: bool = False) -> Table:
    """10000 triples of clothes of one kind, 784 pixels in [0, 1] each, 10 classes.

    Needs Multi_Fashion_constructed.npz, which was built here from Fashion-MNIST by class: numbers
    on it are not comparable with the authors'. Their own file, Multi_Fashion.mat or Fashion.mat, is
    read if the .npz is not in the folder.
    """
    files = ("Multi_Fashion_constructed.npz", "Multi_Fashion.mat", "Fashion.mat")
    path = find_file("multi_fashion", folder, files, f"{MFLVC} or {FMCSC}")
    return load_multiview(path, ("view1", "view2", "view3"), scale="pixels", labels=labels)


def scene15(folder: str | None = None, labels: bool = False) -> Table:
    """4485 photographs of places: three feature sets (20, 59, 40), 15 classes.

    Each column is in [0, 1]. Needs mv_Scene15.npz or a .mat.
    """
    files = ("mv_Scene15.npz", "scene15.mat", "Scene15.mat", "Scene-15.mat")
    path = find_file("scene15", folder, files, COMPLETER)
    return load_multiview(path, ("view1", "view2", "view3"), labels=labels)


def nuswide(folder: str | None = None, labels: bool = False) -> Table:
    """5000 photographs: five feature sets (65, 226, 145, 74, 129), 5 classes.

    Each column is in [0, 1]. Needs NUSWIDE.npz or .mat. Tested with a small file of the same
    format only.
    """
    path = find_file("nuswide", folder, ("NUSWIDE.npz", "NUSWIDE.mat"), FMCSC)
    names = ("histogram", "moments", "correlogram", "edges", "wavelets")
    return load_multiview(path, names, labels=labels)


def digits_views(folder: str | None = None, labels: bool = False) -> Table:
    """1797 handwritten digits in three views: left (32), right (32), spectrum (40); no file.

    All features are in [0, 1]. The spectrum is the magnitude of the image's Fourier transform, each
    column scaled.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.from_numpy(raw.images / 16)
    spectrum = torch.fft.rfft2(images).abs().flatten(1)
    left, right = (half.flatten(1) for half in images.split(4, dim=2))
    views = {"left": left, "right": right, "spectrum": scale_columns(spectrum)}
    return multiview_table(views, torch.from_numpy(raw.target), labels=labels)


def multiview(
    folder: str | None = None,
    file: str | None = None,
    names: Sequence[str] | None = None,
    scale: str = "columns",
    labels: bool = False,
) -> Table:
    """Your own multi-view dataset: `file` in the folder, .npz or .mat.

    Args:
        names: of its views, by default view1, view2, ...
        scale, labels: as in `multiview_table`.
    """
    if file is None:
        raise UserError(
            "multiview needs the name of a .npz or .mat file in the data folder: "
            "data: {name: multiview, options: {file: mine.mat}}"
        )
    return load_multiview(find_file("multiview", folder, (file,)), names, scale, labels)


def load_multiview(
    path: str | Path,
    names: Sequence[str] | None = None,
    scale: str = "columns",
    labels: bool = False,
) -> Table:
    """A table from any multi-view file: `read_views` and `multiview_table`."""
    x, y = read_views(path, names)
    return multiview_table(x, y, scale, labels)


def multiview_table(
    x: Mapping[str, Tensor], y: Tensor, scale: str = "none", labels: bool = False
) -> Table:
    """A table to cluster. Every row is trained on and scored.

    Args:
        x: modalities (n, features) by name.
        y: classes (n,) from 0 up.
        scale: "columns" brings every column to [0, 1], a constant one to 0; "pixels" divides by 255
            if values exceed 1; "none" changes nothing.
        labels: a table to classify instead, a third of the rows, drawn at random, to test.

    >>> views = {"sight": torch.rand(4, 3), "sound": torch.rand(4, 2)}
    >>> table = multiview_table(views, torch.tensor([0, 1, 0, 1]))
    >>> len(table), table.tasks["class"].labels
    (4, ('0', '1'))
    """
    if scale not in SCALES:
        raise UserError(f"modalities are scaled by one of {', '.join(SCALES)}, got {scale!r}")
    if not len(y):
        raise UserError("a table needs one row or more, got none")
    for name, rows in x.items():
        if rows.ndim != 2:
            raise UserError(
                f"modality {name!r} must be (n, features), got shape {tuple(rows.shape)}"
            )
        nonfinite = ~rows.isfinite()
        if nonfinite.any():
            row, column = nonfinite.nonzero()[0].tolist()
            raise UserError(
                f"modality {name!r} has NaN or infinity in {int(nonfinite.any(1).sum())} of "
                f"{len(rows)} rows, first in row {row}, column {column}: "
                "fill them in or leave the rows out"
            )
    classes = label_names(int(y.max()) + 1)
    train = test = torch.arange(len(y))
    if labels:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SPLIT_SEED))
        is_test = order % TEST_SHARE == 0
        train, test = train[~is_test], test[is_test]
    return Table(
        x={name: SCALES[scale](rows).float().contiguous() for name, rows in x.items()},
        targets={"class": y.long()},
        tasks={"class": Classification(classes) if labels else Clustering(classes)},
        train=train,
        test=test,
        overlap=not labels,
    )


def scale_columns(view: Tensor) -> Tensor:
    """Every column scaled to [0, 1]; a constant column becomes 0.

    >>> scale_columns(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    tensor([[0., 0.],
            [1., 0.]])
    """
    low, high = view.amin(0), view.amax(0)
    return (view - low) / torch.where(high > low, high - low, 1.0)


def scale_pixels(view: Tensor) -> Tensor:
    """Brightness in [0, 1], from [0, 1] or from 0 to 255."""
    return view / 255 if view.max() > 1 else view


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": scale_columns,
    "pixels": scale_pixels,
    "none": lambda view: view,
}


def read_views(
    path: str | Path, names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The views and classes of a .npz or .mat file.

    Views are the variables X1, X2, ..., or a list X of them; classes are Y, any numbers. Rows are
    samples, or the last axis is if only that fits Y; other axes are flattened. Integers may be
    stored with a factor, as X1_u8 and X1_scale.

    Args:
        names: of the views, by default view1, view2, ...
    Returns: views (n, features) float64 by name, and classes (n,) from 0 up.
    """
    variables = _read_variables(Path(path))
    views = _find_views(variables)
    classes = next((variables[key] for key in CLASS_KEYS if key in variables), None)
    if classes is None or not views:
        raise UserError(
            f"{path} needs views X1, X2, ... or a list X of them, and classes Y, "
            f"got: {', '.join(variables) or 'nothing'}"
        )
    if classes.size != max(classes.shape, default=0):
        raise UserError(f"{path} needs one class a sample in Y, got shape {classes.shape}")
    unknown = np.isnan(classes).sum() if classes.dtype.kind == "f" else 0
    if unknown:
        raise UserError(
            f"{path} has NaN for {unknown} of {classes.size} classes in Y: leave these samples out"
        )
    y = np.unique(classes.ravel(), return_inverse=True)[1].ravel()
    rows = []
    for number, (view, factor) in enumerate(views, 1):
        rows.append(_samples_first(view, len(y), f"view {number} of {path}") * factor)
    if names is None:
        names = [f"view{number}" for number in range(1, len(rows) + 1)]
    if len(rows) != len(names):
        raise UserError(f"{path} has {len(rows)} views, expected {len(names)}: {', '.join(names)}")
    repeated = [name for name in names if list(names).count(name) > 1]
    if repeated:
        raise UserError(
            f'two views of {path} are called "{repeated[0]}": give each a name of its own'
        )
    return {name: torch.from_numpy(view) for name, view in zip(names, rows)}, torch.from_numpy(y)


def _find_views(variables: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """The views among a file's variables, each with its factor."""
    numbered = []
    for key in variables:
        match = re.fullmatch(r"[Xx](\d+)(?:_u8)?", key)
        if match:
            numbered.append((int(match[1]), key))
    views = []
    for number, key in sorted(numbered):
        factor = np.asarray(variables.get(f"X{number}_scale", 1)).item()
        views.append((variables[key], factor))
    if views:
        return views
    for key in VIEW_LISTS:
        if key in variables and variables[key].dtype == object:
            return [(view, 1) for view in variables[key].ravel()]
    return []


def _read_variables(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    if not path.is_file():
        raise UserError(f"there is no file {path.absolute()}")
    if path.suffix == ".npz":
        with open_npz(path) as arrays:
            return dict(arrays)
    try:
        return {key: value for key, value in loadmat(path).items() if not key.startswith("__")}
    except NotImplementedError:
        raise UserError(
            f"{path} is a MATLAB 7.3 file, which SciPy cannot read: save it in MATLAB with -v7"
        ) from None
    except Exception as problem:  # errors of MATLAB files have no common base class
        raise UserError(f"{path} is not a readable {path.suffix} file: {problem}") from None


def _samples_first(view: Any, count: int, description: str) -> np.ndarray:
    """(n, features) float64, from a dense or sparse array with samples first or last."""
    dense = np.atleast_2d(np.asarray(view.toarray() if hasattr(view, "toarray") else view))
    if dense.dtype.kind not in "biuf":
        raise UserError(f"{description} must hold real numbers, got {dense.dtype}")
    if len(dense) != count and dense.shape[-1] == count:
        dense = np.moveaxis(dense, -1, 0)
    return dense.reshape(len(dense), -1).astype(np.float64)
