"""Datasets, what a client holds of them, and how rows are partitioned. Knows no models or methods.

To add a dataset: a file with a function `name(folder, **options) -> Table`, and a line in
`DATASETS`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from unalike.base.errors import UserError
from unalike.base.registry import find_named
from unalike.data.agnews import agnews
from unalike.data.caltech101 import caltech101
from unalike.data.chestxray14 import chestxray14
from unalike.data.cifar10 import cifar10
from unalike.data.clinic import clinic
from unalike.data.composites import (
    caltech_composites,
    cifar_composites,
    digits_composites,
    lesion_composites,
)
from unalike.data.digits import digits_captions, load_digits_table
from unalike.data.flickr8k import flickr8k
from unalike.data.ham10000 import ham10000
from unalike.data.hapt import hapt
from unalike.data.multilabel_folders import (
    coco2014,
    mlrsnet,
    multiscene,
    nuswide_images,
    voc2007,
)
from unalike.data.multiview import (
    bdgp,
    digits_views,
    load_multiview,
    mnist_usps,
    multi_fashion,
    multiview,
    multiview_table,
    nuswide,
    scene15,
)
from unalike.data.pacs import pacs
from unalike.data.partitions import PARTITIONS
from unalike.data.samples import Lazy, Samples, Tensors, fingerprint
from unalike.data.sources import partition, preprocess, samples
from unalike.data.synthetic import generated
from unalike.data.table import Table
from unalike.data.tinyimagenet100 import tinyimagenet100
from unalike.data.voc2012 import voc2012, voc2012_masks

DATASETS: dict[str, Callable[..., Table]] = {
    "digits": load_digits_table,
    "digits_views": digits_views,
    "digits_captions": digits_captions,
    "mnist_usps": mnist_usps,
    "bdgp": bdgp,
    "multi_fashion": multi_fashion,
    "scene15": scene15,
    "nuswide": nuswide,
    "multiview": multiview,
    "digits_composites": digits_composites,
    "cifar_composites": cifar_composites,
    "caltech_composites": caltech_composites,
    "lesion_composites": lesion_composites,
    "caltech101": caltech101,
    "voc2012": voc2012,
    "voc2007": voc2007,
    "coco2014": coco2014,
    "nuswide_images": nuswide_images,
    "multiscene": multiscene,
    "mlrsnet": mlrsnet,
    "voc2012_masks": voc2012_masks,
    "flickr8k": flickr8k,
    "generated": generated,
    "cifar10": cifar10,
    "pacs": pacs,
    "agnews": agnews,
    "clinic": clinic,
    "hapt": hapt,
    "chestxray14": chestxray14,
    "ham10000": ham10000,
    "tinyimagenet100": tinyimagenet100,
}


def load_dataset(name: str, folder: str | None = None, **options: Any) -> Table:
    """Load the dataset of that name.

    Args:
        name: of a shipped dataset or one of an installed package; or `module:name` of a function
            that returns a Table. Its parameters are the options, but for `folder`.
        folder: where its files are, by default the folder that UNALIKE_DATA names.
        options: of its loader.
    Raises: UserError for an unknown name or option, or a missing file.
    """
    loader = find_named("dataset", name, DATASETS)
    parameters = inspect.signature(loader).parameters
    known = [option for option in parameters if option != "folder"]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise UserError(
            f"dataset {name!r} has no option {', '.join(map(repr, unknown))}. "
            f"It has: {', '.join(known) or 'none'}."
        )
    table = loader(folder=folder, **options) if "folder" in parameters else loader(**options)
    if not isinstance(table, Table):
        raise UserError(f"dataset {name!r} must be an unalike.Table, got {type(table).__name__}")
    return table


__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Lazy",
    "Samples",
    "Table",
    "Tensors",
    "fingerprint",
    "load_dataset",
    "load_digits_table",
    "load_multiview",
    "multiview_table",
    "partition",
    "preprocess",
    "samples",
]
