"""Samples seen in several ways, to be clustered: benchmarks from .npz or .mat files, and digits that need none. Knows no clients."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.data.files import find, opened
from unalike.data.table import Table
from unalike.tasks import Clustering
from unalike.tasks.task import label_names

CELLS = ("X", "x", "data", "fea", "views")  # names under which files keep a list of views
TRUTH = ("Y", "y", "gt", "labels", "label", "truth", "gnd")  # and the classes

MFLVC = "https://github.com/SubmissionsIn/MFLVC (data/README.txt)"
FMCSC = "https://github.com/5Martina5/FMCSC (data.zip)"
COMPLETER = "https://github.com/XLearning-SCU/2021-CVPR-Completer (data/Scene-15.mat)"


def mnist_usps(folder: str | None = None, crop: bool = True) -> Table:
    """5000 handwritten digits, each twice: MNIST (784) and USPS (256), pixels in [0, 1], 10 classes; needs MNIST_USPS.npz or .mat.

    The file holds the 16x16 USPS digits in the middle of 28x28. `crop` cuts them out, as AFMCC's Table 4 counts features; without it
    both views have 784, as in FMCSC's code.
    """
    path = find("mnist_usps", folder, ("MNIST_USPS.npz", "MNIST_USPS.mat"), f"{MFLVC} or {FMCSC}")
    x, y = read_views(path, ("mnist", "usps"))
    if crop and x["usps"].shape[1] == 28 * 28:
        x["usps"] = x["usps"].reshape(-1, 28, 28)[:, 6:22, 6:22].flatten(1)
    return multiview_table(x, y, "pixels")


def bdgp(folder: str | None = None) -> Table:
    """2500 images of fly embryos: visual (1750) and text (79) features, each column in [0, 1], 5 classes; needs BDGP.npz or .mat."""
    return load_multiview(
        find("bdgp", folder, ("BDGP.npz", "BDGP.mat"), f"{MFLVC} or {FMCSC}"), ("visual", "text")
    )


def multi_fashion(folder: str | None = None) -> Table:
    """10000 triples of clothes of one kind, 784 pixels in [0, 1] each, 10 classes; needs Multi_Fashion_constructed.npz or a .mat.

    The .npz was built here from Fashion-MNIST by class: it is not the authors' file, and numbers on it are not theirs. The authors' own
    is read where it lies in the folder instead, as Multi_Fashion.mat or Fashion.mat.
    """
    files = ("Multi_Fashion_constructed.npz", "Multi_Fashion.mat", "Fashion.mat")
    return load_multiview(
        find("multi_fashion", folder, files, f"{MFLVC} or {FMCSC}"),
        ("view1", "view2", "view3"),
        scale="pixels",
    )


def scene15(folder: str | None = None) -> Table:
    """4485 photographs of places: three sets of features (20, 59, 40), each column in [0, 1], 15 classes; needs mv_Scene15.npz or .mat."""
    files = ("mv_Scene15.npz", "scene15.mat", "Scene15.mat", "Scene-15.mat")
    return load_multiview(find("scene15", folder, files, COMPLETER), ("view1", "view2", "view3"))


def nuswide(folder: str | None = None) -> Table:
    """5000 photographs: five sets of features (65, 226, 145, 74, 129), each column in [0, 1], 5 classes; needs NUSWIDE.npz or .mat.

    For whoever has the file: we had not, and tried this on a small one of the same make.
    """
    path = find("nuswide", folder, ("NUSWIDE.npz", "NUSWIDE.mat"), FMCSC)
    return load_multiview(path, ("histogram", "moments", "correlogram", "edges", "wavelets"))


def digits_views(folder: str | None = None) -> Table:
    """1797 handwritten digits in three views: left (32) and right (32) pixels, spectrum (40), all in [0, 1]. The folder is not used.

    The spectrum is the magnitude of the image's Fourier transform, each column scaled.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.from_numpy(raw.images / 16)
    spectrum = torch.fft.rfft2(images).abs().flatten(1)
    left, right = (half.flatten(1) for half in images.split(4, dim=2))
    return multiview_table(
        {"left": left, "right": right, "spectrum": columns(spectrum)}, torch.from_numpy(raw.target)
    )


def multiview(
    folder: str | None = None,
    file: str | None = None,
    names: Sequence[str] | None = None,
    scale: str = "columns",
) -> Table:
    """A set of your own, `file` in the folder, .npz or .mat: its views called `names`, else view1, view2, ..., each column in [0, 1]."""
    if file is None:
        raise UserError(
            "multiview needs the name of a .npz or .mat file in the data folder: "
            "data: {name: multiview, options: {file: mine.mat}}"
        )
    return load_multiview(find("multiview", folder, (file,)), names, scale)


def load_multiview(
    path: str | Path, names: Sequence[str] | None = None, scale: str = "columns"
) -> Table:
    """A table to cluster from any multi-view file, .npz or .mat; see `read_views` and `multiview_table`."""
    return multiview_table(*read_views(path, names), scale)


def multiview_table(x: Mapping[str, Tensor], y: Tensor, scale: str = "none") -> Table:
    """A table to cluster: modalities x (n, features) by name, classes y (n,) from 0 up. Every row is trained on and scored.

    `scale`: "columns" brings every column to [0, 1], a constant one to 0; "pixels" divides by 255 what exceeds 1; "none" changes nothing.

    >>> table = multiview_table({"sight": torch.rand(4, 3), "sound": torch.rand(4, 2)}, torch.tensor([0, 1, 0, 1]))
    >>> len(table), table.tasks["class"].labels
    (4, ('0', '1'))
    """
    if scale not in SCALES:
        raise UserError(f"modalities are scaled by one of {', '.join(SCALES)}, got {scale!r}")
    if not len(y):
        raise UserError("a table to cluster needs one row or more, got none")
    for name, rows in x.items():
        if rows.ndim != 2:
            raise UserError(
                f"modality {name!r} must be (n, features), got shape {tuple(rows.shape)}"
            )
        if not (good := rows.isfinite()).all():
            row, column = (~good).nonzero()[0].tolist()
            raise UserError(
                f"modality {name!r} has NaN or infinity in {int((~good).any(1).sum())} of {len(rows)} rows, first in row "
                f"{row}, column {column}: fill them in or leave the rows out"
            )
    everyone = torch.arange(len(y))
    return Table(
        x={name: SCALES[scale](rows).float().contiguous() for name, rows in x.items()},
        targets={"class": y.long()},
        tasks={"class": Clustering(label_names(int(y.max()) + 1))},
        train=everyone,
        test=everyone,
        overlap=True,
    )


def columns(view: Tensor) -> Tensor:
    """Every column from its least value to 0 and its largest to 1; a constant column becomes 0.

    >>> columns(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    tensor([[0., 0.],
            [1., 0.]])
    """
    low, high = view.amin(0), view.amax(0)
    return (view - low) / torch.where(high > low, high - low, 1.0)


def pixels(view: Tensor) -> Tensor:
    """Brightness in [0, 1], whether it came so or in 0 to 255."""
    return view / 255 if view.max() > 1 else view


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": columns,
    "pixels": pixels,
    "none": lambda view: view,
}


def read_views(
    path: str | Path, names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The views (n, features) float64 of a .npz or .mat file, called `names` or view1, view2, ..., and its classes (n,) from 0 up.

    Views are the variables X1, X2, ..., or one list X of them; classes are Y, any numbers. Rows are samples, or the last axis where only
    that fits Y; all other axes are made one. Whole numbers may be kept with what to multiply them by, as X1_u8 and X1_scale.
    """
    held = _variables(Path(path))
    numbered = sorted(
        (int(found[1]), key) for key in held if (found := re.fullmatch(r"[Xx](\d+)(?:_u8)?", key))
    )
    cells = next(
        (list(held[key].ravel()) for key in CELLS if key in held and held[key].dtype == object), []
    )
    truth = next((held[key] for key in TRUTH if key in held), None)
    if truth is None or not (numbered or cells):
        raise UserError(
            f"{path} needs views X1, X2, ... or a list X of them, and classes Y, got: {', '.join(held) or 'nothing'}"
        )
    if truth.size != max(truth.shape, default=0):
        raise UserError(f"{path} needs one class a sample in Y, got shape {truth.shape}")
    if truth.dtype.kind == "f" and (unknown := np.isnan(truth).sum()):
        raise UserError(
            f"{path} has NaN for {unknown} of {truth.size} classes in Y: leave these samples out"
        )
    y = np.unique(truth.ravel(), return_inverse=True)[1].ravel()
    scaled = [
        (held[key], np.asarray(held.get(f"X{number}_scale", 1)).item()) for number, key in numbered
    ] or [(view, 1) for view in cells]
    views = [
        _rows(view, len(y), f"view {number} of {path}") * scale
        for number, (view, scale) in enumerate(scaled, 1)
    ]
    names = [f"view{number}" for number in range(1, len(views) + 1)] if names is None else names
    if len(views) != len(names):
        raise UserError(f"{path} has {len(views)} views, expected {len(names)}: {', '.join(names)}")
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise UserError(f'two views of {path} are called "{twice[0]}": give each a name of its own')
    return {name: torch.from_numpy(view) for name, view in zip(names, views)}, torch.from_numpy(y)


def _variables(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    if not path.is_file():
        raise UserError(f"there is no file {path.absolute()}")
    if path.suffix == ".npz":
        with opened(path) as held:
            return dict(held)
    try:
        return {key: value for key, value in loadmat(path).items() if not key.startswith("__")}
    except NotImplementedError:
        raise UserError(
            f"{path} is a MATLAB 7.3 file, which SciPy cannot read: save it in MATLAB with -v7"
        ) from None
    except Exception as problem:  # those of MATLAB files have no common kind
        raise UserError(f"{path} is not a readable {path.suffix} file: {problem}") from None


def _rows(view: Any, count: int, which: str) -> np.ndarray:
    """(n, features) float64, from dense or sparse, samples first or last."""
    dense = np.atleast_2d(np.asarray(view.toarray() if hasattr(view, "toarray") else view))
    if dense.dtype.kind not in "biuf":
        raise UserError(f"{which} must hold real numbers, got {dense.dtype}")
    if len(dense) != count and dense.shape[-1] == count:
        dense = np.moveaxis(dense, -1, 0)
    return dense.reshape(len(dense), -1).astype(np.float64)
