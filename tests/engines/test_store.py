"""States on disk: written whole or not at all, two snapshots each; damage is one sentence."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unalike.base.message import MessageError, leaves
from unalike.engines import store as module
from unalike.engines.store import Archive, CheckpointError, Store, load, quote, save


def numbers(folder):
    return sorted(
        path.name.removesuffix(".safetensors")
        for path in folder.rglob("*")
        if path.is_file() and path.name != "index.json"
    )


def state(n):
    return {"model": {"w": torch.full((3,), float(n))}, "memory": {"seen": n}}


def client_state_number(value):
    return None if value is None else value["memory"]["seen"]


def test_a_tree_comes_back_as_it_was(tmp_path):
    value = {
        "f": torch.randn(2, 3).t(),
        "b": torch.tensor([True]),
        "h": torch.zeros(2).bfloat16(),
        "zero": torch.tensor(3),
        "none": None,
        "empty": torch.zeros(0, 4),
        "list": [1, 2.5, "ü", {"deep": torch.ones(1)}],
        "inf": math.inf,
        "one": torch.arange(5.0)[::4][:1],
        "param": torch.nn.Parameter(torch.ones(2)),
        "": {},
    }
    value["shared"] = value["f"]
    save(tmp_path / "a.safetensors", value)
    back = load(tmp_path / "a.safetensors")
    assert list(back) == list(value)
    for name in ("f", "b", "h", "zero", "empty", "one", "param", "shared"):
        assert (
            torch.equal(back[name], value[name])
            and back[name].dtype == value[name].dtype
            and back[name].shape == value[name].shape
        )
    assert (
        back["list"][:3] == [1, 2.5, "ü"]
        and torch.equal(back["list"][3]["deep"], torch.ones(1))
        and back["inf"] == math.inf
    )


@pytest.mark.parametrize(
    "value",
    [
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(2)}},
        {"a": {"b": torch.ones(2)}, "a/b": torch.zeros(1)},
        {"a": [torch.zeros(1)], "a/0": torch.ones(2)},
        {"__metadata__": torch.zeros(1)},
        torch.ones(2),
    ],
)
def test_keys_with_slashes_do_not_collide(tmp_path, value):
    save(tmp_path / "a.safetensors", value)
    back = load(tmp_path / "a.safetensors")
    assert [(path, t.tolist()) for path, t in leaves(back)] == [
        (path, t.tolist()) for path, t in leaves(value)
    ]


def test_a_value_that_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save(path, state(1))
    with pytest.raises(MessageError, match="memory/f is a builtin"):
        save(path, {"memory": {"f": print}})
    assert client_state_number(load(path)) == 1 and numbers(tmp_path) == ["a"]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.snapshot("ada", state(1), 1)

    def cut(tensors, path, metadata):
        Path(path).write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(module, "save_file", cut)
    with pytest.raises(OSError, match="disk full"):
        store.snapshot("ada", state(2), 2)
    with pytest.raises(OSError, match="disk full"):
        store.write_current("ada", state(2))
    monkeypatch.undo()
    assert client_state_number(store.read_latest("ada")) == 1
    store.snapshot("ada", state(3), 3)
    assert client_state_number(store.read_latest("ada")) == 3


def test_two_snapshots_are_kept(tmp_path):
    store = Store(tmp_path)
    assert store.read_latest("ada") is None
    for round in (1, 2, 3, 9, 10):
        store.snapshot("ada", state(round), round)
    assert (
        numbers(tmp_path / "ada") == ["000009", "000010"]
        and client_state_number(store.read_latest("ada")) == 10
    )
    Store(tmp_path, snapshots=3).snapshot("ada", state(11), 11)
    assert numbers(tmp_path / "ada") == ["000009", "000010", "000011"]


def test_order_is_by_number_also_beyond_six_digits(tmp_path):
    store = Store(tmp_path)
    for round in (999_998, 999_999, 1_000_000):
        store.snapshot("ada", state(round), round)
    assert client_state_number(store.read_latest("ada")) == 1_000_000


def test_the_current_state_is_the_latest_and_becomes_a_snapshot(tmp_path):
    store = Store(tmp_path)
    store.snapshot("ada", state(1), 1)
    store.write_current("ada", state(15))
    assert client_state_number(store.read_latest("ada")) == 15 and numbers(tmp_path / "ada") == [
        "000001",
        "current",
    ]
    store.snapshot("ada", None, 2)
    assert client_state_number(store.read_latest("ada")) == 15 and numbers(tmp_path / "ada") == [
        "000001",
        "000002",
    ]
    store.write_current("ada", state(16))
    store.snapshot("ada", state(3), 3)
    assert client_state_number(store.read_latest("ada")) == 3 and numbers(tmp_path / "ada") == [
        "000002",
        "000003",
    ]


def test_rewinding_deletes_later_states(tmp_path):
    store = Store(tmp_path)
    store.rewind(0)  # nothing there yet
    store.snapshot("a/b", state(1), 1)
    store.snapshot("a/b", state(2), 2)
    store.write_current("a/b", state(25))
    store.snapshot("idle", state(1), 1)
    store.rewind(2)
    assert (
        client_state_number(store.read_latest("a/b")) == 2
        and client_state_number(store.read_latest("idle")) == 1
    )
    store.rewind(1)
    assert client_state_number(store.read_latest("a/b")) == 1
    store.rewind(0)
    assert store.read_latest("a/b") is None and store.read_latest("idle") is None


ODD = [
    "../x",
    "a/b",
    "a",
    "b",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a\\b",
    "A",
    "ä",
    "a b",
    "%2f.",
    "a%2f.b",
    "漢",
    "con",
    "x" * 60,
    "\n",
    "~",
]


def test_odd_names_stay_inside_the_folder_and_do_not_collide(tmp_path):
    store = Store(tmp_path / "in" / "side")
    for i, name in enumerate(ODD):
        store.snapshot(name, state(i), 1)
        store.write_current(name, state(100 + i))
    assert [client_state_number(store.read_latest(name)) for name in ODD] == [
        100 + i for i in range(len(ODD))
    ]
    assert {path.parent.parent for path in tmp_path.rglob("*.safetensors")} == {
        tmp_path / "in" / "side"
    }
    store.rewind(1)
    assert [client_state_number(store.read_latest(name)) for name in ODD] == list(range(len(ODD)))


@settings(deadline=None)
@given(st.text(), st.text())
def test_different_names_have_different_folders(a, b):
    assert (quote(a) == quote(b)) == (a == b)
    assert quote(a) and "/" not in quote(a) and quote(a) not in (".", "..")


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "text", "other", "folder", "lies"])
def test_a_damaged_file_is_reported_in_one_sentence(tmp_path, damage):
    store = Store(tmp_path)
    store.snapshot("ada", state(1), 1)
    path = tmp_path / "ada" / "000001.safetensors"
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-3])
        case "empty":
            path.write_bytes(b"")
        case "noise":
            path.write_bytes(bytes(range(256)) * 4)
        case "text":
            path.write_text("hello")
        case "other":  # safetensors of somebody else
            module.save_file({"w": torch.ones(2)}, path)
        case "folder":
            path.unlink()
            path.mkdir()
        case "lies":
            module.save_file({}, path, metadata={"value": '{"a": {"$": "nothing"}}'})
    with pytest.raises(CheckpointError) as caught:
        store.read_latest("ada")
    assert (
        str(path) in str(caught.value)
        and "cannot be read" in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_a_file_cut_at_any_byte_is_reported(tmp_path):
    save(tmp_path / "a", state(1))
    data = (tmp_path / "a").read_bytes()
    for length in range(0, len(data), 7):
        (tmp_path / "a").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            load(tmp_path / "a")


def test_an_archive_goes_back_to_a_round_and_holds_no_more_than_its_limit(tmp_path):
    large = lambda value: {"w": torch.full((1000,), float(value))}
    archive = Archive(Store(tmp_path, snapshots=3), limit=5000)
    for name in "abc":
        archive[name] = large(1)
    assert len(archive.in_memory) == 1 and all(float(archive[name]["w"][0]) == 1 for name in "abc")
    archive.save(1)
    archive["a"] = large(2)
    archive["d"] = large(2)
    again = Archive(Store(tmp_path, snapshots=3))
    again.load(1)
    assert float(again["a"]["w"][0]) == 1 and "d" not in again
    with pytest.raises(KeyError):
        again["d"]
