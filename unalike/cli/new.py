"""Writes commented templates that run: a method, a scenario, a client."""

from importlib import resources
from pathlib import Path

from unalike.base.errors import UserError, unknown_name

# Files of each kind: from which template, under which name; then what can be done with them.
TEMPLATES: dict[str, tuple[dict[str, str], list[str]]] = {
    "method": (
        {"method.py": "{name}.py"},
        ["unalike run digits --algorithm {name}:{Name} --set rounds=5"],
    ),
    "scenario": (
        {"scenario.yaml": "{name}.yaml"},
        ["unalike check {name}.yaml", "unalike run {name}.yaml"],
    ),
    "client": (
        {"client.yaml": "{name}.yaml", "client.py": "{name}_site.py"},
        ["unalike audit {name}.yaml --algorithm fedavg --set rounds=5"],
    ),
}


def write_template(kind: str, name: str, folder: Path | None = None) -> list[str]:
    """Copy the template of a kind, under a name of the user's.

    Args:
        kind: "method", "scenario" or "client".
        name: of the new thing; a Python name, as a module is called after it.
        folder: where to; by default the current folder.
    Returns: lines that say what was written and how to try it.
    Raises: UserError for an unknown kind, a name that is none, or a file that is there already.
    """
    if kind not in TEMPLATES:
        raise UserError(unknown_name("template", kind, TEMPLATES))
    if not name.isidentifier() or not name.isascii():
        raise UserError(
            f"{name!r} cannot be the name of a Python module: use letters, digits and _, and begin "
            "with a letter"
        )
    words = {"name": name, "Name": "".join(word.capitalize() for word in name.split("_"))}
    files, commands = TEMPLATES[kind]
    folder = folder or Path()
    targets = {source: folder / target.format(**words) for source, target in files.items()}
    for target in targets.values():
        if target.exists():
            raise UserError(f"{target} is there already: choose another name, or move it away")
    lines = []
    for source, target in targets.items():
        text = resources.files("unalike.cli").joinpath("templates", source).read_text("utf-8")
        target.write_text(text.replace("own_name", words["name"]).replace("OwnName", words["Name"]))
        lines.append(f"wrote {target}")
    return lines + [f"try   {command.format(**words)}" for command in commands]
