"""Retrieval: find the text that belongs to an image, and the image that belongs to a text."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.tasks.task import Labels, Task, check_whole

RECALL_DEPTHS = (1, 5, 10)
EXCLUDED = -1e4  # logit of a pair that is neither a positive nor a negative
CHUNK = 1024  # queries compared at once


@dataclass(frozen=True)
class Retrieval(Task):
    """Output (B, 2, d), one vector for each half of a pair; labels (B,) integers.

    Pairs with equal labels show the same thing, e.g. one image with several captions.

    Args:
        labels: names of the two halves.
        temperature: of the contrastive loss.
    """

    labels: tuple[str, ...] = ("image", "text")
    temperature: float = 0.07

    name: ClassVar[str] = "retrieval"
    metric: ClassVar[str] = "recall"
    paired: ClassVar[bool] = True

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(
            self, labels: Labels = ("image", "text"), temperature: float = 0.07
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.labels) != 2 or not self.temperature > 0:
            raise ValueError(
                "retrieval goes between two kinds at a temperature above 0, "
                f"got {self.labels} at {self.temperature}"
            )

    def head(self, width: int) -> nn.Module:
        return nn.Identity()

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the symmetric InfoNCE loss of CLIP; pairs of the same thing are no negatives.

        Reference: Radford et al. 2021, https://arxiv.org/abs/2103.00020

        >>> pairs = torch.eye(3)[:, None].expand(3, 2, 3)
        >>> round(Retrieval().loss(pairs, torch.arange(3)).item(), 3)
        0.0
        """
        first, second = normalize(output, dim=-1).unbind(1)
        same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
        logits = (first @ second.mT / self.temperature).masked_fill(same, EXCLUDED)
        forward = logits.log_softmax(-1).diagonal().mean()
        backward = logits.mT.log_softmax(-1).diagonal().mean()
        return -(forward + backward) / 2

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        """Return the squared distance of the normalised vectors."""
        return (normalize(output, dim=-1) - normalize(teacher, dim=-1)).square().sum(-1).mean()

    def meter(self) -> "RetrievalMeter":
        return RetrievalMeter(self.labels)

    def check(self, y: Tensor) -> None:
        check_whole(y, self.name, ("n",))


class RetrievalMeter:
    """Collects both vectors of every pair.

    `i2t_R@k` is the share of images with a text of theirs among the k nearest of all texts,
    `t2i_R@k` the same for texts; `recall` is the mean of all six, `rank` the mean of both median
    ranks. An image with several texts is one query, and any of them is right.
    """

    def __init__(self, labels: tuple[str, ...]):
        first, second = (label[0] for label in labels)
        self.directions = (f"{first}2{second}", f"{second}2{first}")
        self.vectors: list[Tensor] = []
        self.labels: list[Tensor] = []

    def add(self, output: Tensor, y: Tensor) -> None:
        self.vectors.append(normalize(output.detach().float(), dim=-1).cpu())
        self.labels.append(y.cpu())

    def result(self) -> dict[str, float]:
        if not sum(map(len, self.labels)):
            raise ValueError("nothing to measure: the meter was given no pair")
        images, texts = torch.cat(self.vectors).unbind(1)
        labels = torch.cat(self.labels)
        image_labels, first = unique_first(labels)
        images = images[first]
        ranks_by_direction = (
            best_ranks(images, image_labels, texts, labels),
            best_ranks(texts, labels, images, image_labels),
        )
        recalls: dict[str, float] = {}
        medians = []
        for direction, ranks in zip(self.directions, ranks_by_direction, strict=True):
            for depth in RECALL_DEPTHS:
                share = (ranks < depth).double().mean()
                recalls[f"{direction}_R@{depth}"] = 100 * float(share)
            medians.append(float(ranks.median()) + 1)
        mean_recall = sum(recalls.values()) / len(recalls)
        return {"recall": mean_recall, **recalls, "rank": sum(medians) / 2}


def unique_first(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different labels, and the index of the first row with each."""
    unique, inverse = labels.unique(return_inverse=True)
    rows = torch.arange(len(labels))
    first = torch.full((len(unique),), len(labels)).scatter_reduce(0, inverse, rows, "amin")
    return unique, first


def best_ranks(
    queries: Tensor, query_labels: Tensor, answers: Tensor, answer_labels: Tensor
) -> Tensor:
    """Return how many wrong answers are nearer to each query than its nearest right one.

    Ties count half. Queries (n, d) and answers (m, d) are normalised.

    >>> answers = torch.tensor([[0.0, 1.0], [0.1, 0.9]])
    >>> best_ranks(torch.eye(2), torch.tensor([0, 1]), answers, torch.tensor([0, 1]))
    tensor([1., 1.])
    """
    ranks = []
    chunks = zip(queries.split(CHUNK), query_labels.split(CHUNK), strict=True)
    for chunk, labels in chunks:
        similarity = chunk @ answers.mT
        correct = labels[:, None] == answer_labels
        nearest = similarity.masked_fill(~correct, -torch.inf).amax(1, keepdim=True)
        incorrect = similarity.masked_fill(correct, -torch.inf)
        ranks.append((incorrect > nearest).sum(1) + (incorrect == nearest).sum(1) / 2)
    return torch.cat(ranks)
