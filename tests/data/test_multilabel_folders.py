"""Multi-label sets in tiny folders of their published layout, and folders that are not as published."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from unalike.data import load_dataset


def image(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((12, 20, 3), shade, np.uint8)).save(path)


def text(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def voc2007(root):
    home = root / "VOCdevkit" / "VOC2007"
    for part, names in (("trainval", ("000005", "000007")), ("test", ("000001",))):
        for kind, marks in (("cat", (" 1", "-1")), ("dog", (" 0", " 1"))):
            text(
                home / "ImageSets" / "Main" / f"{kind}_{part}.txt",
                *(f"{name} {mark}" for name, mark in zip(names, marks)),
            )
        for name in names:
            image(home / "JPEGImages" / f"{name}.jpg", 10 * int(name))
    return home / "JPEGImages" / "000001.jpg", ("cat", "dog"), [[1, -1], [0, 1]], 50


def coco2014(root):
    home = root / "coco"
    kinds = [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}]
    for part, ids in (("train2014", (5, 6)), ("val2014", (7,))):
        files = [{"id": i, "file_name": f"COCO_{part}_{i:012d}.jpg"} for i in ids]
        things = [{"image_id": ids[0], "category_id": 9}, {"image_id": ids[0], "category_id": 9}]
        text(
            home / "annotations" / f"instances_{part}.json",
            json.dumps({"categories": kinds, "images": files, "annotations": things}),
        )
        for file in files:
            image(home / part / file["file_name"], 10 * file["id"])
    return home / "val2014" / "COCO_val2014_000000000007.jpg", ("cat", "dog"), [[0, 1], [0, 0]], 50


def nuswide_images(root):
    home = root / "NUSWIDE"
    for part, names in (
        ("Train", ("actor\\0001.jpg", "zoo\\0002.jpg")),
        ("Test", ("actor\\0003.jpg",)),
    ):
        text(home / "ImageList" / f"{part}Imagelist.txt", *names)
        for kind, marks in (("cat", "10"), ("dog", "11")):
            text(
                home / "Groundtruth" / "TrainTestLabels" / f"Labels_{kind}_{part}.txt",
                *marks[: len(names)],
            )
        for name in names:
            image(home / "Flickr" / name.replace("\\", "/"), 50 * int(name[-5]))
    return home / "Flickr" / "actor" / "0003.jpg", ("cat", "dog"), [[1, 1], [0, 1]], 50


def multiscene(root):
    home = root / "MultiScene-Clean"
    text(home / "Tra.csv", "image,apron,beach", "1.jpg,1,0", "2.jpg,1,1")
    text(home / "Test.csv", "image,apron,beach", "3.jpg,0,0")
    for i in (1, 2, 3):
        image(home / "images" / f"{i}.jpg", 50 * i)
    return home / "images" / "3.jpg", ("apron", "beach"), [[1, 0], [1, 1]], 50


def mlrsnet(root):
    home = root / "MLRSNet"
    for i, kind in enumerate(("airport", "wetland")):
        text(
            home / "Labels" / f"{kind}.csv",
            "image,airplane,water",
            *(f"{kind}_{j}.jpg,{1 - i},{i}" for j in range(1, 6)),
        )
        for j in range(1, 6):
            image(home / "Images" / kind / f"{kind}_{j}.jpg", 50)
    return (
        home / "Images" / "airport" / "airport_1.jpg",
        ("airplane", "water"),
        [[1, 0]] * 4 + [[0, 1]] * 4,
        50,
    )


SETS = {made.__name__: made for made in (voc2007, coco2014, nuswide_images, multiscene, mlrsnet)}


@pytest.mark.parametrize("name", SETS)
def test_published_folders_are_read(name, tmp_path, caplog):
    file, classes, labels, shade = SETS[name](tmp_path)
    table = load_dataset(name, str(tmp_path), size=8)
    assert (
        table.x.shape[1:] == (3, 8, 8)
        and table.x.dtype == torch.uint8
        and table.tasks["objects"].labels == classes
    )
    assert table.targets["objects"][table.train].tolist() == labels and len(table) > len(
        table.train
    )
    assert abs(int(table.x[table.train[0], 0, 0, 0]) - shade) < 4  # the image belongs to its labels
    file.write_bytes(b"no image")
    with pytest.raises(
        ValueError, match=rf"1 of \d+ images cannot be used: {file.name} is no image"
    ):
        load_dataset(name, str(tmp_path), size=8)
    file.unlink()
    assert len(load_dataset(name, str(tmp_path), size=8, broken="skip")) == len(table) - 1
    assert f"{file.name} is missing. They are left out." in caplog.text


@pytest.mark.parametrize("name", SETS)
def test_a_missing_folder_is_told(name, tmp_path):
    with pytest.raises(
        ValueError, match=rf"{name} needs a folder .* not found in .* get it from http"
    ):
        load_dataset(name, str(tmp_path))


def test_labels_that_do_not_fit_are_told(tmp_path):
    multiscene(tmp_path)
    text(tmp_path / "MultiScene-Clean" / "Tra.csv", "image,apron,beach", "1.jpg,1")
    with pytest.raises(
        ValueError, match=r"Tra.csv, line 2: an image and 2 marks of 0 or 1, got '1.jpg,1'"
    ):
        load_dataset("multiscene", str(tmp_path))
    nuswide_images(tmp_path)
    text(tmp_path / "NUSWIDE" / "Groundtruth" / "TrainTestLabels" / "Labels_cat_Train.txt", "1")
    with pytest.raises(ValueError, match=r"Labels_cat_Train.txt has 1 lines for 2 images"):
        load_dataset("nuswide_images", str(tmp_path))
    coco2014(tmp_path)
    text(tmp_path / "coco" / "annotations" / "instances_val2014.json", "{}")
    with pytest.raises(ValueError, match="is not COCO's file of instances"):
        load_dataset("coco2014", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "file", "held", "said"),
    [
        (
            "voc2007",
            "VOCdevkit/VOC2007/ImageSets/Main/dog_test.txt",
            b"000001 2\n",
            "each line is an image and 1, 0 or -1, got '000001 2'",
        ),
        (
            "voc2007",
            "VOCdevkit/VOC2007/ImageSets/Main/dog_test.txt",
            b"000001\n",
            "each line is an image and 1, 0 or -1, got '000001'",
        ),
        (
            "voc2007",
            "VOCdevkit/VOC2007/ImageSets/Main/dog_test.txt",
            b"\xff\xfe",
            r"cannot be read \(it is no text\)",
        ),
        (
            "coco2014",
            "coco/annotations/instances_val2014.json",
            b'{"categories": [{"id": 9, "name": "dog"}], "images": [], "annotations": []}',
            "val2014.json has other categories than the file before it",
        ),
        (
            "nuswide_images",
            "NUSWIDE/Groundtruth/TrainTestLabels/Labels_cat_Train.txt",
            b"1\nx\n",
            "each line is 0 or 1, got 'x'",
        ),
        ("multiscene", "MultiScene-Clean/Tra.csv", b"", "Tra.csv is no table of image,label"),
        (
            "mlrsnet",
            "MLRSNet/Labels/airport.csv",
            b"\xff\xfe",
            "airport.csv is no table of image,label",
        ),
    ],
)
def test_files_that_are_not_as_published_are_named(name, file, held, said, tmp_path):
    SETS[name](tmp_path)
    (tmp_path / file).write_bytes(held)
    with pytest.raises(ValueError, match=said):
        load_dataset(name, str(tmp_path))
