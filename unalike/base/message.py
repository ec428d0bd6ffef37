"""What may travel between server and client: a tree of named tensors, numbers and strings, its codec and its size.

Knows nothing of who sends it. Nothing executable can be written in it, and reading it runs no code. Numbers take 8 bytes whatever they
are, so a message's size follows from its names, words, dtypes and shapes: it is known beforehand, and tells nothing of what was learnt.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Value = (
    Tensor | int | float | str | bool | list | dict | None
)  # lists and dicts hold the same again

MAGIC = b"UNALIKE2"
FRAME = struct.Struct("<8sII")  # magic, length of the header, count of numbers
BLOCK = 256  # the header and every tensor start on a multiple of this
MAX_BYTES = 2 * 1024**3  # bytes a message may have unless the caller says otherwise
MAX_DEPTH = 32  # how deep values may nest
MAX_AXES = 16  # how many a tensor may have
SPAN = 2**60  # what the lengths of its axes above 0 may multiply to
DIGITS = 10**4000  # whole numbers stay below it: Python reads no more than 4300 digits
LONG = range(-(2**63), 2**63)  # whole numbers of 8 bytes; others are written out in the header
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class MessageError(ValueError):
    """A message that cannot be sent, or bytes that are none."""


def encode(value: Value, limit: int = MAX_BYTES) -> bytearray:
    """The bytes of a value: frame, JSON header and numbers, padded to a block, then each tensor padded to a block. In the header 0 and 0.0
    stand for the whole and real numbers, in order.

    >>> decode(encode({"rows": [1, 2], "name": "ada"}))
    {'rows': [1, 2], 'name': 'ada'}
    """
    first, tensors, total = encode_header(value, limit)
    out = bytearray(total)
    out[: len(first)] = first
    _write(tensors, out, len(first))
    return out


def encode_header(value: Value, limit: int = MAX_BYTES) -> tuple[bytearray, list[Tensor], int]:
    """The bytes of a value up to its tensors, these, and the bytes in all: what goes to several often differs in the first only."""
    header, numbers, tensors = _header(value)
    _within(total := _size(header, numbers, tensors), limit)
    at = FRAME.size + len(header)
    out = bytearray(_padded(at + 8 * len(numbers)))
    FRAME.pack_into(out, 0, MAGIC, len(header), len(numbers))
    out[FRAME.size : at] = header
    struct.pack_into(
        "<" + "".join("d" if isinstance(n, float) else "q" for n in numbers), out, at, *numbers
    )
    return out, tensors, total


def encode_tensors(tensors: list[Tensor]) -> bytearray:
    """The rest of the bytes."""
    out = bytearray(sum(_padded(t.numel() * t.element_size()) for t in tensors))
    _write(tensors, out, 0)
    return out


def _write(tensors: list[Tensor], out: bytearray, at: int) -> None:
    for tensor in tensors:
        if tensor.numel():
            torch.frombuffer(out, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(
                tensor.shape
            ).copy_(tensor.detach())
        at += _padded(tensor.numel() * tensor.element_size())


def encoded_size(value: Value, limit: int = MAX_BYTES) -> int:
    """Length of `encode(value)` without copying a tensor."""
    return _within(_size(*_header(value)), limit)


def decode(data: bytes | bytearray | memoryview, limit: int = MAX_BYTES, rest: Any = None) -> Value:
    """The value behind the bytes, or behind its `head` and the `rest`; its tensors are the receiver's own. Anything that is not a message
    is a MessageError."""
    _within(len(data) + (len(rest) if rest is not None else 0), limit)
    if len(data) < FRAME.size:
        raise MessageError(f"a message has at least {FRAME.size} bytes, got {len(data)}")
    magic, length, count = FRAME.unpack_from(data)
    if magic != MAGIC:
        raise MessageError(
            f"these bytes are no unalike message: they start with {bytes(magic)!r}, not {MAGIC!r}"
        )
    end = FRAME.size + length
    if _padded(end + 8 * count) > len(data):
        raise MessageError(
            f"the message is cut short: its header has {length + 8 * count} bytes, {len(data) - FRAME.size} are there"
        )
    try:
        header = json.loads(bytes(data[FRAME.size : end]))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the message's header cannot be read: {error}") from None
    if (
        not isinstance(header, dict)
        or set(header) != {"value", "tensors"}
        or not isinstance(header["tensors"], list)
    ):
        raise MessageError("the message's header must hold exactly `value` and `tensors`")
    own = bytearray(data[_padded(end + 8 * count) :] if rest is None else rest)
    tensors, at = [], 0
    for described in header["tensors"]:
        tensor, at = _tensor(described, own, at)
        tensors.append(tensor)
    if at != len(own):
        raise MessageError(
            f"the message carries {len(own)} bytes of tensors, its header describes {at}"
        )
    left = dict(enumerate(tensors))
    places = iter(range(end, end + 8 * count, 8))

    def take(name: object) -> Tensor:
        if type(name) is not int or name not in left:
            raise MessageError(
                f"the message names tensor {str(name)[:40]}; it must name each of its {len(tensors)} tensors once"
            )
        return left.pop(name)

    def number(told: int | float) -> int | float:
        if told and (isinstance(told, float) or told in LONG):
            raise MessageError(
                f"the message's header holds the number {told}; numbers stand after it"
            )
        if told:
            return told
        if (at := next(places, None)) is None:
            raise MessageError(f"the message stands for more than its {count} numbers")
        return struct.unpack_from("<d" if isinstance(told, float) else "<q", data, at)[0]

    value = from_json(header["value"], take, number)
    if next(places, None) is not None:
        raise MessageError(f"the message carries {count} numbers, and its header stands for fewer")
    if left:
        raise MessageError(
            f"the message never names tensor {next(iter(left))}; it must name each of its {len(tensors)} tensors once"
        )
    return value


def require_dict(value: Value) -> dict[str, Value]:
    """The value where it must be a dict, as a call and its reply are."""
    if not isinstance(value, dict):
        raise MessageError(f"a call and its reply are dicts, got a {type(value).__name__}")
    return value


def copy_value(value: Value, device: str | None = None) -> Value:
    """The value as a receiver in the same process gets it: no tensor shares memory with the sender's. Each stays where it lies, or
    goes to a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True).contiguous()
    if isinstance(value, dict):
        return {key: copy_value(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_value(item, device) for item in value]
    return value


def leaves(value: Value, path: str = "") -> Iterator[tuple[str, Value]]:
    """Every tensor, number and string with its dotted path.

    >>> list(leaves({"a": {"b": 1}, "c": [2]}))
    [('a.b', 1), ('c.0', 2)]
    """
    if isinstance(value, dict):
        items: Iterable[tuple[object, Value]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, f"{path}.{key}" if path else str(key))


def find_nonfinite(value: Value) -> str | None:
    """Path of the first NaN or infinity, None where all is finite."""
    told = list(leaves(value))
    tensors = [leaf for _, leaf in told if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # a sum or a norm is finite only where all parts are; one that overflows is looked at again. A GPU is asked one time, of all at once
    if (
        all(math.isfinite(tensor.detach().sum().item()) for tensor in tensors if not tensor.is_cuda)
        and all(
            bool(torch.nn.utils.get_total_norm(same).isfinite())
            for same in _alike([t for t in tensors if t.is_cuda])
        )
        and all(math.isfinite(leaf) for _, leaf in told if isinstance(leaf, float))
    ):
        return None
    for path, leaf in told:
        fine = (
            bool(leaf.isfinite().all())
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
            else (not isinstance(leaf, float) or math.isfinite(leaf))
        )
        if not fine:
            return path or "the reply"
    return None


def _alike(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Of one device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def to_json(
    value: Value,
    put: Callable[[str, Tensor], int | str],
    number: Callable[[int | float], int | float] = lambda n: n,
    path: str = "",
    depth: int = 0,
) -> object:
    """JSON for a value: tensors go to `put(path, tensor)`, and {"$": what it returned} stands in their place; numbers to `number`."""
    if depth > MAX_DEPTH:
        raise MessageError(f"{path} nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, int) and abs(value) >= DIGITS:
        raise MessageError(f"{path or 'the message'} is a number of more than 4000 digits")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, Tensor):
        return {"$": put(path, value)}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise MessageError(
                    f"{path or 'the message'} has the key {key!r}; keys are strings that do not start with $"
                )
        return {
            key: to_json(item, put, number, f"{path}/{key}" if path else key, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            to_json(item, put, number, f"{path}/{i}" if path else str(i), depth + 1)
            for i, item in enumerate(value)
        ]
    raise MessageError(
        f"{path or 'the message'} is a {type(value).__name__}; "
        "a message carries tensors, numbers, strings, lists and dicts"
    )


def from_json(
    tree: object,
    take: Callable[[object], Tensor],
    number: Callable[[int | float], int | float] = lambda n: n,
    depth: int = 0,
) -> Value:
    """Undo `tree`: each {"$": name} becomes `take(name)`, each number `number(it)`."""
    if depth > MAX_DEPTH:
        raise MessageError(f"the message nests deeper than {MAX_DEPTH} levels")
    if isinstance(tree, dict):
        if "$" in tree:
            if len(tree) != 1:
                raise MessageError("the message has a tensor's place with other keys beside it")
            return take(tree["$"])
        for key in tree:
            if key.startswith("$"):
                raise MessageError(
                    f"the message has the key {key[:40]!r}; keys do not start with $"
                )
        return {key: from_json(item, take, number, depth + 1) for key, item in tree.items()}
    if isinstance(tree, list):
        return [from_json(item, take, number, depth + 1) for item in tree]
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return number(tree)
    return tree  # type: ignore[return-value]


def _header(value: Value) -> tuple[bytes, list[int | float], list[Tensor]]:
    tensors: list[Tensor] = []
    numbers: list[int | float] = []

    def number(told: int | float) -> int | float:
        if isinstance(told, int) and told not in LONG:
            return told
        numbers.append(told)
        return 0.0 if isinstance(told, float) else 0

    def put(path: str, tensor: Tensor) -> int:
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise MessageError(
                f"{path or 'the message'} has dtype {tensor.dtype}; a message carries {', '.join(DTYPES)}"
            )
        if tensor.layout is not torch.strided:
            raise MessageError(
                f"{path or 'the message'} is a sparse tensor; send to_dense() of it, or its indices and values"
            )
        if tensor.dim() > MAX_AXES:
            raise MessageError(
                f"{path or 'the message'} has {tensor.dim()} axes; a tensor may have {MAX_AXES}"
            )
        tensors.append(tensor)
        return len(tensors) - 1

    described = to_json(value, put, number)
    table = [[str(t.dtype).removeprefix("torch."), *t.shape] for t in tensors]
    return (
        json.dumps({"value": described, "tensors": table}, separators=(",", ":")).encode(),
        numbers,
        tensors,
    )


def _tensor(described: Any, own: bytearray, at: int) -> tuple[Tensor, int]:
    match described:
        case [str(name), *shape] if (
            name in DTYPES
            and all(type(n) is int and 0 <= n <= SPAN for n in shape)
            and len(shape) <= MAX_AXES
            and math.prod(n or 1 for n in shape) <= SPAN
        ):
            dtype = DTYPES[name]
        case _:
            raise MessageError(
                f"the message describes a tensor as {str(described)[:80]}; expected [dtype, *shape]"
            )
    count = math.prod(shape)
    length = count * dtype.itemsize
    if at + length > len(own):
        raise MessageError(
            f"the message is cut short: a tensor of shape {shape} needs {length} bytes, {len(own) - at} are left"
        )
    if not count:
        return torch.empty(shape, dtype=dtype), at
    if dtype is torch.bool and any(byte > 1 for byte in own[at : at + length]):
        raise MessageError("a bool tensor in the message holds bytes other than 0 and 1")
    return torch.frombuffer(own, dtype=dtype, count=count, offset=at).reshape(shape), at + _padded(
        length
    )


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _size(header: bytes, numbers: list[int | float], tensors: list[Tensor]) -> int:
    return _padded(FRAME.size + len(header) + 8 * len(numbers)) + sum(
        _padded(t.numel() * t.element_size()) for t in tensors
    )


def _within(length: int, limit: int) -> int:
    if length > limit:
        raise MessageError(f"the message has {length:,} bytes, over the limit of {limit:,}")
    return length
