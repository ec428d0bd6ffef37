"""The base class of all tasks: labels, head, loss, metrics, and how a client's model is evaluated.

A new task is one file with a subclass of `Task` and one line in `unalike/tasks/__init__.py`.
Methods, runs and reports ask a task for its traits (`labelled`, `dense`, ...), never for its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

TRAITS = ("labelled", "classifies", "single_label", "multilabel", "dense", "paired", "headless")
UNKNOWN = -1  # a label that is not known; counts for nothing in losses and metrics
Labels = int | Sequence[str]  # names of labels, or their number
Inputs = Tensor | dict[str, Tensor]  # a dict holds modalities by name
LossFunction = Callable[[Tensor, Tensor], Tensor]  # loss(output, y) of a batch, a scalar
MetricFunction = Callable[[Tensor, Tensor], float]  # metric(output, y) of all test samples
LOWER_IS_BETTER = ("log_loss", "mae", "rmse", "perplexity")  # of the metrics that tasks have
WITHOUT_UNIT = (*LOWER_IS_BETTER, "r2")


class Meter(Protocol):
    """Accumulates metrics over batches: `add` for each batch, then `result`.

    Batches are on the CPU; those of dense tasks may be on the GPU.
    """

    def add(self, output: Tensor, y: Tensor) -> None: ...

    def result(self) -> dict[str, float]:
        """All metrics by name. Raises ValueError if no labelled sample was added."""
        ...


class ClientLike(Protocol):
    """The part of `unalike.core.client.Client` that a task looks at."""

    id: str
    task: "Task"
    train: Any

    def modality_rows(self) -> dict[str, Tensor] | None: ...


class ProgramLike(Protocol):
    """The part of `unalike.core.algorithm.ClientProgram` that a task uses."""

    model: Any
    memory: dict[str, Any]
    client: Any
    seed: int
    shares_features: bool

    def samples(self, part: str) -> Any: ...

    def measure(self, data: Any) -> dict[str, float]: ...

    def embed(self) -> Any: ...


class FederationLike(Protocol):
    """The part of `unalike.core.federation.Federation` that a task uses."""

    infos: Mapping[str, Any]
    algorithm: Any
    seed: int
    state: dict[str, Any]
    scratch: dict[str, Any]

    @property
    def clients(self) -> list[str]: ...

    def call(self, operation: str, **arguments: Any) -> Any: ...

    def log_figure(self, name: str, **material: Any) -> None: ...


@dataclass(frozen=True)
class Task:
    """What a client learns.

    Args:
        labels: names of the classes; an integer n stands for the names "0" to "n-1".
        criterion: a loss of your own, `criterion(output, y)` of a batch, instead of the task's.
        score: the metric that tables show and gains are computed from, if not the task's: the
            name of another of its metrics, such as "macro_f1", or a function `score(output, y)` of
            all test samples. Attributes `higher_is_better` (default True) and `unit` (default "")
            of the function say how to read it.

    The defaults below are those of a task that learns from labels. `loss` and `imitate` return a
    scalar and may run for many clients at once under `torch.func.vmap`.
    """

    labels: tuple[str, ...]
    criterion: LossFunction | None = field(default=None, kw_only=True)
    score: str | MetricFunction | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    metric: ClassVar[str]  # the metric that tables show and gains are computed from
    higher_is_better: ClassVar[bool] = True  # of `metric`
    unit: ClassVar[str] = "%"  # of `metric`; empty: that of the targets, or none
    # Metrics of all clients together that a report shows beside each client's own, by full name.
    federation_metrics: ClassVar[tuple[str, ...]] = ()

    # Traits, which decide which methods can serve the task.
    # Whether `fit_to_labels` took something from a client's labels; set by the client.
    fitted_to_labels = False
    labelled: ClassVar[bool] = True  # False: labels are used for scoring only, never for training
    classifies: ClassVar[bool] = False  # `labels` are classes, with a score each on output axis 1
    single_label: ClassVar[bool] = False  # a sample has exactly one class
    multilabel: ClassVar[bool] = False  # a sample has any number of classes
    dense: ClassVar[bool] = False  # the head takes a feature map, `dense_axes` axes beside width
    paired: ClassVar[bool] = False  # a sample is a pair, and the output one vector for each half
    headless: ClassVar[bool] = False  # the encoder itself gives the output; there is no head

    dense_axes: ClassVar[int] = 2  # of a dense task's map: 2 for (h, w), 1 for (steps,)
    # Fewest samples whose loss says something; more than 1 where samples are compared.
    rows_per_loss: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", label_names(self.labels))
        if callable(self.criterion):  # takes the place of the method
            object.__setattr__(self, "loss", self.criterion)
        if callable(self.score):
            name = getattr(self.score, "__name__", type(self.score).__name__)
            object.__setattr__(self, "metric", name)
            direction = getattr(self.score, "higher_is_better", True)
            object.__setattr__(self, "higher_is_better", direction)
            object.__setattr__(self, "unit", getattr(self.score, "unit", ""))
        elif self.score is not None and self.score != self.metric:
            object.__setattr__(self, "metric", self.score)
            object.__setattr__(self, "higher_is_better", self.score not in LOWER_IS_BETTER)
            object.__setattr__(self, "unit", "" if self.score in WITHOUT_UNIT else "%")

    @property
    def variant(self) -> str:
        """Set apart from other clients of this task whose outputs mean something else; or ""."""
        return ""

    @property
    def has_confidence(self) -> bool:
        """Whether larger outputs are surer ones, so that a common factor only changes that."""
        return self.classifies

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        """Return the names of the traits that this task has, as a client announces them."""
        return tuple(name for name in TRAITS if getattr(cls, name))

    @property
    def unknown_label(self) -> int:
        """The label of a sample, or pixel, that counts for nothing."""
        return UNKNOWN

    # Model and losses

    def head(self, width: int) -> nn.Module:
        """Build a head from features (B, width) to the output: two layers, as in FedMuscle."""
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, len(self.labels)))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of an output against labels; unknown labels count for nothing."""
        raise NotImplementedError

    def local_loss(
        self,
        model: nn.Module,
        x: Inputs,
        y: Tensor,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return what a client minimises on a batch when it trains alone.

        Args:
            model: from inputs to the task's output.
            x, y: a batch of inputs and labels.
            criterion: replaces `loss` where a method has its own variant of it.
        """
        return (criterion or self.loss)(model(x), y)

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        """Return the distillation loss of an output against a teacher's output of the same shape.

        Gradients flow into both; detach the teacher to keep it fixed.
        """
        raise NotImplementedError

    # What outputs and labels say; for tasks that classify

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of each class, in the shape of the output (B, classes, ...)."""
        raise NotImplementedError(f"{self.name} has no classes, so no probabilities of them")

    def label_matrix(self, y: Tensor) -> Tensor:
        """Return which classes occur in each sample, (n, classes) bool."""
        raise NotImplementedError(f"{self.name} has no classes, so no sample has any")

    def derive_labels(self, x: Inputs) -> Tensor | None:
        """Return labels of inputs that came without any, where they follow from these; or None.

        Raises: ValueError if the inputs do not fit the task.
        """
        return None

    # Checks, before a run

    def check(self, y: Tensor) -> None:
        """Raise ValueError if the labels do not fit the task."""
        raise NotImplementedError

    def check_encoder(self, encoder: nn.Module, modalities: Sequence[str]) -> None:
        """Raise ValueError if the task cannot be learnt with this encoder on these modalities."""

    def check_client(self, client: ClientLike) -> str | None:
        """Return why this client's data cannot be used for the task, or None."""
        return None

    @classmethod
    def check_clients(cls, clients: Sequence[ClientLike]) -> dict[str, str]:
        """Return, by client id, why clients of this task cannot learn it together."""
        return {}

    def unmeasured(self, y: Tensor) -> str | None:
        """Return why `metric` is undefined on samples with these labels, or None."""
        return None

    def fit_to_labels(self, read_labels: Callable[[], Tensor]) -> "Task":
        """Return this task with what it takes from a client's training labels, such as weights.

        Args:
            read_labels: returns all training labels; call it only where they are needed.
        """
        return self

    def advice(self, y: Tensor) -> str | None:
        """Return what would help to learn these training labels, in a sentence, or None."""
        return None

    # Evaluation

    def meter(self) -> Meter:
        """Return a new, empty meter."""
        raise NotImplementedError

    def full_meter(self) -> Meter:
        """Return a new meter that measures `score` too, if that is a function."""
        return ScoreMeter(self.meter(), self.score) if callable(self.score) else self.meter()

    def evaluate(self, program: ProgramLike, common: bool = False) -> dict[str, float]:
        """Return all metrics of a client's model; none if the client has no such test set.

        Args:
            program: the client, with its model and data.
            common: evaluate on the test set shared by all clients instead of the client's own.
        """
        data = program.samples("common" if common else "test")
        if data is None or not len(data):
            return {}
        return program.measure(data)

    def evaluation_reply(self, program: ProgramLike, common: bool = False) -> dict[str, Any]:
        """Return what a client sends when a model shared by the federation is evaluated.

        By default its metrics. A task that is scored over all clients sends what
        `score_federation` needs.
        """
        return self.evaluate(program, common)

    @classmethod
    def score_federation(
        cls, fed: FederationLike, replies: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        """Compute, at the server, metrics that need the replies of several clients.

        Args:
            fed: the federation; figures of all clients together go into `fed.state["scores"]`.
            replies: by client, `evaluation_reply` of the clients that have this task.
        Returns: metrics by client, in place of their replies; empty to keep these.
        """
        return {}

    @classmethod
    def finish(cls, fed: FederationLike) -> dict[str, Any] | None:
        """Called at the server after the last evaluation, e.g. to send clients what was found.

        Returns: entries of results.json beside those of every run, or None.
        """
        return None

    def deployable(
        self, program: ProgramLike, exported: Mapping[str, Tensor] | None = None
    ) -> nn.Module:
        """Return a client's model from input to the task's output, in eval mode, for its owner.

        Args:
            exported: parameters of an earlier export that the model is about to load.
        """
        return program.model.eval()


class ScoreMeter:
    """A task's meter, and a metric of the user's over all samples."""

    def __init__(self, meter: Meter, score: MetricFunction) -> None:
        self.meter = meter
        self.score = score
        self.outputs: list[Tensor] = []
        self.truth: list[Tensor] = []

    def add(self, output: Tensor, y: Tensor) -> None:
        self.meter.add(output, y)
        self.outputs.append(output.detach().cpu())
        self.truth.append(y.cpu())

    def result(self) -> dict[str, float]:
        name = getattr(self.score, "__name__", type(self.score).__name__)
        value = self.score(torch.cat(self.outputs), torch.cat(self.truth))
        return self.meter.result() | {name: float(value)}


def label_names(labels: int | Sequence[str]) -> tuple[str, ...]:
    """Return label names as a tuple; an integer n gives "0" to "n-1".

    >>> label_names(3)
    ('0', '1', '2')
    """
    if hasattr(labels, "tolist"):  # names in a NumPy array or a pandas index
        labels = labels.tolist()
    if isinstance(labels, int) and not isinstance(labels, bool):
        labels = tuple(str(label) for label in range(labels))
    if (
        not isinstance(labels, Sequence)
        or isinstance(labels, str)
        or not all(isinstance(label, str) for label in labels)
    ):
        raise ValueError(f"a task's labels are a list of names or their number, got {labels!r}")
    if not labels:
        raise ValueError("a task needs at least one label, got none")
    duplicates = sorted({label for label in labels if list(labels).count(label) > 1})
    if duplicates:
        raise ValueError(
            f"a task's labels must differ, got more than once: {', '.join(duplicates)}"
        )
    return tuple(str(label) for label in labels)  # NumPy's strings have another repr


def check_whole(y: Tensor, name: str, axes: tuple[str, ...]) -> None:
    """Raise ValueError unless `y` holds integers along these axes, e.g. ("n", "h", "w")."""
    if y.ndim != len(axes):
        raise ValueError(
            f"{name} labels have {len(axes)} axes ({', '.join(axes)}), got shape {tuple(y.shape)}"
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"{name} labels are whole numbers (torch.int64), got {y.dtype}")
