"""Named random streams: the same seed and names give the same draws on any machine and engine."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed from the run's seed and a path of names.

    >>> derive_seed(0, "peers", 3) == derive_seed(0, "peers", 3) != derive_seed(0, "peers", 4)
    True
    """
    path = "\x1f".join([f"{type(name).__name__}:{name}" for name in (seed, *names)])
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A new CPU generator for one purpose, e.g. `stream(seed, "peers", round, client)`.

    Args:
        seed: of the run.
        names: what it is for: words and numbers, unique to the purpose.
    """
    return torch.Generator().manual_seed(derive_seed(seed, *names))


@contextmanager
def scope(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generators from `seed` and `names` inside the block.

    For code that cannot be given a generator (initial weights, dropout). On leaving, the global
    generators get their former state back, so code outside does not depend on code inside.

    Args:
        seed: of the run.
        names: what it is for: words and numbers, unique to the purpose.
    """
    # Seeded directly: torch.manual_seed records a stack trace each time.
    generators = global_generators()
    states = [generator.get_state() for generator in generators]
    derived = derive_seed(seed, *names)
    for generator in generators:
        generator.manual_seed(derived)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def global_generators() -> list[torch.Generator]:
    """Torch's generators for code that is given none: of the CPU, and of GPUs in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return generators


def generator_states() -> list[Tensor]:
    """The states of the global generators."""
    return [generator.get_state() for generator in global_generators()]


def set_generator_states(states: list[Tensor]) -> None:
    """Give the global generators states of `generator_states` back."""
    # not strict: a GPU may have come into use in between
    for generator, state in zip(global_generators(), states, strict=False):
        generator.set_state(state)
