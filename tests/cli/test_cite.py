"""Every method with a paper has a BibTeX entry."""

import re
import sys

import pytest

from unalike.algorithms import ALGORITHMS
from unalike.base.errors import UserError
from unalike.cli.cite import bibliography, bibtex


def documentation(name):
    return sys.modules[ALGORITHMS[name].__module__].__doc__


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if "arxiv.org" in documentation(n)])
def test_every_method_with_an_arxiv_link_has_an_entry(name):
    text = bibtex(name)
    assert re.search(r"^@(misc|article|inproceedings)\{[a-z][a-z0-9]*,", text)
    assert text.count("{") == text.count("}")
    assert "title = {{" in text and re.search(r"year = \{\d{4}\}", text)
    linked = re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", documentation(name))
    for number in linked:
        assert (
            f"eprint = {{{number}}}" in text
            or f"extended in https://arxiv.org/abs/{number}"
            in (" ".join(documentation(name).split()))
        )


def test_an_entry_has_authors_title_year_and_arxiv():
    assert bibtex("fedprox") == (
        "@inproceedings{li2020fedprox,\n"
        "  title = {{Federated Optimization in Heterogeneous Networks}},\n"
        "  author = {Li and others},\n"
        "  year = {2020},\n"
        "  booktitle = {MLSys},\n"
        "  eprint = {1812.06127},\n"
        "  archiveprefix = {arXiv},\n"
        "  url = {https://arxiv.org/abs/1812.06127},\n"
        "}\n"
    )
    assert "author = {M. Setayesh and M. Beitollahi and Y. H. Khalil and H. Li}" in bibtex(
        "fedmuscle"
    )


def test_a_method_after_three_papers_has_three_entries():
    assert bibtex("hetlora").count("@misc{") == 3


def test_a_method_without_a_paper_says_so():
    with pytest.raises(UserError, match="local has no paper of its own"):
        bibtex("local")
    with pytest.raises(UserError, match='Did you mean "fedprox"'):
        bibtex("fedprx")


def test_among_others_a_method_without_a_paper_is_a_comment():
    text = bibliography(["local", "fedprox"])
    assert text.startswith("% local has no paper of its own") and "@" in text
    assert text.endswith(bibtex("fedprox"))
    with pytest.raises(UserError, match='Did you mean "fedprox"'):
        bibliography(["fedavg", "fedprx"])


def test_a_paper_of_two_methods_is_there_once():
    text = bibliography(["fedmuscle", "fedmuscleplus", "hetlora", "fedmuscle"])
    assert text.count("Toward Enhancing Representation Learning") == 1 and text.count("@") == 4
    assert "% fedmuscleplus: the paper of setayesh2026fedmuscle\n" in text
    assert text.startswith(bibtex("fedmuscle")) and bibtex("hetlora") in text
