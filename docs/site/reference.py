"""The API reference as Markdown, from docstrings, and that of the command from its --help."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import docstrings
import typer

# Page: title, what it is for, and its names; a kind takes all listed methods, tasks or losses.
PAGES: dict[str, tuple[str, str, str]] = {
    "running": (
        "Runs and results",
        "Start a run, go on with one, compare several, take the models home.",
        "run resume Result ClientResult show compare suggest Advice export rebuild trained "
        "scenario LoadedScenario",
    ),
    "clients": (
        "Clients, data and budget",
        "Who takes part, with which data, and how much each trains.",
        "Client LazyClients samples Samples preprocess partition load_dataset Table Training "
        "FederationConfig Privacy",
    ),
    "tasks": ("Tasks", "What a client learns: loss, metrics, head.", "kind:task Task Meter"),
    "methods": ("Methods", "Each with its fields; their defaults are the papers'.", "kind:method"),
    "losses": (
        "Losses",
        "Functions on tensors, useful outside federated learning: `unalike.losses`.",
        "kind:loss",
    ),
    "writing": (
        "Writing a method",
        "What a method of your own derives from and calls.",
        "Algorithm ClientProgram Federation operation query sends Shape graph_safe Model "
        "ClientInfo Replies Averaging AveragingProgram SubmodelMethod SubmodelProgram "
        "PromptTuning PromptTuningProgram PublicTraining train_on_public predict_public "
        "public_batch stream scope",
    ),
    "errors": (
        "Errors and failures",
        "What is raised, and what is reported of a client that failed.",
        "UserError Problems RunError QuorumError Refusal Failure",
    ),
}


def render() -> tuple[str, dict[str, str]]:
    """Return the overview, and the pages it leads to by file name, in Markdown."""
    public = docstrings.public_names()
    pages = {}
    overview = ["## [The command](reference/command.md)", "", "Every command with its options."]
    for page, (title, purpose, _) in PAGES.items():
        things = {name: public[name] for name in names_of(page, public)}
        pages[f"{page}.md"] = _page(title, purpose, things)
        overview += ["", f"## [{title}](reference/{page}.md)", "", purpose, ""]
        overview += ["| name | |", "|---|---|"]
        for name, thing in things.items():
            link = f"[`{_short(name)}`](reference/{page}.md#{anchor(name)})"
            overview.append(f"| {link} | {_cell(_first_sentence(thing))} |")
    pages["command.md"] = render_command()
    return "\n".join(overview) + "\n", pages


def names_of(page: str, public: dict[str, Any]) -> list[str]:
    """Return the full names on a page, in its order."""
    names = []
    for entry in PAGES[page][2].split():
        if entry.startswith("kind:"):
            names += [name for name, thing in public.items() if _kind(name, thing) == entry[5:]]
        else:
            names.append(f"unalike.{entry}")
    return names


def _kind(name: str, thing: Any) -> str:
    """Return "loss", "task" or "method" for what is listed by kind, "" for the rest."""
    if name.startswith("unalike.losses."):
        return "loss"
    module = getattr(thing, "__module__", "")
    if module.startswith("unalike.algorithms."):
        return "method"
    if module.startswith("unalike.tasks.") and module != "unalike.tasks.task":
        return "task"
    return ""


def anchor(name: str) -> str:
    """Return the id of a name's heading.

    >>> anchor("unalike.FedAvg")
    'fedavg'
    """
    return _short(name).lower()


def _short(name: str) -> str:
    return name.rsplit(".", 1)[1]


def _page(title: str, purpose: str, things: dict[str, Any]) -> str:
    parts = [f"# {title}", purpose]
    for name, thing in things.items():
        parts += [f"## `{_short(name)}` {{ #{anchor(name)} }}", *_entry(name, thing)]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, thing: Any) -> Iterator[str]:
    doc = docstrings.parse(thing.__doc__)
    yield f"```python\n{_signature(name, thing)}\n```"
    if _kind(name, thing) == "method":
        yield _about_file(thing)
    yield as_markdown(doc.text)
    described = docstrings.descriptions(thing)
    names = docstrings.parameters(thing)
    arguments = {n: described[n] + _choices(thing, n) for n in names if n in described}
    attributes = {n: text for n, text in doc.arguments.items() if n not in arguments}
    yield from _table("argument", arguments)
    yield from _table("attribute", attributes)
    for section, text in doc.sections.items():
        yield f"**{section}**: {link_addresses(text)}"
    if doc.example:
        yield f"```python\n{doc.example}\n```"
    if inspect.isclass(thing) and _kind(name, thing) != "method":
        yield from _members(thing)


def _about_file(method: Any) -> str:
    """The top of a method's file: its paper, and what is left out of it."""
    module = inspect.getmodule(method)
    return as_markdown(inspect.cleandoc(module.__doc__ or "") if module else "")


def _members(kind: type) -> Iterator[str]:
    """Public methods and properties that the class itself documents."""
    for name, member in vars(kind).items():
        documented = inspect.unwrap(
            getattr(member, "fget", None) or getattr(member, "__func__", member)
        )
        if name.startswith("_") or not inspect.isfunction(documented) or not documented.__doc__:
            continue
        doc = docstrings.parse(documented.__doc__)
        is_property = isinstance(member, property)
        shown = f"`.{name}`" if is_property else f"`.{name}{_arguments(documented)}`"
        text = [f"**{shown}**", "", doc.text]
        arguments = [f"- `{argument}`: {said}" for argument, said in doc.arguments.items()]
        text += ["", *arguments] if arguments else []
        text += [f"\n{section}: {said}" for section, said in doc.sections.items()]
        yield as_markdown("\n".join(text))


def _signature(name: str, thing: Any) -> str:
    """The call, one argument a line where it is long."""
    arguments = _argument_list(thing)
    if inspect.isclass(thing) and not arguments:
        return f"class {name}"
    call = f"{name}{_arguments(thing)}"
    if len(call) <= 88:
        return call
    return f"{name}(\n    " + ",\n    ".join(arguments) + ",\n)"


def _arguments(thing: Any) -> str:
    return f"({', '.join(_argument_list(thing))})"


def _argument_list(thing: Any) -> list[str]:
    """Arguments with their defaults; types are left to the editor."""
    parts = []
    starred = False
    for parameter in docstrings.parameters(thing).values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        text = stars.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            text += f"={_default(parameter.default)}"
        parts.append(text)
    return parts


def _default(value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    text = repr(value)
    return "..." if " object at 0x" in text or "factory" in text or len(text) > 60 else text


def _choices(thing: Any, name: str) -> str:
    """What an argument may be, where its type lists it; said after its description."""
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    kind = next((field.type for field in fields if field.name == name), None)
    listed = get_args(kind) if get_origin(kind) is Literal else ()
    return f" One of {', '.join(map(repr, listed))}." if listed else ""


def _table(what: str, rows: dict[str, str]) -> Iterator[str]:
    if rows:
        lines = [f"| {what} | |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(text)} |" for name, text in rows.items()]
        yield "\n".join(lines)


def _cell(text: str) -> str:
    return link_addresses(text).replace("|", "\\|")


def _first_sentence(thing: Any) -> str:
    return docstrings.parse(thing.__doc__).text.split("\n\n")[0].replace("\n", " ")


def as_markdown(text: str) -> str:
    """A docstring's text as Markdown: indented blocks become code, addresses links.

    >>> as_markdown("the product <a, b>:\\n    1 + 1")
    'the product &lt;a, b>:\\n\\n    1 + 1'
    """
    text = re.sub(r"(?m)^(?!    |- |  )(.+)\n(?=    \S)", r"\1\n\n", text)
    escaped = [
        line if line.startswith("    ") else line.replace("<", "&lt;") for line in text.split("\n")
    ]
    return link_addresses("\n".join(escaped))


def link_addresses(text: str) -> str:
    """Make bare addresses links.

    >>> link_addresses("see https://arxiv.org/abs/1.")
    'see <https://arxiv.org/abs/1>.'
    """
    return re.sub(r"(?<![<(\[])(https?://[^\s,;)>]*[^\s,;)>.])", r"<\1>", text)


def render_command() -> str:
    """Every command of `unalike` with its options."""
    import unalike.cli.commands as commands

    group: Any = typer.main.get_command(commands.app)
    parts = ["# The command", "What `unalike COMMAND --help` says, on one page."]
    for name, command in group.commands.items():
        if command.hidden:
            continue
        context = command.make_context(name, [], resilient_parsing=True)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(argument.make_metavar(context) for argument in arguments)
        parts.append(f"## `unalike {name}` {{ #{name} }}")
        parts.append(f"```\nunalike {name} {usage} [OPTIONS]\n```")
        parts.append(inspect.cleandoc(command.help or ""))
        rows = ["| option | |", "|---|---|"]
        for option in command.params:
            if option.param_type_name == "option" and option.name != "help":
                flags = ", ".join([*option.opts, *option.secondary_opts])
                rows.append(f"| `{flags}` | {_cell(option.help or '')} |")
        if len(rows) > 2:
            parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"
