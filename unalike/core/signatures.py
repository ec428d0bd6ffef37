"""Checks requests and replies against the annotations of an operation.

Annotations of the arguments say what a client accepts, that of the return value what a server
accepts. `Annotated[Tensor, Shape("rows", "width")]` declares a shape, a `TypedDict` exactly these
names, `Value` anything that can be sent. A reply field with the name of an argument must have
tensors of the same names, kinds and shapes as were sent with it.
"""

import inspect
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from torch import Tensor

from unalike.base.errors import Refusal
from unalike.base.message import Value, find_nonfinite, leaves

Sizes = Mapping[str, int]
Validator = Callable[
    [Any, Sizes, str], str | None
]  # value, sizes of axes, path: what is wrong with it


class Shape:
    """Shape of a tensor, or length of a list, in an annotation.

    Args:
        axes: lengths; None allows any. A name stands for an integer field of the method, for
            `samples` or `labels` of the client, for `public_rows`, `clients`, or for one of the
            `sizes` of the call.
        whole: the tensor holds integers; otherwise floating-point numbers.
    """

    def __init__(self, *axes: int | str | None, whole: bool = False):
        self.axes, self.whole = axes, whole

    def look(self, value: Any, sizes: Sizes, path: str) -> str | None:
        there = (len(value),) if isinstance(value, list) else tuple(value.shape)
        if unknown := [axis for axis in self.axes if isinstance(axis, str) and axis not in sizes]:
            raise ValueError(
                f"nothing says how long the axis {unknown[0]} is; give it to the call: "
                f"sizes={{'{unknown[0]}': ...}}"
            )
        wanted = [sizes[axis] if isinstance(axis, str) else axis for axis in self.axes]
        kind = isinstance(value, list) or value.is_floating_point() is not self.whole
        if (
            kind
            and len(there) == len(wanted)
            and all(want in (None, got) for want, got in zip(wanted, there, strict=True))
        ):
            return None
        shape = ", ".join("any" if want is None else str(want) for want in wanted)
        numbers = "whole" if self.whole else "real"
        return f"{path} is {shown(value)}, and must be {numbers} numbers of shape ({shape})"


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}, shape {tuple(value.shape)}"
    return {
        "NoneType": "None",
        "int": "a whole number",
        "float": "a number",
        "str": "a word",
        "bool": "true or false",
    }.get(
        type(value).__name__,
        f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, list | dict)
        else type(value).__name__,
    )


PLAIN: dict[Any, Callable[[Any], bool]] = {
    None: lambda v: v is None,
    types.NoneType: lambda v: v is None,
    bool: lambda v: isinstance(v, bool),
    str: lambda v: isinstance(v, str),
    int: lambda v: isinstance(v, int) and not isinstance(v, bool),
    float: lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    Tensor: lambda v: isinstance(v, Tensor),
    dict: lambda v: isinstance(v, dict),
    list: lambda v: isinstance(v, list),
}


@cache
def look(hint: Any, hidden: bool = False, sent: frozenset[str] = frozenset()) -> Validator:
    """The validator for an annotation; one that means nothing here accepts everything.

    Args:
        hidden: the value, or a field of it that is not in `sent`, may be None instead.
        sent: fields that leave a client with privacy.
    """
    origin, inside = get_origin(hint), get_args(hint)
    if hidden and not is_typeddict(hint):
        return (
            look(Any)
            if isinstance(hint, str)
            else look(hint | None)
            if hint is not None
            else look(None)
        )
    if hint in PLAIN:
        fine, word = PLAIN[hint], getattr(hint, "__name__", "None").replace("NoneType", "None")
        return lambda value, sizes, path: (
            None if fine(value) else f"{path} is {shown(value)}, and must be a {word}"
        )
    if origin in (Required, NotRequired):
        return look(inside[0])
    if origin is Annotated:
        looks = [
            look(inside[0]),
            *(told.look for told in inside[1:] if isinstance(told, Shape)),
            *(_bounded(told.metadata) for told in inside[1:] if hasattr(told, "metadata")),
        ]
        return lambda value, sizes, path: next(
            (wrong for each in looks if (wrong := each(value, sizes, path))), None
        )
    if origin is Literal:
        return lambda value, sizes, path: (
            None if value in inside else f"{path} is {str(value)[:40]}, and must be one of {inside}"
        )
    if origin in (Union, types.UnionType):
        either = [look(one) for one in inside]
        return lambda value, sizes, path: (
            either[0](value, sizes, path) if all(e(value, sizes, path) for e in either) else None
        )
    if is_typeddict(hint):
        parts = {key: look(told) for key, told in get_type_hints(hint, include_extras=True).items()}
        return _exactly(parts, hint.__required_keys__, hidden, sent)
    if origin is list:
        return _all(list, look(inside[0]), enumerate)
    if origin is dict:
        return _all(dict, look(inside[1]), dict.items)
    return lambda value, sizes, path: None


def _bounded(bounds: list[Any]) -> Validator:
    """Of a number with bounds, as pydantic has them."""
    fine = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
    held = [
        (fine[name], getattr(bound, name))
        for bound in bounds
        for name in fine
        if hasattr(bound, name)
    ]
    return lambda value, sizes, path: (
        None
        if all(test(value, end) for test, end in held)
        else f"{path} is {value}, which is out of bounds"
    )


def _exactly(
    parts: dict[str, Validator],
    required: frozenset[str],
    hidden: bool = False,
    sent: frozenset[str] = frozenset(),
) -> Validator:
    def among(value: Any, sizes: Sizes, path: str) -> str | None:
        if hidden and value is None and not sent:
            return None
        if not isinstance(value, dict) or not required <= value.keys() <= parts.keys():
            got = (
                f"holds {', '.join(sorted(value)[:9])[:200] or 'nothing'}"
                if isinstance(value, dict)
                else f"is {shown(value)}"
            )
            return f"{path} {got}, and must hold {', '.join(parts) or 'nothing'}"
        return next(
            (
                wrong
                for key, part in value.items()
                if not (hidden and part is None and key not in sent)
                and (wrong := parts[key](part, sizes, f"{path}.{key}"))
            ),
            None,
        )

    return among


def _all(kind: type, each: Validator, items: Callable[[Any], Any]) -> Validator:
    def every(value: Any, sizes: Sizes, path: str) -> str | None:
        if not isinstance(value, kind):
            return f"{path} is {shown(value)}, and must be a {kind.__name__}"
        return next(
            (wrong for key, item in items(value) if (wrong := each(item, sizes, f"{path}.{key}"))),
            None,
        )

    return every


@dataclass(frozen=True)
class Declared:
    """Validators from the signature of an operation.

    Attributes:
        request: for the arguments, at the client.
        reply: for the reply, at the server.
        hidden: for the reply of a client with privacy, where undeclared fields may be None.
        names: fields that every reply has.
    """

    request: Validator
    reply: Validator
    hidden: Validator
    names: tuple[str, ...] = ()


def declared(method: Any) -> Declared:
    """What the signature of an operation declares; of one that is written for several, of each."""
    if (known := method.__dict__.get("declared")) is None:
        try:
            hints = get_type_hints(method, include_extras=True)
        except (
            NameError,
            TypeError,
        ):  # names that are for the type checker only: nothing is declared
            hints = {}
        one = lambda hint: (get_args(hint) or (Any,))[0] if hasattr(method, "together") else hint
        _, *arguments = inspect.signature(method).parameters.values()
        named = {a.name: look(one(hints.get(a.name, Any))) for a in arguments}
        request = _exactly(named, frozenset(a.name for a in arguments if a.default is a.empty))
        if any(a.kind is a.VAR_KEYWORD for a in arguments):
            request = look(dict)
        reply = one(hints.get("return", Any))
        sends = getattr(method, "sends", {})
        hidden = (
            look(reply)
            if isinstance(sends, str)
            else look(reply, hidden=True, sent=frozenset(sends))
        )
        names = (
            tuple(key for key in get_type_hints(reply) if key in reply.__required_keys__)
            if is_typeddict(reply)
            else ()
        )
        known = method.declared = Declared(request, look(reply), hidden, names)
    return known


def validate_request(method: Any, body: dict[str, Value]) -> None:
    """Raise Refusal for a request that differs from the declared arguments or is not finite."""
    wrong = declared(method).request(body, {}, method.__name__)
    if wrong is None and (path := find_nonfinite(body)) is not None:
        wrong = f"{method.__name__}.{path} holds NaN or infinity"
    if wrong is not None:
        raise Refusal(f"it refuses what it was sent: {wrong}")


def bounded(method: Any, body: dict[str, Value], largest: float) -> None:
    """Raise Refusal for numbers beyond `largest`: they could make a computation overflow."""
    for path, leaf in leaves(body):
        if isinstance(leaf, Tensor):
            beyond = leaf.is_floating_point() and bool((leaf.abs() > largest).any())
        else:
            beyond = isinstance(leaf, float) and abs(leaf) > largest
        if beyond:
            raise Refusal(
                f"it refuses what it was sent: {method.__name__}.{path} holds a number beyond "
                f"{largest:g}, which a client with privacy does not take"
            )


def nothing(method: Any) -> Value:
    """The reply of an operation of which nothing may leave: declared fields, each None."""
    return {key: None for key in declared(method).names} if declared(method).names else None


def tensor_spec(value: Value) -> Any:
    """Names, kinds and shapes of the tensors in a value; None where there are none.

    >>> import torch
    >>> tensor_spec({"w": torch.ones(2, 3), "n": [torch.tensor(1)], "loss": 0.5})
    {'w': ['real', 2, 3], 'n': [['whole']]}
    """
    if isinstance(value, Tensor):
        return ["real" if value.is_floating_point() else "whole", *value.shape]
    if isinstance(value, dict):
        return {
            key: told for key, item in value.items() if (told := tensor_spec(item)) is not None
        } or None
    if isinstance(value, list | tuple):
        return [told for item in value if (told := tensor_spec(item)) is not None] or None
    return None


def spec_mismatch(reply: Value, sent: dict[str, Any]) -> str | None:
    """Where a part of a reply is not like what was sent under its name, by the outline of that."""
    parts: dict[str, Any] = reply if isinstance(reply, dict) else {}
    for key in sent.keys() & parts.keys():
        if (got := tensor_spec(parts[key])) != sent[key] and parts[key] is not None:
            at = (
                next(
                    (
                        name
                        for name in [*sent[key], *(got or ())]
                        if (got or {}).get(name) != sent[key].get(name)
                    ),
                    "",
                )
                if isinstance(sent[key], dict) and isinstance(got, dict | None)
                else ""
            )
            return f"its {key} have other names or shapes than those it was sent{f' ({str(at)[:80]})' if at else ''}"
    return None


def described(value: Value) -> list[tuple[str, str, list[int]]]:
    """Path, dtype and shape of all that a value holds; numbers and words have no shape."""
    return [
        (path, str(leaf.dtype).removeprefix("torch."), list(leaf.shape))
        if isinstance(leaf, Tensor)
        else (path, "nothing" if leaf is None else type(leaf).__name__, [])
        for path, leaf in leaves(value)
    ]
