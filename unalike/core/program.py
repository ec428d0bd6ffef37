"""The client half of a method: its model, its memory and the operations a server may request.

Method authors subclass `ClientProgram` as `Program` inside their `Algorithm`. Engines run it
through a `ClientRuntime` (runtime.py).
"""

import copy
import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict

import torch
from torch import Tensor, nn

from unalike.base.lockstep import ALONE, meet
from unalike.base.module_tree import parameters_of
from unalike.base.randomness import scope, stream
from unalike.core.client import Client
from unalike.core.operations import graph_safe, measurement, operation, query, sends
from unalike.core.safeguard import safeguard
from unalike.core.signatures import Shape
from unalike.core.stacking import Evaluation, LocalEpochs, Metering
from unalike.data.modalities import with_masks
from unalike.data.samples import Samples, nonfinite_problem
from unalike.models.flops import count_flops
from unalike.models.model import Model, find_trunk, width_of
from unalike.tasks.task import UNKNOWN, Task
from unalike.training.batching import batches
from unalike.training.cuda_graphs import GraphedStep
from unalike.training.loop import (
    OPTIMIZERS,
    Training,
    accumulate_gradients,
    build_optimizer,
    copy_optimizer,
    set_learning_rate,
    train,
)
from unalike.training.precision import Precision, loss_scaler, precision_scope

if TYPE_CHECKING:
    from unalike.core.algorithm import Algorithm

State = dict[str, Any]
Loss = Callable[[Tensor | dict, Tensor], Tensor]  # loss(x, y) of a batch, a scalar


class Embedding(TypedDict):
    """Features of all training samples of a client, and their labels."""

    features: Annotated[Tensor, Shape("samples", None)]
    y: Annotated[Tensor, Shape("samples", whole=True)]


class ModelDescription(TypedDict):
    """Numbers of parameters, floating-point operations of a forward pass, hash of all weights."""

    parameters: int
    flops: int
    trainable: int
    hash: str


class SafeguardReply(TypedDict):
    """Which model a client kept, and the cross-validated losses that decided."""

    kept: Literal["alone", "together"]
    log_loss: dict[str, float]


class ClientProgram:
    """The client half of a method.

    What must survive between calls is in `model`, `optimizers` and `memory`. Everything else is a
    cache that may be gone at the next call.

    Args:
        algorithm: the method with its fields.
        training: the budget.
        seed: of the run.

    Attributes:
        client: the client, with its data.
        model: its model, on its device.
        memory: what the method keeps between calls; plain values and tensors.
        round: the current round.
        work: samples trained on since the engine last read it. A forward pass counts a third.
        fold_replicas: with the safeguard, programs of this client without one fold of its labels.
        shares_features: whether a measurement may answer with features and labels, for the server
            to score. Between organisations it may not: clients score themselves.
    """

    shares_features: bool = True

    def __init__(self, client: Client, algorithm: "Algorithm", training: Training, seed: int):
        self.algorithm = algorithm
        self.training = training
        self.seed = seed
        encoder = client.encoder(seed).to(client.device, client.dtype)
        self.client = client.with_cached_features(find_trunk(encoder))
        with scope(seed, "build", client.id):
            self.model = self.build(encoder).to(client.device, client.dtype)
        if self.precision != "float32" and torch.device(client.device).type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.memory: State = {}
        self.round = 0
        self.work = 0.0
        self.fold_replicas: list[ClientProgram] = []
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        # Of stacks (core/stacking.py): found in the last training, until an operation changes it.
        self.known_kind: Any = None
        self._graphed_steps: dict[str, GraphedStep] = {}  # by the name of the loss
        self._all_inputs: dict[str, Tensor] | None = None
        # Never stepped, to be copied while the settings are these.
        self._fresh_optimizer: tuple[Training, torch.optim.Optimizer | None] = (training, None)

    # what a method may override

    def build(self, encoder: nn.Module) -> Model:
        """Build the whole model around the client's encoder; the default adds the task's head."""
        task = self.client.task
        task.check_encoder(encoder, self.client.info().modalities)
        return Model(encoder, nn.Identity(), self.head(self.encoder_width(encoder)), task.dense)

    @graph_safe
    def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        """What the method's local training minimises on a batch.

        Args:
            x: inputs, (n, ...), or by modality.
            y: labels; -1 where a client has none because its task is not learnt from labels.
        """
        return self.task_loss(x, y)

    @graph_safe
    def task_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        """What a client that trains alone minimises on a batch."""
        task = self.client.task
        if type(task).local_loss is Task.local_loss:
            return self.error(self.model(x), y)
        return task.local_loss(self.model, x, y, self.error)

    def error(self, output: Tensor, y: Tensor) -> Tensor:
        """The task's loss of a model's output, (n, ...), against labels."""
        return self.client.task.loss(output, y)

    def samples(self, part: str) -> Samples | None:
        """The client's "train", "test" or "common" samples as its model takes them, or None."""
        return getattr(self.client, part)

    def state(self) -> State | None:
        """What is saved between calls; None: nothing.

        A method may leave out what the server sends with every request.
        """
        return {
            "model": dict(self.model.state_dict()),
            "memory": self.memory,
            "optimizers": {name: _optimizer_state(o) for name, o in self.optimizers.items()},
        }

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        self.model.load_state_dict(state["model"], strict=False)  # `state` may leave out some
        self.memory = state["memory"]
        self.optimizers = {}
        for name, saved in state["optimizers"].items():
            optimizer = self.optimizer(name, rate=saved["rate"])
            optimizer.load_state_dict(
                {
                    "state": {int(index): entry for index, entry in saved["state"].items()},
                    "param_groups": optimizer.state_dict()["param_groups"],
                }
            )

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Load a whole model, e.g. one that was exported."""
        self.model.load_state_dict(parameters)

    # tools for methods

    def head(self, width: int) -> nn.Module:
        """A head for features of this width: a copy of the client's own, or the task's."""
        if self.client.head is not None:
            return copy.deepcopy(self.client.head)
        return self.client.task.head(width)

    def encoder_width(self, encoder: nn.Module) -> int:
        """The width of an encoder's features, from a forward pass over at most two samples."""
        rows = torch.arange(min(2, len(self.client.train)))
        return width_of(encoder, lambda: self.client.to_device(self.client.train.rows(rows)[0]))

    def example_input(self) -> Any:
        """One input of the client, (1, ...), before any cached features, on its device."""
        data = getattr(self.client.train, "raw", self.client.train)
        return self.client.to_device(data.rows(torch.arange(1))[0])

    def all_inputs(self) -> dict[str, Tensor]:
        """All training inputs by modality, with masks of present ones, on the client's device.

        Raises:
            ValueError: some are not finite.
        """
        if self._all_inputs is None:
            problem = nonfinite_problem(self.client.train)
            if problem is not None:
                raise ValueError(problem)
            x, _ = self.client.train.rows(torch.arange(len(self.client.train)))
            self._all_inputs = with_masks(self.client.to_device(x))
        return self._all_inputs

    def training_batch(self, index: Tensor) -> tuple[Any, Tensor]:
        """Training inputs and labels of these rows; labels are -1 where a task needs none."""
        data = self.samples("train")
        assert data is not None
        x, y = data.labelled_batch(index) if self.client.task.labelled else data.rows(index)
        return x, torch.full((len(index),), UNKNOWN) if y is None else y

    def optimizer(
        self, name: str = "task", rate: float | None = None, fresh: bool = False
    ) -> torch.optim.Optimizer:
        """The optimizer of this name, which is saved between calls, at the rate of this round.

        Args:
            rate: learning rate of a new one, before the schedule; default: that of the training
                settings.
            fresh: return a new optimizer that is not saved.
        """
        optimizer = None if fresh else self.optimizers.get(name)
        if optimizer is None:
            parameters = parameters_of(self.model).values()
            trainable = [p for p in parameters if p.requires_grad]
            settings, known = self._fresh_optimizer
            if rate is None and settings is self.training:
                optimizer = copy_optimizer(known, trainable)
            if optimizer is None:
                optimizer = build_optimizer(trainable, self.training, rate)
                if rate is None and self.training.optimizer in OPTIMIZERS:
                    self._fresh_optimizer = self.training, copy_optimizer(optimizer, trainable)
            if not fresh:
                self.optimizers[name] = optimizer
        set_learning_rate(optimizer, self.training, self.round)
        return optimizer

    def learn(
        self,
        epochs: range | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Loss | None = None,
    ) -> float:
        """Train this round's local epochs on the client's data.

        Rows come in the same order whatever the method: it depends on seed, client and round.

        Args:
            epochs: which of the round's epochs; default: all.
            optimizer: default: the saved one.
            loss: default: the method's `loss`.

        Returns: the mean loss.
        """
        data = self.samples("train")
        assert data is not None
        epochs = epochs or range(self.training.epochs)
        names = [(self.client.id, self.round, epoch) for epoch in epochs]

        def orders() -> list[torch.Generator]:
            return [stream(self.seed, "order", *name) for name in names]

        self.work += len(data) * len(names)
        optimizer = optimizer or self.optimizer()
        loss = loss or self.loss

        # Clients of one kind that train at the same time train as a stack.
        mean_loss = meet(LocalEpochs(self, optimizer, loss, orders))
        if mean_loss is not ALONE:
            return mean_loss
        scaler = loss_scaler(self.precision, self.client.device)
        step = self.gradient_step(loss, scaler)

        def gradient(index: Tensor) -> Tensor:
            x, y = self.training_batch(index)
            return step(self.client.to_device(x), self.client.to_device(y))

        batch_size = self.training.batch_size
        accumulate = self.training.accumulate
        data.read_ahead(coming_batches(len(data), orders, batch_size, accumulate))
        if accumulate > 1:
            gradient = partial(accumulate_gradients, self.model, gradient, batch_size)
        return train(
            self.model,
            len(data),
            gradient,
            optimizer,
            orders(),
            batch_size * accumulate,
            self.training.max_grad_norm,
            scaler,
        )

    @property
    def precision(self) -> Precision:
        """Of forward and backward passes; that of the training settings is for float32 clients."""
        return self.training.precision if self.client.dtype == torch.float32 else "float32"

    def gradient_step(
        self, loss: Callable[..., Tensor], scaler: torch.amp.GradScaler | None = None
    ) -> Callable[..., Tensor]:
        """A function that computes a loss and leaves its gradient in the parameters' `.grad`.

        It takes the arguments of `loss` and returns its value, detached. On a GPU the forward and
        backward pass of a loss marked `@graph_safe` are captured in a CUDA graph.

        Args:
            scaler: the gradient is that of the loss times its scale, for float16.
        """
        name = getattr(loss, "__name__", "")
        on_gpu = torch.device(self.client.device).type == "cuda"
        capture = on_gpu and scaler is None and getattr(loss, "graph_safe", False)
        loss = self.in_precision(loss)
        if not capture:
            return partial(forward_backward, self.model, loss, scaler)
        step = self._graphed_steps.get(name)
        if step is None or step.model is not self.model:
            step = GraphedStep(self.model, loss)
            self._graphed_steps[name] = step
        step.refresh()
        return step

    def in_precision(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A loss that is computed in the precision of the training settings."""
        if self.precision == "float32":
            return loss

        def compute(*inputs: Any) -> Tensor:
            with precision_scope(self.precision, self.client.device):
                return loss(*inputs)

        return compute

    def measure(self, data: Samples) -> dict[str, float]:
        """Every metric of the model on these samples."""
        return measure(self.model, data, self.client, self.training.batch_size)

    @cached_property
    def axis_lengths(self) -> dict[str, int]:
        """Lengths of the axes that an operation may declare by name (`Shape`) in its arguments."""
        client = self.client
        public_rows = len(client.public) if client.public is not None else 0
        return {
            **self.algorithm.axis_lengths(),
            "samples": len(client.train),
            "labels": len(client.task.labels),
            "public_rows": public_rows,
        }

    def fresh_copy(self, client: Client | None = None) -> Self:
        """A new program with the initial weights, which come from the seed, and no memory.

        Args:
            client: train on the data of this one instead, e.g. the same without a fold.
        """
        return type(self)(client or self.client, self.algorithm, self.training, self.seed)

    def restart(self, client: Client) -> Self:
        """A new program that starts where this one started, to be trained alone.

        Args:
            client: this one, perhaps with other rows.
        """
        return self.fresh_copy(client)

    # operations that every client has

    @operation
    def train(self, epoch: int | None = None) -> float:
        """Train this round's local epochs, or one of them, on the task alone."""
        epochs = None if epoch is None else range(epoch, epoch + 1)
        return self.learn(epochs, loss=self.task_loss)

    @query
    @measurement
    def evaluate(self, common: bool = False) -> dict[str, float]:
        """Every metric of the model on the client's own test set, or on the common one."""
        return self.client.task.evaluate(self, common)

    @query
    @measurement
    def label_metrics(self, common: bool = False) -> dict[str, dict[str, float]]:
        """Metrics of each label on the test set, by label; empty where the task has none."""
        data = self.samples("common" if common else "test")
        if data is None or not len(data):
            return {}
        by_label = meter_outputs(self.model, data, self.client, self.training.batch_size).by_label()
        return dict(zip(self.client.task.labels, by_label))

    @query
    @measurement
    def embed(self) -> Embedding:
        """Features of all training samples, and their labels, -1 where unknown."""
        was_training = self.model.training
        with torch.no_grad():
            features = self.model.eval().features(self.all_inputs())
        self.model.train(was_training)
        return {"features": features, "y": self.training_batch(torch.arange(len(features)))[1]}

    @operation
    @measurement
    @sends()
    def grouped(self, centres: Tensor) -> None:
        """Keep cluster centres, (clusters, width): they are the head of the final model."""
        self.memory["centres"] = centres

    @query
    @measurement
    @sends(parameters="open", flops="open", trainable="open")
    def describe(self) -> ModelDescription:
        """Size, cost and hash of the model, for the results."""
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "flops": count_flops(self.model, self.example_input()),
            "trainable": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "hash": hash_model(self.model),
        }

    @operation
    @measurement
    @sends()
    def safeguard(self, rounds: list[int]) -> SafeguardReply:
        """Keep the federated model, or one trained alone in these rounds, by cross-validation."""
        decision = safeguard(self, rounds)
        self.load(decision.state)
        self.fold_replicas = []
        return {"kept": decision.name, "log_loss": decision.log_loss}


def coming_batches(
    rows: int, orders: Callable[[], list[torch.Generator]], batch_size: int, accumulate: int
) -> Iterator[Tensor]:
    """Row numbers that `train` will read, batch by batch."""
    for order in orders():
        for index in batches(rows, batch_size * accumulate, order):
            for part in batches(len(index), batch_size) if accumulate > 1 else [slice(None)]:
                yield index[part]


def forward_backward(
    model: nn.Module,
    loss: Callable[..., Tensor],
    scaler: torch.amp.GradScaler | None,
    *inputs: Any,
) -> Tensor:
    """Leave the gradient of `loss(*inputs)` in the parameters' `.grad`; return the loss."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    value = loss(*inputs)
    (value if scaler is None else scaler.scale(value)).backward()
    return value.detach()


def measure(model: nn.Module, data: Any, client: Client, batch: int) -> dict[str, float]:
    """Every metric of a model on these samples; undefined ones are left out."""
    metrics = meet(Evaluation(model, data, client, batch))
    return meter_outputs(model, data, client, batch).result() if metrics is ALONE else metrics


def meter_outputs(model: nn.Module, data: Any, client: Client, batch: int) -> Metering:
    """A meter with a model's outputs on these samples."""
    metering = Metering(client)
    was_training = model.training
    model.eval()
    data.read_ahead(batches(len(data), max(batch, 256)))
    with torch.no_grad():
        for index in batches(len(data), max(batch, 256)):
            x, y = data.rows(index)
            metering.add(model(client.to_device(x)), y)
    model.train(was_training)
    return metering


def hash_model(model: nn.Module) -> str:
    """Hash of every parameter and buffer with their names, 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        contiguous = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(contiguous.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """Learning rate before the schedule, and state by parameter index without empty entries."""
    state = {}
    for index, entry in optimizer.state_dict()["state"].items():
        state[str(index)] = {name: value for name, value in entry.items() if value is not None}
    group = optimizer.param_groups[0]
    return {"rate": group.get("initial_lr", group["lr"]), "state": state}
