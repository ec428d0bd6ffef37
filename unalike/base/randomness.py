"""Named random streams: the same names give the same draws, on any machine and engine. Knows nothing of who draws."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """The 63-bit number that belongs to a seed and a path of names.

    >>> number(0, "peers", 3) == number(0, "peers", 3) != number(0, "peers", 4)
    True
    """
    path = "\x1f".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator of its own for one purpose, e.g. `stream(seed, "peers", round, client)`."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


@contextmanager
def scope(seed: int, *names: str | int) -> Iterator[None]:
    """Code that draws from torch's global generator (initial weights, dropout) draws from a named stream inside.

    The global generator is put back as it was, so that nothing outside depends on what ran inside.
    """
    generators = [
        torch.default_generator
    ]  # seeded directly: torch.manual_seed records a stack trace each time
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(derive_seed(seed, *names))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
