"""Where a bug is: in the user's code, or in a file of the package to which users add methods and tasks."""

import torch

from unalike.base import tracebacks
from unalike.base.errors import UserError
from unalike.base.tracebacks import user_location


def caught(function):
    try:
        function()
    except Exception as error:
        return error


def test_a_bug_in_a_file_of_the_package_has_a_place(monkeypatch):
    def loss():
        raise NameError("name 'poisson' is not defined")

    error = caught(loss)
    assert user_location(error) is None  # nothing of ours called it
    monkeypatch.setattr(tracebacks, "PACKAGE", __file__.rsplit("/", 1)[0])
    assert user_location(error).startswith(f"{__file__}, line")
    assert user_location(error).endswith("in loss")


def test_a_recognised_mistake_has_none_and_a_call_of_torch_its_own_line(monkeypatch):
    def mistake():
        raise UserError("there is no dataset")

    def mismatch():
        torch.nn.functional.linear(torch.zeros(2, 3), "no weight")

    monkeypatch.setattr(tracebacks, "PACKAGE", __file__.rsplit("/", 1)[0])
    assert user_location(caught(mistake)) is None
    assert user_location(caught(mismatch)).endswith("in mismatch")  # the line that called torch
