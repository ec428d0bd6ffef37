"""The pages are right: their Python runs, their links exist, their commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", ["losses.md", "clustering.md"])
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unalike.report.write", lambda path: path)  # the README's runs write one
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names := {})
    if page == "clustering.md":
        assert {
            id for id, entry in names["results"]["clients"].items() if entry["value"] is not None
        } == {"some"}
        assert names["groups"].shape == (120,) and len(set(names["groups"].tolist())) == 3


def test_the_readme_example_gains_and_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    ends = []
    for _ in range(2):
        exec(compile(block, "README.md", "exec"), names := {})
        ends.append(
            {id: (client.hash, client.value) for id, client in names["result"].clients.items()}
        )
    assert ends[0] == ends[1] and {client.model for client in names["result"].clients.values()} == {
        "cnn",
        "mlp",
    }
    assert names["models"]["clinic"](names["x"]).shape == (1797, 10)
    assert all(client.gain > 0 for client in names["result"].clients.values())
    for run in (tmp_path / "runs").iterdir():
        assert {"config.yaml", "events.jsonl", "ledger.csv", "results.json", "report.html"} <= {
            p.name for p in run.iterdir()
        }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_method_has_a_page_and_a_row():
    from unalike.algorithms import ALGORITHMS

    readme = (ROOT / "README.md").read_text()
    for name in ALGORITHMS:
        assert f"`{name}`" in readme, name
        assert (
            any(f"`{name}`" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
            or (ROOT / "docs" / f"{name}.md").exists()
        )


def test_scenario_page_is_a_scenario(tmp_path):
    from unalike.scenarios import build_clients, load

    block, *_ = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "scenarios.md").read_text(), re.S)
    (tmp_path / "mine.yaml").write_text(block)
    scenario, _ = load(str(tmp_path / "mine.yaml"))
    assert len(build_clients(scenario)) == 6


def test_named_benches_exist():
    from unalike.cli.benchmarks import benchmark_summaries

    for page in PAGES:
        for name in re.findall(r"unalike bench ([a-z0-9-]+)", page.read_text()):
            assert name in benchmark_summaries(), (page.name, name)
