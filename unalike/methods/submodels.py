"""Averaging over clients of different capacity: each trains a narrower version of the server's model. Knows no engine.

A client tells at what ratio of the full width it can train; the server sends that many units of every layer, and puts back what returns.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.base.types import Parameters
from unalike.core.algorithm import ClientProgram, State, measure
from unalike.core.client import Client
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation, query, sends
from unalike.core.signatures import Shape
from unalike.methods.averaging import (
    Averaging,
    AveragingProgram,
    LabelMask,
    Update,
    cast_like,
    label_masks,
    shape_hash,
)
from unalike.models.channel_groups import AxisSlice, ChannelGroup
from unalike.models.flops import count_flops
from unalike.models.model import Model
from unalike.models.submodels import (
    check_submodel,
    count_units,
    expand,
    extract,
    find_channel_groups,
    first_units,
    kept_units,
    measure_activity,
    narrow_model,
    reindex_groups,
)
from unalike.tasks import Task
from unalike.training.batch_norm import recompute_statistics, tracking_batch_norms
from unalike.training.batching import batches
from unalike.training.loop import Training

Ratio = Annotated[float, Field(gt=0, le=1)]
Carried = tuple[
    str, Parameters, Parameters
]  # a client, its upload as the whole model's, and which entries it has: 1 or 0
RATIOS = (
    1.0,
    0.75,
    0.5,
    0.25,
)  # the paper's 1 - rho, of which a budget takes the largest that it can pay


class Reach(TypedDict):
    """Of the full model, and the ratio of its width that a client can train."""

    shape: str
    ratio: Ratio


class PlaceTold(TypedDict):
    tensor: str
    axis: int
    entries: Annotated[Tensor, Shape(None, None, whole=True)]
    made: bool


class WidthTold(TypedDict):
    units: int
    places: list[PlaceTold]


class Start(TypedDict):
    """First weights of the full model, and where its units are in them."""

    parameters: Parameters
    widths: list[WidthTold]


class NarrowUpdate(Update):
    ratio: Ratio


class SubmodelProgram(AveragingProgram):
    """Trains whatever width it is sent."""

    algorithm: "SubmodelMethod"

    def __init__(self, client: Client, algorithm: "SubmodelMethod", training: Training, seed: int):
        super().__init__(client, algorithm, training, seed)
        self.widths = find_channel_groups(self.model, self.row(), algorithm.fixed)
        self.whole: nn.Module = copy.deepcopy(self.model).to(
            "meta"
        )  # shapes without numbers, to make submodels of
        self.beside = {
            name: b for name, b in self.model.named_buffers() if name not in self.model.state_dict()
        }
        self.memory["units"] = self.everything = [width.units for width in self.widths]
        self.costs: dict[tuple[int, ...], int] = {}
        self.blind = algorithm.masked and client.task.single_label  # to labels it lacks
        self.see(self.model)
        self.made(self.units(self.ratio()))  # what cannot be, is told before anything runs

    def made(self, units: Sequence[int]) -> Model:
        """The submodel of the first units, whose parameters are still to come. A layer that cannot be so narrow is named."""
        keep = [torch.arange(n) for n in units]
        small = narrow_model(self.whole, self.widths, keep).to_empty(device=self.client.device)
        for tensor in small.state_dict().values():
            tensor.zero_()  # not what lies about in memory, which a layer may stumble over
        for name, buffer in self.beside.items():
            owner, _, last = name.rpartition(".")
            setattr(small.get_submodule(owner), last, buffer)
        check_submodel(small, reindex_groups(self.widths, keep), self.row(), self.algorithm.fixed)
        assert isinstance(small, Model)
        self.see(small)
        return small

    def see(self, model: Model) -> None:
        """What it says of labels the client lacks is 0, as long as the client is `blind`."""
        if self.blind:
            absent = ~self.there  # before a look: it may be recorded, or exported
            model.head.register_forward_hook(
                lambda head, x, out: out.masked_fill(absent, 0.0) if self.blind else out
            )

    @cached_property
    def there(self) -> Tensor:
        """(labels,): True where the client has a sample of it."""
        return self.client.present.to(self.client.device)

    def fit(self, units: Sequence[int]) -> None:
        """Be as wide as that."""
        if self.memory["units"] != list(units):
            self.model, self.optimizers, self.memory["units"] = self.made(units), {}, list(units)

    def units(self, ratio: float) -> list[int]:
        return [kept_units(width, ratio) for width in self.widths]

    def cost(self, units: Sequence[int]) -> int:
        """Floating-point operations of a submodel on one sample, counted without computing."""
        if (key := tuple(units)) not in self.costs:
            small = narrow_model(self.whole, self.widths, [torch.arange(n) for n in units])
            row = self.row()
            bare = (
                {name: x.to("meta") for name, x in row.items()}
                if isinstance(row, dict)
                else row.to("meta")
            )
            self.costs[key] = count_flops(small, bare)
        return self.costs[key]

    def share(self, units: Sequence[int], of: str) -> float:
        """What a submodel needs of what the full model does."""
        if of == "flops" and (whole := self.cost(self.everything)):
            return self.cost(units) / whole
        small = extract(self.whole.state_dict(), self.widths, [torch.arange(n) for n in units])
        return sum(t.numel() for t in small.values()) / sum(
            t.numel() for t in self.whole.state_dict().values()
        )

    def ratio(self) -> float:
        """The width this client can train now: its capacity is a share of the width, or a budget of memory or computation."""
        capacity, budget = self.client.capacity, self.algorithm.budget
        if budget == "width":
            return capacity
        shares = {ratio: self.share(self.units(ratio), budget) for ratio in RATIOS}
        if not (paid := [ratio for ratio, share in shares.items() if share <= capacity + 1e-9]):
            raise UserError(
                f"client {self.client.id} has {capacity:g} of the full model's {budget}, and the smallest submodel needs "
                f"{min(shares.values()):.3g}; raise its capacity to that, or leave it out"
            )
        return paid[0]

    @property
    def rho(self) -> float:
        """The pruning rate of the submodel it has."""
        return 1 - sum(self.memory["units"]) / max(sum(self.everything), 1) if self.widths else 0.0

    @query
    @sends("open")
    def shape(self) -> Reach:
        """Of the full model, whatever it has now; and the width it can train."""
        return {"shape": shape_hash(self.whole.state_dict()), "ratio": self.ratio()}

    @query
    def present(self) -> LabelMask:
        """(labels,): which of them the client has a sample of."""
        if not self.algorithm.masked:
            raise ValueError("which labels a client has is told only where the method is masked")
        return self.there.float()

    @query
    @sends(parameters="first", widths="open")
    def begin(self) -> Start:
        return {
            "parameters": dict(self.fresh_copy().model.state_dict()),
            "widths": told(self.widths),
        }

    @operation
    def receive(self, parameters: Parameters, units: list[int]) -> None:
        """Have this submodel to leave with."""
        self.take(parameters, units)
        self.acclimatise(self.model)

    def take(self, parameters: Parameters, units: list[int]) -> None:
        self.fit(units)
        self.model.load_state_dict(parameters)

    @operation
    @sends(parameters="parameters", samples="open", ratio="open")
    def update(self, parameters: Parameters, units: list[int]) -> NarrowUpdate:
        self.take(parameters, units)
        self.round_start = parameters
        loss = self.learn(optimizer=self.optimizer(fresh=True))
        return {
            "parameters": dict(self.model.state_dict()),
            "samples": len(self.client.train),
            "loss": loss,
            "ratio": self.ratio(),
        }

    def blank_update(self, **body: Any) -> dict[str, Value]:
        return {
            "parameters": dict(self.model.state_dict()),
            "samples": len(self.client.train),
            "loss": None,
            "ratio": self.ratio(),
        }

    @query
    def appraise(self, parameters: Parameters, units: list[int]) -> dict[str, float]:
        """Metrics of a submodel on the client's own test set, leaving its own as it is."""
        if self.client.test is None or not len(self.client.test):
            return {}
        other = self.made(units)
        other.load_state_dict(parameters)
        self.acclimatise(other)
        return measure(other, self.client.test, self.client, self.training.batch_size)

    @query
    def evaluate(self, common: bool = False) -> dict[str, float]:
        blind, self.blind = self.blind, self.blind and not common
        try:
            return super().evaluate(common)
        finally:
            self.blind = blind

    @query
    def excited(self, parameters: Parameters) -> list[Annotated[Tensor, Shape(None, 2)]]:
        """Of every unit of the whole model, how much this client's data excite it and how often not at all (`activity`)."""
        whole = self.made(self.everything)
        whole.load_state_dict(parameters)
        rows = (
            self.client.to_device(self.client.train.rows(index)[0])
            for index in batches(len(self.client.train), 256)
        )
        self.work += len(self.client.train) / 3
        return [found.float() for found in measure_activity(whole, self.widths, rows)]

    def learn(self, *args: Any, **options: Any) -> float:
        """A submodel is done sooner, by its share of the full model's operations."""
        before = self.work
        loss = super().learn(*args, **options)
        self.acclimatise(self.model)
        self.work = before + (self.work - before) * self.share(self.memory["units"], "flops")
        return loss

    def acclimatise(self, model: nn.Module) -> None:
        """Batch norms with the statistics of the client's own data: those that are sent are of other units' inputs, and a few steps do
        not forget them."""
        rows = len(self.client.train)
        if rows > 1 and tracking_batch_norms(model.train()):  # one row has no spread
            some = batches(
                rows,
                self.training.batch_size,
                stream(self.seed, "statistics", self.client.id, self.round),
            )
            recompute_statistics(
                model, (self.client.to_device(self.sampled(index)[0]) for index in some)
            )
            self.work += rows / 3

    def load(self, parameters: Parameters) -> None:
        self.fit(count_units(parameters, self.widths, self.whole.state_dict()))
        super().load(parameters)

    def restore(self, state: State) -> None:
        self.fit(state["memory"]["units"])
        super().restore(state)


@dataclass
class SubmodelMethod(Averaging):
    """Each client gets the first units of every layer, as many as it can train; every entry is averaged over those who have it.

    Masked, models are blind to labels that their client has no sample of, unless the common test set is asked about, and rows of the last
    layer are averaged over clients that have their label: these tell the server which they have.
    """

    personalised: ClassVar[bool] = True
    Program: ClassVar[type[ClientProgram]] = SubmodelProgram

    budget: Literal["width", "memory", "flops"] = (
        "width"  # what of the full model a client's capacity is a share of
    )
    fixed: tuple[str, ...] = ()  # layers by name, such as encoder.first, that stay as they are
    masked: bool = (
        False  # where clients classify, what a model says of a label its client lacks is 0
    )

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired

    def privacy_problem(self) -> str | None:
        return (
            "masked, clients tell which labels they have, which nothing protects; set algorithm.masked to false"
            if (self.masked)
            else super().privacy_problem()
        )

    def keep(self, fed: Federation, client: str) -> list[Tensor]:
        """The units of each width that a client is sent this round."""
        return first_units(self.widths(fed, client), fed.state["ratio"][client])

    def build_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        sent = self.parameters_for(fed, {c: self.keep(fed, c) for c in clients})
        return {c: {"parameters": sent[c][0], "units": sent[c][1]} for c in clients}

    def parameters_for(
        self, fed: Federation, keep: dict[str, list[Tensor]]
    ) -> dict[str, tuple[Parameters, list[int]]]:
        """The submodel of each client, from the units it is to have, and how many these are."""
        return {
            c: (
                extract(self.model(fed, c), self.widths(fed, c), its),
                [len(units) for units in its],
            )
            for c, its in keep.items()
        }

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        where = next(iter(states.values()))  # a model that was read from disk lies elsewhere
        model = {
            name: tensor.to(where[name].device)
            for name, tensor in fed.state["models"][group].items()
        }
        self.ask(fed, list(states))
        carried = (
            (
                client,
                state,
                there
                | {
                    name: there[name] * have
                    for name, have in self.known(fed, client, model).items()
                },
            )
            for client, state, there in self.carried(fed, model, states)
        )
        fed.state["models"][group] = mean_of_held(model, carried, weights)

    def carried(
        self, fed: Federation, model: Parameters, states: dict[str, Parameters]
    ) -> Iterator[Carried]:
        """Uploads in the places of the server's units: here, those they came from."""
        none = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        for client, state in states.items():
            widths, keep = self.widths(fed, client), self.keep(fed, client)
            every = {name: torch.ones_like(tensor) for name, tensor in state.items()}
            yield client, expand(state, widths, keep, none), expand(every, widths, keep, none)

    def ask(self, fed: Federation, clients: list[str]) -> None:
        """Which labels these clients have, where it matters."""
        if self.masked:
            label_masks(fed, [c for c in clients if fed.infos[c].has("single_label")])

    def known(self, fed: Federation, client: str, state: Parameters) -> Parameters:
        """Of the last layer's tensors, 1 in the rows of labels that a client has and 0 in others; of a shape that goes with them."""
        if (have := fed.state.get("present", {}).get(client)) is None:
            return {}
        last = [name for name, tensor in state.items() if tensor.dim() > 1][-1].rpartition(".")[0]
        return {
            name: have.to(state[name]).view(-1, *[1] * (state[name].dim() - 1))
            for name in (f"{last}.weight", f"{last}.bias")
            if name in state and len(state[name]) == len(have)
        }

    def model(self, fed: Federation, client: str) -> Parameters:
        return fed.state["models"][fed.state["group"][client]]

    def widths(self, fed: Federation, client: str) -> list[ChannelGroup]:
        """Of the full model of a client's group."""
        return heard(fed.state["widths"][fed.state["group"][client]])

    def register_clients(self, fed: Federation) -> None:
        group, models, widths, ratio = (
            fed.state.setdefault(name, {}) for name in ("group", "models", "widths", "ratio")
        )
        if not (new := [c for c in (fed.active if group else fed.clients) if c not in group]):
            return
        for client, said in fed.call("shape", clients=new, quorum=0 if group else None).items():
            shape = self.group_key(fed, client, said["shape"])
            if shape not in models and (begun := fed.call("begin", clients=[client], quorum=0)):
                if not sound(said["shape"], **begun[client]):
                    fed.refuse(client, "begin", "its first weights are not as it told")
                    continue
                models[shape], widths[shape] = begun[client]["parameters"], begun[client]["widths"]
            if shape in models:
                group[client], ratio[client] = shape, said["ratio"]

    def excitement(self, fed: Federation, clients: list[str]) -> Replies:
        """What these clients' data do to the units of the whole model."""
        found = fed.call(
            "excited",
            clients=clients,
            per_client={c: {"parameters": self.model(fed, c)} for c in clients},
        )
        for client in [
            c
            for c in found
            if [len(each) for each in found[c]] != [width.units for width in self.widths(fed, c)]
        ]:
            fed.refuse(client, "excited", "it tells of other units than the model has")
            del found[client]
        return found

    def log_round(self, fed: Federation, replies: Replies) -> None:
        """Who has trained, and at what width each will next."""
        fed.state["trained"] = sorted({*fed.state.get("trained", []), *replies})
        fed.state["ratio"] |= {client: reply["ratio"] for client, reply in replies.items()}
        super().log_round(fed, replies)

    def evaluate(self, fed: Federation) -> Replies:
        """Each client's submodel as it trained it last, on its own test set; of who has not trained yet, the one it would be sent."""
        trained = set(fed.state.get("trained", []))
        new = [c for c in fed.clients if c in fed.state["group"] and c not in trained]
        old = fed.call("evaluate", clients=[c for c in fed.clients if c in trained], quorum=0)
        first = fed.call(
            "appraise", clients=new, quorum=0, per_client=self.build_messages(fed, new)
        )
        found = {**old, **first}
        return Replies(
            {c: found[c] for c in fed.infos if c in found}, {**old.failures, **first.failures}
        )

    def finish(self, fed: Federation) -> None:
        """Everyone keeps the submodel it trained; who never did is given one."""
        there = [
            c
            for c in fed.clients
            if c in fed.state["group"] and c not in fed.state.get("trained", [])
        ]
        fed.call("receive", clients=there, quorum=0, per_client=self.build_messages(fed, there))


def mean_of_held(
    model: Parameters, carried: Iterable[Carried], weights: dict[str, float]
) -> Parameters:
    """Each entry's mean over those who have it; what nobody has stays."""
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in model.items()}
    held: dict[str, Any] = dict.fromkeys(model, 0)
    for client, state, there in carried:
        for name in model:
            total[name].addcmul_(state[name], there[name], value=weights[client])
            held[name] = held[name] + weights[client] * there[name]
    return {
        name: cast_like(
            torch.where(held[name] > 0, total[name] / held[name], tensor.double()), tensor
        )
        for name, tensor in model.items()
    }


def told(widths: Sequence[ChannelGroup]) -> list[WidthTold]:
    """Widths as they travel."""
    return [
        {
            "units": w.units,
            "places": [
                {"tensor": p.tensor, "axis": p.axis, "entries": p.entries, "made": p.is_output}
                for p in w.slices
            ],
        }
        for w in widths
    ]


def sound(shape: str, parameters: Parameters, widths: list[WidthTold]) -> bool:
    """Whether first weights have the shape that was told, and their widths are places in them."""
    return shape_hash(parameters) == shape and all(
        width["units"] > 0
        and place["tensor"] in parameters
        and 0 <= place["axis"] < (of := parameters[place["tensor"]]).dim()
        and len(place["entries"]) == width["units"]
        and place["entries"].numel()
        and 0
        <= int(place["entries"].min())
        <= int(place["entries"].max())
        < of.shape[place["axis"]]
        for width in widths
        for place in width["places"]
    )


def heard(said: Any) -> list[ChannelGroup]:
    return [
        ChannelGroup(
            w["units"],
            tuple(
                AxisSlice(p["tensor"], p["axis"], p["entries"].cpu(), p["made"])
                for p in w["places"]
            ),
        )
        for w in said
    ]
