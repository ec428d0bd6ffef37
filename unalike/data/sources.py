"""Samples from what people have: data frames, Hugging Face datasets, files, folders of images.

Columns are chosen by name. Nothing here is imported before it is needed: pandas, pyarrow and
datasets are no dependencies, and their objects are known by what they can do.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unalike.base.errors import UserError, unknown_name
from unalike.base.randomness import stream
from unalike.base.registry import find_named
from unalike.data.partitions import PARTITIONS
from unalike.data.samples import Inputs, InputShape, Lazy, Samples, Tensors, as_samples, fingerprint
from unalike.data.text_codes import texts_to_codes

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
LABEL_COLUMNS = ("label", "labels", "target", "y")
Columns = str | Sequence[str]
Transform = Callable[[Any], Any]


def samples(
    data: Any,
    x: Columns | None = None,
    y: Columns | None = None,
    *,
    labels: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    transform: Transform | None = None,
    images: str | Path | None = None,
    size: int | tuple[int, int] | None = None,
) -> Samples:
    """Samples from a table with named columns, read on demand where it does not fit into memory.

    Args:
        data: a pandas DataFrame, a Hugging Face dataset, a dict of arrays, the path of a .csv or
            .parquet file, or a folder with one subfolder of images per class.
        x: the column of inputs, or several columns of numbers, which become one vector; default:
            all but the labels'.
        y: the column of labels, or several (n, labels) for several labels a row; default: the only
            column of class labels, or the one called label, labels, target or y.
        labels: names of the classes, in order; default: those of the dataset, or all values that
            occur, sorted. The result has them as `.labels`, for `Classification(data.labels)`.
        categories: for input columns of categories all their values, in an order that all clients
            share; they become 0, 1, ..., and NaN where a value is missing, as `table` takes them.
        transform: applied to every input as it is read: a value of the column, or a dict of them
            where there are several. Default: numbers become float32, images (channels, height,
            width) in bytes, texts code points.
        images: folder of image files, whose names are in column `x`.
        size: images are resized to this side, or (height, width).

    Raises:
        UserError: a column or label that is not there; values that are no numbers.

    >>> rows = samples({"age": [30, 50], "ill": ["no", "yes"]}, x=["age"], y="ill")
    >>> rows.labels, rows.rows(torch.tensor([1]))
    (('no', 'yes'), (tensor([[50.]]), tensor([1])))
    >>> table = {"age": [30, 50], "leg": ["right", None]}
    >>> rows = samples(table, categories={"leg": ["left", "right"]})
    >>> rows.rows(torch.arange(2))[0]
    tensor([[30.,  1.],
            [50., nan]])
    """
    if isinstance(data, str | Path):
        path = Path(data)
        if path.is_dir():
            data = list_image_folder(path)
            x, y, images = x or "file", y or "label", path
        else:
            data = read_table(path)
    table = as_columns(data)
    names = column_names(table)
    y = y if y is not None else default_label_column(table, names)
    label_columns = [y] if isinstance(y, str) else list(y or ())
    if x is None:
        inputs = [name for name in names if name not in label_columns]
        x = inputs[0] if len(inputs) == 1 else inputs
    for name in [*([x] if isinstance(x, str) else x), *label_columns]:
        if name not in names:
            raise UserError(unknown_name("column", name, names))
    table = number_categories(table, categories or {})
    names_of_classes = labels if labels is not None else class_names(table, y)
    targets, classes = read_labels(table, y, names_of_classes)
    read_one = transform or InputReader(images=images, size=size)
    if transform is None and images is None and _are_numbers(table, x):
        result: Samples = Tensors(number_columns(table, x), targets)
    else:
        result = Lazy(ColumnRows(table, x, targets, read_one))
    result.labels = classes
    return result


def read_table(path: Path) -> Any:
    """A data frame from a .csv or .parquet file. Raises: UserError where it cannot be read."""
    try:
        import pandas
    except ImportError:
        raise UserError(f"to read {path}: pip install pandas pyarrow") from None
    readers = {".csv": pandas.read_csv, ".parquet": pandas.read_parquet}
    if path.suffix not in readers:
        raise UserError(f"a table is a .csv or .parquet file, or a folder of images, got {path}")
    try:
        return readers[path.suffix](path)
    except ImportError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {cause}") from None


def list_image_folder(folder: Path) -> dict[str, list[str]]:
    """Image files below a folder and their class, the name of the subfolder."""
    files = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise UserError(
            f"{folder} has no images: expected a subfolder for each class, with files that end in "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    return {
        "file": [str(path.relative_to(folder)) for path in files],
        "label": [path.parent.name for path in files],
    }


def as_columns(data: Any) -> Any:
    """What has columns by name: a frame or dataset as it is, a mapping with equal lengths."""
    if is_hub_dataset(data) or is_frame(data):
        return data
    if isinstance(data, Mapping):
        sizes = {name: len(values) for name, values in data.items()}
        if len(set(sizes.values())) > 1:
            raise UserError(f"columns need the same number of rows, got {sizes}")
        return dict(data)
    raise UserError(
        "samples() takes a pandas DataFrame, a Hugging Face dataset, a dict of columns, a .csv or "
        f".parquet file, or a folder of images, got {type(data).__name__}"
    )


def is_frame(data: Any) -> bool:
    """Whether it is a pandas DataFrame, known by its attributes."""
    return all(hasattr(data, name) for name in ("columns", "iloc", "to_numpy"))


def is_hub_dataset(data: Any) -> bool:
    """Whether it is a Hugging Face dataset, known by its attributes."""
    return all(hasattr(data, name) for name in ("column_names", "features", "select"))


def column_names(table: Any) -> list[str]:
    """Names of all columns."""
    if is_hub_dataset(table):
        return list(table.column_names)
    return [str(name) for name in (table.columns if is_frame(table) else table)]


def default_label_column(table: Any, names: list[str]) -> str | None:
    """The only column of class labels, or one with a usual name; None if there is none."""
    if is_hub_dataset(table):
        classes = [name for name in names if hasattr(table.features[name], "names")]
        if len(classes) == 1:
            return classes[0]
    return next((name for name in LABEL_COLUMNS if name in names), None)


def class_names(table: Any, y: Columns | None) -> Sequence[str] | None:
    """The names that a Hugging Face `ClassLabel` gives its classes, None if there are none."""
    if not is_hub_dataset(table) or not isinstance(y, str):
        return None
    feature = table.features[y]
    return getattr(feature, "names", None) or getattr(
        getattr(feature, "feature", None), "names", None
    )


def number_categories(table: Any, categories: Mapping[str, Sequence[str]]) -> Any:
    """A table whose columns of categories hold numbers, as a dict of columns if there are some.

    Raises:
        UserError: a column that is not there, or a value that is none of its categories.
    """
    if not categories:
        return table
    names = column_names(table)
    columns: dict[str, Any] = {name: read_column(table, name) for name in names}
    for name, values in categories.items():
        if name not in names:
            raise UserError(unknown_name("column", name, names))
        numbering = {str(value): number for number, value in enumerate(values)}
        numbers = []
        for row, value in enumerate(columns[name].tolist()):
            if not is_empty(value) and str(value) not in numbering:
                problem = unknown_name("category", str(value), numbering)
                raise UserError(f'column "{name}", row {row}: {problem}')
            numbers.append(np.nan if is_empty(value) else numbering[str(value)])
        columns[name] = np.array(numbers, dtype=np.float32)
    return columns


def is_empty(value: Any) -> bool:
    """Whether a value of a table is missing.

    >>> is_empty(None), is_empty(float("nan")), is_empty("nan"), is_empty([0.0])
    (True, True, False, False)
    """
    if value is None:
        return True
    # NaN, and the missing time of pandas, differ from themselves; its missing value has no answer
    return type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and value != value
    )


def read_column(table: Any, name: str) -> np.ndarray:
    """All values of a column."""
    values = table[name]
    return values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values[:])


def number_columns(table: Any, x: Columns) -> Tensor:
    """A column (n, ...) or several (n, columns) as float32."""
    if isinstance(x, str):
        return _to_tensor(read_column(table, x), x)
    return torch.stack([_to_tensor(read_column(table, name), name) for name in x], 1)


def _to_tensor(values: np.ndarray, name: str) -> Tensor:
    if values.dtype.kind not in "biuf":
        raise UserError(
            f'column "{name}" must hold numbers, got {values.dtype}: convert it, or give a '
            "transform"
        )
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _are_numbers(table: Any, x: Columns) -> bool:
    """Whether columns hold one number a row, so that they fit into memory as a matrix."""
    for name in [x] if isinstance(x, str) else x:
        if is_hub_dataset(table):
            dtype = getattr(table.features[name], "dtype", "")
            if not str(dtype).startswith(("int", "uint", "float", "bool")):
                return False
        elif read_column(table, name).dtype.kind not in "biuf":
            return False
    return True


def read_labels(
    table: Any, y: Columns | None, labels: Sequence[str] | None
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Labels of all rows, and the names of the classes.

    Text becomes the number of its class. Several columns become (n, labels), float32. Numbers with
    a fraction stay as they are, for regression.

    Raises:
        UserError: a value is none of the labels.
    """
    if y is None:
        return None, tuple(labels or ())
    if not isinstance(y, str):
        return number_columns(table, list(y)), tuple(labels or y)
    values = read_column(table, y)
    missing = sum(is_empty(value) for value in values.tolist())
    if missing:
        raise UserError(f'column "{y}" is empty in {missing} of {len(values)} rows: drop them')
    if values.dtype.kind == "f" and labels is None:
        return torch.from_numpy(values.astype(np.float32)), ()
    if values.dtype.kind in "iub" and labels is not None:
        numbers = torch.from_numpy(values.astype(np.int64))
        if len(numbers) and int(numbers.min()) >= 0 and int(numbers.max()) < len(labels):
            return numbers, tuple(map(str, labels))
    texts = [str(value) for value in values.tolist()]
    if labels is None:
        labels = [str(value) for value in sorted(set(values.tolist()))]
    numbering = {str(label): number for number, label in enumerate(labels)}
    for row, text in enumerate(texts):
        if text not in numbering:
            raise UserError(f'column "{y}", row {row}: ' + unknown_name("label", text, numbering))
    return torch.tensor([numbering[text] for text in texts]), tuple(numbering)


class InputReader:
    """Turns a value of a column into a tensor: a number, a text, an image, or the file of one."""

    def __init__(self, images: str | Path | None = None, size: int | tuple[int, int] | None = None):
        self.images = Path(images) if images is not None else None
        self.size = (size, size) if isinstance(size, int) else size

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            texts = [name for name, part in value.items() if isinstance(part, str)]
            if texts:
                raise UserError(
                    f'column "{texts[0]}" holds text beside other columns: name its values '
                    f'(categories={{"{texts[0]}": [...]}}), or give a transform'
                )
            return torch.stack([torch.as_tensor(v, dtype=torch.float32) for v in value.values()])
        if self.images is not None:
            return self.image(self.images / str(value))
        if hasattr(value, "convert"):  # a PIL image
            return self.image(value)
        if isinstance(value, str):
            return texts_to_codes([value])[0]
        return torch.as_tensor(np.asarray(value), dtype=torch.float32)

    def image(self, source: Any) -> Tensor:
        """An image (channels, height, width) in bytes, from a file or a PIL image."""
        from PIL import Image, UnidentifiedImageError

        try:
            picture = Image.open(source) if isinstance(source, Path) else source
            picture = picture.convert("L" if picture.mode in ("1", "L", "I;16") else "RGB")
        except (OSError, UnidentifiedImageError) as error:
            cause = getattr(error, "strerror", None) or error
            raise UserError(f"the image {source} cannot be read: {cause}") from None
        if self.size is not None:
            picture = picture.resize(self.size[::-1])
        array = np.array(picture)
        return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


class ColumnRows(Dataset):
    """Rows of a table as (x, y), or x where there are no labels; each is read when it is used."""

    def __init__(self, table: Any, x: Columns, y: Tensor | None, transform: Transform):
        self.table = table
        self.x = x
        self.y = y
        self.transform = transform

    def __len__(self) -> int:
        if isinstance(self.table, dict):
            return len(next(iter(self.table.values())))
        return len(self.table)

    def __getitem__(self, row: int) -> Any:
        if is_hub_dataset(self.table):
            values = self.table[row]
        elif is_frame(self.table):
            values = self.table.iloc[row]
        else:
            values = {name: column[row] for name, column in self.table.items()}
        if isinstance(self.x, str):
            x = self.transform(values[self.x])
        else:
            x = self.transform({name: values[name] for name in self.x})
        return x if self.y is None else (x, self.y[row])


class Preprocessed(Samples):
    """Samples whose inputs a function changes as they are read; the fingerprint is the original's.

    Clients that preprocess one public set each in their own way hold the same public set.
    """

    def __init__(self, original: Samples, transform: Transform, id: str | None = None):
        self.original = original
        self.transform = transform
        self.id = id

    def __len__(self) -> int:
        return len(self.original)

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        x, y = self.original.rows(index)
        return self.transform(x), y

    def subset(self, index: Tensor) -> "Preprocessed":
        # Some rows are not what the id names.
        return Preprocessed(self.original.subset(index), self.transform)

    @property
    def shape(self) -> InputShape:
        x, _ = self.rows(torch.arange(1))
        if isinstance(x, dict):
            return {name: tuple(part.shape[1:]) for name, part in x.items()}
        return tuple(x.shape[1:])

    @property
    def _fingerprint(self) -> str:  # type: ignore[override]
        if self.id is None:
            return fingerprint(self.original)
        return hashlib.sha256(f"id {self.id} {len(self)}".encode()).hexdigest()[:16]


def preprocess(data: Any, transform: Transform, id: str | None = None) -> Preprocessed:
    """Data with inputs that a function changes batch by batch, such as a client's normalisation.

    A public set must be row by row the same for all clients. It is compared as it was before the
    transform, so that every client may have a transform of its own; or by `id`, where already the
    stored rows differ (the same photographs in two resolutions).

    Args:
        data: what a client takes, or inputs alone.
        transform: from inputs (n, ...) to what the client's model takes, (n, ...).
        id: a name of the whole set that all clients use, instead of comparing rows.

    >>> rows = preprocess(torch.ones(3, 2), lambda x: 2 * x)
    >>> rows.rows(torch.tensor([0]))[0]
    tensor([[2., 2.]])
    """
    inputs_alone = isinstance(data, Tensor | np.ndarray | dict)
    return Preprocessed(as_samples((data, None) if inputs_alone else data), transform, id)


def hub_samples(dataset: Any) -> Samples:
    """A Hugging Face dataset as it is, where its columns say enough."""
    names = column_names(dataset)
    y = default_label_column(dataset, names)
    inputs = [name for name in names if name != y]
    if y is None or (len(inputs) > 1 and not _are_numbers(dataset, inputs)):
        raise UserError(
            f"which columns are inputs and labels is not clear among {', '.join(names)}: write "
            "unalike.samples(data, x=..., y=...)"
        )
    return samples(dataset)


def partition(
    data: Any,
    clients: int | None = None,
    how: str | Callable[..., list[Tensor]] = "iid",
    *,
    by: Tensor | None = None,
    seed: int = 0,
    columns: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Samples]:
    """Deal out rows among clients, every row to one of them.

    Args:
        data: what a client takes, or an object with `load_partition(number)`, such as the
            partitioners of flwr-datasets, which deals out rows itself.
        clients: how many.
        how: the name of a partition (`iid`, `dirichlet`, `shards`, `apart`, ...), `module:name`, or
            a function like those.
        by: one label a row that the partition looks at, (n,); default: the labels.
        seed: the same seed gives the same rows.
        columns: arguments of `samples`, such as `{"x": "text", "y": "topic"}`, for data that have
            columns; its defaults hold for a data frame.
        options: of the partition, such as `alpha=0.5`.
    Returns: the samples of each client.

    >>> rows = torch.arange(6)
    >>> [len(part) for part in partition((rows[:, None].float(), rows % 2), 3)]
    [2, 2, 2]
    """
    if hasattr(data, "load_partition"):
        return load_partitions(data, clients, columns)
    if clients is None:
        raise UserError("among how many clients are the rows dealt out? pass clients=")
    rows = read_part(data, columns)
    function = how if callable(how) else find_named("partition", how, PARTITIONS)
    how = how if isinstance(how, str) else how.__name__
    parameters = inspect.signature(function).parameters
    for name in options:
        if name not in parameters:
            raise UserError(unknown_name(f"option of {how}", name, parameters))
    what: Any = by
    if "rows" in parameters:
        what = len(rows)
    elif "features" in parameters:
        x, _ = rows.rows(torch.arange(len(rows)))
        parts = list(x.values()) if isinstance(x, dict) else [x]
        what = torch.cat([part.flatten(1) for part in parts], 1)
    elif what is None:
        blocks = torch.arange(len(rows)).split(1024)
        what = torch.cat([rows.labelled_batch(block)[1] for block in blocks])
    generator = stream(seed, "partition", how)
    try:
        dealt = function(what, clients, generator=generator, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"partition {how}: {error}") from error
    return [rows.subset(torch.as_tensor(part)) for part in dealt]


def load_partitions(
    source: Any, clients: int | None, columns: Mapping[str, Any] | None
) -> list[Samples]:
    """Samples of every partition of an object that deals out rows by itself."""
    count = clients if clients is not None else getattr(source, "num_partitions", None)
    if count is None:
        raise UserError("how many partitions there are is not known: pass clients=")
    return [read_part(source.load_partition(number), columns) for number in range(count)]


def read_part(data: Any, columns: Mapping[str, Any] | None) -> Samples:
    """Samples of what a client takes, or of what has columns."""
    if columns is None and not is_frame(data):
        return as_samples(data)
    return samples(data, **(columns or {}))
