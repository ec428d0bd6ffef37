"""Ways to partition rows among clients; every row goes to exactly one client.

Each function returns one tensor of row numbers (int64) per client, in ascending order, and draws
from the generator it is passed: the same generator state gives the same partition.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor

log = logging.getLogger(__name__)

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]


def iid(rows: int, sizes_or_clients: int | Sequence[int], generator: Generator) -> list[Tensor]:
    """Rows at random, as evenly as possible among a number of clients, or by given sizes.

    >>> [len(part) for part in iid(7, 3, torch.Generator())]
    [3, 2, 2]
    """
    if isinstance(sizes_or_clients, int):
        clients = check_clients(rows, sizes_or_clients)
        sizes = [rows // clients + (client < rows % clients) for client in range(clients)]
    else:
        sizes = list(sizes_or_clients)
        if not sizes or min(sizes) < 0 or sum(sizes) != rows:
            raise ValueError(
                f"iid shares out {rows} rows: the sizes must be 0 or more and sum to that, "
                f"got {sizes}"
            )
    owner = torch.empty(rows, dtype=torch.int64)
    shuffled = torch.randperm(rows, generator=generator)
    owner[shuffled] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return rows_of_clients(owner, len(sizes))


def dirichlet(
    y: Tensor, clients: int, alpha: Positive, generator: Generator, minimum: Count = 1
) -> list[Tensor]:
    """Each class is split by proportions from Dirichlet(alpha): small alpha is skewed, large IID.

    Clients with fewer than `minimum` rows get random ones from the largest client, so the
    proportions of very small clients are not as drawn; how many rows were moved is logged.

    Args:
        y: classes (n,), integers.
    Reference: Hsu et al. 2019, https://arxiv.org/abs/1909.06335
    """
    y = check_classes(y)
    check_clients(len(y), clients, minimum)
    draws = numpy_generator(generator)
    owner = torch.empty(len(y), dtype=torch.int64)
    for label in y.unique():
        rows = (y == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        cumulative = draw_proportions(draws, clients, alpha).cumsum()
        ends = torch.from_numpy(cumulative * len(rows)).round().long()
        owner[rows] = torch.searchsorted(ends[:-1], torch.arange(len(rows)), right=True)
    return rows_of_clients(fill_up(owner, clients, minimum, generator), clients)


def shards(y: Tensor, clients: int, shards: Count, generator: Generator) -> list[Tensor]:
    """Rows sorted by class are cut into equal shards; every client gets `shards` random ones.

    A client has about `shards` classes.

    Args:
        y: classes (n,), integers.
    Reference: McMahan et al. 2017, https://arxiv.org/abs/1602.05629
    """
    y = check_classes(y)
    check_clients(len(y), clients, shards)
    shuffled = torch.randperm(len(y), generator=generator)
    pieces = shuffled[y[shuffled].argsort(stable=True)].tensor_split(clients * shards)
    owner = torch.empty(len(y), dtype=torch.int64)
    order = torch.randperm(clients * shards, generator=generator).tolist()
    for position, piece in enumerate(order):
        owner[pieces[piece]] = position // shards
    return rows_of_clients(owner, clients)


def apart(y: Tensor, clients: int, generator: Generator) -> list[Tensor]:
    """Every client has rows of one class only (or of whatever target `by` names).

    Clients of one class share its rows evenly. With fewer clients than classes, some clients have
    several.

    Args:
        y: classes (n,), integers.

    >>> [part.tolist() for part in apart(torch.tensor([0, 0, 1, 1]), 2, torch.Generator())]
    [[0, 1], [2, 3]]
    """
    y = check_classes(y)
    check_clients(len(y), clients)
    owner = torch.empty(len(y), dtype=torch.int64)
    classes = y.unique()
    for i, label in enumerate(classes):
        rows = (y == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        owners = torch.tensor([i % clients])
        if i < clients:
            owners = torch.arange(i, clients, len(classes))
        owner[rows] = owners[torch.arange(len(rows)) % len(owners)]
    return rows_of_clients(fill_up(owner, clients, 1, generator), clients)


def multilabel_dirichlet(
    y: Tensor,
    clients: int,
    alpha: Positive,
    generator: Generator,
    minimum: Count = 1,
    missing: Whole = 0,
) -> list[Tensor]:
    """Each label's rows are split by proportions from Dirichlet(alpha), as far as possible.

    Iterative stratification (Sechidis et al. 2011) with random targets: the rarest remaining label
    first, each of its rows to the client that lacks the row's labels most. Labels that occur
    together cannot be separated, so the skew is below `dirichlet`'s at the same alpha. Clients
    below `minimum` are filled up as there.

    Args:
        y: (n, labels), 1 where a label is present; rows without any count as a label of their own.
        missing: so many random labels are withheld from each client, which gets no row with one; a
            label withheld from all stays with one client. A row that fits nowhere goes where the
            fewest of its labels are withheld, and these are allowed there from then on; how many
            such rows there were is logged.
    """
    if y.ndim != 2:
        raise ValueError(
            f"multilabel_dirichlet needs labels of shape (n, labels), got {tuple(y.shape)}; "
            "take dirichlet for classes"
        )
    check_clients(len(y), clients, minimum)
    draws = numpy_generator(generator)
    present = (y == 1).cpu().numpy()
    # rows without any label have a label of their own: (n, labels + 1)
    present = np.concatenate([present, ~present.any(1, keepdims=True)], axis=1)
    # how many rows of a label a client still lacks: (labels + 1, clients)
    lack = np.stack([draw_proportions(draws, clients, alpha) for _ in present.T])
    if missing:
        lack[:-1] = withhold(lack[:-1], missing, draws)
    lack *= present.sum(0)[:, None]
    conflicts = 0
    shuffled = torch.randperm(len(y), generator=generator).numpy()
    waiting = present[shuffled]  # labels of rows that have no client yet
    owner = torch.full((len(y),), -1)
    while waiting.any():
        remaining = waiting.sum(0)
        label = np.where(remaining > 0, remaining, len(y) + 1).argmin()  # the rarest
        for row in waiting[:, label].nonzero()[0]:
            labels = waiting[row].copy()
            demand = lack[labels].sum(0)  # (clients,)
            if demand.max() == -np.inf:  # every client has one of the labels withheld
                client = int(np.isinf(lack[labels]).sum(0).argmin())
                lack[labels, client] = np.maximum(lack[labels, client], -len(y))
                conflicts += 1
            else:
                client = int(demand.argmax())
            owner[shuffled[row]] = client
            lack[labels, client] -= 1
            waiting[row] = False
    if conflicts:
        log.info(
            "%d rows carry labels that no client might hold together; "
            "some clients lack fewer labels than asked for",
            conflicts,
        )
    return rows_of_clients(fill_up(owner, clients, minimum, generator), clients)


def by_cluster(features: Tensor, clients: int, generator: Generator) -> list[Tensor]:
    """Rows with similar features together: k-means, one cluster per client (FedMPT).

    Args:
        features: (n, width).
    """
    from sklearn.cluster import KMeans

    if features.ndim != 2:
        raise ValueError(
            f"by_cluster needs features of shape (n, width), got {tuple(features.shape)}"
        )
    check_clients(len(features), clients)
    distinct = len(features.unique(dim=0))
    if distinct < clients:
        raise ValueError(
            f"by_cluster gives every client a cluster: {distinct} distinct rows are too few for "
            f"{clients} clients"
        )
    seed = int(torch.randint(2**31, (), generator=generator))
    kmeans = KMeans(clients, n_init=4, random_state=seed)
    kmeans.fit(features.detach().cpu().double().numpy())
    return rows_of_clients(torch.from_numpy(kmeans.labels_).long(), clients)


PARTITIONS: dict[str, Callable[..., list[Tensor]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "apart": apart,
    "multilabel_dirichlet": multilabel_dirichlet,
    "by_cluster": by_cluster,
}


def rows_of_clients(owner: Tensor, clients: int) -> list[Tensor]:
    """The rows of each client, from the client (n,) of each row."""
    return [(owner == client).nonzero().flatten() for client in range(clients)]


def fill_up(owner: Tensor, clients: int, minimum: int, generator: Generator) -> Tensor:
    """Move random rows from the largest client to any below the minimum, in place."""
    moved = 0
    sizes = owner.bincount(minlength=clients)
    while sizes.min() < minimum:
        rows = (owner == sizes.argmax()).nonzero().flatten()
        owner[rows[torch.randint(len(rows), (), generator=generator)]] = sizes.argmin()
        sizes = owner.bincount(minlength=clients)
        moved += 1
    if moved:
        log.info(
            "moved %d rows so that each of %d clients has at least %d", moved, clients, minimum
        )
    return owner


def numpy_generator(generator: Generator) -> np.random.Generator:
    """A NumPy generator seeded from torch's, which has no public Dirichlet with a generator."""
    return np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))


def draw_proportions(draws: np.random.Generator, clients: int, alpha: float) -> np.ndarray:
    """Proportions (clients,) from a symmetric Dirichlet distribution."""
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha must be above 0 and finite, got {alpha}")
    return draws.dirichlet(np.full(clients, alpha))


def withhold(shares: np.ndarray, missing: int, draws: np.random.Generator) -> np.ndarray:
    """Withhold `missing` random labels from each client; a label withheld from all stays with one.

    Args:
        shares: (labels, clients), rows sum to 1.
    Returns: shares with -inf where a label is withheld; the other shares sum to 1 again.
    """
    labels, clients = shares.shape
    if not 0 <= missing < labels:
        raise ValueError(
            f"missing labels must be 0 or more and fewer than the {labels} there are, got {missing}"
        )
    withheld = np.stack([draws.permutation(labels) < missing for _ in range(clients)], 1)
    for label in np.flatnonzero(withheld.all(1)):
        withheld[label, draws.integers(clients)] = False
    # 1e-12: if all remaining shares were drawn as 0, they become equal
    remaining = np.where(withheld, 0.0, shares + 1e-12)
    return np.where(withheld, -np.inf, remaining / remaining.sum(1, keepdims=True))


def match_label_proportions(y: Tensor, own: Tensor, generator: Generator) -> Tensor:
    """The most rows, shuffled, whose classes `y` have the proportions of a client's `own` classes.

    A client is then tested on the distribution it trains on.

    >>> y, own = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 2, 2])
    >>> sorted(match_label_proportions(y, own, torch.Generator()).tolist())
    [2, 3, 4]
    """
    classes, counts = own.unique(return_counts=True)
    order = torch.randperm(len(y), generator=generator)
    rows = []  # of each class, with its count in `own`
    for label, count in zip(classes, counts.tolist(), strict=True):
        rows.append((order[y[order] == label], count))
    ratio = min((len(own_rows) / count for own_rows, count in rows if len(own_rows)), default=0.0)
    chosen = torch.cat([own_rows[: round(ratio * count)] for own_rows, count in rows])
    return chosen[torch.randperm(len(chosen), generator=generator)]


def draw_rows(rows: int, size: int, generator: Generator, y: Tensor | None = None) -> Tensor:
    """Numbers of `size` of so many rows, drawn at random, in rising order.

    Args:
        y: classes (rows,). Given, every class is drawn in proportion: its number of rows differs
            by less than 1 from the exact share.

    >>> y = torch.tensor([0] * 8 + [1] * 4)
    >>> y[draw_rows(12, 3, torch.Generator(), y)].tolist()
    [0, 0, 1]
    """
    order = torch.randperm(rows, generator=generator)
    if size >= rows:
        return torch.arange(rows)
    if y is None:
        return order[:size].sort().values
    by_class = order[y[order].argsort(stable=True)]
    start = torch.rand((), generator=generator, dtype=torch.float64)
    steps = (torch.arange(size, dtype=torch.float64) + start) * rows / size  # systematic sampling
    return by_class[steps.long().clamp(max=rows - 1)].sort().values


def check_classes(y: Tensor) -> Tensor:
    """Labels on the CPU. Raises ValueError unless they are one integer per row."""
    if y.ndim != 1 or y.is_floating_point():
        raise ValueError(
            f"this partition needs one whole-number label a row, got shape {tuple(y.shape)} of "
            f"{y.dtype}: let `by` name a target of classes, or take multilabel_dirichlet for "
            "several labels a row"
        )
    return y.cpu()


def check_clients(rows: int, clients: int, minimum: int = 1) -> int:
    """The number of clients. Raises ValueError if rows are too few for `minimum` per client."""
    if clients < 1 or minimum < 0 or clients * minimum > rows:
        raise ValueError(
            f"{rows} rows cannot give {clients} clients at least {minimum} each: clients must be "
            "1 or more, and rows enough for all"
        )
    return clients
