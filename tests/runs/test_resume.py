"""A run that is killed or stopped at any moment and resumed ends the same."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from unalike import runs
from unalike.base.errors import UserError
from unalike.base.ledger import Ledger
from unalike.engines import store
from unalike.engines.store import Store
from unalike.runs import Run
from unalike.runs.run_folder import Folder
from unalike.scenarios import load

ROUNDS = 40
SAME = (
    "clients",
    "metrics",
    "delta",
    "losers",
    "bytes",
    "clock",
    "rounds",
    "failures",
)  # all but seconds and commit


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No local baseline is taken from an earlier run."""
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def draws():
    """Moments at random; the seed is printed, and UNALIKE_KILL_SEED takes it back."""
    seed = int(os.environ.get("UNALIKE_KILL_SEED") or random.SystemRandom().randrange(2**32))
    print(f"UNALIKE_KILL_SEED={seed}")
    return random.Random(seed)


TINY = {
    "name": "tiny",
    "algorithm": {"name": "fedmuscle", "peers": 1, "width": 8, "batch": 8},
    "training": {"rounds": ROUNDS, "batch_size": 8, "lr": 0.01},
    "federation": {"participation": 0.8, "dropout": 0.05, "quorum": 0},
    "data": {"name": "digits"},
    "public": {"size": 24},
    "dtype": "float64",
    "clients": [
        {
            "id": "mlp",
            "model": {"name": "mlp", "hidden": [8], "width": 8},
            "target": "digit",
            "train": 20,
            "test": 40,
        },
        {
            "id": "cnn",
            "model": {"name": "cnn", "channels": [4], "width": 8, "norm": "batch"},
            "target": "digit",
            "train": 20,
            "test": 40,
        },
        {
            "id": "many",
            "model": {"name": "mlp", "hidden": [8], "width": 12},
            "target": "attributes",
            "train": 20,
            "test": 40,
        },
    ],
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """A file: three unlike clients on digits, some dropping out, some not drawn."""
    (path := tmp_path_factory.mktemp("tiny") / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return path


@pytest.fixture(scope="module")
def whole(scenario):
    """The folder of the same run without a stop."""
    folder = scenario.parent / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNALIKE_CACHE", str(scenario.parent / "cache"))
        runs.run_scenario(*load(str(scenario)), out=folder)
    return folder


def same(folder, whole):
    one, other = (json.loads((path / "results.json").read_text()) for path in (folder, whole))
    assert {key: one[key] for key in SAME} == {key: other[key] for key in SAME}
    assert all(entry["hash"] for entry in one["clients"].values())
    assert (folder / "ledger.csv").read_bytes() == (whole / "ledger.csv").read_bytes()


def count_events(folder):
    """How many events a run has recorded so far."""
    events = folder / "events.jsonl"
    return events.read_bytes().count(b"\n") if events.exists() else 0


def kill(pid, alive, folder, lines, pause):
    """Send SIGKILL some time after so many events; return False if the run was over by then."""
    while alive() and count_events(folder) < lines:
        time.sleep(0.002)
    time.sleep(pause)
    if running := alive():
        os.kill(pid, signal.SIGKILL)
    return running


def command(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "unalike.cli", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_command_can_be_resumed(workers, scenario, whole, tmp_path, draws):
    """`unalike run`, kill -9, `unalike resume --json`."""
    folder = tmp_path / "cut"
    process = command("run", scenario, "--workers", workers, "--out", folder)
    struck = kill(
        process.pid,
        lambda: process.poll() is None,
        folder,
        draws.randint(1, 2 * ROUNDS),
        draws.uniform(0, 0.05),
    )
    process.communicate()
    assert struck, "the run was over before it could be killed"
    process = command("resume", folder, "--json")
    out, problems = process.communicate(timeout=120)
    assert process.returncode == 0, problems
    assert json.loads(out.splitlines()[-1]) == json.loads((folder / "results.json").read_text())
    same(folder, whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_many_times_ends_the_same(workers, scenario, whole, tmp_path, draws):
    """Eight times over, at early moments too, in forked processes, which start quickly."""
    folder, struck = tmp_path / "cut", 0
    fork = multiprocessing.get_context("fork")
    first = lambda: runs.run_scenario(*load(str(scenario), workers=workers), out=folder)
    for _ in range(8):
        process = fork.Process(
            target=(lambda: runs.resume(folder)) if (folder / "config.yaml").exists() else first
        )
        process.start()
        struck += kill(
            process.pid,
            process.is_alive,
            folder,
            count_events(folder) + draws.randint(0, ROUNDS // 2),
            draws.uniform(0, 0.05),
        )
        process.join()
    runs.resume(folder)
    assert struck >= 4
    same(folder, whole)


class Cut(BaseException):
    """Power is gone."""


def cut_at(monkeypatch, owner, name, count, after=False):
    """The count-th call of a function does not happen, or is the last thing that happens."""
    original, calls = getattr(owner, name), []

    def counted(*given, **named):
        calls.append(1)
        if len(calls) == count and not after:
            raise Cut
        result = original(*given, **named)
        if len(calls) == count:
            raise Cut
        return result

    monkeypatch.setattr(owner, name, counted)


def stop_after(rounds):
    """A watcher that stops a run when it tells of the next round, before that one is saved."""

    def watch(event, round=0, **facts):
        if event == "round" and round == rounds + 1:
            raise Cut

    return watch


@pytest.fixture
def pieces(toys, tmp_path):
    """Returns `go(name)`: start or resume a run in this process, until it is cut or ends."""

    def go(name, rounds=5, watch=lambda event, **facts: None, **options):
        return toys.execute(
            tmp_path / name,
            toys.method("fedmuscle"),
            toys.clients(),
            rounds=rounds,
            watch=watch,
            **options,
        )

    return go


def test_cut_between_snapshots_and_commit(pieces, toys, monkeypatch):
    """A round has four snapshots: a, b, c and, last, the server's, which makes it count."""
    whole = pieces("whole")
    for count, after in [
        (1, False),
        (1, True),
        (3, True),
        (4, False),
        (4, True),
        (6, True),
        (8, False),
    ]:
        with monkeypatch.context() as patch, pytest.raises(Cut):
            cut_at(patch, Store, "snapshot", count, after)
            pieces("cut")
    assert toys.hashes(pieces("cut")) == toys.hashes(whole)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "adam", "max_grad_norm": 0.5},
        {"optimizer": "adamw"},
    ],
)
def test_optimizers_keep_their_state(optimizer, pieces, toys):
    whole = pieces("whole", **optimizer)
    with pytest.raises(Cut):
        pieces("cut", watch=stop_after(3), **optimizer)
    assert toys.hashes(pieces("cut", **optimizer)) == toys.hashes(whole)


def test_cut_while_a_file_is_written(pieces, toys, monkeypatch, tmp_path):
    """Half a file under its partial name is no file."""
    whole, save = pieces("whole"), store.save_file
    for count in (2, 4, 7, 8):
        calls = []

        def half(tensors, path, metadata, count=count, calls=calls):
            calls.append(1)
            save(tensors, path, metadata=metadata)
            if len(calls) == count:
                path.write_bytes(path.read_bytes()[:200])
                raise Cut

        with monkeypatch.context() as patch, pytest.raises(Cut):
            patch.setattr(store, "save_file", half)
            pieces("cut")
    assert toys.hashes(pieces("cut")) == toys.hashes(whole)


@pytest.mark.parametrize("checkpoint", [1, 2])
@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [(Run, "_write_ledger", 1), (Ledger, "write", 1), (Folder, "write", 2), (Folder, "write", 3)],
)
def test_cut_after_the_last_round(checkpoint, owner, name, count, pieces, toys, monkeypatch):
    """Finishing, the safeguard, the last snapshots and the results are done again.

    The second file that is written is the manifest, the third are the results.
    """
    options = {"rounds": 3, "checkpoint": checkpoint, "safeguard": True}
    whole = pieces("whole", **options)
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, owner, name, count)
        pieces("cut", **options)
    cut = pieces("cut", **options)
    assert {key: cut[key] for key in SAME} == {key: whole[key] for key in SAME}
    assert pieces("cut", **options) == cut, "a finished run is not run again"


def spoil(path):
    path.write_bytes(path.read_bytes()[:-100])


def checkpoints(folder, *names):
    return sorted((folder / "checkpoints").joinpath(*names).glob("*.safetensors"))


@pytest.mark.parametrize("late", [False, True])
def test_damaged_server_checkpoint_falls_back_to_the_one_before(
    late, pieces, toys, tmp_path, monkeypatch
):
    """`late`: the clients had already saved the round after it too."""
    whole = pieces("whole")
    if late:
        with monkeypatch.context() as patch, pytest.raises(Cut):
            cut_at(patch, Store, "snapshot", 4 * 4, after=False)  # the server's fourth
            pieces("cut")
    else:
        with pytest.raises(Cut):
            pieces("cut", watch=stop_after(3))
    spoil(checkpoints(tmp_path / "cut", "server", "server")[-1])
    heard = []
    results = pieces(
        "cut",
        watch=lambda event, **facts: heard.append((event, facts.get("round"), facts.get("reason"))),
    )
    assert ("resume", 2, None) in heard
    (told,) = [reason for event, _, reason in heard if event == "damaged"]
    assert told.endswith("; the run goes on from round 2") and "cannot be read" in told
    assert toys.hashes(results) == toys.hashes(whole)
    assert "damaged" in (tmp_path / "cut" / "events.jsonl").read_text()


def test_damaged_client_checkpoint_falls_back_to_the_round_before(pieces, toys, tmp_path):
    whole = pieces("whole")
    with pytest.raises(Cut):
        pieces("cut", watch=stop_after(3))
    spoil(checkpoints(tmp_path / "cut", "clients", "b")[-1])
    results = pieces("cut")
    assert toys.hashes(results) == toys.hashes(whole) and not results["failures"]


@pytest.mark.parametrize("whose", [("server", "server"), ("clients", "b")])
def test_a_run_without_readable_checkpoint_is_one_sentence(whose, pieces, tmp_path):
    with pytest.raises(Cut):
        pieces("cut", watch=stop_after(3))
    for path in checkpoints(tmp_path / "cut", *whose):
        spoil(path)
    before = {path: path.read_bytes() for path in checkpoints(tmp_path / "cut", "clients", "a")}
    with pytest.raises(
        UserError, match=r"no checkpoint of .*cut can be read: .*safetensors cannot be read"
    ) as caught:
        pieces("cut")
    assert len(str(caught.value).splitlines()) == 1
    assert {path: path.read_bytes() for path in before} == before, "nothing is lost"


def test_resuming_a_run_from_python_needs_its_program(toys, tmp_path):
    runs.run(
        toys.method("local"),
        toys.clients(),
        training=toys.training(rounds=1),
        out=tmp_path / "own",
        alone=False,
    )
    assert runs.resume(tmp_path / "own")["rounds"] == 1, "a finished run gives its results"
    (tmp_path / "own" / "results.json").unlink()
    with pytest.raises(UserError, match="started from Python"):
        runs.resume(tmp_path / "own")
    with pytest.raises(UserError, match="is no run folder"):
        runs.resume(tmp_path / "nowhere")


def test_a_run_killed_while_its_first_checkpoint_is_written_begins_anew(
    scenario, whole, tmp_path, monkeypatch
):
    """A snapshot of the server in the making, and no index yet: there is no checkpoint to miss."""
    folder = tmp_path / "cut"
    write_index = store.write_index

    def cut_at_the_server(entry, index):
        if entry.name == "server":
            raise Cut
        write_index(entry, index)

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_index", cut_at_the_server)
        with pytest.raises(Cut):
            runs.run_scenario(*load(str(scenario)), out=folder)
    assert list(folder.glob("checkpoints/server/server/*.safetensors"))
    runs.resume(folder)
    same(folder, whole)
