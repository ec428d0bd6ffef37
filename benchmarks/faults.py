"""Benchmarks of faults: damaged files, killed processes, and a thousand rounds with drop-outs."""

import gc
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.study import benchmark
from unalike import runs
from unalike.algorithms.fedavg import FedAvg
from unalike.base.errors import RunError, UserError
from unalike.core.client import Client
from unalike.core.participation import FederationConfig
from unalike.models import MLP
from unalike.report import write
from unalike.runs.local_baseline import cache_folder
from unalike.runs.verify import verify
from unalike.scenarios import parse_scenario
from unalike.tasks import Classification
from unalike.training.loop import Training

# What must be equal after a fault: all results but times, places and versions.
COMPARED = ("clients", "metrics", "delta", "losers", "bytes", "clock", "rounds", "failures")
# Written after the manifest, or by whoever holds the run's folder.
NOT_PROVEN = ("report.html", ".lock", "manifest.json")
DAMAGES = ("truncated", "flipped", "missing", "swapped", "emptied")
TINY: dict[str, Any] = {
    "name": "tiny",
    "algorithm": {"name": "fedmuscle", "peers": 1, "width": 4, "batch": 8},
    "training": {"rounds": 4, "batch_size": 8, "lr": 0.01},
    "federation": {"participation": 0.8, "dropout": 0.05, "quorum": 0},
    "data": {"name": "digits"},
    "public": {"size": 8},
    "dtype": "float64",
    "clients": [
        {
            "id": id,
            "model": {"name": "mlp", "hidden": [4], "width": width},
            "target": target,
            "train": 10,
            "test": 10,
        }
        for id, width, target in (
            ("ada", 4, "digit"),
            ("ben", 5, "digit"),
            ("cleo", 6, "attributes"),
        )
    ],
}


class Stop(BaseException):
    """Ends a run between two rounds, as a kill does."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder with a cache of its own, so that nothing is taken from earlier runs."""
    before = os.environ.get("UNALIKE_CACHE")
    with tempfile.TemporaryDirectory() as name:
        os.environ["UNALIKE_CACHE"] = str(Path(name) / "cache")
        try:
            yield Path(name)
        finally:
            del os.environ["UNALIKE_CACHE"]
            if before is not None:
                os.environ["UNALIKE_CACHE"] = before


def run_tiny(folder: Path, stop_at: tuple[str, Any] | None = None, **settings: Any) -> None:
    """Run the tiny scenario, to its end or to a round or stage."""

    def watch(event: str, **facts: Any) -> None:
        if stop_at in ((event, facts.get("round")), (event, facts.get("text"))):
            raise Stop

    scenario, algorithm = parse_scenario({**TINY, **settings}, "tiny")
    try:
        runs.run_scenario(scenario, algorithm, out=folder, watch=watch)
    except Stop:
        return


def read_end(folder: Path) -> dict[str, Any]:
    """Everything that must be the same after a fault."""
    results = json.loads((folder / "results.json").read_text())
    end = {key: results[key] for key in COMPARED}
    end["ledger"] = (folder / "ledger.csv").read_text()
    return end


# damage: every file of a run, spoilt


@benchmark("damage")
def bench_damage(quick: bool = False) -> dict:
    """Files of a run truncated, flipped, missing or swapped: a sentence, or the same end."""
    with temporary_folder() as folder:
        return damage_runs(folder, cases=60 if quick else 1000, seed=0)


def damage_runs(folder: Path, cases: int, seed: int) -> dict[str, Any]:
    """Spoil one file of a run at a time, resume, and compare the end with that of a whole run.

    The runs were stopped before their first checkpoint (`early`), after their third round
    (`stopped`), or were finished. Those are also reported, compared and verified.

    Returns: how many cases ended how, and each that ended otherwise without a word (`silent`) or in
        an exception that is no sentence (`tracebacks`).
    """
    draw = random.Random(seed)
    run_tiny(folder / "finished")
    run_tiny(folder / "stopped", ("round", 4))
    run_tiny(folder / "early", ("stage", "fedmuscle"))
    whole = read_end(folder / "finished")
    outcomes: Counter[str] = Counter()
    silent: list[str] = []
    tracebacks: list[str] = []
    for case in range(cases):
        kind = ("stopped", "finished", "stopped", "early")[case % 4]
        copy = folder / "copy"
        shutil.copytree(folder / kind, copy)
        shutil.rmtree(cache_folder(), ignore_errors=True)
        what = damage_file(copy, draw)
        action = write if kind == "finished" and draw.random() < 0.3 else resume
        try:
            outcome = judge(copy, whole, action, kind == "finished", what)
        except Exception as error:
            outcome = "traceback"
            tracebacks.append(f"{kind}: {what}: {type(error).__name__}: {error}")
        if outcome == "silent":
            silent.append(f"{kind}: {what}")
        outcomes[f"{kind}, {outcome}"] += 1
        shutil.rmtree(copy)
    return {
        "cases": cases,
        "outcomes": dict(sorted(outcomes.items())),
        "silent": silent,
        "tracebacks": tracebacks,
        "bar_silent": 0,
    }


def resume(folder: Path) -> None:
    """Go on with a run, without a report."""
    opened = runs.Folder.open(folder)
    if opened.results is None:
        runs.reopen(opened).execute()


def damage_file(folder: Path, draw: random.Random) -> str:
    """Spoil one file of a run's folder; returns what was done, in words."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    path = draw.choice([path for path in files if path.stat().st_size])
    data = path.read_bytes()
    damage = draw.choice(DAMAGES)
    name = path.relative_to(folder).as_posix()
    if damage == "truncated":
        path.write_bytes(data[: draw.randrange(len(data))])
    elif damage == "flipped":
        place = draw.randrange(len(data))
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    elif damage == "missing":
        path.unlink()
    elif damage == "emptied":
        path.write_bytes(bytes(len(data)))
    else:
        alike = [other for other in files if other.suffix == path.suffix and other != path]
        other = draw.choice(alike or [file for file in files if file != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"{name} swapped with {other.relative_to(folder).as_posix()}"
    return f"{name} {damage}"


def judge(
    folder: Path,
    whole: dict[str, Any],
    action: Callable[[Path], object],
    finished: bool,
    what: str,
) -> str:
    """How a spoilt run ends: "sentence", "same end", "verified" or "silent".

    A finished run may go unnoticed by what reads other files, but never by `verify`.
    """
    try:
        action(folder)
    except (UserError, RunError) as error:
        return "sentence" if error.args and str(error) else "silent"
    if not finished:
        return "same end" if read_end(folder) == whole else "silent"
    if what.split()[0] in NOT_PROVEN and " swapped " not in what:
        return "not proven"
    try:
        problems, _ = verify(folder)
    except UserError:
        return "verified"
    if problems:
        return "verified"
    is_repeated = what == "results.json missing" and read_end(folder) == whole
    return "same end" if is_repeated else "silent"


# kills: processes killed at random moments


@benchmark("kills")
def bench_kills(quick: bool = False) -> dict:
    """Program or worker killed at random moments, then resumed: the same hashes and ledger."""
    with temporary_folder() as folder:
        return kill_runs(folder, kills=4 if quick else 50, seed=0)


def kill_runs(folder: Path, kills: int, seed: int, **settings: Any) -> dict[str, Any]:
    """Kill runs with SIGKILL until `kills` have hit, resume each, and compare the ends.

    Args:
        folder: for the runs.
        kills: that must have hit a process at work.
        seed: of the moments.
        settings: of the scenario, such as another engine.
    """
    draw = random.Random(seed)
    settings = {"training": {**TINY["training"], "rounds": 20}, **settings}
    start = time.time()
    fork = multiprocessing.get_context("fork")
    whole = _run_forked(fork, partial(run_tiny, folder / "whole", **settings))
    whole.join()
    length = time.time() - start
    end = read_end(folder / "whole")
    hits: Counter[str] = Counter()
    different = 0
    attempts = 0
    while sum(hits.values()) < kills and attempts < 5 * kills:
        copy = folder / f"run{attempts}"
        attempts += 1
        workers = draw.choice([0, 2])
        process = _run_forked(fork, partial(run_tiny, copy, workers=workers, **settings))
        time.sleep(draw.uniform(0, length))
        victims = ["program", "worker"] if workers else ["program"]
        victim = draw.choice(victims)
        children = _children(process.pid) if victim == "worker" else [process.pid]
        if process.is_alive() and children:
            try:
                os.kill(draw.choice(children), signal.SIGKILL)
                hits[victim] += 1
            except ProcessLookupError:
                pass
        process.join()
        if (copy / "config.yaml").exists():
            again = _run_forked(fork, partial(runs.resume, copy))
            again.join()
            different += read_end(copy) != end
        shutil.rmtree(copy, ignore_errors=True)
    return {
        "kills": dict(hits),
        "starts": attempts,
        "different_ends": different,
        "bar_different_ends": 0,
    }


def _run_forked(context: Any, work: Callable[[], object]) -> Any:
    """Start work in a process of its own, with its own words thrown away."""

    def quiet() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        torch.set_num_threads(1)
        work()

    process = context.Process(target=quiet)
    process.start()
    return process


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


# soak: a long run with drop-outs


@benchmark("soak")
def bench_soak(quick: bool = False) -> dict:
    """1,000 rounds, 20 clients, a tenth away at random and 5 % failing: memory, files, processes."""
    with temporary_folder() as folder:
        return soak(folder, rounds=40 if quick else 1000)


class Failing(MLP):
    """A model that diverges at random while it is trained, so that its client fails this once."""

    def __init__(self, share: float, seed: int):
        super().__init__((8,), (8,), 4)
        self.share = share
        self.draw = random.Random(seed)

    def forward(self, x: Any) -> Any:
        """The representation, or not a number."""
        z = super().forward(x)
        return z * math.nan if self.training and self.draw.random() < self.share else z


def soak(folder: Path, rounds: int, clients: int = 20, failing: float = 0.05) -> dict[str, Any]:
    """Run FedAvg with clients that are away at random, or fail, and watch this process.

    Returns: memory (MiB) after a tenth of the rounds and at the end, open files and child processes
        before and after, failures by kind.
    """
    draw = torch.Generator().manual_seed(0)
    participants = []
    for index in range(clients):
        x = torch.randn(16, 8, generator=draw)
        y = torch.randint(3, (16,), generator=draw)
        model = partial(Failing, failing, index)
        participants.append(
            Client(id=f"c{index}", model=model, task=Classification(3), train=(x, y), test=(x, y))
        )
    sizes: list[float] = []

    def watch(event: str, **facts: Any) -> None:
        if event == "round":
            sizes.append(_resident_mib())

    before = _open_files()
    children = len(_children(os.getpid()))
    start = time.time()
    result = runs.run(
        FedAvg(),
        participants,
        training=Training(rounds=rounds, epochs=1, batch_size=16, lr=0.01),
        federation=FederationConfig(dropout=0.1, quorum=0, evaluations=1, retries=5),
        alone=False,
        engine={"name": "local", "stack": "never"},
        out=folder / "soak",
        watch=watch,
    )
    seconds = time.time() - start
    failures = Counter(failure["reason"] for failure in result["failures"])
    lasting = sum(failure["lasting"] for failure in result["failures"])
    del result
    gc.collect()
    return {
        "rounds": len(sizes),
        "seconds_run": round(seconds, 1),
        "mib_at_a_tenth": round(sizes[len(sizes) // 10], 1),
        "mib_at_the_end": round(sizes[-1], 1),
        "open_files": [before, _open_files()],
        "child_processes": [children, len(_children(os.getpid()))],
        "failures": dict(failures.most_common(5)),
        "lasting": lasting,
        "problems": verify(folder / "soak")[0],
    }


def _resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
