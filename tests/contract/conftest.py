"""Which methods the contract is tested on: all of them; where two run the same code but for what learns in it, long tests take one."""

import dataclasses

from unalike.algorithms import ALGORITHMS
from unalike.core.operations import find_stacked_form

ALL = ("test_fits_the_toy", "test_learns", "test_same_seed_same_bytes_another_seed_others")


def program(method):
    """All of a method but its fields, what it refuses, and its head on a frozen model."""
    own = {"head", "check", *(field.name for field in dataclasses.fields(method))}
    names = [name for name in dir(method) if not name.startswith("_") and name not in own]
    values = {name: getattr(method, name) for name in names}
    # a class method is bound anew at each access: compare the function behind it
    return frozenset((name, id(getattr(values[name], "__func__", values[name]))) for name in names)


PROGRAMS = sorted(
    {program(method): name for name, method in reversed(ALGORITHMS.items())}.values(),
    key=list(ALGORITHMS).index,
)


# Methods whose clients may be one object from the message to the reply.
AS_ONE = [name for name in PROGRAMS if find_stacked_form(ALGORITHMS[name].Program, "update")]


def pytest_generate_tests(metafunc):
    if "name" not in metafunc.fixturenames:
        return
    test = metafunc.function.__name__
    names = ALGORITHMS if test in ALL else AS_ONE if "as_one_object" in test else PROGRAMS
    metafunc.parametrize("name", names)
