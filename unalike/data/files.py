"""Files of data sets: where they lie, and what is in a .npz, or a sentence why it cannot be read. Knows nothing of what it means."""

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from unalike.base.errors import UserError


def find(name: str, folder: str | None, files: Sequence[str], source: str | None = None) -> Path:
    """The first of these files that lies in the folder, or in UNALIKE_DATA where no folder is given."""
    where = folder or os.environ.get("UNALIKE_DATA")
    for file in files if where else ():
        if (path := Path(str(where), file)).is_file():
            return path
    looked = (
        f"not found in {Path(where).absolute()}" if where else "and no folder was named to look in"
    )
    raise UserError(
        f"{name} needs {' or '.join(files)}, {looked}: set UNALIKE_DATA or --data-dir to the folder that holds it"
        + (f", get it from {source}" if source else "")
    )


@contextmanager
def opened(path: Path) -> Iterator[Mapping[str, Any]]:
    """The arrays of a .npz by name, read as they are asked for; a file that is cut short or lacks one says so."""
    try:
        file = np.load(path, allow_pickle=False)
    except Exception as problem:  # those of zip and NumPy files have no common kind
        raise UserError(f"{path} is not a readable .npz file: {problem}") from None
    with file as held:
        try:
            yield held
        except KeyError as problem:
            raise UserError(
                f"{path} lacks {str(problem.args[0]).split()[0]}; it has {', '.join(held.files) or 'nothing'}"
            ) from None
        except (BadZipFile, EOFError, zlib.error) as problem:
            raise UserError(f"{path} is not a readable .npz file: {problem}") from None
