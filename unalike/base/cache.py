"""Where things are kept that can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """UNALIKE_CACHE, or `unalike` in the user's cache folder."""
    own = os.environ.get("UNALIKE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unalike"
