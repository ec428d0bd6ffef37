"""Run folders of somebody else, and names that clients chose: nothing runs, leaks or is overwritten."""

import csv
import io
import json

import pytest
from rich.console import Console

from unalike.base.errors import UserError
from unalike.base.lock import is_locked, lock
from unalike.report import compare, show_comparison
from unalike.report.comparison_formats import format_comparison
from unalike.report.folder import read
from unalike.report.page import render_page, write
from unalike.tracking.follow import Tracking
from unalike.tracking.tracker import Journal, TrackedRun

SECRET = "a key of whoever opens the folder"


@pytest.fixture
def secret(tmp_path):
    """A file of the reader's, outside of the run's folder."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def replace_by_link(file, target):
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def test_a_report_does_not_write_through_a_link(make, secret):
    folder = make()
    replace_by_link(folder / "report.html", secret)
    write(folder)
    assert secret.read_text() == SECRET
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_lock_is_no_link(make, secret):
    """It is truncated when it is taken."""
    folder = make()
    replace_by_link(folder / ".lock", secret)
    with pytest.raises(UserError, match="is a link"), lock(folder):
        pass
    assert not is_locked(folder) and secret.read_text() == SECRET


def test_pictures_that_lead_out_of_the_folder_are_not_shown(make, secret):
    folder = make()
    replace_by_link(folder / "pictures" / "stolen.svg", secret)
    (folder / "pictures" / "own.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page = render_page(read(folder))
    assert 'alt="own"' in page and 'alt="stolen"' not in page


@pytest.mark.parametrize("name", ["config.yaml", "results.json", "events.jsonl", "ledger.csv"])
def test_records_that_lead_out_of_the_folder_are_not_read(make, tmp_path, name):
    folder = make()
    elsewhere = tmp_path / "elsewhere"
    (folder / name).rename(elsewhere)
    replace_by_link(folder / name, elsewhere)
    with pytest.raises(UserError, match="leads out of the run's folder"):
        read(folder)


def test_a_folder_may_be_a_link_itself(make, tmp_path):
    make()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert read(tmp_path / "link").results


class Sink:
    """A tracker that keeps which files it was given."""

    files: list = []

    def open(self, run):
        return set()

    def log(self, values, step):
        pass

    def close(self, files, finished):
        Sink.files = files


def test_a_tracker_is_not_sent_files_from_elsewhere(make, secret, monkeypatch):
    folder = make()
    replace_by_link(folder / "report.html", secret)
    monkeypatch.setattr("unalike.tracking.follow.build_tracker", lambda name: Sink())
    Tracking(folder, ["sink"], print).close()
    assert [file.name for file in Sink.files] == ["results.json", "config.yaml"]


def test_a_journal_is_not_written_elsewhere(make, secret):
    folder = make()
    replace_by_link(folder / "tracking" / "wandb.jsonl", secret)
    with pytest.raises(UserError, match="leads out"):
        Journal(TrackedRun(folder=folder, project="p", parameters={}), "wandb")
    assert secret.read_text() == SECRET


@pytest.fixture
def hostile(make):
    """Two runs of a client that chose the words that it may choose."""
    paths = []
    for seed in range(2):
        folder = make(f"r{seed}", seed=seed)
        results = json.loads((folder / "results.json").read_text())
        leaf = results["clients"].pop("leaf")
        names = ["[/]", '=HYPERLINK("http://e")', "![x](http://e)", "<img src=x>", "[1em]", "*"]
        for name in names:
            results["clients"][name] = dict(leaf)
        for entry in results["clients"].values():
            entry["unit"] = "[/bold]\x1b[2J"
        (folder / "results.json").write_text(json.dumps(results))
        paths.append(folder)
    return compare(paths)


def test_a_unit_does_not_steer_the_terminal(hostile):
    out = io.StringIO()
    show_comparison(hostile, Console(file=out, width=120))
    assert "[/bold]" in out.getvalue() and "\x1b[2J" not in out.getvalue()


def test_a_spreadsheet_computes_nothing(hostile):
    rows = list(csv.DictReader(io.StringIO(format_comparison(hostile, "csv"))))
    assert '\'=HYPERLINK("http://e")' in {row["client"] for row in rows}
    for row in rows:
        assert not row["client"].startswith(("=", "+", "-", "@")) and "\x1b" not in row["unit"]


def test_markdown_has_no_pictures_links_or_html_of_a_client(hostile):
    text = format_comparison(hostile, "markdown")
    assert r"!\[x\](http://e)" in text and r"\<img src=x>" in text
    assert "![" not in text and "| <img" not in text


def test_a_row_of_latex_is_no_argument_of_the_row_before(hostile):
    lines = format_comparison(hostile, "latex").splitlines()
    assert not [line for line in lines if line.startswith(("[", "*"))]
    assert any(line.startswith("{[}1em]") for line in lines)
