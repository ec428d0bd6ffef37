"""Methods that send parameters, train and average: the loop they share, with the few things that differ left open. Knows no engine."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypedDict

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.core.algorithm import Algorithm, ClientProgram, Embedded, State
from unalike.core.evaluation import score_federation
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation, query, sends
from unalike.core.signatures import Shape
from unalike.tasks import Task

Parameters = dict[str, Tensor]
Present = Annotated[Tensor, Shape("labels")]  # 1 for a label that a client has samples of


class Update(TypedDict):
    """What a client gives back: its parameters, as those it was sent."""

    parameters: Parameters
    samples: int
    loss: float


class AveragingProgram(ClientProgram):
    """Takes parameters, trains from there, gives them back."""

    algorithm: "Averaging"
    passing = False  # the shared parameters are the server's to keep, and come again with the next message

    @query
    @sends("open")
    def shape(self) -> str:
        """A word that is equal for clients whose shared parameters have equal names and shapes."""
        return word(self.shared())

    @query
    @sends("first")
    def begin(self) -> Parameters:
        return self.shared()

    @operation
    def receive(self, parameters: Parameters) -> None:
        own = self.model.state_dict()
        if wrong := [
            name
            for name, given in parameters.items()
            if name in own and given.shape != own[name].shape
        ]:
            raise ValueError(
                f"{wrong[0]} came with shape {tuple(parameters[wrong[0]].shape)}, its own has {tuple(own[wrong[0]].shape)}"
            )
        self.model.load_state_dict(parameters, strict=False)
        self.passing = False

    @operation
    @sends(parameters="parameters", samples="open")
    def update(self, parameters: Parameters) -> Update:
        self.receive(parameters)
        self.passing = True
        self.start = parameters  # where this round began, for those who measure how far they went
        loss = self.learn(optimizer=self.optimizer(fresh=True))
        return {"parameters": self.shared(), "samples": len(self.client.train), "loss": loss}

    def blank_update(self, **body: Any) -> dict[str, Value]:
        """The form of an update, for a client with privacy that could not make one."""
        return {"parameters": self.shared(), "samples": len(self.client.train)}

    @query
    def appraise(self, parameters: Parameters, common: bool) -> dict[str, float] | Embedded:
        """Metrics of given parameters, or what the server needs to compute them; the client's own stay as they are."""
        own = {name: tensor.clone() for name, tensor in self.shared().items()}
        self.model.load_state_dict(parameters, strict=False)
        try:
            return self.client.task.evaluation_reply(self, common)
        finally:
            self.model.load_state_dict(own, strict=False)

    def state(self) -> State | None:
        if (whole := super().state()) is None:
            return None
        if self.passing and not self.algorithm.personalised:
            whole["model"] = {
                name: tensor
                for name, tensor in whole["model"].items()
                if not self.algorithm.shares(name)
            }
        return whole if any(whole.values()) else None

    def shared(self) -> Parameters:
        return {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if self.algorithm.shares(name)
        }

    def drift(self) -> Tensor | float:
        """Squared distance of the shared parameters from where the round began."""
        start = {
            name: self.start[name].to(p.device, p.dtype)
            for name, p in self.model.named_parameters()
            if name in self.start
        }
        return sum(
            ((p - start[name]) ** 2).sum()
            for name, p in self.model.named_parameters()
            if name in start
        )


@dataclass
class Averaging(Algorithm):
    """FedAvg's loop. Clients whose shared parameters have the same shape and meaning average with each other, others keep to themselves."""

    personalised: ClassVar[bool] = False
    Program: ClassVar[type[ClientProgram]] = AveragingProgram

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.paired

    def shares(self, name: str) -> bool:
        """Whether the parameter of that name travels."""
        return True

    def by_label(self) -> bool:
        """Whether some of what travels stands for single labels, as a head does: then only clients with the same labels average."""
        return True

    def weights(self, replies: Replies) -> dict[str, float]:
        """How much each client counts in the mean."""
        return {client: float(reply["samples"]) for client, reply in replies.items()}

    def merge(self, states: dict[str, Parameters], weights: dict[str, float]) -> Parameters:
        return mean_states(states, weights)

    def messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        """What each client is sent: the model of its group."""
        return {c: {"parameters": fed.state["models"][fed.state["group"][c]]} for c in clients}

    def absorb(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """What becomes of a group's model when its members have sent theirs."""
        fed.state["models"][group] = self.merge(states, weights)

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            self.register_clients(fed)
            group = fed.state["group"]
            sent = self.messages(fed, fed.active)
            replies = fed.call("update", per_client=sent)
            for client in [
                c for c, reply in replies.items() if reply["samples"] != fed.infos[c].samples
            ]:
                fed.refuse(client, "update", "it tells another number of samples than its card")
                del replies[client]
            weights = self.weights(replies)
            for name in sorted({group[c] for c in replies}):
                self.absorb(
                    fed,
                    name,
                    {c: reply["parameters"] for c, reply in replies.items() if group[c] == name},
                    weights,
                )
            self.note(fed, replies)
            yield round

    def note(self, fed: Federation, replies: Replies) -> None:
        """What is written down of a round, for the curves in the report."""
        fed.log_metrics("train_loss", {client: reply["loss"] for client, reply in replies.items()})

    def register_clients(self, fed: Federation) -> None:
        """Who is alike, and where each group begins: asked before the first round, and of those who could not answer when next here."""
        group, models = fed.state.setdefault("group", {}), fed.state.setdefault("models", {})
        if not (new := [c for c in (fed.active if group else fed.clients) if c not in group]):
            return
        for client, told in fed.call("shape", clients=new, quorum=0 if group else None).items():
            shape = self.group_key(fed, client, told) if told else f"only {client}"
            if shape not in models and (begun := fed.call("begin", clients=[client], quorum=0)):
                if word(begun[client]) != told:
                    fed.refuse(
                        client, "begin", "its first weights have other names or shapes than it told"
                    )
                    continue
                models[shape] = begun[client]
            if shape in models:
                group[client] = shape

    def group_key(self, fed: Federation, client: str, shape: str) -> str:
        """A word that is equal for clients who average with each other."""
        info = fed.infos[client]
        return (
            f"{shape} {digest((info.task, info.labels))}"
            if self.by_label() and info.has("labelled")
            else shape
        )

    def evaluate(self, fed: Federation) -> Replies:
        """The shared model: on the common test set, once a group, or on each client's own where there is no common one."""
        group: dict[str, Any] = fed.state["group"]
        there = [c for c in fed.clients if c in group]
        common = all(
            fed.infos[c].tested_on == "common" and fed.infos[c].has("labelled") for c in there
        )
        ask = lambda clients: fed.call(
            "appraise",
            clients=clients,
            quorum=0,
            common=common,
            per_client=self.messages(fed, clients),
        )
        if not common:
            return score_federation(fed, ask(there))
        keys = {c: (group[c], fed.infos[c].task, fed.infos[c].labels) for c in there}
        known: dict[Any, Any] = {}
        failures: dict[str, Any] = {}
        while asked := {
            keys[c]: c for c in reversed(there) if keys[c] not in known and c not in failures
        }:
            replies = ask(list(asked.values()))  # one of each; who cannot answer is asked no more
            known |= {keys[c]: metrics for c, metrics in replies.items()}
            failures |= replies.failures
        return Replies({c: known[keys[c]] for c in there if keys[c] in known}, failures)

    def alone(self, fed: Federation) -> None:
        self.register_clients(fed)
        self.finish(fed)

    def finish(self, fed: Federation) -> None:
        """Everyone leaves with the final model."""
        there = [c for c in fed.clients if c in fed.state["group"]]
        fed.call("receive", clients=there, quorum=0, per_client=self.messages(fed, there))


def word(parameters: Parameters) -> str:
    """Equal for parameters of equal names and shapes."""
    told = sorted((name, tuple(tensor.shape)) for name, tensor in parameters.items())
    return digest(told) if told else ""


def digest(told: object) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def mean_states(
    states: dict[str, dict[str, Tensor]], weights: dict[str, float]
) -> dict[str, Tensor]:
    """Weighted mean of parameters with equal names and shapes; whole numbers (counters) are rounded."""
    total = sum(weights[c] for c in states)
    clients = list(states)
    merged = {}
    for name, first in states[clients[0]].items():
        sum_ = torch.zeros_like(
            first, dtype=torch.float64 if first.dtype == torch.float64 else torch.float32
        )
        for c in clients:
            sum_.add_(states[c][name].to(sum_.device, sum_.dtype), alpha=weights[c] / total)
        merged[name] = (
            sum_.round().to(first.dtype) if not first.is_floating_point() else sum_.to(first.dtype)
        )
    return merged


def presence(fed: Federation, clients: Iterable[str]) -> dict[str, Tensor]:
    """Which labels clients have, of all who have ever told; these are asked if they have not."""
    told: dict[str, Tensor] = fed.state.setdefault("present", {})
    if new := [c for c in clients if c not in told]:
        told |= {
            c: have.bool().cpu() for c, have in fed.call("present", clients=new, quorum=0).items()
        }
    return told
