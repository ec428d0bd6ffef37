"""Clients that are alike go on from the mean of what they have in common: whole models, or their heads. Knows no methods and no engine."""

import hashlib
from collections.abc import Sequence
from typing import ClassVar

from unalike.algorithm import ClientSide
from unalike.averaging import Parameters, mean_states, word
from unalike.federation import Federation
from unalike.operations import operation, question, sends


class AlikeSide(ClientSide):
    """Gives what of its model may be averaged, and takes the mean."""

    common: ClassVar[str] = ""          # names of these parameters begin so; "": all of the model's

    @question
    @sends("open")
    def kind_of(self) -> str:
        """A word that is equal for those who may be averaged."""
        return kind(self.client.task.name, self.client.task.labels, self.shared())

    @question
    @sends("parameters")
    def give(self) -> Parameters:
        return self.shared()

    @operation
    def take(self, parameters: Parameters) -> None:
        self.model.load_state_dict(self.model.state_dict() | parameters)

    def shared(self) -> Parameters:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name.startswith(self.common)}


def unite(fed: Federation) -> None:
    """Those of one task, label set and shape go on from their mean, weighted by their samples; the others stay as they are."""
    kinds = fed.state.setdefault("kinds", {})
    if new := [c for c in fed.here if c not in kinds]:
        kinds |= dict(fed.call("kind_of", clients=new, quorum=0))
    known = [kinds.get(c) for c in fed.here]
    alike = [c for c, one in zip(fed.here, known, strict=True) if one is not None and known.count(one) > 1]
    if alike:
        told = dict(fed.call("give", clients=alike, quorum=0))
        for client in [c for c, its in told.items() if kind(fed.cards[c].task, fed.cards[c].labels, its) != kinds[c]]:
            fed.refuse(client, "give", "its parameters are not those of the kind it told")
            del told[client]
        weights = {c: float(fed.cards[c].samples) for c in told}
        means = {one: mean_states({c: told[c] for c in told if kinds[c] == one}, weights) for one in {kinds[c] for c in told}}
        fed.call("take", clients=list(told), quorum=0, each={c: {"parameters": means[kinds[c]]} for c in told})


def kind(task: str, labels: Sequence[str], parameters: Parameters) -> str:
    """Equal for those who may be averaged."""
    return hashlib.sha256(repr((task, tuple(labels), word(parameters))).encode()).hexdigest()[:16]
