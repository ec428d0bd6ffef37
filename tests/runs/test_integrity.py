"""Runs that prove themselves: one process at a time, and no changed file goes unnoticed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from unalike import runs
from unalike.base.errors import UserError
from unalike.base.integrity import hash_file, read_manifest, write_whole
from unalike.base.lock import lock
from unalike.cli.benchmarks import benchmark_module
from unalike.engines.store import CheckpointError, Store
from unalike.report import read, write
from unalike.runs import environment as environments
from unalike.runs.local_baseline import cache_path
from unalike.runs.run_folder import Folder
from unalike.runs.verify import verify

faults = benchmark_module("faults")
run_tiny, read_end = faults.run_tiny, faults.read_end


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """A run that was stopped after its third of four rounds, and one that was finished."""
    folder = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNALIKE_CACHE", str(folder / "cache"))
        run_tiny(folder / "stopped", ("round", 4))
        run_tiny(folder / "finished")
    return folder


@pytest.fixture
def stopped(templates, tmp_path):
    return shutil.copytree(templates / "stopped", tmp_path / "stopped")


@pytest.fixture
def finished(templates, tmp_path):
    return shutil.copytree(templates / "finished", tmp_path / "finished")


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# the lock


def test_a_run_in_use_cannot_be_resumed_by_another_process(stopped):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom pathlib import Path\nfrom unalike.base.lock import lock\n"
            "with lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()",
            str(stopped),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=f"is in use by process {holder.pid} on "):
        runs.resume(stopped)
    holder.kill()
    holder.communicate()
    after = {path: path.read_bytes() for path in before if path.name != "events.jsonl"}
    assert after == {path: data for path, data in before.items() if path in after}
    assert runs.resume(stopped)["rounds"] == 4, "a killed process leaves no lock"


def test_two_runs_of_one_process_exclude_each_other_too(tmp_path):
    with lock(tmp_path), pytest.raises(UserError, match="in use by this process"), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass


def test_a_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    with lock(tmp_path):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGSTOP)  # sleeps until it is killed
            os._exit(0)
    try:
        code = (
            "import sys\nfrom pathlib import Path\nfrom unalike.base.lock import lock\n"
            "with lock(Path(sys.argv[1])): pass"
        )
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


# checkpoints


def test_a_missing_snapshot_is_noticed_and_the_end_is_the_same(stopped, finished):
    """On 73a2af7 the client went on from the round before, the server from its own."""
    newest = max((stopped / "checkpoints" / "clients" / "ada").glob("*.safetensors"))
    newest.unlink()
    runs.resume(stopped)
    reasons = [event["reason"] for event in Folder.open(stopped).events("damaged")]
    assert len(reasons) == 1 and str(newest) in reasons[0] and "goes on from round 2" in reasons[0]
    assert read_end(stopped) == read_end(finished)


def test_one_flipped_bit_of_a_tensor_is_noticed(stopped, finished):
    for name in ("clients/ben", "server/server"):
        flip(max((stopped / "checkpoints" / name).glob("*.safetensors")))
    runs.resume(stopped)
    assert any(Folder.open(stopped).events("damaged"))
    assert read_end(stopped) == read_end(finished)


def test_a_run_without_a_whole_checkpoint_stops_with_one_sentence(stopped):
    for path in (stopped / "checkpoints" / "clients" / "ada").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match=r"no checkpoint of .* can be read: .*ada") as caught:
        runs.resume(stopped)
    assert "\n" not in str(caught.value)


def test_states_of_two_clients_that_were_swapped_are_noticed(stopped, finished):
    ada, ben = (
        max((stopped / "checkpoints" / "clients" / name).glob("*.safetensors"))
        for name in ("ada", "ben")
    )
    data = ada.read_bytes()
    ada.write_bytes(ben.read_bytes())
    ben.write_bytes(data)
    runs.resume(stopped)
    assert read_end(stopped) == read_end(finished)


def test_a_store_at_a_site_notices_what_is_missing_by_itself(tmp_path):
    store = Store(tmp_path, snapshots=3)
    for round in (1, 2):
        store.snapshot("ada", {"w": torch.full((2,), float(round))}, round)
    (tmp_path / "ada" / "000002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="000002"):
        store.rewind(2)
    store.rewind(1)
    flip(tmp_path / "ada" / "000001.safetensors")
    with pytest.raises(CheckpointError, match="its hash"):
        store.read_latest("ada")


def test_a_snapshot_whose_process_was_killed_before_the_rename_is_completed(tmp_path):
    store = Store(tmp_path)
    store.snapshot("server", {"n": 1}, 1)
    path = tmp_path / "server" / "000001.safetensors"
    path.replace(tmp_path / "server" / "current.safetensors")
    store.complete("server")
    assert path.exists() and store.read_latest("server") == {"n": 1}


def test_files_reach_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), fsync(file)))
    monkeypatch.setattr(
        "pathlib.Path.replace", lambda self, to: (order.append("name"), replace(self, to))
    )
    write_whole(tmp_path / "a", b"1")
    Store(tmp_path / "s").snapshot("ada", {"n": 1}, 1)
    assert order[:2] == ["fsync", "name"]
    # current, its content on disk, the index likewise, then the snapshot's name
    assert order[2:] == ["name", "fsync", "fsync", "name", "name"]


def test_damaged_files_end_in_a_sentence_or_the_same_end(tmp_path):
    """A share of `unalike bench damage`, which has 1,000 cases."""
    outcome = faults.damage_runs(tmp_path, cases=24, seed=random.SystemRandom().randrange(2**32))
    assert not outcome["silent"] and not outcome["tracebacks"], outcome


# advice that destroys nothing


def test_results_that_were_changed_are_refused_and_can_be_made_again(finished, tmp_path):
    """On 73a2af7 the advice was followed by a ledger cut in the middle of a row."""
    end = read_end(finished)
    path = finished / "results.json"
    text = path.read_text()
    path.write_text(text.replace('"rounds": 4', '"rounds": 5'))
    with pytest.raises(UserError, match=r"not as the run wrote it.*move it to another folder"):
        runs.resume(finished)
    path.rename(tmp_path / "moved.json")
    runs.resume(finished)
    assert read_end(finished) == end and verify(finished)[0] == []


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', '{"clients": {"a'])
def test_results_of_another_form_are_one_sentence_everywhere(finished, text):
    (finished / "manifest.json").unlink()
    (finished / "results.json").write_text(text)
    for action in (runs.resume, write):
        with pytest.raises(UserError) as caught:
            action(finished)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["null", "[]", '{"a": 1}', '{"event": "released"}', "\x00"])
def test_lines_that_are_no_events_are_left_out(stopped, finished, line):
    with (stopped / "events.jsonl").open("a") as file:
        file.write(f"{line}\n")
    runs.resume(stopped)
    assert read_end(stopped) == read_end(finished)


def test_the_local_baseline_that_was_changed_is_trained_again(stopped, finished):
    path = stopped / "alone.json"
    sealed = json.loads(path.read_text())
    sealed["value"]["ada"] = dict.fromkeys(sealed["value"]["ada"], 99.0)
    path.write_text(json.dumps(sealed))
    runs.resume(stopped)
    assert read_end(stopped) == read_end(finished)
    assert any("alone.json" in event["reason"] for event in Folder.open(stopped).events("damaged"))


def test_a_config_cut_in_half_is_not_reported_as_if_it_were_whole(stopped, finished):
    for folder in (stopped, finished):
        path = folder / "config.yaml"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[: lines.index("clients:\n")]))
        with pytest.raises(UserError, match=r"config\.yaml"):
            read(folder)


# versions


def test_results_name_the_versions_and_threads_they_were_computed_with(finished):
    (environment,) = json.loads((finished / "results.json").read_text())["environments"]
    assert environment["torch"] == torch.__version__ and environment["threads"] == 1
    assert {"unalike", "code", "python", "numpy", "processor"} < environment.keys()


@pytest.mark.parametrize("name", ["torch", "threads", "code"])
def test_resume_stops_where_code_versions_or_threads_are_others(name, stopped, monkeypatch):
    real = environments.environment
    other = lambda threads: {**real(threads), name: "other"}
    monkeypatch.setattr("unalike.runs.execution.environment", other)
    with pytest.raises(UserError, match=f"was begun otherwise: {name} was .*, is other"):
        runs.resume(stopped)
    result = runs.resume(stopped, accept_changes=True)
    assert [environment[name] == "other" for environment in result.environments] == [False, True]


def test_the_cached_baseline_depends_on_torch_and_threads(tmp_path, monkeypatch, toys):
    plan = runs.RunPlan(toys.method("local"), toys.clients())
    paths = {cache_path(plan, [], {})}
    plan.threads = 2
    paths.add(cache_path(plan, [], {}))
    monkeypatch.setattr(torch, "__version__", "3.0")
    paths.add(cache_path(plan, [], {}))
    assert len(paths) == 3


# verify


def test_verify_compares_every_file_of_a_finished_run(finished):
    problems, files = verify(finished)
    manifest = read_manifest(finished)
    assert problems == [] and files == len(manifest)
    assert {"config.yaml", "results.json", "ledger.csv", "events.jsonl"} < manifest.keys()
    for name in manifest:
        path = finished / name
        data = path.read_bytes()
        flip(path, 0)
        assert len(verify(finished)[0]) == 1, name
        path.write_bytes(data)
    assert verify(finished)[0] == []


def test_verify_compares_the_last_checkpoint_of_an_unfinished_run(stopped):
    assert verify(stopped)[0] == []
    flip(max((stopped / "checkpoints" / "clients" / "ben").glob("*.safetensors")))
    flip(stopped / "ledger.csv", 50)
    before = {path: hash_file(path) for path in stopped.rglob("*") if path.is_file()}
    assert len(verify(stopped)[0]) == 2
    assert before == {path: hash_file(path) for path in before}, "verify changes nothing"
