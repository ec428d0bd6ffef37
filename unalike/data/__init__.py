"""Where data comes from, what a client holds of it, and how it is shared. Knows nothing of models or methods."""

import inspect
from typing import Any

from unalike.base.errors import UserError, unknown_name
from unalike.data.benchmarks import agnews, cifar10, pacs
from unalike.data.captions import flickr8k, voc2012_masks
from unalike.data.composites import caltech_composites, cifar_composites, digits_composites
from unalike.data.digits import digits_captions, load_digits_table
from unalike.data.folders import coco2014, mlrsnet, multiscene, nuswide_images, voc2007
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
from unalike.data.partitions import PARTITIONS
from unalike.data.pictures import caltech101, voc2012
from unalike.data.samples import Lazy, Samples, Tensors, fingerprint
from unalike.data.synthetic import generated
from unalike.data.table import Table

DATASETS = {
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
}


def load_dataset(name: str, folder: str | None = None, **options: Any) -> Table:
    """The dataset of that name; `folder` is where files lie (UNALIKE_DATA), for those that need any. Options are the loader's."""
    if name not in DATASETS:
        raise UserError(unknown_name("dataset", name, DATASETS))
    known = list(inspect.signature(DATASETS[name]).parameters)[1:]
    if strange := [option for option in options if option not in known]:
        raise UserError(
            f"dataset {name!r} has no option {', '.join(map(repr, strange))}. It has: {', '.join(known) or 'none'}."
        )
    return DATASETS[name](folder, **options)


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
]
