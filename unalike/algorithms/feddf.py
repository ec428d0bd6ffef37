"""FedDF (Lin 2020): models of any architecture learn what all who know a label think of the public set, on average.

Those of one architecture, task and label set first go on from the mean of their parameters. docs/rivals.md says what is ours in it.
"""

from dataclasses import dataclass

from torch import Tensor

from unalike.alike import AlikeSide, unite
from unalike.federation import Federation
from unalike.operations import operation, question, sends, steady
from unalike.unlabelled import Opinion, Unlabelled, UnlabelledSide, agreed, owners


@dataclass
class FedDF(Unlabelled):
    """Ensemble distillation, done by each client for its own model."""

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        unite(fed)
        told = dict(fed.call("opinion"))
        taught = [c for c in told if len(owners(fed, told, c)) > 1]         # the others would learn what they think themselves
        return dict(fed.call("distil", each={c: {"teacher": agreed(fed, told, c)} for c in taught})) if taught else {}

    class Side(AlikeSide, UnlabelledSide):
        algorithm: "FedDF"

        @question
        @sends("rows")
        def opinion(self) -> Opinion:
            """Logits of all public rows; those of classes begin where their mean is 0, so that they can be compared."""
            logits, = self.look(lambda output: (self.cells(output),))
            return logits if self.several else logits - logits.mean(1, keepdim=True)

        @operation
        def distil(self, teacher: Tensor) -> float | None:
            return self.study(self.imitated, self.labelled(self.client.place(teacher)))

        @steady
        def imitated(self, x: Tensor | dict, teacher: Tensor) -> Tensor:
            return self.client.task.imitate(self.cells(self.model(x)), teacher)
