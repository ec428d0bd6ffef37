"""Where data comes from, what a client holds of it, and how it is shared. Knows nothing of models or methods."""

from difflib import get_close_matches

from unalike.data.digits import load_digits_table
from unalike.data.multiview import bdgp, digits_views, load_multiview, mnist_usps, multi_fashion, multiview_table, nuswide, scene15
from unalike.data.partitions import PARTITIONS
from unalike.data.samples import Lazy, Samples, Tensors, fingerprint
from unalike.data.table import Table

DATASETS = {
    "digits": load_digits_table,
    "digits_views": digits_views,
    "mnist_usps": mnist_usps,
    "bdgp": bdgp,
    "multi_fashion": multi_fashion,
    "scene15": scene15,
    "nuswide": nuswide,
}


def load_dataset(name: str, folder: str | None = None) -> Table:
    """The dataset of that name; `folder` is where files lie (UNALIKE_DATA), for those that need any."""
    if name not in DATASETS:
        near = get_close_matches(str(name), DATASETS, 1, 0.0)[0]
        raise ValueError(f"there is no dataset {name!r}. Did you mean {near!r}? There are: {', '.join(DATASETS)}.")
    return DATASETS[name](folder)


__all__ = ["DATASETS", "PARTITIONS", "Lazy", "Samples", "Table", "Tensors", "fingerprint", "load_dataset", "load_digits_table",
           "load_multiview", "multiview_table"]
