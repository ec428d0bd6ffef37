"""Random views of public samples: new ones in every pass, or some that are made once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unalike.base.randomness import scope
from unalike.core.program import ClientProgram
from unalike.data.device_cache import DeviceCache, byte_count, chunk_rows
from unalike.data.samples import Inputs, map_modalities
from unalike.methods.public_data import public_batch, public_samples

MAX_BYTES = 2**32  # of the kept views of a client, of one kind

Augment = Callable[[Any], Any]  # a batch of samples to a random view of each


class PublicViews(ClientProgram):
    """A client that trains on random views of public samples.

    Its algorithm has the field `views`: how many views of each sample are made once, before the
    first pass, to be chosen from; None: every pass makes new ones. With a frozen trunk its output
    for each kept view is what is kept, so that a pass does not run the trunk.
    """

    def public_views(
        self, rows: Tensor, augment: Augment, kind: str = "", count: int = 1
    ) -> list[Any]:
        """Different random views of each of these public rows: `count` batches.

        Args:
            rows: row numbers, (n,).
            augment: makes a random view of samples.
            kind: of view, where a method has several.
        """
        number: int | None = self.algorithm.views  # type: ignore[attr-defined]
        if number is None:
            x = public_batch(self, rows, raw=True)
            return [augment(x) for _ in range(count)]
        pool = self._view_pool(augment, kind, number)
        chosen = torch.rand(len(rows), number).argsort(1)[:, :count]  # (n, count)

        def view(column: int) -> Any:
            which = chosen[:, column]
            return map_modalities(
                pool, lambda part: part[which.to(part.device), rows.to(part.device)]
            )

        return [view(column) for column in range(count)]

    def _view_pool(self, augment: Augment, kind: str, number: int) -> Inputs:
        """All kept views (number, rows, ...) of a kind. The same whenever they are made."""
        pools: dict[str, Inputs] = self.__dict__.setdefault("_view_pools", {})
        if kind not in pools:
            samples = public_samples(self)
            trunk = samples.transform if isinstance(samples, DeviceCache) else None
            every = torch.arange(len(samples)).repeat(number)
            parts = []
            with scope(self.seed, "views", self.client.id, kind):
                for rows in every.split(chunk_rows(self.client.device)):
                    view = augment(public_batch(self, rows, raw=True))
                    parts.append(view if trunk is None else trunk(view))
                    check_size(byte_count(parts[0]) * len(every) // len(parts[0]), number)
            pools[kind] = join(parts, (number, len(samples)))
        return pools[kind]


def check_size(size: int, number: int) -> None:
    """Raise ValueError where kept views would take too much memory."""
    if size > MAX_BYTES:
        raise ValueError(
            f"{number} views of each public sample take {size / 2**30:.1f} GiB, more than "
            f"{MAX_BYTES / 2**30:.0f}: lower algorithm.views or public.size"
        )


def join(parts: list[Inputs], shape: tuple[int, int]) -> Inputs:
    """Batches of views as one tensor (views, rows, ...), or one a modality."""
    first = parts[0]
    if isinstance(first, dict):
        return {
            name: torch.cat([part[name] for part in parts]).unflatten(0, shape)  # type: ignore[call-overload, index]
            for name in first
        }
    return torch.cat(parts).unflatten(0, shape)  # type: ignore[arg-type]
