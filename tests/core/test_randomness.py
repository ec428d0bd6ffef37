"""A stream depends on its seed and names only; a scope leaves the global generator unchanged."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unalike.base.randomness import derive_seed, scope, stream

names = st.lists(
    st.integers(-5, 5)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x1f"), max_size=4),
    max_size=4,
)


def draw(*path):
    return torch.rand(4, generator=stream(*path))


def test_the_same_names_give_the_same_draws_on_every_machine():
    """The expected numbers are literals: another machine, version or process must get them too."""
    assert torch.equal(draw(0, "peers", 3), draw(0, "peers", 3))
    assert derive_seed(0, "peers", 3, "ada") == 2532297951807399049
    assert torch.randperm(6, generator=stream(7, "order")).tolist() == [5, 3, 0, 4, 1, 2]


def test_different_names_give_different_draws():
    paths = [
        (0,),
        (1,),
        (0, "peers"),
        (0, "peers", 1),
        (0, "peers", "1"),
        (0, 1, "peers"),
        (0, "peer", "s1"),
        (0, "peers1"),
        (0, "peers", 11),
        (0, "peers", 1, 1),
        (0, "peers", -1),
        ("0", "peers"),
    ]
    assert len({derive_seed(*path) for path in paths}) == len(paths)
    assert not any(torch.equal(draw(*a), draw(*b)) for a, b in combinations(paths, 2))


@settings(deadline=None, max_examples=200)
@given(names, names)
def test_seeds_are_equal_exactly_where_the_paths_are(a, b):
    assert (derive_seed(0, *a) == derive_seed(0, *b)) == (
        [(type(n), n) for n in a] == [(type(n), n) for n in b]
    )
    assert 0 <= derive_seed(0, *a) < 2**63


def test_a_stream_does_not_depend_on_other_streams():
    first = stream(0, "a")
    before = torch.rand(3, generator=stream(0, "b"))
    torch.rand(100, generator=first)
    torch.rand(100)
    assert torch.equal(before, torch.rand(3, generator=stream(0, "b")))


def test_a_scope_seeds_the_global_generator_and_restores_it():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with scope(0, "build", "ada"):
        inside = torch.rand(3)
        with scope(0, "build", "ben"):
            other = torch.rand(3)
        more = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    with scope(0, "build", "ada"):
        assert torch.equal(torch.rand(3), inside) and torch.equal(torch.rand(3), more)
    assert not torch.equal(inside, other)
    assert torch.equal(inside, torch.rand(3, generator=stream(0, "build", "ada")))


def test_a_scope_restores_the_global_generator_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(KeyError), scope(0, "fails"):
        torch.rand(10)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)
