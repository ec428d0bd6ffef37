"""Named random streams: the same names give the same draws, on any machine and engine. Knows nothing of who draws."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def number(seed: int, *names: str | int) -> int:
    """The 63-bit number that belongs to a seed and a path of names.

    >>> number(0, "peers", 3) == number(0, "peers", 3) != number(0, "peers", 4)
    True
    """
    path = "\x1f".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator of its own for one purpose, e.g. `stream(seed, "peers", round, client)`."""
    return torch.Generator().manual_seed(number(seed, *names))


@contextmanager
def scope(seed: int, *names: str | int) -> Iterator[None]:
    """Code that draws from torch's global generator (initial weights, dropout) draws from a named stream inside.

    The global generator is put back as it was, so that nothing outside depends on what ran inside.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    before, cuda = torch.random.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]
    torch.manual_seed(number(seed, *names))
    try:
        yield
    finally:
        torch.random.set_rng_state(before)
        for device, state in zip(devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
