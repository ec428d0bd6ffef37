"""Marks for what the server may call on a client, what of its replies may leave, and losses that are steady. Knows no methods."""

from collections.abc import Callable
from typing import Any

from unalike.base.errors import Refusal
from unalike.base.ledger import MEASUREMENTS
from unalike.base.message import Value
from unalike.base.randomness import scope
from unalike.core.privacy import KINDS, Privacy


def operation(method: Any) -> Callable:
    """Marks a method of a client's side that the server may call; nothing else can be called from outside."""
    method.operation = "changes"
    return method


def query(method: Any) -> Callable:
    """An operation that leaves the client as it was: no new state to save."""
    method.operation = "asks"
    return method


def together(method: Any) -> Callable:
    """Under `operation` or `question`: written for several alike clients at once. It gets their sides and, for each argument, a list,
    and returns the list of replies. An engine that holds several alike clients then asks them all at once, with the same result
    as one by one; so it must not draw from torch's global generator.
    """
    method.together = True
    return method


def sends(whole: str | None = None, **parts: str) -> Callable:
    """Under `operation` or `question`: what of its reply may leave a client that asks for privacy, and how; all else is left out then.

    The whole reply, or its parts by key, is of a kind: `parameters`, whose update from the `parameters` of the message (without any, from
    the first weights) is clipped and noised; `rows`, each clipped and noised; `first`, the first weights, told until anything was
    learnt; `open`, made from no private data.
    """
    if strange := {whole or "open", *parts.values()} - set(KINDS):
        raise ValueError(f"a reply is {', '.join(KINDS)}, got {strange.pop()!r}")

    def mark(method: Any) -> Callable:
        method.sends = whole or parts
        return method

    return mark


def unanswered_measurements(program: type, privacy: Privacy | None) -> frozenset[str]:
    """Measuring that a client does not answer: with secret noise, whatever does not say what of it may leave."""
    if privacy is None or privacy.entropy != "secret":
        return frozenset()
    return frozenset(
        name for name in MEASUREMENTS if not hasattr(getattr(program, name, None), "sends")
    )


def check_answerable(program: type, name: str, privacy: Privacy | None) -> None:
    """Raise Refusal where an operation would tell what a client's noise does not cover."""
    if name in unanswered_measurements(program, privacy):
        raise Refusal(
            f"{name} tells of a client's data as they are: "
            "with secret noise this client does not answer it"
        )


def is_protected(program: type, name: str, privacy: Privacy | None) -> bool:
    """Whether the reply of an operation leaves through the privacy mechanism, or not at all.

    With seeded noise, which the server could take off again, measurements are left as they are.
    """
    return privacy is not None and not (name in MEASUREMENTS and privacy.entropy == "seed")


def list_operations(program: type) -> list[str]:
    """Names of the operations that a server may request from a program, sorted."""
    return sorted(
        name for name in dir(program) if getattr(getattr(program, name), "operation", None)
    )


def run_operation(program: Any, name: str, round: int, turn: int, body: dict[str, Value]) -> Value:
    """Call an operation of a program under the randomness that round and turn name."""
    program.round = round
    with scope(program.seed, name, program.client.id, round, turn):
        return getattr(type(program), name)(program, **body)


def graph_safe(loss: Any) -> Any:
    """Marks a loss that depends on the model and the batch alone, and never looks at values: a GPU may record its steps (training.Tape)."""
    loss.graph_safe = True
    return loss
