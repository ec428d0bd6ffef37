"""Local differential privacy of what a client sends: clipping, Gaussian noise, an accountant.

Whatever data a client has, what it sends lies in a ball of radius `bound` around what everyone
knows, and noise of standard deviation `noise * bound` is added: the Gaussian mechanism with
sensitivity 2 * bound (Dwork & Roth 2014, app. A). docs/privacy.md says against whom it protects.
"""

import math
import os
from collections.abc import Callable, Mapping
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
    """How replies are protected before they leave a client; `privacy:` in a scenario.

    Args:
        noise: standard deviation of the noise, in multiples of `bound`; 0 protects nothing.
        bound: L2 norm that an update, or a row, is clipped to.
        delta: of (epsilon, delta): the probability with which epsilon need not hold.
        entropy: where noise comes from: the run's "seed", which can be repeated, or the operating
            system ("secret").
    """

    noise: Annotated[float, Field(ge=0)]
    bound: Annotated[float, Field(gt=0)] = 1.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    entropy: Literal["seed", "secret"] = "seed"

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
            protected: dict[str, Value] = {}
            for key, part in (reply if isinstance(reply, dict) else {}).items():
                if key in sends:
                    protected[key] = self.protect(part, sends[key], base, draw, blank)
                else:
                    protected[key] = None
            return protected or None
        if reply is None or sends not in PROTECTED:
            return reply
        content: Any = reply
        if sends == "rows":
            return self.rows(torch.zeros_like(content) if blank else content, draw)
        known = base(content)
        if blank:
            content = {name: known[name].to(tensor) for name, tensor in content.items()}
        return self.parameters(content, known, draw)

    def parameters(self, sent: Parameters, base: Parameters, draw: Draw) -> Parameters:
        """Parameters as they may leave: `base` plus their clipped update plus noise.

        The update `sent - base` is clipped as one vector. Both steps are computed in float64.
        Values that are not finite count as no update; integers stay as they were in `base`.

        Args:
            sent: parameters after training.
            base: what the server knows of them, of the same names and shapes.

        Raises:
            ValueError: a shape differs from that in `base`.
        """
        for name, tensor in sent.items():
            if tensor.shape != base[name].shape:
                raise ValueError(
                    f"{name} has the shape {tuple(tensor.shape)}, "
                    f"and came with {tuple(base[name].shape)}"
                )
        start = {name: base[name].to(tensor.device, tensor.dtype) for name, tensor in sent.items()}
        changes, scale = clip_change(sent, start, self.bound)
        protected = {}
        for name, before in start.items():
            if name not in changes:
                protected[name] = before
            elif self.noise:
                noise = (self.noise * self.bound * draw(before.shape)).to(before.device)
                change = changes[name] * scale + noise
                protected[name] = _round_to(before.double() + change, before.dtype)
            elif scale < 1:
                protected[name] = _add_rounding_inwards(before, changes[name] * scale)
            else:
                protected[name] = torch.where(sent[name].isfinite(), sent[name], before)
            # Noise can make a variance of batch normalisation negative. Clamping what is already
            # protected costs no privacy.
            if name.endswith("running_var"):
                protected[name] = protected[name].clamp_min(0)
        return protected

    def rows(self, z: Tensor, draw: Draw) -> Tensor:
        """Rows (n, ...) as they may leave: each is clipped, gets noise, and is clipped again.

        The second clipping costs no privacy and keeps norms within the bound. All is computed in
        float64. A row that is not finite counts as one of zeros.
        """
        finite = z.flatten(1).isfinite().all(1).view(-1, *[1] * (z.dim() - 1))
        clipped = self._clip_rows(torch.where(finite, z, torch.zeros_like(z)).double())
        if self.noise:
            noise = (self.noise * self.bound * draw(z.shape)).to(z.device)
            clipped = self._clip_rows(_zero_nonfinite(clipped + noise))
        return clipped.to(z.dtype)

    def _clip_rows(self, z: Tensor) -> Tensor:
        norms = z.flatten(1).norm(dim=1).view(-1, *[1] * (z.dim() - 1))
        return torch.where(norms > self.bound, z * (self.bound / norms), z)

    def draws(self, seed: int, *names: str | int) -> Draw:
        """The source of noise for one reply.

        Secret noise comes from the operating system. Seeded noise is for simulations: a server
        knows the seed, so it could subtract the noise.
        """
        if self.entropy == "secret":
            return secret_normal
        generator = stream(seed, "privacy", *names)
        return lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)

    def shortfall(self, offered: "Privacy | None") -> str | None:
        """Why a client that demands this privacy does not join a run that offers less, or None."""
        if (
            offered is not None
            and offered.noise >= self.noise
            and (offered.entropy == "secret" or self.entropy == "seed")
        ):
            return None
        secret = ", entropy: secret" if self.entropy == "secret" else ""
        return (
            f"it takes part only with privacy: {{noise: {self.noise:g}{secret}}} or more noise; "
            "what it would do alone, to be compared, has none, so alone: false too"
        )

    def spent(self, releases: int) -> dict[str, float | int | None]:
        """The privacy loss of one client after this many releases; epsilon None: unbounded."""
        return {
            "epsilon": epsilon(self.noise, releases, self.delta),
            "delta": self.delta,
            "releases": releases,
        }


def clip_change(sent: Parameters, base: Parameters, bound: float) -> tuple[Parameters, float]:
    """The update `sent - base` in float64, and the factor that clips it to L2 norm `bound`.

    It is one vector over all tensors. Values that are not finite count as no change; integers
    are left out.

    >>> clip_change({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}, bound=1.0)[1]
    0.2
    """
    changes = {}
    for name, tensor in sent.items():
        if tensor.is_floating_point():
            start = base[name].to(tensor.device, tensor.dtype)
            changes[name] = _zero_nonfinite(tensor.double() - start.double())
    norm = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
    return changes, bound / norm if norm > bound else 1.0


def _zero_nonfinite(change: Tensor) -> Tensor:
    """The same tensor with zeros in place of NaN and infinity."""
    return change.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in float64 as the nearest finite ones of a dtype."""
    return value.nan_to_num().clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def _add_rounding_inwards(base: Tensor, change: Tensor) -> Tensor:
    """`base + change` in the dtype of `base`, rounded so that it is not farther than `change`."""
    moved = _round_to(base.double() + change, base.dtype)
    if base.dtype not in (torch.float32, torch.float64):
        return moved  # torch.nextafter knows only these two
    too_far = (moved.double() - base.double()).abs() > change.abs()
    return torch.where(too_far, torch.nextafter(moved, base), moved)


def protects(sends: Sends) -> bool:
    """Whether something of a reply is clipped and noised."""
    kinds = [sends] if isinstance(sends, str) else sends.values()
    return any(kind in PROTECTED for kind in kinds)


def releases(reply: Value, sends: Sends) -> int:
    """How often the mechanism was used on a reply: once for an update, once for each row.

    >>> releases({"parameters": {}, "samples": 3}, {"parameters": "parameters", "samples": "open"})
    1
    >>> releases(torch.ones(5, 2), "rows")
    5
    """
    if isinstance(sends, dict):
        if not isinstance(reply, dict):
            return 0
        return sum(releases(part, sends[key]) for key, part in reply.items() if key in sends)
    if reply is None or sends not in PROTECTED:
        return 0
    return len(reply) if sends == "rows" and isinstance(reply, Tensor) and reply.dim() else 1


def epsilon(noise: float, releases: int, delta: float) -> float | None:
    """Epsilon of a client's releases, between any two datasets that it may have.

    A release is a Gaussian mechanism of sensitivity 2 * bound. T adaptive ones are equivalent to
    one with noise / sqrt(T) (Dong et al. 2022, cor. 3.3, https://arxiv.org/abs/1905.02383), whose
    epsilon is known exactly (Balle & Wang 2018, https://arxiv.org/abs/1805.06530).

    Args:
        noise: standard deviation, in multiples of the bound.
        releases: how often the mechanism was used.
    Returns: None without noise: nothing bounds it.

    >>> round(epsilon(noise=2.0, releases=1, delta=1e-5), 3)
    4.377
    >>> epsilon(noise=1.0, releases=0, delta=1e-5)
    0.0
    """
    if not releases:
        return 0.0
    if not noise:
        return None
    return float(accounting().get_epsilon_gaussian(noise / 2 / math.sqrt(releases), delta))


def composed_epsilon(releases: Mapping[float, int], delta: float) -> float | None:
    """Epsilon of releases with different noise, e.g. in several runs.

    T_i releases with noise s_i are together one with noise s, 1 / s^2 = sum_i T_i / s_i^2
    (Dong et al. 2022, cor. 3.3, https://arxiv.org/abs/1905.02383).

    Args:
        releases: their number, by noise in multiples of the bound.
    Returns: None where some have no noise: nothing bounds it.

    >>> composed_epsilon({2.0: 1, 4.0: 4}, 1e-5) == epsilon(noise=2.0, releases=2, delta=1e-5)
    True
    """
    counts = {noise: count for noise, count in releases.items() if count}
    if not all(counts):
        return None
    total = sum(count / noise**2 for noise, count in counts.items())
    return epsilon(1 / math.sqrt(total), 1, delta) if total else 0.0


def noise_for(epsilon: float, releases: int, delta: float) -> float:
    """The least noise, in multiples of the bound, at which the releases cost at most epsilon."""
    return 2 * math.sqrt(releases) * float(accounting().get_sigma_gaussian(epsilon, delta))


def accounting() -> Any:
    """The library that computes epsilon.

    Raises:
        UserError: it is not installed.
    """
    try:
        import dp_accounting
    except ImportError:
        raise UserError(
            "privacy needs the package dp-accounting to count epsilon: "
            "pip install 'unalike[privacy]'"
        ) from None
    return dp_accounting


def accounting_problem() -> str | None:
    """Why epsilon cannot be computed here, or None."""
    try:
        accounting()
    except UserError as error:
        return str(error)
    return None


def secret_normal(shape: torch.Size) -> Tensor:
    """Standard normal values from the operating system's entropy, by the inverse CDF."""
    count = shape.numel()
    entropy = bytearray(os.urandom(8 * max(count, 1)))
    bits = torch.frombuffer(entropy, dtype=torch.int64)[:count]
    uniform = ((bits & (2**52 - 1)).double() + 0.5) * 2.0**-52  # in (0, 1), never at its ends
    return torch.special.ndtri(uniform).view(shape)
