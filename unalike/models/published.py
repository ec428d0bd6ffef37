"""Hashes of published weights: a package index may hand out another file under the same name."""

import hashlib
from functools import cache
from pathlib import Path

from unalike.base.errors import UserError

# SHA-256 of the files in the packages of the extra `weights`
PUBLISHED = {
    "efficientnet-lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet-lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet-lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    "all-minilm-l6-v2": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}


def check_published(path: Path, name: str) -> Path:
    """Return a file of published weights, once it is known to be that file.

    Args:
        path: of the file.
        name: in PUBLISHED.
    Raises: UserError where it is another file.
    """
    if hash_file(path, path.stat().st_mtime_ns) != PUBLISHED[name]:
        raise UserError(
            f"{path} is not the published file of {name}: its SHA-256 is another. Install its "
            "package again from an index you trust; a file of your own is named by `weights`"
        )
    return path


@cache
def hash_file(path: Path, changed: int) -> str:
    """SHA-256 of a file, read once; `changed` is the time at which it was changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
