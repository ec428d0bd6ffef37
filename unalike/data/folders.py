"""Multi-label photographs in the folders they are published in: VOC 2007, COCO 2014, NUS-WIDE, MultiScene, MLRSNet. Knows no clients.

Images are squeezed to `size` x `size` bytes as they are read. Each set lies in a folder of its own in UNALIKE_DATA or --data-dir.
"""

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from unalike.base.errors import UserError
from unalike.data.pictures import Broken, leave_out
from unalike.data.table import Table
from unalike.tasks import MultiLabel

Size = Annotated[int, Field(ge=8)]
Rows = Sequence[
    tuple[Path, Sequence[float]]
]  # an image's file, and its labels: 1 present, 0 absent, -1 unknown
SPLIT_SEED, TRAIN_SHARE = 60, 0.8  # MLRSNet has no official split
VOC_MARKS = {"1": 1.0, "0": -1.0, "-1": 0.0}  # present, difficult, absent


def voc2007(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """VOC 2007: 5011 photographs (trainval) to train, 4952 to test, 20 labels, "difficult" ones unknown; needs VOCdevkit/VOC2007."""
    home = placed(
        "voc2007",
        folder,
        ("VOCdevkit/VOC2007", "VOC2007"),
        ("JPEGImages", "ImageSets/Main"),
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2007",
    )
    lists = home / "ImageSets" / "Main"
    classes = sorted(
        path.name.removesuffix("_trainval.txt") for path in lists.glob("*_trainval.txt")
    )
    parts = []
    for part in ("trainval", "test"):
        marks: dict[str, list[float]] = {}
        for name in classes:
            for line in lines(path := lists / f"{name}_{part}.txt"):
                image, *mark = line.split()
                if len(mark) != 1 or mark[0] not in VOC_MARKS:
                    raise UserError(
                        f"{path}: each line is an image and 1, 0 or -1, got {line[:60]!r}"
                    )
                marks.setdefault(image, []).append(VOC_MARKS[mark[0]])
        parts.append([(home / "JPEGImages" / f"{image}.jpg", row) for image, row in marks.items()])
    return table("voc2007", parts, classes, size, broken)


def coco2014(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """COCO 2014: 82783 photographs to train, 40504 (val) to test, 80 labels; needs coco with train2014, val2014 and annotations."""
    home = placed(
        "coco2014",
        folder,
        ("coco", "COCO", "coco2014"),
        ("annotations", "train2014", "val2014"),
        "https://cocodataset.org",
    )
    parts: list[Rows] = []
    classes: list[str] = []
    for part in ("train2014", "val2014"):
        path = home / "annotations" / f"instances_{part}.json"
        try:
            held = json.loads(path.read_text())
            names = [kind["name"] for kind in held["categories"]]
            place = {kind["id"]: i for i, kind in enumerate(held["categories"])}
            marks = {image["id"]: [0.0] * len(place) for image in held["images"]}
            for thing in held["annotations"]:
                marks[thing["image_id"]][place[thing["category_id"]]] = 1.0
            parts.append(
                [(home / part / image["file_name"], marks[image["id"]]) for image in held["images"]]
            )
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise UserError(
                f"{path} is not COCO's file of instances ({type(problem).__name__}: {problem})"
            ) from None
        if classes and names != classes:
            raise UserError(f"{path} has other categories than the file before it")
        classes = names
    return table("coco2014", parts, classes, size, broken)


def nuswide_images(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """NUS-WIDE: 161789 photographs to train, 107859 to test, 81 labels; needs NUSWIDE with ImageList, TrainTestLabels and Flickr.

    Many of its photographs are gone from where they were: broken: skip leaves out those that are missing.
    """
    home = placed(
        "nuswide_images",
        folder,
        ("NUSWIDE", "NUS-WIDE", "nuswide"),
        ("ImageList",),
        "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html",
    )
    labels = inside(home, ("TrainTestLabels", "Groundtruth/TrainTestLabels"))
    images = inside(home, ("Flickr", "raw/Flickr", "images"))
    classes = sorted(
        path.name.removeprefix("Labels_").removesuffix("_Train.txt")
        for path in labels.glob("Labels_*_Train.txt")
    )
    parts = []
    for part in ("Train", "Test"):
        files = [
            images / line.replace("\\", "/")
            for line in lines(home / "ImageList" / f"{part}Imagelist.txt")
        ]
        marks = [lines(labels / f"Labels_{name}_{part}.txt") for name in classes]
        for name, column in zip(classes, marks):
            if len(column) != len(files):
                raise UserError(
                    f"Labels_{name}_{part}.txt has {len(column)} lines for {len(files)} images"
                )
            if wrong := sorted({*column} - {"0", "1"}):
                raise UserError(
                    f"Labels_{name}_{part}.txt: each line is 0 or 1, got {wrong[0][:60]!r}"
                )
        parts.append(
            [
                (file, [float(mark) for mark in row])
                for file, row in zip(files, zip(*marks, strict=True))
            ]
        )
    return table("nuswide_images", parts, classes, size, broken)


def multiscene(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """MultiScene-Clean: 7000 aerial photographs to train, 7000 to test, 36 labels; needs MultiScene-Clean.

    Tra.csv and Test.csv lie in it, with an image and its marks in each line, and the folder images.
    """
    home = placed(
        "multiscene",
        folder,
        ("MultiScene-Clean", "multiscene"),
        ("Tra.csv", "Test.csv", "images"),
        "https://multiscene.github.io",
    )
    found = [
        marked(home / name, lambda image: home / "images" / image)
        for name in ("Tra.csv", "Test.csv")
    ]
    if found[0][0] != found[1][0]:
        raise UserError(f"Tra.csv and Test.csv in {home} have other columns")
    return table("multiscene", [rows for _, rows in found], found[0][0], size, broken)


def mlrsnet(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """MLRSNet: 109161 aerial photographs, 60 labels; 80 % of each of its 46 folders to train; needs MLRSNet with Labels and Images."""
    home = placed(
        "mlrsnet",
        folder,
        ("MLRSNet", "mlrsnet"),
        ("Labels", "Images"),
        "https://data.mendeley.com/datasets/7j9bv9vwsx/3",
    )
    parts: list[list[tuple[Path, Sequence[float]]]] = [[], []]
    classes: list[str] = []
    for file in sorted((home / "Labels").glob("*.csv")):
        columns, rows = marked(file, lambda image, file=file: home / "Images" / file.stem / image)  # type: ignore[misc]
        if classes and columns != classes:
            raise UserError(f"{file} has other columns than the files before it")
        classes = columns
        order = np.random.RandomState(SPLIT_SEED).permutation(len(rows))
        first = round(TRAIN_SHARE * len(rows))
        for part, chosen in zip(parts, (order[:first], order[first:])):
            part += [rows[i] for i in sorted(chosen)]
    return table("mlrsnet", parts, classes, size, broken)


def placed(
    name: str, folder: str | None, homes: Sequence[str], parts: Sequence[str], source: str
) -> Path:
    """The first of these folders that has these parts."""
    where = folder or os.environ.get("UNALIKE_DATA")
    for home in homes if where else ():
        if all((Path(str(where), home) / part).exists() for part in parts):
            return Path(str(where), home)
    looked = (
        f"not found in {Path(where).absolute()}" if where else "and no folder was named to look in"
    )
    raise UserError(
        f"{name} needs a folder {' or '.join(homes)} with {', '.join(parts)}, {looked}: set UNALIKE_DATA or --data-dir to the "
        f"folder that holds it, get it from {source}"
    )


def inside(home: Path, names: Iterable[str]) -> Path:
    for name in names:
        if (home / name).is_dir():
            return home / name
    raise UserError(f"{home} needs a folder {' or '.join(names)}")


def lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeError) as problem:
        why = getattr(problem, "strerror", "it is no text")
        raise UserError(f"{path} cannot be read ({why}): the folder is not as published") from None


def marked(path: Path, file: Callable[[str], Path]) -> tuple[list[str], Rows]:
    """A table of image,label,label,... with 1 where it is there: the labels' names, and rows."""
    try:
        head, *rows = [
            row for row in csv.reader(path.read_text(encoding="utf-8-sig").splitlines()) if row
        ]
    except (OSError, ValueError, csv.Error):
        raise UserError(
            f"{path} is no table of image,label,label,...: the folder is not as published"
        ) from None
    width = len(head)
    for i, row in enumerate(rows, 2):
        if len(row) != width or any(
            mark.strip() not in ("0", "1", "0.0", "1.0") for mark in row[1:]
        ):
            raise UserError(
                f"{path}, line {i}: an image and {width - 1} marks of 0 or 1, got {','.join(row)[:60]!r}"
            )
    return [name.strip() for name in head[1:]], [
        (file(row[0].strip()), [float(mark) for mark in row[1:]]) for row in rows
    ]


def table(
    name: str, parts: Sequence[Rows], classes: Sequence[str], size: int, broken: Broken
) -> Table:
    """Everything read: images (n, 3, size, size) bytes, labels (n, classes)."""
    rows = [(file, marks, part) for part, its in enumerate(parts) for file, marks in its]
    if not classes or not rows:
        raise UserError(
            f"{name} has {len(classes)} classes and {len(rows)} images: the folder is not as published"
        )
    for file, marks, _ in rows:
        if len(marks) != len(classes):
            raise UserError(
                f"{name}: {file.name} has {len(marks)} labels, there are {len(classes)} classes"
            )
    x = np.empty((len(rows), size, size, 3), np.uint8)
    wrong: list[str] = []
    good: list[int] = []
    for i, (file, _, _) in enumerate(rows):
        try:
            x[len(good)] = squeezed(file, size)
            good.append(i)
        except Exception as problem:  # what PIL raises on broken bytes is open
            wrong.append(
                f"{file.name} {'is missing' if isinstance(problem, FileNotFoundError) else 'is no image'}"
            )
    leave_out(wrong, len(rows), broken)
    y, part = torch.tensor([rows[i][1] for i in good]), torch.tensor([rows[i][2] for i in good])
    return Table(
        x=torch.from_numpy(x[: len(good)]).permute(0, 3, 1, 2).contiguous(),
        targets={"objects": y},
        tasks={"objects": MultiLabel(tuple(classes))},
        train=(part == 0).nonzero().flatten(),
        test=(part == 1).nonzero().flatten(),
    )


def squeezed(file: Path, size: int) -> np.ndarray:
    """One image as bytes (size, size, 3), its sides brought to that length."""
    from PIL import Image

    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
