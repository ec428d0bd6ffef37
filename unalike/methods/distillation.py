"""Clients that have labels in common learn what they all think of the public set. Knows no methods and no engine."""

from torch import Tensor

from unalike.base.message import Value
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation, query, sends
from unalike.core.safeguard import UNJUDGED, unjudge
from unalike.methods.public_data import Opinion, PublicTrainingProgram, agreed, owners


class DistillationProgram(PublicTrainingProgram):
    """Tells what it thinks of the public set, and learns what all who have its labels think, on average."""

    @query
    @sends("rows")
    def opinion(self) -> Opinion:
        """Logits of all public rows; those of classes begin where their mean is 0, so that they can be compared."""
        (logits,) = self.look(lambda output: (self.cells(output),))
        task = self.client.task
        if not task.classifies or task.multilabel:
            return logits
        return logits - logits.mean(1, keepdim=True)

    @operation
    def distil(self, teacher: Tensor) -> float | None:
        self.memory[UNJUDGED] = True
        return self.study(self.imitated, self.labelled(self.client.to_device(teacher)))

    @graph_safe
    def imitated(self, x: Tensor | dict, teacher: Tensor) -> Tensor:
        return self.client.task.imitate(self.cells(self.model(x)), teacher)


def teach(fed: Federation, several: bool = False) -> dict[str, float | None]:
    """Those who have labels in common learn what their owners think of the public set, nobody else is asked; each one's loss. If `several`,
    only those whose samples may have any number of labels: they can say that there is none, where others must name one."""
    able = [c for c in fed.active if not several or fed.infos[c].has("multilabel")]
    asked = [c for c in able if len(owners(fed, able, c)) > 1]
    told = dict(fed.call("opinion", clients=asked)) if asked else {}
    each: dict[str, dict[str, Value]] = {
        c: {"teacher": agreed(fed, told, c)} for c in told if len(owners(fed, told, c)) > 1
    }
    unjudge(fed.state, each)
    return dict(fed.call("distil", per_client=each)) if each else {}
