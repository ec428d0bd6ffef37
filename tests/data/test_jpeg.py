"""Photographs from JPEG bytes: labels as their task wants them, broken ones named, skipped or refused; canvases of several images."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from unalike.base.errors import Problems
from unalike.data import load_dataset
from unalike.data.composites import compose
from unalike.data.jpeg import decode_images
from unalike.scenarios import build_clients, load


def jpeg(colour, size=(8, 6)):
    with io.BytesIO() as held:
        Image.new("RGB", size, colour).save(held, "JPEG")
        return held.getvalue()


def packed(images):
    return np.frombuffer(b"".join(images), np.uint8), np.cumsum([0, *map(len, images)])


@pytest.fixture
def folder(tmp_path):
    """A VOC of six images, the fifth broken."""
    images = [jpeg((40 * i, 0, 0)) for i in range(6)]
    images[4] = images[4][:30]
    data, off = packed(images)
    y = np.array([[1, -1], [1, 0], [-1, 1], [1, 1], [1, 1], [-1, -1]], np.int8)
    np.savez(
        tmp_path / "voc2012_cls_96_jpeg.npz",
        jpeg=data,
        off=off,
        y=y,
        split=np.array([0, 0, 0, 1, 1, 1], np.uint8),
        names=np.array([f"2008_{i}" for i in range(6)]),
        classes=np.array(["cat", "dog"]),
    )
    return str(tmp_path)


def test_voc_labels_are_present_absent_or_unknown(folder):
    table = load_dataset("voc2012", folder, broken="skip")
    assert (
        table.tasks["objects"].labels == ("cat", "dog")
        and table.x.dtype == torch.uint8
        and table.x.shape == (5, 3, 6, 8)
    )
    assert table.targets["objects"].tolist() == [[1, 0], [1, -1], [0, 1], [1, 1], [0, 0]]
    assert table.train.tolist() == [0, 1, 2] and table.test.tolist() == [3, 4]
    assert abs(int(table.x[2, 0, 0, 0]) - 80) < 4


@pytest.mark.parametrize(
    "name, file",
    [
        ("voc2012", "voc2012_cls_96_jpeg"),
        ("caltech101", "caltech101_96_jpeg"),
        ("pacs", "pacs_64_jpeg"),
        ("cifar10", "cifar10"),
        ("cifar_composites", "cifar10"),
        ("flickr8k", "flickr8k_96_jpeg"),
        ("voc2012_masks", "voc2012_seg_128"),
        ("bdgp", "BDGP"),
    ],
)
def test_a_file_that_is_cut_short_or_another_is_a_sentence(tmp_path, name, file):
    np.savez(tmp_path / f"{file}.npz", other=np.zeros(1000))
    with pytest.raises(ValueError, match=f"{file}.npz (lacks|needs)"):
        load_dataset(name, str(tmp_path))
    whole = (tmp_path / f"{file}.npz").read_bytes()
    (tmp_path / f"{file}.npz").write_bytes(whole[:300])
    with pytest.raises(ValueError, match=f"{file}.npz is not a readable .npz file"):
        load_dataset(name, str(tmp_path))


def test_settings_are_chosen_without_the_test_set(folder):
    table = load_dataset("voc2012", folder, broken="skip", choosing=True)
    assert table.train.tolist() == [1, 2] and table.test.tolist() == [0]
    data, off = packed([jpeg((10 * i, 0, 0)) for i in range(20)])
    np.savez(
        f"{folder}/caltech101_96_jpeg.npz",
        jpeg=data,
        off=off,
        y=np.arange(20) % 2,
        classes=np.array(["cup", "fan"]),
    )
    whole, chosen = (
        load_dataset("caltech101", folder),
        load_dataset("caltech101", folder, choosing=True),
    )
    assert chosen.test.tolist() == whole.train[::5].tolist()
    assert sorted([*chosen.train.tolist(), *chosen.test.tolist()]) == whole.train.tolist()


def test_some_of_the_photographs_are_the_same_ones_in_every_run(folder):
    some = load_dataset("voc2012", folder, broken="skip", train=2, test=1)
    again = load_dataset("voc2012", folder, broken="skip", train=2, test=9)
    assert some.train.tolist() == again.train.tolist() == sorted(set(some.train.tolist()))
    assert len(some.train) == 2 and set(some.train.tolist()) < {0, 1, 2}
    assert len(some.test) == 1 and again.test.tolist() == [3, 4]
    chosen = load_dataset("voc2012", folder, broken="skip", train=2, choosing=True)
    assert sorted([*chosen.train.tolist(), *chosen.test.tolist()]) == some.train.tolist()


def test_broken_images_are_refused_by_name(folder):
    with pytest.raises(
        ValueError, match=r"1 of 6 images cannot be used: 2008_4 is no image \(.*broken: skip"
    ):
        load_dataset("voc2012", folder)
    with pytest.raises(ValueError, match="got 'mend'"):
        load_dataset("voc2012", folder, broken="mend")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_images_of_another_size_than_most_are_told_too(odd, caplog):
    data, off = packed([jpeg("red", (5, 5) if i == odd else (8, 6)) for i in range(3)])
    with pytest.raises(
        ValueError, match=f"1 of 3 images cannot be used: image {odd} is 5x5, most are 8x6"
    ):
        decode_images(data, off)
    x, good = decode_images(data, off, "skip")
    assert good.tolist() == [i for i in range(3) if i != odd] and x.shape == (2, 3, 6, 8)
    assert caplog.messages == [
        f"1 of 3 images cannot be used: image {odd} is 5x5, most are 8x6. They are left out."
    ]


def test_a_missing_file_says_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("UNALIKE_DATA", raising=False)
    for name in ("voc2012", "caltech101", "cifar_composites", "caltech_composites"):
        with pytest.raises(ValueError, match=r"set UNALIKE_DATA or --data-dir .*http"):
            load_dataset(name, str(tmp_path))


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_canvases_show_the_kinds_they_are_labelled_with(most):
    y = torch.arange(50) % 5
    x = y.byte().reshape(50, 1, 1, 1).expand(50, 1, 3, 2)  # every pixel tells the kind
    canvas, marks = compose(x, y, 6, 300, most, torch.Generator().manual_seed(0))
    assert canvas.shape == (300, 1, 6, 4) and marks.shape == (300, 6)
    for image, mark in zip(canvas, marks):
        assert image.unique().tolist() == mark.nonzero().flatten().tolist()
    assert marks.sum(1).unique().tolist() == list(range(1, most + 1)) and (marks[:, 5] == 0).all()


def test_digit_canvases_are_the_same_everywhere_and_test_images_are_not_trained_on():
    table, again = load_dataset("digits_composites"), load_dataset("digits_composites")
    assert (
        torch.equal(table.x, again.x)
        and table.x.shape == (1800, 1, 16, 16)
        and table.x.dtype == torch.uint8
    )
    cut = lambda image: image[0].unfold(0, 8, 8).unfold(1, 8, 8).flatten(0, 1)
    cells = lambda rows: {cell.numpy().tobytes() for image in table.x[rows] for cell in cut(image)}
    assert not cells(table.train) & cells(table.test)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"most": 5}, "from 1 to 4, got 5"),
        ({"train": 0}, "1 or more, got 0"),
        ({"kinds": 2}, "no option 'kinds'. It has: train, test, most"),
    ],
)
def test_wrong_canvases_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        load_dataset("digits_composites", **change)


MINE = """
name: mine
algorithm: {name: fedavg}
data: {name: digits_composites, options: {train: 60, test: 20}, partition: {name: by_cluster, encoder: cnn}}
clients: [{id: c, count: 3, model: {name: cnn}, task: {criterion: asymmetric}}]
"""


def test_scenarios_set_options_of_datasets_and_tasks_and_cluster_frozen_features(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    made = build_clients(load(str(tmp_path / "mine.yaml"))[0])
    again = build_clients(load(str(tmp_path / "mine.yaml"))[0])
    assert all(torch.equal(one.train.index, other.train.index) for one, other in zip(made, again))
    assert sum(len(c.train) for c in made) == 60 and all(
        c.task.criterion == "asymmetric" for c in made
    )
    x = made[0].to_device(made[0].train.rows(torch.arange(2))[0])
    assert x.dtype == torch.float32 and x.min() >= 0 and 0.5 < x.max() <= 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "train: 60",
            "trian: 60",
            'data.options.trian.*has no field "trian". Did you mean "train"',
        ),
        ("train: 60", "train: many", "data.options.train .*must be a whole number, got 'many'"),
        (
            "criterion: asymmetric",
            "criterion: hinge",
            "clients.0.task.criterion .*must be 'bce', 'focal' or 'asymmetric' or module:name .*got 'hinge'",
        ),
        (
            "criterion: asymmetric",
            "criterium: bce",
            'clients.0.task.criterium .*task has no field "criterium". Did you mean "criterion"',
        ),
        ("train: 60", "train: 60, most: 5", "data.options.most .*must be at most 4, got 5"),
        (
            "encoder: cnn",
            "encoder: cn",
            'data.partition.encoder .*no model "cn". Did you mean "cnn"',
        ),
        (
            "{name: by_cluster, encoder: cnn}",
            "{name: multilabel_dirichlet, alpha: 1, missing: -1}",
            "missing .*at least 0",
        ),
    ],
)
def test_wrong_options_are_told(old, new, said, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE.replace(old, new))
    with pytest.raises(Problems, match=said):
        build_clients(load(str(tmp_path / "mine.yaml"))[0])


def test_labels_kept_as_bytes_are_numbers_and_no_brightness():
    from unalike.data import Tensors

    assert (
        Tensors(torch.zeros(2, 3), torch.tensor([7, 9], dtype=torch.uint8))
        .rows(torch.arange(2))[1]
        .dtype
        == torch.int64
    )
