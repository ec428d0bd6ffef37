"""Marks for the methods of a client's program that a server may request.

class Program(ClientProgram):
    @operation                      # may change the client; @query may not
    @sends(parameters="parameters") # with privacy: what of the reply leaves, and how
    def update(self, parameters: Parameters) -> Update: ...
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, get_args, get_type_hints, is_typeddict

from torch import Tensor

from unalike.base.errors import Refusal
from unalike.base.randomness import scope
from unalike.core.privacy import KINDS, Privacy

Method = TypeVar("Method", bound=Callable[..., Any])


def operation(method: Method) -> Method:
    """Mark a method that a server may request and that may change the client's state.

    Nothing without this mark or `@query` can be requested from outside.

    Args:
        method: of a `ClientProgram`; its signature declares the messages.
    """
    return _mark(method, operation="changes")


def query(method: Method) -> Method:
    """Mark a method that a server may request and that leaves the client's state as it was.

    Args:
        method: of a `ClientProgram`; its signature declares the messages.
    """
    return _mark(method, operation="asks")


def measurement(method: Method) -> Method:
    """Mark an operation that only looks at the outcome, under `@operation` or `@query`.

    Its traffic is not the method's and its time does not count. A client whose measurement fails
    still takes part. A method that overrides a measurement is one, too.
    """
    return _mark(method, measurement=True)


def together(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark an operation that is written for several similar clients at once.

    It goes under `@operation` or `@query`. The method gets a list of programs and, for each
    argument, a list with one value per client; it returns the list of replies. An engine that
    holds several such clients runs them at once. The result must be the same as one by one, so
    the method must not draw from torch's global generator.
    """
    return _mark(method, together=True)


def stacked(form: str, *parts: str) -> Callable[[Method], Method]:
    """Mark an operation that has a second form for several clients of one kind at once.

    It goes under `@operation`. The form is a static method of the same class. It gets a
    `ClientStack` and the arguments of the operation, which are the same for all clients, and
    returns the fields of all replies (`StackedReplies`), equal to those of one by one. Where it
    raises, the clients run one by one, so it changes nothing before it may raise.

    Args:
        form: its name.
        parts: other methods that it does the work of. Where a class has its own operation or one
            of these, the form is not used.
    """
    return lambda method: _mark(method, stacked=(form, parts))


def find_stacked_form(program: type, name: str) -> Callable[..., dict[str, Any]] | None:
    """The form of an operation for several clients at once, if it holds for this class."""
    form, parts = getattr(getattr(program, name, None), "stacked", ("", ()))
    if not form:
        return None
    owner = next(base for base in program.__mro__ if form in vars(base))
    if any(getattr(program, part) is not getattr(owner, part) for part in (name, *parts)):
        return None
    return getattr(program, form)


def sends(whole: str | None = None, **fields: str) -> Callable[[Method], Method]:
    """Mark what of a reply may leave a client with privacy, and how; the rest is withheld.

    It goes under `@operation` or `@query`. Without it nothing of a reply leaves.

    Args:
        whole: kind of the whole reply, or
        fields: kinds of its fields by name. The kinds are
            "parameters": the update, from the `parameters` in the request or else from the
                initial weights, is clipped and noised;
            "rows": each row is clipped and noised;
            "first": the initial weights, sent only before anything was trained;
            "open": computed without private data, sent as it is.

    Raises:
        ValueError: there is no such kind.
    """
    for kind in (whole or "open", *fields.values()):
        if kind not in KINDS:
            raise ValueError(f"a reply is {', '.join(KINDS)}, got {kind!r}")
    return lambda method: _mark(method, sends=whole or fields)


def graph_safe(loss: Method) -> Method:
    """Mark a loss whose steps a GPU may capture in a CUDA graph.

    It must depend on the model and the batch alone and never branch on values.

    Args:
        loss: a method of a `ClientProgram` that returns a scalar.
    """
    return _mark(loss, graph_safe=True)


def _mark(method: Method, **marks: Any) -> Method:
    method.__dict__.update(marks)
    return method


def list_operations(program: type) -> list[str]:
    """Names of the operations that a server may request from a program, sorted."""
    return sorted(
        name for name in dir(program) if getattr(getattr(program, name), "operation", None)
    )


def list_measurements(program: type) -> frozenset[str]:
    """Names of the operations of a program that are marked `@measurement`, here or in a base."""
    names: set[str] = set()
    for base in program.__mro__:
        names |= {
            name
            for name, value in vars(base).items()
            if getattr(value, "measurement", False) is True
        }
    return frozenset(names)


def measures_data(program: type, name: str) -> bool:
    """Whether an operation is a measurement that tells more than what it declares as open.

    Not so the size of a model (`describe`), nor a measurement that answers nothing.
    """
    if name not in list_measurements(program):
        return False
    method = getattr(program, name)
    if not getattr(method, "sends", None):
        return get_type_hints(method).get("return") is not type(None)
    return False


def feature_measurements(program: type) -> frozenset[str]:
    """Measurements that answer tensors alone: features, labels, attention maps."""
    names = set()
    for name in list_measurements(program):
        reply = get_type_hints(getattr(program, name), include_extras=True).get("return")
        fields = get_type_hints(reply, include_extras=True) if is_typeddict(reply) else {}
        kinds = [get_args(field)[0] if get_args(field) else field for field in fields.values()]
        if kinds and all(kind is Tensor for kind in kinds):
            names.add(name)
    return frozenset(names)


def unanswered_measurements(program: type, privacy: Privacy | None) -> frozenset[str]:
    """Measurements that clients with secret noise refuse: those without `@sends`.

    With noise from the seed, which only a simulation has, every measurement is answered.
    """
    if privacy is None or privacy.entropy != "secret":
        return frozenset()
    return frozenset(
        name for name in list_measurements(program) if not hasattr(getattr(program, name), "sends")
    )


def check_answerable(program: type, name: str, privacy: Privacy | None) -> None:
    """Raise Refusal where the reply to an operation would tell what noise does not cover."""
    if name in unanswered_measurements(program, privacy):
        raise Refusal(
            f"{name} tells of a client's data as they are: "
            "with secret noise this client does not answer it"
        )


def is_protected(program: type, name: str, privacy: Privacy | None) -> bool:
    """Whether the reply of an operation leaves through the privacy mechanism, or not at all.

    With seeded noise, which the server could take off again, measurements are left as they are.
    """
    if privacy is None:
        return False
    return privacy.entropy != "seed" or name not in list_measurements(program)


@contextmanager
def operation_scope(program: Any, name: str, round: int, turn: int) -> Iterator[Callable[..., Any]]:
    """Enter a round and seed torch's global generators for one operation of a program.

    The random stream depends on the run's seed, the operation, the client, the round and the turn.

    Args:
        turn: how often this operation was requested before in this round.
    Yields: the operation, to be called with its arguments.
    """
    program.round = round
    with scope(program.seed, name, program.client.id, round, turn):
        yield partial(getattr(type(program), name), program)
