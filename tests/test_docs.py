"""What the documentation promises: docstrings with arguments, whole links, pages within reach."""

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import build  # noqa: E402
import docstrings  # noqa: E402
import notebooks  # noqa: E402
import reference  # noqa: E402

BOOKS = ROOT / "docs" / "notebooks"
PUBLIC = docstrings.public_names()


def test_every_public_name_has_a_docstring_that_describes_each_argument():
    missing = [
        gap for name, thing in PUBLIC.items() for gap in docstrings.undocumented(name, thing)
    ]
    assert missing == []


def test_every_public_name_is_on_one_page_of_the_reference():
    listed = [name for page in reference.PAGES for name in reference.names_of(page, PUBLIC)]
    assert sorted(listed) == sorted(PUBLIC)


def test_a_missing_argument_is_found():
    def half(a, b):
        """Adds.

        Args:
            a: a number.
        """

    class Bare:
        pass

    assert docstrings.undocumented("half", half) == ["half(b)"]
    assert docstrings.undocumented("Bare", Bare) == ["Bare"]


def test_results_have_a_verdict_a_command_and_the_date_of_their_measurement():
    rows = re.findall(r"^\| (?!what |---)(.*) \|$", (ROOT / "docs/results.md").read_text(), re.M)
    assert len(rows) > 20
    for row in rows:
        what, number, _, verdict, made, command = row.split(" | ")
        assert what and number and "`" in command, row
        assert set(re.split("[;,] ", verdict)) <= {"met", "missed", "no target"}, row
        date, path = re.fullmatch(r"\[([-\d]+)\]\(\.\./(results/.*\.json)\)", made).groups()
        assert json.loads((ROOT / path).read_text()).get("date", date) == date, row


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The site's pages as Markdown, notebooks with their code alone."""
    folder = tmp_path_factory.mktemp("site")
    build.assemble(folder, execute=False)
    return folder


def test_every_link_leads_somewhere_and_every_page_is_within_two_clicks(pages):
    assert build.check_pages(pages) == []


def test_a_broken_link_and_a_page_out_of_reach_are_reported(tmp_path):
    (tmp_path / "index.md").write_text("# Start\n[a](a.md) [b](a.md#none) [c](c.md)")
    (tmp_path / "a.md").write_text("# A\n[far](far.md)")
    (tmp_path / "far.md").write_text("# Far\n[too far](too-far.md)")
    (tmp_path / "too-far.md").write_text("# Too far")
    assert build.check_pages(tmp_path) == [
        "index.md: no such heading: a.md#none",
        "index.md: no such page or file: c.md",
        "too-far.md: not within two clicks of the front page",
    ]


def test_what_a_built_page_would_load_from_elsewhere_is_reported(tmp_path):
    script = '<script src="https://cdn.example/x.js"></script>'
    (tmp_path / "index.html").write_text(f'{script}<a href="#here">x</a><p id="there">')
    assert list(build.check_site(tmp_path)) == [
        "index.html: loads https://cdn.example/x.js",
        "index.html: no such heading: #here",
    ]


def test_the_navigation_lists_every_page_once(pages):
    settings = tomllib.loads((ROOT / "docs/site/zensical.toml").read_text())
    listed = re.findall(r"[\w/-]+\.md", json.dumps(settings["project"]["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(pages)) for page in pages.rglob("*.md"))


def test_the_hospitals_of_the_docs_are_a_scenario(tmp_path, capsys):
    from unalike.scenarios import build_clients, load

    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/five-hospitals.md").read_text(), re.S)
    (tmp_path / "hospitals.yaml").write_text(block)
    clients = build_clients(load(str(tmp_path / "hospitals.yaml"))[0])
    assert [client.id for client in clients] == ["north", "south", "east", "west", "university"]


@pytest.mark.parametrize(
    "name", ["1-own-models", "2-hugging-face", "3-training-loop", "4-organisations"]
)
def test_a_notebook_runs_and_shows_a_table(name):
    pytest.importorskip("nbclient")
    if name == "2-hugging-face":
        pytest.importorskip("peft")
    book = notebooks.run(BOOKS / f"{name}.ipynb")
    page, pictures = notebooks.render(book, name)
    assert "<th" in page and "gain</th>" in page
    assert re.search(r"(\d+) of \1 rounds</div>", page)  # its progress
    assert list(pictures) == [f"{name}-1.svg"]


def test_the_page_on_an_index_links_to_the_repository():
    text = (ROOT / "README.md").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert settings["dynamic"] == ["version", "readme"]
    shown = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **arguments: shown.update(arguments))
        runpy.run_path(str(ROOT / "setup.py"))
    links = re.findall(r"\]\(([^)]+)\)", shown["long_description"])
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", text)) > 20
    assert all(link.startswith(("https://", "#")) for link in links)


def test_the_readme_counts_the_baselines():
    from unalike.algorithms import ALGORITHMS

    ours = {"fedmuscle", "fedmuscleplus", "afmcc", "fednca", "fedmpt", "subflot"}
    assert ours < ALGORITHMS.keys()
    assert f"with {len(ALGORITHMS) - len(ours)} baselines" in (ROOT / "README.md").read_text()


def test_each_test_that_a_page_names_is_there():
    """`file.py: name` or `file.py::name` of a page is a file of tests and a function in it."""
    missing = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`(?:tests/)?(?:\w+/)*(test_\w+\.py)`", page.read_text()):
            if not list((ROOT / "tests").rglob(name)):
                missing.append(f"{page.name}: {name}")
    known = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    page = (ROOT / "docs" / "threats.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    for file, name in named:
        if f"def {name}(" not in known.get(file, ""):
            missing.append(f"threats.md: {file}::{name}")
    assert missing == [] and len(named) > 40


def test_versions_that_let_a_file_run_code_are_not_accepted():
    """CVE-2025-32434 and CVE-2026-24747 (torch), -2024-11392 (transformers), -2025-62593 (ray)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["hub"], *extras["ray"]]
    floors = {
        name: tuple(map(int, version.split(".")))
        for name, version in (word.split(">=") for word in wanted if ">=" in word)
    }
    assert floors["torch"] >= (2, 10)
    assert floors["transformers"] >= (4, 48)
    assert floors["ray"] >= (2, 52)
    assert all("==" in word for word in extras["weights"]), "one version, whose file has one hash"
