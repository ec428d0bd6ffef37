"""Merging that withstands some false updates, for every method that averages parameters.

`robust` of an averaging or submodel method says how updates become one model:
    never     the weighted mean
    median    the median of every entry (Yin et al. 2018, https://arxiv.org/abs/1803.01498)
    trimmed   the mean of every entry without the largest and the smallest fifth, at least one each
              (same paper)
    clip      the weighted mean of updates whose distance from the median is clipped to the median
              distance (after Karimireddy et al. 2021, https://arxiv.org/abs/2012.10333)
    krum      the weighted mean without the updates that are farthest from their neighbours
              (Multi-Krum, Blanchard et al. 2017, https://arxiv.org/abs/1703.02757)
Entries are those of the clients that have them, so that submodels are merged in the same way. Of
fewer than three updates none can be told false: they are averaged.

Whatever `robust` is, no weight exceeds `max_weight` times the median weight if that is set, and an
update that is much larger than the others' is refused (`drop_outliers`). Where most clients diverge
after a merge with an update that was suspiciously large, the merge is undone and its client named
(`undo_merge`).
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from unalike.base.blocks import find_blocks
from unalike.base.types import Parameters
from unalike.core.federation import Federation, Replies

Rule = Literal["never", "median", "trimmed", "clip", "krum"]
TRIMMED_SHARE = 0.2  # of the clients, at each end
FALSE_SHARE = 0.2  # of the clients that Krum leaves out, at least one
REFUSED_RATIO = 1000.0  # of an update's size to the median size: beyond, it is refused
SUSPECT_RATIO = 10.0  # beyond, it is named if most other clients diverge in the next round
# Of a parameter to the largest one that was sent, where there are too few clients to compare.
REFUSED_GROWTH = 1e6


class Upload(NamedTuple):
    """A client's parameters at the positions of the model they are merged into."""

    client: str
    parameters: Parameters
    mask: Parameters | None = None  # 1 where the client has the entry; None: it has all


def merge_robustly(
    model: Parameters, uploads: Sequence[Upload], weights: Mapping[str, float], rule: Rule
) -> Parameters:
    """Merge uploads by one of the rules above.

    Args:
        model: names, shapes and dtypes; entries that no client has stay as they are here.
        uploads: at least three.
        weights: by client; of no effect on `median` and `trimmed`.

    >>> model = {"w": torch.zeros(1)}
    >>> uploads = [Upload(c, {"w": torch.tensor([x])}) for c, x in zip("abc", (1.0, 2.0, 900.0))]
    >>> merge_robustly(model, uploads, dict.fromkeys("abc", 1.0), "median")["w"].item()
    2.0
    """
    stacked = {name: _stack(name, tensor, uploads) for name, tensor in model.items()}
    if rule == "krum":
        kept = _krum(stacked)
        stacked = {name: rows[kept] for name, rows in stacked.items()}
        uploads = [uploads[i] for i in kept]
    elif rule == "clip":
        stacked = _clip_to_median(stacked)
    merged = {}
    for name, tensor in model.items():
        rows = stacked[name]
        if rule == "median":
            value = _median(rows)
        elif rule == "trimmed":
            value = _trimmed_mean(rows)
        else:
            value = _weighted_mean(rows, [weights[upload.client] for upload in uploads])
        value = torch.where(value.isnan(), tensor.to(value), value)
        merged[name] = (value if tensor.is_floating_point() else value.round()).to(tensor.dtype)
    return merged


def _stack(name: str, tensor: Tensor, uploads: Sequence[Upload]) -> Tensor:
    """(clients, *shape) in float64, NaN where a client does not have an entry."""
    rows = []
    for upload in uploads:
        row = upload.parameters[name].to(tensor.device, torch.float64)
        if upload.mask is not None:
            has = upload.mask[name].to(tensor.device).expand(tensor.shape) > 0
            row = torch.where(has, row, math.nan)
        rows.append(row)
    return torch.stack(rows)


def _median(rows: Tensor) -> Tensor:
    """Median over clients of every entry, NaN where none has it: the middle, or mean of two."""
    ordered = rows.sort(0).values  # NaN last
    count = (~rows.isnan()).sum(0, keepdim=True)
    low = ordered.gather(0, ((count - 1) // 2).clamp(min=0))
    high = ordered.gather(0, (count // 2).clamp(max=len(rows) - 1))
    value = (low + high) / 2
    return torch.where(count > 0, value, math.nan)[0]


def _trimmed_mean(rows: Tensor) -> Tensor:
    """Mean over clients of every entry without the largest and smallest ones."""
    ordered = rows.sort(0).values
    count = (~rows.isnan()).sum(0, keepdim=True)
    cut = (count * TRIMMED_SHARE).floor().clamp(min=1)
    cut = torch.where(count >= 3, cut, torch.zeros_like(cut))
    place = torch.arange(len(rows), device=rows.device).view(-1, *[1] * (rows.dim() - 1))
    kept = (place >= cut) & (place < count - cut)
    return torch.where(kept, ordered, math.nan).nanmean(0)


def _weighted_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    weight = torch.tensor(weights, dtype=rows.dtype, device=rows.device)
    weight = weight.view(-1, *[1] * (rows.dim() - 1)) * ~rows.isnan()
    return (rows.nan_to_num(0.0) * weight).sum(0) / weight.sum(0)


def _clip_to_median(stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Uploads moved towards the median until none is farther from it than the median distance."""
    centres = {name: _median(rows) for name, rows in stacked.items()}
    distances = _root_mean_square([rows - centres[name] for name, rows in stacked.items()])
    limit = median(distances.tolist())
    scale = (limit / distances.clamp(min=1e-300)).clamp(max=1.0)
    clipped = {}
    for name, rows in stacked.items():
        factor = scale.view(-1, *[1] * (rows.dim() - 1)).to(rows.device)
        clipped[name] = centres[name] + (rows - centres[name]) * factor
    return clipped


def _root_mean_square(differences: Sequence[Tensor]) -> Tensor:
    """Of all entries that a client has, (clients,)."""
    total = torch.zeros(len(differences[0]), dtype=torch.float64)
    count = torch.zeros_like(total)
    for rows in differences:
        flat = rows.flatten(1)
        total += flat.nan_to_num(0.0).square().sum(1).cpu()
        count += (~flat.isnan()).sum(1).cpu()
    return (total / count.clamp(min=1)).sqrt()


def _krum(stacked: dict[str, Tensor]) -> list[int]:
    """Indices of the uploads that are closest to their neighbours.

    A distance is the mean over the entries that both clients have.
    """
    clients = len(next(iter(stacked.values())))
    false = max(1, int(FALSE_SHARE * clients))
    neighbours = max(1, clients - false - 2)
    scores = []
    for i in range(clients):
        others = torch.arange(clients) != i
        differences = [rows[others] - rows[i] for rows in stacked.values()]
        distances = _root_mean_square(differences).square()
        scores.append(float(distances.sort().values[:neighbours].sum()))
    kept = sorted(range(clients), key=lambda i: scores[i])[: clients - false]
    return sorted(kept)


# Weights and sizes, whatever the rule


def cap_weights(weights: Mapping[str, float], max_weight: float | None) -> dict[str, float]:
    """Weights of which none exceeds `max_weight` times the median one; None: as they are.

    >>> cap_weights({"a": 20.0, "b": 30.0, "c": 1e15}, 10.0)
    {'a': 20.0, 'b': 30.0, 'c': 300.0}
    """
    if max_weight is None or not weights:
        return dict(weights)
    limit = max_weight * median_low(weights.values())
    return {client: min(weight, limit) for client, weight in weights.items()}


def drop_outliers(
    fed: Federation, messages: Mapping[str, Any], replies: Replies, groups: Mapping[str, str]
) -> dict[str, float]:
    """Refuse updates that are much larger than those of the other clients of a group.

    Args:
        messages: what clients were sent, with `parameters`.
        replies: what they sent back; those that are refused are taken out. Clients that were
            sent no parameters are not compared.
        groups: group of each client; sizes are compared within groups.
    Returns: by client, how many times the median of its group an update is, where that is
        suspicious.
    """
    suspects: dict[str, float] = {}
    for group in sorted({groups[client] for client in replies}):
        members = [client for client in replies if groups[client] == group]
        members = [client for client in members if messages[client].get("parameters")]
        if not members:
            continue  # nobody was sent what it changed
        sizes = _update_sizes(
            [messages[client]["parameters"] for client in members],
            [replies[client]["parameters"] for client in members],
        )
        sizes_by_client = dict(zip(members, sizes, strict=True))
        middle = median(sizes)
        for client, size in sizes_by_client.items():
            if len(members) < 3 or not middle:
                reason = _growth_problem(messages[client], replies[client])
            elif size > REFUSED_RATIO * middle:
                reason = f"its update is {size / middle:.3g} times as large as the median one"
            else:
                reason = None
                if size > SUSPECT_RATIO * middle:
                    suspects[client] = size / middle
            if reason is not None:
                fed.refuse(client, "update", reason)
                del replies[client]
    return suspects


def _update_sizes(sent: Sequence[Parameters], got: Sequence[Parameters]) -> list[float]:
    """Root mean square of the change of all real numbers, of each client.

    The sizes of all clients are read at once: each reading stalls a GPU.
    """
    squares = torch.zeros(len(got), dtype=torch.float64)
    counts = torch.zeros(len(got), dtype=torch.float64)
    parts = []
    blocks = find_blocks(got)
    groups = _group_alike(got) if blocks is None else [list(range(len(got)))]
    for members in groups:
        for name, first in got[members[0]].items():
            if not first.is_floating_point() or not first.numel():
                continue
            new = blocks[name] if blocks else torch.stack([got[i][name] for i in members])
            old = [sent[i][name] for i in members]
            same = all(tensor is old[0] for tensor in old)
            before = old[0].to(new) if same else torch.stack([tensor.to(new) for tensor in old])
            change = new - before
            axes = tuple(range(1, change.ndim))
            norms = torch.linalg.vector_norm(change, dim=axes) if axes else change.abs()
            parts.append((members, norms.double().square()))
            counts[members] += first.numel()
    # On a GPU these are read at once: each reading waits for it.
    read = torch.cat([part for _, part in parts]).cpu() if parts else squares
    for (members, _), part in zip(parts, read.split([len(m) for m, _ in parts]), strict=True):
        squares[members] += part
    return (squares / counts.clamp(min=1)).sqrt().tolist()


def _group_alike(states: Sequence[Parameters]) -> list[list[int]]:
    """Numbers of states with equal names, shapes, kinds and devices of tensors."""
    groups: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        form = [(name, t.shape, t.dtype, t.device) for name, t in state.items()]
        groups.setdefault(tuple(form), []).append(i)
    return list(groups.values())


def _growth_problem(message: Mapping[str, Any], reply: Mapping[str, Any]) -> str | None:
    """What is wrong with an update by itself; None: nothing."""
    before, after = _largest(message["parameters"]), _largest(reply["parameters"])
    if after <= REFUSED_GROWTH * max(before, 1.0):
        return None
    return f"its parameters grew from {before:.3g} to {after:.3g}"


def _largest(parameters: Parameters) -> float:
    real = [t for t in parameters.values() if t.is_floating_point() and t.numel()]
    return max((float(t.abs().max()) for t in real), default=0.0)


# After a merge at which everyone diverges


def remember_merge(fed: Federation, suspects: dict[str, float]) -> None:
    """Before a merge: keep the models, if an update is suspicious."""
    fed.state.pop("suspects", None)
    fed.state.pop("before_merge", None)
    if suspects:
        fed.state["suspects"] = suspects
        fed.state["before_merge"] = dict(fed.state["models"])


def undo_merge(fed: Federation, replies: Replies) -> bool:
    """Go back to the models before the last merge, if most clients diverged because of it.

    The clients that failed now are not to blame; those whose updates were suspicious are.

    Args:
        replies: to the first call after the merge.
    Returns: whether the merge was undone.
    """
    suspects: dict[str, float] = fed.state.get("suspects", {})
    failed = [c for c in replies.failures if c not in suspects and fed.is_ill(c)]
    others = len(failed) + sum(client not in suspects for client in replies)
    if not suspects or not failed or len(failed) < others / 2:
        return False
    for client in failed:
        fed.forgive(client)
    for client, ratio in suspects.items():
        fed.refuse(
            client,
            "update",
            f"its last update was {ratio:.3g} times as large as the median one; after it was "
            f"merged, {len(failed)} of {others} other clients failed",
        )
    fed.state["models"] = fed.state["before_merge"]
    remember_merge(fed, {})
    return True
