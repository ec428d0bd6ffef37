"""Messages between server and client: nested named tensors, numbers and strings as bytes.

Decoding runs no code, and nothing executable can be encoded. Every number takes 8 bytes, whatever
its value, so a message's size follows from its names, strings, dtypes and shapes alone: it is known
beforehand and reveals nothing of what was learnt.

Layout: a frame (magic, length of the header, count of numbers), the header in JSON, the numbers,
padding to a block, then the tensors, each padded to a block. In the header {"$": i} stands for the
i-th tensor, and 0 or 0.0 for the next of the numbers.
"""

import json
import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unalike.base.copying import copy_all

# Lists and dicts hold values again; the keys of dicts are strings.
Value = Tensor | int | float | str | bool | list | dict | None

MAGIC = b"UNALIKE2"
FRAME = struct.Struct("<8sII")  # magic, length of the header, count of numbers
BLOCK = 256  # header and tensors start at multiples of this
MAX_BYTES = 2 * 1024**3  # of a message, unless the caller sets another limit
MAX_DEPTH = 32  # of nested values
MAX_AXES = 16  # of a tensor
MAX_ELEMENTS = 2**60  # of a tensor, axes of length 0 not counted
MAX_INT = 10**4000  # Python parses no more than 4300 digits
MAX_KEY = 1000  # characters of a key
# A decoded message may take this many times its bytes in memory, or as much as MIN_MEMORY.
MEMORY_FACTOR = 8
MIN_MEMORY = 1024**2
# Bytes of memory that decoding a character of the header takes at most: a dict, a list and an item
# are built twice (`json.loads`, `from_json`), strings have a head, and text is copied.
MEMORY_OF = {b"{": 450, b"[": 180, b",": 64, b":": 140}
MEMORY_OF_TEXT = 3
ALIGN = 64  # elements
MAX_FORMS = 1000  # of messages whose size is remembered
MAX_STACKED = 2**24  # bytes of a message that is copied into common memory with others
INT64 = range(-(2**63), 2**63)  # integers outside are written out in the header
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
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
    """A value that cannot be sent, or bytes that are not a message."""


def encode(value: Value, limit: int = MAX_BYTES) -> bytearray:
    """The bytes of a value; see the module's docstring for the layout.

    Raises: MessageError, if the value cannot be sent or has more than `limit` bytes.

    >>> decode(encode({"rows": [1, 2], "name": "ada"}))
    {'rows': [1, 2], 'name': 'ada'}
    """
    header, tensors, total = encode_header(value, limit)
    out = bytearray(total)
    out[: len(header)] = header
    _write_tensors(tensors, out, len(header))
    return out


def encode_header(value: Value, limit: int = MAX_BYTES) -> tuple[bytearray, list[Tensor], int]:
    """The bytes of a value before its tensors, the tensors, and the length of the whole message.

    Messages to several clients often differ in this part only.
    """
    header, numbers, tensors = _describe(value)
    total = _check_limit(_total_size(header, numbers, tensors), limit)
    _check_memory(header, total)
    start = FRAME.size + len(header)
    out = bytearray(_padded(start + 8 * len(numbers)))
    FRAME.pack_into(out, 0, MAGIC, len(header), len(numbers))
    out[FRAME.size : start] = header
    codes = "".join("d" if isinstance(number, float) else "q" for number in numbers)
    struct.pack_into("<" + codes, out, start, *numbers)
    return out, tensors, total


def encode_tensors(tensors: list[Tensor]) -> bytearray:
    """The bytes of the tensors: what follows the header."""
    out = bytearray(sum(_tensor_size(tensor) for tensor in tensors))
    _write_tensors(tensors, out, 0)
    return out


def _write_tensors(tensors: list[Tensor], out: bytearray, offset: int) -> None:
    for tensor in tensors:
        count = tensor.numel()
        if count:
            target = torch.frombuffer(out, dtype=tensor.dtype, count=count, offset=offset)
            target.view(tensor.shape).copy_(tensor.detach())
        offset += _tensor_size(tensor)


def encoded_size(value: Value, limit: int = MAX_BYTES) -> int:
    """Length of `encode(value)`, without copying a tensor."""
    header, numbers, tensors = _describe(value)
    total = _check_limit(_total_size(header, numbers, tensors), limit)
    _check_memory(header, total)
    return total


class Forms:
    """Forms of values: all of a value but its numbers, equal where messages have equal sizes.

    A dict that stands in several values, as what all clients are sent, is looked at once. So no
    value may change as long as this is used.
    """

    def __init__(self) -> None:
        # By identity and depth; the dicts are kept, so that no other gets their identity.
        self._known: dict[tuple[int, int], tuple[Value, Hashable, list[Tensor]]] = {}

    def of(self, value: Value) -> tuple[Hashable, list[Tensor]]:
        """The form of a value and its tensors, in order."""
        tensors: list[Tensor] = []
        return self._find(value, tensors, 0), tensors

    def _find(self, value: Value, tensors: list[Tensor], depth: int) -> Hashable:
        """The form of a value that is so deep in a whole one; its tensors are appended."""
        if depth > MAX_DEPTH:
            return object()  # no message
        kind: Any = type(value)
        if kind is float or (kind is int and value in INT64):
            return kind
        if value is None or kind is str or kind is bool or kind is int:
            return kind, value
        if isinstance(value, Tensor):
            tensors.append(value)
            return value.dtype, value.shape, value.layout, value.device
        if isinstance(value, dict) and kind is dict:
            known = self._known.get((id(value), depth))
            if known is None:
                own: list[Tensor] = []
                items = [self._find(item, own, depth + 1) for item in value.values()]
                known = self._known[id(value), depth] = value, (tuple(value), *items), own
            tensors += known[2]
            return known[1]
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            return list, *[self._find(item, tensors, depth + 1) for item in value]
        return object()  # like nothing else


class EncodedSizes:
    """`encoded_size` of many values: those of one form have one size, which is computed once.

    Args:
        limit: most bytes that a value may have.
    """

    def __init__(self, limit: int = MAX_BYTES):
        self.limit = limit
        self.known: dict[Hashable, int] = {}

    def of(self, value: Value, forms: Forms | None = None) -> int:
        """Length of `encode(value)`.

        Args:
            forms: where forms are found.
        Raises: MessageError, as `encode` does.
        """
        form, _ = (forms or Forms()).of(value)
        size = self.known.get(form)
        if size is None:
            size = encoded_size(value, self.limit)
            if len(self.known) == MAX_FORMS:
                self.known.clear()
            self.known[form] = size
        return size


def decode(
    data: bytes | bytearray | memoryview, limit: int = MAX_BYTES, tensors: Any = None
) -> Value:
    """The value of a message. Its tensors do not share memory with `data`.

    Args:
        data: the whole message; or what `encode_header` returned, if `tensors` is given.
        tensors: what `encode_tensors` returned.
        limit: most bytes the message may have.
    Raises: MessageError, if the bytes are not a message.
    """
    size = _check_limit(len(data) + (len(tensors) if tensors is not None else 0), limit)
    header, numbers_start, count = _parse_frame(data, size)
    body_start = _padded(numbers_start + 8 * count)
    _check_padding(data, numbers_start + 8 * count, body_start)
    if tensors is not None and len(data) != body_start:
        raise MessageError(
            f"the part of a message before its tensors has {len(data)} bytes, "
            f"its header describes {body_start}"
        )
    # The only copy: a slice of a memoryview is none.
    body = bytearray(memoryview(data)[body_start:] if tensors is None else tensors)
    unused = _parse_tensors(header["tensors"], body)
    total = len(unused)
    offsets = iter(range(numbers_start, numbers_start + 8 * count, 8))

    def take_tensor(index: object) -> Tensor:
        if type(index) is not int or index not in unused:
            raise MessageError(
                f"the message names tensor {str(index)[:40]}; "
                f"it must name each of its {total} tensors once"
            )
        return unused.pop(index)

    def take_number(stand_in: int | float) -> int | float:
        if stand_in:
            if isinstance(stand_in, float) or stand_in in INT64:
                raise MessageError(
                    f"the message's header holds the number {stand_in}; numbers stand after it"
                )
            return stand_in
        offset = next(offsets, None)
        if offset is None:
            raise MessageError(f"the message stands for more than its {count} numbers")
        code = "<d" if isinstance(stand_in, float) else "<q"
        return struct.unpack_from(code, data, offset)[0]

    value = from_json(header["value"], take_tensor, take_number)
    if next(offsets, None) is not None:
        raise MessageError(f"the message carries {count} numbers, and its header stands for fewer")
    if unused:
        raise MessageError(
            f"the message never names tensor {next(iter(unused))}; "
            f"it must name each of its {total} tensors once"
        )
    return value


def _parse_frame(
    data: bytes | bytearray | memoryview, size: int
) -> tuple[dict[str, Any], int, int]:
    """The header of a message, the offset of its numbers and their count.

    Args:
        size: bytes of the whole message.
    """
    if len(data) < FRAME.size:
        raise MessageError(f"a message has at least {FRAME.size} bytes, got {len(data)}")
    magic, length, count = FRAME.unpack_from(data)
    if magic != MAGIC:
        raise MessageError(
            f"these bytes are no unalike message: they start with {bytes(magic)!r}, not {MAGIC!r}"
        )
    numbers_start = FRAME.size + length
    if _padded(numbers_start + 8 * count) > len(data):
        raise MessageError(
            f"the message is cut short: its header has {length + 8 * count} bytes, "
            f"got {len(data) - FRAME.size}"
        )
    text = bytes(data[FRAME.size : numbers_start])
    _check_memory(text, size)
    try:
        header = json.loads(text.decode("ascii"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the message's header cannot be read: {error}") from None
    is_header = isinstance(header, dict) and list(header) == ["value", "tensors"]
    if not is_header or not isinstance(header["tensors"], list):
        raise MessageError("the message's header must hold exactly `value`, `tensors`")
    return header, numbers_start, count


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of JSON; ValueError where a key comes twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key comes twice")
    return value


def _check_padding(data: bytes | bytearray | memoryview, start: int, end: int) -> None:
    if bytes(data[start:end]).strip(b"\0"):
        raise MessageError("the message has bytes other than 0 between its parts")


def _check_memory(header: bytes, size: int) -> None:
    """Raise MessageError for a header that would take much more memory than the message's size.

    Looks at the text only, before anything is built from it.
    """
    memory = MEMORY_OF_TEXT * len(header)
    memory += sum(cost * header.count(character) for character, cost in MEMORY_OF.items())
    allowed = max(MEMORY_FACTOR * size, MIN_MEMORY)
    if memory > allowed:
        raise MessageError(
            f"the message of {size:,} bytes would take {memory:,} bytes of memory, over the limit "
            f"of {allowed:,}: it has too many small parts; send numbers as a tensor"
        )


def _parse_tensors(descriptions: list[Any], body: bytearray) -> dict[int, Tensor]:
    """The tensors in `body` by index. Their memory is `body`'s."""
    tensors: dict[int, Tensor] = {}
    offset = 0
    for i, description in enumerate(descriptions):
        tensors[i], offset = _parse_tensor(description, body, offset)
    if offset != len(body):
        raise MessageError(
            f"the message carries {len(body)} bytes of tensors, its header describes {offset}"
        )
    return tensors


def require_dict(value: Value) -> dict[str, Value]:
    """Return the value if it is a dict, as requests and replies are; raise MessageError if not."""
    if not isinstance(value, dict):
        raise MessageError(f"a call and its reply are dicts, got a {type(value).__name__}")
    return value


def copy_value(value: Value, device: str | None = None) -> Value:
    """Copy a value for a receiver in the same process: no tensor shares memory with the original.

    Args:
        device: where the copies go; None: each stays on its tensor's device.
    """
    return copy_values([value], device)[0]


def copy_values(
    values: Sequence[Value], device: str | None = None, forms: Forms | None = None
) -> list[Value]:
    """Copy several values as `copy_value` does.

    The norms of all their tensors are computed at once and kept with the copies, so that
    `find_nonfinite` need not read each of them: that would stall a GPU.

    Args:
        forms: where forms are found.
    """
    forms = forms or Forms()
    groups: dict[Hashable, list[int]] = {}
    tensors: list[list[Tensor]] = []
    for i, value in enumerate(values):
        form, found = forms.of(value)
        tensors.append(found)
        groups.setdefault(form, []).append(i)
    copies: list[Value] = [None] * len(values)
    originals: dict[int, Value] = {}
    others = []
    for members in groups.values():
        own = [tensors[i] for i in members]
        if not _may_stack(own, device):
            others += members
            originals.update((id(t), t) for i in members for t in tensors[i] if _is_real(t))
            continue
        for i, parts in zip(members, _copy_stacked(own), strict=True):
            copies[i] = _rebuild(values[i], iter(parts))
    norms = dict(zip(originals, _norms(list(originals.values())), strict=True))
    for i in others:
        copies[i] = _copy(values[i], device, norms)
    return copies


def _may_stack(own: list[list[Tensor]], device: str | None) -> bool:
    """Whether the tensors of values of one form may be copied into common memory."""
    first = own[0]
    if len(own) < 3 or not first:
        return False
    if any(
        t.layout is not torch.strided or torch.device(device or t.device) != t.device for t in first
    ):
        return False
    return sum(_tensor_size(tensor) for tensor in first) <= MAX_STACKED


@torch.no_grad()
def _copy_stacked(own: list[list[Tensor]]) -> list[list[Tensor]]:
    """Copies of the tensors of several values of one form, with their norms.

    Copies of one place in all values lie in one block of memory: few kernels write all of them.
    """
    places: list[tuple[Tensor, ...]] = []
    norms: list[Tensor] = []
    real = []
    for originals in zip(*own, strict=True):
        first = originals[0]
        length = first.numel()
        # Each begins where a kernel may read whole vectors.
        block = first.new_empty(len(own), -(-length // ALIGN) * ALIGN)
        rows = block[:, :length].view(len(own), *first.shape)
        if all(tensor is first for tensor in originals):
            rows.copy_(first)
        else:
            rows.copy_(torch.stack(originals))  # faster than with out=rows
        if _is_real(first):
            real.append(len(places))
            norms.append(torch.linalg.vector_norm(block[:, :length], dim=1).double())
        # Detached: as views they could not be changed where gradients are recorded.
        places.append(tuple(map(Tensor.detach, rows.unbind())))
    if norms:
        for place, values in zip(real, torch.stack(norms).tolist(), strict=True):
            version = places[place][0]._version  # all have that of the block
            for row, norm in zip(places[place], values, strict=True):
                row.norm_of_version = (version, norm)  # type: ignore[attr-defined]
    return [list(parts) for parts in zip(*places, strict=True)]


def _rebuild(value: Value, tensors: Iterator[Tensor]) -> Value:
    """The value with other tensors in the place of its own, in their order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _rebuild(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rebuild(item, tensors) for item in value]
    return value


def _copy(value: Value, device: str | None, norms: dict[int, float]) -> Value:
    tensors = [leaf for leaf in _leaf_values(value) if isinstance(leaf, Tensor)]
    copies = _copy_tensors(tensors, device)
    for tensor, copied in zip(tensors, copies, strict=True):
        if id(tensor) in norms:
            copied.norm_of_version = (copied._version, norms[id(tensor)])  # type: ignore[attr-defined]
    return _rebuild(value, iter(copies))


@torch.no_grad()
def _copy_tensors(tensors: list[Tensor], device: str | None) -> list[Tensor]:
    """Copies of tensors. Those of one kind that stay on a GPU are copied by one kernel."""
    copies: list[Tensor] = [tensor.new_empty(0) for tensor in tensors]
    groups: dict[Hashable, list[int]] = {}
    for i, tensor in enumerate(tensors):
        stays = tensor.is_cuda and (device is None or torch.device(device).type == "cuda")
        groups.setdefault((tensor.device, tensor.dtype) if stays else None, []).append(i)
    for kind, members in groups.items():
        own = [tensors[i].detach() for i in members]
        if kind is None:
            new = [tensor.to(device or tensor.device, copy=True).contiguous() for tensor in own]
        else:
            new = _copy_into_one_block(own)
        for i, copied in zip(members, new, strict=True):
            copies[i] = copied
    return copies


def _copy_into_one_block(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors of one kind, one after another in new memory.

    Channels-last images stay in this order: torch copies between orders one tensor at a time.
    """
    starts = [0]  # where a kernel may read whole vectors
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.numel() // ALIGN) * ALIGN)
    memory = tensors[0].new_empty(starts[-1])
    copies = []
    for tensor, start in zip(tensors, starts, strict=False):
        copied = memory[start : start + tensor.numel()]
        if tensor.is_contiguous(memory_format=torch.channels_last):
            copies.append(copied.as_strided(tensor.shape, tensor.stride()))
        else:
            copies.append(copied.view(tensor.shape))
    copy_all(copies, tensors)
    return copies


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


def find_nonfinite(value: Value, largest: float = math.inf) -> str | None:
    """Path of the first NaN, infinity or magnitude beyond `largest`; None where there is none.

    Paths are built only once something is wrong: they may be much longer than the value.
    """
    tensors: list[Tensor] = []
    if _may_be_finite(value, largest, tensors) and all(
        _within(norm, largest) for norm in _norms(tensors)
    ):
        return None
    keys = find_leaf(value, lambda leaf: not _is_finite(leaf, largest))
    return None if keys is None else format_path(keys) or "the reply"


def find_leaf(value: Value, is_wrong: Callable[[Value], bool]) -> list[object] | None:
    """Keys and indices that lead to the first leaf that is wrong; None where none is."""
    if isinstance(value, dict):
        items: Iterable[tuple[object, Value]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return [] if is_wrong(value) else None
    for key, item in items:
        keys = find_leaf(item, is_wrong)
        if keys is not None:
            return [key, *keys]
    return None


def format_path(keys: Iterable[object]) -> str:
    """A dotted path for an error message, cut to 200 characters."""
    return ".".join(str(key)[:200] for key in keys)[:200]


def _leaf_values(value: Value) -> Iterator[Value]:
    """Every tensor, number and string."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaf_values(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaf_values(item)
    else:
        yield value


def _may_be_finite(value: Value, largest: float, tensors: list[Tensor]) -> bool:
    """A fast test: whether numbers are finite and at most `largest`, as far as they are known.

    The norm of a tensor is at least its largest magnitude, and finite only if all its elements
    are.

    Args:
        tensors: those whose norm is not known are appended to it.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            version, norm = getattr(value, "norm_of_version", (None, math.nan))
            if version is not None and version == value._version:
                return _within(norm, largest)
            tensors.append(value)
        return True
    if isinstance(value, dict):
        return all([_may_be_finite(item, largest, tensors) for item in value.values()])
    if isinstance(value, (list, tuple)):
        return all([_may_be_finite(item, largest, tensors) for item in value])
    return not isinstance(value, float) or _within(abs(value), largest)


def _is_real(leaf: Value) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _norms(tensors: list[Any]) -> list[float]:
    """The norm of each tensor. Those of one kind are read at once: each reading stalls a GPU."""
    norms: list[float] = [math.nan] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        version, norm = getattr(tensor, "norm_of_version", (None, math.nan))
        if version is not None and version == tensor._version:
            norms[i] = norm
        else:
            groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    for members in groups.values():
        computed = torch._foreach_norm([tensors[i].detach() for i in members])
        for i, norm in zip(members, torch.stack(computed).tolist(), strict=True):
            norms[i] = norm
    return norms


def _within(magnitude: float, largest: float) -> bool:
    """Whether a magnitude is finite and at most `largest`."""
    return math.isfinite(magnitude) and magnitude <= largest


def _is_finite(leaf: Value, largest: float) -> bool:
    if isinstance(leaf, Tensor):
        if not leaf.is_floating_point() or not leaf.numel():
            return True
        return _within(torch.linalg.vector_norm(leaf.detach(), math.inf).item(), largest)
    return not isinstance(leaf, float) or _within(abs(leaf), largest)


def _same_number(number: int | float) -> int | float:
    return number


def to_json(
    value: Value,
    on_tensor: Callable[[str, Tensor], int | str],
    on_number: Callable[[int | float], int | float] = _same_number,
    path: str = "",
    depth: int = 0,
) -> object:
    """A value as JSON.

    Args:
        on_tensor: called with the path and the tensor; {"$": what it returns} takes its place.
        on_number: called with each number; what it returns takes its place.
        path, depth: where in the whole value this one is, for error messages.
    Raises: MessageError, if the value holds anything else or is nested too deep.
    """
    where = path or "the message"
    if depth > MAX_DEPTH:
        raise MessageError(f"{path[:200]} nests deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and abs(value) >= MAX_INT:
        raise MessageError(f"{where} is a number of more than 4000 digits")
    if isinstance(value, (int, float)):
        return on_number(value)
    if isinstance(value, Tensor):
        return {"$": on_tensor(path, value)}
    prefix = f"{path}/" if path else ""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise MessageError(
                    f"{where} has the key {key!r}; keys are strings that do not start with $"
                )
            _check_key(key)
        return {
            key: to_json(item, on_tensor, on_number, f"{prefix}{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            to_json(item, on_tensor, on_number, f"{prefix}{i}", depth + 1)
            for i, item in enumerate(value)
        ]
    raise MessageError(
        f"{where} is a {type(value).__name__}; "
        "a message carries tensors, numbers, strings, lists and dicts"
    )


def from_json(
    json_value: object,
    get_tensor: Callable[[object], Tensor],
    get_number: Callable[[int | float], int | float] = _same_number,
    depth: int = 0,
) -> Value:
    """Undo `to_json`.

    Args:
        get_tensor: called with i for each {"$": i}; returns the tensor.
        get_number: called with each number; returns the number that it stands for.
    Raises: MessageError, if `to_json` could not have made it.
    """
    if depth > MAX_DEPTH:
        raise MessageError(f"the message nests deeper than {MAX_DEPTH} levels")
    if isinstance(json_value, dict):
        if "$" in json_value:
            if len(json_value) != 1:
                raise MessageError("the message has a tensor's place with other keys beside it")
            return get_tensor(json_value["$"])
        for key in json_value:
            if key.startswith("$"):
                raise MessageError(
                    f"the message has the key {key[:40]!r}; keys do not start with $"
                )
            _check_key(key)
        return {
            key: from_json(item, get_tensor, get_number, depth + 1)
            for key, item in json_value.items()
        }
    if isinstance(json_value, list):
        return [from_json(item, get_tensor, get_number, depth + 1) for item in json_value]
    if isinstance(json_value, (int, float)) and not isinstance(json_value, bool):
        return get_number(json_value)
    return json_value  # type: ignore[return-value]


def _check_key(key: str) -> None:
    if len(key) > MAX_KEY:
        raise MessageError(
            f"the message has the key {key[:40]!r}... of {len(key):,} characters; "
            f"a key may have {MAX_KEY:,}"
        )


def _describe(value: Value) -> tuple[bytes, list[int | float], list[Tensor]]:
    """The JSON header of a value, its numbers and its tensors, in order."""
    tensors: list[Tensor] = []
    numbers: list[int | float] = []

    def collect_number(number: int | float) -> int | float:
        if isinstance(number, int) and number not in INT64:
            return number
        numbers.append(number)
        return 0.0 if isinstance(number, float) else 0

    def collect_tensor(path: str, tensor: Tensor) -> int:
        _check_tensor(path or "the message", tensor)
        tensors.append(tensor)
        return len(tensors) - 1

    json_value = to_json(value, collect_tensor, collect_number)
    table = [[_dtype_name(tensor), *tensor.shape] for tensor in tensors]
    header = json.dumps({"value": json_value, "tensors": table}, separators=(",", ":"))
    return header.encode(), numbers, tensors


def _check_tensor(where: str, tensor: Tensor) -> None:
    if _dtype_name(tensor) not in DTYPES:
        raise MessageError(
            f"{where} has dtype {tensor.dtype}; a message carries {', '.join(DTYPES)}"
        )
    if tensor.layout is not torch.strided:
        raise MessageError(
            f"{where} is a sparse tensor; send to_dense() of it, or its indices and values"
        )
    if tensor.dim() > MAX_AXES:
        raise MessageError(f"{where} has {tensor.dim()} axes; a tensor may have {MAX_AXES}")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _parse_tensor(description: Any, body: bytearray, offset: int) -> tuple[Tensor, int]:
    """The tensor at `offset` and the offset after it; it shares memory with `body`."""
    if not _is_description(description):
        raise MessageError(
            f"the message describes a tensor as {str(description)[:80]}; expected [dtype, *shape]"
        )
    name, *shape = description
    dtype = DTYPES[name]
    count = math.prod(shape)
    length = count * dtype.itemsize
    if offset + length > len(body):
        raise MessageError(
            f"the message is cut short: a tensor of shape {shape} needs {length} bytes, "
            f"got {len(body) - offset}"
        )
    if not count:
        return torch.empty(shape, dtype=dtype), offset
    if dtype is torch.bool:
        values = torch.frombuffer(body, dtype=torch.uint8, count=count, offset=offset)
        if values.max() > 1:
            raise MessageError("a bool tensor in the message holds bytes other than 0 and 1")
    end = offset + _padded(length)
    _check_padding(body, offset + length, end)
    tensor = torch.frombuffer(body, dtype=dtype, count=count, offset=offset).reshape(shape)
    return tensor, end


def _is_description(description: Any) -> bool:
    """Whether it is [dtype, *shape] of a tensor that could be sent."""
    if not isinstance(description, list) or not description:
        return False
    name, *shape = description
    if not isinstance(name, str) or name not in DTYPES or len(shape) > MAX_AXES:
        return False
    if not all(type(length) is int and 0 <= length <= MAX_ELEMENTS for length in shape):
        return False
    return math.prod(length or 1 for length in shape) <= MAX_ELEMENTS


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _tensor_size(tensor: Tensor) -> int:
    return _padded(tensor.numel() * tensor.element_size())


def _total_size(header: bytes, numbers: list[int | float], tensors: list[Tensor]) -> int:
    start = _padded(FRAME.size + len(header) + 8 * len(numbers))
    return start + sum(_tensor_size(tensor) for tensor in tensors)


def _check_limit(length: int, limit: int) -> int:
    if length > limit:
        raise MessageError(f"the message has {length:,} bytes, over the limit of {limit:,}")
    return length
