"""A client's door: what is let in, and what may leave, also when an operation fails. Knows sides only as things with operations."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unalike.base.errors import Refusal, describe_error
from unalike.base.message import Value
from unalike.core.operations import check_answerable, hides
from unalike.core.privacy import LARGEST, Privacy, Sends
from unalike.core.signatures import bounded, declared, nothing, validate_request


def admit(program: Any, name: str, round: int, body: dict[str, Value]) -> None:
    """The client's door, the way in: whether it does what it is asked is decided here, before a look at its data."""
    method = getattr(type(program), name)
    check_answerable(program, name)
    validate_request(method, body)
    if program.privacy is not None:
        bounded(method, body, LARGEST)
    program.round, program.learnt = round, program.learnt or method.operation == "changes"
    kinds: Sends = getattr(method, "sends", {})
    if (
        hides(program, name)
        and program.learnt
        and "first" in (kinds if isinstance(kinds, str) else kinds.values())
    ):
        raise Refusal(
            f"{name} is answered with privacy only before anything was learnt: it would tell more than the first weights"
        )


class Door:
    """Half of a client's side: what of a reply leaves."""

    client: Any
    seed: int
    round: int
    privacy: Privacy | None  # how replies are protected
    failure: (
        BaseException | None
    )  # with privacy: why the last operation failed, for its owner alone

    def leaving(
        self, name: str, turn: int, body: dict[str, Value], reply: Value, blank: bool = False
    ) -> Value:
        """The client's door: with privacy, of a reply only what its operation declares leaves, protected."""
        if self.privacy is None or not hides(self, name):
            return reply
        method = getattr(type(self), name)
        kinds: Sends = getattr(method, "sends", {})
        if not kinds:
            return nothing(method)
        draw = self.privacy.draws(self.seed, self.client.id, name, self.round, turn)
        return self.privacy.protect(
            reply, kinds, lambda sent: self.known(sent, body.get("parameters")), draw, blank
        )

    def instead(self, name: str, turn: int, body: dict[str, Value], error: BaseException) -> Value:
        """What leaves a client with privacy whose operation failed: what the mechanism makes of no update, in the form of any other
        reply. That it failed is told by its data: it stays here. A method gives the form, by `blank_NAME` for the operation NAME."""
        method = getattr(type(self), name)
        kinds: Sends = getattr(method, "sends", {})
        make: Callable[..., Value] | None = getattr(self, f"blank_{name}", None)
        if kinds and make is None:
            raise RuntimeError(
                f"{name} failed, and with privacy there is nothing to send instead: {describe_error(error)}"
            ) from error
        form = make(**body) if make is not None else None
        if isinstance(form, dict) and isinstance(kinds, dict):
            form |= {key: None for key in declared(method).names if key not in form}
        reply = self.leaving(name, turn, body, form, blank=True)
        self.failure = error
        return reply

    def known(self, sent: dict[str, Tensor], given: Any) -> dict[str, Tensor]:
        """What the server knows of the parameters that are sent, where it gave these."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what a server knows of its parameters: write known(sent, given)"
        )
