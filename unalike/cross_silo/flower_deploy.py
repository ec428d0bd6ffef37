"""Deploys a Flower federation: writes app, certificates, keys, configuration and start commands.

Starts none of it.
"""

import base64
import datetime
import hashlib
import inspect
import json
import shlex
import socket
import time
import uuid
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml

from unalike.base.errors import UserError
from unalike.base.integrity import write_whole
from unalike.cross_silo.certificates import check_certificate, format_day, read_certificate
from unalike.scenarios.schema import client_ids

AUTHORITY_DAYS = 3650  # what clients have of a deployment holds so long
SERVER_DAYS = 365

APP = """[project]
name = "unalike-app"
version = "1.0.0"
description = "The server and the clients of a run of unalike"
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "unalike"

[tool.flwr.app.components]
serverapp = "unalike_app:server"
clientapp = "unalike_app:client"

[tool.flwr.app.config]
folder = ""
federation = ""
clients = 1
timeout = 600.0
"""
CODE = '''"""The app that Flower sends to all SuperNodes; its code is in the package unalike."""

from unalike.cross_silo.flower import client, server

__all__ = ["client", "server"]
'''


def prepare(scenario: str, out: Path, address: str, settings: list[str] | None = None) -> list[str]:
    """Deploy a scenario's federation, with a copy of the scenario for clients that are built here.

    Args:
        scenario: a shipped scenario or a file.
        out: the folder to write.
        address: HOST:PORT at which clients reach the server.
        settings: `key=value` changes of the scenario.
    Returns: paths of files to read.
    """
    from unalike.scenarios import load

    loaded, method = load(scenario, None, settings, engine="flower")
    config = loaded.model_dump(mode="json") | {
        "algorithm": {"name": loaded.algorithm.name, **vars(method)}
    }
    written = deploy(
        out, client_ids(config), out.resolve() / "scenario.yaml", address, keep_authority=True
    )
    (out / "scenario.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return written


def deploy(
    to: Path, ids: list[str], config: Path | None, address: str, keep_authority: bool = False
) -> list[str]:
    """Write the folder of a deployment.

    Args:
        to: the folder, new or empty.
        ids: clients built on this machine from the scenario in `config`. Where there are none,
            organisations bring their own key and client.yaml.
        address: HOST:PORT at which clients reach the server.
        keep_authority: whether the authority's key is kept, so that `renew` is possible. A
            federation that ends with its run does not need it.
    Returns: paths of files to read.
    """
    to = to.resolve()
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to} is not empty; choose another folder for the deployment")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"the SuperLink's address is HOST:PORT, as clients reach it, got {address!r}"
        )
    check_flower(address)
    for name in ("app", "certificates", "keys", "flwr", "clients"):
        (to / name).mkdir(parents=True, exist_ok=True)
    (to / "app" / "pyproject.toml").write_text(APP)
    (to / "app" / "unalike_app.py").write_text(CODE)
    sign(to)
    certify(to / "certificates", host, keep_authority)
    ca = to / "certificates" / "ca.pem"
    superlink_port, *node_ports = free_ports(1 + len(ids))
    (to / "flwr" / "config.toml").write_text(
        '[superlink]\ndefault = "unalike"\n\n[superlink.unalike]\n'
        f'address = "127.0.0.1:{superlink_port}"\nroot-certificates = "{ca}"\n'
    )
    listens = host if _is_loopback(host) else "0.0.0.0"
    known = {"superlink": superlink_command(to, f"{listens}:{port}", superlink_port)}
    trusted = to / "certificates" / "trusted.yaml"
    for id, node_port in zip(ids, node_ports, strict=True):
        key = to / "keys" / id
        make_key(key)
        file = to / "clients" / id / "client.yaml"
        file.parent.mkdir()
        file.write_text(json.dumps({"scenario": str(config), "client": id}))
        known[id] = supernode(address, [str(ca), str(trusted), str(key)], str(file), node_port)
    (to / "commands.json").write_text(json.dumps(known, indent=1))
    (to / "README.md").write_text(readme(to, known, ids, address))
    return [str(to / "README.md"), str(to / "app"), str(to / "commands.json")]


def superlink_command(to: Path, address: str, port: int) -> list[str]:
    """The command of the gate at `address` and the SuperLink behind it, on a port of loopback."""
    certificates = to / "certificates"
    gate = ["python", "-m", "unalike.cross_silo.gate", str(to), address]
    tls = ["--ssl-ca-certfile", str(certificates / "ca.pem")]
    tls += ["--ssl-certfile", str(certificates / "server.pem")]
    tls += ["--ssl-keyfile", str(certificates / "server.key")]
    return [
        *gate,
        "flower-superlink",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *tls,
        "--enable-supernode-auth",
        "--database",
        str(to / "superlink.db"),
        "--disable-runtime-dependency-installation",
    ]


def check_flower(address: str) -> None:
    """Refuse to deploy with a Flower that cannot keep strangers out of a federation.

    Its Fleet API must be served over HTTP, for the gate to pass on, and its SuperNodes must check
    who signed an app.
    """
    problem = ""
    try:
        from flwr.superlink.routers.fleet.router import router
        from flwr.supernode.start_client_internal import start_client_internal

        from unalike.cross_silo.gate import PATHS

        if not {getattr(route, "path", "") for route in router.routes} >= PATHS:
            problem = "its Fleet API is not the one that the gate knows"
        if "trusted_entities" not in inspect.signature(start_client_internal).parameters:
            problem = "its SuperNodes run any app, whoever signed it"
    except ImportError as error:
        problem = str(error)
    if problem:
        try:
            version = metadata.version("flwr")
        except metadata.PackageNotFoundError:
            version = "none"
        raise UserError(
            f"a federation at {address} could not be closed to strangers with the Flower that is "
            f"installed here ({version}: {problem}): pip install 'flwr>=1.41,<1.43'"
        )


def build_app(to: Path) -> bytes:
    """The app as Flower carries it (a FAB): the same bytes each time."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(to / "app")


def sign(to: Path) -> None:
    """Sign the app, for SuperNodes that are started with --trusted-entities.

    certificates/trusted.yaml has the public key. The private one is kept nowhere: whoever takes
    over the server cannot sign another app. The signature, in certificates/app.json, is what
    Flower's SuperLink would say of an app from its hub; the gate says it of this one.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

    key = ed25519.Ed25519PrivateKey.generate()
    name = f"fpk_{uuid.uuid4()}"
    now = int(time.time())
    digest = hashlib.sha256(build_app(to))
    signature = key.sign(create_message_to_sign(digest.digest(), now))
    verification = {"signature": base64.urlsafe_b64encode(signature).decode(), "signed_at": now}
    # "valid_license" tells SuperNodes that apps come with signatures here; Flower's SuperLink says
    # it of every app with signatures
    verifications = {name: json.dumps(verification), "valid_license": "Valid"}
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    certificates = to / "certificates"
    (certificates / "trusted.yaml").write_text(yaml.safe_dump({name: public.decode()}))
    (certificates / "app.json").write_text(
        json.dumps({"sha256": digest.hexdigest(), "verifications": verifications}, indent=1)
    )


def check_app(to: Path) -> None:
    """Raise where the app is not the one that was signed: no SuperNode would run it."""
    path = to / "certificates" / "app.json"
    signed = json.loads(path.read_text())["sha256"] if path.exists() else None
    if signed != hashlib.sha256(build_app(to)).hexdigest():
        raise UserError(
            f"the app in {to / 'app'} is not the one that was signed when it was deployed (it was "
            "changed, or deployed by another version of unalike or Flower), so no client would run "
            "it: deploy the federation again and send each client the new ca.pem and trusted.yaml"
        )


def supernode(address: str, files: list[str], client: str, port: int) -> list[str]:
    """The command of a SuperNode; `files` are ca.pem, trusted.yaml and its private key."""
    ca, trusted, key = files
    return [
        "flower-supernode",
        "--superlink",
        address,
        "--root-certificates",
        ca,
        "--trusted-entities",
        trusted,
        "--auth-supernode-private-key",
        key,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--node-config",
        f'client="{client}"',
    ]


def commands(place: Path) -> dict[str, list[str]]:
    """Commands of a deployment, by name: "superlink", and those of clients built here."""
    return json.loads((place / "commands.json").read_text())


def readme(to: Path, known: dict[str, list[str]], ids: list[str], address: str) -> str:
    """README.md of a deployment: the exact commands, in order."""
    quiet = "FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"
    home = f"export FLWR_HOME={to / 'flwr'} {quiet}"
    keys, certificates = to / "keys", to / "certificates"
    names = ids or ["NAME"]
    register = [f"flwr supernode register {keys / id}.pub unalike --name {id}" for id in names]
    nodes = [shlex.join(known[id]) for id in ids]
    exchange = ""
    if not ids:
        files = ["ca.pem", "trusted.yaml", "NAME"]
        nodes = [shlex.join(supernode(address, files, "/path/to/client.yaml", 9094))]
        exchange = (
            "Each organisation makes a key, `ssh-keygen -t ecdsa -b 384 -N '' -f NAME`, keeps NAME "
            f"and sends you NAME.pub for {keys}; you send it {certificates / 'ca.pem'} and "
            f"{certificates / 'trusted.yaml'}. NAME is the `id` in its client.yaml. Use a way on "
            "which nobody can exchange these files.\n\n"
        )
    run = (
        f"unalike run {to / 'scenario.yaml'} --engine flower --set engine.app={to} "
        f"--set engine.clients={len(ids) or 'COUNT'}"
    )
    return (
        f"# A Flower federation at {address}\n\nOn the server:\n"
        f"{_block(home, shlex.join(known['superlink']))}\n"
        "This starts the SuperLink, on loopback, and the gate in front of it, which lets "
        "SuperNodes with a known key through and nobody else. Apps are submitted and keys "
        "registered on this machine only: whoever may log in here can do both.\n\n"
        f"{exchange}"
        f"The key {keys}/NAME.pub and no other is the client NAME. For a new key, put it there "
        "instead of the old one, and register it.\n\n"
        f"The server's certificate holds a year. `unalike deploy flower --renew {to}` writes a new "
        "one; clients keep their ca.pem. It is signed with certificates/ca.key: whoever has that "
        "file can pass for this server.\n\n"
        f"Then, in another shell there, register who may take part:\n{_block(home, *register)}\n"
        f"At each client:\n{_block(f'export {quiet}', *nodes)}\n"
        f"When they are online, on the server:\n{_block(home, run)}"
    )


def _block(*lines: str) -> str:
    return "```\n" + "\n".join(lines) + "\n```\n"


def certify(to: Path, host: str, keep_authority: bool) -> None:
    """A certificate authority of this federation's own, and the SuperLink's certificate.

    Args:
        keep_authority: whether ca.key is written, for `renew`.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority = ec.generate_private_key(ec.SECP384R1())
    signs = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    public = authority.public_key()
    builder = _certificate_builder("unalike", public, authority, AUTHORITY_DAYS)
    root = builder.add_extension(signs, True).sign(authority, hashes.SHA384())
    (to / "ca.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    if keep_authority:
        write_secret(to / "ca.key", _private_bytes(authority))
    _certify_server(to, host, authority, SERVER_DAYS)


def renew(place: Path) -> str:
    """Give a deployment's server a new key and certificate, signed by the same authority.

    Clients keep their ca.pem. The gate reads both files when it is started.

    Args:
        place: the deployment's folder.
    Returns: a sentence that says until when they hold.
    Raises: UserError where there is no deployment, no authority's key, or its certificate ended.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    certificates = place / "certificates"
    if not (certificates / "server.pem").exists():
        raise UserError(f"{place} is no deployment: it has no certificates/server.pem")
    if not (certificates / "ca.key").exists():
        raise UserError(
            f"{place} was deployed without the authority's key (certificates/ca.key), so nothing "
            "can be signed: deploy the federation again and send each client the new ca.pem and "
            "trusted.yaml"
        )
    check_certificate(certificates / "ca.pem")
    key = serialization.load_pem_private_key((certificates / "ca.key").read_bytes(), None)
    root = x509.load_pem_x509_certificate((certificates / "ca.pem").read_bytes())
    if root.public_key() != key.public_key():
        raise UserError(f"{certificates / 'ca.key'} is not the key of ca.pem beside it")
    host, _, _ = read_certificate(certificates / "server.pem")
    now = datetime.datetime.now(datetime.UTC)
    _certify_server(
        certificates, host, key, min(SERVER_DAYS, (root.not_valid_after_utc - now).days)
    )
    _, _, end = read_certificate(certificates / "server.pem")
    return (
        f"{certificates / 'server.pem'} holds until {format_day(end)}, by the ca.pem that clients "
        "have. Start the gate again to use it."
    )


def _certify_server(to: Path, host: str, authority: Any, days: int) -> None:
    """Write server.key and server.pem, whole; `host` is the name that clients know it by."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = ec.generate_private_key(ec.SECP384R1())
    try:
        name: x509.GeneralName = x509.IPAddress(ip_address(host))
    except ValueError:
        name = x509.DNSName(host)
    inner = x509.IPAddress(ip_address("127.0.0.1"))  # where the SuperLink is, behind the gate
    known = x509.SubjectAlternativeName([name] if name == inner else [name, inner])
    builder = _certificate_builder(host, own.public_key(), authority, days)
    server = builder.add_extension(known, False).sign(authority, hashes.SHA384())
    fresh = to / "server.key.new"
    fresh.unlink(missing_ok=True)
    write_secret(fresh, _private_bytes(own))
    fresh.replace(to / "server.key")
    write_whole(to / "server.pem", server.public_bytes(serialization.Encoding.PEM))


def _certificate_builder(subject: str, public: Any, authority: Any, days: int) -> Any:
    """A certificate to be signed; the authority's own if `public` is its key."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def common_name(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    issuer = authority.public_key()
    is_authority = public == issuer
    return (
        x509.CertificateBuilder()
        .subject_name(common_name(subject))
        .issuer_name(common_name("unalike"))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), False)
    )


def _private_bytes(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def make_key(path: Path) -> None:
    """A SuperNode's key pair: PATH is the private one, PATH.pub the public one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = ec.generate_private_key(ec.SECP384R1())
    write_secret(
        path,
        own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
    )
    path.with_name(f"{path.name}.pub").write_bytes(
        own.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(data)


def free_ports(count: int) -> list[int]:
    """Free ports on loopback, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
