"""Taking home somebody's model runs none of their code, unless the user says so."""

import json
import sys

import pytest
import yaml
from safetensors.torch import save_file

import unalike
from unalike.base.errors import UserError
from unalike.runs.explain import explain
from unalike.runs.export import export, trained

CODE = """
from pathlib import Path
Path(__file__).with_name("OWNED").write_text("")
def build(*given, **named):
    raise SystemExit
"""


@pytest.fixture
def own_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)


def site_config(tmp_path):
    """What a client of several organisations keeps: it names a file, the file names code."""
    (tmp_path / "sent_code.py").write_text(CODE)
    (tmp_path / "client.yaml").write_text(yaml.safe_dump({"factory": "sent_code:build"}))
    return {
        "name": "sent",
        "client_file": "client.yaml",
        "about": {"name": "sent", "algorithm": "fedavg", "seed": 0},
        "algorithm": {"name": "fedavg"},
        "training": {"rounds": 1},
        "seed": 0,
        "guarded": False,
        "privacy": None,
    }


def scenario_config():
    """A scenario whose model is `module:name`."""
    client = {"id": "a", "model": {"name": "sent_code:build"}, "target": "digit", "train": 5}
    return {
        "name": "sent",
        "algorithm": {"name": "local"},
        "data": {"name": "digits"},
        "training": {"rounds": 1},
        "clients": [client],
    }


@pytest.mark.parametrize("kind", ["site", "scenario"])
def test_reading_a_folder_that_names_code_runs_nothing_of_it(kind, tmp_path, own_path):
    config = site_config(tmp_path)
    if kind == "scenario":
        config = scenario_config()
    (tmp_path / "unalike.json").write_text(json.dumps({"client": "a", "scenario": config}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    save_file({}, tmp_path / "model.safetensors")
    for action in (
        lambda: unalike.rebuild(tmp_path),
        lambda: trained(tmp_path),
        lambda: export(tmp_path, "a"),
        lambda: explain(tmp_path, "0"),
    ):
        with pytest.raises(UserError, match="names code to import, sent_code:build"):
            action()
    assert not (tmp_path / "OWNED").exists() and "sent_code" not in sys.modules


def test_the_user_may_trust_a_folder(tmp_path, own_path):
    config = site_config(tmp_path)
    (tmp_path / "unalike.json").write_text(json.dumps({"client": "a", "scenario": config}))
    with pytest.raises(SystemExit):
        unalike.rebuild(tmp_path, trust=True)
    sys.modules.pop("sent_code", None)
    assert (tmp_path / "OWNED").exists()
