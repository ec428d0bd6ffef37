"""`unalike deploy flare`: startup kits from which a federation can be started, and renewed."""

import json
import re
import shlex
import ssl
import stat

import pytest
import typer
import yaml

from unalike.base.errors import UserError
from unalike.cli import app
from unalike.cross_silo import policy
from unalike.cross_silo.certificates import read_certificate

pytest.importorskip("nvflare", reason="the extra flare is not installed")


@pytest.fixture
def server_file(tmp_path):
    file = tmp_path / "hospitals.yaml"
    config = {
        "name": "hospitals",
        "algorithm": {"name": "fedavg"},
        "training": {"rounds": 2, "epochs": 1},
    }
    file.write_text(yaml.safe_dump(config))
    return str(file)


@pytest.fixture
def place(tmp_path, server_file):
    from unalike.cross_silo import flare_deploy

    flare_deploy.prepare(server_file, tmp_path / "made", "localhost:8002", ["north", "south"])
    return tmp_path / "made"


def handshake(server, client):
    """Mutual TLS in memory between two kits; raises where one refuses the other."""
    sides = []
    for kit, role, is_server in ((client, "client", False), (server, "server", True)):
        purpose = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(purpose)
        context.load_verify_locations(kit / "startup" / "rootCA.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(kit / "startup" / f"{role}.crt", kit / "startup" / f"{role}.key")
        sides.append(context)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        sides[0].wrap_bio(down, up, server_hostname="localhost"),
        sides[1].wrap_bio(up, down, server_side=True),
    ]
    finished = set()
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
                finished.add(end)
            except ssl.SSLWantReadError:
                continue
    return len(finished) == 2


def test_kits_have_keys_of_their_own_and_allow_our_job_only(place):
    kits = [place / "server", place / "sites" / "north", place / "sites" / "south"]
    keys = [
        path for path in place.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()
    ]
    assert sorted(path.relative_to(place).as_posix() for path in keys) == [
        "admin/startup/client.key",
        "authority/cert.json",
        "server/startup/server.key",
        "sites/north/startup/client.key",
        "sites/south/startup/client.key",
    ]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in keys)
    for kit in kits:
        assert policy.allows_no_more((kit / "local" / "authorization.json").read_text())
    assert handshake(place / "server", place / "sites" / "north")
    assert not list(place.glob("tmp*")), "nothing is left lying about"


def test_a_job_that_waits_for_sites_starts_when_they_are_there(place):
    """As FLARE provisions it, it is cancelled after ten looks, which come ever more rarely."""
    from unalike.cross_silo import flare_kits

    flare_kits.restrict_kit(place / "server")
    resources = json.loads((place / "server" / "local" / "resources.json").read_text())
    (scheduler,) = [c["args"] for c in resources["components"] if c["id"] == "job_scheduler"]
    assert scheduler["max_schedule_interval"] <= 2.0
    assert scheduler["max_schedule_count"] * scheduler["max_schedule_interval"] > 10 * 24 * 3600
    assert "/tmp/nvflare" not in json.dumps(resources), "where jobs of all servers would be mixed"


def test_a_site_is_added_and_another_renewed_by_the_same_authority(place):
    from unalike.cross_silo import flare_deploy

    south = place / "sites" / "south" / "startup"
    north = place / "sites" / "north" / "startup"
    before = {path: path.read_bytes() for path in (south / "client.crt", north / "client.crt")}
    done = flare_deploy.renew(place, ["east", "south"])
    assert "for east, south" in done
    assert (south / "client.crt").read_bytes() != before[south / "client.crt"]
    assert (north / "client.crt").read_bytes() == before[north / "client.crt"]
    for name in ("east", "north", "south"):
        kit = place / "sites" / name
        assert read_certificate(kit / "startup" / "client.crt")[0] == name
        assert handshake(place / "server", kit)
    flare_deploy.renew(place, [])
    assert (north / "client.crt").read_bytes() != before[north / "client.crt"]
    assert handshake(place / "server", place / "sites" / "east")


def test_a_kit_of_another_deployment_is_refused(place, tmp_path, server_file):
    from unalike.cross_silo import flare_deploy

    flare_deploy.prepare(server_file, tmp_path / "other", "localhost:8002", ["north"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(place / "server", tmp_path / "other" / "sites" / "north")


def test_the_readmes_commands_exist_and_name_what_was_written(place):
    text = (place / "README.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.S | re.M)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert [words[:2] for words in commands] == [["unalike", "join"]] * 3 + [["unalike", "run"]]
    group = typer.main.get_command(app)
    for _, name, *rest in commands:
        group.commands[name].make_context(name, list(rest))
    assert commands[0][2] == str(place / "server")
    assert f"engine.kit={place}/admin" in commands[-1] and "engine.clients=2" in commands[-1]


@pytest.mark.parametrize(
    "address, sites, problem",
    [
        ("8002", ["a"], "HOST:PORT"),
        ("127.0.0.1:8002", ["a"], "known by a name, localhost"),
        ("fl.example.org:8002", [], "which sites take part"),
        ("fl.example.org:8002", ["a", "a"], "named twice"),
        ("fl.example.org:8002", ["../a"], "cannot name a site"),
        ("fl.example.org:8002", ["admin"], "cannot name a site"),
    ],
)
def test_what_cannot_be_deployed_is_said(tmp_path, server_file, address, sites, problem):
    from unalike.cross_silo import flare_deploy

    with pytest.raises(UserError, match=problem):
        flare_deploy.prepare(server_file, tmp_path / "made", address, sites)
    assert not (tmp_path / "made").exists()


def test_what_cannot_be_renewed_is_said(place, tmp_path):
    from unalike.cross_silo import flare_deploy

    with pytest.raises(UserError, match="is no deployment of FLARE"):
        flare_deploy.renew(tmp_path, [])
    (place / "authority" / "cert.json").unlink()
    with pytest.raises(UserError, match="without the authority's key"):
        flare_deploy.renew(place, ["north"])
    with pytest.raises(UserError, match="is not empty"):
        flare_deploy.prepare("digits", place, "localhost:8002", [])


def test_clients_of_a_scenario_get_a_client_file(tmp_path):
    from unalike.cross_silo import flare_deploy

    flare_deploy.prepare("digits", tmp_path / "made", "localhost:8002", [])
    for id in ("ada", "fay"):
        file = yaml.safe_load((tmp_path / "made" / "clients" / id / "client.yaml").read_text())
        assert file["client"] == id and (tmp_path / "made" / "sites" / id).is_dir()
    text = (tmp_path / "made" / "README.md").read_text()
    assert f"unalike join {tmp_path}/made/sites/ada {tmp_path}/made/clients/ada/client.yaml" in text
