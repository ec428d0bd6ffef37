"""From a scenario to its clients: datasets loaded, rows divided, tasks and models chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unalike.base.errors import Problem, Problems, unknown_name
from unalike.base.randomness import stream
from unalike.core.client import Client
from unalike.core.lazy_clients import LazyClients
from unalike.data import Table, Tensors
from unalike.data.partitions import draw_rows, match_label_proportions
from unalike.data.samples import drop_modalities, map_modalities, merge
from unalike.models import build_encoder
from unalike.scenarios.options import build_task, model_options
from unalike.scenarios.rows import (
    dataset_of,
    deal_rows,
    draw_public,
    find_target,
    load_tables,
)
from unalike.scenarios.schema import Group, Scenario
from unalike.scenarios.validate import public_datasets


def build_clients(scenario: Scenario, folder: str | None = None) -> Sequence[Client]:
    """Build all clients of a validated scenario.

    The same scenario and seed give the same rows to the same clients on any machine.

    Args:
        folder: where datasets are; None: the scenario's `data_dir`.
    Raises: Problems, with everything that the data or the models cannot give.
    """
    clients, problems = try_build_clients(scenario, folder)
    if problems:
        raise Problems(scenario.name, problems)
    return clients


def build_server(scenario: Scenario, folder: str | None = None) -> Client | None:
    """The server's own model as a client whose data are the public rows; None if there is none.

    Raises: Problems.
    """
    group = scenario.server
    if group is None or scenario.public is None:
        return None
    problems: list[Problem] = []
    tables = load_tables(scenario, folder or scenario.data_dir, problems)
    public = draw_public(scenario, tables, problems).samples
    table = tables.get(public_datasets(scenario)[0])
    if table is not None and find_target(table, group) is None:
        text = unknown_name("target", group.target or "", table.targets)
        problems.append(("server.target", text))
    if problems or table is None or public is None:
        raise Problems(scenario.name, problems)
    return _build_client(scenario, group, group.id, table, public.index, public)


def try_build_clients(
    scenario: Scenario, folder: str | None = None
) -> tuple[Sequence[Client], list[Problem]]:
    """Build the clients that can be built, and report what is wrong with the others.

    Lazy ones are built when they are first used. Of a group without rows one client is built, with
    all rows, so that its other problems show.
    """
    problems: list[Problem] = []
    tables = load_tables(scenario, folder or scenario.data_dir, problems)
    public = draw_public(scenario, tables, problems)
    valid_groups: list[Group] = []
    for i, group in enumerate(scenario.clients):
        group_problems = _check_group(f"clients.{i}", group, scenario, tables)
        problems += group_problems
        if not group_problems and dataset_of(scenario, group).name in tables:
            valid_groups.append(group)
    rows = deal_rows(scenario, tables, public.used, problems)
    ids: list[str] = []
    groups: list[Group] = []  # of each id
    for group in valid_groups:
        own = group.ids
        own = own if own[0] in rows else own[:1]
        ids += own
        groups += [group] * len(own)

    def build(i: int) -> Client:
        table = tables[dataset_of(scenario, groups[i]).name]
        samples = _public_for(table, public.samples)
        return _build_client(scenario, groups[i], ids[i], table, rows.get(ids[i]), samples)

    if scenario.lazy and scenario.pooled:
        problems.append(("lazy", "pooled puts all rows at one client: leave lazy out."))
    elif scenario.lazy and ids and not problems:
        return LazyClients(ids, build), problems
    clients = [build(i) for i in range(len(ids))]
    if scenario.pooled:
        kinds = {str((g.model, g.target, g.task, g.data)) for g in scenario.clients}
        if len(kinds) > 1:
            text = "clients that differ in model, target, task or dataset cannot be merged."
            problems.append(("pooled", text))
        if clients and not problems:
            clients = [_merge(clients)]
    return clients, problems


def describe_shortages(scenario: Scenario, clients: Sequence[Client]) -> list[str]:
    """A sentence for each client that has fewer training rows than its group's `train`.

    A partition by labels or features may leave it fewer. Lazy clients are not looked at.
    """
    if scenario.lazy or scenario.pooled:
        return []
    sizes = {client.id: len(client.train) for client in clients}
    notices = []
    for group in scenario.clients:
        for id in group.ids:
            if group.train is not None and sizes.get(id, group.train) < group.train:
                name = dataset_of(scenario, group).partition.name
                text = f"{id} has {sizes[id]} training rows, its train asks for {group.train}"
                notices.append(f"{text}: the partition {name} gave it no more")
    return notices


def _merge(clients: list[Client]) -> Client:
    """One client with the rows of all; each row keeps the modalities its client had."""
    first = clients[0]
    train = merge([client.train for client in clients])
    test = train
    if first.task.labelled:
        test = merge([client.test for client in clients if client.test is not None])
    return replace(first, id="all", train=train, test=test)


def _public_for(table: Table, public: Tensors | None) -> Tensors | None:
    """The public set as clients of a dataset get it.

    If it has several modalities and the dataset a single kind of input: the first modality with as
    many axes and the same dtype, if there is one.
    """
    if public is None or not isinstance(public.x, dict) or not isinstance(table.x, Tensor):
        return public
    for x in public.x.values():
        if x.dim() == table.x.dim() and x.dtype == table.x.dtype:
            return Tensors(x, None, public.index)
    return public


def _check_group(
    path: str, group: Group, scenario: Scenario, tables: dict[str, Table]
) -> list[Problem]:
    """What the group asks for and its dataset or its model does not have."""
    problems = model_options(f"{path}.model", group.model)[1]
    name = dataset_of(scenario, group).name
    table = tables.get(name)
    if table is None:  # reported by `load_tables`
        return problems
    problems += _check_target(path, group, table)
    if isinstance(table.x, dict):
        problems += _check_modalities(path, group, list(table.x))
    else:
        text = f"{name} has one kind of input, so there are no modalities to choose."
        for field in ("modalities", "mix", "missing"):
            if getattr(group, field):
                problems.append((f"{path}.{field}", text))
    return problems


def _check_target(path: str, group: Group, table: Table) -> list[Problem]:
    target = find_target(table, group)
    if target is None:
        names = list(table.targets)
        if group.target:
            return [(f"{path}.target", unknown_name("target", group.target, names))]
        text = f"is missing: the dataset has several, name one of {', '.join(names)}."
        return [(f"{path}.target", text)]
    task, problems = build_task(f"{path}.task", table.tasks[target], group.task)
    if task is not None and group.masked and not task.multilabel:
        text = f"hides some of a row's labels; {target} has one label per row, leave it out."
        problems.append((f"{path}.masked", text))
    if task is not None and "name" in group.task:
        try:
            task.check(table.targets[target])
        except ValueError as error:
            problems.append((f"{path}.task", f"{error}."))
    return problems


def _check_modalities(path: str, group: Group, known: list[str]) -> list[Problem]:
    problems: list[Problem] = []
    names = group.modalities or []
    for name in names:
        if name not in known:
            problems.append((f"{path}.modalities", unknown_name("modality", name, known)))
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            problems.append((f"{path}.modalities", f'"{name}" is listed twice.'))
    mix = group.mix
    if mix and not mix.full + mix.multi + mix.single:
        problems.append((f"{path}.mix", "must have a part above 0: full, multi or single."))
    if mix and mix.multi and len(known) < 3:
        text = f"of {len(known)} modalities no client can have several but not all; leave it out."
        problems.append((f"{path}.mix.multi", text))
    most = 1 - 1 / _most_modalities(group, len(known))
    if group.missing > most + 1e-3:
        text = f"must be at most {most:.4g}: every sample keeps one modality"
        problems.append((f"{path}.missing", f"{text}, got {group.missing:g}."))
    return problems


def _most_modalities(group: Group, count: int) -> int:
    """The most modalities that a client of the group has, of `count`."""
    if group.mix is None:
        return len(set(group.modalities)) if group.modalities else count
    if group.mix.full:
        return count
    return count - 1 if group.mix.multi else 1


def _draw_modalities(scenario: Scenario, group: Group, id: str, names: list[str]) -> list[str]:
    """The modalities of a client: those the group names, or drawn by its mix."""
    if group.mix is None:
        return [name for name in names if name in (group.modalities or names)]
    ratio = {"full": group.mix.full, "multi": group.mix.multi, "single": group.mix.single}
    total = sum(ratio.values())
    # The group's first clients have all modalities, the next several, the last a single one.
    position = int(id.rsplit("-", 1)[1]) if group.count > 1 else 0
    kind = "single"
    cumulated = 0.0
    for name, part in ratio.items():
        cumulated += part
        if position < round(group.count * cumulated / total):
            kind = name
            break
    generator = stream(scenario.seed, "modalities", id)
    if kind == "full":
        count = len(names)
    elif kind == "single":
        count = 1
    else:
        count = int(torch.randint(2, len(names), (), generator=generator))
    chosen = torch.randperm(len(names), generator=generator)[:count].tolist()
    return [names[i] for i in sorted(chosen)]


def _build_client(
    scenario: Scenario,
    group: Group,
    id: str,
    table: Table,
    rows: Tensor | None,
    public: Tensors | None,
) -> Client:
    """One client of a group. `rows`: its training rows; None: all."""
    rows = table.train if rows is None else rows
    target = find_target(table, group) or ""
    x = table.x
    if isinstance(x, dict):
        x = {name: x[name] for name in _draw_modalities(scenario, group, id, list(x))}
        if public is not None and isinstance(public.x, dict) and x.keys() < public.x.keys():
            public = Tensors({name: public.x[name] for name in x}, None, public.index)
    y = table.targets[target]
    train = _training_samples(scenario, group, id, x, y, rows)
    if table.overlap:  # clustering: the client is scored on the rows it holds
        test = train
    else:
        test = Tensors(x, y, _test_rows(scenario, group, id, table, target, rows))
        if group.missing and isinstance(x, dict):  # samples to test lack as many modalities
            draws = stream(scenario.seed, "missing in test", id)
            test = drop_modalities(test, group.missing, draws)
    if group.test:
        test = test.subset(torch.arange(min(group.test, len(test))))
    shape: Mapping[str, Sequence[int]] | Sequence[int] = map_modalities(
        table.x, lambda part: tuple(part.shape[1:])
    )
    model, _ = model_options("model", group.model)
    task, _ = build_task("task", table.tasks[target], group.task)
    return Client(
        id=id,
        model=partial(build_encoder, group.model.name, shape, model),
        task=task or table.tasks[target],
        train=train,
        test=test,
        public=public,
        common=Tensors(x, y, table.test) if scenario.test == "common" else None,
        model_name=group.model.name.rpartition(":")[2],
        capacity=group.capacity,
        speed=group.speed,
        link=group.link,
        latency=group.latency,
        device=scenario.device,
        dtype=getattr(torch, scenario.dtype),
    )


def _training_samples(
    scenario: Scenario, group: Group, id: str, x: Any, y: Tensor, rows: Tensor
) -> Tensors:
    """The training rows of a client, some labels hidden and some modalities dropped if asked."""
    train = Tensors(x, y, rows)
    if group.masked:
        draws = torch.rand(len(rows), y.shape[1], generator=stream(scenario.seed, "masked", id))
        hidden = draws < group.masked
        labels = torch.where(hidden, -1.0, y[rows])  # -1: unknown
        if group.masked_as == "absent":
            labels = torch.where(hidden & (y[rows] == 1), 0.0, y[rows])
        train = Tensors(map_modalities(x, lambda part: part[rows]), labels)
    if group.missing and isinstance(x, dict):
        train = drop_modalities(train, group.missing, stream(scenario.seed, "missing", id))
    return train


def _test_rows(
    scenario: Scenario, group: Group, id: str, table: Table, target: str, rows: Tensor
) -> Tensor:
    """Test rows of a client: all, or those with the class proportions of its training rows.

    Where the group limits them, they are drawn at random: a table may be sorted by class. Clients
    with the same dataset, target and limit get the same ones.
    """
    y = table.targets[target]
    data = dataset_of(scenario, group)
    partition = data.partition
    if partition.name == "iid" or y.dim() != 1:
        # Pairs have no classes; further texts of an image come after one row of each image.
        if group.test is None or table.tasks[target].paired:
            return table.test
        generator = stream(scenario.seed, "limited test rows", data.name, target)
        classes = y[table.test] if table.tasks[target].single_label and y.dim() == 1 else None
        return table.test[draw_rows(len(table.test), group.test, generator, classes)]
    # These are shuffled, so that the first ones are a random draw.
    labels = table.targets.get(partition.options.get("by", target), y)
    generator = stream(scenario.seed, "test rows", id)
    return table.test[match_label_proportions(labels[table.test], labels[rows], generator)]
