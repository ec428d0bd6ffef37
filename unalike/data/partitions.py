"""Ways to share rows among clients; every row goes to exactly one. Knows nothing of what the rows hold beyond labels or features.

Each function returns one tensor of row numbers (int64) per client, in ascending order, and draws from the generator it is given:
the same generator state gives the same parts.
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
Some = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]


def iid(rows: int, sizes_or_clients: int | Sequence[int], generator: Generator) -> list[Tensor]:
    """Rows at random: as evenly as can be among a number of clients, or by the sizes given.

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
                f"iid shares out {rows} rows: the sizes must be 0 or more and sum to that, got {sizes}"
            )
    owner = torch.empty(rows, dtype=torch.int64)
    owner[torch.randperm(rows, generator=generator)] = torch.arange(len(sizes)).repeat_interleave(
        torch.tensor(sizes)
    )
    return parts(owner, len(sizes))


def dirichlet(
    y: Tensor, clients: int, alpha: Positive, generator: Generator, minimum: Some = 1
) -> list[Tensor]:
    """Each class is shared by proportions drawn from Dirichlet(alpha): small alpha is skewed, large alpha near IID (Hsu 2019).

    y (n,) whole numbers. A client left with fewer than `minimum` rows gets random ones moved from the largest client,
    so the proportions of very small clients are not as drawn; how many rows were moved is logged.
    """
    y = check_classes(y)
    check_clients(len(y), clients, minimum)
    draws = numpy_draws(generator)
    owner = torch.empty(len(y), dtype=torch.int64)
    for label in y.unique():
        rows = (y == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        ends = (
            torch.from_numpy(proportions(draws, clients, alpha).cumsum() * len(rows)).round().long()
        )
        owner[rows] = torch.searchsorted(ends[:-1], torch.arange(len(rows)), right=True)
    return parts(fill_up(owner, clients, minimum, generator), clients)


def shards(y: Tensor, clients: int, shards: Some, generator: Generator) -> list[Tensor]:
    """Rows sorted by class are cut into equal shards, and every client gets `shards` of them at random (McMahan 2017).

    y (n,) whole numbers. A client sees about `shards` classes.
    """
    y = check_classes(y)
    check_clients(len(y), clients, shards)
    mixed = torch.randperm(len(y), generator=generator)
    pieces = mixed[y[mixed].argsort(stable=True)].tensor_split(clients * shards)
    owner = torch.empty(len(y), dtype=torch.int64)
    for place, piece in enumerate(torch.randperm(clients * shards, generator=generator).tolist()):
        owner[pieces[piece]] = place // shards
    return parts(owner, clients)


def apart(y: Tensor, clients: int, generator: Generator) -> list[Tensor]:
    """Every client has rows of one class only, or of whatever `by` names, and shares them evenly with the others who have it.

    y (n,) whole numbers. Where there are fewer clients than classes, some have several.

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
        sharers = (
            torch.arange(i, clients, len(classes)) if i < clients else torch.tensor([i % clients])
        )
        owner[rows] = sharers[torch.arange(len(rows)) % len(sharers)]
    return parts(fill_up(owner, clients, 1, generator), clients)


def multilabel_dirichlet(
    y: Tensor,
    clients: int,
    alpha: Positive,
    generator: Generator,
    minimum: Some = 1,
    missing: Whole = 0,
) -> list[Tensor]:
    """Each label's carriers are shared by proportions drawn from Dirichlet(alpha), as nearly as rows with several labels allow.

    y (n, labels), 1 where a label is present; rows without any count as a label of their own. Iterative stratification
    (Sechidis 2011) with drawn targets: of the labels left, the rarest first, each of its rows to the client that lacks the
    row's labels most, all together. Labels that go together cannot be parted, so skew stays below `dirichlet`'s at the same
    alpha. Clients below `minimum` are filled up as there.

    From each client `missing` labels are withheld, drawn at random, and it gets no row that carries one; a label drawn by all stays
    with one of them. A row that fits nowhere goes where the fewest of its labels are withheld, and there they are withheld no longer;
    how many there were is logged.
    """
    if y.ndim != 2:
        raise ValueError(
            f"multilabel_dirichlet needs labels of shape (n, labels), got {tuple(y.shape)}; take dirichlet for classes"
        )
    check_clients(len(y), clients, minimum)
    draws = numpy_draws(generator)
    present = (y == 1).cpu().numpy()
    present = np.concatenate([present, ~present.any(1, keepdims=True)], axis=1)  # (n, labels + 1)
    lack = np.stack(
        [proportions(draws, clients, alpha) for _ in present.T]
    )  # (labels + 1, clients)
    if missing:
        lack[:-1] = withhold(lack[:-1], missing, draws)
    lack *= present.sum(0)[:, None]
    homeless = 0
    mixed = torch.randperm(len(y), generator=generator).numpy()
    waiting = present[mixed]  # a row waits until it has a client
    owner = torch.full((len(y),), -1)
    while waiting.any():
        left = waiting.sum(0)
        label = np.where(left > 0, left, len(y) + 1).argmin()
        for place in waiting[:, label].nonzero()[0]:
            wish = lack[waiting[place]].sum(0)
            if wish.max() == -np.inf:
                against = np.isinf(lack[waiting[place]]).sum(0)  # (clients,)
                client, homeless = int(against.argmin()), homeless + 1
                lack[waiting[place], client] = np.maximum(lack[waiting[place], client], -len(y))
            else:
                client = int(wish.argmax())
            owner[mixed[place]] = client
            lack[waiting[place], client] -= 1
            waiting[place] = False
    if homeless:
        log.info(
            "%d rows carry labels that no client might hold together; some clients lack fewer labels than asked for",
            homeless,
        )
    return parts(fill_up(owner, clients, minimum, generator), clients)


def by_cluster(features: Tensor, clients: int, generator: Generator) -> list[Tensor]:
    """Rows with like features together: k-means, one cluster a client (FedMPT). features (n, width)."""
    from sklearn.cluster import KMeans

    if features.ndim != 2:
        raise ValueError(
            f"by_cluster needs features of shape (n, width), got {tuple(features.shape)}"
        )
    check_clients(len(features), clients)
    distinct = len(features.unique(dim=0))
    if distinct < clients:
        raise ValueError(
            f"by_cluster gives every client a cluster: {distinct} distinct rows are too few for {clients} clients"
        )
    seed = int(torch.randint(2**31, (), generator=generator))
    means = KMeans(clients, n_init=4, random_state=seed).fit(
        features.detach().cpu().double().numpy()
    )
    return parts(torch.from_numpy(means.labels_).long(), clients)


PARTITIONS: dict[str, Callable[..., list[Tensor]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "apart": apart,
    "multilabel_dirichlet": multilabel_dirichlet,
    "by_cluster": by_cluster,
}


def parts(owner: Tensor, clients: int) -> list[Tensor]:
    """The rows of each client, from the client of each row."""
    return [(owner == client).nonzero().flatten() for client in range(clients)]


def fill_up(owner: Tensor, clients: int, minimum: int, generator: Generator) -> Tensor:
    """Moves random rows from the largest client to any below the minimum."""
    moved = 0
    while (sizes := owner.bincount(minlength=clients)).min() < minimum:
        rows = (owner == sizes.argmax()).nonzero().flatten()
        owner[rows[torch.randint(len(rows), (), generator=generator)]] = sizes.argmin()
        moved += 1
    if moved:
        log.info(
            "moved %d rows so that each of %d clients has at least %d", moved, clients, minimum
        )
    return owner


def numpy_draws(generator: Generator) -> np.random.Generator:
    """NumPy draws seeded from the generator: torch has no public Dirichlet that takes one."""
    return np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))


def proportions(draws: np.random.Generator, clients: int, alpha: float) -> np.ndarray:
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha must be above 0 and finite, got {alpha}")
    return draws.dirichlet(np.full(clients, alpha))


def withhold(shares: np.ndarray, missing: int, draws: np.random.Generator) -> np.ndarray:
    """Shares (labels, clients) with -inf where a label is withheld from a client, `missing` of them each; the rest sums to 1 again."""
    labels, clients = shares.shape
    if not 0 <= missing < labels:
        raise ValueError(
            f"missing labels must be 0 or more and fewer than the {labels} there are, got {missing}"
        )
    gone = np.stack([draws.permutation(labels) < missing for _ in range(clients)], 1)
    for label in np.flatnonzero(gone.all(1)):
        gone[label, draws.integers(clients)] = False
    left = np.where(
        gone, 0.0, shares + 1e-12
    )  # where all that is left was drawn as 0, it is shared evenly
    return np.where(gone, -np.inf, left / left.sum(1, keepdims=True))


def match_label_proportions(y: Tensor, own: Tensor, generator: Generator) -> Tensor:
    """The most rows, shuffled, whose classes y come in the proportions of a client's `own`: it is tested on what it meets.

    >>> y, own = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 2, 2])
    >>> sorted(match_label_proportions(y, own, torch.Generator()).tolist())
    [2, 3, 4]
    """
    classes, counts = own.unique(return_counts=True)
    order = torch.randperm(len(y), generator=generator)
    rows = [
        (order[y[order] == one], count) for one, count in zip(classes, counts.tolist(), strict=True)
    ]
    most = min((len(some) / count for some, count in rows if len(some)), default=0.0)
    chosen = torch.cat([some[: round(most * count)] for some, count in rows])
    return chosen[torch.randperm(len(chosen), generator=generator)]


def check_classes(y: Tensor) -> Tensor:
    if y.ndim != 1 or y.is_floating_point():
        raise ValueError(
            f"this partition needs one whole-number label a row, got shape {tuple(y.shape)} of {y.dtype}: "
            "let `by` name a target of classes, or take multilabel_dirichlet for several labels a row"
        )
    return y.cpu()


def check_clients(rows: int, clients: int, each: int = 1) -> int:
    """The number of clients, if each can have as many rows as it must."""
    if clients < 1 or each < 0 or clients * each > rows:
        raise ValueError(
            f"{rows} rows cannot give {clients} clients at least {each} each: clients must be 1 or more, "
            "and rows enough for all"
        )
    return clients
