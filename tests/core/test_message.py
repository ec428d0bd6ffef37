"""Messages: decode inverts encode, the size is known beforehand, invalid bytes give one error."""

import ast
import contextlib
import json
import math
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import unalike
from unalike.base import message
from unalike.base.message import (
    BLOCK,
    DTYPES,
    FRAME,
    MAGIC,
    MAX_DEPTH,
    MAX_KEY,
    EncodedSizes,
    MessageError,
    _copy_into_one_block,
    copy_value,
    copy_values,
    decode,
    encode,
    encode_header,
    encode_tensors,
    encoded_size,
    find_nonfinite,
    leaves,
)

quick = settings(deadline=None, max_examples=150)


@st.composite
def tensors(draw):
    """Tensors of any dtype, with 0 to 3 axes, contiguous or not, with NaN and infinity."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = draw(
        st.lists(st.integers(-128, 127), min_size=math.prod(shape), max_size=math.prod(shape))
    )
    tensor = torch.tensor(numbers, dtype=torch.int16).reshape(shape).to(dtype)
    if dtype.is_floating_point and tensor.numel():
        tensor.view(-1)[0] = draw(st.sampled_from([0.5, math.nan, math.inf, -math.inf, -0.0]))
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


keys = st.text(max_size=6).filter(lambda key: not key.startswith("$"))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars | tensors(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def same(a, b):
    """Equal in type and content; NaN equals NaN, and a tensor's bits count."""
    if isinstance(a, torch.Tensor):
        bits = [
            t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
            for t in (a, b)
        ]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return (
            isinstance(b, list)
            and len(a) == len(b)
            and all(same(*pair) for pair in zip(a, b, strict=True))
        )
    return type(a) is type(b) and (a == b or (a != a and b != b))


def memory_ranges(value):
    """(start, end) of the memory of every tensor."""
    storages = [
        t.untyped_storage() for _, t in leaves(value) if isinstance(t, torch.Tensor) and t.numel()
    ]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


@quick
@given(values)
def test_decode_inverts_encode(value):
    assert same(value, decode(encode(value)))
    assert same(value, decode(bytes(encode(value)))) and same(
        value, decode(memoryview(encode(value)))
    )


@quick
@given(values)
def test_header_and_tensors_concatenated_are_the_encoded_message(value):
    header, tensors, total = encode_header(value)
    body = encode_tensors(tensors)
    assert header + body == encode(value) and total == len(header) + len(body)
    assert encode(decode(header, tensors=memoryview(body))) == encode(value)
    with pytest.raises(MessageError):
        decode(header, tensors=body + bytes(BLOCK))


@given(values)
def test_encoded_size_is_the_length_of_the_encoded_message(value):
    assert encoded_size(value) == len(encode(value)) and encoded_size(value) % BLOCK == 0


@quick
@given(values)
def test_copy_value_is_equal_and_shares_no_memory(value):
    received = copy_value(value)
    assert same(value, received)
    for start, end in memory_ranges(value):
        assert all(b <= start or end <= a for a, b in memory_ranges(received))


def test_decoded_tensors_do_not_share_memory_with_the_bytes():
    data = encode({"w": torch.ones(3)})
    received = decode(data)
    data[:] = bytes(len(data))
    received["w"] += 1
    assert received["w"].tolist() == [2, 2, 2]
    with_grad = {"w": torch.ones(3, requires_grad=True)}
    assert not copy_value(with_grad)["w"].requires_grad
    assert not decode(encode(with_grad))["w"].requires_grad


def test_tuples_arrive_as_lists_when_encoded_or_copied():
    assert (
        decode(encode({"a": (1, (2, 3))})) == copy_value({"a": (1, (2, 3))}) == {"a": [1, [2, 3]]}
    )


@pytest.mark.parametrize("value", ["äöü 漢字 🦆", "\ud800", "\x00\n\x1f", "", {"ключ": {"": 1}}])
def test_any_text_can_be_encoded(value):
    assert decode(encode(value)) == value and encoded_size(value) == len(encode(value))


def test_encode_size_and_decode_respect_the_limit():
    value = {"w": torch.zeros(1000)}
    exact = encoded_size(value)
    assert same(decode(encode(value, exact), exact), value)
    data = encode(value)
    for refuse in (
        lambda: encode(value, exact - 1),
        lambda: encoded_size(value, exact - 1),
        lambda: decode(data, exact - 1),
    ):
        with pytest.raises(MessageError, match=f"{exact:,} bytes, over the limit of {exact - 1:,}"):
            refuse()


@pytest.mark.parametrize(
    "value, names",
    [
        ({"a": object()}, "a is a object"),
        ({"a": [1, {2, 3}]}, "a/1 is a set"),
        (b"bytes", "the message is a bytes"),
        ({"f": print}, "f is a builtin_function"),
        ({1: 2}, "key 1"),
        ({"a": {"$": 0}}, r"a has the key '\$'"),
        ({"$x": 0}, r"the message has the key '\$x'"),
        ({"z": torch.zeros(2, dtype=torch.complex64)}, "z has dtype torch.complex64"),
        (torch.zeros(2, dtype=torch.uint16), "the message has dtype torch.uint16"),
        ({"s": torch.eye(3).to_sparse()}, "s is a sparse tensor"),
        ({"n": 10**5000}, "n is a number of more than"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_in_one_sentence(value, names):
    for door in (encode, encoded_size):
        with pytest.raises(MessageError, match=names) as caught:
            door(value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def nested(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


def test_too_deep_or_circular_values_are_rejected():
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(MessageError, match=f"deeper than {MAX_DEPTH}"):
        encode(nested(MAX_DEPTH + 1))
    circle = []
    circle.append(circle)
    with pytest.raises(MessageError, match=f"deeper than {MAX_DEPTH}"):
        encoded_size(circle)


# Bytes that are not a message

SMALL = {
    "w": torch.arange(6.0).reshape(2, 3),
    "on": torch.tensor([True, False]),
    "name": "ada",
    "rows": [1, 2.5, None],
}


def test_a_truncated_or_extended_message_is_rejected():
    for value in (SMALL, {"name": "ada"}):
        data = bytes(encode(value))
        for length in range(len(data)):
            with pytest.raises(MessageError):
                decode(data[:length])
        with pytest.raises(MessageError):
            decode(data + bytes(BLOCK))


@settings(deadline=None, max_examples=500)
@given(
    st.lists(
        st.tuples(st.integers(0, len(encode(SMALL)) - 1), st.integers(1, 255)),
        min_size=1,
        max_size=4,
    )
)
def test_changed_bytes_are_rejected_or_give_a_valid_value(changes):
    data = encode(SMALL)
    for at, by in changes:
        data[at] ^= by
    check_rejected_or_valid(data)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(list(b'0123456789[]{}",:$-.eNtf\\'))),
        min_size=1,
        max_size=6,
    )
)
def test_a_changed_header_is_rejected_or_gives_a_valid_value(changes):
    data = encode(SMALL)
    length = FRAME.unpack_from(data)[1]
    for at, byte in changes:
        data[FRAME.size + at % length] = byte
    check_rejected_or_valid(data)


@quick
@given(st.binary(max_size=600))
def test_random_bytes_are_rejected(noise):
    with pytest.raises(MessageError):
        decode(noise)


def check_rejected_or_valid(data):
    """Either a MessageError, or a value that could have been sent."""
    try:
        value = decode(data)
    except MessageError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert same(value, decode(encode(value)))


def with_header(header, tail=b"", numbers=()):
    if not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":")).encode()
    start = (
        FRAME.pack(MAGIC, len(header), len(numbers))
        + header
        + b"".join(struct.pack("<q", n) for n in numbers)
    )
    return start + bytes(-len(start) % BLOCK) + tail


@pytest.mark.parametrize(
    "shape",
    [
        [2**40],
        [2**20, 2**20, 2**20],
        [10**4000] * 16,
        [0, 2**70],
        [0, 2**62, 2**62],
        [2**62, 2**62, 0],
        [-1],
        [1.0],
        [True],
        ["2"],
        [None],
        [[2]],
        [1] * 17,
        [0] * 100,
    ],
)
def test_an_impossible_shape_is_rejected_without_allocating(shape):
    for dtype in ("float64", "bool"):
        with pytest.raises(MessageError) as caught:
            decode(with_header({"value": {"$": 0}, "tensors": [[dtype, *shape]]}, bytes(BLOCK)))
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "header, says",
    [
        ([], "exactly"),
        ({"value": ""}, "exactly"),
        ({"value": "", "tensors": [], "code": "x"}, "exactly"),
        ({"value": "", "tensors": 3}, "exactly"),
        ({"value": "", "tensors": [3]}, r"\[dtype, \*shape\]"),
        ({"value": "", "tensors": [["float7", 1]]}, r"\[dtype, \*shape\]"),
        ({"value": 1, "tensors": []}, "holds the number 1"),
        ({"value": [0.5], "tensors": []}, "holds the number 0.5"),
        ({"value": math.nan, "tensors": []}, "holds the number nan"),
        ({"value": 0, "tensors": []}, "more than its 0 numbers"),
        ({"value": {"$": 0}, "tensors": []}, "names tensor 0"),
        ({"value": {"$": [0]}, "tensors": []}, "names tensor"),
        ({"value": {"$": True}, "tensors": [["float32", 0]]}, "names tensor True"),
        ({"value": [{"$": 0}, {"$": 0}], "tensors": [["float32", 0]]}, "once"),
        ({"value": {"$": 0, "b": ""}, "tensors": [["float32", 0]]}, "other keys"),
        ({"value": {"$b": ""}, "tensors": []}, r"\$b"),
        ({"value": "", "tensors": [["float32", 0]]}, "once"),
        (b'{"value":' + b"[" * 5_000, "header cannot be read"),
        (b'{"value":' + b"[" * 100_000, "too many small parts"),
        (b'{"value":' + b"[" * 50 + b"]" * 50 + b',"tensors":[]}', "deeper"),
        (b'{"value":{"a":"","a":""},"tensors":[]}', "a key comes twice"),
        (b'{"tensors":[],"value":""}', "exactly"),
        ('{"value":"ä","tensors":[]}'.encode(), "header cannot be read"),
        (b"\xff\xfe\x00", "header cannot be read"),
        (b'{"value": ' + b"9" * 5000 + b', "tensors": []}', "header cannot be read"),
    ],
)
def test_an_inconsistent_header_is_rejected(header, says):
    with pytest.raises(MessageError, match=says):
        decode(with_header(header))


def test_too_few_or_too_many_numbers_are_rejected():
    assert decode(with_header({"value": [0, {"a": 0}], "tensors": []}, numbers=[7, -1])) == [
        7,
        {"a": -1},
    ]
    with pytest.raises(MessageError, match="carries 2 numbers, and its header stands for fewer"):
        decode(with_header({"value": [0], "tensors": []}, numbers=[7, -1]))
    with pytest.raises(MessageError, match="cut short"):
        decode(FRAME.pack(MAGIC, 4, 2**32 - 1) + bytes(240))


@pytest.mark.parametrize("a, b", [(0, 2**63 - 1), (1.0, -1.2345678901234567e-300), (math.nan, 0.5)])
def test_the_size_does_not_depend_on_the_numbers(a, b):
    """Many of them: digits would cross a block."""
    assert encoded_size({"n": [a] * 100}) == encoded_size({"n": [b] * 100})


def test_bool_bytes_other_than_zero_and_one_are_rejected():
    with pytest.raises(MessageError, match="bool"):
        decode(
            with_header(
                {"value": {"$": 0}, "tensors": [["bool", 2]]}, b"\x01\x02" + bytes(BLOCK - 2)
            )
        )


def test_padding_other_than_zero_is_rejected():
    for value in (SMALL, {"name": "ada"}):
        data = encode(value)
        for at in [len(data) - 1, BLOCK - 1]:
            spoilt = bytearray(data)
            assert spoilt[at] == 0
            spoilt[at] = 1
            with pytest.raises(MessageError):
                decode(spoilt)


def test_bytes_after_a_header_whose_tensors_come_apart_are_rejected():
    header, tensors, _ = encode_header(SMALL)
    body = encode_tensors(tensors)
    assert same(decode(header, tensors=body), SMALL)
    for more in (bytes(BLOCK), b"hidden"):
        with pytest.raises(MessageError, match="before its tensors"):
            decode(header + more, tensors=body)


def test_keys_are_bounded():
    decode(encode({"k" * MAX_KEY: 1}))
    for door in (encode, encoded_size):
        with pytest.raises(MessageError, match="a key may have 1,000"):
            door({"k" * (MAX_KEY + 1): 1})
    header = {"value": {"k" * (MAX_KEY + 1): ""}, "tensors": []}
    with pytest.raises(MessageError, match="a key may have 1,000"):
        decode(with_header(header))


SMALL_PARTS = {
    "lists": b"[]",
    "dicts": b"{}",
    "dicts of one": b'{"ab":""}',
    "words": b'"ab"',
    "nulls": b"null",
    "escapes": b'"\\ud83e\\udd86"',
    "many keys": None,
    "long keys": None,
    "empty tensors": None,
}


def many_small_parts(kind, size):
    """A message of about `size` bytes that consists of small parts."""
    if kind == "many keys":
        body = b",".join(b'"%07d":[]' % i for i in range(size // 12))
        return with_header(b'{"value":{' + body + b'},"tensors":[]}')
    if kind == "long keys":
        leaves = b",".join(b'"%04d":0' % i for i in range(1000))
        body = b'"' + b"k" * (size - 17_000) + b'":{' + leaves + b"}"
        return with_header(b'{"value":{' + body + b'},"tensors":[]}', numbers=[0] * 1000)
    if kind == "empty tensors":
        count = size // 24
        names = b",".join(b'{"$":%d}' % i for i in range(count))
        table = b",".join([b'["bool",0]'] * count)
        return with_header(b'{"value":[' + names + b'],"tensors":[' + table + b"]}")
    part = SMALL_PARTS[kind]
    body = b",".join([part] * (size // (len(part) + 1)))
    return with_header(b'{"value":[' + body + b'],"tensors":[]}')


@pytest.mark.parametrize("kind", SMALL_PARTS)
@pytest.mark.parametrize("size", [20_000, 400_000])
def test_decoding_takes_less_than_ten_times_the_message_in_memory(kind, size):
    """Or 1 MiB. Decoded and checked for NaN, as a reply is; C allocations of tensors not counted."""
    data = many_small_parts(kind, size)
    tracemalloc.start()
    try:
        with contextlib.suppress(MessageError):
            find_nonfinite(decode(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < max(10 * len(data), 1024**2)


def test_large_honest_messages_are_not_taken_for_hostile_ones():
    weights = {f"encoder.layers.{i}.attention.weight": torch.zeros(1) for i in range(3000)}
    counters = {f"norms.{i}.num_batches_tracked": torch.tensor(0) for i in range(3000)}
    numbers = {"rounds": list(range(100_000)), "losses": [0.5] * 100_000}
    labels = {"labels": [f"label_{i}" for i in range(20_000)]}
    for value in (weights, counters, numbers, labels):
        assert same(decode(encode(value)), value)


def test_bytes_of_another_format_are_rejected_by_their_magic():
    with pytest.raises(MessageError, match="no unalike message"):
        decode(b"PK\x03\x04" + bytes(600))


# NaN and infinity


@pytest.mark.parametrize(
    "value, path",
    [
        ({"a": 1.0, "b": [torch.zeros(2), torch.tensor([1.0, math.nan])]}, "b.1"),
        (math.inf, "the reply"),
        ({"loss": -math.inf}, "loss"),
        (torch.tensor(math.nan, dtype=torch.bfloat16), "the reply"),
        (
            {
                "big": torch.full((4,), 3e38),
                "half": torch.full((4,), 6e4, dtype=torch.float16),
                "n": torch.tensor([2**62]),
            },
            None,
        ),
        ({"empty": torch.zeros(0), "text": "nan", "none": None}, None),
        ({"opposite": torch.tensor([math.inf, -math.inf])}, "opposite"),
    ],
)
def test_find_nonfinite_returns_the_path_of_the_first_nan_or_infinity(value, path):
    assert find_nonfinite(value) == path


# Nothing executable


def test_no_module_of_the_package_uses_pickle():
    """Neither pickle modules, nor torch.load and torch.save, nor send and recv of a pipe.

    Published weights are .pth files: there torch.load may be called with weights_only=True. A
    worker process that is not forked gets its clients from its own parent by pickle.
    """
    weights = Path("models", "efficientnet.py")
    own_workers = Path("engines", "process.py")
    for path in Path(unalike.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        safe = {
            id(call.func)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and path.match(str(weights))
            and any(
                k.arg == "weights_only"
                and isinstance(k.value, ast.Constant)
                and k.value.value is True
                for k in call.keywords
            )
        }
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else names
            if path.match(str(own_workers)):
                names = [name for name in names if name != "pickle"]
            assert not {n.split(".")[0] for n in names} & {
                "pickle",
                "cloudpickle",
                "dill",
                "joblib",
                "shelve",
                "marshal",
            }, path
            if isinstance(node, ast.Attribute):
                on = ast.unparse(node.value)
                assert not (on == "torch" and node.attr in ("load", "save")) or (
                    node.attr == "load" and id(node) in safe
                ), path
                assert not (on.endswith("pipe") and node.attr in ("send", "recv")), path


def test_decoding_copies_the_tensors_once():
    """Memory at the peak is the message itself and one copy of its tensors, no second one."""
    data = bytes(encode({"weights": torch.zeros(5_000_000)}))
    tracemalloc.start()
    decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * len(data)


@pytest.mark.parametrize("same", [True, False])
def test_copies_of_messages_of_one_form_are_apart_from_each_other(same):
    """They lie in one block of memory: what one receiver does to its own changes no other."""
    tensors = [
        {"w": torch.randn(3, 2), "n": torch.tensor(i), "empty": torch.ones(0)} for i in range(4)
    ]
    bodies = [{"parameters": tensors[0 if same else i], "loss": 0.5 * i} for i in range(4)]
    bodies.append({"parameters": {"w": torch.full((3, 2), math.nan)}, "loss": 1.0})
    expected = [decode(encode(body)) for body in bodies]
    copies = copy_values(bodies)
    for copied, wanted in zip(copies[:4], expected):
        assert copied["loss"] == wanted["loss"] and list(copied) == list(wanted)
        for name, tensor in copied["parameters"].items():
            assert torch.equal(tensor, wanted["parameters"][name]) and tensor.is_contiguous()
    assert find_nonfinite(copies[4]) == "parameters.w"
    weight = nn.Parameter(torch.ones(3, 2))
    copies[0]["parameters"]["w"].mul_(weight)  # where gradients are recorded, too
    copies[1]["parameters"]["w"].fill_(math.inf)
    assert find_nonfinite(copies[1]) == "parameters.w"
    assert find_nonfinite(copies[2]) is None
    assert torch.equal(copies[2]["parameters"]["w"], bodies[2]["parameters"]["w"])
    assert bodies[1]["parameters"]["w"].isfinite().all()


def test_sizes_of_many_messages_are_those_of_each():
    values = [{"a": torch.ones(3), "n": n} for n in (1, 2, 2**70, True, None, 0.5, "x", "xy" * 300)]
    values += [{"a": torch.ones(3).double(), "n": 1}, {"b": torch.ones(3), "n": 1}, {"n": [1, 2]}]
    sizes = EncodedSizes()
    for value in 2 * values:
        assert sizes.of(value) == len(encode(value))
    circle = {}
    circle["self"] = circle
    for wrong in (circle, {"a": object()}, {1: 2}):
        with pytest.raises(MessageError):
            sizes.of(wrong)


def test_sizes_of_few_forms_are_remembered(monkeypatch):
    """A run may send words without end."""
    monkeypatch.setattr(message, "MAX_FORMS", 3)
    sizes = EncodedSizes()
    for number in range(10):
        value = {"word": "x" * 100 * number}
        assert sizes.of(value) == len(encode(value))
        assert len(sizes.known) <= 3


def test_copies_in_one_block_keep_the_order_of_channels_last_images():
    """As on a GPU, where copies between orders in memory take many kernels."""
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    parts = [images, torch.randn(6, 7)[:, ::2], torch.randn(1).expand(3, 2), torch.tensor(4.0)]
    copies = _copy_into_one_block(parts)
    assert copies[0].stride() == images.stride()
    for copied, part in zip(copies, parts, strict=True):
        assert torch.equal(copied, part)
        copied.zero_()
    assert all(part.abs().sum() > 0 for part in parts)
