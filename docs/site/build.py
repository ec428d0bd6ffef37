"""Builds the site: `python docs/site/build.py [FOLDER]`, which is `make docs`.

The pages of docs/ and of the repository's root, notebooks with their output, and the API reference
from docstrings go through Zensical. A broken link, or a page that loads anything from elsewhere,
ends the build with exit code 1.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import notebooks
import reference

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Pages from the root of the repository, by their name on the site.
ROOT_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LOG.md": "log.md",
}
LINK = re.compile(r"(?<!\!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "srcset"}


def main(site: Path) -> int:
    """Build the site and return the number of problems, which are printed."""
    source = site.parent / f"{site.name}-source"
    assemble(source / "docs", execute=True)
    shutil.copy(HERE / "zensical.toml", source)
    shutil.rmtree(site, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=source, check=True)
    shutil.move(source / "site", site)
    problems = [*check_pages(source / "docs"), *check_site(site)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} problems; {site / 'index.html'}")
    return len(problems)


def assemble(out: Path, execute: bool) -> None:
    """Write all pages of the site as Markdown.

    Args:
        out: the folder, which is emptied.
        execute: run the notebooks, to show what they answer; otherwise show their code alone.
    """
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(
        HERE.parent, out, ignore=shutil.ignore_patterns("site", "*.ipynb", "__pycache__")
    )
    for name, page in ROOT_PAGES.items():
        shutil.copy(ROOT / name, out / page)
    (out / "methods.md").write_text(methods_page())
    overview, pages = reference.render()
    with (out / "reference.md").open("a") as file:
        file.write("\n" + overview)
    (out / "reference").mkdir()
    for name, text in pages.items():
        (out / "reference" / name).write_text(text)
    notebooks.write_pages(HERE.parent / "notebooks", out / "notebooks", execute)
    for page in out.rglob("*.md"):
        page.write_text(relink(page.read_text(), page, out))


def methods_page() -> str:
    """The table of methods, which is a section of the README."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## Methods\n", 1)[1].split("\n## ", 1)[0]
    return (
        "# Methods\n\nOne command runs any of them on any scenario whose clients fit: "
        "`unalike run SCENARIO --algorithm NAME`. Fields and their defaults: "
        "[reference](reference/methods.md), or `unalike list algorithms`.\n" + section
    )


def relink(text: str, page: Path, out: Path) -> str:
    """Make links that hold in the repository hold on the site: lead to its pages, or to copies."""

    def replace(match: re.Match) -> str:
        label, target = match.groups()
        path, _, fragment = target.partition("#")
        if not path or urlsplit(target).scheme:
            return match[0]
        there = _on_site(path, fragment, page, out)
        if there is None:
            return match[0]  # check_pages reports it where it is broken
        is_methods = there == out / "methods.md"
        ending = f"#{fragment}" if fragment and not is_methods else ""
        return f"[{label}]({_relative(there, page.parent)}{ending})"

    return LINK.sub(replace, text)


def _on_site(path: str, fragment: str, page: Path, out: Path) -> Path | None:
    """The page or file of the site that a link means; None if it is there as it is written."""
    linked = page.parent / path
    if linked.is_dir():
        return (linked / "index.md").resolve()
    if linked.suffix == ".ipynb" and page.parent != linked.parent:
        return linked.with_suffix(".md").resolve()
    file = None if linked.exists() else _in_repository(path, page, out)
    if file is None:
        return None
    name = str(file.relative_to(ROOT))
    if name == "README.md":
        return out / ("methods.md" if fragment == "methods" else "index.md")
    if name in ROOT_PAGES:
        return out / ROOT_PAGES[name]
    if name.startswith("docs/"):
        return out / name.removeprefix("docs/")
    copy = out / "files" / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, copy)
    return copy


def _in_repository(path: str, page: Path, out: Path) -> Path | None:
    """The file of the repository that a link on a page means."""
    name = str(page.relative_to(out))
    origins = {there: ROOT for there in ROOT_PAGES.values()} | {"methods.md": ROOT}
    origin = origins.get(name, (HERE.parent / name).parent)
    file = (origin / path).resolve()
    return file if file.is_file() and file.is_relative_to(ROOT) else None


def _relative(target: Path, folder: Path) -> str:
    up = 0
    while not target.is_relative_to(folder):
        folder = folder.parent
        up += 1
    return "../" * up + str(target.relative_to(folder))


def links_of(text: str) -> list[str]:
    """Targets of the links of a page, those in code left out.

    >>> links_of("[a](b.md#c) and `[no](x)`")
    ['b.md#c']
    """
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    prose = re.sub(r"`[^`\n]*`(?!\])", "", prose)
    return [target for _, target in LINK.findall(prose)]


def anchors_of(text: str) -> set[str]:
    """Ids of the headings of a page."""
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    anchors = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", prose):
        given = re.search(r"\{ #(\S+) \}", heading)
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchors.add(given[1] if given else re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return anchors


def check_pages(out: Path) -> list[str]:
    """Links of assembled pages that lead nowhere, and pages too far from the front page."""
    texts = {page: page.read_text() for page in sorted(out.rglob("*.md"))}
    problems = []
    steps: dict[Path, set[Path]] = {page: set() for page in texts}
    for page, text in texts.items():
        for target in links_of(text):
            path, _, fragment = target.partition("#")
            if urlsplit(target).scheme:
                continue
            there = (page.parent / path).resolve() if path else page
            if not there.is_file():
                problems.append(f"{page.name}: no such page or file: {target}")
            elif fragment and there in texts and fragment not in anchors_of(texts[there]):
                problems.append(f"{page.name}: no such heading: {target}")
            elif there in texts:
                steps[page].add(there)
    near = {out / "index.md"}
    for _ in range(2):
        near |= {there for page in near for there in steps[page]}
    problems += [
        f"{page.name}: not within two clicks of the front page" for page in texts.keys() - near
    ]
    return problems


class _Page(HTMLParser):
    """Ids, links, and what a page of the site loads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADS.get(tag, "") in values and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values[LOADS[tag]])


def check_site(site: Path) -> Iterator[str]:
    """Links of the built pages that lead nowhere, and what they would load from elsewhere."""
    pages = {}
    for file in sorted(site.rglob("*.html")):
        pages[file.resolve()] = _Page()
        pages[file.resolve()].feed(file.read_text())
    for file, page in pages.items():
        name = file.relative_to(site.resolve())
        if name.name == "404.html":  # its links begin at the root of a host
            continue
        for target in page.loaded:
            if urlsplit(target).scheme in ("http", "https") or target.startswith("//"):
                yield f"{name}: loads {target}"
        for target in [*page.links, *page.loaded]:
            parts = urlsplit(target)
            if parts.scheme or target.startswith("//"):
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                yield f"{name}: no such page or file: {target}"
            elif (
                parts.fragment
                and there in pages
                and unquote(parts.fragment) not in pages[there].ids
            ):
                yield f"{name}: no such heading: {target}"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    sys.exit(1 if main(folder.resolve()) else 0)
