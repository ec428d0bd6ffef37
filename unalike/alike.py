"""Clients that are alike go on from the mean of what they have in common: whole models, or their heads. Knows no methods and no engine."""

from collections.abc import Sequence
from typing import Any, ClassVar

from unalike.algorithm import ClientSide
from unalike.averaging import Parameters, digest, mean_states, word
from unalike.federation import Federation
from unalike.message import Value
from unalike.operations import operation, question, sends
from unalike.safeguard import UNJUDGED, unjudge


class AlikeSide(ClientSide):
    """Gives what of its model may be averaged, and takes the mean."""

    common: ClassVar[str] = ""          # names of these parameters begin so; "": all of the model's

    @question
    @sends("open")
    def kind_of(self) -> str:
        """A word that is equal for those who may be averaged; none where there is nothing to average."""
        return kind(self.client.task.name, self.client.task.labels, self.shared())

    @question
    @sends("parameters")
    def give(self) -> Parameters:
        return self.shared()

    @operation
    def take(self, parameters: Parameters) -> None:
        if word(parameters) != word(self.shared()):
            raise ValueError("what came is not what it shares: other names or shapes")
        self.model.load_state_dict(parameters, strict=False)
        self.memory[UNJUDGED] = True

    def learn(self, *given: Any, **named: Any) -> float:
        """Local epochs; who begins them with what was made from its own labels cannot be judged any more, and spares itself the shadows."""
        self.shadows = [] if self.memory.get(UNJUDGED) else self.shadows
        return super().learn(*given, **named)

    def shared(self) -> Parameters:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name.startswith(self.common)}


def unite(fed: Federation) -> None:
    """Those of one task, label set and shape go on from their mean, weighted by their samples; who has no company stays as it is."""
    kinds = fed.state.setdefault("kinds", {})
    if new := [c for c in fed.here if c not in kinds]:
        kinds |= dict(fed.call("kind_of", clients=new, quorum=0))
    known = [kinds.get(c) for c in fed.here]
    alike = [c for c, one in zip(fed.here, known, strict=True) if one and known.count(one) > 1]
    if alike:
        told = dict(fed.call("give", clients=alike))
        for client in [c for c, its in told.items() if kind(fed.cards[c].task, fed.cards[c].labels, its) != kinds[c]]:
            fed.refuse(client, "give", "its parameters are not those of the kind it told")
            del told[client]
        groups = {one: {c: its for c, its in told.items() if kinds[c] == one} for one in {kinds[c] for c in told}}
        weights = {c: float(fed.cards[c].samples) for c in told}
        means = {one: mean_states(group, weights) for one, group in groups.items() if len(group) > 1}
        each: dict[str, dict[str, Value]] = {c: {"parameters": means[kinds[c]]} for c in told if kinds[c] in means}
        if each:
            unjudge(fed.state, each)
            fed.call("take", clients=list(each), each=each)


def train_united(fed: Federation, how: str = "train") -> dict[str, float]:
    """Local epochs, after each of which but the last those alike go on from their mean; the last one's losses."""
    told: dict[str, float] = {}
    for epoch in range(fed.training.epochs):
        if epoch:
            unite(fed)
        told = dict(fed.call(how, epoch=epoch))
    return told


def kind(task: str, labels: Sequence[str], parameters: Parameters) -> str:
    """Equal for those who may be averaged; empty where there are no parameters."""
    return digest((task, tuple(labels), word(parameters))) if parameters else ""
