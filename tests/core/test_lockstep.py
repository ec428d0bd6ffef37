"""Functions in lockstep: who meets whom, exceptions, random numbers, nested functions."""

import contextvars
import threading
import time

import pytest
import torch

from unalike.base import lockstep
from unalike.base.lockstep import ALONE, Work, run_each, run_in_lockstep
from unalike.base.randomness import scope


@pytest.fixture(autouse=True, params=["greenlets", "threads"])
def _waits_as(request, monkeypatch):
    """Everything here holds with the package greenlet and without it."""
    if request.param == "threads" and "greenlets" not in request.node.originalname:
        monkeypatch.setattr(lockstep, "greenlet", None)


def meet(work):
    answer = lockstep.meet(work)
    return work.x if answer is ALONE else answer


class Add(Work):
    """Adds the number of those that add at once."""

    def __init__(self, x, kind="add"):
        self.x = x
        self._kind = kind

    def kind(self):
        return self._kind

    @classmethod
    def run_together(cls, works, room):
        room.append(len(works))
        return [ZeroDivisionError() if w.x < 0 else ALONE if w.x == 0 else w.x + 10 for w in works]


def test_works_of_one_kind_meet_and_others_are_done_alone():
    room = []
    functions = [lambda: meet(Add(1)), lambda: meet(Add(2)), lambda: meet(Add(3, "other"))]
    functions += [lambda: meet(Add(4, None)), lambda: meet(Add(0))]
    assert run_in_lockstep(functions, room) == [11, 12, 3, 4, 0]
    assert room == [3]


def test_a_function_with_more_meetings_goes_on_alone():
    room = []

    def twice():
        return meet(Add(1)) + meet(Add(2))

    assert run_in_lockstep([twice, lambda: meet(Add(5)), twice], room) == [23, 15, 23]
    assert room == [3, 2]


def test_an_exception_of_one_work_is_raised_where_it_was_met():
    def careful():
        try:
            return meet(Add(-1))
        except ZeroDivisionError:
            return "caught"

    assert run_in_lockstep([careful, lambda: meet(Add(1))], []) == ["caught", 11]
    with pytest.raises(ZeroDivisionError):
        run_in_lockstep([lambda: meet(Add(-1)), lambda: meet(Add(1))], [])


def test_each_function_has_its_own_random_numbers():
    def draw(name):
        with scope(0, name):
            first = torch.rand(1)
            meet(Add(1))
            return first, torch.rand(1)

    alone = [draw(name) for name in "abc"]
    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    together = run_in_lockstep([lambda name=name: draw(name) for name in "abc"], [])
    assert alone == together
    assert torch.equal(torch.default_generator.get_state(), before)


def test_functions_inside_functions_meet_those_of_others():
    room = []

    def nested(x):
        return sum(run_each([lambda: meet(Add(x)), lambda: meet(Add(2 * x))]))

    assert run_in_lockstep([lambda: nested(1), lambda: nested(2)], room) == [23, 26]
    assert room == [4]
    assert nested(1) == 3  # outside of lockstep everything is done alone


def test_an_interrupt_leaves_no_thread_behind():
    class Interrupted(Add):
        @classmethod
        def run_together(cls, works, room):
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep([lambda: meet(Interrupted(1)), lambda: meet(Interrupted(2))], [])
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_gradients_are_recorded_as_the_function_itself_says():
    modes = []

    def without_gradients():
        modes.append(torch.is_grad_enabled())
        with torch.no_grad():
            meet(Add(1))
            modes.append(torch.is_grad_enabled())

    run_in_lockstep([without_gradients, without_gradients], [])
    assert modes == [True, True, False, False] and torch.is_grad_enabled()


def test_context_variables_are_those_of_the_caller():
    name = contextvars.ContextVar("name", default="nobody")
    name.set("caller")
    assert run_in_lockstep([name.get, name.get], []) == ["caller", "caller"]


def test_an_interrupt_inside_a_function_ends_all_at_once():
    ended = []

    def interrupted():
        raise KeyboardInterrupt

    def waiting():
        try:
            meet(Add(1))
        finally:
            ended.append("waiting")

    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep([waiting, interrupted, lambda: ended.append("never started")], [])
    assert ended == ["waiting"]


def test_as_many_functions_as_a_host_runs_at_once_fit_on_the_stack():
    def deep(level):
        return deep(level - 1) if level else meet(Add(1))

    assert run_in_lockstep(256 * [lambda: deep(100)], []) == 256 * [11]


def test_greenlets_stay_in_the_thread_of_the_caller():
    assert lockstep.greenlet is not None, "greenlet is a dependency"
    threads = []
    run_in_lockstep(3 * [lambda: (meet(Add(1)), threads.append(threading.get_ident()))], [])
    assert threads == 3 * [threading.get_ident()]
