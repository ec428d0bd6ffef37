"""BibTeX entries of methods, from the references in the docstrings of their files."""

import re
import sys

from unalike.base.errors import UserError
from unalike.scenarios.validate import find_algorithm

# A paragraph that begins: A. Author, B. Author, "Title", VENUE YEAR, https://arxiv.org/abs/ID
REFERENCE = re.compile(
    r'(?:(?P<authors>[^"]+?), )?"(?P<title>[^"]+)", '
    r'(?:(?P<venue>[^"]*?),? )?(?P<year>(?:19|20)\d\d)'
    r"(?:, https?://(?P<link>[^\s)]+?))?(?=[.,;:]?\s|[.,;:]?$| )"
)
ARXIV = "arxiv.org/abs/"
JOURNALS = ("Journal", "Transactions", "Communications")


def bibtex(name: str) -> str:
    """Return the BibTeX entries of a method's papers, each ending in a newline.

    Args:
        name: of the method, as in `unalike list algorithms`, or module:name.
    Raises: UserError where there is no such method, or its file names no paper.
    """
    method = find_algorithm(name)
    text = sys.modules[method.__module__].__doc__ or ""
    entries = []
    for paragraph in text.split("\n\n"):
        reference = REFERENCE.match(" ".join(paragraph.split()))
        if reference:
            entries.append(_entry(name.rpartition(":")[2].lower(), reference.groupdict()))
    if not entries:
        raise UserError(f"{name} has no paper of its own: {method.__module__} names none")
    return "\n".join(entries)


def bibliography(names: list[str]) -> str:
    """Return the entries of several methods, each paper once.

    Among others, a method without a paper is a comment, and one whose paper is there already.

    Raises: UserError where there is no such method, or no paper at all.
    """
    parts = []
    reasons = []
    keys: dict[str, str] = {}  # of papers that are there, by their entry without the key
    for name in dict.fromkeys(names):
        find_algorithm(name)
        try:
            text = bibtex(name)
        except UserError as error:
            parts.append(f"% {error}\n")
            reasons.append(str(error))
            continue
        for entry in re.split(r"(?<=\n)\n(?=@)", text):
            key, _, paper = entry.partition("{")[2].partition(",")
            known = keys.setdefault(paper, key)
            parts.append(entry if known == key else f"% {name}: the paper of {known}\n")
    if len(reasons) == len(set(names)):
        raise UserError("; ".join(reasons))
    return "\n".join(parts)


def _entry(name: str, reference: dict[str, str | None]) -> str:
    """Return one entry; its key is the first author's last name, the year and the method."""
    authors = _authors(reference["authors"])
    first = authors[0].split()[-1].lower() if authors else ""
    venue = reference["venue"]
    fields = {
        "title": f"{{{reference['title']}}}",  # doubly in braces: capitals stay
        "author": " and ".join(authors),
        "year": reference["year"],
    }
    kind = "misc"
    if venue:
        is_journal = any(word in venue for word in JOURNALS)
        kind = "article" if is_journal else "inproceedings"
        fields["journal" if is_journal else "booktitle"] = venue
    link = reference["link"] or ""
    if link.startswith(ARXIV):
        fields["eprint"] = link.removeprefix(ARXIV)
        fields["archiveprefix"] = "arXiv"
    if link:
        fields["url"] = f"https://{link}"
    year = reference["year"]
    key = f"{re.sub('[^a-z]', '', first)}{year}{name}" if first else f"{name}{year}"
    lines = [f"  {field} = {{{value}}}," for field, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"]) + "\n"


def _authors(text: str | None) -> list[str]:
    """Return authors as BibTeX has them: `Li et al.` is `Li` and `others`."""
    if not text:
        return []
    authors = re.split(r", | and ", text.replace(" et al.", ", others"))
    return [author.strip() for author in authors if author.strip()]
