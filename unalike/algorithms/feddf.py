"""FedDF (Lin 2020): models of any architecture learn what all who know a label think of the public set, on average.

Those of one architecture, task and label set first go on from the mean of their parameters. docs/rivals.md says what is ours in it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unalike.averaging import Parameters, mean_states, word
from unalike.federation import Federation
from unalike.operations import operation, question, sends, steady
from unalike.unlabelled import Opinion, Unlabelled, UnlabelledSide, agreed, owners


@dataclass
class FedDF(Unlabelled):
    """Ensemble distillation, done by each client for its own model."""

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        self.average(fed)
        told = dict(fed.call("opinion"))
        taught = [c for c in told if len(owners(fed, told, c)) > 1]         # the others would learn what they think themselves
        return dict(fed.call("distil", each={c: {"teacher": agreed(fed, told, c)} for c in taught})) if taught else {}

    def average(self, fed: Federation) -> None:
        """Clients that are alike in all go on from their mean."""
        kinds = fed.state.setdefault("kinds", {})
        if new := [c for c in fed.here if c not in kinds]:
            kinds |= dict(fed.call("kind_of", clients=new, quorum=0))
        known = [kinds.get(c) for c in fed.here]
        alike = [c for c, one in zip(fed.here, known, strict=True) if one is not None and known.count(one) > 1]
        if alike:
            states = dict(fed.call("give", clients=alike, quorum=0))
            for client in [c for c, state in states.items() if kind(fed.cards[c].task, fed.cards[c].labels, state) != kinds[c]]:
                fed.refuse(client, "give", "its parameters are not those of the kind it told")
                del states[client]
            weights = {c: float(fed.cards[c].samples) for c in states}
            means = {one: mean_states(its, weights) for one in {kinds[c] for c in states}
                     if (its := {c: states[c] for c in states if kinds[c] == one})}
            fed.call("take", clients=list(states), quorum=0, each={c: {"parameters": means[kinds[c]]} for c in states})

    class Side(UnlabelledSide):
        algorithm: "FedDF"

        @question
        @sends("open")
        def kind_of(self) -> str:
            """A word that is equal for those who may be averaged."""
            return kind(self.client.task.name, self.client.task.labels, self.model.state_dict())

        @question
        @sends("parameters")
        def give(self) -> Parameters:
            return dict(self.model.state_dict())

        @operation
        def take(self, parameters: Parameters) -> None:
            self.model.load_state_dict(parameters)

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


def kind(task: str, labels: Sequence[str], parameters: Parameters) -> str:
    """Equal for those who may be averaged."""
    return hashlib.sha256(repr((task, tuple(labels), word(parameters))).encode()).hexdigest()[:16]
