"""Values that fit an operation's annotations pass; others are refused with their path."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
import torch
from pydantic import Field
from torch import Tensor

from unalike.base.message import Value
from unalike.core.signatures import Shape, signature_of, spec_mismatch, tensor_spec, validator_for


class Reply(TypedDict):
    parameters: dict[str, Tensor]
    samples: int
    loss: float
    more: NotRequired[str]


GOOD = {"parameters": {"w": torch.ones(2)}, "samples": 3, "loss": 0.5}
Rows = Annotated[Tensor, Shape("rows", "width")]
SIZES = {"rows": 2, "width": 3}


@pytest.mark.parametrize(
    "hint, value",
    [
        (Reply, GOOD),
        (Reply, GOOD | {"more": "x"}),
        (Reply, GOOD | {"loss": 1}),
        (Value, {"a": [1, None, torch.ones(1)]}),
        (Any, object()),
        (None, None),
        (Rows, torch.zeros(2, 3)),
        (Rows, torch.zeros(2, 3, dtype=torch.bfloat16)),
        (list[float], [1.0, 2]),
        (dict[str, float] | None, None),
        (Annotated[list[float], Shape("rows")], [1.0, 2.0]),
        (Literal["a", "b"], "b"),
        (Annotated[float, Field(gt=0, le=1)], 1.0),
        (Annotated[Tensor, Shape(None, whole=True)], torch.zeros(7, dtype=torch.int64)),
        ("a name", 3),
    ],
)
def test_a_value_that_fits_its_annotation_passes(hint, value):
    assert validator_for(hint)(value, SIZES, "it") is None


@pytest.mark.parametrize(
    "hint, value, says",
    [
        (Reply, {}, "it holds nothing, and must hold parameters, samples, loss"),
        (Reply, GOOD | {"code": "x"}, "it holds code, loss, parameters, samples"),
        (Reply, 3, "it is a whole number"),
        (Reply, GOOD | {"samples": True}, "it.samples is true or false, and must be a int"),
        (Reply, GOOD | {"loss": None}, "it.loss is None"),
        (
            Reply,
            GOOD | {"parameters": {"w": 1.0}},
            "it.parameters.w is a number, and must be a Tensor",
        ),
        (
            Reply,
            GOOD | {"parameters": [torch.ones(2)]},
            "it.parameters is a list of 1, and must be a dict",
        ),
        (
            Rows,
            torch.zeros(2, 4),
            r"it is a tensor of float32, shape \(2, 4\), "
            r"and must be real numbers of shape \(2, 3\)",
        ),
        (Rows, torch.zeros(2, 3, dtype=torch.int64), "must be real numbers"),
        (Rows, torch.zeros(6), "must be real"),
        (Rows, [[0.0] * 3] * 2, "must be a Tensor"),
        (Annotated[list[float], Shape("rows")], [1.0], r"shape \(2\)"),
        (float, "nan", "it is a word, and must be a float"),
        (float, torch.tensor(1.0), "it is a tensor"),
        (None, 0, "must be a None"),
        (list[int], [1, 2.5], "it.1 is a number"),
        (dict[str, float] | None, {"a": "b"}, "it.a is a word"),
        (Literal["a", "b"], "c", "one of"),
        (Annotated[float, Field(gt=0, le=1)], 1.5, "out of bounds"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_path(hint, value, says):
    import re

    assert re.search(says, validator_for(hint)(value, SIZES, "it"))


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**63, -(2**63) - 1])
@pytest.mark.parametrize("hint", [int, float, dict[str, float], list[int]])
def test_a_number_beyond_64_bits_is_refused(hint, number):
    """10**400 as a metric, which is no float, ended the server."""
    value = {dict[str, float]: {"a": number}, list[int]: [number]}.get(hint, number)
    assert validator_for(hint)(value, SIZES, "it").startswith("it")


def test_with_privacy_a_field_that_is_not_sent_may_be_none():
    hidden = validator_for(Reply, hidden=True)
    assert hidden(GOOD | {"loss": None}, {}, "it") is None and hidden(None, {}, "it") is None
    assert (
        validator_for(float, hidden=True)(None, {}, "it") is None
        and validator_for(None, hidden=True)(None, {}, "it") is None
    )
    assert "it.loss" in hidden(GOOD | {"loss": "x"}, {}, "it") and "holds" in hidden(
        {"loss": None}, {}, "it"
    )
    sent = validator_for(Reply, hidden=True, sent=frozenset({"loss"}))
    assert "it.loss is None" in sent(GOOD | {"loss": None}, {}, "it") and "it is None" in sent(
        None, {}, "it"
    )
    assert sent(GOOD, {}, "it") is None


def test_an_axis_without_a_size_raises_an_error():
    with pytest.raises(ValueError, match="nothing says how long the axis rows is"):
        validator_for(Rows)(torch.zeros(2, 3), {}, "it")


def test_an_operations_signature_gives_its_validators():
    def update(self, parameters: dict[str, Tensor], epoch: int, deep: bool = False) -> Reply: ...

    def update_together(programs: list, own: list[int]) -> list[Rows]: ...

    def unannotated(self, anything, more=1): ...

    update_together.together = True
    assert signature_of(update).request({"parameters": {}, "epoch": 1}, {}, "update") is None
    assert (
        signature_of(update).request({"parameters": {}}, {}, "update")
        == "update holds parameters, and must hold parameters, epoch, deep"
    )
    assert "update.epoch is a word" in signature_of(update).request(
        {"parameters": {}, "epoch": "1"}, {}, "update"
    )
    assert (
        signature_of(update_together).request({"own": 1}, {}, "update_together") is None
        and signature_of(update_together).reply(torch.zeros(2, 3), SIZES, "it") is None
    )
    assert "shape (2, 3)" in signature_of(update_together).reply(torch.zeros(3, 3), SIZES, "it")
    assert (
        signature_of(unannotated).request({"anything": []}, {}, "unannotated") is None
        and signature_of(unannotated).reply(object(), {}, "it") is None
    )


@pytest.mark.parametrize(
    "reply",
    [
        {"w": {"a": torch.zeros(2, 3), "b": torch.zeros(1)}},
        {"w": {"a": torch.zeros(3, 2)}},
        {"w": {}},
        {"w": torch.zeros(2, 3)},
        {"w": {"a": torch.zeros(2, 3, dtype=torch.int64)}},
        {"w": [torch.zeros(2, 3)]},
        {"w": {"b": torch.zeros(2, 3)}},
        {"w": 5.0},
    ],
)
def test_a_reply_is_like_what_was_sent_under_its_name(reply):
    sent = tensor_spec({"w": {"a": torch.zeros(2, 3)}, "epoch": 3})
    assert spec_mismatch(reply, sent).startswith(
        "its w have other names or shapes than those it was sent"
    )
    for fine in (
        {"w": {"a": torch.ones(2, 3, dtype=torch.float16)}},
        {"w": None},
        {"other": torch.zeros(1)},
        torch.zeros(1),
        None,
    ):
        assert spec_mismatch(fine, sent) is None
