"""Finding and opening the files of datasets."""

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from unalike.base.errors import UserError


def find_file(
    dataset: str, folder: str | None, files: Sequence[str], source: str | None = None
) -> Path:
    """The first of these files in the folder, or in UNALIKE_DATA if no folder is passed.

    Args:
        source: where to get the file, for the error message.
    Raises: UserError if there is none.
    """
    folder = data_folder(folder)
    for file in files if folder else ():
        path = Path(str(folder), file)
        if path.is_file():
            return path
    where_from = f", get it from {source}" if source else ""
    raise UserError(
        f"{dataset} needs {' or '.join(files)}, {describe_search(folder)}: "
        f"set UNALIKE_DATA or --data-dir to the folder that holds it{where_from}"
    )


def data_folder(folder: str | None) -> str | None:
    """The folder, or that of UNALIKE_DATA."""
    return folder or os.environ.get("UNALIKE_DATA")


def describe_search(folder: str | None) -> str:
    """Where files were looked for, for error messages."""
    if not folder:
        return "and no folder was named to look in"
    return f"not found in {Path(folder).absolute()}"


@contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, Any]]:
    """The arrays of a .npz by name, read when accessed.

    Raises: UserError if the file is damaged, or lacks an array that is accessed.
    """
    try:
        file = np.load(path, allow_pickle=False)
    except Exception as problem:  # errors of zip and NumPy files have no common base class
        raise UserError(f"{path} is not a readable .npz file: {problem}") from None
    with file as arrays:
        try:
            yield arrays
        except KeyError as problem:
            raise UserError(
                f"{path} lacks {str(problem.args[0]).split()[0]}; "
                f"it has {', '.join(arrays.files) or 'nothing'}"
            ) from None
        except (BadZipFile, EOFError, zlib.error) as problem:
            raise UserError(f"{path} is not a readable .npz file: {problem}") from None
