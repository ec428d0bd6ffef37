"""Survival: predict who has an event earlier, from times some of which are censored."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.tasks.task import ClientLike, Labels, Task

CHUNK = 1024  # samples compared with all others at once


@dataclass(frozen=True)
class Survival(Task):
    """Output (B, 1), the logarithm of the hazard ratio; y (B, 2) floats: time and event.

    The time is that of the event where event is 1, and that of the last look where it is 0
    (censored). Clients' times are never compared with each other, so each may have its own unit
    and baseline hazard.

    Args:
        labels: the name of the event.

    Reference: Cox 1972, Regression models and life-tables; ties as in Breslow 1974.
    """

    labels: tuple[str, ...] = ("event",)

    name: ClassVar[str] = "survival"
    metric: ClassVar[str] = "c_index"
    rows_per_loss: ClassVar[int] = 16

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, labels: Labels = ("event",)) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.labels) != 1:
            raise ValueError(
                f"a survival task has one event, got {len(self.labels)}: {', '.join(self.labels)}"
            )

    @property
    def has_confidence(self) -> bool:
        return True

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return Cox's negative log partial likelihood, mean over the events of the batch.

        >>> y = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
        >>> round(Survival().loss(torch.zeros(2, 1), y).item(), 3)
        0.693
        """
        return cox_loss(output[:, 0], y[:, 0], y[:, 1].to(output.dtype))

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        """Return the squared error of risks; what is common to all samples does not matter."""
        return F.mse_loss(output - output.mean(0), teacher - teacher.mean(0))

    def meter(self) -> "SurvivalMeter":
        return SurvivalMeter()

    def check(self, y: Tensor) -> None:
        if y.ndim != 2 or y.shape[1] != 2:
            raise ValueError(
                f"survival targets have shape (n, 2), time and event, got {tuple(y.shape)}"
            )
        if not y.is_floating_point():
            raise ValueError(f"survival targets are floats (torch.float32), got {y.dtype}")
        time, event = y.unbind(1)
        finite = time.isfinite() & event.isfinite()
        if not finite.all():
            raise ValueError(
                f"survival targets must be finite, got NaN or infinity in {int((~finite).sum())} "
                f"of {len(y)} rows: leave these rows out, or take the last look and event 0"
            )
        if (time < 0).any():
            raise ValueError(
                f"survival times are 0 or more, got {float(time[time < 0][0]):g} "
                f"in {int((time < 0).sum())} of {len(y)} rows"
            )
        wrong = event[(event != 0) & (event != 1)]
        if len(wrong):
            raise ValueError(
                f"an event is 1 where it was seen, 0 where not (censored), got {float(wrong[0]):g}"
            )

    def check_client(self, client: ClientLike) -> str | None:
        """Return why nothing can be learnt: no event was seen."""
        for rows in torch.arange(len(client.train)).split(CHUNK):
            if bool((client.train.labelled_batch(rows)[1][:, 1] == 1).any()):
                return None
        return (
            f"none of its {len(client.train)} training samples has an event, so there is nothing "
            "to learn from: give it samples with event 1, or leave it out"
        )

    def unmeasured(self, y: Tensor) -> str | None:
        y = y.double()
        comparable = count_pairs(torch.zeros(len(y), dtype=torch.float64), y[:, 0], y[:, 1])[1]
        return None if comparable else "no two of them can be put in order by time"


def cox_loss(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Cox's negative log partial likelihood, mean over events; 0 if there is none.

    Sum over events i of log(sum of exp(risk j) over all j with time j >= time i) - risk i.

    Args:
        risk: logarithms of the hazard ratios, (n,).
        time: (n,).
        event: (n,), 1 or 0.
    """
    at_risk = time[None, :] >= time[:, None]  # row i: whom the event of i could have hit
    totals = torch.where(at_risk, risk[None, :], -torch.inf).logsumexp(1)
    return (event * (totals - risk)).sum() / event.sum().clamp(min=1)


def count_pairs(risk: Tensor, time: Tensor, event: Tensor) -> tuple[float, int]:
    """Return how many comparable pairs have the higher risk first (ties half), and how many are.

    A pair is comparable if the earlier of both times is an event; at equal times, if one is an
    event and the other is not.
    """
    concordant = 0.0
    comparable = 0
    for rows in (event == 1).nonzero()[:, 0].split(CHUNK):
        later = time[rows, None] < time[None, :]
        later |= (time[rows, None] == time[None, :]) & (event[None, :] == 0)
        higher = risk[rows, None] > risk[None, :]
        tied = risk[rows, None] == risk[None, :]
        concordant += int((later & higher).sum()) + int((later & tied).sum()) / 2
        comparable += int(later.sum())
    return concordant, comparable


class SurvivalMeter:
    """Collects risks, times and events.

    `c_index` is Harrell's, in percent: 50 by chance, 100 if risks are in the order of the events;
    `cox_loss` is the negative log partial likelihood over all samples, mean over events.
    """

    def __init__(self) -> None:
        self.risk: list[Tensor] = []
        self.y: list[Tensor] = []

    def add(self, output: Tensor, y: Tensor) -> None:
        self.risk.append(output.detach().cpu().double()[:, 0])
        self.y.append(y.cpu().double())

    def result(self) -> dict[str, float]:
        if not sum(map(len, self.y)):
            raise ValueError("nothing to measure: the meter was given no sample")
        risk, y = torch.cat(self.risk), torch.cat(self.y)
        concordant, comparable = count_pairs(risk, y[:, 0], y[:, 1])
        return {
            "c_index": 100 * concordant / comparable if comparable else float("nan"),
            "cox_loss": cox_loss(risk, y[:, 0], y[:, 1]).item(),
        }
