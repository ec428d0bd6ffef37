"""Where data comes from, what a client holds of it, and how it is shared. Knows nothing of models or methods."""

from difflib import get_close_matches

from unalike.data.digits import load_digits_table
from unalike.data.partitions import PARTITIONS
from unalike.data.samples import Lazy, Samples, Tensors, fingerprint
from unalike.data.table import Table

DATASETS = {"digits": load_digits_table}


def load_dataset(name: str, folder: str | None = None) -> Table:
    """The dataset of that name; `folder` is where files lie (UNALIKE_DATA), for those that need any."""
    if name not in DATASETS:
        near = get_close_matches(str(name), DATASETS, 1, 0.0)[0]
        raise ValueError(f"there is no dataset {name!r}. Did you mean {near!r}? There are: {', '.join(DATASETS)}.")
    return DATASETS[name](folder)


__all__ = ["DATASETS", "PARTITIONS", "Lazy", "Samples", "Table", "Tensors", "fingerprint", "load_dataset", "load_digits_table"]
