"""`unalike join --check`: what can go wrong before a run is looked for before the run.

Nothing leaves the machine but a connection to the server's port.
"""

import json
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unalike.algorithms import ALGORITHMS
from unalike.base.errors import UserError, describe_error
from unalike.base.settings import short
from unalike.core.client import VERSION, Client, ClientInfo
from unalike.cross_silo.certificates import SOON, check_certificate, format_day, read_certificate
from unalike.cross_silo.site_law import SiteLaw
from unalike.cross_silo.versions import installed_versions
from unalike.scenarios.client_config import load_client, read_config
from unalike.scenarios.site_policy import ClientPrivacy

CONNECT_TIMEOUT = 5.0  # seconds
SAVED_STATES = 5  # of a client: three snapshots, one set aside, one being written
STATE_PER_MODEL = 3  # a state has the model and, of Adam, two more numbers a parameter


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        subject: what was checked.
        text: a sentence.
        fine: whether the client can join as far as this check goes.
    """

    subject: str
    text: str
    fine: bool = True


def preflight(kit: Path, file: Path, run: str | None = None) -> list[Finding]:
    """Check a client before it joins.

    Args:
        kit: FLARE's startup kit; or a folder with Flower's ca.pem.
        file: the client.yaml.
        run: the server's scenario, if it is known: then the method's fit, its digest and its
            privacy are checked, too.
    """
    findings: list[Finding] = []
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _check_certificates(kit),
        lambda: _check_server(kit),
        _describe_versions,
    ]
    _collect(findings, checks)
    try:
        about = _about(run)
        client = load_client(file, about)
        info = client.info()
    except Exception as error:  # a factory of the user's may raise anything
        findings.append(Finding("client.yaml", describe_error(error), fine=False))
        return findings
    law = SiteLaw(read_config(file), file.resolve().parent / "unalike")
    _collect(
        findings,
        [
            lambda: _check_name(kit, info),
            lambda: _describe_announcement(info),
            lambda: _check_disk(client, file),
            lambda: _check_law(law, client),
        ],
    )
    if run is not None:
        _collect(findings, [lambda: _check_run(law, client, run)])
    return findings


def _collect(findings: list[Finding], checks: list[Callable[[], Iterator[Finding]]]) -> None:
    for check in checks:
        try:
            findings.extend(check())
        except (UserError, OSError) as error:
            subject = getattr(check, "__name__", "check")
            name = "run" if subject == "<lambda>" else subject
            findings.append(Finding(name, describe_error(error), fine=False))


def _certificates(kit: Path) -> list[Path]:
    names = ("startup/client.crt", "startup/rootCA.pem", "ca.pem")
    return [kit / name for name in names if (kit / name).exists()]


def _check_certificates(kit: Path) -> Iterator[Finding]:
    paths = _certificates(kit)
    if not paths:
        text = f"{kit} has neither startup/client.crt (FLARE) nor ca.pem (Flower)"
        yield Finding("certificate", text, fine=False)
    for path in paths:
        try:
            check_certificate(path)
        except UserError as error:
            yield Finding("certificate", str(error), fine=False)
            continue
        name, _, end = read_certificate(path)
        soon = ", soon: ask for a new one" if end - time.time() < SOON else ""
        text = f"{path.name} of {name} holds until {format_day(end)}{soon}"
        yield Finding("certificate", text)


def _server_address(kit: Path) -> tuple[str, int] | None:
    """Host and port of FLARE's server; None for Flower, whose command names them."""
    path = kit / "startup" / "fed_client.json"
    if not path.exists():
        return None
    config = json.loads(path.read_text())
    target = config["servers"][0].get("service", {}).get("target")
    if target is None:
        target = config["overseer_agent"]["args"]["sp_end_point"]
    host, port = target.split(":")[:2]
    return host, int(port)


def _check_server(kit: Path) -> Iterator[Finding]:
    with suppress(KeyError, IndexError, ValueError):
        address = _server_address(kit)
        if address is None:
            return
        host, port = address
        try:
            connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT)
        except OSError as error:
            text = f"{host}:{port} cannot be reached: {error}; ask whether the server runs, and "
            yield Finding("server", text + "whether a firewall lets you out", fine=False)
            return
        with connection:
            yield from _check_handshake(kit, connection, host, port)


def _check_handshake(
    kit: Path, connection: socket.socket, host: str, port: int
) -> Iterator[Finding]:
    startup = kit / "startup"
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=host):
            yield Finding("server", f"{host}:{port} answers, and both certificates are accepted")
    except (ssl.SSLError, OSError) as error:
        text = f"{host}:{port} is there, but no secure connection: {error}"
        yield Finding("server", text, fine=False)


def _describe_versions() -> Iterator[Finding]:
    versions = installed_versions()
    texts = [f"{name} {version}" for name, version in versions.items()]
    text = f"protocol {VERSION}, which must be the server's; {', '.join(texts)}"
    yield Finding("version", text)


def _check_name(kit: Path, info: ClientInfo) -> Iterator[Finding]:
    path = kit / "startup" / "client.crt"
    if not path.exists():
        return
    name, _, _ = read_certificate(path)
    if name != info.id:
        text = f'the certificate is of "{name}" and client.yaml has the id "{info.id}": '
        yield Finding("name", text + f"write id: {name}", fine=False)
    else:
        yield Finding("name", f"{name}, in certificate and client.yaml")


def _describe_announcement(info: ClientInfo) -> Iterator[Finding]:
    if info.public is None:
        yield Finding("public set", "none; methods on public data cannot be run")
    else:
        text = f"{info.public_rows} rows, fingerprint {info.public}: everyone's must be the same"
        yield Finding("public set", text)
    labels = short.repr(list(info.labels))
    yield Finding(
        "labels", f"{len(info.labels)}, in the order {labels}: compare it with the others"
    )


def _check_disk(client: Client, file: Path) -> Iterator[Finding]:
    model = client.encoder(0)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    needed = size * STATE_PER_MODEL * SAVED_STATES
    free = shutil.disk_usage(file.resolve().parent).free
    text = f"{free / 1e9:.1f} GB free; saved states need about {needed / 1e9:.3f} GB a run"
    yield Finding("disk", text, fine=free > needed)


def _check_law(law: SiteLaw, client: Client) -> Iterator[Finding]:
    if law.rules.accept is None:
        text = "any run that the policy allows is accepted; `accept:` would name them"
        yield Finding("accept", text)
    privacy = client.privacy
    if privacy is None:
        yield Finding("noise", "none is demanded: what the method sends leaves as it is")
        return
    text = f"at least {privacy.noise:g}, from {privacy.entropy} entropy"
    limit = privacy.epsilon if isinstance(privacy, ClientPrivacy) else None
    if limit is not None:
        spent = law.account(privacy).epsilon()
        shown = "without bound" if spent is None else f"{spent:.3g}"
        text += f"; spent so far: epsilon {shown} of {limit:g}"
        yield Finding("noise", text, fine=spent is not None and spent < limit)
    else:
        yield Finding("noise", text)


def _about(run: str | None) -> dict[str, Any]:
    if run is None:
        return {"name": "check", "algorithm": next(iter(ALGORITHMS)), "seed": 0}
    scenario, _ = _load_run(run)
    return {"name": scenario.name, "algorithm": scenario.algorithm.name, "seed": scenario.seed}


def _load_run(run: str) -> tuple[Any, Any]:
    from unalike.scenarios import load, load_mapping

    described = load_mapping(run)
    for key in ("clients", "data", "public", "server"):
        described.pop(key, None)
    return load(run, None, None, mapping={"engine": "flare", **described})


def _check_run(law: SiteLaw, client: Client, run: str) -> Iterator[Finding]:
    from unalike.cross_silo.client_endpoint import check_fit
    from unalike.runs.plan import plan_from_dict, plan_to_dict
    from unalike.scenarios.site_policy import run_digest

    scenario, method = _load_run(run)
    terms = plan_to_dict(
        method,
        scenario.algorithm.name,
        scenario.training,
        scenario.seed,
        scenario.safeguard,
        scenario.privacy,
    )
    plan = plan_from_dict(terms)
    law.check_run(terms, plan, client)
    check_fit(plan, client, run)
    yield Finding(
        "run", f"{scenario.name} fits this client; its digest is {run_digest(terms)[:16]}"
    )
