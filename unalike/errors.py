"""Mistakes a user can mend, as sentences. Knows nothing of where they come from."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """The user's mistake: one clear sentence, exit code 2."""


class Problems(UserError):
    """Several mistakes in one file, told together: (where, sentence) each."""

    def __init__(self, source: str, problems: list[tuple[str, str]]):
        self.source, self.problems = source, problems
        wide = max((len(where) for where, _ in problems), default=0)
        lines = [f"  {where:<{wide}}   {sentence}" for where, sentence in problems]
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{count} in {source}", *lines]))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """There is no such thing; the nearest one; what there is.

    >>> unknown("algorithm", "fedmusle", ["fedavg", "fedmuscle"])
    'There is no algorithm "fedmusle". Did you mean "fedmuscle"? There are: fedavg, fedmuscle.'
    """
    names = sorted(known)
    return f'There is no {kind} "{name}".{nearest(name, names)} There are: {", ".join(names)}.'


def nearest(name: str, known: Iterable[str]) -> str:
    """A question after the nearest name, with a space before it; nothing where none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f' Did you mean "{near[0]}"?' if near else ""
