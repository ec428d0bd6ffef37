"""Benchmarks of faults: damaged files, killed processes, and a thousand rounds with drop-outs."""

import gc
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.study import ROOT, Study, benchmark
from unalike import runs
from unalike.algorithms.fedavg import FedAvg
from unalike.base import events
from unalike.base.cache import cache_folder
from unalike.base.errors import RunError, UserError
from unalike.base.integrity import write_whole
from unalike.core.client import Client
from unalike.core.participation import FederationConfig
from unalike.models import MLP
from unalike.report import write
from unalike.runs.environment import hash_of_the_code
from unalike.runs.run_folder import commit
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

# Of each engine: 200 and some, since a run is killed on to its end.
KILLS = {"local": 120, "local workers": 12, "ray": 30, "flare": 30, "flower": 10}
LOCAL_PARTS = 6  # each with a seed of its own, so that `--keep` loses little
BAR_KILLS = 200


@benchmark("kills")
def bench_kills(study: Study) -> dict:
    """Processes killed at random moments on four engines, and the run gone on: the same end.

    Rows are engines: `--only ray`. On the local one the program or a worker is killed and the run
    resumed; on the others also actors, sites, and the engine's own processes, which a run survives
    by itself. An end is different where a hash of a model, a metric or a row of the ledger is.
    """
    rows = {}
    for part in range(LOCAL_PARTS):
        kills = 4 if study.quick else KILLS["local"] // LOCAL_PARTS
        if study.selects(name := f"local, seed {part}"):
            run = partial(kill_runs, kills=kills, seed=part)
            rows[name] = kept(study, f"kills-local-{part}", run)
    if study.selects("local workers"):
        run = partial(kill_runs, kills=KILLS["local workers"], seed=100, victims=("worker",))
        rows["local workers"] = kept(study, "kills-local-workers", run)
    for engine in ("ray", "flare", "flower"):
        if study.selects(engine):
            run = partial(kill_on, engine, kills=10 if study.quick else KILLS[engine])
            rows[engine] = kept(study, f"kills-{engine}", run)
    return {
        "rows": rows,
        "kills": sum(row["kills"] for row in rows.values()),
        "bar_kills": BAR_KILLS,
        "different_ends": sum(row["different_ends"] for row in rows.values()),
        "bar_different_ends": 0,
    }


def kept(study: Study, name: str, measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Measure a row in a temporary folder, or recall it from the folder of `--keep`.

    A row belongs to the code of the package. It has the commit and the load that it was made at.
    """
    path = None
    if study.keep is not None:
        path = Path(study.keep) / f"{name}-{study.quick}-{hash_of_the_code()[:16]}.json"
        if path.is_file():
            return json.loads(path.read_text())
    start = time.time()
    load = os.getloadavg()[0]
    with temporary_folder() as folder:
        row = measure(folder)
    row |= {
        "seconds": round(time.time() - start, 1),
        "load": round(load, 1),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(row).encode())
    return row


def kill_on(engine: str, folder: Path, kills: int) -> dict[str, Any]:
    """Kill processes of a run on a real engine, as the tests of that engine do."""
    tests = ROOT / "tests"
    sys.path[:0] = [str(tests), str(tests / "engines")]
    from storms import run_storm

    outcome = run_storm(engine, folder, kills)
    return {
        "kills": sum(outcome["killed"].values()),
        "killed": outcome["killed"],
        "different_ends": int(not outcome["same"]),
        "different": outcome.get("differences", {}),
        "left_processes": len(outcome["left"]),
    }


def kill_runs(
    folder: Path,
    kills: int,
    seed: int = 0,
    victims: Sequence[str] = ("program", "worker"),
    **settings: Any,
) -> dict[str, Any]:
    """Kill runs with SIGKILL and resume them until `kills` have hit, and compare the ends.

    A run is killed up to five times, each time at random within half of its length.

    Args:
        folder: for the runs.
        kills: that must have hit a process at work.
        seed: of the moments.
        victims: "program" and "worker". Workers that have not started cannot be killed.
        settings: of the scenario, such as another method.
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
    different: list[str] = []
    starts = 0
    count = 0
    while sum(hits.values()) < kills and count < 5 * kills:
        copy = folder / f"run{count}"
        count += 1
        workers = draw.choice([0, 2]) if "program" in victims else 2
        work: Callable[[], object] = partial(run_tiny, copy, workers=workers, **settings)
        story = []
        for _ in range(5):
            process = _run_forked(fork, work)
            starts += 1
            victim = draw.choice(victims) if workers else "program"
            while victim == "worker" and process.is_alive() and not _children(process.pid):
                time.sleep(0.05)
            time.sleep(draw.uniform(0, length / 2))
            children = _children(process.pid) if victim == "worker" else [process.pid]
            if process.is_alive() and children:
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(children), signal.SIGKILL)
                    hits[victim] += 1
                    story.append(victim)
            process.join()
            if not (copy / "config.yaml").exists():
                continue  # killed before the run began
            work = partial(runs.resume, copy)
        if (copy / "config.yaml").exists():
            _run_forked(fork, work).join()
            if not (copy / "results.json").exists() or read_end(copy) != end:
                different.append(f"run {count}, {workers} workers: {', '.join(story)}")
        shutil.rmtree(copy, ignore_errors=True)
    return {
        "kills": sum(hits.values()),
        "killed": dict(hits),
        "different_ends": len(different),
        "different": different,
        "runs": count,
        "starts": starts,
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

SOAK_ROUNDS = 1000
SOAK_CLIENTS = 20
DROPOUT = 0.1
FAILING = 0.05
SOAK_FEDERATION = FederationConfig(dropout=DROPOUT, quorum=0, evaluations=1, retries=5)


@benchmark("soak")
def bench_soak(study: Study) -> dict:
    """1,000 rounds, 20 clients, a tenth away at random and 5 % failing: memory, files, processes.

    Rows are engines: `--only flare`, where each client is a site with processes of its own.
    `--set rounds=300` for fewer.
    """
    chosen = dict(setting.split("=", 1) for setting in study.settings)
    rounds = int(chosen.pop("rounds", 20 if study.quick else SOAK_ROUNDS))
    if chosen:
        raise UserError(f"bench soak knows the setting rounds, not {', '.join(chosen)}")
    rows = {}
    for engine, run in (("local", soak_local), ("flare", soak_flare)):
        if study.selects(engine):
            rows[engine] = kept(study, f"soak-{rounds}-{engine}", partial(run, rounds=rounds))
    return {"rows": rows, "clients": SOAK_CLIENTS, "dropout": DROPOUT, "failing": FAILING}


def soak_training(rounds: int) -> Training:
    """One epoch of one batch a round."""
    return Training(rounds=rounds, epochs=1, batch_size=16, lr=0.01)


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


def soak_client(run: dict[str, Any], index: int) -> Client:
    """A tiny client, as a client.yaml's factory makes it; some of its rounds fail."""
    draw = torch.Generator().manual_seed(index)
    x = torch.randn(16, 8, generator=draw)
    y = torch.randint(3, (16,), generator=draw)
    model = partial(Failing, FAILING, index)
    return Client(id=f"c{index}", model=model, task=Classification(3), train=(x, y), test=(x, y))


class Samples:
    """Memory and open files of a run's processes, after some of its rounds.

    Args:
        groups: returns the processes of each kind.
        every: rounds between two samples.
    """

    def __init__(self, groups: Callable[[], dict[str, list[int]]], every: int):
        self.groups = groups
        self.every = max(1, every)
        self.rounds = 0
        self.samples: list[dict[str, Any]] = []

    def watch(self, event: str, **facts: Any) -> None:
        """Watch the run's events, and take a sample at every so many rounds."""
        if event != "round":
            return
        self.rounds = facts["round"]
        if self.rounds % self.every == 0:
            self.take()

    def take(self) -> None:
        """Take a sample: of each kind the largest process, and what all have open."""
        sample: dict[str, Any] = {"round": self.rounds}
        for kind, pids in self.groups().items():
            sizes = [size for pid in pids if (size := resident_mib(pid)) is not None]
            sample[f"{kind}_mib"] = round(max(sizes, default=0.0), 1)
            sample[f"{kind}_files"] = sum(map(open_files, pids))
            sample[f"{kind}_processes"] = len(sizes)
        self.samples.append(sample)

    def summary(self, kinds: Sequence[str]) -> dict[str, Any]:
        """Each kind's memory and files after a tenth of the rounds and at the end."""
        early = next(s for s in self.samples if s["round"] >= self.rounds / 10)
        late = self.samples[-1]
        row: dict[str, Any] = {}
        for kind in kinds:
            for what in ("mib", "files"):
                row[f"{kind}_{what}_at_a_tenth"] = early[f"{kind}_{what}"]
                row[f"{kind}_{what}_at_the_end"] = late[f"{kind}_{what}"]
        return {"rounds": self.rounds, **row}


def summarise_failures(results: dict[str, Any]) -> dict[str, Any]:
    """How often clients were away or failed, and how many were left out for good."""
    failures = results["failures"]
    reasons = Counter(re.sub(r"incident \w+", "incident", f["reason"]) for f in failures)
    return {
        "failures": dict(reasons.most_common(5)),
        "lasting": sum(failure["lasting"] for failure in failures),
    }


def soak_local(folder: Path, rounds: int) -> dict[str, Any]:
    """Run FedAvg with clients that are away at random, or fail, and watch this process."""
    own = os.getpid()
    samples = Samples(lambda: {"program": [own]}, rounds // 50)

    def run(name: str, rounds: int, watch: Callable[..., None]) -> Any:
        return runs.run(
            FedAvg(),
            [soak_client({}, index) for index in range(SOAK_CLIENTS)],
            training=soak_training(rounds),
            federation=SOAK_FEDERATION,
            alone=False,
            engine={"name": "local", "stack": "never"},
            out=folder / name,
            watch=watch,
        )

    run(
        "first", 1, lambda event, **facts: None
    )  # matplotlib opens its fonts once, and keeps them open
    before = open_files(own)
    children = set(_children(own))
    start = time.time()
    result = run("soak", rounds, samples.watch)
    seconds = time.time() - start
    row = samples.summary(["program"]) | summarise_failures(result)
    del result
    gc.collect()
    return row | {
        "seconds_run": round(seconds, 1),
        "left_files": open_files(own) - before,
        "left_processes": len(set(_children(own)) - children),
        "problems": verify(folder / "soak")[0],
        "samples": samples.samples,
    }


def soak_flare(folder: Path, rounds: int) -> dict[str, Any]:
    """The same in a FLARE federation on loopback: a server, 20 sites, each with a job's process.

    Jobs' processes are forked from one that has made their imports, so they count as `site`, with
    FLARE's own; `server` and `client` are what waits for them.
    """
    from unalike.cross_silo import flare, flare_kits, supervisor
    from unalike.cross_silo.policy import ALLOWED_CLASSES

    own = os.getpid()
    before = open_files(own)
    children = set(_children(own))
    ids = [f"c{index}" for index in range(SOAK_CLIENTS)]
    here = flare_kits.LocalFlareFederation(folder / "flare", ids, folder / "none.yaml")
    for index, id in enumerate(ids):
        described = {"factory": "benchmarks.faults:soak_client", "options": {"index": index}}
        (here.kits / id / "local" / "client.yaml").write_text(json.dumps(described))
    config = {
        "name": "soak",
        "algorithm": {"name": "fedavg", **vars(FedAvg())},
        "training": soak_training(rounds).model_dump(),
        "federation": SOAK_FEDERATION.model_dump(),
        "safeguard": False,
        "alone": False,
        "privacy": None,
        "seed": 0,
        "python": True,
        "replay": None,
    }
    run = runs.Folder.create(folder / "soak", runs.to_plain(config))

    def groups() -> dict[str, list[int]]:
        started = [here.processes[name].pid for name in here.processes]
        below = [pid for name in started for pid in supervisor.descendants(name)]
        clients = [pid for id in ids for pid in flare_kits.job_processes(here.kits / id)]
        server = flare_kits.job_processes(here.kits / flare_kits.SERVER)
        others = [pid for pid in below if pid not in {*clients, *server}]
        return {"program": [own], "server": server, "client": clients, "site": others}

    samples = Samples(groups, rounds // 50)
    session = flare.Session(here)
    place = here.private_folder.name
    job = flare.Job(
        ALLOWED_CLASSES["server"][1], {"folders": [str(run.path)], "timeout": 60.0}, SOAK_CLIENTS
    )
    start = time.time()
    try:
        results = flare.run_jobs(run, samples.watch, session, job)
    finally:
        session.close()
    seconds = time.time() - start
    row = samples.summary(["program", "server", "client", "site"]) | summarise_failures(results)
    del results
    gc.collect()
    time.sleep(2.0)  # processes are told, and end
    return row | {
        "seconds_run": round(seconds, 1),
        "restarts": sum(1 for _ in events.read_events(run.path / events.FILE, "restart")),
        "left_files": open_files(own) - before,
        "left_processes": len(set(_children(own)) - children) + len(_mentioning(place)),
        "problems": verify(folder / "soak")[0],
        "samples": samples.samples,
    }


def _mentioning(place: str) -> list[int]:
    """Processes whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if place in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def resident_mib(pid: int) -> float | None:
    """Resident memory of a process; None where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), None)


def open_files(pid: int) -> int:
    """How many files a process has open; 0 where it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
