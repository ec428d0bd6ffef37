"""What somebody else's file, image or words do to whoever opens them: a sentence at most."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from unalike.base.errors import UserError
from unalike.base.yaml_text import load_yaml
from unalike.data.jpeg import read_image
from unalike.engines.store import Store, quote
from unalike.report.progress import progress
from unalike.scenarios.client_config import load_client
from unalike.scenarios.load import parse_yaml


@pytest.mark.parametrize("wait", [0.1, 0.4, 0.8])
def test_ctrl_c_at_any_moment_is_one_word(wait, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "unalike", "run", "digits", "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # before the first line of ours Python itself answers
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err or "unalike/" not in err
    assert "recursion" not in err


def test_yaml_that_unfolds_to_billions_is_refused():
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
    for i in range(1, 9):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    text = "\n".join(lines)
    with pytest.raises(UserError, match="aliases stand for more than"):
        parse_yaml(text, "bomb.yaml")
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)
    with pytest.raises(UserError, match="aliases stand for more than"):
        parse_yaml("a: &a [*a]", "itself.yaml")
    assert parse_yaml("a: &a [1]\nb: *a", "fine.yaml") == {"a": [1], "b": [1]}


def test_a_long_id_fits_every_file_system(tmp_path):
    names = ["\u5b57" * 60, "\u5b57" * 61, "a" * 300]
    store = Store(tmp_path)
    for number, name in enumerate(names):
        store.snapshot(name, {"n": number}, 1)
    assert [store.read_latest(name)["n"] for name in names] == [0, 1, 2]
    assert all(len(quote(name)) <= 200 for name in names)


def test_a_clients_words_do_not_steer_the_terminal(capsys):
    with progress() as watch:
        watch("failure", client="b", operation="train", reason="\x1b]0;owned\x07\x1b[31mred")
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\x07" not in err and "red" in err


def test_an_image_that_unfolds_to_gigabytes_is_refused(tmp_path):
    from PIL import Image

    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    with pytest.raises(UserError, match="is 9000x9000, more than 50,000,000 pixels"):
        read_image(tmp_path / "bomb.png")


def test_the_folder_of_a_client_file_is_searched_only_where_it_names_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    np.savez(tmp_path / "rows.npz", x=np.zeros((4, 3), "float32"), y=np.array([0, 1, 0, 1]))
    described = {
        "id": "a",
        "model": {"name": "mlp"},
        "task": {"name": "classification", "labels": 2},
        "data": {"train": "rows.npz"},
    }
    (tmp_path / "client.yaml").write_text(yaml.safe_dump(described))
    load_client(tmp_path / "client.yaml")
    assert str(tmp_path) not in sys.path
