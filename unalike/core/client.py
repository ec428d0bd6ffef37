"""One participant: its model, task, data and device. It never leaves its machine.

Nothing here depends on methods or engines.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

import numpy as np
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
from unalike.models.frozen import exclude_frozen
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
    """What a client announces when it joins; the server knows nothing else of it.

    Args:
        id: name, unique in the federation.
        model: name of the encoder.
        task: name of the task.
        metric: name of the metric that gains are computed from.
        labels: names of the labels.
        samples: number of training samples.
        modalities: names of the inputs.
        capacity: share of the full model it can hold.
        speed: samples a second in training, for the simulated clock.
        link: bytes a second, each way.
        latency: seconds, each way.
        public: fingerprint of its public set; None without one.
        public_rows: number of rows of that set.
        public_shape: of one public row: sets of different kind (images, their captions) cannot be
            compared.
        tested_on: "own", or "common" where the scenario has a test set for everyone.
        traits: of its task, see `unalike.tasks.task.TRAITS`, and the task's variant if it has one.
        higher_is_better: of its metric.
        unit: of its metric.
        version: of the protocol.
    """

    id: str
    model: str
    task: str
    metric: str
    labels: tuple[str, ...]
    samples: int
    modalities: tuple[str, ...] = ("x",)
    capacity: float = 1.0
    speed: float = 1000.0
    link: float = 1e7
    latency: float = 0.01
    public: str | None = None
    public_rows: int = 0
    public_shape: str = ""
    tested_on: str = "own"
    traits: tuple[str, ...] = ("labelled",)
    higher_is_better: bool = True
    unit: str = "%"
    version: int = VERSION

    def has(self, trait: str) -> bool:
        """Whether the client's task has a trait, e.g. "labelled" or "multilabel"."""
        return trait in self.traits

    def as_dict(self) -> dict:
        """All fields by name, tuples as lists."""
        return {
            key: list(item) if isinstance(item, tuple) else item
            for key, item in asdict(self).items()
        }


@dataclass(frozen=True)
class HeldOut:
    """Training rows that the safeguard holds out of everything.

    Attributes:
        rows: the rows held out.
        everything: all training rows, with these.
    """

    rows: Samples
    everything: Samples


@dataclass
class Client:
    """A participant.

    Data are (x, y) tensors, torch datasets or `Samples`; (x, None) where the task needs no labels.

    Args:
        id: its name, unique in the federation.
        model: the encoder, from inputs to features (n, width): a module, which is copied, or a
            function that builds one, whose initial weights then depend on the run's seed. Methods
            add heads, projections and adapters.
        task: what it learns.
        train: training data.
        test: its own test data.
        public: unlabelled data that all clients have, row by row the same.
        common: test data that all clients share.
        head: replaces the task's own head, from features to the output.
        model_name: shown in tables; default: the name of the class or function.
        capacity: share of the full model that it can hold, in (0, 1].
        speed: samples per second in training, for simulated time.
        link: bytes per second, each way, for simulated time.
        latency: seconds, each way, for simulated time.
        device: e.g. "cpu" or "cuda:1".
        dtype: of its model and floating-point inputs.
        privacy: the least it demands: it joins no run with less.
        held_out: set by a run with the safeguard, never by a user.

    Raises:
        UserError: an argument does not fit.
    """

    id: str
    model: nn.Module | Callable[[], nn.Module]
    task: Task
    train: Samples
    test: Samples | None = None
    public: Samples | None = None
    common: Samples | None = None
    head: nn.Module | None = None
    model_name: str | None = None
    capacity: float = 1.0
    speed: float = 1000.0
    link: float = 1e7
    latency: float = 0.01
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    privacy: Privacy | None = None
    held_out: HeldOut | None = None

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
            held_out: HeldOut | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise UserError(f"a client's id is a word, got {self.id!r}")
        if not isinstance(self.task, Task):
            raise UserError(
                f"client {self.id}: task must be a Task, e.g. Classification(10), "
                f"got {self.task!r}; there are {', '.join(sorted(TASKS))}"
            )
        if not callable(self.model):
            raise UserError(
                f"client {self.id}: model must be an nn.Module, or a function that makes one, "
                f"got {self.model!r}"
            )
        self._check_numbers()
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise UserError(
                f"client {self.id}: dtype must be torch.float32 or another floating-point dtype, "
                f"got {self.dtype!r}"
            )
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError):
            raise UserError(
                f"client {self.id}: there is no device {self.device!r}; "
                "cpu, cuda and cuda:1 are valid names"
            ) from None
        for name in ("train", "test", "common", "public"):
            try:
                self._convert_data(name)
            except ValueError as error:
                raise UserError(f"client {self.id}, {name}: {error}") from None
        task = self.task.fit_to_labels(self._read_labels)
        if task is not self.task:
            object.__setattr__(task, "fitted_to_labels", True)
            self.task = task

    def _read_labels(self) -> Tensor:
        """All training labels, read in blocks of 1,024 rows."""
        blocks = torch.arange(len(self.train)).split(1024)
        return torch.cat([self.train.labelled_batch(rows)[1].cpu() for rows in blocks])

    def _check_numbers(self) -> None:
        for name, (allowed, is_allowed) in LIMITS.items():
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or not is_allowed(value):
                raise UserError(
                    f"client {self.id}: {name} must be a number {allowed}, got {value!r}"
                )

    def _convert_data(self, name: str) -> None:
        """Turn the data of a field into Samples whose labels fit the task.

        Labels in memory are checked now, those that are read on demand when they are read.
        """
        value = getattr(self, name)
        if value is None and name != "train":
            return
        if name == "public":
            data = as_public_samples(value, self.accepts_missing)
        else:
            data = as_samples(value)
        if not len(data):
            raise UserError("there are no rows")
        if isinstance(data, Tensors) and data.y is None and name != "public":
            y = self.task.derive_labels(data.x)
            data = data if y is None else Tensors(data.x, y, data.index)
        if name != "public":
            lacks_labels = isinstance(data, Tensors) and data.y is None
            if data is not value and lacks_labels and self.task.labelled:
                raise UserError("there are no labels: give (x, y)")
            data = data.checked_by(self.task.check)
        setattr(self, name, data)

    def accepts_missing(self) -> bool:
        """Whether its encoder takes NaN for a missing value, as that of tables does."""
        return getattr(self.encoder(0), "accepts_missing", False) is True

    def encoder(self, seed: int) -> nn.Module:
        """A fresh encoder on the CPU. A client's own module is copied: runs do not change it.

        What does not learn is left out of its `state_dict`: no method sends it.
        """
        with scope(seed, "encoder", self.id):
            if isinstance(self.model, nn.Module):
                encoder = copy.deepcopy(self.model)
            else:
                encoder = self.model()
        if isinstance(encoder, nn.Module):  # a function may return anything
            exclude_frozen(encoder)
        return encoder

    @cached_property
    def label_mask(self) -> Tensor:
        """Which labels occur in the training data, (labels,) bool; for tasks with one per sample.

        Rows that the safeguard holds out count, too: a model that is kept may have learnt from
        them. Labels are read in blocks of 1,024 rows.
        """
        train = self.train if self.held_out is None else self.held_out.everything
        raw = getattr(train, "raw", train)
        labels = torch.arange(len(self.task.labels))
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
        """This client with its data on its device, as far as `cache_on_device` moves them.

        Args:
            trunk: the frozen first part of its encoder, or None. Its features are computed once
                and take the place of the inputs, instead of once per step.
        """

        def featurize(to_device: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
            if trunk is None:
                return None

            def features(x: Any) -> Any:
                with torch.no_grad():
                    return trunk(to_device(x))

            return features

        cached: dict[str, Any] = {
            name: cache_on_device(getattr(self, name), self.device, featurize(self.to_device))
            for name in ("train", "test", "common")
        }
        public_features = featurize(self.public_to_device)
        cached["public"] = cache_on_device(self.public, self.device, public_features)
        if self.held_out is not None:
            rows = cache_on_device(self.held_out.rows, self.device, featurize(self.to_device))
            if rows is not None and rows is not self.held_out.rows:
                cached["held_out"] = replace(self.held_out, rows=rows)
        if all(cached[name] is getattr(self, name) for name in cached):
            return self
        return replace(self, **cached)

    def info(self) -> ClientInfo:
        """What this client announces.

        Raises:
            UserError: its data cannot be read.
        """
        model_name = self.model_name or self._model_name()
        public = self.public
        public_facts: dict[str, Any] = {}
        try:
            shape = self.train.shape
            if public is not None:
                public_facts = {
                    "public": fingerprint(public),
                    "public_rows": len(public),
                    "public_shape": str(public.shape),
                }
        except Exception as error:  # a user's dataset may raise anything
            raise UserError(
                f"client {self.id}: its data cannot be read ({type(error).__name__}: {error})"
            ) from error
        names = list(shape) if isinstance(shape, dict) else ["x"]
        return ClientInfo(
            id=self.id,
            model=model_name,
            task=self.task.name,
            metric=self.task.metric,
            labels=self.task.labels,
            traits=(*self.task.traits(), *filter(None, [self.task.variant])),
            higher_is_better=self.task.higher_is_better,
            unit=self.task.unit,
            samples=len(self.train),
            capacity=self.capacity,
            modalities=tuple(name for name in names if not name.endswith(MARK)),
            speed=self.speed,
            link=self.link,
            latency=self.latency,
            tested_on="common" if self.common is not None else "own",
            **public_facts,
        )

    def _model_name(self) -> str:
        """The class of the module, or the name of the function that builds it."""
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
        """A batch on the client's device.

        Floating-point inputs get the client's dtype, and bytes (images) too, scaled to [0, 1].
        """
        if value is None:
            return None
        if isinstance(value, dict):
            return {key: self.to_device(item) for key, item in value.items()}
        if value.dtype == torch.uint8:
            return value.to(self.device, non_blocking=True).to(self.dtype) / 255
        if not value.is_floating_point():
            return value.to(self.device, non_blocking=True)
        return value.to(self.device, self.dtype, non_blocking=True)

    def public_to_device(self, value: Any) -> Any:
        """A batch of public inputs on the client's device, for its model.

        Images are shrunk to the size of the client's own: its model cannot use a finer resolution.
        """
        if isinstance(value, dict):
            return {key: self._shrink_to_device(item, key) for key, item in value.items()}
        return self._shrink_to_device(value)

    def _shrink_to_device(self, value: Tensor, key: str = "") -> Tensor:
        shape = self.train.shape
        own = shape.get(key, ()) if isinstance(shape, dict) else shape
        if value.dim() == 4 and len(own) == 3 and value.shape[1] == own[0]:
            sides = zip(value.shape[2:], own[1:], strict=True)
            value = resize(value, [min(pair) for pair in sides])
        return self.to_device(value)


def as_public_samples(data: Any, accepts_missing: Callable[[], bool] = lambda: False) -> Samples:
    """Public data as Samples: from inputs as a tensor or by modality, or what `as_samples` takes.

    Args:
        accepts_missing: called where data hold NaN; True: they stand for missing values.

    Raises:
        UserError: data in memory hold NaN or infinity.
    """
    inputs_alone = isinstance(data, Tensor | np.ndarray | dict)
    samples = as_samples((data, None) if inputs_alone else data)
    if samples is not data and isinstance(samples, Tensors):
        problem = nonfinite_problem(samples)
        if problem is not None and not accepts_missing():
            raise UserError(f"in the public set {problem}")
    return samples


def factory_name(factory: Callable[[], nn.Module]) -> str | None:
    """The name of a function that builds models; None for a lambda, which has none.

    Of a partial function that gets a word first, the word is it: what to build, by name.

    >>> factory_name(partial(print, "vit", 3)), factory_name(partial(print, 3))
    ('vit', 'print')
    """
    function: Callable = factory
    if isinstance(factory, partial):
        function = factory.func
        first = factory.args[0] if factory.args else None
        if isinstance(first, str) and first.isidentifier():
            return first
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else None
