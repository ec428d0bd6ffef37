"""Which rows of which dataset each client of a scenario gets, and which are public."""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from unalike.base.errors import Problem, UserError, describe_error, unknown_name
from unalike.base.randomness import scope, stream
from unalike.base.registry import find_named
from unalike.core.client import Client
from unalike.data import PARTITIONS, Table, Tensors, load_dataset
from unalike.data.samples import concat
from unalike.engines import engine_class
from unalike.models import build_encoder
from unalike.scenarios.options import dataset_options, engine_options, partition_options
from unalike.scenarios.schema import NO_DATASET, Data, Group, Scenario
from unalike.scenarios.validate import public_datasets
from unalike.training.batching import batches


class PublicRows(NamedTuple):
    """The public set, and which training rows of each dataset are in it."""

    samples: Tensors | None
    used: dict[str, Tensor]


def dataset_of(scenario: Scenario, group: Group) -> Data:
    """The dataset of a group: its own, or the scenario's."""
    return group.data or scenario.data


def find_target(table: Table, group: Group) -> str | None:
    """The target a group learns; None if it names none that the dataset has."""
    name = group.target
    if name is None and len(table.targets) == 1:
        name = next(iter(table.targets))
    return name if name in table.targets else None


def load_tables(
    scenario: Scenario, folder: str | None, problems: list[Problem]
) -> dict[str, Table]:
    """Load the datasets that clients and the public set use, by name."""
    used: dict[str, tuple[str, Data]] = {}  # path in the scenario and settings of each dataset
    for i, group in enumerate(scenario.clients):
        data = dataset_of(scenario, group)
        used.setdefault(data.name, (f"clients.{i}.data" if group.data else "data", data))
    names = public_datasets(scenario)
    options = scenario.public.options if scenario.public and len(names) == 1 else {}
    public_path = "public" if scenario.public and scenario.public.data else "data"
    for name in names:
        data = scenario.data
        if name != data.name:
            data = Data(name=name, options=options)
        path, first = used.setdefault(name, (public_path, data))
        if options and options != first.options:
            text = (
                f"{path} has {name} with other options, and it is read once: "
                "set them there and leave these out."
            )
            problems.append(("public.options", text))
    tables = {}
    for name, (path, data) in used.items():
        if name == NO_DATASET:
            continue
        name_path = "public.data" if path == "public" else f"{path}.name"
        options, option_problems = dataset_options(path, data)
        if path == "public":
            option_problems = [
                (name_path if where == "public.name" else where, why)
                for where, why in option_problems
            ]
        problems += option_problems
        if option_problems:
            continue
        try:
            tables[name] = load_dataset(name, folder, **options)
        except (ValueError, OSError) as error:
            problems.append((name_path, describe_error(error)))
    return tables


def draw_public(
    scenario: Scenario, tables: dict[str, Table], problems: list[Problem]
) -> PublicRows:
    """Draw the public set from the training rows of its datasets."""
    names = public_datasets(scenario)
    if scenario.public is None or not all(name in tables for name in names):
        return PublicRows(None, {})
    generator = stream(scenario.seed, "public rows")
    size = scenario.public.size
    used: dict[str, Tensor] = {}
    for i, name in enumerate(names):
        pool = tables[name].train
        share = size // len(names) + (i < size % len(names))
        if len(pool) <= share:
            text = (
                f"must be below {len(pool)}, the training rows of {name}: "
                f"some stay labelled, got {size}"
            )
            if len(names) > 1:
                text += f", of which {share} are of {name}"
            problems.append(("public.size", f"{text}."))
            continue
        used[name] = pool[torch.randperm(len(pool), generator=generator)[:share]]
    if len(used) < len(names):
        return PublicRows(None, {})
    parts = {name: Tensors(tables[name].x, None, rows) for name, rows in used.items()}
    try:
        samples = concat(parts) if len(parts) > 1 else parts[names[0]]
    except ValueError as error:
        problems.append(("public.data", str(error)))
        return PublicRows(None, {})
    return PublicRows(samples, used)


def deal_rows(
    scenario: Scenario,
    tables: dict[str, Table],
    public: dict[str, Tensor],
    problems: list[Problem],
) -> dict[str, Tensor]:
    """Divide the training rows of each dataset among its clients.

    Args:
        public: rows of each dataset that are public and not dealt out.
    Returns: row numbers by client id; clients of a dataset with problems are left out.
    """
    rows: dict[str, Tensor] = {}
    for name, table in tables.items():
        path, data, groups = _groups_of(scenario, name, problems)
        count = sum(group.count for group in groups)
        if not groups:
            continue
        if count > len(table.train):
            text = f"{count} clients cannot share {len(table.train)} rows of {name}."
            problems.append(("clients", text))
            continue
        options, option_problems = partition_options(f"{path}.partition", data.partition)
        problems += option_problems
        if not option_problems:
            dealer = _Dealer(scenario, path, data, table, groups)
            rows |= dealer.deal(options, public.get(name), problems)
    return rows


def _groups_of(
    scenario: Scenario, name: str, problems: list[Problem]
) -> tuple[str, Data, list[Group]]:
    """The groups that share a dataset, the `data:` block that says how, and its path.

    There can be one block only: two would deal out the same rows twice.
    """
    first_path = "data"
    first = scenario.data
    groups: list[Group] = []
    for i, group in enumerate(scenario.clients):
        data = dataset_of(scenario, group)
        if data.name != name:
            continue
        path = f"clients.{i}.data" if group.data else "data"
        if not groups:
            first_path = path
            first = data
        if data == first:
            groups.append(group)
            continue
        text = (
            f"{first_path} divides {name} already, and some rows would go to two clients; "
            "give all clients of a dataset the same partition and options."
        )
        problems.append((path, text))
    return first_path, first, groups


class _Dealer:
    """Divides the training rows of one dataset among the clients that use it."""

    def __init__(
        self, scenario: Scenario, path: str, data: Data, table: Table, groups: list[Group]
    ):
        self.scenario = scenario
        self.path = path
        self.data = data
        self.table = table
        self.groups = groups
        # Ids and row limits of the clients, in order.
        self.limits: list[tuple[str, int | None]] = []
        for group in groups:
            self.limits += [(id, group.train) for id in group.ids]

    def deal(
        self, options: dict[str, object], public: Tensor | None, problems: list[Problem]
    ) -> dict[str, Tensor]:
        """Row numbers by client id; empty where there are problems."""
        pool = self.table.train
        if public is not None:
            pool = pool[~torch.isin(pool, public)]
        generator = stream(self.scenario.seed, "rows", self.data.name)
        pool = pool[torch.randperm(len(pool), generator=generator)]
        for id, limit in self.limits:
            if limit is not None and limit > len(pool):
                text = (
                    f"{id} wants {limit} training rows of {self.data.name}, there are {len(pool)}"
                )
                problems.append(("clients", f"{text}. Lower train, or leave it out for all rows."))
                return {}
        sizes = [limit for _, limit in self.limits if limit is not None]
        if self.data.partition.name == "iid" and len(sizes) == len(self.limits):
            if sum(sizes) > len(pool):
                beside = " beside the public set" if public is not None else ""
                text = (
                    f"they want {sum(sizes)} training rows of {self.data.name}, "
                    f"there are {len(pool)}{beside}. Lower train, count or public.size."
                )
                problems.append(("clients", text))
                return {}
            parts = PARTITIONS["iid"](sum(sizes), sizes, generator)
        else:
            parts = self._partition(pool, generator, options, problems)
            if not parts:
                return {}
        shuffled = [part[torch.randperm(len(part), generator=generator)] for part in parts]
        rows = {}
        for (id, limit), part in zip(self.limits, shuffled, strict=True):
            rows[id] = pool[part[:limit] if limit else part]
        return rows

    def _partition(
        self,
        pool: Tensor,
        generator: torch.Generator,
        options: dict[str, object],
        problems: list[Problem],
    ) -> list[Tensor]:
        """Positions in `pool` of each client, by the scenario's partition."""
        path = f"{self.path}.partition"
        name = self.data.partition.name
        options = dict(options)
        by = options.pop("by", None) or find_target(self.table, self.groups[0])
        if by is None:  # reported with the group
            return []
        if by not in self.table.targets:
            problems.append((f"{path}.by", unknown_name("target", str(by), self.table.targets)))
            return []
        encoder = options.pop("encoder", None)
        of = options.pop("of", "inputs")
        count = len(self.limits)
        sharers = options.pop("clients", count)
        if sharers < count:  # type: ignore[operator]
            text = f"are {sharers}, but {count} take part: raise it or leave it out."
            problems.append((f"{path}.clients", text))
            return []
        try:
            function = find_named("partition", name, PARTITIONS)
            parameters = inspect.signature(function).parameters
            what: int | Tensor = self.table.targets[str(by)][pool]
            if "rows" in parameters:
                what = len(pool)
            elif "features" in parameters and of == "labels":
                what = label_shares(self.table.targets[str(by)][pool])
            elif "features" in parameters:
                what = self._features(pool, encoder)  # type: ignore[arg-type]
            parts = function(what, sharers, generator=generator, **options)
            check_parts(parts, len(pool), sharers)  # type: ignore[arg-type]
        except ValueError as error:
            problems.append((path, str(error)))
            return []
        return parts[:count]

    def _features(self, rows: Tensor, encoder: str | None) -> Tensor:
        """What rows are clustered by, (rows, width): their inputs, or a frozen model's features."""
        x = self.table.x
        if encoder is None:
            inputs = list(x.values()) if isinstance(x, dict) else [x]
            return torch.cat([part[rows].flatten(1) for part in inputs], 1)
        samples = Tensors(x, None, rows)
        # CUDA is not touched where clients are in other processes, which may be forked from this.
        options, _ = engine_options(self.scenario.engine, self.scenario.workers)
        engine = engine_class(self.scenario.engine.name)
        in_this_process = engine.hosts_clients and engine.shares_process(options)
        device = self.scenario.device if in_this_process else "cpu"
        with scope(self.scenario.seed, "partition"):
            frozen = build_encoder(encoder, samples.shape, {}).eval().to(device)
        # A client moves and converts the rows as it would for its own model.
        client = Client(
            id="partition",
            model=frozen,
            task=next(iter(self.table.tasks.values())),
            train=samples,
            device=device,
        )
        features = []
        with torch.no_grad():
            for indices in batches(len(rows), 256):
                features.append(frozen(client.to_device(samples.rows(indices)[0])))
        return torch.cat(features)


def label_shares(y: Tensor) -> Tensor:
    """What rows are clustered by their labels with: the softmax of a row's present labels.

    Rows with few labels are then farther from each other than rows with many.

    Args:
        y: (n, labels), 1 where present; or classes (n,), whole numbers.
    Returns: (n, labels), rows sum to 1.

    >>> label_shares(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))[1].tolist()
    [0.5, 0.5]
    """
    if y.ndim == 1:
        y = torch.nn.functional.one_hot(y.long() - int(y.min()))
    return (y == 1).to(torch.float64).softmax(-1)


def check_parts(parts: list[Tensor], rows: int, clients: int) -> None:
    """Raise UserError unless a partition gives every client rows that no other client has."""
    if len(parts) != clients:
        raise UserError(f"it must return the rows of {clients} clients, got {len(parts)}")
    dealt = torch.cat([torch.as_tensor(part) for part in parts])
    if len(dealt.unique()) != len(dealt) or (dealt < 0).any() or (dealt >= rows).any():
        raise UserError(
            f"it must return row numbers from 0 to {rows - 1}, each for one client only, got some "
            "twice or outside"
        )
