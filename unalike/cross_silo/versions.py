"""Versions of installed packages, compared between a server and its clients."""

import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata

from unalike.base.version import __version__


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    packages = ("torch", "numpy", "scikit-learn", "safetensors")
    versions = {"unalike": __version__, "python": platform.python_version()}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def version_differences(
    own: Mapping[str, str], others: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """What clients have in other versions than the server, by client, e.g. "torch 2.9 (here 2.13)".

    Args:
        own: versions by package.
        others: the same, by client, as clients told it.
    """
    differences = {}
    for client, versions in others.items():
        texts = [
            f"{name} {str(versions[name])[:20]} (here {version})"
            for name, version in own.items()
            if name in versions and versions[name] != version
        ]
        if texts:
            differences[client] = ", ".join(texts)
    return differences
