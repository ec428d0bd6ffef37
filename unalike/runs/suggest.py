"""Which method our own tables have first in a situation like that of a scenario.

`evidence.json` holds the tables: `unalike bench evidence` collects them from results/. A table is
about the same situation if its tasks, its models (alike or not, frozen, with adapters), the
clients' capacities, the public set and the server's model are those of the scenario. What was
measured on the scenario itself comes first.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from pathlib import Path
from typing import Any

from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.runs.compatibility import check_clients
from unalike.scenarios import Scenario, load
from unalike.scenarios.build import try_build_clients
from unalike.scenarios.validate import find_algorithm

EVIDENCE = Path(__file__).with_name("evidence.json")
VISION_LANGUAGE = ("clip", "siglip", "vlm-tiny", "vlm-small")


@dataclass(frozen=True)
class Candidate:
    """A method as one of our tables has it.

    Attributes:
        algorithm: its name and fields, as in a scenario.
        score: mean over seeds of the table's metric; more is better.
        spread: standard deviation over seeds; None for one seed.
        megabytes: of a client and round, both ways; None where not measured.
        close: whether its score is within noise of the first one's.
        problem: why it does not fit the scenario; None: it does, or that was not checked.
    """

    algorithm: Mapping[str, Any]
    score: float
    spread: float | None
    megabytes: float | None
    close: bool = False
    problem: str | None = None

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.algorithm["name"]


@dataclass(frozen=True)
class Advice:
    """What is known of methods for a scenario.

    Attributes:
        scenario: its name.
        source: file of the table, with the setting in it; None where no table is alike.
        metric: what the table ranks by.
        exact: whether the table was measured on this very scenario.
        candidates: methods that fit, best first.
        misfits: methods of the table that do not fit.
        others: further tables about the same situation, and their first method that fits.
        unchecked: why it was not checked what fits, e.g. data that are missing; None: it was.
    """

    scenario: str
    source: str | None = None
    metric: str = ""
    exact: bool = False
    candidates: Sequence[Candidate] = ()
    misfits: Sequence[Candidate] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    unchecked: str | None = None

    @property
    def first(self) -> Candidate | None:
        """The best method that fits; None where no table is alike."""
        return self.candidates[0] if self.candidates else None


def suggest(scenario: str | Scenario, data_dir: str | None = None) -> Advice:
    """Which methods suit a scenario, judged by our own tables.

    Args:
        scenario: a shipped name, a file, or as `unalike.scenarios.load` returns it.
        data_dir: where data files are. Without them it is not checked which methods fit.

    >>> suggest("digits").first.name
    'fedmuscleplus'
    """
    loaded = load(scenario)[0] if isinstance(scenario, str) else scenario
    clients, problems = try_build_clients(loaded, data_dir)
    unchecked = problems[0][1] if problems else None
    situation = describe(loaded, [] if problems else clients)
    tables = [table for table in read_evidence() if is_alike(table, loaded.name, situation)]
    tables.sort(key=lambda table: closeness(table, loaded.name))
    if not tables:
        return Advice(loaded.name, unchecked=unchecked)
    ranked = [rank(table, [] if problems else clients, loaded) for table in tables]
    usable = [i for i, (candidates, _) in enumerate(ranked) if candidates]
    chosen = usable[0] if usable else 0
    candidates, misfits = ranked[chosen]
    others = {}
    for i in usable:
        if i != chosen:
            others[name_of(tables[i])] = ranked[i][0][0].name
    return Advice(
        scenario=loaded.name,
        source=name_of(tables[chosen]),
        metric=tables[chosen]["metric"],
        exact=loaded.name in tables[chosen]["scenarios"],
        candidates=candidates,
        misfits=misfits,
        others=others,
        unchecked=unchecked,
    )


def closeness(table: Mapping[str, Any], name: str) -> tuple[bool, bool, int]:
    """Sorts tables: measured on the scenario, named as like it, with more methods."""
    return name not in table["scenarios"], name not in table["like"], -len(table["rows"])


def read_evidence() -> list[dict[str, Any]]:
    """The tables, as `unalike bench evidence` wrote them."""
    return json.loads(EVIDENCE.read_text())


def name_of(table: Mapping[str, Any]) -> str:
    """File of a table, and the setting in it where there are several."""
    setting = table.get("setting")
    return f"{table['source']}, {setting}" if setting else table["source"]


def describe(scenario: Scenario, clients: Sequence[Client]) -> dict[str, Any]:
    """The situation of a scenario, in the words of `evidence.json`.

    `tasks` is empty where clients could not be built: then nothing but its name is compared.
    """
    groups = scenario.clients
    kinds = {repr(group.model.model_dump()) for group in groups}
    return {
        "tasks": {client.task.name for client in clients},
        "models": "one" if len(kinds) == 1 else "unlike",
        "public": scenario.public is not None,
        "capacity": any(group.capacity < 1 for group in groups),
        "frozen": all(group.model.name in VISION_LANGUAGE for group in groups),
        "adapters": any(group.model.options.get("lora") for group in groups),
        "server": scenario.server is not None,
    }


def is_alike(table: Mapping[str, Any], name: str, situation: Mapping[str, Any]) -> bool:
    """Whether a table was measured on a scenario, or in the same situation."""
    if name in table["scenarios"] or name in table["like"]:
        return True
    if not situation["tasks"] or not situation["tasks"] <= set(table["situation"]["tasks"]):
        return False
    traits = ("public", "capacity", "frozen", "adapters", "server")
    same = all(bool(table["situation"].get(key)) == situation[key] for key in traits)
    return same and table["situation"]["models"] == situation["models"]


def rank(
    table: Mapping[str, Any], clients: Sequence[Client], scenario: Scenario
) -> tuple[list[Candidate], list[Candidate]]:
    """The table's methods that fit the clients, best first, and those that do not."""
    fitting: list[Candidate] = []
    misfits: list[Candidate] = []
    for row in table["rows"]:
        problem = row.get("problem")
        if problem is None and clients:
            problem = misfit(row["algorithm"], clients, scenario)
        first = fitting[0] if fitting else None
        close = first is not None and is_close(first, row)
        candidate = Candidate(**row | {"close": close, "problem": problem})
        (misfits if problem else fitting).append(candidate)
    return fitting, misfits


def is_close(first: Candidate, row: Mapping[str, Any]) -> bool:
    """Whether a score is below the first one's by no more than both spread over seeds."""
    return first.score - row["score"] <= hypot(first.spread or 0.0, row["spread"] or 0.0)


def misfit(
    algorithm: Mapping[str, Any], clients: Sequence[Client], scenario: Scenario
) -> str | None:
    """Why a method does not fit these clients; None: it does."""
    method = build_method(algorithm)
    rows = [len(client.public) for client in clients if client.public is not None]
    if method.needs_public and not rows:
        return "needs a public set"
    problems = method.check(len(clients), min(rows, default=0))
    problems += check_clients(
        method, clients, scenario.training, scenario.seed, tries=False
    ).problems
    return problems[0][1] if problems else None


def build_method(algorithm: Mapping[str, Any]) -> Algorithm:
    """The method of that name with these fields."""
    fields = {key: value for key, value in algorithm.items() if key != "name"}
    return find_algorithm(algorithm["name"])(**fields)
