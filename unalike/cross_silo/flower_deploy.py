"""What a Flower federation needs on disk: the app, certificates, keys, configuration, and the commands that start it. Runs none of it."""

import datetime
import json
import shlex
import socket
from ipaddress import ip_address
from pathlib import Path

import yaml

from unalike.base.errors import UserError, unknown
from unalike.engines.remote import members

APP = """[project]
name = "unalike-app"
version = "1.0.0"
description = "The server and the clients of a run of unalike"
dependencies = ["flwr>=1.40"]

[tool.flwr.app]
publisher = "unalike"

[tool.flwr.app.components]
serverapp = "unalike_app:server"
clientapp = "unalike_app:client"

[tool.flwr.app.config]
folder = ""
clients = 1
timeout = 600.0
"""
CODE = '''"""The app that Flower carries to everyone: what it does is in the package unalike, which everyone has installed."""

from unalike.cross_silo.flower import client, server

__all__ = ["client", "server"]
'''


def prepare(
    engine: str, scenario: str, out: Path, address: str, settings: list[str] | None = None
) -> list[str]:
    """Deploy a scenario's federation, with a copy of the scenario for the clients that are played."""
    from unalike.scenarios import load

    if engine != "flower":
        raise UserError(
            unknown("engine to deploy", engine, ["flower"])
            + " For FLARE, its administrator provisions startup kits."
        )
    made, method = load(scenario, None, settings, engine=engine)
    config = made.model_dump(mode="json") | {
        "algorithm": {"name": made.algorithm.name, **vars(method)}
    }
    told = deploy(out, members(config), out.resolve() / "scenario.yaml", address)
    (out / "scenario.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return told


def deploy(to: Path, ids: list[str], config: Path | None, address: str) -> list[str]:
    """Write the folder; returns what there is to read. `ids` are clients played on this machine, from the scenario in `config`; where
    there are none, organisations bring their own key and client.yaml."""
    to = to.resolve()
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to} is not empty; choose another folder for the deployment")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"the SuperLink's address is HOST:PORT, as clients reach it, got {address!r}"
        )
    for folder in ("app", "certificates", "keys", "flwr", "clients"):
        (to / folder).mkdir(parents=True, exist_ok=True)
    (to / "app" / "pyproject.toml").write_text(APP)
    (to / "app" / "unalike_app.py").write_text(CODE)
    certify(to / "certificates", host)
    ca = to / "certificates" / "ca.pem"
    (to / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "unalike"\n\n[superlink.unalike]\naddress = "{address}"\n'
        f'root-certificates = "{ca}"\n'
    )
    certificate, key = to / "certificates" / "server.pem", to / "certificates" / "server.key"
    listens = host if _loopback(host) else "0.0.0.0"
    told = {
        "superlink": [
            "flower-superlink",
            "--host",
            listens,
            "--port",
            port,
            "--ssl-ca-certfile",
            str(ca),
            "--ssl-certfile",
            str(certificate),
            "--ssl-keyfile",
            str(key),
            "--enable-supernode-auth",
            "--database",
            str(to / "superlink.db"),
            "--disable-runtime-dependency-installation",
        ]
    }
    for id, own in zip(ids, ports(len(ids)), strict=True):
        make_key(to / "keys" / id)
        file = to / "clients" / id / "client.yaml"
        file.parent.mkdir()
        file.write_text(json.dumps({"scenario": str(config), "client": id}))
        told[id] = supernode(address, str(ca), str(to / "keys" / id), str(file), own)
    (to / "commands.json").write_text(json.dumps(told, indent=1))
    (to / "README.md").write_text(readme(to, told, ids, address))
    return [str(to / "README.md"), str(to / "app"), str(to / "commands.json")]


def supernode(address: str, ca: str, key: str, file: str, port: int) -> list[str]:
    return [
        "flower-supernode",
        "--superlink",
        address,
        "--root-certificates",
        ca,
        "--auth-supernode-private-key",
        key,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--node-config",
        f'client="{file}"',
    ]


def commands(place: Path) -> dict[str, list[str]]:
    return json.loads((place / "commands.json").read_text())


def readme(to: Path, told: dict[str, list[str]], ids: list[str], address: str) -> str:
    """The exact commands, in order."""
    home = f"export FLWR_HOME={to / 'flwr'} FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"
    block = lambda *lines: "```\n" + "\n".join(lines) + "\n```\n"
    register = [
        f"flwr supernode register {to / 'keys' / id}.pub unalike --name {id}"
        for id in ids or ["NAME"]
    ]
    nodes = [shlex.join(told[id]) for id in ids] or [
        shlex.join(supernode(address, "ca.pem", "NAME", "/path/to/client.yaml", 9094))
    ]
    own = (
        ""
        if ids
        else (
            "Each organisation makes a key, `ssh-keygen -t ecdsa -b 384 -N '' -f NAME`, keeps NAME and sends you NAME.pub "
            f"for {to / 'keys'}; you send it {to / 'certificates' / 'ca.pem'}. NAME is the `id` in its client.yaml.\n\n"
        )
    )
    run = f"unalike run {to / 'scenario.yaml'} --engine flower --set engine.app={to} --set engine.clients={len(ids) or 'COUNT'}"
    return (
        f"# A Flower federation at {address}\n\nOn the server:\n{block(home, shlex.join(told['superlink']))}\n{own}"
        f"Then, in another shell there, who may come:\n{block(home, *register)}\n"
        f"At each client:\n{block('export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1', *nodes)}\n"
        f"When they are there, on the server:\n{block(home, run)}"
    )


def certify(to: Path, host: str) -> None:
    """A certificate authority of this federation's own, and the SuperLink's certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    named = lambda name: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    authority, own = (
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP384R1()),
    )

    def signed(
        subject: str, public: ec.EllipticCurvePublicKey, ca: bool
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("unalike"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=365))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False
            )
        )

    try:
        name: x509.GeneralName = x509.IPAddress(ip_address(host))
    except ValueError:
        name = x509.DNSName(host)
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
    root = (
        signed("unalike", authority.public_key(), True)
        .add_extension(signs, True)
        .sign(authority, hashes.SHA384())
    )
    known = x509.SubjectAlternativeName([name])
    server = (
        signed(host, own.public_key(), False)
        .add_extension(known, False)
        .sign(authority, hashes.SHA384())
    )
    (to / "ca.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (to / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    secret(
        to / "server.key",
        own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def make_key(path: Path) -> None:
    """A SuperNode's key pair: PATH is the private one, PATH.pub the public one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = ec.generate_private_key(ec.SECP384R1())
    secret(
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


def secret(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)


def ports(count: int) -> list[int]:
    """Free ones on loopback."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    found = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return found


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
