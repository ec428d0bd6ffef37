"""Multi-label image datasets in the folders they are published in.

VOC 2007, COCO 2014, NUS-WIDE, MultiScene and MLRSNet. Each has a folder of its own in UNALIKE_DATA
or --data-dir. Images are resized to `size` x `size` bytes as they are read.
"""

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from unalike.base.errors import UserError
from unalike.data.files import data_folder, describe_search
from unalike.data.jpeg import Broken, report_broken, rows_where
from unalike.data.table import Table
from unalike.tasks import MultiLabel

Size = Annotated[int, Field(ge=8)]
# an image's file, and its labels: 1 present, 0 absent, -1 unknown
Row = tuple[Path, Sequence[float]]
VOC_MARKS = {"1": 1.0, "0": -1.0, "-1": 0.0}  # present, difficult, absent
SPLIT_SEED = 60  # MLRSNet has no official split
TRAIN_SHARE = 0.8


def voc2007(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """VOC 2007: 5011 photographs (trainval) to train, 4952 to test, 20 labels.

    Labels marked "difficult" are unknown. Needs VOCdevkit/VOC2007.
    """
    home = find_folder(
        "voc2007",
        folder,
        ("VOCdevkit/VOC2007", "VOC2007"),
        ("JPEGImages", "ImageSets/Main"),
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2007",
    )
    lists = home / "ImageSets" / "Main"
    files = lists.glob("*_trainval.txt")
    classes = sorted(path.name.removesuffix("_trainval.txt") for path in files)
    parts = []
    for part in ("trainval", "test"):
        labels: dict[str, list[float]] = {}
        for name in classes:
            path = lists / f"{name}_{part}.txt"
            for line in read_lines(path):
                image, *mark = line.split()
                if len(mark) != 1 or mark[0] not in VOC_MARKS:
                    raise UserError(
                        f"{path}: each line is an image and 1, 0 or -1, got {line[:60]!r}"
                    )
                labels.setdefault(image, []).append(VOC_MARKS[mark[0]])
        parts.append([(home / "JPEGImages" / f"{image}.jpg", row) for image, row in labels.items()])
    return build_table("voc2007", parts, classes, size, broken)


def coco2014(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """COCO 2014: 82783 photographs to train, 40504 (val) to test, 80 labels.

    Needs coco with train2014, val2014 and annotations.
    """
    home = find_folder(
        "coco2014",
        folder,
        ("coco", "COCO", "coco2014"),
        ("annotations", "train2014", "val2014"),
        "https://cocodataset.org",
    )
    parts: list[list[Row]] = []
    classes: list[str] = []
    for part in ("train2014", "val2014"):
        path = home / "annotations" / f"instances_{part}.json"
        try:
            names, rows = _read_coco_instances(path, home / part)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise UserError(
                f"{path} is not COCO's file of instances ({type(problem).__name__}: {problem})"
            ) from None
        if classes and names != classes:
            raise UserError(f"{path} has other categories than the file before it")
        classes = names
        parts.append(rows)
    return build_table("coco2014", parts, classes, size, broken)


def _read_coco_instances(path: Path, images: Path) -> tuple[list[str], list[Row]]:
    """Names of categories, and rows, of a file of annotations."""
    stored = json.loads(path.read_text())
    column = {category["id"]: i for i, category in enumerate(stored["categories"])}
    labels = {image["id"]: [0.0] * len(column) for image in stored["images"]}
    for annotation in stored["annotations"]:
        labels[annotation["image_id"]][column[annotation["category_id"]]] = 1.0
    rows: list[Row] = [
        (images / image["file_name"], labels[image["id"]]) for image in stored["images"]
    ]
    return [category["name"] for category in stored["categories"]], rows


def nuswide_images(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """NUS-WIDE: 161789 photographs to train, 107859 to test, 81 labels.

    Needs NUSWIDE with ImageList, TrainTestLabels and Flickr. Many of the photographs are no longer
    available: broken: skip leaves out those that are missing.
    """
    home = find_folder(
        "nuswide_images",
        folder,
        ("NUSWIDE", "NUS-WIDE", "nuswide"),
        ("ImageList",),
        "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html",
    )
    labels = find_subfolder(home, ("TrainTestLabels", "Groundtruth/TrainTestLabels"))
    images = find_subfolder(home, ("Flickr", "raw/Flickr", "images"))
    files = [path.name for path in labels.glob("Labels_*_Train.txt")]
    classes = sorted(name.removeprefix("Labels_").removesuffix("_Train.txt") for name in files)
    parts = []
    for part in ("Train", "Test"):
        lines = read_lines(home / "ImageList" / f"{part}Imagelist.txt")
        paths = [images / line.replace("\\", "/") for line in lines]
        columns = []
        for name in classes:
            file = f"Labels_{name}_{part}.txt"
            column = read_lines(labels / file)
            if len(column) != len(paths):
                raise UserError(f"{file} has {len(column)} lines for {len(paths)} images")
            bad = sorted({*column} - {"0", "1"})
            if bad:
                raise UserError(f"{file}: each line is 0 or 1, got {bad[0][:60]!r}")
            columns.append(map(float, column))
        parts.append(list(zip(paths, zip(*columns, strict=True))))
    return build_table("nuswide_images", parts, classes, size, broken)


def multiscene(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """MultiScene-Clean: 7000 aerial photographs to train, 7000 to test, 36 labels.

    Needs MultiScene-Clean with Tra.csv and Test.csv, an image and its labels per line, and the
    folder images.
    """
    home = find_folder(
        "multiscene",
        folder,
        ("MultiScene-Clean", "multiscene"),
        ("Tra.csv", "Test.csv", "images"),
        "https://multiscene.github.io",
    )
    locate = lambda image: home / "images" / image
    classes, train = read_label_table(home / "Tra.csv", locate)
    test_classes, test = read_label_table(home / "Test.csv", locate)
    if classes != test_classes:
        raise UserError(f"Tra.csv and Test.csv in {home} have other columns")
    return build_table("multiscene", [train, test], classes, size, broken)


def mlrsnet(folder: str | None = None, size: Size = 224, broken: Broken = "refuse") -> Table:
    """MLRSNet: 109161 aerial photographs, 60 labels; 80 % of each of its 46 folders to train.

    Needs MLRSNet with Labels and Images.
    """
    home = find_folder(
        "mlrsnet",
        folder,
        ("MLRSNet", "mlrsnet"),
        ("Labels", "Images"),
        "https://data.mendeley.com/datasets/7j9bv9vwsx/3",
    )
    train: list[Row] = []
    test: list[Row] = []
    classes: list[str] = []
    for file in sorted((home / "Labels").glob("*.csv")):
        images = home / "Images" / file.stem
        columns, rows = read_label_table(file, images.joinpath)
        if classes and columns != classes:
            raise UserError(f"{file} has other columns than the files before it")
        classes = columns
        order = np.random.RandomState(SPLIT_SEED).permutation(len(rows))
        count = round(TRAIN_SHARE * len(rows))
        train += [rows[i] for i in sorted(order[:count])]
        test += [rows[i] for i in sorted(order[count:])]
    return build_table("mlrsnet", [train, test], classes, size, broken)


def find_folder(
    dataset: str, folder: str | None, names: Sequence[str], contents: Sequence[str], source: str
) -> Path:
    """The first of these folders that has these contents. Raises UserError if there is none."""
    folder = data_folder(folder)
    for name in names if folder else ():
        home = Path(str(folder), name)
        if all((home / part).exists() for part in contents):
            return home
    raise UserError(
        f"{dataset} needs a folder {' or '.join(names)} with {', '.join(contents)}, "
        f"{describe_search(folder)}: set UNALIKE_DATA or --data-dir to the folder that holds it, "
        f"get it from {source}"
    )


def find_subfolder(home: Path, names: Iterable[str]) -> Path:
    """The first of these folders that is in a dataset's folder."""
    for name in names:
        if (home / name).is_dir():
            return home / name
    raise UserError(f"{home} needs a folder {' or '.join(names)}")


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", "it is no text")
        raise UserError(
            f"{path} cannot be read ({reason}): the folder is not as published"
        ) from None


def read_label_table(path: Path, locate: Callable[[str], Path]) -> tuple[list[str], list[Row]]:
    """Names of labels, and rows, of a file image,label,label,... with 1 where a label is present.

    Args:
        locate: an image's file from its name.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        header, *lines = [row for row in csv.reader(text.splitlines()) if row]
    except (OSError, ValueError, csv.Error):
        raise UserError(
            f"{path} is no table of image,label,label,...: the folder is not as published"
        ) from None
    rows: list[Row] = []
    for number, (image, *marks) in enumerate(lines, 2):
        valid = all(mark.strip() in ("0", "1", "0.0", "1.0") for mark in marks)
        if not valid or len(marks) != len(header) - 1:
            raise UserError(
                f"{path}, line {number}: an image and {len(header) - 1} marks of 0 or 1, "
                f"got {','.join([image, *marks])[:60]!r}"
            )
        rows.append((locate(image.strip()), [float(mark) for mark in marks]))
    return [name.strip() for name in header[1:]], rows


def build_table(
    dataset: str,
    parts: Sequence[Sequence[Row]],
    classes: Sequence[str],
    size: int,
    broken: Broken,
) -> Table:
    """Read all images, (n, 3, size, size) bytes, with labels (n, classes).

    Args:
        parts: rows to train on, and rows to test on.
    """
    rows: list[Row] = [*parts[0], *parts[1]]
    if not classes or not rows:
        raise UserError(
            f"{dataset} has {len(classes)} classes and {len(rows)} images: "
            "the folder is not as published"
        )
    for path, labels in rows:
        if len(labels) != len(classes):
            raise UserError(
                f"{dataset}: {path.name} has {len(labels)} labels, there are {len(classes)} classes"
            )
    x = np.empty((len(rows), size, size, 3), np.uint8)
    problems: list[str] = []
    good: list[int] = []
    for i, (path, _) in enumerate(rows):
        try:
            x[len(good)] = read_resized(path, size)
            good.append(i)
        except FileNotFoundError:
            problems.append(f"{path.name} is missing")
        except Exception:  # what PIL raises on broken bytes has no common base class
            problems.append(f"{path.name} is no image")
    report_broken(problems, len(rows), broken)
    is_train = torch.tensor(good) < len(parts[0])
    return Table(
        x=torch.from_numpy(x[: len(good)]).permute(0, 3, 1, 2).contiguous(),
        targets={"objects": torch.tensor([rows[i][1] for i in good])},
        tasks={"objects": MultiLabel(tuple(classes))},
        train=rows_where(is_train),
        test=rows_where(~is_train),
    )


def read_resized(path: Path, size: int) -> np.ndarray:
    """One image as bytes (size, size, 3)."""
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
