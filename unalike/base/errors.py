"""Mistakes a user can mend, as sentences. Knows nothing of where they come from."""

import difflib
from collections.abc import Iterable

Problem = tuple[str, str]  # where, and a sentence


class UserError(ValueError):
    """The user's mistake: one clear sentence, exit code 2."""


class Refusal(UserError):
    """Why something is not done, in words that may leave a client: made from what it was sent and what its card tells, never from its
    data, files or folders. Another organisation is told the text of no other exception."""


class Problems(UserError):
    """Several mistakes in one file, told together."""

    def __init__(self, source: str, problems: list[Problem]):
        self.source, self.problems = source, problems
        wide = max((len(where) for where, _ in problems), default=0)
        lines = [
            f"  {where:<{wide}}   {sentence}{'' if sentence.endswith(('.', '?')) else '.'}"
            for where, sentence in problems
        ]
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{count} in {source}", *lines]))


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """There is no such thing; the nearest one; what there is.

    >>> unknown("algorithm", "fedmusle", ["fedavg", "fedmuscle"])
    'There is no algorithm "fedmusle". Did you mean "fedmuscle"? There are: fedavg, fedmuscle.'
    """
    names = sorted(set(known))
    return f'There is no {kind} "{name}".{suggest_name(name, names)} There are: {", ".join(names)}.'


def suggest_name(name: str, known: Iterable[str]) -> str:
    """A question after the nearest name, with a space before it; nothing where none is near."""
    return f' Did you mean "{found}"?' if (found := closest_name(name, known)) else ""


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def describe_error(error: BaseException) -> str:
    """Why something failed, in words: of the system's errors the file and what they say, without the number.

    >>> reason(OSError(28, "No space left on device", "disk"))
    'disk: No space left on device'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


class Interrupted(RuntimeError):
    """Somebody pressed Ctrl-C."""
