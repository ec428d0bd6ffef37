"""The fields of a scenario file, with their types and defaults."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from unalike.base.errors import unknown_name
from unalike.base.settings import Settings
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.tracking import TRACKERS
from unalike.training.loop import Training

Count = Annotated[int, Field(ge=1)]
MAX_CLIENTS = 1_000_000  # in a group
Positive = Annotated[float, Field(gt=0)]
Nonnegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
NO_DATASET = "none"  # stands for the dataset where organisations bring their own clients


class Named(BaseModel):
    """A name, and options of the thing it names."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options, as they are in the file."""
        return dict(self.model_extra or {})


def _name_to_mapping(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _name_to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


EngineName = Annotated[Named, BeforeValidator(_name_to_mapping)]
Names = Annotated[list[str], Field(min_length=1), BeforeValidator(_name_to_list)]


def _check_names(names: list[str]) -> list[str]:
    for name in names:
        if name not in TRACKERS:
            raise ValueError(unknown_name("tracker", name, TRACKERS))
    return names


Trackers = Annotated[list[str], BeforeValidator(_name_to_list), AfterValidator(_check_names)]


class Data(Settings):
    """A dataset, and how its labelled rows are divided among clients."""

    name: str
    options: dict[str, Any] = {}  # of the dataset
    partition: Named = Named(name="iid")


class Public(Settings):
    """Unlabelled rows that all clients hold.

    They are taken from training rows before these are divided among clients.
    """

    size: Count
    # Another dataset than the clients', or several, with equally many rows of each.
    data: Names | None = None
    options: dict[str, Any] = {}  # of that dataset, if it is one


class Mix(Settings):
    """Ratio of a group's clients with all modalities, several but not all, and a single one.

    For example 1, 0, 1: half of the clients have all modalities, half have one.
    """

    full: Nonnegative = 0
    multi: Nonnegative = 0
    single: Nonnegative = 0


class Group(Settings):
    """One client, or `count` clients with the same settings."""

    id: str
    count: Annotated[Count, Field(le=MAX_CLIENTS)] = 1
    model: Named
    target: str | None = None  # which target of the dataset; required if it has several
    task: dict[str, Any] = {}  # options of the task, e.g. its loss
    data: Data | None = None  # None: the scenario's dataset
    modalities: Annotated[list[str], Field(min_length=1)] | None = None  # None: all
    mix: Mix | None = None  # instead of `modalities`: drawn for each client of the group
    # Share of the modalities that are missing, sample by sample; every sample keeps one.
    missing: Share = 0
    # Share of the labels in its training rows that are hidden (multi-label tasks only).
    masked: Share = 0
    # What hidden labels become: unknown, or absent (so that present ones are wrong).
    masked_as: Literal["unknown", "absent"] = "unknown"
    train: Count | None = None  # most training rows a client gets
    test: Count | None = None  # most test rows
    capacity: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the full model it can train
    speed: Positive = 1000.0  # samples per second
    link: Positive = 1e7  # bytes per second
    latency: Nonnegative = 0.01  # seconds

    @property
    def ids(self) -> list[str]:
        """Ids of its clients: "a", or "a-0", "a-1", ... where there are several."""
        return group_ids(self.id, self.count)


def group_ids(id: str, count: int) -> list[str]:
    """Ids of a group of `count` clients."""
    return [f"{id}-{i}" for i in range(count)] if count > 1 else [id]


def client_ids(config: dict[str, Any]) -> list[str]:
    """Ids of all clients of a scenario that was written down, in its order."""
    ids: list[str] = []
    for group in config.get("clients") or []:
        ids += group_ids(group["id"], group.get("count", 1))
    return ids


class Scenario(Settings):
    """The clients of a federation, their data and models, the method and its budget."""

    name: str
    summary: str = ""
    algorithm: Named
    training: Training = Training()
    federation: FederationConfig = FederationConfig()
    data: Data
    public: Public | None = None
    clients: list[Group]
    # Build each client when it first takes part: for very many, of whom few take part.
    lazy: bool = False
    # A model of the server's own that learns from the public set, for methods that use one.
    server: Group | None = None
    test: Literal["own", "common"] = "own"  # common: one test set for all clients, too
    safeguard: bool = False
    privacy: Privacy | None = None
    alone: bool = True  # also train each client alone, as the local baseline
    # All rows at a single client, which no federation could do: an upper bound.
    pooled: bool = False
    seed: int = 0
    engine: EngineName = Named(name="local")
    replay: str | None = None  # a run of an asynchronous method whose order of arrivals is kept
    workers: Annotated[int, Field(ge=0)] = 0  # short for engine.workers
    threads: Count = 1  # of this process; small models run fastest with one
    device: str = "cpu"
    data_dir: str | None = None  # folder of the datasets; the command line's goes first
    dtype: Literal["float32", "float64"] = "float32"
    checkpoint: Count = 1  # rounds between checkpoints
    track: Trackers = []  # tensorboard, mlflow, wandb, trackio: a name or several
    modules: list[str] = []  # folders where modules of your own (module:name) are
