"""Width-reduced submodels: clients of different capacity train narrower versions of one model.

The family of HeteroFL (https://arxiv.org/abs/2010.01264). A client announces the ratio of the full
width that it can train. The server sends it that share of the units of every layer, and averages
every entry of the full model over the clients that have it.

A method derives from `SubmodelMethod` and says which units a client gets (`select_units`). Units
that must be kept or removed together form a channel group (`unalike.models.channel_groups`).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.base.types import Parameters
from unalike.core.client import Client
from unalike.core.federation import Federation, Replies
from unalike.core.operations import measurement, operation, query, sends
from unalike.core.program import ClientProgram, State, measure
from unalike.core.signatures import Shape
from unalike.methods.averaging import (
    FIRST,
    Averaging,
    FinetuneProgram,
    LabelMask,
    Update,
    cast_like,
    label_masks,
    shape_hash,
)
from unalike.methods.robust import Upload, merge_robustly
from unalike.models.activity import measure_activity
from unalike.models.channel_groups import AxisSlice, ChannelGroup
from unalike.models.flops import count_flops
from unalike.models.frozen import whole_state
from unalike.models.model import Model
from unalike.models.submodels import (
    check_submodel,
    column_scales,
    count_units,
    expand,
    extract,
    find_channel_groups,
    first_units,
    kept_units,
    narrow_model,
    reindex_groups,
)
from unalike.tasks import Task
from unalike.training.batch_norm import recompute_statistics, tracking_batch_norms
from unalike.training.batching import batches
from unalike.training.loop import Training

Ratio = Annotated[float, Field(gt=0, le=1)]
# Ratios of the width that a memory or FLOPs budget may buy: the largest that it can pay for.
RATIOS = (1.0, 0.75, 0.5, 0.25)


class ShapeReply(TypedDict):
    """Shape of the full model, and the ratio of its width that the client can train."""

    shape: str
    ratio: Ratio


class SliceMessage(TypedDict):
    """An `AxisSlice` as it is sent; `made` is its `is_output`."""

    tensor: str
    axis: int
    entries: Annotated[Tensor, Shape(None, None, whole=True)]
    made: bool


class GroupMessage(TypedDict):
    """A `ChannelGroup` as it is sent."""

    units: int
    places: list[SliceMessage]


class InitialModel(TypedDict):
    """Initial weights of the full model, and its channel groups."""

    parameters: Parameters
    widths: list[GroupMessage]


class SubmodelUpdate(Update):
    """A client's reply after local training, with the ratio that it can train next."""

    ratio: Ratio


class SubmodelProgram(FinetuneProgram):
    """The client's half: trains the submodel that it is sent, of whatever width."""

    algorithm: "SubmodelMethod"

    def __init__(self, client: Client, algorithm: "SubmodelMethod", training: Training, seed: int):
        super().__init__(client, algorithm, training, seed)
        check_all_learns(self.model, client.id)
        self.channel_groups = find_channel_groups(self.model, self.example_input(), algorithm.fixed)
        # Shapes without values, from which submodels are built.
        self.full_model: nn.Module = copy.deepcopy(self.model).to("meta")
        persistent = self.model.state_dict()
        self.other_buffers = {
            name: buffer for name, buffer in self.model.named_buffers() if name not in persistent
        }
        self.full_units = [group.units for group in self.channel_groups]
        self.memory["units"] = self.full_units
        self.flops_by_units: dict[tuple[int, ...], int] = {}
        self.masks_output = algorithm.masked and client.task.single_label
        self.add_output_mask(self.model)
        # Raises before the run starts if the model cannot be made that narrow.
        self.build_submodel(self.units_at(self.ratio()))

    def build_submodel(self, units: Sequence[int]) -> Model:
        """A submodel with the first units of every channel group; all its parameters are 0.

        Raises a UserError that names a layer which cannot be made narrower.
        """
        keep = [torch.arange(count) for count in units]
        submodel = narrow_model(self.full_model, self.channel_groups, keep)
        submodel = submodel.to_empty(device=self.client.device)
        for tensor in submodel.state_dict().values():
            tensor.zero_()  # uninitialised memory may hold NaN
        for name, buffer in self.other_buffers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(submodel.get_submodule(owner), attribute, buffer)
        groups = reindex_groups(self.channel_groups, keep)
        check_submodel(submodel, groups, self.example_input(), self.algorithm.fixed)
        assert isinstance(submodel, Model)
        self.add_output_mask(submodel)
        return submodel

    def add_output_mask(self, model: Model) -> None:
        """Set logits of labels that the client lacks to 0, while `masks_output` is on."""
        if self.masks_output:
            # A buffer, so that each client of a stack has its own; not part of what is sent.
            absent = ~self.label_mask
            model.head.register_buffer("absent_labels", absent, persistent=False)
            model.head.register_forward_hook(
                lambda head, x, out: (
                    out.masked_fill(head.absent_labels, 0.0) if self.masks_output else out
                )
            )

    @cached_property
    def label_mask(self) -> Tensor:
        """(labels,) bool: the labels that the client has samples of."""
        return self.client.label_mask.to(self.client.device)

    def resize_to(self, units: Sequence[int]) -> None:
        """Replace the model by one with so many units per channel group, if it has others."""
        if self.memory["units"] != list(units):
            self.model = self.build_submodel(units)
            self.optimizers = {}
            self.memory["units"] = list(units)

    def units_at(self, ratio: float) -> list[int]:
        """Units of every channel group at a ratio of the full width."""
        return [kept_units(group, ratio) for group in self.channel_groups]

    def flops(self, units: Sequence[int]) -> int:
        """FLOPs of a submodel on one sample, counted without computing it."""
        key = tuple(units)
        if key not in self.flops_by_units:
            keep = [torch.arange(count) for count in units]
            submodel = narrow_model(self.full_model, self.channel_groups, keep)
            x = self.example_input()
            if isinstance(x, dict):
                x = {name: rows.to("meta") for name, rows in x.items()}
            else:
                x = x.to("meta")
            self.flops_by_units[key] = count_flops(submodel, x)
        return self.flops_by_units[key]

    def relative_cost(self, units: Sequence[int], resource: str) -> float:
        """FLOPs or memory (parameters) of a submodel as a share of the full model's."""
        if resource == "flops":
            full = self.flops(self.full_units)
            if full:
                return self.flops(units) / full
        state = self.full_model.state_dict()
        keep = [torch.arange(count) for count in units]
        return numel(extract(state, self.channel_groups, keep)) / numel(state)

    def ratio(self) -> float:
        """The ratio of the full width that this client can train now.

        Its capacity is that ratio, or a share of the full model's memory or FLOPs (`budget`).
        """
        capacity, budget = self.client.capacity, self.algorithm.budget
        if budget == "width":
            return capacity
        costs = {ratio: self.relative_cost(self.units_at(ratio), budget) for ratio in RATIOS}
        for ratio, cost in costs.items():
            if cost <= capacity + 1e-9:
                return ratio
        raise UserError(
            f"client {self.client.id} has {capacity:g} of the full model's {budget}, and the "
            f"smallest submodel needs {min(costs.values()):.3g}; raise its capacity to that, or "
            "leave it out"
        )

    @property
    def pruning_rate(self) -> float:
        """rho: the share of the full model's units that the present submodel lacks."""
        if not self.channel_groups:
            return 0.0
        return 1 - sum(self.memory["units"]) / max(sum(self.full_units), 1)

    def own_start(self, units: Sequence[int]) -> Parameters:
        """A submodel of the client's own initial net: its first units.

        Columns grow by the root of the ratio of the widths, as initial weights of a narrower net
        do.
        """
        own = self.fresh_copy().model.state_dict()
        keep = [torch.arange(count) for count in units]
        parameters = extract(own, self.channel_groups, keep)
        groups = reindex_groups(self.channel_groups, keep)
        scales = column_scales(self.channel_groups, groups, parameters)
        for name, scale in scales.items():
            parameters[name] = parameters[name] * scale.sqrt().to(parameters[name])
        return parameters

    @query
    @sends("open")
    def shape(self) -> ShapeReply:
        """Shape of the full model, and the ratio that this client can train."""
        return {"shape": shape_hash(self.full_model.state_dict()), "ratio": self.ratio()}

    @query
    def present(self) -> LabelMask:
        """(labels,): 1 for labels that the client has samples of."""
        if not self.algorithm.masked:
            raise ValueError("which labels a client has is sent only if the method is masked")
        return self.label_mask.float()

    @query
    @sends(parameters="first", widths="open")
    def begin(self) -> InitialModel:
        """The initial full model."""
        return {
            "parameters": dict(self.fresh_copy().model.state_dict()),
            "widths": groups_to_message(self.channel_groups),
        }

    @operation
    def receive(self, parameters: Parameters, units: list[int]) -> None:
        """Keep this submodel as the final one."""
        self.load_submodel(parameters, units)
        self.recalibrate_batch_norm(self.model)

    def load_submodel(self, parameters: Parameters, units: list[int]) -> None:
        """Take on the width of a submodel, and its parameters; none: those of the own start."""
        self.resize_to(units)
        self.model.load_state_dict(parameters or self.own_start(units))
        self.remember_first(parameters, units=list(units))

    def restart(self, client: Client) -> Self:
        program = self.fresh_copy(client)
        first = self.memory.get(FIRST, {"parameters": {}, "units": self.units_at(self.ratio())})
        program.load_submodel(first["parameters"], first["units"])
        return program

    @operation
    @sends(parameters="parameters", samples="open", ratio="open")
    def update(self, parameters: Parameters, units: list[int]) -> SubmodelUpdate:
        """Train the local epochs from this submodel."""
        self.load_submodel(parameters, units)
        loss = self.learn(optimizer=self.optimizer(fresh=True))
        return {
            "parameters": dict(self.model.state_dict()),
            "samples": len(self.client.train),
            "loss": loss,
            "ratio": self.ratio(),
        }

    def blank_update(self, **body: Any) -> dict[str, Value]:
        """An update without content, sent by a client with privacy whose training failed."""
        return {
            "parameters": dict(self.model.state_dict()),
            "samples": len(self.client.train),
            "loss": None,
            "ratio": self.ratio(),
        }

    @query
    @measurement
    def appraise(self, parameters: Parameters, units: list[int]) -> dict[str, float]:
        """Metrics of a submodel on the client's own test set; the client's model stays."""
        if self.client.test is None or not len(self.client.test):
            return {}
        submodel = self.build_submodel(units)
        submodel.load_state_dict(parameters or self.own_start(units))
        self.recalibrate_batch_norm(submodel)
        return measure(submodel, self.client.test, self.client, self.training.batch_size)

    @query
    @measurement
    def evaluate(self, common: bool = False) -> dict[str, float]:
        """Metrics of the client's model; on the common test set no label is masked."""
        before = self.masks_output
        self.masks_output = before and not common
        try:
            return super().evaluate(common)
        finally:
            self.masks_output = before

    @query
    def excited(self, parameters: Parameters) -> list[Annotated[Tensor, Shape(None, 2)]]:
        """Activity of every unit of the full model on the client's training samples.

        Returns: for every channel group (units, 2): the mean positive activation, and the share of
        activations that are not positive, after the activation function (`measure_activity`).
        """
        full = self.build_submodel(self.full_units)
        full.load_state_dict(parameters)
        data = self.client.train
        rows = (self.client.to_device(data.rows(index)[0]) for index in batches(len(data), 256))
        self.work += len(data) / 3  # a forward pass counts a third of a training step
        return [activity.float() for activity in measure_activity(full, self.channel_groups, rows)]

    def learn(
        self,
        epochs: range | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[[Tensor | dict, Tensor], Tensor] | None = None,
    ) -> float:
        """Local epochs, whose work counts by the submodel's share of the full model's FLOPs."""
        before = self.work
        # Before `reparametrize`: an optimizer's state belongs to the plain order of parameters.
        optimizer = optimizer or self.optimizer()
        with self.reparametrize():
            mean_loss = super().learn(epochs, optimizer, loss)
            self.recalibrate_batch_norm(self.model)
        share = self.relative_cost(self.memory["units"], "flops")
        self.work = before + (self.work - before) * share
        return mean_loss

    def reparametrize(self) -> AbstractContextManager[None]:
        """A hook for methods that train the model in another parametrization: a context."""
        return nullcontext()

    def recalibrate_batch_norm(self, model: nn.Module) -> None:
        """Recompute batch-norm statistics on the client's own samples.

        Those that were sent belong to units with other inputs, and local steps are too few to
        forget them.
        """
        count = len(self.client.train)
        # One sample has no variance.
        if count > 1 and tracking_batch_norms(model.train()):
            generator = stream(self.seed, "statistics", self.client.id, self.round)
            indices = batches(count, self.training.batch_size, generator)
            rows = (self.client.to_device(self.training_batch(index)[0]) for index in indices)
            recompute_statistics(model, rows)
            self.work += count / 3

    def load(self, parameters: Parameters) -> None:
        """Take on the width that these parameters have, and load them."""
        full = self.full_model.state_dict()
        self.resize_to(count_units(parameters, self.channel_groups, full))
        super().load(parameters)

    def restore(self, state: State) -> None:
        self.resize_to(state["memory"]["units"])
        super().restore(state)


@dataclass
class SubmodelMethod(Averaging):
    """Averages submodels; by default a client gets the first units of every channel group.

    With `masked`, logits of labels that a client has no samples of are 0 (but on the common test
    set), and the rows of the last layer are averaged over clients that have their label. Clients
    then tell the server which labels they have.

    Args:
        budget: what of the full model a client's capacity is a share of: "width", "memory" or
            "flops".
        fixed: names of layers that keep their full width, e.g. "encoder.first".
        masked: mask labels that a client lacks, where clients classify.
        start: what a client trains first: the "server"'s net, or its "own", be it random or brought
            along.
    """

    personalised: ClassVar[bool] = True
    Program: ClassVar[type[ClientProgram]] = SubmodelProgram

    budget: Literal["width", "memory", "flops"] = "width"
    fixed: tuple[str, ...] = ()
    masked: bool = False
    start: Literal["server", "own"] = field(default="server", kw_only=True)

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired and not task.headless

    def privacy_problem(self) -> str | None:
        if self.masked:
            return (
                "masked, clients tell which labels they have, which nothing protects; "
                "set algorithm.masked to false"
            )
        return super().privacy_problem()

    # Which submodel a client is sent

    def select_units(self, fed: Federation, client: str) -> list[Tensor]:
        """Indices of the units that a client is sent this round, for every channel group."""
        return first_units(self.channel_groups(fed, client), fed.state["ratio"][client])

    def build_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        units = {c: self.select_units(fed, c) for c in clients}
        own = set(clients) - set(fed.state.get("trained", [])) if self.start == "own" else set()
        submodels = self.extract_submodels(fed, {c: units[c] for c in clients if c not in own})
        submodels |= {c: {} for c in own}  # no parameters: a client begins with its own net
        return {c: {"parameters": submodels[c], "units": list(map(len, units[c]))} for c in clients}

    def extract_submodels(
        self, fed: Federation, units: dict[str, list[Tensor]]
    ) -> dict[str, Parameters]:
        """Parameters of each client's submodel, from the units that it gets."""
        return {
            c: extract(self.server_model(fed, c), self.channel_groups(fed, c), units[c])
            for c in units
        }

    # What becomes of the replies

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """Average every entry of the full model over the clients that have it."""
        if self.masked:
            label_masks(fed, [c for c in states if fed.infos[c].has("single_label")])
        upload = next(iter(states.values()))
        # A model restored from disk may lie on another device than the uploads.
        model = {
            name: tensor.to(upload[name].device)
            for name, tensor in fed.state["models"][group].items()
        }
        contributions = self.mask_absent(fed, model, self.place_uploads(fed, model, states))
        if self.robust == "never" or len(states) < 3:
            merged = masked_mean(model, contributions, weights)
        else:
            merged = merge_robustly(model, list(contributions), weights, self.robust)
        fed.state["models"][group] = merged

    def place_uploads(
        self, fed: Federation, model: Parameters, states: dict[str, Parameters]
    ) -> Iterator[Upload]:
        """Put uploads at positions of the full model; by default where their units came from."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        for client, state in states.items():
            groups, units = self.channel_groups(fed, client), self.select_units(fed, client)
            ones = {name: torch.ones_like(tensor) for name, tensor in state.items()}
            yield Upload(
                client=client,
                parameters=expand(state, groups, units, zeros),
                mask=expand(ones, groups, units, zeros),
            )

    def mask_absent(
        self, fed: Federation, model: Parameters, contributions: Iterable[Upload]
    ) -> Iterator[Upload]:
        """Take the last layer's rows of labels that a client lacks out of its contribution."""
        for contribution in contributions:
            mask = dict(contribution.mask or {})
            for name, rows in self.label_rows(fed, contribution.client, model).items():
                mask[name] = mask[name] * rows
            yield contribution._replace(mask=mask)

    def label_rows(self, fed: Federation, client: str, model: Parameters) -> Parameters:
        """Masks of the last layer's tensors: 1 in rows of labels that a client has, else 0.

        Their shapes broadcast to the tensors. Empty unless the client told its labels.
        """
        labels = fed.state.get("present", {}).get(client)
        if labels is None:
            return {}
        matrices = [name for name, tensor in model.items() if tensor.dim() > 1]
        last_layer = matrices[-1].rpartition(".")[0]
        masks = {}
        for name in (f"{last_layer}.weight", f"{last_layer}.bias"):
            if name in model and len(model[name]) == len(labels):
                shape = [-1, *[1] * (model[name].dim() - 1)]
                masks[name] = labels.to(model[name]).view(shape)
        return masks

    def record_round(self, fed: Federation, replies: Replies) -> None:
        """Note which clients have trained, and the ratio that each can train next."""
        fed.state["trained"] = sorted({*fed.state.get("trained", []), *replies})
        fed.state["ratio"] |= {client: reply["ratio"] for client, reply in replies.items()}
        super().record_round(fed, replies)

    # What the server knows of its clients

    def server_model(self, fed: Federation, client: str) -> Parameters:
        """The full model of a client's group."""
        return fed.state["models"][fed.state["group"][client]]

    def channel_groups(self, fed: Federation, client: str) -> list[ChannelGroup]:
        """Channel groups of the full model of a client's group."""
        return groups_from_message(fed.state["widths"][fed.state["group"][client]])

    def register_clients(self, fed: Federation) -> None:
        fed.state.setdefault("widths", {})
        fed.state.setdefault("ratio", {})
        super().register_clients(fed)

    def group_key(self, fed: Federation, client: str, answer: ShapeReply) -> str:
        return super().group_key(fed, client, answer["shape"])

    def add_group(
        self, fed: Federation, key: str, answer: ShapeReply, initial: InitialModel
    ) -> bool:
        parameters, groups = initial["parameters"], initial["widths"]
        if shape_hash(parameters) != answer["shape"] or not groups_fit(groups, parameters):
            return False
        fed.state["models"][key] = parameters
        fed.state["widths"][key] = groups
        return True

    def add_member(self, fed: Federation, key: str, client: str, answer: ShapeReply) -> None:
        super().add_member(fed, key, client, answer)
        fed.state["ratio"][client] = answer["ratio"]

    def fetch_activity(self, fed: Federation, clients: list[str]) -> Replies:
        """Send clients the full model, and get the activity of its units on their data."""
        replies = fed.call(
            "excited",
            clients=clients,
            quorum=None if len(clients) == len(fed.active) else 0,  # few are asked again
            per_client={c: {"parameters": self.server_model(fed, c)} for c in clients},
        )
        for client in list(replies):
            expected = [group.units for group in self.channel_groups(fed, client)]
            got = [len(activity) for activity in replies[client]]
            if got != expected:
                reason = f"expected the activity of {expected} units, got {got}"
                fed.refuse(client, "excited", reason)
                del replies[client]
        return replies

    # Evaluation and end

    def evaluate(self, fed: Federation) -> Replies:
        """Metrics on each client's own test set: of the submodel that it trained last or, before
        its first training, of the one that it would be sent."""
        everyone = self.members(fed) if "finetuned" in fed.state else []
        trained = {*everyone, *fed.state.get("trained", [])}
        known = fed.call("evaluate", clients=[c for c in fed.clients if c in trained], quorum=0)
        new = [c for c in self.members(fed) if c not in trained]
        messages = self.build_messages(fed, new)
        initial = fed.call("appraise", clients=new, quorum=0, per_client=messages)
        metrics = {**known, **initial}
        failures = {**known.failures, **initial.failures}
        return Replies({c: metrics[c] for c in fed.infos if c in metrics}, failures)

    def can_finetune(self) -> bool:
        return type(self).finish is SubmodelMethod.finish

    def finish(self, fed: Federation) -> None:
        """Clients keep the submodel that they trained; those that never trained get one.

        With `finetune` all get the submodel that they would be sent next, and train it further.
        """
        trained = set() if self.finetune else set(fed.state.get("trained", []))
        self.send_final(fed, [c for c in self.members(fed) if c not in trained])
        self.finetune_clients(fed)


def masked_mean(
    model: Parameters, contributions: Iterable[Upload], weights: dict[str, float]
) -> Parameters:
    """Weighted mean of every entry over the clients that have it; other entries stay as in `model`.

    Args:
        weights: by client.
    """
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in model.items()}
    total_weight: dict[str, Any] = dict.fromkeys(model, 0)
    for client, parameters, mask in contributions:
        assert mask is not None
        for name in model:
            total[name].addcmul_(parameters[name], mask[name], value=weights[client])
            total_weight[name] = total_weight[name] + weights[client] * mask[name]
    mean = {}
    for name, tensor in model.items():
        average = total[name] / total_weight[name]
        mean[name] = cast_like(
            torch.where(total_weight[name] > 0, average, tensor.double()), tensor
        )
    return mean


def check_all_learns(model: nn.Module, client: str) -> None:
    """Raise UserError if weights are frozen.

    A client is not told which units of the full model it gets, so it could not narrow the frozen
    weights that it has itself.
    """
    learns = model.state_dict().keys()
    frozen = {name: w for name, w in whole_state(model).items() if name not in learns}
    if frozen:
        raise UserError(
            f"client {client}: submodels are made of weights that all learn, and "
            f"{numel(frozen):,} of this model's are frozen, the first of them "
            f"{next(iter(frozen))}; train the whole model (lora: 0, adapters: 0), or use a method "
            "that narrows no models"
        )


def numel(parameters: Parameters) -> int:
    """Number of entries of all tensors."""
    return sum(tensor.numel() for tensor in parameters.values())


def groups_to_message(groups: Sequence[ChannelGroup]) -> list[GroupMessage]:
    """Channel groups as they are sent."""
    messages: list[GroupMessage] = []
    for group in groups:
        slices = [slice_to_message(part) for part in group.slices]
        messages.append({"units": group.units, "places": slices})
    return messages


def slice_to_message(part: AxisSlice) -> SliceMessage:
    """An axis slice as it is sent."""
    return {
        "tensor": part.tensor,
        "axis": part.axis,
        "entries": part.entries,
        "made": part.is_output,
    }


def groups_from_message(message: Sequence[GroupMessage]) -> list[ChannelGroup]:
    """Channel groups from what `groups_to_message` made of them."""
    groups = []
    for group in message:
        slices = [
            AxisSlice(part["tensor"], part["axis"], part["entries"].cpu(), part["made"])
            for part in group["places"]
        ]
        groups.append(ChannelGroup(group["units"], tuple(slices)))
    return groups


def groups_fit(groups: Sequence[GroupMessage], parameters: Parameters) -> bool:
    """Whether channel groups that a client sent are slices of its parameters."""
    for group in groups:
        if group["units"] <= 0:
            return False
        for part in group["places"]:
            tensor = parameters.get(part["tensor"])
            if tensor is None or not 0 <= part["axis"] < tensor.dim():
                return False
            entries = part["entries"]
            if len(entries) != group["units"] or not entries.numel():
                return False
            if entries.min() < 0 or entries.max() >= tensor.shape[part["axis"]]:
                return False
    return True
