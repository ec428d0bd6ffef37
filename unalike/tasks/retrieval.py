"""Which text goes with which image, and the other way round. Knows nothing of where the pairs come from or how they are encoded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.tasks.task import Labels, Task, check_whole

DEPTHS = (1, 5, 10)
NOBODY = -1e4  # instead of a logit: not a wrong answer


@dataclass(frozen=True)
class Retrieval(Task):
    """Output (B, 2, d): a vector for each of two kinds, as named by `labels`; labels (B,) whole numbers, equal for pairs of one thing."""

    labels: tuple[str, ...] = ("image", "text")
    temperature: float = 0.07

    name: ClassVar[str] = "retrieval"
    metric: ClassVar[str] = "recall"
    paired: ClassVar[bool] = True

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(
            self, labels: Labels = ("image", "text"), temperature: float = 0.07
        ) -> None: ...

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) != 2 or not self.temperature > 0:
            raise ValueError(
                f"retrieval goes between two kinds at a temperature above 0, got {self.labels} at {self.temperature}"
            )

    def head(self, width: int) -> nn.Module:
        return nn.Identity()

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Each should find its partner among those of the other kind, both ways (Radford 2021); what is the same thing is no wrong answer.

        >>> pairs = torch.eye(3)[:, None].expand(3, 2, 3)
        >>> round(Retrieval().loss(pairs, torch.arange(3)).item(), 3)
        0.0
        """
        one, other = normalize(output, dim=-1).unbind(1)
        same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
        likeness = (one @ other.mT / self.temperature).masked_fill(same, NOBODY)
        return (
            -(
                likeness.log_softmax(-1).diagonal().mean()
                + likeness.mT.log_softmax(-1).diagonal().mean()
            )
            / 2
        )

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        """Squared distance of the directions."""
        return (normalize(output, dim=-1) - normalize(teacher, dim=-1)).square().sum(-1).mean()

    def meter(self) -> "RetrievalMeter":
        return RetrievalMeter(self.labels)

    def check(self, y: Tensor) -> None:
        check_whole(y, self.name, ("n",))


class RetrievalMeter:
    """Keeps both vectors of every pair. Of a thing with several texts its image is asked for once, and finds it with any of them.

    `i2t_R@k`: share of the first kind whose partner is among its k nearest of the second, from all that were added; `recall` is the mean
    of all six, `rank` the mean of both median ranks.
    """

    def __init__(self, labels: tuple[str, ...]):
        self.ways = (f"{labels[0][0]}2{labels[1][0]}", f"{labels[1][0]}2{labels[0][0]}")
        self.vectors: list[Tensor] = []
        self.things: list[Tensor] = []

    def add(self, output: Tensor, y: Tensor) -> None:
        self.vectors.append(normalize(output.detach().float(), dim=-1).cpu())
        self.things.append(y.cpu())

    def result(self) -> dict[str, float]:
        if not sum(map(len, self.things)):
            raise ValueError("nothing to measure: the meter was given no pair")
        images, texts = torch.cat(self.vectors).unbind(1)
        things = torch.cat(self.things)
        numbers, first = unique_first(things)
        found: dict[str, float] = {}
        medians = []
        both = (
            best_ranks(images[first], numbers, texts, things),
            best_ranks(texts, things, images[first], numbers),
        )
        for way, ranks in zip(self.ways, both, strict=True):
            found |= {f"{way}_R@{k}": 100 * float((ranks < k).double().mean()) for k in DEPTHS}
            medians.append(float(ranks.median()) + 1)
        return {"recall": sum(found.values()) / len(found)} | found | {"rank": sum(medians) / 2}


def unique_first(things: Tensor) -> tuple[Tensor, Tensor]:
    """The different numbers there are, and the first place of each."""
    numbers, at = things.unique(return_inverse=True)
    first = torch.full((len(numbers),), len(things)).scatter_reduce(
        0, at, torch.arange(len(things)), "amin"
    )
    return numbers, first


def best_ranks(queries: Tensor, asked: Tensor, among: Tensor, answers: Tensor) -> Tensor:
    """How many wrong answers come before the best right one, for each query; of a tie half.

    >>> best_ranks(torch.eye(2), torch.tensor([0, 1]), torch.tensor([[0.0, 1.0], [0.1, 0.9]]), torch.tensor([0, 1]))
    tensor([1., 1.])
    """
    ranks = []
    for few, its in zip(queries.split(1024), asked.split(1024), strict=True):
        likeness, right = few @ among.mT, its[:, None] == answers
        best = likeness.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        wrong = likeness.masked_fill(right, -torch.inf)
        ranks.append((wrong > best).sum(1) + (wrong == best).sum(1) / 2)
    return torch.cat(ranks)
