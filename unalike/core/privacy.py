"""Local differential privacy of what a client sends: clipping, Gaussian noise, an accountant.

Whatever data a client has, what it sends lies in a ball of radius `bound` around what everyone
knows, and noise of standard deviation `noise * bound` is added: the Gaussian mechanism with
sensitivity 2 * bound (Dwork & Roth 2014, app. A). docs/privacy.md says against whom it protects.
"""

import math
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.errors import UserError
from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.base.settings import Settings
from unalike.base.types import Parameters

Draw = Callable[[torch.Size], Tensor]  # standard normal values of a shape, in float64
Sends = str | dict[str, str]  # the kind of a whole reply, or of the parts of it that may leave

KINDS = ("parameters", "rows", "first", "open")
PROTECTED = ("parameters", "rows")
LARGEST = 1e6  # magnitude of the numbers that a client with privacy takes from a server


class Privacy(Settings):
    """How replies are protected before they leave a client; `privacy:` in a scenario."""

    noise: Annotated[
        float, Field(ge=0)
    ]  # standard deviation of the noise, in bounds; 0 protects nothing
    bound: Annotated[float, Field(gt=0)] = 1.0  # L2 norm that an update, or a row, is clipped to
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # the chance with which epsilon need not hold
    entropy: Literal["seed", "secret"] = (
        "seed"  # where noise comes from: the run's seed repeats; a secret nobody can repeat
    )

    def protect(
        self,
        reply: Value,
        sends: Sends,
        base: Callable[[Any], Parameters],
        draw: Draw,
        blank: bool = False,
    ) -> Value:
        """The reply as it may leave: declared fields, protected by their kind; all others None.

        Args:
            sends: the kind of the whole reply, or of its fields.
            base: `base(sent)` returns by name what the server knows of the parameters sent.
            draw: the noise.
            blank: only the form of the reply counts: no update, or rows of zeros, are protected.
        """
        if isinstance(sends, dict):
            parts: dict[str, Any] = reply if isinstance(reply, dict) else {}
            return {
                key: self.protect(part, sends[key], base, draw, blank) if key in sends else None
                for key, part in parts.items()
            } or None
        if reply is None or sends not in PROTECTED:
            return reply
        made: Any = reply
        if sends == "rows":
            return self.rows(torch.zeros_like(made) if blank else made, draw)
        known = base(made)
        return self.parameters(
            {name: known[name].to(tensor) for name, tensor in made.items()} if blank else made,
            known,
            draw,
        )

    def parameters(self, sent: Parameters, base: Parameters, draw: Draw) -> Parameters:
        """The update from `base`, clipped as one vector, with noise, both in float64. Values that are not finite count as no update; whole
        numbers stay as they were in `base`."""
        if wrong := [name for name, tensor in sent.items() if tensor.shape != base[name].shape]:
            raise ValueError(
                f"{wrong[0]} has the shape {tuple(sent[wrong[0]].shape)}, and came with {tuple(base[wrong[0]].shape)}"
            )
        given = {name: base[name].to(tensor.device, tensor.dtype) for name, tensor in sent.items()}
        changes = {
            name: _finite(tensor.double() - given[name].double())
            for name, tensor in sent.items()
            if tensor.is_floating_point()
        }
        norm = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
        scale = self.bound / norm if norm > self.bound else 1.0
        out = {}
        for name, before in given.items():
            if name not in changes:
                out[name] = before
            elif self.noise:
                change = changes[name] * scale + (self.noise * self.bound * draw(before.shape)).to(
                    before.device
                )
                out[name] = _within((before.double() + change), before.dtype)
            elif scale < 1:
                out[name] = _towards(before, changes[name] * scale)
            else:
                out[name] = torch.where(sent[name].isfinite(), sent[name], before)
        # a statistic of batch norm that noise made impossible; mending it costs no privacy
        return {
            name: tensor.clamp_min(0) if name.endswith("running_var") else tensor
            for name, tensor in out.items()
        }

    def rows(self, z: Tensor, draw: Draw) -> Tensor:
        """(n, ...): each row clipped, with noise, in float64, and clipped again, which costs no privacy and keeps its length what it was.
        A row that is not finite counts as one of zeros."""
        finite = z.flatten(1).isfinite().all(1).view(-1, *[1] * (z.dim() - 1))
        clipped = self._clipped(torch.where(finite, z, torch.zeros_like(z)).double())
        if self.noise:
            clipped = self._clipped(
                _finite(clipped + (self.noise * self.bound * draw(z.shape)).to(z.device))
            )
        return clipped.to(z.dtype)

    def _clipped(self, z: Tensor) -> Tensor:
        norms = z.flatten(1).norm(dim=1).view(-1, *[1] * (z.dim() - 1))
        return torch.where(norms > self.bound, z * (self.bound / norms), z)

    def draws(self, seed: int, *names: str | int) -> Draw:
        """The noise of one reply.

        Secret noise comes from the operating system. The server knows the seed, and could take
        seeded noise off again.
        """
        if self.entropy == "secret":
            return secret_normal
        generator = stream(seed, "privacy", *names)
        return lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)

    def unmet(self, given: "Privacy | None") -> str | None:
        """Why a client that asks for this privacy does not take part in a run; None: it does."""
        if (
            given is not None
            and given.noise >= self.noise
            and (given.entropy == "secret" or self.entropy == "seed")
        ):
            return None
        secret = ", entropy: secret" if self.entropy == "secret" else ""
        return (
            f"it takes part only with privacy: {{noise: {self.noise:g}{secret}}} or more noise; "
            "what it would do alone, to be compared, has none, so alone: false too"
        )

    def spent(self, releases: int) -> dict[str, float | int | None]:
        """What so many releases cost one client; epsilon is None where nothing bounds it."""
        return {
            "epsilon": epsilon(self.noise, releases, self.delta),
            "delta": self.delta,
            "releases": releases,
        }


def _finite(change: Tensor) -> Tensor:
    """Zero where it is not finite."""
    return change.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _within(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A value in float64 as the nearest finite one of a dtype."""
    return value.nan_to_num().clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def _towards(base: Tensor, change: Tensor) -> Tensor:
    """`base + change` in the dtype of `base`, rounded so that it is not farther than `change`."""
    moved = _within(base.double() + change, base.dtype)
    over = (moved.double() - base.double()).abs() > change.abs()
    return (
        torch.where(over, torch.nextafter(moved, base), moved)
        if base.dtype in (torch.float32, torch.float64)
        else moved
    )


def protects(sends: Sends) -> bool:
    """Whether something of a reply goes through the mechanism."""
    return any(
        kind in PROTECTED for kind in ([sends] if isinstance(sends, str) else sends.values())
    )


def releases(reply: Value, sends: Sends) -> int:
    """How often the mechanism was used on a reply: once for an update, once for each row.

    >>> releases({"parameters": {}, "samples": 3}, {"parameters": "parameters", "samples": "open"}), releases(torch.ones(5, 2), "rows")
    (1, 5)
    """
    if isinstance(sends, dict):
        return (
            sum(releases(part, sends[key]) for key, part in reply.items() if key in sends)
            if isinstance(reply, dict)
            else 0
        )
    if reply is None or sends not in PROTECTED:
        return 0
    return len(reply) if sends == "rows" and isinstance(reply, Tensor) and reply.dim() else 1


def epsilon(noise: float, releases: int, delta: float) -> float | None:
    """Of so many releases of one client, between any two sets of data it may have. A release is a Gaussian mechanism of sensitivity
    2 bounds; T of them, each made knowing those before, are one with noise / sqrt(T) (Dong 2022, cor. 3.3), whose epsilon is exact
    (Balle & Wang 2018).

    >>> round(epsilon(noise=2.0, releases=1, delta=1e-5), 3), epsilon(0.0, 3, 1e-5), epsilon(1.0, 0, 1e-5)
    (4.377, None, 0.0)
    """
    if not releases:
        return 0.0
    return (
        float(accounting().get_epsilon_gaussian(noise / 2 / math.sqrt(releases), delta))
        if noise
        else None
    )


def noise_for(epsilon: float, releases: int, delta: float) -> float:
    """The least noise with which so many releases cost no more than epsilon."""
    return 2 * math.sqrt(releases) * float(accounting().get_sigma_gaussian(epsilon, delta))


def accounting() -> Any:
    """The library that counts."""
    try:
        import dp_accounting
    except ImportError:
        raise UserError(
            "privacy needs the package dp-accounting to count epsilon: pip install 'unalike[privacy]'"
        ) from None
    return dp_accounting


def uncounted() -> str | None:
    """Why nothing can be counted, None: it can."""
    try:
        accounting()
    except UserError as error:
        return str(error)
    return None


def secret_normal(shape: torch.Size) -> Tensor:
    """Standard normal values from the operating system's entropy, by the inverse CDF."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * max(shape.numel(), 1))), dtype=torch.int64)[
        : shape.numel()
    ]
    return torch.special.ndtri(((bits & (2**52 - 1)).double() + 0.5) * 2.0**-52).view(shape)
