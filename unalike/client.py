"""One participant: its model, task, data and device. Knows nothing of methods or engines, and never leaves its machine."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from unalike.data.samples import Samples, fingerprint, samples
from unalike.randomness import scope
from unalike.tasks import TASKS, Task

VERSION = 1     # of the protocol between server and client; a client of another version is refused


@dataclass(frozen=True)
class Card:
    """What a client tells at the door, and all the server knows of it."""

    id: str
    model: str
    task: str
    metric: str
    labels: tuple[str, ...]
    samples: int
    modalities: tuple[str, ...] = ("x",)
    capacity: float = 1.0           # share of the full model it can hold
    speed: float = 1000.0           # samples a second in training, for the virtual clock
    link: float = 1e7               # bytes a second, each way
    latency: float = 0.01           # seconds, each way
    public: str | None = None       # fingerprint of the public set it holds
    public_rows: int = 0
    public_shape: str = ""          # of one row: sets of different kind (images, their captions) cannot be compared
    tested_on: str = "own"          # "common" where the scenario has a test set for everyone
    version: int = VERSION

    def as_dict(self) -> dict:
        return {key: list(item) if isinstance(item, tuple) else item for key, item in asdict(self).items()}

    @classmethod
    def from_dict(cls, told: dict) -> "Card":
        fields: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in told.items()}
        return cls(**fields)


@dataclass
class Client:
    """A participant.

    `model` is the encoder, input -> (n, width): a module, or a function that makes one (then its first weights come from
    the run's named streams). A method adds heads, projections, adapters.
    `train` and `test` are (x, y) tensors, torch datasets or Samples; `public` the unlabelled set all clients hold, row by row
    the same; `common` a test set shared by everyone, if there is one.
    """

    id: str
    model: nn.Module | Callable[[], nn.Module]
    task: Task
    train: Samples
    test: Samples | None = None
    public: Samples | None = None
    common: Samples | None = None
    head: nn.Module | None = None          # instead of the task's own head
    model_name: str | None = None
    capacity: float = 1.0
    speed: float = 1000.0
    link: float = 1e7
    latency: float = 0.01
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task):
            raise ValueError(f"client {self.id}: task must be a Task, e.g. Classification(10), got {self.task!r}; "
                             f"there are {', '.join(sorted(TASKS))}")
        for name in ("train", "test", "public", "common"):
            if (given := getattr(self, name)) is not None:
                setattr(self, name, samples(given))
        if not len(self.train):
            raise ValueError(f"client {self.id}: its training set is empty")

    def encoder(self, seed: int) -> nn.Module:
        """A fresh encoder on the CPU; a module that was given is copied, so that runs do not change it."""
        with scope(seed, "encoder", self.id):
            return _clone(self.model) if isinstance(self.model, nn.Module) else self.model()

    def card(self) -> Card:
        named = self.model_name or type(self.model).__name__
        return Card(id=self.id, model=named, task=self.task.name, metric=self.task.metric, labels=self.task.labels,
                    samples=len(self.train), modalities=modalities(self.train), capacity=self.capacity, speed=self.speed,
                    link=self.link, latency=self.latency, public=fingerprint(self.public) if self.public is not None else None,
                    public_rows=len(self.public) if self.public is not None else 0,
                    public_shape=str(self.public.shape) if self.public is not None else "",
                    tested_on="common" if self.common is not None else "own")

    @overload
    def place(self, value: Tensor) -> Tensor: ...

    @overload
    def place(self, value: dict) -> dict: ...

    @overload
    def place(self, value: None) -> None: ...

    def place(self, value: Tensor | dict | None) -> Tensor | dict | None:
        """A batch on the client's device; floating inputs in its dtype."""
        if isinstance(value, dict):
            return {key: self.place(item) for key, item in value.items()}
        if value is None or not value.is_floating_point():
            return value if value is None else value.to(self.device, non_blocking=True)
        return value.to(self.device, self.dtype, non_blocking=True)


def modalities(data: Samples) -> tuple[str, ...]:
    x, _ = data.rows(torch.arange(1))
    return tuple(x) if isinstance(x, dict) else ("x",)


def _clone(module: nn.Module) -> nn.Module:
    import copy
    return copy.deepcopy(module)
