"""Which clients may join: what a client announces is checked before the server uses any of it.

A client that announces something impossible, or that does not fit the others, is refused by name;
the run goes on without it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import Field

from unalike.core.client import VERSION, ClientInfo
from unalike.core.signatures import validator_for
from unalike.tasks import TASKS, find_task
from unalike.tasks.task import TRAITS

if TYPE_CHECKING:
    from unalike.core.algorithm import Algorithm

MAX_WORD = 200  # characters of a name
MAX_LABELS = 100_000
MAX_SAMPLES = 10**12
MAX_SPEED = 1e18  # samples or bytes a second, seconds

Count = Annotated[int, Field(ge=0, le=MAX_SAMPLES)]
Rate = Annotated[float, Field(gt=0, le=MAX_SPEED)]


class Card(TypedDict):
    """A ClientInfo as it is sent: tuples are lists."""

    id: str
    model: str
    task: str
    metric: str
    labels: list[str]
    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
    modalities: list[str]
    capacity: Annotated[float, Field(gt=0, le=1)]
    speed: Rate
    link: Rate
    latency: Annotated[float, Field(ge=0, le=MAX_SPEED)]
    public: str | None
    public_rows: Count
    public_shape: str
    tested_on: Literal["own", "common"]
    traits: list[str]
    higher_is_better: bool
    unit: str
    version: int


def parse_info(card: Any) -> ClientInfo:
    """A ClientInfo from what a client sent.

    Raises: ValueError where the client could not have announced it.
    """
    problem = validator_for(Card)(card, {}, "its card") or _words_problem(card)
    if problem is not None:
        raise ValueError(problem)
    lists = {name: tuple(value) for name, value in card.items() if isinstance(value, list)}
    return ClientInfo(**(card | lists))


def _words_problem(card: dict[str, Any]) -> str | None:
    """What is wrong with the words of a card; None: nothing."""
    for name, value in card.items():
        words = value if isinstance(value, list) else [value]
        for word in words:
            if isinstance(word, str) and len(word) > MAX_WORD:
                return f"its card.{name} has {len(word):,} characters, and may have {MAX_WORD}"
    if not card["id"]:
        return "its card.id is empty"
    for name in ("labels", "modalities", "traits"):
        if len(card[name]) > MAX_LABELS:
            return f"its card.{name} has {len(card[name]):,} entries, and may have {MAX_LABELS:,}"
    if not card["modalities"]:
        return "its card.modalities is empty"
    traits = set(card["traits"])
    known = TASKS.get(card["task"])
    if not traits <= set(TRAITS):
        return f"its card.traits must be among {', '.join(TRAITS)}"
    if known is not None and traits != set(known.traits()):
        return f"its card.traits are not those of {card['task']}: {', '.join(known.traits())}"
    if card["public"] is None and card["public_rows"]:
        return "its card.public_rows are those of no public set"
    return None


def find_misfits(
    infos: Mapping[str, ClientInfo],
    algorithm: "Algorithm | None" = None,
    needs_public: bool = True,
) -> dict[str, str]:
    """Clients that cannot take part with the others, and why.

    Args:
        infos: what clients announce, by id.
        algorithm: the method that is served, if its tasks are to be checked.
        needs_public: whether the method uses the public set; if not, clients may hold any.
    """
    misfits: dict[str, str] = {}
    for id, info in infos.items():
        if info.version != VERSION:
            misfits[id] = (
                f"speaks version {info.version} of the protocol, this server {VERSION}: "
                "install the same version of unalike on both sides"
            )
        elif algorithm is not None and not algorithm.serves(find_task(info.task)):
            served = [name for name, task in TASKS.items() if algorithm.serves(task)]
            misfits[id] = f"wants {info.task}, {type(algorithm).__name__} does {', '.join(served)}"
    holders = [info for info in infos.values() if info.public is not None and needs_public]
    holders = [info for info in holders if info.id not in misfits]
    rows = _most_common(info.public_rows for info in holders)
    for info in holders:
        if info.public_rows != rows:
            misfits[info.id] = (
                f"holds a public set of {info.public_rows} rows, most others of {rows}; "
                "row i must be the same thing for everyone"
            )
    kinds: dict[tuple, list[ClientInfo]] = {}
    for info in holders:
        if info.id not in misfits:
            kinds.setdefault((info.modalities, info.public_shape), []).append(info)
    for members in kinds.values():
        fingerprint = _most_common(info.public for info in members)
        for info in members:
            if info.public != fingerprint:
                misfits[info.id] = (
                    "holds another public set than most clients with the same modalities; "
                    "row i must be the same for everyone"
                )
    return misfits


def _most_common(values: Any) -> Any:
    """The most frequent value, the first one of several; None of none."""
    counts = Counter(values).most_common(1)
    return counts[0][0] if counts else None
