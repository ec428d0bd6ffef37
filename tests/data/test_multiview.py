"""Multi-view tables: the embedded one, small files of every make, the real files where they are at hand, and what is refused."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.io import savemat

from unalike.data import DATASETS, Table, load_dataset, load_multiview, multiview_table
from unalike.tasks import Clustering

FOLDER = next(
    (
        Path(place)
        for place in (os.environ.get("UNALIKE_DATA"), Path(__file__).parents[3] / "shared" / "data")
        if place and Path(place).is_dir()
    ),
    None,
)
BENCHMARKS = {  # rows, features, classes, a file name of the original
    "mnist_usps": (5000, {"mnist": 784, "usps": 256}, 10, "MNIST_USPS.mat"),
    "bdgp": (2500, {"visual": 1750, "text": 79}, 5, "BDGP.mat"),
    "multi_fashion": (10000, {"view1": 784, "view2": 784, "view3": 784}, 10, "Multi_Fashion.mat"),
    "scene15": (4485, {"view1": 20, "view2": 59, "view3": 40}, 15, "scene15.mat"),
    "nuswide": (
        5000,
        {"histogram": 65, "moments": 226, "correlogram": 145, "edges": 74, "wavelets": 129},
        5,
        "NUSWIDE.mat",
    ),
}


def views(*widths, rows=6, seed=0):
    draws = np.random.default_rng(seed)
    return [draws.normal(size=(rows, width)) for width in widths]


def load_or_skip(name):
    if FOLDER is None:
        pytest.skip("no data folder: set UNALIKE_DATA")
    try:
        return load_dataset(name, str(FOLDER))
    except ValueError as problem:
        if "not found in" not in str(problem):
            raise
        pytest.skip(str(problem))


def numbered(made, y):
    return {**{f"X{i}": view for i, view in enumerate(made, 1)}, "Y": y}


def cells(made):
    packed = np.empty((1, len(made)), dtype=object)
    packed[0, :] = made
    return packed


Y = np.array([[14, 19, 14, 23, 19, 23]])  # NUSWIDE numbers its classes so


# of one's own


def test_a_set_of_ones_own_is_a_dataset(tmp_path):
    np.savez(tmp_path / "mine.npz", **numbered(views(3, 5), Y.ravel()))
    table = load_dataset("multiview", str(tmp_path), file="mine.npz", names=["sight", "sound"])
    assert {name: tuple(x.shape) for name, x in table.x.items()} == {
        "sight": (6, 3),
        "sound": (6, 5),
    }
    assert (
        all(x.amin() == 0 and x.amax() == 1 for x in table.x.values())
        and len(table.tasks["class"].labels) == 3
    )
    with pytest.raises(
        ValueError,
        match=r"multiview needs your.mat, not found in .* --data-dir to the folder that holds it$",
    ):
        load_dataset("multiview", str(tmp_path), file="your.mat")
    with pytest.raises(ValueError, match=r"options: \{file: mine.mat\}"):
        load_dataset("multiview", str(tmp_path))


# embedded


def test_digits_in_three_views():
    table = load_dataset("digits_views", "/nowhere")
    assert {name: tuple(x.shape) for name, x in table.x.items()} == {
        "left": (1797, 32),
        "right": (1797, 32),
        "spectrum": (1797, 40),
    }
    images = torch.cat(
        [table.x["left"].reshape(-1, 8, 4), table.x["right"].reshape(-1, 8, 4)], dim=2
    )
    digits = load_dataset("digits")
    assert torch.equal(images, digits.x[:, 0]) and torch.equal(
        table.targets["class"], digits.targets["digit"]
    )
    assert all(
        x.min() == 0 and x.max() == 1 and x.dtype == torch.float32 and x.is_contiguous()
        for x in table.x.values()
    )
    assert table.tasks == {"class": Clustering(10)} and len(table) == 1797
    assert torch.equal(table.train, torch.arange(1797)) and torch.equal(table.test, table.train)


# files


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_real_files(name):
    rows, features, classes, _ = BENCHMARKS[name]
    table = load_or_skip(name)
    assert {key: tuple(x.shape) for key, x in table.x.items()} == {
        key: (rows, width) for key, width in features.items()
    }
    assert all(
        x.min() == 0 and 0.99 < x.max() <= 1 and x.dtype == torch.float32 and x.is_contiguous()
        for x in table.x.values()
    )
    assert (
        table.tasks == {"class": Clustering(classes)}
        and len(table.targets["class"].unique()) == classes
    )
    assert torch.equal(table.train, torch.arange(rows)) and torch.equal(table.test, table.train)


def test_no_pixel_of_usps_is_lost():
    cropped, whole = (
        load_or_skip("mnist_usps").x["usps"],
        DATASETS["mnist_usps"](str(FOLDER), crop=False).x["usps"],
    )
    assert whole.shape == (5000, 784)
    torch.testing.assert_close(whole.sum(1), cropped.sum(1))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_original_mat_files(name, tmp_path):
    _, features, _, file = BENCHMARKS[name]
    made = views(*features.values())
    if name in ("mnist_usps", "multi_fashion"):
        made = [(view - view.min()) / np.ptp(view) for view in made]
    savemat(tmp_path / file, numbered(made, Y))
    table = load_dataset(name, str(tmp_path))
    assert table.targets["class"].tolist() == [0, 1, 0, 2, 1, 2] and table.tasks[
        "class"
    ].labels == ("0", "1", "2")
    for (key, x), view in zip(table.x.items(), made, strict=True):
        expected = (
            view
            if name in ("mnist_usps", "multi_fashion")
            else (view - view.min(0)) / np.ptp(view, axis=0)
        )
        np.testing.assert_allclose(x, expected, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    "kind", ["numbered", "cells", "columns are samples", "sparse", "images", "npz", "bytes"]
)
def test_files_of_every_make_say_the_same(kind, tmp_path):
    made = [view.round(3) for view in views(4, 9)]
    path = tmp_path / ("any.npz" if kind in ("npz", "bytes") else "any.mat")
    if kind == "bytes":
        made = [
            np.round(255 * (view - view.min()) / np.ptp(view)).astype(np.uint8) for view in made
        ]
        np.savez(path, X1_u8=made[0], X2_u8=made[1], X1_scale=0.5, Y=Y[0])
        made = [made[0] * 0.5, made[1]]
    elif kind == "npz":
        np.savez(path, **numbered(made, Y[0]))
    else:
        savemat(
            path,
            {
                "numbered": numbered(made, Y),
                "cells": {"X": cells(made), "gt": Y.T},
                "columns are samples": {"X": cells([view.T for view in made]), "Y": Y},
                "sparse": {"X1": sparse.csc_matrix(made[0]), "X2": made[1], "label": Y},
                "images": {
                    "X1": made[0].reshape(6, 2, 2),
                    "X2": np.moveaxis(made[1].reshape(6, 3, 3), 0, -1),
                    "Y": Y,
                },
            }[kind],
        )
    table = load_multiview(path, scale="none")
    for key, view in zip(("view1", "view2"), made):
        np.testing.assert_allclose(table.x[key], view, rtol=1e-6)
    assert table.targets["class"].tolist() == [0, 1, 0, 2, 1, 2]


def test_pixels_come_in_two_scales(tmp_path):
    for largest in (1, 255):
        savemat(
            tmp_path / "Fashion.mat",
            numbered([np.linspace(0, largest, 6 * 784).reshape(6, 28, 28)] * 3, Y),
        )
        x = load_dataset("multi_fashion", str(tmp_path)).x["view1"]
        torch.testing.assert_close(x, torch.linspace(0, 1, 6 * 784).reshape(6, 784))


def test_the_folder_may_be_named_by_the_environment(tmp_path, monkeypatch):
    savemat(tmp_path / "BDGP.mat", numbered(views(3, 2), Y))
    monkeypatch.setenv("UNALIKE_DATA", str(tmp_path))
    assert len(load_dataset("bdgp")) == 6


def test_constant_columns_become_zero():
    x = torch.tensor([[7.0, 1.0], [7.0, 3.0], [7.0, 2.0]])
    table = multiview_table({"a": x}, torch.tensor([0, 1, 1]), scale="columns")
    assert table.x["a"].tolist() == [[0, 0], [0, 1], [0, 0.5]]


# refused


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_missing_file_is_told_with_where_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.delenv("UNALIKE_DATA", raising=False)
    file = BENCHMARKS[name][3]
    for folder, looked in (
        (str(tmp_path), f"not found in {tmp_path}"),
        (None, "no folder was named"),
    ):
        with pytest.raises(ValueError) as told:
            load_dataset(name, folder)
        assert all(
            words in str(told.value)
            for words in (name, file, looked, "UNALIKE_DATA", "https://github.com/")
        ), told.value
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            {"X1": np.array([[1.0, np.nan]] * 6), "X2": np.ones((6, 2)), "Y": Y},
            "modality 'visual' has NaN or infinity in 6 of 6 rows, first in row 0, column 1",
        ),
        (
            {"X1": np.ones((6, 2)), "X2": np.ones((5, 2)), "Y": Y},
            "modalities need the same number of rows, got {'visual': 6, 'text': 5}",
        ),
        (
            {"X1": np.ones((4, 2)), "X2": np.ones((4, 2)), "Y": Y},
            "target 'class' has 6 rows for 4 inputs",
        ),
        (numbered(views(2, 3, 4), Y), "has 3 views, expected 2: visual, text"),
        (
            {"X1": np.ones((6, 2))},
            "needs views X1, X2, ... or a list X of them, and classes Y, got: X1",
        ),
        ({"X": np.ones((6, 2)), "Y": Y}, "or a list X of them, and classes Y, got: X, Y"),
        (numbered(views(2, 3), np.eye(6)), "needs one class a sample in Y, got shape (6, 6)"),
        (
            numbered(views(2, 3), np.where(np.arange(6) == 2, np.nan, Y)),
            "has NaN for 1 of 6 classes in Y: leave these samples out",
        ),
        (
            numbered([np.ones((6, 2)), np.ones((6, 2)) * 1j], Y),
            "must hold real numbers, got complex128",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(held, said, tmp_path):
    savemat(tmp_path / "BDGP.mat", held)
    with pytest.raises(ValueError) as told:
        load_dataset("bdgp", str(tmp_path))
    assert said in str(told.value)


def test_two_views_of_one_name_are_refused(tmp_path):
    np.savez(tmp_path / "mine.npz", **numbered(views(2, 3), Y))
    with pytest.raises(
        ValueError, match=r'two views of .*mine\.npz are called "a": give each a name of its own'
    ):
        load_multiview(tmp_path / "mine.npz", ["a", "a"])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("BDGP.mat", b"no such thing", "is not a readable .mat file"),
        ("BDGP.npz", b"no such thing", "is not a readable .npz file"),
        (
            "BDGP.mat",
            b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(512),
            "is a MATLAB 7.3 file, which SciPy cannot read",
        ),
    ],
)
def test_files_that_cannot_be_read_are_refused(file, content, said, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=said) as told:
        load_dataset("bdgp", str(tmp_path))
    assert str(told.value).count(file) == 1


@pytest.mark.parametrize(
    ("x", "y", "scale", "said"),
    [
        ({}, [0, 1], "none", "one modality or more, got none"),
        ({"a": torch.ones(2, 3)}, [], "none", "one row or more, got none"),
        ({"a": torch.ones(2, 3)}, [0, 1], "rows", "one of columns, pixels, none, got 'rows'"),
        (
            {"a": torch.ones(2)},
            [0, 1],
            "none",
            r"modality 'a' must be \(n, features\), got shape \(2,\)",
        ),
        (
            {"a": torch.tensor([[1.0], [torch.inf]])},
            [0, 1],
            "columns",
            "in 1 of 2 rows, first in row 1, column 0",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(x, y, scale, said):
    with pytest.raises(ValueError, match=said):
        multiview_table(x, torch.tensor(y, dtype=torch.int64), scale)


def test_overlap_must_be_asked_for():
    table = multiview_table({"a": torch.rand(4, 2)}, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match="some twice or outside"):
        dataclasses.replace(table, overlap=False)
    with pytest.raises(ValueError, match="some twice or outside"):
        dataclasses.replace(table, train=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="some twice or outside"):
        dataclasses.replace(table, test=torch.tensor([4]))
    assert isinstance(
        dataclasses.replace(
            table, train=torch.tensor([0, 1]), test=torch.tensor([2]), overlap=False
        ),
        Table,
    )


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        load_multiview(tmp_path / "none.mat")
