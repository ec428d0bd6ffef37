"""Functions that run in turns and meet, so that equal work of several is done at once.

`run_in_lockstep` runs functions one at a time: nothing runs in parallel, and nothing needs a lock.
A function calls `meet(work)` where it has work that others may have, too; it waits there until all
others wait or are done. Works of one kind are then done together. Where there is no other, and
outside of `run_in_lockstep`, `meet` returns `ALONE`: do it yourself.

Functions that meet at most once need no thread: `run_nested` starts the next one inside the `meet`
of the one before it. Others need one each. `Habits` remembers which is which.

>>> class Square(Work):
...     def __init__(self, x):
...         self.x = x
...     def kind(self):
...         return "square"
...     @classmethod
...     def run_together(cls, works, room):
...         return [f"{work.x**2}, one of {len(works)}" for work in works]
>>> run_in_lockstep([lambda: meet(Square(2)), lambda: meet(Square(3)), lambda: 5])
['4, one of 2', '9, one of 2', 5]
>>> meet(Square(2)) is ALONE
True
"""

import gc
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, Self, TypeVar

import torch

from unalike.base.randomness import generator_states, set_generator_states

T = TypeVar("T")
# After an interrupt: a thread that computes while Python ends would abort the process.
ABANDON_SECONDS = 10.0


class Work:
    """Something that one function wants done, and that could be done for several at once."""

    def kind(self) -> Hashable | None:
        """Equal for works that can be done together; None: only alone."""
        raise NotImplementedError

    @classmethod
    def run_together(cls, works: Sequence[Self], room: Any) -> Sequence[Any]:
        """Do several of one kind.

        Args:
            room: what was passed to `run_in_lockstep`.
        Returns: what `meet` returns to each; an exception among them is raised there.
        """
        raise NotImplementedError


class Alone:
    """What `meet` returns for a work that its function must do itself."""


ALONE = Alone()


def closed_lock() -> threading.Lock:
    """A lock that one thread waits for and another opens: faster than a Semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def open_lock(lock: threading.Lock) -> None:
    """Let the thread go on that waits for this lock, or the next one that will."""
    if lock.locked():
        lock.release()


class _Abandoned(BaseException):
    """Ends the thread of a function that nobody waits for any more."""


class _Turn:
    """One function, its thread, and what it waits for."""

    def __init__(self, function: Callable[[], Any], parent: "_Turn | None" = None):
        self.function = function
        self.parent = parent
        self.work: Work | None = None  # what it waits for
        self.children: list[_Turn] = []  # turns it waits for
        self.meetings = 0  # so far, its children's included
        self.answer: Any = None
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.generators: list[torch.Tensor] | None = None
        self.resumed = closed_lock()
        self.paused = closed_lock()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def advance(self) -> None:
        """Run the function until it waits or is done. It has its own state of random generators."""
        outside = generator_states()
        if self.generators is not None:
            set_generator_states(self.generators)
        if self.thread.ident is None:
            self.thread.start()
        else:
            open_lock(self.resumed)
        self.paused.acquire()
        self.generators = None if self.done else generator_states()
        set_generator_states(outside)

    def wait(self) -> Any:
        """Called by the function's own thread: let the others run, and return the answer."""
        if self.abandoned:
            raise _Abandoned
        open_lock(self.paused)
        self.resumed.acquire()
        if self.abandoned:
            raise _Abandoned
        return self.answer

    def _run(self) -> None:
        _current.turn = self
        try:
            self.result = self.function()
        except BaseException as error:  # raised again in the thread that waits for the result
            self.error = error
        self.done = True
        open_lock(self.paused)

    def take_result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class Habits:
    """How often functions meet, as seen so far, by a name that the caller gives them."""

    def __init__(self) -> None:
        self.meetings: dict[Hashable, int] = {}  # most of one function

    def meets_once(self, name: Hashable) -> bool:
        """Whether functions of this name ran before, and none of them met twice."""
        return self.meetings.get(name, 2) <= 1

    def note(self, name: Hashable, meetings: int) -> None:
        """Remember that a function of this name met so often."""
        self.meetings[name] = max(meetings, self.meetings.get(name, 0))


class _Nest:
    """Functions of which each is started inside the meeting of the one before it.

    Those that began last end first, as contexts of random numbers must. What they hold lives until
    all have met: Python's collector would look through it again and again and find nothing, so it
    pauses until one has to work alone.
    """

    FRAMES = 200  # of Python's stack that a function may take

    def __init__(self, functions: Sequence[Callable[[], Any]], room: Any):
        self.functions = functions
        self.room = room
        self.results: list[Any] = [None] * len(functions)
        self.errors: list[Exception | None] = [None] * len(functions)
        self.meetings = [0] * len(functions)
        self.started = 0
        self.running = -1  # the number of the function that runs
        self.works: dict[int, Work] = {}  # that are waited for, by the number of the function
        self.answers: dict[int, Any] = {}
        self.gradients = torch.is_grad_enabled()
        self.outside = generator_states()
        self.collecting = gc.isenabled()

    def run(self) -> list[Any]:
        before = _current.nest, _current.turn
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + self.FRAMES * len(self.functions))
        _current.nest, _current.turn = self, None
        gc.disable()
        try:
            call_with_deep_stack(self._start_all)
        finally:
            self._resume_collecting()
            _current.nest, _current.turn = before
            sys.setrecursionlimit(limit)
        for error in self.errors:
            if error is not None:
                raise error
        return self.results

    def _start_all(self) -> None:
        while self.started < len(self.functions):
            number, waiting = self.started, self.running
            self.started += 1
            self.running = number
            try:
                with torch.set_grad_enabled(self.gradients):
                    self.results[number] = self.functions[number]()
            except Exception as error:
                self.errors[number] = error
            self.running = waiting

    def _resume_collecting(self) -> None:
        if self.collecting:
            gc.enable()

    def meet(self, work: Work) -> Any:
        number = self.running
        self.meetings[number] += 1
        if self.meetings[number] > 1 or work.kind() is None:
            self._resume_collecting()
            return ALONE  # in a second meeting: the others still wait in their first
        self.works[number] = work
        self._start_all()
        if number in self.works:  # nobody is left to start: all that wait are here
            works, self.works = self.works, {}
            inside = generator_states()
            set_generator_states(self.outside)
            answers = do_works(list(works.values()), self.room)
            set_generator_states(inside)
            self.answers = dict(zip(works, answers, strict=True))
        answer = self.answers.pop(number)
        if answer is ALONE:
            self._resume_collecting()
        return answer


def _call(function: Callable[[], None]) -> None:
    function()


def _declare_large(function: Any, entries: int) -> FunctionType:
    """The function, with a frame that claims room for so many more values than it needs."""
    code = function.__code__
    large = code.replace(co_stacksize=code.co_stacksize + entries)
    return FunctionType(large, function.__globals__, function.__name__)


# CPython keeps frames in blocks of 16 kB, and asks the system for a block whenever a call crosses
# the end of one: at each call, where a loop is just there. A frame that claims to be large gets a
# block of twice its size, whose second half holds all frames called from it. What is not used of
# it takes no memory.
call_with_deep_stack = _declare_large(_call, 2**19)


class _Current(threading.local):
    turn: _Turn | None = None
    nest: _Nest | None = None


_current = _Current()


def meet(work: Work) -> Any:
    """Have a work done together with equal works of other functions, or return `ALONE`."""
    turn, nest = _current.turn, _current.nest
    if nest is not None:
        answer = nest.meet(work)
    elif turn is None or work.kind() is None:
        return ALONE
    else:
        turn.meetings += 1
        turn.work = work
        answer = turn.wait()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def run_each(functions: Sequence[Callable[[], T]]) -> list[T]:
    """The results of functions, one after another; inside `run_in_lockstep` they run in lockstep.

    The first exception is raised, once all are done.
    """
    turn = _current.turn
    if turn is None or len(functions) < 2:
        return [function() for function in functions]
    children = [_Turn(function, turn) for function in functions]
    turn.children = children
    turn.wait()
    turn.meetings += sum(child.meetings for child in children)
    return [child.take_result() for child in children]


def run_in_lockstep(
    functions: Sequence[Callable[[], T]],
    room: Any = None,
    habits: Habits | None = None,
    name: Hashable = None,
) -> list[T]:
    """The results of functions that meet where they have equal work.

    Args:
        room: passed on to `Work.run_together`.
        habits: where functions of this `name` met at most once before, they run without threads.
            One that meets again nevertheless does its work alone, and next time there are threads.
    Raises: the first exception, once all are done.
    """
    if habits is not None and habits.meets_once(name):
        nest = _Nest(functions, room)
        try:
            return nest.run()
        finally:
            habits.note(name, max(nest.meetings, default=0))
    turns = [_Turn(function) for function in functions]
    unfinished = list(turns)
    runnable = list(turns)
    try:
        while runnable:
            for turn in runnable:
                turn.advance()
            started = [child for turn in runnable for child in turn.children if not child.done]
            unfinished += [turn for turn in started if turn not in unfinished]
            unfinished = [turn for turn in unfinished if not turn.done]
            runnable = _next_turns(unfinished, room)
    except BaseException:
        _abandon(unfinished)
        raise
    if habits is not None:
        habits.note(name, max((turn.meetings for turn in turns), default=0))
    return [turn.take_result() for turn in turns]


def _abandon(turns: list[_Turn]) -> None:
    """End threads that wait, and wait for the one that computes until it waits or is done."""
    for turn in turns:
        turn.abandoned = True
        open_lock(turn.resumed)
    for turn in turns:
        if turn.thread.ident is not None:
            turn.thread.join(ABANDON_SECONDS)


def _next_turns(unfinished: list[_Turn], room: Any) -> list[_Turn]:
    """Turns that can go on; where there are none, do the works that all others wait for."""
    ready = []
    for turn in unfinished:
        if turn.children and all(child.done for child in turn.children):
            turn.children = []
            ready.append(turn)
        elif turn.thread.ident is None:
            ready.append(turn)
    if ready:
        return ready
    waiting = [turn for turn in unfinished if turn.work is not None]
    works: list[Any] = [turn.work for turn in waiting]
    for turn, answer in zip(waiting, do_works(works, room), strict=True):
        turn.answer = answer
        turn.work = None
    return waiting


def do_works(works: Sequence[Work], room: Any) -> list[Any]:
    """What `meet` returns for each work: those of one kind are done together."""
    groups: dict[Any, list[int]] = {}
    for number, work in enumerate(works):
        groups.setdefault((type(work), work.kind()), []).append(number)
    answers: list[Any] = [ALONE] * len(works)
    for (work_type, _), group in groups.items():
        if len(group) > 1:
            together = work_type.run_together([works[number] for number in group], room)
            for number, answer in zip(group, together, strict=True):
                answers[number] = answer
    return answers
