"""Deploys a FLARE federation: startup kits, each with what its holder allows, and a README.

Starts none of it. The certificate authority is kept, so that sites can be added and certificates
renewed without new kits for everybody.
"""

import ipaddress
import json
import re
import shutil
import tempfile
from pathlib import Path

import yaml

from unalike.base.errors import UserError
from unalike.cross_silo.flare_kits import ADMIN, protect_keys, provision, restrict_kit
from unalike.scenarios.schema import client_ids

AUTHORITY_DAYS = 3650  # the root certificate, which every kit has, holds so long
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
RESERVED = ("server", "admin", "localhost")


def prepare(
    scenario: str, out: Path, address: str, sites: list[str], settings: list[str] | None = None
) -> list[str]:
    """Write startup kits of a server, an administrator and sites.

    Args:
        scenario: a shipped scenario or a file. Its own clients, if it has some, are sites whose
            client.yaml is written, too.
        out: the folder to write, new or empty.
        address: HOST:PORT at which sites reach the server.
        sites: names of further sites.
        settings: `key=value` changes of the scenario.
    Returns: paths of files to read.
    """
    from unalike.scenarios import load

    out = out.resolve()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; choose another folder for the deployment")
    loaded, method = load(scenario, None, settings, engine="flare")
    config = loaded.model_dump(mode="json") | {
        "algorithm": {"name": loaded.algorithm.name, **vars(method)}
    }
    simulated = client_ids(config)
    names = [*simulated, *sites]
    if not names:
        raise UserError("say which sites take part, such as --clients st-mary,st-john")
    _check_names(names)
    host, port = _split_address(address)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scenario.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    (out / "federation.json").write_text(json.dumps({"host": host, "port": port}))
    issue(out, ["server", "admin", *names])
    for id in simulated:
        file = out / "clients" / id / "client.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"scenario": str(out / "scenario.yaml"), "client": id}))
    (out / "README.md").write_text(readme(out, names, simulated, address))
    return [str(out / "README.md"), str(out / "server"), str(out / "sites")]


def renew(place: Path, sites: list[str]) -> str:
    """Write new kits of a deployment: of these sites, old or new; of everybody if none is named.

    Returns: what was done, as a sentence.
    """
    place = place.resolve()
    if not (place / "federation.json").exists():
        raise UserError(f"{place} is no deployment of FLARE: it has no federation.json")
    if not (place / "authority" / "cert.json").exists():
        raise UserError(
            f"{place} cannot issue certificates without the authority's key, "
            "authority/cert.json: put it back, or deploy again"
        )
    known = sorted(path.name for path in (place / "sites").iterdir())
    _check_names(sites or known)
    names = sites or ["server", "admin", *known]
    issue(place, names)
    return (
        f"new startup kits in {place} for {', '.join(names)}, by the same authority: the kits of "
        "all others hold as before"
    )


def issue(place: Path, names: list[str]) -> None:
    """Make new keys, certificates and startup kits, signed by the deployment's authority.

    Args:
        place: the deployment; its authority is made where it has none.
        names: "server", "admin", or those of sites.
    """
    about = json.loads((place / "federation.json").read_text())
    host = about["host"]
    authority = place / "authority" / "cert.json"
    sites = [name for name in names if name not in RESERVED]
    with tempfile.TemporaryDirectory(dir=place) as folder:
        made = Path(folder)
        root = json.loads(authority.read_text()) if authority.exists() else None
        # FLARE has no kit for nobody: one site more, which is thrown away
        state = provision(
            made,
            sites or ["unused"],
            server=host,
            port=about["port"],
            root_days=AUTHORITY_DAYS,
            root=root,
        )
        if root is None:
            authority.parent.mkdir(mode=0o700)
            authority.touch(mode=0o600)
            authority.write_text(json.dumps(state))
        kits = made / "unalike" / "prod_00"
        for name in names:
            kit = kits / {"server": host, "admin": ADMIN}.get(name, name)
            target = place / name if name in RESERVED else place / "sites" / name
            protect_keys(kit)
            if name != "admin":
                restrict_kit(kit)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(kit, target)


def _check_names(names: list[str]) -> None:
    for name in names:
        if not SITE_NAME.fullmatch(name) or name in RESERVED:
            raise UserError(
                f'"{name}" cannot name a site: use letters, digits, "-", "_" and ".", beginning '
                f"with a letter or digit; {', '.join(RESERVED)} are taken"
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{', '.join(twice)} is named twice: each site needs a name of its own")


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"the server's address is HOST:PORT, as sites reach it, got {address!r}")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, int(port)
    hint = "localhost" if ipaddress.ip_address(host).is_loopback else "one in DNS or /etc/hosts"
    raise UserError(f"FLARE's server is known by a name, {hint}, not by the address {host}")


def readme(place: Path, names: list[str], simulated: list[str], address: str) -> str:
    """README.md of a deployment: the exact commands, in order."""
    joins = [
        f"unalike join {place}/sites/{id} {place}/clients/{id}/client.yaml" for id in simulated
    ]
    run = (
        f"unalike run {place}/scenario.yaml --engine flare --set engine.kit={place}/admin "
        f"--set engine.clients={len(names)}"
    )
    server = _block(f"unalike join {place}/server")
    return (
        f"# A FLARE federation at {address}\n\n"
        f"On the server, which sites reach at {address}:\n{server}\n"
        f"Each site gets its own folder of {place}/sites, by a way on which nobody else can read "
        "it: it has the site's private key. Its name is the `id` in the site's client.yaml "
        "(`unalike new client NAME` writes a template). At each site:\n"
        f"{_block('unalike join NAME client.yaml --check', 'unalike join NAME client.yaml')}\n"
        + (f"On this machine:\n{_block(*joins)}\n" if joins else "")
        + f"When they are connected, in another shell on the server:\n{_block(run)}\n"
        f"`{place}/admin` may start and end runs: keep it on the server.\n\n"
        f"Certificates of kits hold 360 days, the authority ten years. `unalike deploy flare "
        f"--renew {place} --clients NAME` writes a new kit for a site, also for a new one; without "
        "--clients for the server, the administrator and all sites. Others keep the kit that they "
        f"have. It is signed with {place}/authority/cert.json: whoever has that file can pass for "
        "anybody. You may keep it elsewhere until you need it.\n"
    )


def _block(*lines: str) -> str:
    return "```\n" + "\n".join(lines) + "\n```\n"
