"""One participant: its model, task, data and device. Knows nothing of methods or engines, and never leaves its machine."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unalike.base.errors import UserError
from unalike.base.randomness import scope
from unalike.core.privacy import Privacy
from unalike.data.device_cache import cache_on_device
from unalike.data.modalities import MARK, modalities, with_masks
from unalike.data.samples import (
    Inputs,
    Samples,
    Tensors,
    as_samples,
    fingerprint,
    nonfinite_problem,
    resize,
)
from unalike.tasks import TASKS, Task

LIMITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "capacity": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "speed": ("above 0", lambda value: value > 0),
    "link": ("above 0", lambda value: value > 0),
    "latency": ("at least 0", lambda value: value >= 0),
}
# What a client's constructor takes for its data, and turns into Samples.
Data = Samples | Dataset | tuple[Inputs, Tensor | None]
VERSION = 3  # of the protocol between server and client; a client of another version is refused


@dataclass(frozen=True)
class ClientInfo:
    """What a client tells at the door, and all the server knows of it."""

    id: str
    model: str
    task: str
    metric: str
    labels: tuple[str, ...]
    samples: int
    modalities: tuple[str, ...] = ("x",)
    capacity: float = 1.0  # share of the full model it can hold
    speed: float = 1000.0  # samples a second in training, for the virtual clock
    link: float = 1e7  # bytes a second, each way
    latency: float = 0.01  # seconds, each way
    public: str | None = None  # fingerprint of the public set it holds
    public_rows: int = 0
    public_shape: str = (
        ""  # of one row: sets of different kind (images, their captions) cannot be compared
    )
    tested_on: str = "own"  # "common" where the scenario has a test set for everyone
    traits: tuple[str, ...] = ("labelled",)  # of its task, see `unalike.tasks.task.TRAITS`
    higher_is_better: bool = True  # of its metric
    unit: str = "%"  # of its metric
    version: int = VERSION

    def has(self, trait: str) -> bool:
        """Whether the client's task has a trait, e.g. "labelled" or "multilabel"."""
        return trait in self.traits

    def as_dict(self) -> dict:
        return {
            key: list(item) if isinstance(item, tuple) else item
            for key, item in asdict(self).items()
        }


@dataclass
class Client:
    """A participant.

    `model` is the encoder, input -> (n, width): a module, or a function that makes one (then its first weights come from
    the run's named streams). A method adds heads, projections, adapters.
    `train` and `test` are (x, y) tensors, torch datasets or Samples; (x, None) where the task needs no labels. `public` is the unlabelled
    set all clients hold, row by row the same; `common` a test set shared by everyone, if there is one.
    """

    id: str
    model: nn.Module | Callable[[], nn.Module]
    task: Task
    train: Samples
    test: Samples | None = None
    public: Samples | None = None
    common: Samples | None = None
    head: nn.Module | None = None  # instead of the task's own head
    model_name: str | None = None
    capacity: float = 1.0
    speed: float = 1000.0
    link: float = 1e7
    latency: float = 0.01
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    privacy: Privacy | None = None  # the least it asks for: it takes part in no run with less

    if TYPE_CHECKING:
        # For type checkers: `__post_init__` turns data of several kinds into Samples.
        def __init__(
            self,
            id: str,
            model: nn.Module | Callable[[], nn.Module],
            task: Task,
            train: Data,
            test: Data | None = None,
            public: Data | Inputs | None = None,
            common: Data | None = None,
            head: nn.Module | None = None,
            model_name: str | None = None,
            capacity: float = 1.0,
            speed: float = 1000.0,
            link: float = 1e7,
            latency: float = 0.01,
            device: str = "cpu",
            dtype: torch.dtype = torch.float32,
            privacy: Privacy | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise UserError(f"a client's id is a word, got {self.id!r}")
        if not isinstance(self.task, Task):
            raise UserError(
                f"client {self.id}: task must be a Task, e.g. Classification(10), got {self.task!r}; "
                f"there are {', '.join(sorted(TASKS))}"
            )
        if not callable(self.model):
            raise UserError(
                f"client {self.id}: model must be an nn.Module, or a function that makes one, got {self.model!r}"
            )
        for name, (allowed, fits) in LIMITS.items():
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, Real)
                or not (math.isfinite(value) and fits(value))
            ):
                raise UserError(
                    f"client {self.id}: {name} must be a number {allowed}, got {value!r}"
                )
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise UserError(
                f"client {self.id}: dtype must be torch.float32 or another of real numbers, got {self.dtype!r}"
            )
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError):
            raise UserError(
                f"client {self.id}: there is no device {self.device!r}; cpu, cuda and cuda:1 are some"
            ) from None
        for name in ("train", "test", "common", "public"):
            try:
                self._take(name)
            except ValueError as error:
                raise UserError(f"client {self.id}, {name}: {error}") from None

    def _take(self, name: str) -> None:
        """What was given under that name, as Samples; labels in memory must fit the task. What is Samples already was looked at."""
        given = getattr(self, name)
        if given is None and name != "train":
            return
        data = unlabelled(given) if name == "public" else as_samples(given)
        if not len(data):
            raise UserError("there are no rows")
        if data is not given and isinstance(data, Tensors) and name != "public":
            if data.y is not None:
                self.task.check(data.y[data.index.to(data.y.device)])
            elif self.task.labelled:
                raise UserError("there are no labels: give (x, y)")
        setattr(self, name, data)

    def encoder(self, seed: int) -> nn.Module:
        """A fresh encoder on the CPU; a module that was given is copied, so that runs do not change it."""
        with scope(seed, "encoder", self.id):
            return _clone(self.model) if isinstance(self.model, nn.Module) else self.model()

    @cached_property
    def present(self) -> Tensor:
        """(labels,): True for those that it has a training sample of, where a sample has one."""
        raw, labels = getattr(self.train, "raw", self.train), torch.arange(len(self.task.labels))
        parts = [
            torch.isin(labels, raw.labelled_batch(rows)[1].cpu())
            for rows in torch.arange(len(raw)).split(1024)
        ]
        return torch.stack(parts).any(0)

    def modality_rows(self) -> dict[str, Tensor] | None:
        """Return training inputs by modality, only of the samples that have it.

        None if the data are not in memory: reading them all could take long.
        """
        if not isinstance(self.train, Tensors):
            return None
        x = with_masks(self.train.rows(torch.arange(len(self.train)))[0])
        return {name: rows[x[name + MARK] > 0] for name, rows in modalities(x).items()}

    def with_cached_features(self, trunk: Callable[[Any], Any] | None) -> "Client":
        """This client with its rows on its device, and, where its encoder has a fixed trunk, as that sees them: once, not at each step."""

        def seen(bring: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
            if trunk is None:
                return None

            def look(x: Any) -> Any:
                with torch.no_grad():
                    return trunk(bring(x))

            return look

        kept: dict[str, Any] = {
            name: cache_on_device(getattr(self, name), self.device, seen(self.to_device))
            for name in ("train", "test", "common")
        }
        kept["public"] = cache_on_device(self.public, self.device, seen(self.public_to_device))
        return (
            replace(self, **kept)
            if any(kept[name] is not getattr(self, name) for name in kept)
            else self
        )

    def info(self) -> ClientInfo:
        named, public = self.model_name or self._model_name(), self.public
        try:
            shape = self.train.shape
            shown = (
                (fingerprint(public), len(public), str(public.shape))
                if public is not None
                else (None, 0, "")
            )
        except Exception as error:  # what a dataset may raise is open
            raise UserError(
                f"client {self.id}: its data cannot be read ({type(error).__name__}: {error})"
            ) from error
        return ClientInfo(
            id=self.id,
            model=named,
            task=self.task.name,
            metric=self.task.metric,
            labels=self.task.labels,
            traits=self.task.traits(),
            higher_is_better=self.task.higher_is_better,
            unit=self.task.unit,
            samples=len(self.train),
            capacity=self.capacity,
            modalities=tuple(name for name in shape if not name.endswith(MARK))
            if isinstance(shape, dict)
            else ("x",),
            speed=self.speed,
            link=self.link,
            latency=self.latency,
            public=shown[0],
            public_rows=shown[1],
            public_shape=shown[2],
            tested_on="common" if self.common is not None else "own",
        )

    def _model_name(self) -> str:
        """The class of the module, or the name of the function that makes it."""
        if isinstance(self.model, nn.Module):
            return type(self.model).__name__
        return factory_name(self.model) or type(self.encoder(0)).__name__

    @overload
    def to_device(self, value: Tensor) -> Tensor: ...

    @overload
    def to_device(self, value: dict) -> dict: ...

    @overload
    def to_device(self, value: None) -> None: ...

    def to_device(self, value: Tensor | dict | None) -> Tensor | dict | None:
        """A batch on the client's device: floating inputs in its dtype, images kept as bytes as brightness from 0 to 1."""
        if isinstance(value, dict):
            return {key: self.to_device(item) for key, item in value.items()}
        if value is not None and value.dtype == torch.uint8:
            return value.to(self.device, non_blocking=True).to(self.dtype) / 255
        if value is None or not value.is_floating_point():
            return value if value is None else value.to(self.device, non_blocking=True)
        return value.to(self.device, self.dtype, non_blocking=True)

    def public_to_device(self, value: Any) -> Any:
        """The same for public rows: no side of a picture is longer than its own pictures'. It cannot use what larger ones show more."""
        if isinstance(value, dict):
            return {key: self._shrunk(item, key) for key, item in value.items()}
        return self._shrunk(value)

    def _shrunk(self, value: Tensor, key: str = "") -> Tensor:
        own = (
            self.train.shape.get(key, ())
            if isinstance(self.train.shape, dict)
            else self.train.shape
        )
        if value.dim() == 4 and len(own) == 3 and value.shape[1] == own[0]:
            value = resize(
                value, [min(programs) for programs in zip(value.shape[2:], own[1:], strict=True)]
            )
        return self.to_device(value)


def unlabelled(given: Any) -> Samples:
    """A public set: inputs as a tensor, or by modality, or whatever else holds data. What is in memory is looked at."""
    data = as_samples((given, None) if isinstance(given, Tensor | dict) else given)
    if (
        data is not given
        and isinstance(data, Tensors)
        and (wrong := nonfinite_problem(data)) is not None
    ):
        raise UserError(f"in the public set {wrong}")
    return data


def factory_name(factory: Callable[[], nn.Module]) -> str | None:
    """The name of a function that makes models; None for a lambda, which has none."""
    function = factory.func if isinstance(factory, partial) else factory
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else None


def _clone(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)
