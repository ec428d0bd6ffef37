"""Steps with a real FLARE federation on loopback; writes FOLDER/report.json. Run by test_flare.py.

Usage: python on_flare.py FOLDER STEP...
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import conftest as toys
import organisations
from real import REAL, steps

from unalike.algorithms import ALGORITHMS
from unalike.core.privacy import Privacy
from unalike.cross_silo import flare, supervisor
from unalike.cross_silo import flare_kits as kits
from unalike.cross_silo.policy import ALLOWED_CLASSES
from unalike.runs.run_folder import Folder

PROGRAM = ALLOWED_CLASSES["server"][1]
LIMIT = 240.0  # seconds until a job must have ended


def federation(folder, ids="abc", **options):
    """A federation whose clients come from a factory."""
    here = kits.LocalFlareFederation(folder / "flare", list(ids), folder)
    for id in ids:
        organisations.describe(here.kits / id / "local", id, **options)
    return here


def sites(here):
    return [here.kits / id / "local" for id in here.ids]


def wait(ended, seconds=LIMIT):
    start = time.monotonic()
    while (why := ended()) is None:
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"the job did not end within {seconds:g} s")
        time.sleep(0.3)
    return why


def methods(folder):
    """Every method, and one with privacy, here and on FLARE in one job: the same end?"""
    cases = {
        **{name: (name, {}) for name in REAL},
        "private": ("fedavg", {"privacy": Privacy(noise=0.5)}),
    }
    here = federation(folder)
    session = flare.Session(here)
    here.start()  # meanwhile
    local, runs = {}, {}
    try:
        for case, (name, more) in cases.items():
            local[case] = organisations.here(folder / case / "here", name, **more)
            replay = {"replay": folder / case / "here"} if ALGORITHMS[name].asynchronous else {}
            runs[case] = organisations.prepared(folder / case / "away", name, **more, **replay)
        why = wait(
            session.submit(
                flare.Job(
                    PROGRAM,
                    {"folders": [str(run.path) for run in runs.values()], "timeout": 60.0},
                    3,
                )
            )
        )
        report = {"ended": why, "read": [id for id in here.ids if read(session._connect(), id)]}
    finally:
        session.close()
    for case, run in runs.items():
        problem, results = run.read_json("problem.json"), run.results
        if problem or results is None:
            report[case] = {"problem": problem and problem["problem"]}
            continue
        report[case] = {
            **organisations.same(run.path, folder / case / "here", sites(here)),
            "spent": [local[case].get("privacy"), results.get("privacy")],
        }
    return report


def killed(folder):
    """Kill a client's process in the middle of a round; the job is submitted again."""
    here = federation(folder, seconds=0.02)
    run = organisations.prepared(folder / "away", "fedmuscle", rounds=3)
    struck, report = [], []

    def strike():
        while not any(event == "round" for event, _ in report):
            time.sleep(0.05)
        time.sleep(0.3)
        for pid in kits.job_processes(here.kits / "a"):
            os.kill(pid, signal.SIGKILL)
            struck.append(time.time())

    threading.Thread(target=strike, daemon=True).start()
    session = flare.Session(here)
    try:
        job = flare.Job(PROGRAM, {"folders": [str(run.path)], "timeout": 60.0}, 3)
        results = flare.run_jobs(
            run, lambda event, **facts: report.append((event, time.time())), session, job
        )
    finally:
        session.close()
    clients = [organisations.make({}, id, seconds=1e-9) for id in "abc"]
    toys.execute(folder / "here", toys.method("fedmuscle"), clients, rounds=3)
    on = [at for event, at in report if event == "resume"]
    return {
        **organisations.same(run.path, folder / "here", sites(here)),
        "struck": len(struck),
        "rounds": results["rounds"],
        "seconds": on[0] - struck[0] if on and struck else None,
        "left": leftover_processes(folder, here),
    }


def storm(folder, rounds=140, kills=50):
    """Kill processes at random until there were `kills` deaths, each a line of the file `kills`:
    of jobs and FLARE's own, of clients and of the server. The test kills this program, too, which
    continues where it was."""
    here = federation(folder, seconds=0.02)
    run = (
        Folder(folder / "away")
        if (folder / "away").exists()
        else organisations.prepared(folder / "away", "fedmuscle", rounds=rounds)
    )
    deaths, rounds_seen, over = folder / "kills", [0], threading.Event()
    with deaths.open("a") as file:
        file.write("up\n")

    def strike():
        since = 0  # kills since a round was finished: after five without any a run is given up
        while deaths.read_text().count("kill") < kills and not over.wait(random.uniform(0.5, 8.0)):
            since = 0 if rounds_seen[0] else since
            if since > 1:
                continue
            victim = random.choices(
                ["client", "server", "site of a client", "site of the server"], [34, 8, 4, 4]
            )[0]
            name = "localhost" if victim.endswith("server") else random.choice(here.ids)
            flares = (
                supervisor.descendants(here.processes[name].pid)[:1]
                if name in here.processes
                else []
            )
            pids = flares if victim.startswith("site") else kits.job_processes(here.kits / name)
            if pids:
                os.kill(pids[0], signal.SIGKILL)
                since, rounds_seen[0] = since + 1, 0
                with deaths.open("a") as file:
                    file.write(f"kill {victim}\n")

    def watch(event, **facts):
        rounds_seen[0] += event == "round"

    threading.Thread(target=strike, daemon=True).start()
    session = flare.Session(here)
    try:
        results = flare.run_jobs(
            run,
            watch,
            session,
            flare.Job(PROGRAM, {"folders": [str(run.path)], "timeout": 60.0}, 3),
        )
    finally:
        over.set()
        session.close()
    clients = [organisations.make({}, id, seconds=1e-9) for id in "abc"]
    toys.execute(folder / "here", toys.method("fedmuscle"), clients, rounds=rounds)
    killed = [
        line.removeprefix("kill ")
        for line in deaths.read_text().splitlines()
        if line.startswith("kill")
    ]
    return {
        **organisations.same(run.path, folder / "here", sites(here)),
        "rounds": results["rounds"],
        "killed": Counter(killed),
        "restarts": (run.path / "events.jsonl").read_text().count('"event": "restart"'),
        "left": leftover_processes(folder, here),
    }


def loosen(kit, authorization=False, guards=False):
    """Undo what we wrote for a site; FLARE's default authorization counts then."""
    path = kit / "local" / "resources.json"
    resources = json.loads(path.read_text())
    if authorization:
        (kit / "local" / "authorization.json").unlink()
        resources["class_allow_list"] = ["*"]
    if guards:
        del resources["app_validator"]
        resources["components"] = [c for c in resources["components"] if "guard" not in c["path"]]
    path.write_text(json.dumps(resources))


def attack(place, custom):
    """Write a job with code of its own, or with an installed class that is not ours."""
    flare.Job(PROGRAM, {"folders": [], "timeout": 1.0}, 1).write(place)
    config = place / "app" / "config" / "config_fed_client.json"
    report = json.loads(config.read_text())
    report["executors"][0]["executor"] = {
        "path": "attack.Attack" if custom else "organisations.Attack",
        "args": {},
    }
    config.write_text(json.dumps(report))
    if custom:
        (place / "app" / "custom").mkdir()
        (place / "app" / "custom" / "attack.py").write_text("from organisations import Attack")


def read(session, site):
    """A site's log as its administrator gets it, None if refused."""
    try:
        text = session.cat_target(site, file="log.txt")
    except Exception:
        return None
    return text if "FederatedClient" in text else None


def over(session, number):
    """How a job ended, None before."""
    status = str(session.get_job_status(number))
    return status if status.startswith("FINISHED") else None


def administrator(folder):
    """The administrator attacks the sites, with a server that allows everything.

    Site a has our authorization and no guards, b only the guards, c neither, so that the attacks
    are seen to work there. Then our run, with all three.
    """
    here = federation(folder)
    loosen(here.kits / "localhost", authorization=True)
    loosen(here.kits / "a", guards=True)
    loosen(here.kits / "b", authorization=True)
    loosen(here.kits / "c", authorization=True, guards=True)
    session = flare.Session(here)
    report = {}
    try:
        here.start()
        known = session._connect()
        while len(known.get_connected_client_list()) < 3:
            time.sleep(0.3)
        report["read"] = [id for id in here.ids if read(known, id)]
        for kind in ("custom", "installed"):
            attack(folder / kind, custom=kind == "custom")
            number = known.submit_job(str(folder / kind))
            wait(lambda number=number: over(known, number), 60.0)
            report[kind] = [id for id in here.ids if (here.kits / id / "attacked").exists()]
            for id in report[kind]:
                (here.kits / id / "attacked").unlink()
        run = organisations.prepared(folder / "away", "fedavg")
        wait(session.submit(flare.Job(PROGRAM, {"folders": [str(run.path)], "timeout": 60.0}, 3)))
    finally:
        session.close()
    organisations.here(folder / "here", "fedavg")
    return {**report, **organisations.same(run.path, folder / "here", sites(here))}


def stranger(folder):
    """Start a site with certificates of another authority; lists the sites that are let in."""
    here = federation(folder, ids="a")
    other = kits.LocalFlareFederation(folder / "other", ["b"], folder)
    session = flare.Session(here)
    try:
        here.start()
        session._connect()
        address = json.loads((here.kits / "a" / "startup" / "fed_client.json").read_text())
        forged = other.kits / "b" / "startup" / "fed_client.json"
        report = json.loads(forged.read_text())
        report["servers"] = address["servers"]
        forged.write_text(json.dumps(report))
        process = kits.start_process(
            kits.site_command(other.kits / "b", False), other.kits / "b" / "log.out"
        )
        start = time.monotonic()
        names = set()
        while time.monotonic() - start < 15.0:
            names |= {client.name for client in session._connect().get_connected_client_list()}
            time.sleep(1.0)
        supervisor.stop([process])
    finally:
        session.close()
    return {"names": sorted(names)}


def leftover_processes(folder, here):
    """Processes that outlived their federation, nursed ones too."""
    time.sleep(1.5)
    nursed = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if here.private_folder.name in text(path)
    ]
    return [
        *nursed,
        *(pid for kit in folder.glob("flare/unalike/prod_00/*") for pid in kits.job_processes(kit)),
    ]


def text(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    steps(globals())
