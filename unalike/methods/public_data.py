"""Methods that train on labels, then learn from the public set: the round they share, what is learnt there left open. Knows no engine.

What a client thinks of public rows has its labels on axis 1: (n, labels), or (n, labels, CELLS, CELLS) where the task is dense, whose map
is averaged to so many cells. A label means the same to all who call it by one name and have a task of one kind.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from unalike.base.randomness import stream
from unalike.core.algorithm import Algorithm, ClientProgram
from unalike.core.federation import Federation
from unalike.core.signatures import Shape
from unalike.data.public_order import PublicOrder
from unalike.data.samples import Samples
from unalike.training.loop import train

CELLS = 8  # rows and columns of a dense opinion
Opinion = (
    Annotated[Tensor, Shape("public_rows", "labels")]
    | Annotated[Tensor, Shape("public_rows", "labels", CELLS, CELLS)]
)


class PublicDataProgram(ClientProgram):
    """A client that holds the public set; which samples those are, images or their captions, is its own affair."""

    algorithm: Any

    @property
    def public(self) -> Samples:
        if self.client.public is None:
            raise ValueError(
                "it holds no public set, on which the federation learns; give the client `public`"
            )
        return self.client.public

    def public_rows(self, rows: Tensor, as_came: bool = False) -> Any:
        """A batch where the client computes; `as_came`: not as a frozen trunk sees it, for methods that change samples."""
        held = getattr(self.public, "raw", self.public) if as_came else self.public
        bring = (
            self.client.to_device if getattr(held, "look", None) else self.client.public_to_device
        )  # a trunk has seen them at their size
        return bring(held.rows(rows)[0])

    def look(
        self, at: Callable[[Tensor], tuple[Tensor, ...]], by: Callable[[Any], Tensor] | None = None
    ) -> list[Tensor]:
        """What `at` makes of the model's output on every public row, or of a part's, a few at a time."""
        self.model.eval()
        with torch.no_grad():
            parts = [
                at((by or self.model)(self.public_rows(rows)))
                for rows in torch.arange(len(self.public)).split(256)
            ]
        self.work += len(self.public) / 3
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def blank(self, rows: int, *shape: int) -> Tensor:
        """Rows of zeros: the form of a reply, for a client with privacy that could not make one."""
        return torch.zeros(rows, *shape, dtype=self.client.dtype, device=self.client.device)

    def walk(self, epoch: int) -> list[Tensor]:
        """Row numbers of each batch of a pass of this round."""
        key = (self.round, epoch)
        if getattr(self, "walked", (None,))[0] != key:
            order = PublicOrder(len(self.public), self.algorithm.batch, self.seed)
            self.walked = (key, order.batches(*key))
        return self.walked[1]


class PublicTrainingProgram(PublicDataProgram):
    """Trains on the public set."""

    def study(
        self,
        loss: Callable[..., Tensor],
        given: Callable[[Tensor], tuple],
        rows: Tensor | None = None,
    ) -> float | None:
        """This round's passes through the public set, or some rows of it, by the loss of what is `given` for a batch of row numbers; the
        mean of it."""
        how, rows = self.algorithm, torch.arange(len(self.public)) if rows is None else rows.cpu()
        if len(rows) < 2:
            return None
        orders = [stream(self.seed, "public", self.round, epoch) for epoch in range(how.passes)]
        self.work += len(rows) * len(orders)
        tape = self.tape(loss)
        return train(
            self.model,
            len(rows),
            lambda index: tape(*given(rows[index])),
            self.learner(),
            orders,
            how.batch,
            self.training.max_grad_norm,
        )

    def learner(self) -> torch.optim.Optimizer:
        """What moves the model there."""
        return self.optimizer("public", self.algorithm.public_lr)

    def labelled(self, y: Tensor) -> Callable[[Tensor], tuple[Any, Tensor]]:
        """Public rows, and what is said of them in `y`, which has all rows."""
        return lambda rows: (self.public_rows(rows), y[rows.to(y.device)])

    # what an output says

    @property
    def several(self) -> bool:
        """Whether a sample may have any number of labels."""
        return self.client.task.multilabel

    def cells(self, output: Tensor) -> Tensor:
        return adaptive_avg_pool2d(output, CELLS) if self.client.task.dense else output

    def blank_opinion(self) -> Tensor:
        task = self.client.task
        return self.blank(len(self.public), len(task.labels), *[CELLS, CELLS] if task.dense else [])

    def probabilities(self, output: Tensor) -> Tensor:
        return self.client.task.probabilities(output)

    def guess(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest labels, as the task takes them, and how likely each is."""
        if self.several:
            return (p > 0.5).to(p), torch.maximum(p, 1 - p)
        surest = p.max(1)
        return surest.indices, surest.values

    def only(self, y: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of which only some are vouched for, and the rows that have any."""
        task = self.client.task
        y = y.masked_fill(~known, task.unknown_label)
        return y, known.flatten(1).any(1).nonzero()[:, 0] if known.dim() > 1 else known.nonzero()[
            :, 0
        ]


@dataclass
class PublicTraining(Algorithm):
    """Each round: local epochs on labels, then learning from the public set, but in the last: nobody leaves with a head that has not
    seen its labels since."""

    needs_public: ClassVar[bool] = True
    RENAMED: ClassVar[dict[str, str]] = {"public_rate": "public_lr"}

    batch: int = 32  # rows of the public set at a time
    passes: int = 1  # walks through it a round
    public_lr: float | None = None  # learning rate there, if not training.lr

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = (
            [("passes", f"must be at least 1, got {self.passes}.")] if self.passes < 1 else []
        )
        if self.public_lr is not None and not self.public_lr > 0:
            problems.append(("public_lr", f"must be above 0, got {self.public_lr}."))
        return problems + check_batch(self.batch, public_rows)

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            fed.log_metrics("train_loss", dict(fed.call("train")))
            if round < fed.training.rounds:
                fed.log_metrics("public_loss", self.share(fed, round))
            yield round

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        """What is told and learnt of the public set; each client's loss on it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what is learnt from the public set: write share(fed, round)"
        )


def check_batch(batch: int, public_rows: int) -> list[tuple[str, str]]:
    """What is wrong with taking so many public rows at a time."""
    if batch < 2:
        return [
            ("batch", f"must be at least 2, got {batch}: batch statistics of one row do not exist.")
        ]
    if public_rows < batch:
        return [
            (
                "batch",
                f"the public set has {public_rows} rows, fewer than a batch of {batch}. "
                "Lower algorithm.batch or raise public.size.",
            )
        ]
    return []


def owners(
    fed: Federation, told: Iterable[str], client: str
) -> list[tuple[str, list[int], list[int]]]:
    """Of those who told, itself too: who has labels of this client's, which of its labels these are, and where that one has them."""
    info, found = fed.infos[client], []
    for other in told:
        theirs = (
            {label: at for at, label in enumerate(fed.infos[other].labels)}
            if fed.infos[other].task == info.task
            else {}
        )
        if mine := [i for i, label in enumerate(info.labels) if label in theirs]:
            found.append((other, mine, [theirs[info.labels[i]] for i in mine]))
    return found


def agreed(fed: Federation, told: dict[str, Tensor], client: str) -> Tensor:
    """What is told of each of a client's labels, the mean over all who have it: like what the client itself told, in floats."""
    own = told[client]
    total = torch.zeros_like(own, dtype=own.dtype if own.is_floating_point() else torch.float32)
    count = torch.zeros(own.shape[1], dtype=total.dtype, device=own.device)
    for other, mine, theirs in owners(fed, told, client):
        total[:, mine] += told[other][:, theirs].to(total)
        count[mine] += 1
    return total / count.view(-1, *[1] * (own.dim() - 2))
