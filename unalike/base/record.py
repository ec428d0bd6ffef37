"""The form of what a run writes down: its config, its results and its events.

A run's folder may come from somebody else. Readers check each file once, so that whoever reads on
finds mappings and lists where it looks for them. Values are not judged: a number may be missing,
and names that nobody knows may stand beside the others.
"""

from collections.abc import Callable, Iterable
from typing import Any

# Called with a value and its path in the file. Returns what is wrong with it, None if nothing is.
Form = Callable[[Any, str], str | None]


def describe_kind(value: Any) -> str:
    """Return what kind of value this is, in words.

    >>> describe_kind([1, 2]), describe_kind(None)
    ('a list', 'nothing')
    """
    words = {
        "dict": "named values",
        "list": "a list",
        "str": "text",
        "bool": "true or false",
        "int": "a number",
        "float": "a number",
        "NoneType": "nothing",
    }
    return words.get(type(value).__name__, f"a {type(value).__name__}")


def kind(wanted: str, *types: type) -> Form:
    """Return the form of a value of these types."""

    def check(value: Any, path: str) -> str | None:
        if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
            return None
        return _expected(wanted, value, path)

    return check


def mapping(*forms: Form) -> Form:
    """Return the form of named values, which all have each of these forms."""

    def check(value: Any, path: str) -> str | None:
        if not isinstance(value, dict):
            return _expected("named values", value, path)
        return _check_items(value.items(), forms, path) if forms else None

    return check


def listing(*forms: Form) -> Form:
    """Return the form of a list whose items all have each of these forms."""

    def check(value: Any, path: str) -> str | None:
        if not isinstance(value, list):
            return _expected("a list", value, path)
        return _check_items(enumerate(value), forms, path) if forms else None

    return check


def either(*forms: Form) -> Form:
    """Return the form of a value that has one of several."""

    def check(value: Any, path: str) -> str | None:
        problems = [form(value, path) for form in forms]
        return problems[0] if all(problems) else None

    return check


def fields(**forms: Form) -> Form:
    """Return the form of named values, of which these may be missing or null, or have a form."""

    def check(value: Any, path: str) -> str | None:
        if not isinstance(value, dict):
            return _expected("named values", value, path)
        for name, form in forms.items():
            item = value.get(name)
            if item is not None and form(item, ""):
                return form(item, _join(path, name))
        return None

    return check


def required(**forms: Form) -> Form:
    """Return the form of named values, of which all of these must be there."""
    among = fields(**forms)

    def check(value: Any, path: str) -> str | None:
        problem = among(value, path)
        if problem is None:
            missing = [name for name in forms if value.get(name) is None]
            problem = f"{path or 'it'} should have {missing[0]}" if missing else None
        return problem

    return check


def plain(value: Any, path: str) -> str | None:
    """The form of what JSON can hold, with text for names: no dates, sets or bytes of YAML."""
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                return _expected("named by text", name, _join(path, name))
        return _check_items(value.items(), (plain,), path)
    if isinstance(value, list):
        return _check_items(enumerate(value), (plain,), path)
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{path or 'it'} should be a number of at most 64 bits"
    if value is None or isinstance(value, str | int | float):
        return None
    return _expected("a number or text", value, path)


def _check_items(
    items: Iterable[tuple[object, Any]], forms: tuple[Form, ...], path: str
) -> str | None:
    """Return what is wrong with the first item that does not have the forms.

    Its path is only built where something is wrong: there may be many items.
    """
    for name, item in items:
        for form in forms:
            if form(item, ""):
                return form(item, _join(path, name))
    return None


def _expected(wanted: str, value: Any, path: str) -> str:
    return f"{path or 'it'} should be {wanted}, got {describe_kind(value)}"


def _join(path: str, name: object) -> str:
    short = str(name)[:80]
    return f"{path}.{short}" if path else short


FLAG = kind("true or false", bool)
NUMBER = kind("a number", int, float)
WHOLE = kind("a whole number", int)
TEXT = kind("text", str)
NAMES = listing(TEXT)
SETTING = either(mapping(), TEXT)  # a name, or a name with options
GROUPS = mapping(listing(NAMES))  # groups of clients by what they share
COUNTS = listing(NUMBER)  # of samples, by label
TRAFFIC = fields(up=NUMBER, down=NUMBER)

CONFIG = fields(
    name=TEXT,
    algorithm=SETTING,
    training=fields(rounds=NUMBER),
    federation=mapping(),
    clients=listing(mapping()),
    seed=NUMBER,
    track=either(NAMES, TEXT),
)
CLIENT_RESULTS = fields(
    modalities=listing(),
    metrics=mapping(),
    bytes=TRAFFIC,
    judged=mapping(),
    kept=TEXT,
    hash=TEXT,
)
RESULTS = fields(
    clients=mapping(mapping(), CLIENT_RESULTS),
    scenario=TEXT,
    algorithm=TEXT,
    seed=NUMBER,
    metrics=mapping(),
    federation_metrics=NAMES,
    bytes=TRAFFIC,
    failures=listing(mapping()),
    by_label=mapping(mapping()),
    sharing=GROUPS,
    rounds=NUMBER,
)
ANY_EVENT = fields(event=TEXT, time=NUMBER, round=NUMBER, client=TEXT)
EVENTS = {
    "start": fields(clients=mapping(mapping()), config=CONFIG, rounds=NUMBER),
    "resume": fields(clients=mapping(mapping()), rounds=NUMBER),
    "evaluation": fields(values=mapping(either(mapping(), NUMBER)), figures=mapping()),
    "note": fields(values=mapping()),
    "round": fields(bytes=TRAFFIC),
    "sharing": fields(groups=GROUPS, clients=NAMES),
    "extended": fields(rounds=NUMBER),
    "labels": fields(
        labels=listing(),
        counts=mapping(COUNTS),
        together=listing(COUNTS),
        pairs=mapping(listing(COUNTS)),
    ),
}


def find_problem_in_config(config: Any) -> str | None:
    """Return what is wrong with the form of a run's config, None if nothing is."""
    return CONFIG(config, "") or plain(config, "")


def find_problem_in_results(results: Any) -> str | None:
    """Return what is wrong with the form of a run's results, None if nothing is."""
    if isinstance(results, dict) and not isinstance(results.get("clients"), dict):
        return "it should name the clients and give each its results, as a finished run does"
    return RESULTS(results, "")


def find_problem_in_event(event: Any) -> str | None:
    """Return what is wrong with the form of an event, None if nothing is."""
    problem = ANY_EVENT(event, "")
    if problem is None and event["event"] in EVENTS:
        problem = EVENTS[event["event"]](event, "")
    if problem is None and event["event"] == "labels":
        problem = _find_wrong_counts(event)
    return problem


def _find_wrong_counts(event: dict[str, Any]) -> str | None:
    """Return which numbers of samples are not one for each label, None if all are."""
    count = len(event.get("labels") or [])
    rows = dict(event.get("counts") or {})
    for name, matrix in {"together": event.get("together"), **(event.get("pairs") or {})}.items():
        if matrix and len(matrix) != count:
            return f"{name} should have {count} rows, one for each label, got {len(matrix)}"
        rows |= {f"{name}.{place}": row for place, row in enumerate(matrix or [])}
    for name, row in rows.items():
        if len(row) != count:
            return f"{name} should have {count} numbers, one for each label, got {len(row)}"
    return None
