"""Functions in lockstep: who meets whom, exceptions, random numbers, nested functions."""

import gc
import sys
import threading
import time

import pytest
import torch

from unalike.base import lockstep
from unalike.base.lockstep import ALONE, Habits, Work, run_each, run_in_lockstep
from unalike.base.randomness import scope


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


@pytest.fixture
def nested():
    """Runs functions twice: in threads, and, where they met at most once, without."""
    habits = Habits()

    def run(functions, room, name="name"):
        first = run_in_lockstep(functions, [], habits, name)
        before = threading.active_count()
        threads = []
        seen = [lambda f=f: (threads.append(threading.get_ident()), f())[1] for f in functions]
        again = run_in_lockstep(seen, room, habits, name)
        assert first == again and threading.active_count() == before
        return again, len(set(threads))

    return run


def test_functions_that_meet_once_need_no_threads(nested):
    room = []
    functions = [lambda: meet(Add(1)), lambda: 7, lambda: meet(Add(2)), lambda: meet(Add(3, "odd"))]
    functions += [lambda: meet(Add(4, None)), lambda: meet(Add(0))]
    assert nested(functions, room) == ([11, 7, 12, 3, 4, 0], 1)
    assert room == [3]


def test_functions_that_meet_twice_have_threads_of_their_own(nested):
    room = []
    functions = 2 * [lambda: meet(Add(1)) + meet(Add(2))]
    assert nested(functions, room) == ([23, 23], 2)
    assert room == [2, 2]


def test_a_second_meeting_that_nobody_expected_is_done_alone_once():
    habits, room, more = Habits(), [], []

    def sometimes():
        return meet(Add(1)) + sum(meet(Add(x)) for x in more)

    run_in_lockstep([sometimes, sometimes], [], habits, "name")
    more.append(5)
    assert run_in_lockstep([sometimes, sometimes], room, habits, "name") == [16, 16]
    assert room == [2]
    assert run_in_lockstep([sometimes, sometimes], room, habits, "name") == [26, 26]
    assert room == [2, 2, 2]


def test_without_threads_random_numbers_gradients_and_errors_are_as_with_them(nested):
    def draw(name):
        with scope(0, name), torch.no_grad():
            first = torch.rand(1)
            meet(Add(1))
            return first, torch.rand(1), torch.is_grad_enabled()

    alone = [draw(name) for name in "abc"]
    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    modes = []
    functions = [
        lambda name=name: (modes.append(torch.is_grad_enabled()), draw(name))[1] for name in "abc"
    ]
    assert nested(functions, []) == (alone, 1)
    assert all(modes)
    assert torch.equal(torch.default_generator.get_state(), before)
    habits = Habits()
    habits.note("name", 1)
    with pytest.raises(ZeroDivisionError):
        run_in_lockstep([lambda: meet(Add(-1)), lambda: meet(Add(1))], [], habits, "name")


def test_as_many_functions_as_a_host_runs_at_once_fit_on_the_stack():
    def deep(level):
        return deep(level - 1) if level else meet(Add(1))

    habits = Habits()
    habits.note("name", 1)
    limit = sys.getrecursionlimit()
    answers = run_in_lockstep(256 * [lambda: deep(100)], [], habits, "name")
    assert answers == 256 * [11]
    assert sys.getrecursionlimit() == limit and gc.isenabled()
