"""Smaller copies of data files."""

import json

import numpy as np

from benchmarks.cut_data import cut_file, draw_rows


def test_a_cut_file_of_images_has_whole_rows(tmp_path):
    """40 images of one to three bytes, each with its number in all its arrays."""
    numbers = np.arange(40)
    sizes = 1 + numbers % 3
    np.savez(
        tmp_path / "all.npz",
        jpeg=np.repeat(numbers, sizes).astype(np.uint8),
        off=np.concatenate([[0], sizes.cumsum()]),
        y=numbers % 2,
        split=(numbers >= 30).astype(np.int64),
        names=np.array([f"image {number}" for number in numbers]),
        classes=np.array(["even", "odd"]),
        captions_json=np.frombuffer(json.dumps([[str(n)] for n in range(40)]).encode(), np.uint8),
    )
    for name in ("one", "other"):
        cut_file(tmp_path / "all.npz", tmp_path / name / "all.npz", 20)
    cut = dict(np.load(tmp_path / "one" / "all.npz"))
    rows = [int(name.split()[1]) for name in cut["names"]]
    assert sum(row < 30 for row in rows) == 16 and sum(row >= 30 for row in rows) == 6
    captions = json.loads(cut["captions_json"].tobytes())
    for place, row in enumerate(rows):
        image = cut["jpeg"][cut["off"][place] : cut["off"][place + 1]]
        assert image.tolist() == [row] * (1 + row % 3)
        assert cut["y"][place] == row % 2 and captions[place] == [str(row)]
    assert cut["classes"].tolist() == ["even", "odd"]
    again = np.load(tmp_path / "other" / "all.npz")
    assert all(np.array_equal(array, again[name]) for name, array in cut.items())


def test_a_cut_cifar_has_rows_of_both_parts(tmp_path):
    parts = {"x_train": np.arange(30), "y_train": np.arange(30) % 3}
    parts |= {"x_test": np.arange(6), "y_test": np.arange(6) % 3}
    np.savez(tmp_path / "cifar10.npz", **parts)
    cut_file(tmp_path / "cifar10.npz", tmp_path / "cut" / "cifar10.npz", 18)
    cut = np.load(tmp_path / "cut" / "cifar10.npz")
    assert len(cut["x_train"]) == 15 and len(cut["x_test"]) == 6  # two of each class at least
    assert (cut["x_train"] % 3 == cut["y_train"]).all()


def test_every_combination_of_kinds_keeps_its_share():
    label, domain = np.repeat([0, 1], 50), np.tile([0, 1], 50)
    kept = draw_rows([label, domain], 0.2, "test")
    for one in (0, 1):
        for other in (0, 1):
            assert ((label[kept] == one) & (domain[kept] == other)).sum() == 5
