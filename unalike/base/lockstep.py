"""Functions that run in turns and meet, so that equal work of several is done at once.

`run_in_lockstep` runs functions one at a time: nothing runs in parallel, and nothing needs a lock.
A function calls `meet(work)` where it has work that others may have, too; it waits there until all
others wait or are done. Works of one kind are then done together. Where there is no other, and
outside of `run_in_lockstep`, `meet` returns `ALONE`: do it yourself.

A function that waits is a greenlet; without the package greenlet it is a thread, which is slower.

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
from contextvars import copy_context
from typing import Any, Self, TypeVar

import torch

from unalike.base.randomness import generator_states, set_generator_states

try:
    import greenlet
except ImportError:
    greenlet = None  # type: ignore[assignment]

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


class _Turn:
    """One function, and what it waits for. Subclasses pause and resume it."""

    def __init__(self, function: Callable[[], Any]):
        self.function = function
        self.work: Work | None = None  # what it waits for
        self.children: list[_Turn] = []  # turns it waits for
        self.answer: Any = None
        self.started = False
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        # Of torch, as the function left them when it began to wait.
        self.generators: list[torch.Tensor] | None = None
        self.gradients = torch.is_grad_enabled()
        self.context = copy_context()

    def advance(self) -> None:
        """Run the function until it waits or is done, with its own state of torch."""
        if self.generators is not None:
            set_generator_states(self.generators)
        self.started = True
        with torch.set_grad_enabled(self.gradients):
            self.resume()
            self.gradients = torch.is_grad_enabled()
        self.generators = None if self.done else generator_states()
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error  # an interrupt concerns everybody

    def wait(self) -> Any:
        """Called by the function itself: let the others run, and return the answer."""
        self.pause()
        return self.answer

    def run(self) -> None:
        """Run the function to its end."""
        try:
            self.result = self.function()
        except BaseException as error:  # raised again where the result is taken
            self.error = error
        self.done = True

    def take_result(self) -> Any:
        """What the function returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.result

    def resume(self) -> None:
        """Start the function, or let it go on, until it pauses or is done."""
        raise NotImplementedError

    def pause(self) -> None:
        """Called by the function itself: return from `resume` where it was called."""
        raise NotImplementedError

    def abandon(self) -> None:
        """End a function that nobody waits for any more."""
        raise NotImplementedError


class _GreenletTurn(_Turn):
    def __init__(self, function: Callable[[], Any]):
        super().__init__(function)
        self.greenlet = greenlet.greenlet(self.run)
        self.greenlet.gr_context = self.context

    def resume(self) -> None:
        outer, _current.turn = _current.turn, self
        self.greenlet.parent = greenlet.getcurrent()
        self.greenlet.switch()
        _current.turn = outer

    def pause(self) -> None:
        assert self.greenlet.parent is not None
        self.greenlet.parent.switch()

    def abandon(self) -> None:
        self.greenlet.parent = greenlet.getcurrent()
        self.greenlet.throw()


class _Abandoned(BaseException):
    """Ends the thread of a function that nobody waits for any more."""


class _ThreadTurn(_Turn):
    def __init__(self, function: Callable[[], Any]):
        super().__init__(function)
        self.abandoned = False
        self.resumed = threading.Semaphore(0)
        self.paused = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run_thread, daemon=True)

    def _run_thread(self) -> None:
        _current.turn = self
        torch.set_grad_enabled(self.gradients)
        self.context.run(self.run)
        self.paused.release()

    def resume(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.resumed.release()
        self.paused.acquire()

    def pause(self) -> None:
        if not self.abandoned:
            self.paused.release()
            self.resumed.acquire()
        if self.abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        self.abandoned = True
        self.resumed.release()
        if self.thread.ident is not None:
            self.thread.join(ABANDON_SECONDS)


class _Current(threading.local):
    turn: _Turn | None = None


_current = _Current()


def _new_turn(function: Callable[[], Any]) -> _Turn:
    return _ThreadTurn(function) if greenlet is None else _GreenletTurn(function)


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
    children = [_new_turn(function) for function in functions]
    turn.children = children
    turn.wait()
    return [child.take_result() for child in children]


def run_in_lockstep(functions: Sequence[Callable[[], T]], room: Any = None) -> list[T]:
    """The results of functions that meet where they have equal work.

    Args:
        room: passed on to `Work.run_together`.
    Raises: the first exception, once all are done.
    """
    turns = [_new_turn(function) for function in functions]
    unfinished = list(turns)
    runnable = list(turns)
    outside = generator_states()
    try:
        while runnable:
            for turn in runnable:
                turn.advance()
            set_generator_states(outside)
            started = [child for turn in runnable for child in turn.children if not child.done]
            unfinished += [turn for turn in started if turn not in unfinished]
            unfinished = [turn for turn in unfinished if not turn.done]
            runnable = _next_turns(unfinished, room)
    except BaseException:
        for turn in unfinished:
            turn.abandon()
        set_generator_states(outside)
        raise
    return [turn.take_result() for turn in turns]


def _next_turns(unfinished: list[_Turn], room: Any) -> list[_Turn]:
    """Turns that can go on; where there are none, do the works that all others wait for."""
    ready = []
    for turn in unfinished:
        if turn.children and all(child.done for child in turn.children):
            turn.children = []
            ready.append(turn)
        elif not turn.started:
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
