"""What a method is: the server's program and the client's half, in one class. Knows nothing of engines."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypedDict

import torch
from torch import Tensor, nn

from unalike.base.randomness import scope, stream
from unalike.core.client import Client
from unalike.core.evaluation import score_federation, scored_at_server
from unalike.core.operations import graph_safe, measurement, operation, query, sends
from unalike.core.privacy import protects
from unalike.core.safeguard import FOR_WHOM, Decision, safeguard
from unalike.core.signatures import Shape
from unalike.data.modalities import with_masks
from unalike.data.samples import Samples, nonfinite_problem
from unalike.models.flops import count_flops
from unalike.models.model import Model, find_trunk, width_of
from unalike.tasks.task import UNKNOWN, Task
from unalike.training.batching import batches
from unalike.training.cuda_graphs import GraphedStep
from unalike.training.loop import Training, build_optimizer, train

if TYPE_CHECKING:
    from unalike.core.federation import Federation, Replies

State = dict[str, Any]


class Embedded(TypedDict):
    """Features of a client's samples, and their labels."""

    features: Annotated[Tensor, Shape("samples", None)]
    y: Annotated[Tensor, Shape("samples", whole=True)]


class Described(TypedDict):
    """A model, for the results."""

    parameters: int
    flops: int
    trainable: int
    hash: str


class Safeguarded(TypedDict):
    """What a client kept, and why."""

    kept: Literal["alone", "together"]
    log_loss: dict[str, float]


class ClientProgram:
    """The client's half of a method: its model, what it remembers between calls, and the operations the server may call.

    Whatever must survive is in `model`, `optimizers` and `memory`; everything else is a cache that may be gone at the next call.
    """

    def __init__(self, client: Client, algorithm: "Algorithm", training: Training, seed: int):
        self.algorithm, self.training, self.seed = algorithm, training, seed
        encoder = client.encoder(seed).to(client.device, client.dtype)
        self.client = client.with_cached_features(find_trunk(encoder))
        with scope(seed, "build", client.id):
            self.model = self.build(encoder).to(client.device, client.dtype)
        self.memory: State = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        # With the safeguard: programs of this client without one fold of its labels each.
        self.fold_replicas: list[ClientProgram] = []
        self.tapes: dict[str, GraphedStep] = {}
        self.round = 0
        # Samples trained on since the engine last took the number (a forward pass counts a third).
        self.work = 0.0

    # what a method may change

    def build(self, encoder: nn.Module) -> Model:
        """The whole model around the scenario's encoder; the default adds the task's head."""
        task = self.client.task
        task.check_encoder(encoder, self.client.info().modalities)
        return Model(encoder, nn.Identity(), self.head(self.encoder_width(encoder)), task.dense)

    @graph_safe
    def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        """What the method's local training minimises on a batch; y is -1 where a client that clusters has no labels."""
        return self.task_loss(x, y)

    @graph_safe
    def task_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        """What a client alone would minimise on a batch."""
        return self.client.task.local_loss(self.model, x, y, self.error)

    def error(self, output: Tensor, y: Tensor) -> Tensor:
        """How far what a model says is from the labels."""
        return self.client.task.loss(output, y)

    def held(self, part: str) -> Samples | None:
        """Its `train`, `test` or `common` samples, as its model takes them; None where there are none."""
        return getattr(self.client, part)

    # what it has to build with

    def head(self, width: int) -> nn.Module:
        import copy

        return (
            copy.deepcopy(self.client.head)
            if self.client.head is not None
            else self.client.task.head(width)
        )

    def row(self) -> Any:
        """One sample of the client's, as it came."""
        return self.client.to_device(
            getattr(self.client.train, "raw", self.client.train).rows(torch.arange(1))[0]
        )

    def encoder_width(self, encoder: nn.Module) -> int:
        few = torch.arange(min(2, len(self.client.train)))
        return width_of(encoder, lambda: self.client.to_device(self.client.train.rows(few)[0]))

    def optimizer(
        self, name: str = "task", rate: float | None = None, fresh: bool = False
    ) -> torch.optim.Optimizer:
        """The optimizer of that name, kept from call to call; or a fresh one that nobody keeps."""
        if fresh or name not in self.optimizers:
            made = build_optimizer(
                [p for p in self.model.parameters() if p.requires_grad], self.training, rate
            )
            if fresh:
                return made
            self.optimizers[name] = made
        return self.optimizers[name]

    def learn(
        self,
        epochs: range | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[[Tensor | dict, Tensor], Tensor] | None = None,
    ) -> float:
        """Local epochs of this round on the client's labelled data; the same rows in the same order whatever the method."""
        data, loss = self.held("train"), loss or self.loss
        assert data is not None
        orders = [
            stream(self.seed, "order", self.client.id, self.round, e)
            for e in epochs or range(self.training.epochs)
        ]
        self.work += len(data) * len(orders)
        tape = self.tape(loss)

        def on(index: Tensor) -> Tensor:
            x, y = self.sampled(index)
            return tape(self.client.to_device(x), self.client.to_device(y))

        return train(
            self.model,
            len(data),
            on,
            optimizer or self.optimizer(),
            orders,
            self.training.batch_size,
            self.training.max_grad_norm,
        )

    def sampled(self, index: Tensor) -> tuple[Any, Tensor]:
        """These rows of the client's data; labels that nothing is learnt from need not be there, and are -1 then."""
        data = self.held("train")
        assert data is not None
        x, y = data.labelled_batch(index) if self.client.task.labelled else data.rows(index)
        return x, torch.full((len(index),), UNKNOWN) if y is None else y

    def tape(self, loss: Callable[[Tensor | dict, Tensor], Tensor]) -> GraphedStep:
        """The gradient of a loss; on a GPU one that is `graph_safe` keeps its tape, so that what it recorded is played again."""
        if (
            not getattr(loss, "graph_safe", False)
            or torch.device(self.client.device).type != "cuda"
        ):
            return GraphedStep(self.model, loss, enabled=False)
        name = loss.__name__
        if name not in self.tapes or self.tapes[name].model is not self.model:
            self.tapes[name] = GraphedStep(self.model, loss)
        self.tapes[name].refresh()
        return self.tapes[name]

    def rows(self) -> dict[str, Tensor]:
        """All inputs of the client where it computes, by modality, marked; for methods that take them at once."""
        if not hasattr(self, "placed"):
            if (wrong := nonfinite_problem(self.client.train)) is not None:
                raise ValueError(wrong)
            self.placed = with_masks(
                self.client.to_device(
                    self.client.train.rows(torch.arange(len(self.client.train)))[0]
                )
            )
        return self.placed

    # what every client can do

    @operation
    def train(self, epoch: int | None = None) -> float:
        """The round's local epochs on the task alone, or one of them."""
        return self.learn(None if epoch is None else range(epoch, epoch + 1), loss=self.task_loss)

    @query
    @measurement
    def evaluate(self, common: bool = False) -> dict[str, float]:
        """Every metric of the model, as its task defines: on the client's own test set, or on the common one."""
        return self.client.task.evaluate(self, common)

    def measure(self, data: Samples) -> dict[str, float]:
        """Every metric of the model on these samples."""
        return measure(self.model, data, self.client, self.training.batch_size)

    @query
    @measurement
    def embed(self) -> Embedded:
        """Features of all samples the client holds, and their labels, -1 where unknown."""
        was = self.model.training
        with torch.no_grad():
            features = self.model.eval().features(self.rows())
        self.model.train(was)
        return {"features": features, "y": self.sampled(torch.arange(len(features)))[1]}

    @operation
    @measurement
    @sends()
    def grouped(self, centres: Tensor) -> None:
        """Keep the centres that its groups were scored by: the head of the model that it takes home."""
        self.memory["centres"] = centres

    @query
    @measurement
    @sends(parameters="open", flops="open", trainable="open")
    def describe(self) -> Described:
        """Size, hash and cost (floating-point operations to look at one sample) of the model, for the results."""
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "flops": count_flops(self.model, self.row()),
            "trainable": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "hash": digest(self.model),
        }

    @operation
    @measurement
    @sends()
    def safeguard(self, rounds: list[int]) -> Safeguarded:
        """Keep the model that the client's own labelled data speak for: the one learnt together or one trained alone, in these rounds."""
        kept: Decision = safeguard(self, rounds)
        self.model.load_state_dict(kept.state)
        self.fold_replicas = []
        return Safeguarded(kept=kept.name, log_loss=kept.log_loss)

    # called by the runtime

    def fresh_copy(self, client: Client | None = None) -> Self:
        """A new program with the initial weights, which come from the seed, and no memory.

        Args:
            client: train on the data of this one instead, e.g. the same without a fold.
        """
        return type(self)(client or self.client, self.algorithm, self.training, self.seed)

    def state(self) -> State | None:
        """What must survive between calls, to be saved; None: nothing. A method may leave out
        what comes with every request."""
        return {
            "model": dict(self.model.state_dict()),
            "memory": self.memory,
            "optimizers": {name: _optimizer_state(o) for name, o in self.optimizers.items()},
        }

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Have the model that these are of, whole."""
        self.model.load_state_dict(parameters)

    def restore(self, state: State) -> None:
        """Take up a state that `state` returned."""
        # not strict: a method may leave out what comes with every request
        self.model.load_state_dict(state["model"], strict=False)
        self.memory = state["memory"]
        self.optimizers = {}
        for name, saved in state["optimizers"].items():
            optimizer = self.optimizer(name, rate=saved["rate"])
            optimizer.load_state_dict(
                {
                    "state": {int(k): v for k, v in saved["state"].items()},
                    "param_groups": optimizer.state_dict()["param_groups"],
                }
            )


@dataclass
class Algorithm:
    """A method. Its fields are the hyperparameters that are its own, their defaults the paper's."""

    personalised: ClassVar[bool] = (
        True  # clients end with models of their own, measured on their own test sets
    )
    supports_safeguard: ClassVar[bool] = (
        False  # the safeguard may judge it: nothing that comes down was made from the client's own labels
    )
    evaluates: ClassVar[bool] = False  # serve() itself says when to measure
    asynchronous: ClassVar[bool] = (
        False  # served by `drive`: there are visits to each client, no rounds of all
    )
    requires_identical_models: ClassVar[bool] = (
        False  # whole models of all clients are mixed: they must have the same parameters
    )
    needs_public: ClassVar[bool] = False  # clients must hold a public set
    # fields that had another name, for the error that names the new one
    RENAMED: ClassVar[dict[str, str]] = {}
    Program: ClassVar[type[ClientProgram]] = ClientProgram

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        for name in fields.keys() & cls.RENAMED.keys():
            raise TypeError(f'{cls.__name__}: "{name}" is called "{cls.RENAMED[name]}" now')
        return super().__new__(cls)

    def axis_lengths(self) -> dict[str, int]:
        """Fields that an operation may name as the length of an axis (`Shape`): the integers."""
        return {name: value for name, value in vars(self).items() if type(value) is int}

    @classmethod
    def for_engine(cls, fields: dict[str, Any], slow_messages: bool) -> dict[str, Any]:
        """Add defaults that suit the engine to the fields that a scenario gives this method.

        Args:
            fields: by name; what is given stays.
            slow_messages: whether a message takes seconds on the engine.
        """
        return fields

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        """Whether clients with this task can take part, judged by the task's traits.

        By default every task that is learnt from labels of single inputs.
        """
        return task.labelled and not task.paired

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        """What does not fit this federation: (field, sentence) for each problem."""
        return []

    def check_round(self, clients: int) -> list[tuple[str, str]]:
        """What does not fit rounds for which so many clients are drawn."""
        return []

    def client_problem(self, client: Client) -> str | None:
        """Why this client cannot take part, from a look at its data; None: it can."""
        return client.task.check_client(client)

    def unjudged(self) -> str | None:
        """Why the safeguard cannot judge it, None: it can."""
        return (
            None
            if self.supports_safeguard
            else f"{FOR_WHOM}; {type(self).__name__} is none of them"
        )

    def privacy_problem(self) -> str | None:
        """Why what its clients send cannot be protected (privacy.py), None: it can."""
        kinds = [getattr(getattr(self.Program, name), "sends", {}) for name in dir(self.Program)]
        if any(protects(each) for each in kinds):
            return None
        return f"{type(self).__name__} does not say how anything its clients send could be protected (@sends): leave privacy out"

    def serve(self, fed: "Federation") -> Iterator[int]:
        """The server's program. Yields after each round: there the run is saved, and from there it can go on."""
        raise NotImplementedError(f"{type(self).__name__} has no server program: write serve(fed)")
        yield

    def evaluate(self, fed: "Federation") -> "Replies":
        """Each client's metrics, by default of its own model on its own test set."""
        if scored_at_server(fed):
            features = fed.call("embed", clients=fed.clients, quorum=0)
            score_federation(fed, features, shared=False)
        return fed.call("evaluate", clients=fed.clients, quorum=0)

    def alone(self, fed: "Federation") -> None:
        """What must happen before everybody trains alone, so that they start where they start together."""

    def finish(self, fed: "Federation") -> None:
        """What is left to do after the last round, e.g. giving everyone the final model."""

    def figures(self, fed: "Federation", metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Figures of the whole federation from each client's metrics; by default the mean of each over those who have it, or, where all
        cluster, the scores of both protocols."""
        if "scores" in fed.state:
            return dict(fed.state["scores"])
        names = sorted({name for each in metrics.values() for name in each})
        return {
            name: fmean(each[name] for each in metrics.values() if name in each) for name in names
        }

    def server_results(
        self, fed: "Federation", metrics: dict[str, dict[str, float]]
    ) -> dict[str, Any] | None:
        """What the server's own model achieved, where there is one."""
        return None


def measure(model: nn.Module, data: Any, client: Client, batch: int) -> dict[str, float]:
    """All metrics of a model on some samples."""
    meter, was = client.task.meter(), model.training
    seat = (
        client.device if client.task.dense and torch.device(client.device).type == "cuda" else "cpu"
    )  # maps are large to bring over
    model.eval()
    with torch.no_grad():
        for index in batches(len(data), max(batch, 256)):
            x, y = data.rows(index)
            meter.add(model(client.to_device(x)).to(seat), y.to(seat))
    model.train(was)
    return {
        name: value for name, value in meter.result().items() if math.isfinite(value)
    }  # an undefined metric is left out


def digest(model: nn.Module) -> str:
    """Hash of every parameter and buffer, names included."""
    out = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        out.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        out.update(
            tensor.detach()
            .cpu()
            .clone(memory_format=torch.contiguous_format)
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    return out.hexdigest()[:32]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    state = {
        str(k): {n: v for n, v in entry.items() if v is not None}
        for k, entry in optimizer.state_dict()["state"].items()
    }
    return {"rate": optimizer.param_groups[0]["lr"], "state": state}
