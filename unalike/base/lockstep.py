"""Functions that run in turns and meet, so that equal work of several is done at once.

`run_in_lockstep` runs functions in threads, one at a time: nothing runs in parallel, and nothing
needs a lock. A function calls `meet(work)` where it has work that others may have, too; it waits
there until all others wait or are done. Works of one kind are then done together. Where there is
no other, and outside of `run_in_lockstep`, `meet` returns `ALONE`: do it yourself.

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

import threading
from collections.abc import Callable, Hashable, Sequence
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


class _Current(threading.local):
    turn: _Turn | None = None


_current = _Current()


def meet(work: Work) -> Any:
    """Have a work done together with equal works of other functions, or return `ALONE`."""
    turn = _current.turn
    if turn is None or work.kind() is None:
        return ALONE
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
    return [child.take_result() for child in children]


def run_in_lockstep(functions: Sequence[Callable[[], T]], room: Any = None) -> list[T]:
    """The results of functions that meet where they have equal work.

    Args:
        room: passed on to `Work.run_together`.
    Raises: the first exception, once all are done.
    """
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
    groups: dict[Any, list[_Turn]] = {}
    for turn in unfinished:
        if turn.work is not None:
            groups.setdefault((type(turn.work), turn.work.kind()), []).append(turn)
    for (work_type, _), group in groups.items():
        works: list[Any] = [turn.work for turn in group]
        answers = [ALONE] if len(group) == 1 else work_type.run_together(works, room)
        for turn, answer in zip(group, answers, strict=True):
            turn.answer = answer
            turn.work = None
    return [turn for group in groups.values() for turn in group]
