"""What a scenario file may say. Knows names and types; neither reads nor builds."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from unalike.base.settings import Settings
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.training.loop import Training

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Named(BaseModel):
    """A name and the options of the thing it names."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


EngineName = Annotated[
    Named, BeforeValidator(lambda told: {"name": told} if isinstance(told, str) else told)
]
Names = Annotated[
    list[str],
    Field(min_length=1),
    BeforeValidator(lambda told: [told] if isinstance(told, str) else told),
]


class Data(Settings):
    """A dataset, and how its labelled rows are dealt out."""

    name: str
    options: dict[str, Any] = {}  # of the dataset
    partition: Named = Named(name="iid")


class Public(Settings):
    """Unlabelled rows that every client holds, taken from the dataset's training rows before they are dealt out."""

    size: Count
    data: Names | None = None  # a dataset of its own instead, or several, with as many rows of each
    options: dict[str, Any] = {}  # of that dataset, where it is one


class Mix(Settings):
    """How many of a group's clients own all modalities, several but not all, or a single one: parts of a ratio, e.g. 1, 0, 1."""

    full: Annotated[float, Field(ge=0)] = 0
    multi: Annotated[float, Field(ge=0)] = 0
    single: Annotated[float, Field(ge=0)] = 0


class Group(Settings):
    """One client, or `count` of the same kind."""

    id: str
    count: Count = 1
    model: Named
    target: str | None = None  # which of the dataset's targets; needed where it has several
    task: dict[str, Any] = {}  # options of its task, e.g. what it minimises
    data: Data | None = None  # a dataset of its own
    modalities: Annotated[list[str], Field(min_length=1)] | None = (
        None  # which it owns; all if not said
    )
    mix: Mix | None = None  # instead: drawn for each client of the group
    missing: Annotated[float, Field(ge=0, lt=1)] = (
        0  # share of its samples' modalities that are not there; each sample keeps one
    )
    masked: Annotated[float, Field(ge=0, lt=1)] = (
        0  # share of the labels in its training rows that it is not told (multilabel)
    )
    train: Count | None = None  # how many labelled rows it has at most
    test: Count | None = None
    capacity: Annotated[float, Field(gt=0, le=1)] = 1.0
    speed: Positive = 1000.0
    link: Positive = 1e7
    latency: Annotated[float, Field(ge=0)] = 0.01


class Scenario(Settings):
    """Who takes part, with what, and with what budget."""

    name: str
    summary: str = ""
    algorithm: Named
    training: Training = Training()
    federation: FederationConfig = FederationConfig()
    data: Data
    public: Public | None = None
    clients: list[Group]
    server: Group | None = (
        None  # a model of the server's own, which learns from the public set; for methods that have one
    )
    test: Literal["own", "common"] = "own"  # whether there is a test set for everyone
    safeguard: bool = False
    privacy: Privacy | None = None
    alone: bool = True
    pooled: bool = (
        False  # everyone's rows at one client, as no federation may: what could be reached
    )
    seed: int = 0
    engine: EngineName = Named(name="local")
    replay: str | None = None  # a run of an asynchronous method whose order of arrivals is kept
    workers: Annotated[int, Field(ge=0)] = 0  # of the local engine
    threads: Count = 1  # of this process; small models run fastest with one
    device: str = "cpu"
    data_dir: str | None = None  # where datasets lie, if not where the command says
    dtype: Literal["float32", "float64"] = "float32"
    checkpoint: Count = 1  # rounds between checkpoints
