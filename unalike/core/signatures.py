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
from unalike.base.message import INT64, Value, find_nonfinite, leaves

Sizes = Mapping[str, int]  # lengths of the axes that a `Shape` names
# Called with a value, the sizes and the path of the value in the message. Returns what is wrong
# with the value, None if nothing is.
Validator = Callable[[Any, Sizes, str], str | None]


class Shape:
    """Shape of a tensor, or length of a list, in an annotation.

    Args:
        axes: lengths; None allows any. A name stands for an integer field of the method, for
            `samples` or `labels` of the client, for `public_rows`, `clients`, or for one of the
            `sizes` of the call.
        whole: the tensor holds integers; otherwise floating-point numbers.
    """

    def __init__(self, *axes: int | str | None, whole: bool = False):
        self.axes = axes
        self.whole = whole

    def mismatch(self, value: Any, sizes: Sizes, path: str) -> str | None:
        """How a tensor or list differs from this shape; None if it does not. A `Validator`.

        Raises:
            ValueError: `sizes` lacks a named axis.
        """
        expected = [self._length(axis, sizes) for axis in self.axes]
        is_list = isinstance(value, list)
        lengths = (len(value),) if is_list else tuple(value.shape)
        same_kind = is_list or value.is_floating_point() is not self.whole
        if same_kind and len(lengths) == len(expected):
            pairs = zip(expected, lengths, strict=True)
            if all(wanted in (None, length) for wanted, length in pairs):
                return None
        shape = ", ".join("any" if wanted is None else str(wanted) for wanted in expected)
        kind = "whole" if self.whole else "real"
        return f"{path} is {describe_value(value)}, and must be {kind} numbers of shape ({shape})"

    @staticmethod
    def _length(axis: int | str | None, sizes: Sizes) -> int | None:
        if not isinstance(axis, str):
            return axis
        if axis not in sizes:
            raise ValueError(
                f"nothing says how long the axis {axis} is; give it to the call: "
                f"sizes={{'{axis}': ...}}"
            )
        return sizes[axis]


def describe_value(value: Any) -> str:
    """What a value is, in a few words for an error message.

    >>> describe_value([1, 2]), describe_value(0.5)
    ('a list of 2', 'a number')
    """
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}, shape {tuple(value.shape)}"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    words = {
        "NoneType": "None",
        "int": "a whole number",
        "float": "a number",
        "str": "a word",
        "bool": "true or false",
    }
    return words.get(name, name)


# Annotations without parts, and whether a value is one.
PLAIN: dict[Any, Callable[[Any], bool]] = {
    None: lambda v: v is None,
    types.NoneType: lambda v: v is None,
    bool: lambda v: isinstance(v, bool),
    str: lambda v: isinstance(v, str),
    int: lambda v: isinstance(v, int) and not isinstance(v, bool) and v in INT64,
    # Whole numbers are taken for real ones where a float can hold them.
    float: lambda v: isinstance(v, float) or PLAIN[int](v),
    Tensor: lambda v: isinstance(v, Tensor),
    dict: lambda v: isinstance(v, dict),
    list: lambda v: isinstance(v, list),
}


@cache
def validator_for(hint: Any, hidden: bool = False, sent: frozenset[str] = frozenset()) -> Validator:
    """The validator for an annotation; an annotation of unknown form accepts everything.

    Args:
        hidden: the value, or a field of it that is not in `sent`, may be None instead.
        sent: fields that leave a client with privacy.
    """
    if is_typeddict(hint):
        fields = {
            key: validator_for(part)
            for key, part in get_type_hints(hint, include_extras=True).items()
        }
        return _fields_validator(fields, hint.__required_keys__, hidden, sent)
    if hidden:
        return _optional_validator(hint)
    if hint in PLAIN:
        return _plain_validator(hint)
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin in (Required, NotRequired):
        return validator_for(parts[0])
    if origin is Annotated:
        return _annotated_validator(parts)
    if origin is Literal:
        return _literal_validator(parts)
    if origin in (Union, types.UnionType):
        return _union_validator(parts)
    if origin is list:
        return _items_validator(list, validator_for(parts[0]), enumerate)
    if origin is dict:
        return _items_validator(dict, validator_for(parts[1]), dict.items)
    return _accept_anything


def _accept_anything(value: Any, sizes: Sizes, path: str) -> str | None:
    return None


def _optional_validator(hint: Any) -> Validator:
    """Accepts what the annotation accepts, or None."""
    if isinstance(hint, str):  # a forward reference: its type is not known here
        return _accept_anything
    return validator_for(None if hint is None else hint | None)


def _plain_validator(hint: Any) -> Validator:
    is_valid = PLAIN[hint]
    name = "None" if hint in (None, types.NoneType) else hint.__name__

    def validate(value: Any, sizes: Sizes, path: str) -> str | None:
        if is_valid(value):
            return None
        return f"{path} is {describe_value(value)}, and must be a {name}"

    return validate


def _annotated_validator(parts: tuple[Any, ...]) -> Validator:
    """For `Annotated[hint, ...]`: the hint, then its shapes, then its bounds."""
    hint, *details = parts
    validators = [validator_for(hint)]
    validators += [detail.mismatch for detail in details if isinstance(detail, Shape)]
    validators += [
        _bounds_validator(detail.metadata) for detail in details if hasattr(detail, "metadata")
    ]

    def validate(value: Any, sizes: Sizes, path: str) -> str | None:
        for validator in validators:
            problem = validator(value, sizes, path)
            if problem:
                return problem
        return None

    return validate


def _bounds_validator(bounds: list[Any]) -> Validator:
    """For a number with bounds, in the form in which pydantic's `Field` keeps them."""
    operators = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
    tests = []
    for bound in bounds:
        for name, compare in operators.items():
            if hasattr(bound, name):
                tests.append((compare, getattr(bound, name)))

    def validate(value: Any, sizes: Sizes, path: str) -> str | None:
        if all(compare(value, end) for compare, end in tests):
            return None
        return f"{path} is {value}, which is out of bounds"

    return validate


def _literal_validator(choices: tuple[Any, ...]) -> Validator:
    def validate(value: Any, sizes: Sizes, path: str) -> str | None:
        if value in choices:
            return None
        return f"{path} is {str(value)[:40]}, and must be one of {choices}"

    return validate


def _union_validator(parts: tuple[Any, ...]) -> Validator:
    validators = [validator_for(part) for part in parts]

    def validate(value: Any, sizes: Sizes, path: str) -> str | None:
        problems = []
        for validator in validators:
            problem = validator(value, sizes, path)
            if not problem:
                return None
            problems.append(problem)
        return problems[0]

    return validate


def _fields_validator(
    fields: dict[str, Validator],
    required: frozenset[str],
    hidden: bool = False,
    sent: frozenset[str] = frozenset(),
) -> Validator:
    """For a dict with exactly these fields; `hidden` and `sent` as in `validator_for`."""

    def validate(value: Any, sizes: Sizes, path: str) -> str | None:
        if hidden and value is None and not sent:
            return None
        if not isinstance(value, dict):
            got = f"is {describe_value(value)}"
        elif not required <= value.keys() <= fields.keys():
            got = f"holds {', '.join(sorted(value)[:9])[:200] or 'nothing'}"
        else:
            got = ""
        if got:
            return f"{path} {got}, and must hold {', '.join(fields) or 'nothing'}"
        for key, part in value.items():
            if hidden and part is None and key not in sent:
                continue
            if fields[key](part, sizes, ""):
                return fields[key](part, sizes, f"{path}.{key}")
        return None

    return validate


def _items_validator(kind: type, validator: Validator, items: Callable[[Any], Any]) -> Validator:
    """For a list or dict whose items all pass `validator`.

    Paths are built only once something is wrong: a client may send many items and long names.
    """

    def validate(value: Any, sizes: Sizes, path: str) -> str | None:
        if not isinstance(value, kind):
            return f"{path} is {describe_value(value)}, and must be a {kind.__name__}"
        for key, item in items(value):
            if validator(item, sizes, ""):
                return validator(item, sizes, f"{path}.{str(key)[:80]}")
        return None

    return validate


@dataclass(frozen=True)
class OperationSignature:
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


def signature_of(method: Any) -> OperationSignature:
    """The validators of an operation, built once; of one marked `@together`, for one client."""
    signature = method.__dict__.get("signature")
    if signature is None:
        signature = _read_signature(method)
        method.signature = signature
    return signature


def _read_signature(method: Any) -> OperationSignature:
    try:
        hints = get_type_hints(method, include_extras=True)
    except (NameError, TypeError):
        # Names that only the type checker knows: nothing is declared.
        hints = {}
    if hasattr(method, "together"):
        # Annotated as lists with one entry per client: list[int] declares int for each.
        hints = {name: (get_args(hint) or (Any,))[0] for name, hint in hints.items()}
    _, *arguments = inspect.signature(method).parameters.values()
    if any(a.kind is a.VAR_KEYWORD for a in arguments):
        request = validator_for(dict)
    else:
        fields = {a.name: validator_for(hints.get(a.name, Any)) for a in arguments}
        required = frozenset(a.name for a in arguments if a.default is a.empty)
        request = _fields_validator(fields, required)
    reply = hints.get("return", Any)
    sends = getattr(method, "sends", {})
    if isinstance(sends, str):
        hidden = validator_for(reply)
    else:
        hidden = validator_for(reply, hidden=True, sent=frozenset(sends))
    names: tuple[str, ...] = ()
    if is_typeddict(reply):
        names = tuple(key for key in get_type_hints(reply) if key in reply.__required_keys__)
    return OperationSignature(request, validator_for(reply), hidden, names)


def validate_request(method: Any, body: dict[str, Value], sizes: Sizes | None = None) -> None:
    """Raise Refusal for a request that differs from the declared arguments or is not finite.

    Args:
        sizes: lengths of axes that the arguments declare by name.
    """
    problem = signature_of(method).request(body, sizes or {}, method.__name__)
    if problem is None:
        path = find_nonfinite(body)
        if path is not None:
            problem = f"{method.__name__}.{path} holds NaN or infinity"
    if problem is not None:
        raise Refusal(f"it refuses what it was sent: {problem}")


def validate_magnitudes(method: Any, body: dict[str, Value], largest: float) -> None:
    """Raise Refusal for numbers beyond `largest`: they could make a computation overflow."""
    path = find_nonfinite(body, largest)
    if path is not None:
        raise Refusal(
            f"it refuses what it was sent: {method.__name__}.{path} holds a number beyond "
            f"{largest:g}, which a client with privacy does not take"
        )


def empty_reply(method: Any) -> Value:
    """The reply of an operation of which nothing may leave: declared fields, each None."""
    names = signature_of(method).names
    return {name: None for name in names} if names else None


def tensor_spec(value: Value) -> Any:
    """Names, kinds and shapes of the tensors in a value; None where there are none.

    >>> import torch
    >>> tensor_spec({"w": torch.ones(2, 3), "n": [torch.tensor(1)], "loss": 0.5})
    {'w': ['real', 2, 3], 'n': [['whole']]}
    """
    if isinstance(value, Tensor):
        return ["real" if value.is_floating_point() else "whole", *value.shape]
    if isinstance(value, dict):
        by_name = {key: tensor_spec(item) for key, item in value.items()}
        return {key: spec for key, spec in by_name.items() if spec is not None} or None
    if isinstance(value, list | tuple):
        specs = [tensor_spec(item) for item in value]
        return [spec for spec in specs if spec is not None] or None
    return None


def spec_mismatch(reply: Value, sent: dict[str, Any]) -> str | None:
    """Where a field of a reply has other tensors than the argument of the same name had.

    Args:
        sent: `tensor_spec` of the arguments, by name.
    """
    parts: dict[str, Any] = reply if isinstance(reply, dict) else {}
    for key in sent.keys() & parts.keys():
        got = tensor_spec(parts[key])
        if got == sent[key] or parts[key] is None:
            continue
        name = _first_difference(sent[key], got)
        place = f" ({name[:80]})" if name else ""
        return f"its {key} have other names or shapes than those it was sent{place}"
    return None


def _first_difference(sent: Any, got: Any) -> str:
    """The first name under which two specs differ; empty if they are not specs of dicts."""
    if not isinstance(sent, dict) or not isinstance(got, dict | None):
        return ""
    got = got or {}
    for name in [*sent, *got]:
        if got.get(name) != sent.get(name):
            return str(name)
    return ""


def describe_leaves(value: Value) -> list[tuple[str, str, list[int]]]:
    """Path, dtype and shape of everything in a value; numbers and words have no shape."""
    descriptions: list[tuple[str, str, list[int]]] = []
    for path, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            descriptions.append((path, dtype, list(leaf.shape)))
        else:
            kind = "nothing" if leaf is None else type(leaf).__name__
            descriptions.append((path, kind, []))
    return descriptions
