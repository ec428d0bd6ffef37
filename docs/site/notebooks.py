"""Notebooks as pages: their text, their code, and what it answers when it is run."""

import base64
import html
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds for a cell
KERNEL = "python3"


def write_pages(folder: Path, out: Path, execute: bool) -> None:
    """Write a page for each notebook of a folder, and a gallery of them, `index.md`.

    Args:
        folder: with the *.ipynb files; a notebook's first cell is its title and a sentence.
        out: folder of the pages; pictures go to `pictures/` there.
        execute: run them first.
    """
    out.mkdir(parents=True, exist_ok=True)
    gallery = ["# Notebooks", "", "Each runs in seconds on a laptop, without a GPU or a download."]
    gallery += ["In the pictures dashed lines, and rings at the end of a bar, are clients trained"]
    gallery += ["alone; solid lines and dots are the same clients in the federation."]
    for file in sorted(folder.glob("*.ipynb")):
        book = run(file) if execute else json.loads(file.read_text())
        page, pictures = render(book, file.stem)
        (out / f"{file.stem}.md").write_text(page)
        (out / file.name).write_text(file.read_text())
        for name, content in pictures.items():
            (out / "pictures").mkdir(exist_ok=True)
            (out / "pictures" / name).write_bytes(content)
        title, sentence = _introduction(book)
        gallery += ["", f"## [{title}]({file.stem}.md)", "", sentence]
        if pictures:
            gallery += ["", f"![{title}](pictures/{next(iter(pictures))})"]
    (out / "index.md").write_text("\n".join(gallery) + "\n")


def run(file: Path) -> dict[str, Any]:
    """Run a notebook in a folder of its own and return it with its outputs.

    Raises: CellExecutionError, with the cell and its traceback, where a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            book, timeout=TIMEOUT, kernel_name=KERNEL, resources={"metadata": {"path": folder}}
        )
        client.execute(env=_environment(folder))
    return book


def _environment(folder: str) -> dict[str, str]:
    """Where a notebook finds this checkout, its command, and a cache of its own."""
    found = {**os.environ, "UNALIKE_CACHE": folder}
    for name, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", ROOT)):
        found[name] = os.pathsep.join([str(first), *filter(None, [found.get(name)])])
    return found


def _introduction(book: dict[str, Any]) -> tuple[str, str]:
    """The title of a notebook, and the paragraph below it."""
    title, _, rest = "".join(book["cells"][0]["source"]).partition("\n")
    return title.removeprefix("# ").strip(), rest.strip().split("\n\n")[0]


def render(book: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            parts += _output(output, name, pictures)
    parts.append(f"[Download this notebook]({name}.ipynb)")
    return "\n\n".join(parts) + "\n", pictures


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> list[str]:
    """What a cell answered, as Markdown; pictures are added to `pictures`."""
    if output["output_type"] == "stream":
        return [_preformatted("".join(output["text"]))]
    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = base64.b64decode(data["image/png"])
        return [f"![](pictures/{file})"]
    if "text/html" in data:
        # one block without blank lines, which would end it for Markdown
        block = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
        drawing = re.search(r"<figure style='([^']*)'.*?(<svg.*?</svg>)", block, re.S)
        if drawing:
            pictures[f"{name}-{len(pictures) + 1}.svg"] = standalone(*drawing.groups())
        return [f'<div class="output">{block}</div>']
    return [_preformatted("".join(data.get("text/plain", "")))]


def standalone(style: str, svg: str) -> bytes:
    """An <svg> element of a page as a file: with the colours that the page's style names.

    >>> standalone("--ink:#000;color:red", "<svg><g fill='var(--ink)'/></svg>").decode()
    "<svg xmlns='http://www.w3.org/2000/svg'><g fill='#000'/></svg>"
    """
    colours = dict(re.findall(r"--(\w+):([^;]+)", style))
    svg = re.sub(r"var\(--(\w+)\)", lambda match: colours[match[1]], svg)
    return svg.replace("<svg", "<svg xmlns='http://www.w3.org/2000/svg'", 1).encode()


def _preformatted(text: str) -> str:
    text = re.sub(r"\x1b\[[\d;]*m", "", text).strip("\n")
    return (
        f'<pre class="output">{html.escape(text)}</pre>'.replace("\n\n", "\n&nbsp;\n")
        if text
        else ""
    )
