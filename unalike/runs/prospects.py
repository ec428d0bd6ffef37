"""Should a client join? What can be known of it before any training.

Of each client: with whom it has labels in common, how alike its encoder and the others' see the
public rows, and how near the public rows are to its own. All of it is measured with encoders as
they start, without labels of rows, on a hundred rows of each kind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unalike.base.randomness import stream
from unalike.core.client import Client
from unalike.losses.kernels import debiased_cka
from unalike.models.model import find_trunk, mean_over_positions
from unalike.scenarios import Scenario, build_clients, load

ROWS = 100  # own rows, and public rows, that are compared
BATCH = 50
# Gain in percent by -log10(1 - nearness): a line through six clients with each of five public sets
# (`unalike bench muscle-prospects`, results/muscle-prospects.json).
INTERCEPT, SLOPE = -3.69, 5.55
ERROR = 4.8  # root of the mean square, for a public set that the line was not made from
CLOSEST = 1e-3  # of 1 - nearness: what is nearer cannot be told apart with so few rows


@dataclass(frozen=True)
class Prospect:
    """What is known of a client's gain before any training.

    Attributes:
        client: its id.
        partners: clients with the same task and a label in common.
        fit: how alike its encoder and the others' see the public rows: debiased kernel alignment
            (CKA), mean over the others; 0 for unrelated views, 1 for equal ones. None without a
            public set or others.
        nearness: how near the public rows are to its own, for its encoder: cosine of the two mean
            embeddings of a Gaussian kernel, 1 where they cannot be told apart. None without a
            public set.
        gain: gain in percent, give or take `ERROR`, that clients with a public set as near had with
            FedMusclePlus in our tables. None where encoders are not pretrained: none of these was.
    """

    client: str
    partners: tuple[str, ...]
    fit: float | None
    nearness: float | None
    gain: float | None


def prospects(scenario: str | Scenario, data_dir: str | None = None) -> list[Prospect]:
    """What is known of each client of a scenario before any training.

    Args:
        scenario: a shipped name, a file, or as `unalike.scenarios.load` returns it.
        data_dir: where data files are.
    Raises: Problems where data or models are missing.

    >>> ada = prospects("digits")[0]
    >>> ada.client, ada.partners, ada.nearness > 0.9
    ('ada', ('cleo', 'emil', 'fay'), True)
    """
    loaded = load(scenario)[0] if isinstance(scenario, str) else scenario
    return clients_prospects(build_clients(loaded, data_dir), loaded.seed)


def clients_prospects(clients: Sequence[Client], seed: int) -> list[Prospect]:
    """The same for clients made in Python."""
    kernels: dict[str, Tensor] = {}
    nearness: dict[str, float] = {}
    gains: dict[str, float] = {}
    for client in clients:
        if client.public is None:
            continue
        encoder = client.encoder(seed)
        own, public = features_of(client, encoder, seed)
        kernels[client.id] = public @ public.mT
        nearness[client.id] = kernel_cosine(own, public)
        if find_trunk(encoder) is not None:
            gains[client.id] = predict(nearness[client.id])
    found = []
    for client in clients:
        prospect = Prospect(
            client=client.id,
            partners=partners_of(client, clients),
            fit=mean_alignment(client.id, kernels),
            nearness=nearness.get(client.id),
            gain=gains.get(client.id),
        )
        found.append(prospect)
    return found


def partners_of(client: Client, clients: Sequence[Client]) -> tuple[str, ...]:
    """Clients with the same task and a label of the same name."""
    info = client.info()
    partners = []
    for other in clients:
        its = other.info()
        if other.id != client.id and its.task == info.task and set(its.labels) & set(info.labels):
            partners.append(other.id)
    return tuple(partners)


def mean_alignment(client: str, kernels: Mapping[str, Tensor]) -> float | None:
    """Mean debiased CKA of a client's kernel with the others'."""
    values = []
    for other, kernel in kernels.items():
        if client in kernels and other != client and kernel.shape == kernels[client].shape:
            values.append(float(debiased_cka(kernels[client], kernel)))
    return sum(values) / len(values) if values else None


def features_of(client: Client, encoder: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """Features of own training rows and of public rows, (n, width) each, float64. Public rows are
    the same for all clients."""
    assert client.public is not None
    forward: Any = encoder.to(client.device, client.dtype).eval()
    if client.task.dense:
        forward = forward.grid

    def encode(samples: Any, rows: Tensor, to_device: Any) -> Tensor:
        parts = []
        with torch.no_grad():
            for some in rows.split(BATCH):
                features = forward(to_device(samples.rows(some)[0]))
                features = mean_over_positions(features) if client.task.dense else features
                parts.append(features.double().cpu())
        return torch.cat(parts)

    own = draw(len(client.train), stream(seed, "prospects", client.id))
    public = draw(len(client.public), stream(seed, "prospects", "public"))
    return (
        encode(client.train, own, client.to_device),
        encode(client.public, public, client.public_to_device),
    )


def draw(rows: int, generator: torch.Generator) -> Tensor:
    """Up to `ROWS` row numbers, drawn at random."""
    return torch.randperm(rows, generator=generator)[:ROWS].sort().values


def kernel_cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the mean embeddings of two sets of rows, (n, width) and (m, width).

    The kernel is Gaussian with the median distance of all rows; a row is not compared with itself.

    >>> rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    >>> kernel_cosine(rows[:25], rows[25:]) > 0.9 > 0.3 > kernel_cosine(rows[:25], rows[25:] + 9)
    True
    """
    rows = torch.cat([a, b])
    distances = torch.cdist(rows, rows).square()
    off = ~torch.eye(len(rows), dtype=torch.bool)
    median = distances[off].median().clamp(min=torch.finfo(rows.dtype).tiny)
    kernel = torch.exp(-distances / median)
    n, m = len(a), len(b)
    if n < 2 or m < 2:
        raise ValueError(f"expected two rows or more of each set, got {n} and {m}")
    within_a = (kernel[:n, :n].sum() - n) / (n * (n - 1))
    within_b = (kernel[n:, n:].sum() - m) / (m * (m - 1))
    return float(kernel[:n, n:].mean() / (within_a * within_b).sqrt())


def predict(nearness: float) -> float:
    """Gain in percent that clients with a public set as near had in our tables.

    >>> round(predict(0.75), 1), round(predict(0.99), 1)
    (-0.3, 7.4)
    """
    return INTERCEPT + SLOPE * -math.log10(max(1 - nearness, CLOSEST))
