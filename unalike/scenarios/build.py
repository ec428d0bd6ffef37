"""From a scenario to its clients: datasets loaded, rows dealt out, encoders named. Knows nothing of methods or engines."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unalike.client import Client
from unalike.data import PARTITIONS, Table, Tensors, load_dataset
from unalike.data.samples import each
from unalike.errors import UserError, unknown
from unalike.models import build_encoder
from unalike.randomness import stream
from unalike.scenarios.schema import Data, Group, Scenario


def clients(scenario: Scenario, folder: str | None = None) -> list[Client]:
    """Everyone in the scenario. The same scenario and seed give the same rows to the same clients, wherever this runs."""
    tables: dict[str, Table] = {}

    def table(name: str) -> Table:
        if name not in tables:
            tables[name] = load_dataset(name, folder)
        return tables[name]

    members = [(group, f"{group.id}-{i}" if group.count > 1 else group.id) for group in scenario.clients for i in range(group.count)]
    public, taken = _public(scenario, table)
    made: dict[str, Client] = {}
    for data in {str(group.data or scenario.data): group.data or scenario.data for group, _ in members}.values():
        own = [(group, id) for group, id in members if (group.data or scenario.data) == data]
        rows = _deal(scenario, data, table(data.name), own, taken.get(data.name))
        for (group, id), mine in zip(own, rows, strict=True):
            owned = _modalities(scenario, group, id, table(data.name))
            made[id] = _client(scenario, group, id, table(data.name), mine, data, public, owned)
    return [made[id] for _, id in members]


def _public(scenario: Scenario, table: Any) -> tuple[Tensors | None, dict[str, Tensor]]:
    """The public set, and which training rows of which dataset it used up."""
    if scenario.public is None:
        return None, {}
    name = scenario.public.data or scenario.data.name
    pool = table(name).train
    if len(pool) <= scenario.public.size:
        raise UserError(f"public.size is {scenario.public.size}; {name} has {len(pool)} training rows, and some must stay labelled")
    chosen = pool[torch.randperm(len(pool), generator=stream(scenario.seed, "public rows"))[:scenario.public.size]]
    return Tensors(table(name).x, None, chosen), {name: chosen}


def _deal(scenario: Scenario, data: Data, table: Table, own: list[tuple[Group, str]], taken: Tensor | None) -> list[Tensor]:
    """Training rows of each client that uses this dataset."""
    pool = table.train if taken is None else table.train[~torch.isin(table.train, taken)]
    generator = stream(scenario.seed, "rows", data.name)
    pool = pool[torch.randperm(len(pool), generator=generator)]
    how, options = data.partition.name, data.partition.options
    sizes = [group.train for group, _ in own]
    wanted = [size for size in sizes if size]
    if how == "iid" and len(wanted) == len(sizes):
        if sum(wanted) > len(pool):
            raise UserError(f"the clients want {sum(wanted)} rows of {data.name}, {len(pool)} are left beside the public set")
        parts = PARTITIONS["iid"](sum(wanted), wanted, generator)
    else:
        by = options.pop("by", None) or _target(table, own[0][0])
        if by not in table.targets:
            raise UserError("data.partition.by: " + unknown("target", by, table.targets))
        features = torch.cat([x[pool].flatten(1) for x in (table.x.values() if isinstance(table.x, dict) else [table.x])], 1)
        what = {"iid": len(pool), "by_cluster": features}.get(how, table.targets[by][pool])
        parts = PARTITIONS[how](what, len(own), generator=generator, **(options if how != "iid" else {}))
    shuffled = [part[torch.randperm(len(part), generator=generator)] for part in parts]
    return [pool[part[:size]] if size else pool[part] for part, size in zip(shuffled, sizes, strict=True)]


def _modalities(scenario: Scenario, group: Group, id: str, table: Table) -> list[str] | None:
    """The modalities a client owns, None where the dataset has only one kind of input."""
    if not isinstance(table.x, dict):
        if group.modalities or group.mix:
            raise UserError(f"client {group.id}: the dataset has one kind of input, so there are no modalities to choose")
        return None
    names = list(table.x)
    if group.modalities:
        if unknown_ones := [name for name in group.modalities if name not in names]:
            raise UserError(f"client {group.id}: " + unknown("modality", unknown_ones[0], names))
        return [name for name in names if name in group.modalities]
    if group.mix is None:
        return names
    ratio = {"full": group.mix.full, "multi": group.mix.multi, "single": group.mix.single}
    if not sum(ratio.values()):
        raise UserError(f"client {group.id}: mix must have a part above 0")
    if ratio["multi"] and len(names) < 3:
        raise UserError(f"client {group.id}: of {len(names)} modalities nobody can own several but not all; leave out mix.multi")
    at = int(id.rsplit("-", 1)[1]) if group.count > 1 else 0
    ends = {kind: group.count * sum(list(ratio.values())[:i + 1]) / sum(ratio.values()) for i, kind in enumerate(ratio)}
    kind = next(kind for kind, end in ends.items() if at < round(end))
    draws = stream(scenario.seed, "modalities", id)
    count = {"full": len(names), "single": 1}.get(kind) or int(torch.randint(2, len(names), (), generator=draws))
    return [names[i] for i in sorted(torch.randperm(len(names), generator=draws)[:count].tolist())]


def _client(scenario: Scenario, group: Group, id: str, table: Table, rows: Tensor, data: Data, public: Tensors | None,
            owned: list[str] | None) -> Client:
    target = _target(table, group)
    y, test = table.targets[target], table.test
    x = {name: table.x[name] for name in owned} if isinstance(table.x, dict) and owned else table.x
    common = Tensors(x, y, test) if scenario.test == "common" else None
    if table.overlap:                                           # nothing is learnt from labels: what it holds is what is scored
        test = rows
    elif data.partition.name != "iid" and y.dim() == 1:         # a personal test set has the classes its client has
        test = test[torch.isin(y[test], y[rows])]
    shape: Mapping[str, Sequence[int]] | Sequence[int] = each(table.x, lambda rows: tuple(rows.shape[1:]))
    return Client(id=id, model=partial(build_encoder, group.model.name, shape, group.model.options), task=table.tasks[target],
                  train=Tensors(x, y, rows), test=Tensors(x, y, test[:group.test] if group.test else test),
                  public=public, common=common, model_name=group.model.name, capacity=group.capacity, speed=group.speed,
                  link=group.link, latency=group.latency, device=scenario.device, dtype=getattr(torch, scenario.dtype))


def _target(table: Table, group: Group) -> str:
    names = list(table.targets)
    if group.target is None and len(names) == 1:
        return names[0]
    if group.target not in names:
        raise UserError(f"client {group.id}: " + (unknown("target", group.target, names) if group.target else
                                                  f"the dataset has several targets, name one: {', '.join(names)}"))
    return group.target
