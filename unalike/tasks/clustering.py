"""Clustering: find groups without labels, which are used only to score them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.base.randomness import derive_seed
from unalike.tasks.federated_kmeans import federated_kmeans
from unalike.tasks.kmeans import kmeans
from unalike.tasks.task import (
    UNKNOWN,
    ClientLike,
    FederationLike,
    Inputs,
    Labels,
    ProgramLike,
    Task,
    check_whole,
)

Protocol = Literal["least", "first"]  # of k-means over several clients, see `federated_groups`


@dataclass(frozen=True)
class Clustering(Task):
    """Output (B,) the cluster of each sample, or (B, K) scores of which the highest wins.

    Labels (B,) are integers, -1 where unknown. Clusters have no order: they are matched with
    classes only for scoring. The encoder is an autoencoder, trained on its reconstruction error.
    """

    name: ClassVar[str] = "clustering"
    metric: ClassVar[str] = "acc"
    labelled: ClassVar[bool] = False
    federation_metrics: ClassVar[tuple[str, ...]] = (
        "acc",
        "nmi",
        "ari",
        "joint acc",
        "joint nmi",
        "joint ari",
    )

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, labels: Labels) -> None: ...

    def head(self, width: int) -> nn.Module:
        """Build the map from features (B, width) to scores (B, K): the matrix W of AFMCC eq. 4."""
        return nn.Linear(width, len(self.labels), bias=False)

    def loss(self, output: Tensor, y: Tensor) -> NoReturn:
        raise ValueError(
            "clustering has no labels to learn from: "
            "use a method that brings its own loss, such as afmcc"
        )

    def local_loss(self, model: nn.Module, x: Inputs, y: Tensor, criterion: Any = None) -> Tensor:
        """Return the reconstruction error of the model's autoencoder."""
        encoder: Any = model.encoder
        return encoder.error(x)

    def imitate(self, output: Tensor, teacher: Tensor) -> NoReturn:
        raise ValueError(
            "clustering has no teacher to imitate, groups have no order: "
            "use a method that brings its own loss, such as afmcc"
        )

    def check(self, y: Tensor) -> None:
        check_whole(y, self.name, ("n",))
        outside = y[(y < UNKNOWN) | (y >= len(self.labels))]
        if len(outside):
            raise ValueError(
                f"label {int(outside[0])} does not fit {len(self.labels)} clusters: "
                f"labels run from 0 to {len(self.labels) - 1}, {UNKNOWN} where unknown"
            )

    def check_encoder(self, encoder: nn.Module, modalities: Sequence[str]) -> None:
        if not callable(getattr(encoder, "error", None)):
            raise ValueError(
                f"{self.name} needs the model autoencoder, got {type(encoder).__name__}"
            )

    def check_client(self, client: ClientLike) -> str | None:
        """Return why a client has nothing to cluster: too few samples, or a constant modality."""
        samples = len(client.train)
        clusters = len(self.labels)
        if samples < clusters:
            plural = "" if samples == 1 else "s"
            return f"it has {samples} sample{plural}, fewer than the {clusters} clusters to find"
        for name, rows in (client.modality_rows() or {}).items():
            if len(rows) and (rows == rows[0]).all():
                return (
                    f'its modality "{name}" is the same in all its samples and tells nothing '
                    "apart: leave it out"
                )
        return None

    @classmethod
    def check_clients(cls, clients: Sequence[ClientLike]) -> dict[str, str]:
        """Return the clients that look for another number of clusters than most."""
        numbers = {client.id: len(client.task.labels) for client in clients}
        if not numbers:
            return {}
        usual = Counter(numbers.values()).most_common(1)[0][0]
        return {
            id: f"it looks for {clusters} clusters and others for {usual}: clients that cluster "
            "together must look for the same number."
            for id, clusters in numbers.items()
            if clusters != usual
        }

    def meter(self) -> "ClusteringMeter":
        return ClusteringMeter()

    def evaluate(self, program: ProgramLike, common: bool = False) -> dict[str, float]:
        """Return the scores of k-means on the client's own features of all its samples."""
        samples = program.embed()
        groups, _ = self.cluster(samples["features"], program.seed)
        return clustering_scores(groups, samples["y"])

    def evaluation_reply(self, program: ProgramLike, common: bool = False) -> dict[str, Any]:
        """Return features and labels of all samples, which the server clusters and scores.

        Between organisations these do not leave: a client clusters and scores its own samples.
        """
        return program.embed() if program.shares_features else self.evaluate(program, common)

    def cluster(
        self, features: Tensor, seed: int, clusters: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return clusters (n,) of features (n, width) by k-means, and their centres (K, width).

        Args:
            clusters: K; None: as many as there are labels.
        """
        count = len(self.labels) if clusters is None else clusters
        return kmeans(normalize(features, dim=-1), count, derive_seed(seed, "k-means"))

    @classmethod
    def score_federation(
        cls,
        fed: FederationLike,
        replies: Mapping[str, Any],
        starts: int = 100,
        shared: bool = True,
        protocol: Protocol = "least",
        **options: Any,
    ) -> dict[str, dict[str, float]]:
        """Cluster all clients' features, and score each client's clusters by themselves.

        Where all clients cluster, the scores of everyone by each protocol are stored in
        `fed.state["scores"]`.

        Args:
            replies: by client, features (n, width) and labels y (n,).
            starts: initialisations of k-means.
            shared: clients find the same clusters, so each one gets their centres (`finish`).
                Without it, features of different clients have nothing in common.
            protocol: how clients agree on clusters (`federated_groups`).
        """
        valid, scores = _split_replies(fed, replies)
        if not valid:
            return scores
        features = [reply["features"] for reply in valid.values()]
        labels = [reply["y"] for reply in valid.values()]
        clusters = len(fed.infos[next(iter(valid))].labels)
        seed = derive_seed(fed.seed, "k-means")
        if not shared:
            protocol = "first"
        groups, centres, joint = federated_groups(
            features, clusters, seed, starts, protocol=protocol
        )
        fed.scratch["centres"] = dict(zip(valid, centres, strict=True)) if shared else {}
        if all(info.task == cls.name for info in fed.infos.values()):
            y = torch.cat(labels)
            points = normalize(torch.cat(features), dim=-1)
            fed.log_figure("fused features", points=points, classes=y)
            figures: dict[str, Any] = dict(clustering_scores(torch.cat(groups), y))
            if figures:
                figures["joint"] = clustering_scores(joint, y)
                if protocol != "first":
                    by_first, _ = groups_by_first(features, clusters, seed, starts)
                    figures["first"] = clustering_scores(torch.cat(by_first), y)
            fed.state["scores"] = figures
        for client, own, y in zip(valid, groups, labels, strict=True):
            scores[client] = clustering_scores(own, y)
        return scores

    @classmethod
    def finish(cls, fed: FederationLike) -> dict[str, Any] | None:
        """Send each client the centres that its clusters were last scored by."""
        centres = fed.scratch.get("centres", {})
        clients = [client for client in fed.clients if client in centres]
        if clients:
            messages = {client: {"centres": centres[client]} for client in clients}
            fed.call("grouped", clients=clients, quorum=0, per_client=messages)
        return None

    def deployable(
        self, program: ProgramLike, exported: Mapping[str, Tensor] | None = None
    ) -> nn.Module:
        """Return the model with a head that tells how near the centre of each cluster is.

        The centres are those that the run scored the client by or, if it scored clients
        separately, those of k-means on the client's features.
        """
        centres = (exported or {}).get("head.centres")
        if centres is None:
            centres = program.memory.get("centres")
        if centres is None:
            _, centres = self.cluster(program.embed()["features"], program.seed)
        program.model.head = NearestCentre(centres.to(program.client.dtype))
        return program.model.eval()


class NearestCentre(nn.Module):
    """A head from features (n, width) to scores (n, K): the highest is that of the nearest centre.

    Args:
        centres: (K, width). Features are normalised to length 1 first.
    """

    centres: Tensor

    def __init__(self, centres: Tensor):
        super().__init__()
        self.register_buffer("centres", centres)

    def forward(self, features: Tensor) -> Tensor:
        differences = normalize(features, dim=-1)[:, None] - self.centres
        return -differences.square().sum(-1)


class ClusteringMeter:
    """Collects clusters and labels: the best matching of both is known only at the end."""

    def __init__(self) -> None:
        self.groups: list[Tensor] = []
        self.truth: list[Tensor] = []

    def add(self, output: Tensor, y: Tensor) -> None:
        output = output.detach()
        self.groups.append((output.argmax(-1) if output.ndim == 2 else output).cpu())
        self.truth.append(y.cpu())

    def result(self) -> dict[str, float]:
        empty = torch.zeros(0, dtype=torch.int64)
        return clustering_scores(torch.cat([empty, *self.groups]), torch.cat([empty, *self.truth]))


def clustering_scores(predicted: Tensor, y: Tensor) -> dict[str, float]:
    """Score clusters against classes.

    Args:
        predicted: cluster of each sample, (n,) integers.
        y: class of each sample, (n,) integers; samples with -1 are left out.
    Returns: in percent, `acc` (accuracy under the best one-to-one matching of clusters and
        classes, Hungarian), `nmi` (normalised by the mean of both entropies) and `ari` (0 by
        chance); empty if no label is known.

    >>> clustering_scores(torch.tensor([2, 2, 0, 0]), torch.tensor([0, 0, 1, 1]))
    {'acc': 100.0, 'nmi': 100.0, 'ari': 100.0}
    """
    from scipy.optimize import linear_sum_assignment
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    if predicted.ndim != 1 or predicted.shape != y.shape or predicted.is_floating_point():
        raise ValueError(
            "groups and labels are whole numbers, one a sample, "
            f"got {tuple(predicted.shape)} {predicted.dtype} and {tuple(y.shape)} {y.dtype}"
        )
    known = y.cpu() != UNKNOWN
    groups = predicted.cpu()[known].numpy()
    truth = y.cpu()[known].numpy()
    if not len(truth):
        return {}
    counts = contingency_matrix(truth, groups)  # (classes, clusters)
    matched = counts[linear_sum_assignment(counts, maximize=True)].sum()
    return {
        "acc": 100 * float(matched / len(truth)),
        "nmi": 100 * float(normalized_mutual_info_score(truth, groups)),
        "ari": 100 * float(adjusted_rand_score(truth, groups)),
    }


def federated_scores(
    features: Sequence[Tensor],
    labels: Sequence[Tensor],
    clusters: int,
    seed: int,
    starts: int = 100,
    normalise: bool = True,
    protocol: Protocol = "least",
) -> dict[str, Any]:
    """Score all clients' features by two protocols (see `federated_groups`).

    Args:
        labels: one (n,) per client; the other arguments are those of `federated_groups`.
    Returns: `acc`, `nmi` and `ari` of the protocol, and under `joint` of k-means on all rows.
    """
    rows = [len(x) for x in features]
    if not features or rows != [len(y) for y in labels]:
        raise ValueError(
            "scores need as many labels as rows for each of one client or more, "
            f"got rows {rows} and labels {[len(y) for y in labels]}"
        )
    groups, _, joint = federated_groups(features, clusters, seed, starts, normalise, protocol)
    y = torch.cat([own.cpu() for own in labels])
    return {**clustering_scores(torch.cat(groups), y), "joint": clustering_scores(joint, y)}


def federated_groups(
    features: Sequence[Tensor],
    clusters: int,
    seed: int,
    starts: int = 100,
    normalise: bool = True,
    protocol: Protocol = "least",
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Cluster the features of several clients.

    Args:
        features: one (n, width) per client.
        normalise: scale rows to length 1 first.
        protocol: "least": proposals of several clients are improved by all, and the one with the
            least total distance wins (`federated_kmeans`). "first": k-means on the first client's
            features, whose centres start k-means at each other client, as in FMCSC (Chen et al.
            2024) and AFMCC.
    Returns: by the protocol clusters (n,) and centres (clusters, width) of each client; and the
        clusters of all rows by k-means on all features together, which no server could do without
        seeing them.
    """
    if protocol == "least":
        rows = prepare_rows(features, normalise)
        groups, centre = federated_kmeans(rows, clusters, seed, starts)
        centres = [centre] * len(rows)
    else:
        groups, centres = groups_by_first(features, clusters, seed, starts, normalise)
    together = torch.cat(prepare_rows(features, normalise))
    return groups, centres, kmeans(together, clusters, seed, starts)[0]


def groups_by_first(
    features: Sequence[Tensor], clusters: int, seed: int, starts: int = 100, normalise: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Clusters and centres of each client by the protocol "first" of `federated_groups`."""
    groups: list[Tensor] = []
    centres: list[Tensor] = []
    for client, own in enumerate(prepare_rows(features, normalise)):
        initial = centres[0] if centres else None
        try:
            assigned, final = kmeans(own, clusters, seed, starts, initial)
        except ValueError as problem:
            raise ValueError(f"client {client}: {problem}") from None
        groups.append(assigned)
        centres.append(final)
    return groups, centres


def prepare_rows(features: Sequence[Tensor], normalise: bool) -> list[Tensor]:
    """Features as float64, scaled to length 1 if asked."""
    rows = [x.detach().double() for x in features]
    return [normalize(x, dim=-1) for x in rows] if normalise else rows


def _split_replies(
    fed: FederationLike, replies: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Return replies that can be scored together, and empty scores for the other clients.

    A reply cannot be scored if its features are of another width than most, or if a label is
    outside the range.
    """
    replies = {client: reply for client, reply in replies.items() if "features" in reply}
    if not replies:
        return {}, {}
    clusters = len(fed.infos[next(iter(replies))].labels)
    widths = Counter(reply["features"].shape[1] for reply in replies.values())
    usual = widths.most_common(1)[0][0]
    valid: dict[str, Any] = {}
    scores: dict[str, dict[str, float]] = {}
    for client, reply in replies.items():
        y = reply["y"]
        if reply["features"].shape[1] == usual and bool(((y >= -1) & (y < clusters)).all()):
            valid[client] = reply
        else:
            scores[client] = {}
    return valid, scores
