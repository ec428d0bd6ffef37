"""Personalised averaging: some of a model is shared, or each client keeps a model of its own.

`SharedBody` averages all but the heads. `PersonalModel` leaves every client its own model, which
starts from the shared one and is never overwritten by it. `SecondModel` adds a second model that is
exchanged in its place. `FineTuning` averages one model and adapts it to each client at the end.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from unalike.base.randomness import scope
from unalike.base.types import Parameters
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.core.federation import Federation, Replies
from unalike.core.operations import measurement, operation, query
from unalike.core.program import ClientProgram, Embedding
from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.models.model import Model
from unalike.training.loop import Positive, Training

STARTED = "started"  # in a program's memory: its own model has taken the common initial parameters


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Parameters of a module are not trained within this context.

    Build the optimizer inside: it holds the parameters that are trained.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


@dataclass
class SharedBody(Averaging):
    """Encoder and projection are averaged among clients of one shape; heads stay with clients.

    Tasks and labels may differ, because nothing that belongs to single labels is shared.
    """

    personalised: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    def shares(self, name: str) -> bool:
        return not name.startswith("head.")

    def requires_same_labels(self) -> bool:
        return False


class PersonalProgram(AveragingProgram):
    """Keeps its own model from round to round; what the server sends is a reference for it."""

    @operation
    def start(self, parameters: Parameters) -> None:
        """Take the common initial parameters, once."""
        if STARTED not in self.memory:
            super().receive(parameters)
            self.memory[STARTED] = True

    @operation
    def receive(self, parameters: Parameters) -> None:
        """Take the reference of this round; at first it is the start of the own model, too."""
        self.start(parameters)


@dataclass
class PersonalModel(Averaging):
    """Clients keep models of their own, which are evaluated and which they end with."""

    personalised: ClassVar[bool] = True
    Program: ClassVar[type[ClientProgram]] = PersonalProgram

    def evaluate(self, fed: Federation) -> Replies:
        return Algorithm.evaluate(self, fed)

    def alone(self, fed: Federation) -> None:
        self.register_clients(fed)
        members = self.members(fed)
        fed.call("start", clients=members, quorum=0, per_client=self.build_messages(fed, members))

    def finish(self, fed: Federation) -> None:
        """Clients keep their own models."""


class SecondModelProgram(PersonalProgram):
    """`self.model` is the client's own; `self.exchanged` is received, trained and sent.

    The exchanged model is not saved: it comes with every request.
    """

    def __init__(self, client: Client, algorithm: Averaging, training: Training, seed: int):
        super().__init__(client, algorithm, training, seed)
        with scope(seed, "exchanged", client.id):
            self.exchanged = self.build_exchanged().to(client.device, client.dtype)

    def build_exchanged(self) -> nn.Module:
        """The exchanged model; by default of the same architecture as the client's own."""
        return copy.deepcopy(self.model)

    def shared(self) -> Parameters:
        return dict(self.exchanged.state_dict())

    @operation
    def start(self, parameters: Parameters) -> None:
        """Start the own model where the exchanged one starts, if they have one architecture."""
        if type(self).build_exchanged is SecondModelProgram.build_exchanged:
            super().start(parameters)

    @operation
    def receive(self, parameters: Parameters) -> None:
        """Load the exchanged model."""
        self.start(parameters)
        self.exchanged.load_state_dict(parameters)

    @contextmanager
    def training_of(self, module: nn.Module) -> Iterator[None]:
        """Within this context `self.model` is another module, so that `learn` trains that one."""
        own = self.model
        self.model = module  # type: ignore[assignment]
        try:
            yield
        finally:
            self.model = own


@dataclass
class SecondModel(PersonalModel):
    """A second model is averaged; clients end with their own."""

    Program: ClassVar[type[ClientProgram]] = SecondModelProgram


class FineTuningProgram(AveragingProgram):
    """Adapts the shared model to its own samples before it is evaluated or kept."""

    algorithm: "FineTuning"
    model: Model

    def fine_tune(self) -> None:
        """Adapt the model; by default some local epochs on the task, with other orders of rows."""
        first = self.training.epochs
        epochs = range(first, first + self.algorithm.fine_tuning_epochs)
        self.learn(epochs, self.optimizer(fresh=True), self.task_loss)

    @operation
    def personalise(self, parameters: Parameters) -> None:
        """Load the final shared parameters and adapt them."""
        self.receive(parameters)
        self.fine_tune()

    @query
    @measurement
    def appraise(self, parameters: Parameters, common: bool) -> dict[str, float] | Embedding:
        """Evaluate these parameters after adaptation, without keeping them."""
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        work = self.work
        self.model.load_state_dict(parameters, strict=False)
        try:
            self.fine_tune()
            return self.client.task.evaluation_reply(self, common)
        finally:
            self.model.load_state_dict(own)
            self.work = work


@dataclass
class FineTuning(Averaging):
    """One model is averaged; each client ends with it after fine-tuning on its own samples.

    Args:
        fine_tuning_epochs: local epochs after the last round.
    """

    personalised: ClassVar[bool] = True
    Program: ClassVar[type[ClientProgram]] = FineTuningProgram

    fine_tuning_epochs: Positive = 5

    def finish(self, fed: Federation) -> None:
        members = self.members(fed)
        messages = self.build_messages(fed, members)
        fed.call("personalise", clients=members, quorum=0, per_client=messages)


def squared_distance(one: Parameters, other: Parameters) -> float:
    """Squared Euclidean distance of two models, floating-point tensors only."""
    total = 0.0
    for name, tensor in one.items():
        if tensor.is_floating_point():
            total += float(
                (tensor.double() - other[name].to(tensor.device).double()).square().sum()
            )
    return total
