"""A client's data: rows of inputs and, perhaps, labels, in memory or read on demand. Knows nothing of tasks or clients."""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from unalike.base.errors import UserError
from unalike.data.modalities import MARK

Inputs = Tensor | dict[str, Tensor]  # a dict holds modalities by name


class Samples:
    """Rows that can be counted, read and narrowed. Anything a client trains on is one of these. An `index` is row numbers (int64)."""

    _fingerprint: str | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        """Inputs and labels of these rows; labels are None where there are none. Bytes stay bytes in inputs, labels are numbers."""
        raise NotImplementedError

    def labelled_batch(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """The same, where there must be labels."""
        x, y = self.rows(index)
        if y is None:
            raise UserError(
                "these samples have no labels: give (x, y), or a dataset that yields (x, y)"
            )
        return x, y

    def subset(self, index: Tensor) -> "Samples":
        """Only these rows: a view, nothing is copied."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """The shape of one input, without the row; by name where inputs are modalities."""
        raise NotImplementedError


class Tensors(Samples):
    """Samples in memory: `x` one tensor or a dict of them, `y` a tensor or None, all with one row a sample.

    >>> Tensors(torch.zeros(5, 1, 8, 8), torch.arange(5)).subset(torch.tensor([3, 4])).rows(torch.tensor([0]))[1]
    tensor([3])
    """

    def __init__(self, x: Inputs, y: Tensor | None = None, index: Tensor | None = None):
        named = {**(x if isinstance(x, dict) else {"x": x}), **({} if y is None else {"y": y})}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor) or tensor.ndim == 0:
                got = (
                    "a tensor without rows" if isinstance(tensor, Tensor) else type(tensor).__name__
                )
                raise UserError(f"samples are tensors with one row a sample, got {got} for {name}")
        if isinstance(x, dict):
            check_modalities(x)
        sizes = {name: len(tensor) for name, tensor in named.items()}
        if len(set(sizes.values())) != 1:
            raise UserError(f"inputs and labels need the same number of rows, got {sizes}")
        self.x, self.y, self.index = x, y, torch.arange(len(tensor)) if index is None else index

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        chosen = self.index[index]
        return map_modalities(
            self.x, lambda x: x[chosen.to(x.device)]
        ), None if self.y is None else integer_labels(self.y[chosen.to(self.y.device)])

    def subset(self, index: Tensor) -> "Tensors":
        return Tensors(self.x, self.y, self.index[index])

    @property
    def shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        return map_modalities(self.x, lambda x: tuple(x.shape[1:]))


class Lazy(Samples):
    """Samples read on demand from a map-style torch Dataset that yields (x, y) or x."""

    def __init__(self, dataset: Dataset, index: Tensor | None = None):
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise UserError(
                f"a dataset needs a length and rows by number, {type(dataset).__name__} has not: use a map-style one"
            )
        self.dataset, self.index = dataset, torch.arange(len(dataset)) if index is None else index

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        if len(index) == 0:
            raise UserError("a dataset read on demand cannot give 0 rows: ask for one or more")
        items = [self.dataset[row] for row in self.index[index].tolist()]
        if not isinstance(items[0], (tuple, list)):
            return default_collate(items), None
        if len(items[0]) != 2:
            raise UserError(
                f"a dataset yields (x, y) or x, {type(self.dataset).__name__} yields {len(items[0])} things"
            )
        x, y = zip(*items)
        return default_collate(list(x)), integer_labels(default_collate(list(y)))

    def subset(self, index: Tensor) -> "Lazy":
        return Lazy(self.dataset, self.index[index])

    @cached_property
    def shape(
        self,
    ) -> (
        tuple[int, ...] | dict[str, tuple[int, ...]]
    ):  # rows do not change, and reading one may take long
        return map_modalities(self.rows(torch.tensor([0]))[0], lambda x: tuple(x.shape[1:]))


def check_modalities(x: dict[str, Tensor]) -> None:
    """Raises ValueError unless there is a modality, and marks say of each sample whether it has one, and that it has any."""
    names = [name for name in x if not name.endswith(MARK)]
    if not names:
        raise UserError(
            'there is no modality: give one tensor or more by name, as {"left": (n, features), ...}'
        )
    for name, there in ((name, x[name]) for name in x if name.endswith(MARK)):
        if name.removesuffix(MARK) not in names or there.dtype != torch.bool or there.ndim != 1:
            raise UserError(
                f'"{name}" says which samples have modality "{name.removesuffix(MARK)}", which must be there: one truth value '
                f"(torch.bool) a sample, got {there.dtype} of shape {tuple(there.shape)}; there are {', '.join(names)}"
            )
    marks = [x[name + MARK] for name in names if name + MARK in x]
    if (
        len(marks) == len(names)
        and len({len(there) for there in marks}) == 1
        and len(bare := (~torch.stack(marks).any(0)).nonzero())
    ):
        raise UserError(
            f"{len(bare)} of {len(marks[0])} samples have no modality at all, the first is row {int(bare[0])}: leave them out"
        )


def nonfinite_problem(samples: Samples) -> str | None:
    """What is wrong with inputs that hold NaN or infinity; None: they do not. Of a modality only the samples count that have it."""
    bad: dict[str, int] = {}
    for few in torch.arange(len(samples)).split(1024):
        x, _ = samples.rows(few)
        for name, rows in (x if isinstance(x, dict) else {"": x}).items():
            if rows.is_floating_point():
                there = x.get(name + MARK) if isinstance(x, dict) else None
                wrong = ~rows.flatten(1).isfinite().all(1)
                bad[name] = bad.get(name, 0) + int(
                    (wrong if there is None else wrong & there.to(wrong.device)).sum()
                )
    for name, count in bad.items():
        if count:
            what, how = (
                (f'modality "{name}" has', f', or say by "{name}{MARK}" which samples have it')
                if name
                else ("there is", "")
            )
            return f"{what} NaN or infinity in {count} of {len(samples)} samples: fill them in or leave the samples out{how}"
    return None


def drop_modalities(held: Samples, missing: float, generator: torch.Generator) -> Tensors:
    """Samples that lack some modalities, marked: a share `missing` of all (sample, modality) entries, drawn at random among those that
    leave every sample one; with a single modality nothing can be missing."""
    x, y = held.rows(torch.arange(len(held)))
    if not isinstance(x, dict):
        raise UserError("inputs of one kind have no modalities that could be missing")
    rows, names = len(held), list(x)
    chance = torch.rand(rows, len(names), generator=generator)
    chance[torch.arange(rows), chance.argmax(1)] = torch.inf  # one of each sample stays
    gone = chance.flatten().argsort()[
        : min(round(missing * chance.numel()), rows * (len(names) - 1))
    ]
    there = (
        torch.ones(rows * len(names), dtype=torch.bool).index_fill(0, gone, False).reshape(rows, -1)
    )
    marks = {name + MARK: there[:, i] for i, name in enumerate(names)}
    return Tensors({name: _blank(part, marks[name + MARK]) for name, part in x.items()} | marks, y)


def merge(held: list[Samples]) -> Tensors:
    """All samples, with labels, as one set. Where not everybody has the same modalities, marks say which samples have which."""
    told = [
        map_modalities.labelled_batch(torch.arange(len(map_modalities))) for map_modalities in held
    ]
    parts, y = (
        [(x if isinstance(x, dict) else {"": x}, len(labels)) for x, labels in told],
        torch.cat([labels for _, labels in told]),
    )
    like = {name: part for x, _ in parts for name, part in x.items() if not name.endswith(MARK)}
    rows = {
        name: torch.cat([x.get(name, part.new_zeros(size, *part.shape[1:])) for x, size in parts])
        for name, part in like.items()
    }
    marks = {
        name + MARK: torch.cat(
            [x.get(name + MARK, torch.full((size,), name in x)) for x, size in parts]
        )
        for name in like
    }
    return Tensors(
        rows[""]
        if "" in rows
        else rows | {name: there for name, there in marks.items() if not there.all()},
        y,
    )


def concat(held: dict[str, Tensors]) -> Tensors:
    """Rows of several sets, by name, as one, in this order and without labels; pictures are brought to the largest size among them."""
    parts: dict[str, Tensor] = {}
    for name, its in held.items():
        x = its.rows(torch.arange(len(its)))[0]
        if isinstance(x, dict):
            raise UserError(f"{name} has several modalities and cannot be joined with others")
        parts[name] = x
    (first, usual), *others = ((name, _kind(x)) for name, x in parts.items())
    for name, kind in others:
        if kind != usual:
            raise UserError(
                f"rows of {first} are {usual}, those of {name} {kind}: only rows of one kind can be joined"
            )
    size = [max(sizes) for sizes in zip(*(x.shape[2:] for x in parts.values()), strict=True)]
    return Tensors(torch.cat([resize(x, size) for x in parts.values()]))


def _kind(x: Tensor) -> str:
    """What rows must have in common to be of one set."""
    shape = (
        f"pictures of {x.shape[1]} channel{'s' * (x.shape[1] != 1)}"
        if x.ndim == 4
        else f"of shape {tuple(x.shape[1:])}"
    )
    return f"{shape} in {str(x.dtype).removeprefix('torch.')}"


def resize(pictures: Tensor, size: Sequence[int]) -> Tensor:
    """(n, channels, height, width) at another height and width, in their own dtype."""
    if list(pictures.shape[2:]) == list(size):
        return pictures
    made = interpolate(
        pictures.to(torch.promote_types(pictures.dtype, torch.float32)),
        list(size),
        mode="bilinear",
        antialias=True,
    )
    return (
        made.to(pictures.dtype)
        if pictures.is_floating_point()
        else made.round_().to(pictures.dtype)
    )


def _blank(rows: Tensor, there: Tensor) -> Tensor:
    return rows * there.reshape(-1, *[1] * (rows.ndim - 1)).to(rows)


def as_samples(obj: object) -> Samples:
    """Samples of whatever holds data: Samples, (x, y), a TensorDataset, a Subset, or any map-style Dataset."""
    if isinstance(obj, Samples):
        return obj
    if isinstance(obj, TensorDataset):
        obj = (*obj.tensors, None) if len(obj.tensors) == 1 else obj.tensors
    if isinstance(obj, tuple) and len(obj) == 2:
        return Tensors(*obj)
    if isinstance(obj, Subset):
        return as_samples(obj.dataset).subset(torch.as_tensor(obj.indices, dtype=torch.int64))
    if isinstance(obj, Dataset):
        return Lazy(obj)
    got = (
        f"{type(obj).__name__} of {len(obj)}"
        if isinstance(obj, (tuple, list))
        else type(obj).__name__
    )
    raise UserError(
        f"data is (x, y) tensors, (x, None) where there are no labels, or a map-style torch Dataset, got {got}"
    )


def fingerprint(samples: Samples) -> str:
    """16 hex digits that tell data apart: of every row in memory, or of the length and first 64 rows read on demand."""
    samples = getattr(samples, "raw", samples)  # wherever its rows are kept
    if samples._fingerprint is not None:
        return samples._fingerprint
    step = 1024
    stop = min(len(samples), 64) if isinstance(samples, Lazy) else len(samples)
    digest = hashlib.sha256(f"{len(samples)} {stop}".encode())
    for start in range(0, stop, step):
        x, y = samples.rows(torch.arange(start, min(start + step, stop)))
        named = x if isinstance(x, dict) else {"": x}
        for name, tensor in [*sorted(named.items()), *([] if y is None else [("y", y)])]:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
    samples._fingerprint = digest.hexdigest()[
        :16
    ]  # rows do not change; hashing a large set again and again takes long
    return samples._fingerprint


def integer_labels(y: Tensor) -> Tensor:
    """Labels kept as bytes, as whole numbers: in an input, bytes are brightness."""
    return y.long() if y.dtype == torch.uint8 else y


def map_modalities(x: Inputs, change):
    """The change made to the input, or to every modality."""
    return (
        {name: change(tensor) for name, tensor in x.items()} if isinstance(x, dict) else change(x)
    )
