"""Mistakes a user can correct, reported as sentences instead of tracebacks."""

import difflib
from collections.abc import Iterable

Problem = tuple[str, str]  # dotted path of the setting, and a sentence about it


class UserError(ValueError):
    """A mistake of the user's. The command prints its one sentence and exits with code 2."""


class Refusal(UserError):
    """Why a client does not do something, in words that may leave the client.

    The text is made from the request and from the client's public information only, never from
    its data, files or folders. Other organisations are shown the text of no other exception.
    """


class Problems(UserError):
    """All mistakes in one file, reported together.

    Args:
        source: what the problems are in, e.g. a file name.
        problems: (dotted path, sentence) pairs; a full stop is added where it is missing.
    """

    def __init__(self, source: str, problems: list[Problem]):
        self.source = source
        self.problems = problems
        width = max((len(path) for path, _ in problems), default=0)
        lines = []
        for path, sentence in problems:
            stop = "" if sentence.endswith((".", "?")) else "."
            lines.append(f"  {path:<{width}}   {sentence}{stop}")
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{count} in {source}", *lines]))


class RunError(RuntimeError):
    """A run cannot go on for a known reason, such as a lost quorum or a worker that died.

    The command prints its one sentence and exits with code 1.
    """


class Interrupted(RunError):
    """The user pressed Ctrl-C. The command exits with code 130."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence that says that there is no such name, suggests the nearest and lists all.

    >>> unknown_name("algorithm", "fedmusle", ["fedavg", "fedmuscle"])
    'There is no algorithm "fedmusle". Did you mean "fedmuscle"? There are: fedavg, fedmuscle.'
    """
    names = sorted(set(known))
    return f'There is no {kind} "{name}".{suggest_name(name, names)} There are: {", ".join(names)}.'


def suggest_name(name: str, known: Iterable[str]) -> str:
    """` Did you mean "..."?` with a leading space, or nothing where no known name is close."""
    closest = closest_name(name, known)
    return f' Did you mean "{closest}"?' if closest else ""


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, None where none is close."""
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return matches[0] if matches else None


def describe_error(error: BaseException) -> str:
    """Why something failed, in words. For errors of the system: the file and the cause.

    >>> describe_error(OSError(28, "No space left on device", "disk"))
    'disk: No space left on device'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
