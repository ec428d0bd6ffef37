"""Averaging of models, or of heads, among clients with the same task, labels and shapes."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from unalike.base.message import Value
from unalike.base.types import Parameters
from unalike.core.algorithm import Algorithm, Sharing
from unalike.core.federation import Federation
from unalike.core.operations import operation, query, sends
from unalike.core.program import ClientProgram
from unalike.core.safeguard import NOT_CROSS_VALIDATED, exclude_from_cross_validation
from unalike.methods.absent_classes import classes_in_groups
from unalike.methods.averaging import mean_states, shape_hash, short_hash
from unalike.methods.parts import Part, drop_invalid_replicas
from unalike.methods.sharing import connect_clients

Messages = dict[str, dict[str, Value]]


class GroupAveragingProgram(ClientProgram):
    """Sends parameters and takes the mean of its group's."""

    averaged_prefix: ClassVar[str] = ""  # of the names of averaged parameters; "": the whole model

    def averaged_parameters(self) -> Parameters:
        """The parameters that are averaged, by name."""
        return {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if name.startswith(self.averaged_prefix)
        }

    @query
    @sends("open")
    def kind_of(self) -> str:
        """The client's group: equal for clients that may be averaged; "" for none."""
        task = self.client.task
        return group_of(task.name, task.labels, self.averaged_parameters())

    @query
    @sends("parameters")
    def give(self) -> Parameters:
        """The parameters to average."""
        return self.averaged_parameters()

    def blank_give(self) -> Parameters:
        return self.averaged_parameters()

    @operation
    def take(self, parameters: Parameters, had: Tensor | None = None) -> None:
        """Take the mean of the group.

        Args:
            had: (labels,), 1 for those that some client of the group has; only with masking of
                absent classes.
        """
        if shape_hash(parameters) != shape_hash(self.averaged_parameters()):
            raise ValueError("expected the parameters that are averaged, got other names or shapes")
        if had is not None:
            self.receive_group_classes(had)
        self.model.load_state_dict(parameters, strict=False)
        self.memory[NOT_CROSS_VALIDATED] = True

    def receive_group_classes(self, had: Tensor) -> None:
        """Take note of the classes of the group. Raises unless the client masks absent classes."""
        raise ValueError("got the classes of its group, but this client masks no absent classes")

    def learn(self, *args: Any, **kwargs: Any) -> float:
        drop_invalid_replicas(self)
        return super().learn(*args, **kwargs)


def group_of(task: str, labels: Sequence[str], parameters: Parameters) -> str:
    """Equal for clients that may be averaged with each other; "" where nothing is averaged."""
    return short_hash((task, tuple(labels), shape_hash(parameters))) if parameters else ""


def average_groups(
    fed: Federation,
    extra_arguments: Callable[[Federation, list[str], dict[str, str]], Messages] | None = None,
) -> None:
    """Replace the averaged parameters of each active client by the mean of its group, weighted by
    samples. A client without another of its group keeps its own.

    Args:
        extra_arguments: takes the clients that get a mean, and the groups of all clients known so
            far; returns more arguments of `take`, by client.
    """
    groups: dict[str, str] = fed.state.setdefault("kinds", {})
    unknown = [c for c in fed.active if c not in groups]
    if unknown:
        groups |= dict(fed.call("kind_of", clients=unknown, quorum=0))
    active_groups = [groups.get(c) for c in fed.active]
    sharing = [c for c in fed.active if groups.get(c) and active_groups.count(groups[c]) > 1]
    if not sharing:
        return
    sent = _valid_parameters(fed, groups, dict(fed.call("give", clients=sharing)))
    messages: Messages = {}
    weights = {c: float(fed.infos[c].samples) for c in sent}
    means = {}
    for group in dict.fromkeys(groups[c] for c in sent):
        members = {c: parameters for c, parameters in sent.items() if groups[c] == group}
        if len(members) > 1:
            means[group] = mean_states(members, weights)
    for client in sent:
        if groups[client] in means:
            messages[client] = {"parameters": means[groups[client]]}
    if not messages:
        return
    if extra_arguments is not None:
        for client, arguments in extra_arguments(fed, list(messages), groups).items():
            messages[client] |= arguments
    exclude_from_cross_validation(fed.state, messages)
    fed.call("take", clients=[c for c in messages if c in fed.active], per_client=messages)


def averaged_groups(algorithm: Algorithm, fed: Federation) -> Sharing:
    """What `average_groups` averages among which clients; {} before it was first called."""
    kinds: dict[str, str] = fed.state.get("kinds", {})
    groups = connect_clients({c: [kind] for c, kind in kinds.items() if kind})
    what = "heads" if getattr(algorithm.Program, "averaged_prefix", "") else "parameters"
    return {what: groups} if groups else {}


def _valid_parameters(
    fed: Federation, groups: dict[str, str], sent: dict[str, Parameters]
) -> dict[str, Parameters]:
    """Parameters without those of clients that sent other names or shapes than they announced."""
    valid = {}
    for client, parameters in sent.items():
        info = fed.infos[client]
        if group_of(info.task, info.labels, parameters) == groups[client]:
            valid[client] = parameters
        else:
            fed.refuse(client, "give", "its parameters are not those of the group it announced")
    return valid


class HeadAveraging(Part):
    """Averaging of heads after the local epochs, or after each of them.

    Args:
        every_epoch: also between local epochs.
        mask_absent_classes: send clients which classes their group has (`AbsentClassProgram`).
    """

    def __init__(self, every_epoch: bool = False, mask_absent_classes: bool = False):
        self.acts_between_epochs = every_epoch
        self.mask_absent_classes = mask_absent_classes

    def after_local(self, fed: Federation) -> None:
        average_groups(fed, classes_in_groups if self.mask_absent_classes else None)

    def between_epochs(self, fed: Federation) -> None:
        self.after_local(fed)
