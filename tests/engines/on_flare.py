"""Steps with a real FLARE federation on loopback; writes FOLDER/report.json. Run by test_flare.py.

Usage: python on_flare.py FOLDER STEP...
"""

import datetime
import json
import os
import random
import shutil
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from pathlib import Path

import conftest as toys
import organisations
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from real import REAL, steps
from storms import planned_kills

from unalike.algorithms import ALGORITHMS
from unalike.core.privacy import Privacy
from unalike.cross_silo import flare, flare_deploy, supervisor
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


def storm(folder):
    """Kill processes at random until there were so many deaths, each a line of the file `kills`:
    of jobs and FLARE's own, of clients and of the server. storms.py kills this program, too, which
    continues where it was."""
    kills = planned_kills()
    rounds = 14 * kills // 5
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
        "planned_rounds": rounds,
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


def intruders(folder):
    """Intruders at the server of an honest run: none of them becomes a site of the federation.

    Each is a FLARE client's process, or bytes on a connection. `control` is a member with its own
    kit, to see that a log shows who was let in.
    """
    place = folder / "federation"
    (folder / "hospitals.yaml").parent.mkdir(parents=True, exist_ok=True)
    (folder / "hospitals.yaml").write_text(
        json.dumps({"name": "toy", "algorithm": {"name": "fedavg"}, "training": {"rounds": 1}})
    )
    port = kits.free_port()
    address = f"localhost:{port}"
    flare_deploy.prepare(str(folder / "hospitals.yaml"), place, address, ["a", "b", "c"])
    flare_deploy.prepare(str(folder / "hospitals.yaml"), folder / "other", address, ["c"])
    members = {name: place / "sites" / name for name in "abc"}
    proxy = organisations.Recorder(port)
    started = {
        "server": kits.start_process(kits.site_command(place / "server", True), folder / "0")
    }
    session = flare.Session(place / "admin")
    report = {}
    try:
        for name in "ab":
            organisations.describe(members[name] / "local", name)
            if name == "b":
                change_server(members[name], proxy.port)
            started[name] = start_site(members[name], folder / name)
        await_sites(session, {"a", "b"})
        forged = forge_kits(folder, place, members)
        for name, kit in forged.items():
            organisations.describe(kit / "local", name)
            started[name] = start_site(kit, folder / name)
        run = organisations.prepared(folder / "away", "fedavg")
        job = flare.Job(PROGRAM, {"folders": [str(run.path)], "timeout": 60.0}, 2)
        wait(session.submit(job))
        report["no certificate"] = is_answered(port, members["a"], with_key=False)
        report["with a certificate"] = is_answered(port, members["a"], with_key=True)
        recorded = bytes(max(proxy.sent, key=len))
        report["replay"] = organisations.is_replay_answered(port, recorded)
        report["recorded"] = len(recorded)
        started["c"] = start_site(members["c"], folder / "c")
        sites = await_sites(session, {"a", "b", "c"})
        report["sites"] = sorted(sites)
        for name in ("c", *forged):
            report[name] = "Successfully registered client" in text(folder / name)
    finally:
        session.close()
        supervisor.stop(started.values())
        proxy.close()
    organisations.here(folder / "here", "fedavg", count=2)
    kept = [members[name] / "local" for name in "ab"]
    return {**report, **organisations.same(run.path, folder / "here", kept)}


def start_site(kit, log):
    return kits.start_process(kits.site_command(kit, False), log)


def await_sites(session, names, seconds=90.0):
    """The sites that are connected, once these are; or after so long."""
    start = time.monotonic()
    sites = set()
    while not names <= sites and time.monotonic() - start < seconds:
        sites = {client.name for client in session._connect().get_connected_client_list()}
        time.sleep(0.5)
    return sites


def forge_kits(folder, place, members):
    """Startup kits by which nobody may be let in, by what is wrong with them."""
    forged = {}
    for name in ("another's name", "old certificate", "other authority"):
        source = folder / "other" / "sites" / "c" if name == "other authority" else members["c"]
        forged[name] = folder / "forged" / name.replace("'", "").replace(" ", "-")
        shutil.copytree(source, forged[name])
    script = forged["another's name"] / "startup" / "sub_start.sh"
    script.write_text(script.read_text().replace("uid=c", "uid=a"))
    config = forged["another's name"] / "startup" / "fed_client.json"
    config.write_text(config.read_text().replace('"fqsn": "c"', '"fqsn": "a"'))
    expire(forged["old certificate"] / "startup" / "client.crt", place / "authority" / "cert.json")
    return forged


def expire(path, authority):
    """Put a certificate in place of one that is the same, but ended yesterday."""
    known = x509.load_pem_x509_certificate(path.read_bytes())
    root = json.loads(authority.read_text())["root_pri_key"].encode()
    key = serialization.load_pem_private_key(root, None)
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(known.subject)
        .issuer_name(known.issuer)
        .public_key(known.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=300))
        .not_valid_after(now - datetime.timedelta(days=1))
    )
    for extension in known.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    expired = builder.sign(key, hashes.SHA256())
    path.write_bytes(expired.public_bytes(serialization.Encoding.PEM))


def change_server(kit, port):
    """Let a site reach the server at another port."""
    path = kit / "startup" / "fed_client.json"
    config = json.loads(path.read_text())
    config["servers"][0]["service"]["target"] = f"localhost:{port}"
    path.write_text(json.dumps(config))


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # how a gRPC client begins


def is_answered(port, kit, with_key):
    """Whether the server speaks gRPC with a client that has a member's certificate, or none."""
    context = ssl.create_default_context(cafile=str(kit / "startup" / "rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    if with_key:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    try:
        with (
            socket.create_connection(("localhost", port), timeout=5) as line,
            context.wrap_socket(line, server_hostname="localhost") as secure,
        ):
            secure.sendall(HELLO)
            return bool(secure.recv(1))
    except OSError:
        return False


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
