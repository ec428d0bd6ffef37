"""docs/run-folder.md names every file and every event of a run."""

import re
from pathlib import Path

import pytest

import unalike
from unalike.base import lock
from unalike.base.integrity import MANIFEST
from unalike.runs.run_folder import FILES_OF_A_RUN, FILES_OF_A_START, FOLDERS_OF_A_RUN, RESULTS

ROOT = Path(unalike.__file__).parent
PAGE = ROOT.parent / "docs" / "run-folder.md"


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is in the repository only")
def test_the_page_names_every_file():
    page = PAGE.read_text()
    names = {*FILES_OF_A_START, *FILES_OF_A_RUN, *FOLDERS_OF_A_RUN, RESULTS, MANIFEST, lock.FILE}
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is in the repository only")
def test_the_page_names_every_event_that_is_recorded():
    page = PAGE.read_text().partition("## Events")[2]
    written = re.compile(r"(?:emit|record|log_event)\(\s*\"([a-z_]+)\"")
    found = set()
    for file in ROOT.rglob("*.py"):
        found |= set(written.findall(file.read_text()))
    # those that are passed on and not recorded, and the site's own (docs/client.md)
    found -= {"call", "alone", "stage", "picture", "unwanted"}
    assert [event for event in sorted(found) if f"`{event}`" not in page] == []
