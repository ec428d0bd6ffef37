"""The files in deploy/: they parse, and every command in them exists with its options.

No container is built and no unit started here: that needs a docker daemon and systemd.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from unalike.cli import app
from unalike.cross_silo import flower_deploy

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())


def read_unit(path):
    """Sections of a unit as {section: [(key, value)]}; a backslash continues a line."""
    sections = {}
    entries = None
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            entries = sections.setdefault(line.strip("[]"), [])
        else:
            key, equals, value = line.partition("=")
            assert equals, f"{path.name}: {line}"
            entries.append((key, value))
    return sections


def unit_command(name):
    """The words of ExecStart in a unit."""
    (command,) = [
        value
        for key, value in read_unit(DEPLOY / "systemd" / name)["Service"]
        if key == "ExecStart"
    ]
    return shlex.split(command)


def check_command(words):
    """Let typer parse `unalike WORDS` without running it; it raises on what it does not know."""
    group = typer.main.get_command(app)
    name, *rest = words
    assert name in group.commands, f"there is no command unalike {name}"
    group.commands[name].make_context(name, list(rest))


def documented_commands():
    """Lines that begin with `unalike` in code blocks of docs/operations.md and in comments."""
    page = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.S | re.M)
    text = "\n".join(blocks) + (DEPLOY / "compose.yaml").read_text()
    return re.findall(r"\bunalike ([a-z][a-z-]* [^\n|>&]*)", text)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_parses_and_starts_a_command_that_there_is(path):
    unit = read_unit(path)
    assert "Unit" in unit and dict(unit["Unit"])["Description"]
    if path.suffix == ".timer":
        assert path.with_suffix(".service") in UNITS and dict(unit["Install"])["WantedBy"]
        return
    service = dict(unit["Service"])
    assert service["UMask"] == "0077" and service["NoNewPrivileges"] == "yes"
    assert service["User"] == "unalike"
    found = re.findall(r"/opt/unalike/bin/unalike ([^;|>']*)", " ".join(unit_command(path.name)))
    for command in found:
        check_command(command.split())
    assert found or path.name.startswith("unalike-flower")


def test_the_units_of_flower_are_the_commands_that_deploy_writes():
    place = Path("/var/lib/unalike/federation")
    server = flower_deploy.superlink_command(place, "0.0.0.0:9092", 1)
    server[server.index("1")] = "${SUPERLINK_PORT}"
    server[0] = "/opt/unalike/bin/python"
    assert unit_command("unalike-flower-server.service") == server
    files = [f"/var/lib/unalike/{name}" for name in ("ca.pem", "trusted.yaml", "key")]
    client = "/var/lib/unalike/client.yaml"
    site = flower_deploy.supernode("${SUPERLINK}", files, client, 9094)
    site[0] = f"/opt/unalike/bin/{site[0]}"
    assert unit_command("unalike-flower-site.service") == site


def test_the_compose_file_has_a_server_and_three_sites_that_join():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert list(services) == ["server", "ada", "ben", "cleo"]
    for name, service in services.items():
        check_command(service["command"])
        assert service["build"]["dockerfile"] == "deploy/Dockerfile"
        assert ("ports" in service) is (name == "server")
        folders = {volume.split(":")[0].split("/")[1] for volume in service["volumes"]}
        assert folders == {name}, "a service sees only folders of its own"
        assert set(service["networks"]) <= compose["networks"].keys()


def test_the_image_runs_unalike_as_a_user_of_its_own():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    instructions = [line.split(maxsplit=1) for line in lines]
    known = {
        "FROM",
        "ARG",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "ENV",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "CMD",
    }
    assert {name for name, _ in instructions} <= known
    assert ["USER", "unalike"] in instructions and ["ENTRYPOINT", '["unalike"]'] in instructions
    assert ["ARG", "TORCH=cpu"] in instructions
    for name, words in instructions:
        if name == "COPY":
            *sources, _ = words.split()
            assert all((ROOT / source).exists() for source in sources)
    (extras,) = re.findall(r"EXTRAS=(\S+)", text)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras.split(","))
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)


def test_every_documented_command_is_one_that_there_is():
    commands = documented_commands()
    assert len(commands) > 3
    for command in commands:
        check_command(shlex.split(command))
