"""What all methods share where clients cluster: who cannot, and how well everyone's features fall into groups. Knows no method."""

from collections import Counter
from collections.abc import Sequence

import torch

from unalike.base.randomness import derive_seed
from unalike.core.client import Client
from unalike.core.federation import Federation, Replies
from unalike.data.samples import Tensors
from unalike.models.autoencoder import marked, modalities
from unalike.tasks import TASKS
from unalike.tasks.clustering import clustering_scores, federated_groups


def all_cluster(fed: Federation) -> bool:
    return not any(TASKS[info.task].labelled for info in fed.infos.values())


def judged(fed: Federation, told: Replies, starts: int = 100, shared: bool = True) -> Replies:
    """Replies that are features and labels as scores: of each client's groups by the first protocol, matched with classes for it alone.
    Scores of everyone by both protocols are kept for `figures`, where all cluster. `shared`: their groups are the same ones, to leave with.
    """
    shown = {client: reply for client, reply in told.items() if "features" in reply}
    if not shown:
        return told
    clusters = len(fed.infos[next(iter(shown))].labels)
    widths = Counter(reply["features"].shape[1] for reply in shown.values())
    strange: dict[str, dict] = {
        client: {}
        for client, reply in shown.items()
        if reply["features"].shape[1] != widths.most_common(1)[0][0]
        or not bool(((reply["y"] >= -1) & (reply["y"] < clusters)).all())
    }  # cannot be compared: no scores
    shown = {client: reply for client, reply in shown.items() if client not in strange}
    groups, centres, joint = federated_groups(
        [t["features"] for t in shown.values()], clusters, derive_seed(fed.seed, "k-means"), starts
    )
    fed.scratch["centres"] = dict(zip(shown, centres, strict=True)) if shared else {}
    if all_cluster(fed):
        y = torch.cat([t["y"] for t in shown.values()])
        points = torch.nn.functional.normalize(
            torch.cat([t["features"] for t in shown.values()]), dim=-1
        )
        fed.log_figure("fused features", points=points, classes=y)
        scores = clustering_scores(torch.cat(groups), y)
        fed.state["scores"] = scores and {**scores, "joint": clustering_scores(joint, y)}
    scored = {
        client: clustering_scores(own, t["y"])
        for (client, t), own in zip(shown.items(), groups, strict=True)
    }
    return Replies({**told, **strange, **scored}, told.failures)


def settle(fed: Federation) -> None:
    """Everyone gets the centres that its groups were last scored by."""
    centres = fed.scratch.get("centres", {})
    if there := [c for c in fed.clients if c in centres]:
        fed.call(
            "grouped", clients=there, quorum=0, each={c: {"centres": centres[c]} for c in there}
        )


def at_odds(clients: Sequence[Client]) -> dict[str, str]:
    """Clients that look for another number of clusters than most: what they find together could not be the same groups."""
    numbers = {client.id: len(client.task.labels) for client in clients if not client.task.labelled}
    usual = Counter(numbers.values()).most_common(1)[0][0] if numbers else 0
    return {
        id: f"it looks for {number} clusters and others for {usual}: who clusters together looks for as many."
        for id, number in numbers.items()
        if number != usual
    }


def unfit(client: Client) -> str | None:
    """Why a client has nothing to cluster: too few samples, or a modality that is the same in all of them."""
    samples, clusters = len(client.train), len(client.task.labels)
    if samples < clusters:
        return f"it has {samples} sample{'s' * (samples != 1)}, fewer than the {clusters} clusters to find"
    if not isinstance(client.train, Tensors):  # reading all from disk may take long
        return None
    x = marked(client.train.rows(torch.arange(samples))[0])
    for name, rows in modalities(x).items():
        there = rows[x[f"{name}?"] > 0]
        if len(there) and (there == there[0]).all():
            return f'its modality "{name}" is the same in all its samples and tells nothing apart: leave it out'
    return None
