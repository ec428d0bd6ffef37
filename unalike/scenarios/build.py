"""From a scenario to its clients: datasets loaded, rows dealt out, encoders named. Knows nothing of methods or engines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unalike.base.errors import Problem, Problems, describe_error, unknown_name
from unalike.base.randomness import scope, stream
from unalike.core.client import Client
from unalike.data import PARTITIONS, Table, Tensors, load_dataset
from unalike.data.partitions import match_label_proportions
from unalike.data.samples import concat, drop_modalities, map_modalities, merge
from unalike.engines import engine_class
from unalike.models import build_encoder
from unalike.scenarios.reading import (
    dataset_options,
    model_options,
    names,
    partition_options,
    read_engine,
    sources,
    task_options,
)
from unalike.scenarios.schema import Data, Group, Scenario
from unalike.training.batching import batches

Member = tuple[int, Group, str]  # which of the scenario's groups, the group, and the client's id


def clients(scenario: Scenario, folder: str | None = None) -> list[Client]:
    """Everyone in the scenario. The same scenario and seed give the same rows to the same clients, wherever this runs."""
    made, problems = attempt(scenario, folder)
    if problems:
        raise Problems(scenario.name, problems)
    return made


def server(scenario: Scenario, folder: str | None = None) -> Client | None:
    """The server's own model where there is one: its data are the public rows, with what the dataset says of them."""
    group, problems = scenario.server, names(scenario)
    if group is None or scenario.public is None:
        return None
    tables = _tables(scenario, folder or scenario.data_dir, problems)
    public, _ = _public(scenario, tables, problems)
    table = tables.get(sources(scenario)[0])
    if table is not None and _target(table, group) is None:
        problems.append(
            ("server.target", unknown_name("target", group.target or "", table.targets))
        )
    if problems or table is None or public is None:
        raise Problems(scenario.name, problems)
    return _client(scenario, group, group.id, table, public.index, public)


def _pooled(everyone: list[Client]) -> Client:
    """One client with all rows, and of each row the modalities that its client had."""
    first = everyone[0]
    train = merge([client.train for client in everyone])
    test = (
        train
        if not first.task.labelled
        else merge([client.test for client in everyone if client.test is not None])
    )
    return replace(first, id="all", train=train, test=test)


def attempt(scenario: Scenario, folder: str | None = None) -> tuple[list[Client], list[Problem]]:
    """Everyone who can be made, and everything that is wrong with the others."""
    problems = names(scenario)
    if any(place == "device" for place, _ in problems):  # the rest is looked at where there is one
        scenario = scenario.model_copy(update={"device": "cpu"})
    tables = _tables(scenario, folder or scenario.data_dir, problems)
    public, taken = _public(scenario, tables, problems)
    parts = (
        {name: Tensors(x, None, public.index) for name, x in public.x.items()}
        if public and isinstance(public.x, dict)
        else {}
    )
    fine = {
        i for i, group in enumerate(scenario.clients) if _fits(i, group, scenario, tables, problems)
    }
    rows: dict[str, Tensor] = {}
    for name, table in tables.items():
        where, data, own = _sharers(scenario, name, problems)
        if sum(group.count for _, group in own) > len(table.train):
            problems.append(
                (
                    "clients",
                    f"{sum(g.count for _, g in own)} clients cannot share {len(table.train)} rows of {name}.",
                )
            )
        elif own and not partition_options("", data.partition)[1]:
            members = [(i, group, id) for i, group in own for id in _ids(group)]
            rows |= _deal(scenario, where, data, table, members, taken.get(name), problems)
    made = []
    for i, group in enumerate(scenario.clients):
        if i not in fine:
            continue
        first = f"{group.id}-0" if group.count > 1 else group.id
        for id in (
            _ids(group) if first in rows else [first]
        ):  # no rows for them: one with all, to see what else is wrong
            table = tables[(group.data or scenario.data).name]
            read = (
                _readable({name: part.x for name, part in parts.items()}, table.x)
                if isinstance(table.x, Tensor)
                else None
            )
            made.append(
                _client(scenario, group, id, table, rows.get(id), parts[read] if read else public)
            )
    kinds = {str((group.model, group.target, group.task, group.data)) for group in scenario.clients}
    if scenario.pooled and len(kinds) > 1:
        problems.append(
            ("pooled", "clients that differ in model, target, task or dataset cannot be one.")
        )
    return [_pooled(made)] if scenario.pooled and made and not problems else made, problems


def _ids(group: Group) -> list[str]:
    return [f"{group.id}-{i}" for i in range(group.count)] if group.count > 1 else [group.id]


def _tables(scenario: Scenario, folder: str | None, problems: list[Problem]) -> dict[str, Table]:
    """The datasets that are used, by name; those there are not have been told, and options they have not."""
    used: dict[str, tuple[str, Data]] = {}
    for i, group in enumerate(scenario.clients):
        where, data = (f"clients.{i}.data", group.data) if group.data else ("data", scenario.data)
        used.setdefault(data.name, (f"{where}.name", data))
    named = sources(scenario)
    options = scenario.public.options if scenario.public and len(named) == 1 else {}
    for name in named:
        data = Data(name=name, options=options) if name != scenario.data.name else scenario.data
        held = used.setdefault(
            data.name,
            ("public.data" if scenario.public and scenario.public.data else "data.name", data),
        )
        if options and options != held[1].options:
            problems.append(
                (
                    "public.options",
                    f"{held[0].rsplit('.', 1)[0]} has {data.name} with other options, and it is read once: say "
                    "them there and leave these out.",
                )
            )
    tables = {}
    for name, (where, data) in used.items():
        options, wrong = dataset_options("", data)
        if not wrong:
            try:
                tables[name] = load_dataset(name, folder, **options)
            except (ValueError, OSError) as error:
                problems.append((where, describe_error(error)))
    return tables


def _public(
    scenario: Scenario, tables: dict[str, Table], problems: list[Problem]
) -> tuple[Tensors | None, dict[str, Tensor]]:
    """The public set, and which training rows of which dataset it used up."""
    named = sources(scenario)
    if scenario.public is None or not all(name in tables for name in named):
        return None, {}
    draws, size, taken = stream(scenario.seed, "public rows"), scenario.public.size, {}
    for i, name in enumerate(named):
        pool, wanted = tables[name].train, size // len(named) + (i < size % len(named))
        if len(pool) <= wanted:
            said = f"must be below {len(pool)}, the training rows of {name}: some stay labelled, got {size}"
            problems.append(
                (
                    "public.size",
                    said + (f", of which {wanted} are of {name}." if len(named) > 1 else "."),
                )
            )
            continue
        taken[name] = pool[torch.randperm(len(pool), generator=draws)[:wanted]]
    if len(taken) < len(named):
        return None, {}
    held = {name: Tensors(tables[name].x, None, rows) for name, rows in taken.items()}
    try:
        return concat(held) if len(held) > 1 else held[named[0]], taken
    except ValueError as error:
        problems.append(("public.data", str(error)))
        return None, {}


def _sharers(
    scenario: Scenario, name: str, problems: list[Problem]
) -> tuple[str, Data, list[tuple[int, Group]]]:
    """Who shares a dataset, by which `data:` block and where it is. There can be one only: two would deal the same rows out twice."""
    first: tuple[str, Data] = ("data", scenario.data)
    own: list[tuple[int, Group]] = []
    for i, group in enumerate(scenario.clients):
        data = group.data or scenario.data
        if data.name != name:
            continue
        if not own:
            first = (f"clients.{i}.data" if group.data else "data", data)
        if data == first[1]:
            own.append((i, group))
        else:
            problems.append(
                (
                    f"clients.{i}.data" if group.data else "data",
                    f"{first[0]} shares out {name} already, and some rows would go "
                    "to two clients; give all clients of a dataset the same partition and options.",
                )
            )
    return *first, own


def _deal(
    scenario: Scenario,
    where: str,
    data: Data,
    table: Table,
    own: list[Member],
    taken: Tensor | None,
    problems: list[Problem],
) -> dict[str, Tensor]:
    """Training rows of each client that uses this dataset."""
    pool = table.train if taken is None else table.train[~torch.isin(table.train, taken)]
    generator = stream(scenario.seed, "rows", data.name)
    pool = pool[torch.randperm(len(pool), generator=generator)]
    how, options = data.partition.name, partition_options("", data.partition)[0]
    sizes = [group.train for _, group, _ in own]
    wanted = [size for size in sizes if size]
    if how == "iid" and len(wanted) == len(sizes):
        if sum(wanted) > len(pool):
            beside = " beside the public set" if taken is not None else ""
            problems.append(
                (
                    "clients",
                    f"they want {sum(wanted)} training rows of {data.name}, there are {len(pool)}{beside}. "
                    "Lower train, count or public.size.",
                )
            )
            return {}
        parts = PARTITIONS["iid"](sum(wanted), wanted, generator)
    else:
        by = options.pop("by", None) or _target(table, own[0][1])
        if by is None:  # told already
            return {}
        if by not in table.targets:
            problems.append((f"{where}.partition.by", unknown_name("target", by, table.targets)))
            return {}
        encoder, sharers = options.pop("encoder", None), options.pop("clients", len(own))
        if sharers < len(own):
            problems.append(
                (
                    f"{where}.partition.clients",
                    f"are {sharers}, but {len(own)} take part: raise it or leave it out.",
                )
            )
            return {}
        try:
            what = len(pool) if how == "iid" else table.targets[by][pool]
            if how == "by_cluster":
                what = _features(scenario, table, pool, encoder)
            parts = PARTITIONS[how](what, sharers, generator=generator, **options)[: len(own)]
        except ValueError as error:
            problems.append((f"{where}.partition", str(error)))
            return {}
    shuffled = [part[torch.randperm(len(part), generator=generator)] for part in parts]
    return {
        id: pool[part[: group.train] if group.train else part]
        for (_, group, id), part in zip(own, shuffled, strict=True)
    }


def _features(scenario: Scenario, table: Table, rows: Tensor, encoder: str | None) -> Tensor:
    """What rows are clustered by: their inputs as they are, or what a model of that name makes of them, frozen."""
    held = Tensors(table.x, None, rows)
    if encoder is None:
        return torch.cat(
            [
                x[rows].flatten(1)
                for x in (table.x.values() if isinstance(table.x, dict) else [table.x])
            ],
            1,
        )
    # CUDA is left alone where clients are in other processes, which may be forked from this one
    options, _ = read_engine(scenario.engine, scenario.workers)
    engine = engine_class(scenario.engine.name)
    here = engine.hosts_clients and engine.shares_process(options)
    device = scenario.device if here else "cpu"
    with scope(scenario.seed, "partition"):
        frozen = build_encoder(encoder, held.shape, {}).eval().to(device)
    eye = Client(
        id="partition",
        model=frozen,
        task=next(iter(table.tasks.values())),
        train=held,
        device=device,
    )  # as a client sees them
    with torch.no_grad():
        return torch.cat(
            [frozen(eye.to_device(held.rows(few)[0])) for few in batches(len(rows), 256)]
        )


def _fits(
    i: int, group: Group, scenario: Scenario, tables: dict[str, Table], problems: list[Problem]
) -> bool:
    """Whether the dataset has what the group wants of it, and the model what is said of it."""
    told, at = len(problems), f"clients.{i}"
    if (table := tables.get((group.data or scenario.data).name)) is None:
        return False
    if (target := _target(table, group)) is None:
        names = list(table.targets)
        problems.append(
            (
                f"{at}.target",
                unknown_name("target", group.target, names)
                if group.target
                else f"is missing: the dataset has several, name one of {', '.join(names)}.",
            )
        )
    else:
        options, wrong = task_options(f"{at}.task", table.tasks[target], group.task)
        problems += wrong
        if group.masked and not table.tasks[target].multilabel:
            problems.append(
                (
                    f"{at}.masked",
                    f"hides some of a row's labels; {target} is one label a row, leave it out.",
                )
            )
        try:
            replace(table.tasks[target], **options)
        except ValueError as error:
            problems.append((f"{at}.task", str(error)))
    if not isinstance(table.x, dict):
        problems += [
            (
                f"{at}.{field}",
                f"{(group.data or scenario.data).name} has one kind of input, so there are no modalities to choose.",
            )
            for field in ("modalities", "mix", "missing")
            if getattr(group, field)
        ]
    else:
        named = group.modalities or []
        problems += [
            (f"{at}.modalities", unknown_name("modality", name, table.x))
            for name in named
            if name not in table.x
        ]
        problems += [
            (f"{at}.modalities", f'"{name}" is there twice.')
            for name in dict.fromkeys(named)
            if named.count(name) > 1
        ]
        if group.mix and not group.mix.full + group.mix.multi + group.mix.single:
            problems.append((f"{at}.mix", "must have a part above 0: full, multi or single."))
        if group.mix and group.mix.multi and len(table.x) < 3:
            problems.append(
                (
                    f"{at}.mix.multi",
                    f"of {len(table.x)} modalities nobody can own several but not all; leave it out.",
                )
            )
        if group.missing > (most := 1 - 1 / _owned(group, len(table.x))) + 1e-3:
            problems.append(
                (
                    f"{at}.missing",
                    f"must be at most {most:.4g}: every sample keeps one modality, got {group.missing:g}.",
                )
            )
    return len(problems) == told and not model_options(at, group.model)[1]


def _owned(group: Group, there: int) -> int:
    """The most modalities that a client of the group owns."""
    if group.mix is None:
        return len(set(group.modalities)) if group.modalities else there
    return there if group.mix.full else there - 1 if group.mix.multi else 1


def _readable(public: Mapping[str, Any], own: Tensor) -> str | None:
    """The modality of a public set that is of a client's kind: as many axes, and numbers of that sort."""
    return next(
        (
            name
            for name, part in public.items()
            if part.dim() == own.dim() and part.dtype == own.dtype
        ),
        None,
    )


def _modalities(scenario: Scenario, group: Group, id: str, names: list[str]) -> list[str]:
    """The modalities a client owns."""
    if group.mix is None:
        return [name for name in names if name in (group.modalities or names)]
    ratio = {"full": group.mix.full, "multi": group.mix.multi, "single": group.mix.single}
    at = int(id.rsplit("-", 1)[1]) if group.count > 1 else 0
    ends = {
        kind: group.count * sum(list(ratio.values())[: i + 1]) / sum(ratio.values())
        for i, kind in enumerate(ratio)
    }
    kind = next(kind for kind, end in ends.items() if at < round(end))
    draws = stream(scenario.seed, "modalities", id)
    count = {"full": len(names), "single": 1}.get(kind) or int(
        torch.randint(2, len(names), (), generator=draws)
    )
    return [names[i] for i in sorted(torch.randperm(len(names), generator=draws)[:count].tolist())]


def _client(
    scenario: Scenario,
    group: Group,
    id: str,
    table: Table,
    rows: Tensor | None,
    public: Tensors | None,
) -> Client:
    rows = table.train if rows is None else rows
    target = _target(table, group) or ""
    y, test = table.targets[target], table.test
    x = (
        {name: table.x[name] for name in _modalities(scenario, group, id, list(table.x))}
        if isinstance(table.x, dict)
        else table.x
    )
    common = Tensors(x, y, test) if scenario.test == "common" else None
    train = Tensors(x, y, rows)
    if group.masked:
        hidden = (
            torch.rand(len(rows), y.shape[1], generator=stream(scenario.seed, "masked", id))
            < group.masked
        )
        train = Tensors(
            map_modalities(x, lambda part: part[rows]), torch.where(hidden, -1.0, y[rows])
        )
    if group.missing and isinstance(x, dict):
        train = drop_modalities(train, group.missing, stream(scenario.seed, "missing", id))
    if table.overlap:  # nothing is learnt from labels: what it holds is what is scored
        tested = train
    elif (how := (group.data or scenario.data).partition).name != "iid" and y.dim() == 1:
        dealt = table.targets.get(how.options.get("by", target), y)
        tested = Tensors(
            x,
            y,
            test[
                match_label_proportions(
                    dealt[test], dealt[rows], stream(scenario.seed, "test rows", id)
                )
            ],
        )
    else:
        tested = Tensors(x, y, test)
    shape: Mapping[str, Sequence[int]] | Sequence[int] = map_modalities(
        table.x, lambda rows: tuple(rows.shape[1:])
    )
    options, _ = model_options("", group.model)
    task = replace(table.tasks[target], **task_options("", table.tasks[target], group.task)[0])
    return Client(
        id=id,
        model=partial(build_encoder, group.model.name, shape, options),
        task=task,
        train=train,
        test=tested.subset(torch.arange(min(group.test, len(tested)))) if group.test else tested,
        public=public,
        common=common,
        model_name=group.model.name,
        capacity=group.capacity,
        speed=group.speed,
        link=group.link,
        latency=group.latency,
        device=scenario.device,
        dtype=getattr(torch, scenario.dtype),
    )


def _target(table: Table, group: Group) -> str | None:
    """The target a group learns; None where it names none that is there."""
    named = (
        next(iter(table.targets))
        if group.target is None and len(table.targets) == 1
        else group.target
    )
    return named if named in table.targets else None
