"""A client's data: inputs with or without labels, in memory or read on demand.

Knows nothing of tasks or clients. An `index` is a tensor of row numbers (int64).
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from unalike.base.errors import UserError
from unalike.data.modalities import MARK
from unalike.data.reader import ReadAhead, Reading
from unalike.data.row_cache import cache_of

Inputs = Tensor | dict[str, Tensor]  # a dict holds modalities by name
InputShape = tuple[int, ...] | dict[str, tuple[int, ...]]

HASHED_ROWS = 64  # of samples read on demand
CHUNK = 1024  # rows read at once


class Samples:
    """Rows that can be counted, read and restricted. All data of a client are of this kind."""

    _fingerprint: str | None = None
    # What labels were checked by, or are when they are read: raises ValueError if they do not fit.
    check: Callable[[Tensor], None] | None = None
    labels: tuple[str, ...] = ()  # names of the classes, where the data say them

    def __len__(self) -> int:
        raise NotImplementedError

    def __repr__(self) -> str:
        """What there is, without reading a row.

        >>> Tensors(torch.zeros(5, 1, 8, 8))
        Tensors(5 rows of (1, 8, 8))
        """
        shape = f" of {self.shape}" if isinstance(self, Tensors) else ""
        labels = f", labels {', '.join(self.labels[:10])}" if self.labels else ""
        more = f" and {len(self.labels) - 10} more" if len(self.labels) > 10 else ""
        return f"{type(self).__name__}({len(self)} rows{shape}{labels}{more})"

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        """Inputs and labels of these rows; labels are None if the samples have none.

        Inputs keep their dtype (bytes stay bytes); labels that are bytes become int64.
        """
        raise NotImplementedError

    def labelled_batch(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and labels of these rows. Raises UserError if there are no labels."""
        x, y = self.rows(index)
        if y is None:
            raise UserError(
                "these samples have no labels: give (x, y), or a dataset that yields (x, y)"
            )
        return x, y

    def checked_by(self, check: Callable[[Tensor], None]) -> "Samples":
        """These samples if their labels fit; rows read on demand are checked when they are read.

        Args:
            check: a task's, which raises ValueError where labels do not fit.
        """
        return self

    def read_ahead(self, batches: Iterable[Tensor]) -> None:
        """Prepare for `rows` to be called with these row numbers, in this order.

        Samples that need no preparation do not iterate over them.
        """

    def subset(self, index: Tensor) -> "Samples":
        """Only these rows: a view, nothing is copied."""
        raise NotImplementedError

    @property
    def shape(self) -> InputShape:
        """The shape of one input, without the row axis; by name if inputs are modalities."""
        raise NotImplementedError


class Tensors(Samples):
    """Samples in memory.

    Args:
        x: inputs (n, ...), one tensor or a dict of them by modality. NumPy arrays, memory-mapped
            ones too, pandas columns and lists of numbers are taken as tensors.
        y: labels (n, ...), or None.
        index: restrict to these rows.

    >>> samples = Tensors(torch.zeros(5, 1, 8, 8), torch.arange(5))
    >>> samples.subset(torch.tensor([3, 4])).rows(torch.tensor([0]))[1]
    tensor([3])
    """

    def __init__(self, x: Inputs, y: Tensor | None = None, index: Tensor | None = None):
        x = {name: as_tensor(x[name]) for name in x} if isinstance(x, dict) else as_tensor(x)
        y = as_tensor(y)
        tensors = dict(x) if isinstance(x, dict) else {"x": x}
        if y is not None:
            tensors["y"] = y
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.ndim == 0:
                is_tensor = isinstance(tensor, Tensor)
                got = "a tensor without rows" if is_tensor else type(tensor).__name__
                raise UserError(f"samples are tensors with one row a sample, got {got} for {name}")
        if isinstance(x, dict):
            check_modalities(x)
        sizes = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(sizes.values())) != 1:
            raise UserError(f"inputs and labels need the same number of rows, got {sizes}")
        self.x = x
        self.y = y
        self.is_whole = index is None
        self.index = torch.arange(len(tensor)) if index is None else index

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        chosen = self.index[index]
        x = map_modalities(self.x, lambda part: part[chosen.to(part.device)])
        if self.y is None:
            return x, None
        return x, integer_labels(self.y[chosen.to(self.y.device)])

    def all_rows(self) -> tuple[Inputs, Tensor | None]:
        """Every row, in order; the tensors themselves where these are all of theirs."""
        if not self.is_whole:
            return self.rows(torch.arange(len(self)))
        return self.x, None if self.y is None else integer_labels(self.y)

    def checked_by(self, check: Callable[[Tensor], None]) -> "Tensors":
        if self.y is not None and self.check != check:
            check(self.y[self.index.to(self.y.device)])
            self.check = check
        return self

    def subset(self, index: Tensor) -> "Tensors":
        part = Tensors(self.x, self.y, self.index[index])
        part.labels = self.labels
        part.check = self.check
        return part

    @property
    def shape(self) -> InputShape:
        return map_modalities(self.x, lambda part: tuple(part.shape[1:]))


class Lazy(Samples):
    """Samples read on demand from a map-style torch Dataset that yields (x, y) or x.

    Rows that were read stay in memory up to a limit, unless the dataset gives another row each time
    (`RowCache`). With worker processes, rows that are not there are read ahead of training.

    Args:
        dataset: map-style.
        index: restrict to these rows.
        reading: by how many worker processes rows are read.
    """

    def __init__(
        self, dataset: Dataset, index: Tensor | None = None, reading: Reading | None = None
    ):
        is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not is_map_style:
            raise UserError(
                f"a dataset needs a length and rows by number, {type(dataset).__name__} has not: "
                "use a map-style one"
            )
        self.dataset = dataset
        self.cache = cache_of(dataset)
        self.reading = reading or Reading()
        self.ahead: ReadAhead | None = None
        rows = len(dataset)  # type: ignore[arg-type]
        self.index = torch.arange(rows) if index is None else index

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        if len(index) == 0:
            raise UserError("a dataset read on demand cannot give 0 rows: ask for one or more")
        items = self._read(self.index[index].tolist())
        if not isinstance(items[0], (tuple, list)):
            return self._collate(items), None
        if len(items[0]) != 2:
            raise UserError(
                f"a dataset yields (x, y) or x, {type(self.dataset).__name__} yields "
                f"{len(items[0])} things"
            )
        x, parts = zip(*items)
        y = integer_labels(self._collate(list(parts)))
        if self.check is not None:
            self._check_labels(y, index)
        return self._collate(list(x)), y

    def _check_labels(self, y: Tensor, index: Tensor) -> None:
        """Raise UserError that names the rows, where labels do not fit the task."""
        assert self.check is not None
        try:
            self.check(y)
        except ValueError as error:
            rows = ", ".join(str(row) for row in self.index[index].tolist()[:8])
            more = ", ..." if len(index) > 8 else ""
            raise UserError(
                f"{type(self.dataset).__name__}, among rows {rows}{more}: {error}"
            ) from None

    def read_ahead(self, batches: Iterable[Tensor]) -> None:
        self.ahead = None
        if not self.reading.ahead:
            return
        room = self.cache.room(int(self.index[0]))
        planned: set[int] = set()  # rows that will be kept by then
        plan = []
        for index in batches:
            rows = self._missing(self.index[index].tolist())
            new = [row for row in rows if row not in planned]
            planned.update(new[: room - len(planned)])
            if new:
                plan.append(new)
        if plan:
            self.ahead = ReadAhead(self.dataset, plan, self.reading)

    def _missing(self, rows: list[int]) -> list[int]:
        """Those of the rows that are not kept, each once."""
        return [row for row in dict.fromkeys(rows) if row not in self.cache.items]

    def _read(self, rows: list[int]) -> list[Any]:
        """Items of these rows of the dataset: kept ones, those read ahead, or read now."""
        missing = self._missing(rows) if self.ahead is not None else []
        items = self.ahead.take(missing) if self.ahead is not None and missing else None
        fresh = dict(zip(missing, items or ()))
        for row, item in fresh.items():
            self.cache.keep(row, item)
        return [fresh[row] if row in fresh else self.cache[row] for row in rows]

    def _collate(self, items: list[Any]) -> Any:
        """Rows as one batch. Raises: UserError where their shapes differ."""
        try:
            return default_collate(items)
        except RuntimeError:
            shapes = {str(_shape_of(item)): None for item in items}
            if len(shapes) < 2:
                raise
            raise UserError(
                f"rows of {type(self.dataset).__name__} change shape: {', '.join(shapes)}; resize "
                "or pad them to one shape"
            ) from None

    def checked_by(self, check: Callable[[Tensor], None]) -> "Lazy":
        if self.check == check:
            return self
        part = self.subset(torch.arange(len(self)))  # others may read the same rows for other tasks
        part.check = check
        return part

    def subset(self, index: Tensor) -> "Lazy":
        part = Lazy(self.dataset, self.index[index], self.reading)
        part.labels = self.labels
        part.check = self.check
        return part

    @cached_property
    def shape(self) -> InputShape:  # cached: reading a row may take long
        x, _ = self.rows(torch.tensor([0]))
        return map_modalities(x, lambda part: tuple(part.shape[1:]))


def reorder_labels(y: Tensor, order: Tensor, columns: bool = False) -> Tensor:
    """Labels as they are when the classes are numbered in another order.

    Args:
        y: (n, ...) whole numbers, those that are no class stay; with `columns`, (n, classes).
        order: (classes,) which old class each new one is.

    >>> reorder_labels(torch.tensor([0, 1, 2, -1]), torch.tensor([2, 0, 1]))
    tensor([ 1,  2,  0, -1])
    """
    if columns:
        return y[:, order.to(y.device)]
    new = torch.argsort(order).to(y)
    is_class = (y >= 0) & (y < len(new))
    return torch.where(is_class, new[y.clamp(0, len(new) - 1).long()], y)


class Relabelled(Samples):
    """Samples whose classes are numbered in another order; arguments as of `reorder_labels`."""

    def __init__(self, samples: Samples, order: Tensor, columns: bool = False):
        self.samples = samples
        self.order = order
        self.columns = columns

    def __len__(self) -> int:
        return len(self.samples)

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        x, y = self.samples.rows(index)
        return x, None if y is None else reorder_labels(y, self.order, self.columns)

    def read_ahead(self, batches: Iterable[Tensor]) -> None:
        self.samples.read_ahead(batches)

    def subset(self, index: Tensor) -> "Relabelled":
        return Relabelled(self.samples.subset(index), self.order, self.columns)

    @property
    def shape(self) -> InputShape:
        return self.samples.shape


def _shape_of(item: Any) -> Any:
    """The shape of a row; by name where it holds modalities."""
    if isinstance(item, dict):
        return {name: _shape_of(part) for name, part in item.items()}
    return tuple(getattr(item, "shape", ()))


def check_modalities(x: dict[str, Tensor]) -> None:
    """Raise UserError unless there is a modality, masks fit, and every sample has a modality.

    `name?` is the mask (n,) of modality `name`: which samples have it.
    """
    names = [name for name in x if not name.endswith(MARK)]
    if not names:
        raise UserError(
            'there is no modality: give one tensor or more by name, as {"left": (n, features), ...}'
        )
    for key, mask in x.items():
        if not key.endswith(MARK):
            continue
        name = key.removesuffix(MARK)
        if name not in names or mask.dtype != torch.bool or mask.ndim != 1:
            raise UserError(
                f'"{key}" says which samples have modality "{name}", which must be there: one '
                f"truth value (torch.bool) a sample, got {mask.dtype} of shape "
                f"{tuple(mask.shape)}; there are {', '.join(names)}"
            )
    masks = [x[name + MARK] for name in names if name + MARK in x]
    if len(masks) < len(names) or len({len(mask) for mask in masks}) > 1:
        return
    empty = (~torch.stack(masks).any(0)).nonzero()
    if len(empty):
        raise UserError(
            f"{len(empty)} of {len(masks[0])} samples have no modality at all, the first is row "
            f"{int(empty[0])}: leave them out"
        )


def nonfinite_problem(samples: Samples) -> str | None:
    """What is wrong with inputs that hold NaN or infinity, in a sentence; None if nothing is.

    Of a modality only the samples that have it are looked at.
    """
    bad: dict[str, int] = {}  # samples by modality
    for index in torch.arange(len(samples)).split(CHUNK):
        x, _ = samples.rows(index)
        parts = x if isinstance(x, dict) else {"": x}
        for name, rows in parts.items():
            if not rows.is_floating_point():
                continue
            nonfinite = ~rows.flatten(1).isfinite().all(1)
            if name + MARK in parts:
                nonfinite &= parts[name + MARK].to(nonfinite.device)
            bad[name] = bad.get(name, 0) + int(nonfinite.sum())
    for name, count in bad.items():
        if not count:
            continue
        subject = f'modality "{name}" has' if name else "there is"
        remedy = f', or say by "{name}{MARK}" which samples have it' if name else ""
        if not name and len(samples.shape) == 1:
            remedy = ", or take an encoder that knows missing values, such as table"
        return (
            f"{subject} NaN or infinity in {count} of {len(samples)} samples: "
            f"fill them in or leave the samples out{remedy}"
        )
    return None


def drop_modalities(samples: Samples, missing: float, generator: torch.Generator) -> Tensors:
    """Remove a share `missing` of all (sample, modality) entries at random, and add masks.

    Every sample keeps one modality; with a single modality nothing is removed.
    """
    x, y = samples.rows(torch.arange(len(samples)))
    if not isinstance(x, dict):
        raise UserError("inputs of one kind have no modalities that could be missing")
    rows, names = len(samples), list(x)
    priority = torch.rand(rows, len(names), generator=generator)
    priority[torch.arange(rows), priority.argmax(1)] = torch.inf  # one of each sample stays
    count = min(round(missing * priority.numel()), rows * (len(names) - 1))
    removed = priority.flatten().argsort()[:count]
    present = torch.ones(rows * len(names), dtype=torch.bool).index_fill(0, removed, False)
    present = present.reshape(rows, -1)
    parts: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for i, (name, part) in enumerate(x.items()):
        mask = present[:, i]
        parts[name] = part * mask.reshape(-1, *[1] * (part.ndim - 1)).to(part)
        masks[name + MARK] = mask
    return Tensors(parts | masks, y)


def merge(sets: list[Samples]) -> Tensors:
    """All labelled samples of several clients as one set.

    Where clients have different modalities, masks say which samples have which.
    """
    batches = [samples.labelled_batch(torch.arange(len(samples))) for samples in sets]
    y = torch.cat([labels for _, labels in batches])
    parts = [(x if isinstance(x, dict) else {"": x}, len(labels)) for x, labels in batches]
    patterns: dict[str, Tensor] = {}  # a tensor of each modality
    for x, _ in parts:
        patterns |= {name: part for name, part in x.items() if not name.endswith(MARK)}
    merged: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name, pattern in patterns.items():
        rows, mask = [], []
        for x, size in parts:
            rows.append(x.get(name, pattern.new_zeros(size, *pattern.shape[1:])))
            mask.append(x.get(name + MARK, torch.full((size,), name in x)))
        merged[name] = torch.cat(rows)
        masks[name + MARK] = torch.cat(mask)
    if "" in merged:
        return Tensors(merged[""], y)
    return Tensors(merged | {key: mask for key, mask in masks.items() if not mask.all()}, y)


def concat(sets: dict[str, Tensors]) -> Tensors:
    """The rows of several sets, by name, in this order and without labels.

    Images are resized to the largest size among them.
    """
    inputs: dict[str, Tensor] = {}
    for name, samples in sets.items():
        x, _ = samples.rows(torch.arange(len(samples)))
        if isinstance(x, dict):
            raise UserError(f"{name} has several modalities and cannot be joined with others")
        inputs[name] = x
    kinds = {name: _describe_rows(x) for name, x in inputs.items()}
    first = next(iter(kinds))
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise UserError(
                f"rows of {first} are {kinds[first]}, those of {name} {kind}: "
                "only rows of one kind can be joined"
            )
    sizes = [x.shape[2:] for x in inputs.values()]
    largest = [max(lengths) for lengths in zip(*sizes, strict=True)]
    return Tensors(torch.cat([resize(x, largest) for x in inputs.values()]))


def _describe_rows(x: Tensor) -> str:
    """What rows must have in common to be concatenated."""
    shape = f"of shape {tuple(x.shape[1:])}"
    if x.ndim == 4:
        shape = f"pictures of {x.shape[1]} channel{'s' * (x.shape[1] != 1)}"
    return f"{shape} in {str(x.dtype).removeprefix('torch.')}"


def resize(images: Tensor, size: Sequence[int]) -> Tensor:
    """Images (n, channels, height, width) at another (height, width), in their own dtype."""
    if list(images.shape[2:]) == list(size):
        return images
    real = images.to(torch.promote_types(images.dtype, torch.float32))
    resized = interpolate(real, list(size), mode="bilinear", antialias=True)
    if not images.is_floating_point():
        resized.round_()
    return resized.to(images.dtype)


def as_tensor(values: Any) -> Any:
    """A NumPy array or pandas column as a tensor with the same memory; all else as it is.

    A list of numbers, or of arrays of one shape, is copied.

    Raises: UserError where it holds something else than numbers.
    """
    if isinstance(values, list) and not any(isinstance(value, Tensor) for value in values):
        try:
            values = np.array(values)
        except ValueError:
            raise UserError("the rows of a list must have one shape") from None
    if not isinstance(values, np.ndarray):
        if not hasattr(values, "iloc"):
            return values
        values = values.to_numpy()
    if values.dtype.kind not in "biuf":
        raise UserError(
            f"an array must hold numbers, got {values.dtype}: "
            'unalike.samples({"x": ..., "y": ...}) reads texts and numbers classes by name'
        )
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    with warnings.catch_warnings():  # of read-only arrays, such as memory-mapped ones
        warnings.simplefilter("ignore")
        return torch.from_numpy(values)


def as_samples(data: Any) -> Samples:
    """Samples from what a client takes.

    Args:
        data: Samples; (x, y) or (x, None) as tensors, NumPy arrays or pandas columns; a map-style
            Dataset, a Subset, or a DataLoader, of which the dataset, `num_workers` and
            `prefetch_factor` are taken; a Hugging Face dataset whose columns are clear.
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, DataLoader):
        samples = as_samples(data.dataset)
        if isinstance(samples, Lazy):
            samples.reading = Reading.of(data)
        return samples
    if isinstance(data, TensorDataset):
        data = (*data.tensors, None) if len(data.tensors) == 1 else data.tensors
    if isinstance(data, tuple) and len(data) == 2:
        return Tensors(*data)
    if isinstance(data, Subset):
        index = torch.as_tensor(data.indices, dtype=torch.int64)
        return as_samples(data.dataset).subset(index)
    from unalike.data.sources import hub_samples, is_frame, is_hub_dataset

    if is_hub_dataset(data):
        return hub_samples(data)
    if is_frame(data):
        raise UserError(
            "a data frame has inputs and labels in columns: write unalike.samples(frame, x=..., "
            "y=...)"
        )
    by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    in_memory = isinstance(data, (tuple, list, str, dict, Tensor, np.ndarray))
    if isinstance(data, Dataset) or (by_number and not in_memory):
        return Lazy(data)
    got = type(data).__name__
    if isinstance(data, (tuple, list)):
        got += f" of {len(data)}"
    raise UserError(
        "data is (x, y) tensors, (x, None) where there are no labels, or a map-style torch "
        f"Dataset, got {got}; for tables and files: unalike.samples(...)"
    )


def fingerprint(samples: Samples) -> str:
    """16 hex digits that tell data apart.

    A hash of every row in memory, or of the length and the first 64 rows read on demand.
    """
    samples = getattr(samples, "raw", samples)  # a cache on a device has the same rows
    if samples._fingerprint is not None:
        return samples._fingerprint
    stop = min(len(samples), HASHED_ROWS) if isinstance(samples, Lazy) else len(samples)
    digest = hashlib.sha256(f"{len(samples)} {stop}".encode())
    for start in range(0, stop, CHUNK):
        x, y = samples.rows(torch.arange(start, min(start + CHUNK, stop)))
        tensors = sorted(x.items()) if isinstance(x, dict) else [("", x)]
        if y is not None:
            tensors.append(("y", y))
        for name, tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    samples._fingerprint = digest.hexdigest()[:16]  # kept: rows do not change, hashing is slow
    return samples._fingerprint


def integer_labels(y: Tensor) -> Tensor:
    """Labels stored as bytes, as int64; all other labels unchanged."""
    return y.long() if y.dtype == torch.uint8 else y


def map_modalities(x: Inputs, function: Callable[[Tensor], Any]) -> Any:
    """The function of the input, or of every modality by name."""
    if isinstance(x, dict):
        return {name: function(part) for name, part in x.items()}
    return function(x)
