"""The package's page on an index: README.md, with links that lead to the repository from there."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")

setup(
    long_description=LINK.sub(rf"]({REPOSITORY}/blob/main/\1)", (ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
