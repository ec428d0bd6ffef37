"""Privacy at a client's boundary: which requests it answers, and what of a reply leaves.

This also holds when an operation fails. Programs are known only as objects with operations.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unalike.base.errors import Refusal, describe_error
from unalike.base.message import Value
from unalike.core.operations import check_answerable, is_protected
from unalike.core.privacy import LARGEST, Privacy, Sends
from unalike.core.signatures import empty_reply, signature_of, validate_magnitudes


class Protection:
    """Applies a privacy setting to the requests and replies of one client's program.

    Args:
        program: the client's program; its `seed`, `client.id` and `round` name seeded noise.
        privacy: None lets everything through as it is.
    """

    def __init__(self, program: Any, privacy: Privacy | None):
        self.program = program
        self.privacy = privacy

    def covers(self, operation: str) -> bool:
        """Whether the reply of an operation is protected, or withheld."""
        return is_protected(type(self.program), operation, self.privacy)

    def check_answerable(self, operation: str) -> None:
        """Raise Refusal for a measurement that noise would not cover."""
        check_answerable(type(self.program), operation, self.privacy)

    def check_magnitudes(self, method: Any, body: dict[str, Value]) -> None:
        """Raise Refusal for numbers that could make a computation overflow."""
        if self.privacy is not None:
            validate_magnitudes(method, body, LARGEST)

    def check_initial_weights(self, method: Any, changed: bool) -> None:
        """Raise Refusal for initial weights that were `changed` by training since."""
        kinds = _reply_kinds(method)
        names = [kinds] if isinstance(kinds, str) else kinds.values()
        if changed and "first" in names and self.covers(method.__name__):
            raise Refusal(
                f"{method.__name__} is answered with privacy only before anything was learnt: "
                "it would tell more than the first weights"
            )

    def protect(
        self, operation: str, turn: int, body: dict[str, Value], reply: Value, blank: bool = False
    ) -> Value:
        """The reply as it may leave: only what the operation declares by `@sends`, protected.

        Args:
            turn: how often the operation was requested before in this round.
            body: the request; its `parameters` are what an update is measured from.
            blank: of the reply only the form counts: an update of nothing is protected.
        """
        if self.privacy is None or not self.covers(operation):
            return reply
        method = getattr(type(self.program), operation)
        kinds = _reply_kinds(method)
        if not kinds:
            return empty_reply(method)
        program = self.program
        noise = self.privacy.draws(program.seed, program.client.id, operation, program.round, turn)
        base = lambda sent: self._known_parameters(sent, body.get("parameters"))
        return self.privacy.protect(reply, kinds, base, noise, blank)

    def blank_reply(
        self, operation: str, turn: int, body: dict[str, Value], error: BaseException
    ) -> Value:
        """What leaves instead of a failure, which would tell of the data: no update, protected.

        Its form is that of any other reply. A program gives it by a method `blank_NAME` for the
        operation NAME, with the same arguments.

        Raises:
            RuntimeError: the operation declares what it sends, but the program has no such method.
        """
        method = getattr(type(self.program), operation)
        kinds = _reply_kinds(method)
        build: Callable[..., Value] | None = getattr(self.program, f"blank_{operation}", None)
        if kinds and build is None:
            raise RuntimeError(
                f"{operation} failed, and with privacy there is nothing to send instead: "
                f"{describe_error(error)}"
            ) from error
        form = build(**body) if build is not None else None
        if isinstance(form, dict) and isinstance(kinds, dict):
            form |= {key: None for key in signature_of(method).names if key not in form}
        return self.protect(operation, turn, body, form, blank=True)

    def _known_parameters(self, sent: dict[str, Tensor], received: Any) -> dict[str, Tensor]:
        """What the server knows of the parameters in a reply, by name.

        These are the ones it sent with the request, else the initial weights, which come from
        the seed.
        """
        known = received if isinstance(received, dict) else {}
        if sent.keys() <= known.keys():
            return known
        return {**self.program.fresh_copy().model.state_dict(), **known}


def _reply_kinds(method: Any) -> Sends:
    """What `@sends` declares of an operation's reply; without it nothing leaves."""
    return getattr(method, "sends", {})
