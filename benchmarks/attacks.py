"""Benchmark of attacks: what one or two of six poisoned clients do to the others, with and without a defence."""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.study import Study, benchmark
from unalike.base.randomness import stream
from unalike.engines.host import Host
from unalike.runs import run_scenario
from unalike.scenarios import load

# The budget of the security review's looks at poisoning.
SETTINGS = ["rounds=10", "epochs=2", "evaluations=1", "alone=true"]
CLIENTS = ("ada", "ben", "cleo", "dora", "emil", "fay")
ALIKE = [
    {
        "id": id,
        "model": {"name": "mlp", "hidden": [64], "width": 32},
        "target": "digit",
        "train": 40,
    }
    for id in CLIENTS
]
SCENARIOS: dict[str, list[str]] = {
    "fedmuscleplus": ["public.size=256"],
    "fedavg": ["algorithm={name: fedavg}", f"clients={ALIKE}"],
    "heterofl": ["algorithm={name: heterofl}", f"clients={ALIKE}"],
}
DEFENCES = {
    "fedmuscleplus": ("agreement",),
    "fedavg": ("median", "trimmed", "clip", "krum"),
    "heterofl": ("median", "trimmed", "clip", "krum"),
}
ATTACKERS = {"collusion": ("ben", "emil")}  # of the other attacks: ben
ATTACKS = ("random", "flip", "scale", "labels", "collusion", "adaptive")


def false_rows(attack: str, z: Tensor, seed: int) -> Tensor:
    """Representations (n, d) of public rows that an attacker sends instead of `z`."""
    generator = stream(seed, "attack", *map(int, z.shape))
    if attack in ("random", "collusion"):  # those who collude send the same rows
        return torch.nn.functional.normalize(
            torch.randn(z.shape, generator=generator).to(z), dim=-1
        )
    if attack == "flip":
        return -z
    if attack == "scale":
        return 1e6 * z
    # It knows the cut of the defence: as many rows are those of other rows as it lets pass.
    wrong = int(0.3 * len(z))
    order = torch.arange(len(z))
    order[:wrong] = torch.randperm(wrong, generator=generator)
    return z[order]


def false_parameters(attack: str, sent: Tensor, got: Tensor, seed: int) -> Tensor:
    """A parameter that an attacker sends instead of `got`, which it trained from `sent`."""
    if not got.is_floating_point():
        return got
    sent = sent.to(got)
    change = got - sent
    if attack in ("random", "collusion"):  # those who collude send the same
        generator = stream(seed, "attack", *map(int, got.shape))
        noise = torch.randn(got.shape, generator=generator).to(got)
        return sent + noise * 10 * change.square().mean().sqrt()
    if attack == "flip":
        return sent - 4 * change
    if attack == "scale":
        return sent + 100 * change
    # It knows the defences: opposite to what it learnt, and no larger than an honest update.
    return sent - change


@contextmanager
def poisoned(attack: str, seed: int) -> Iterator[None]:
    """The replies of the attackers are false while this is open."""
    handle, groups = Host.handle, Host._groups
    attackers = ATTACKERS.get(attack, ("ben",))

    def lie(self: Host, client: str, message: dict[str, Any]) -> dict[str, Any]:
        reply = handle(self, client, message)
        body = reply.get("body")
        if client not in attackers or not message["round"]:
            return reply
        operation = str(message["operation"])
        if operation.startswith(("represent", "align")):
            if isinstance(body, Tensor) and body.numel():
                body = false_rows(attack, body, seed)
            elif isinstance(body, dict) and body["views"].numel():
                body = body | {"views": false_rows(attack, body["views"], seed)}
        elif operation == "update" and isinstance(body, dict):
            sent: Any = message["body"]
            parameters = {
                name: false_parameters(attack, sent["parameters"][name], tensor, seed)
                for name, tensor in body["parameters"].items()
            }
            body = body | {"parameters": parameters}
        return {**reply, "body": body}

    try:
        if attack not in ("none", "labels"):
            Host.handle = lie  # type: ignore[method-assign]
        Host._groups = lambda self, messages: []  # type: ignore[method-assign]
        yield
    finally:
        Host.handle, Host._groups = handle, groups  # type: ignore[method-assign]


@contextmanager
def flipped_labels(attack: str) -> Iterator[None]:
    """The attacker trains on false labels while this is open: the last for the first, and so on."""
    from unalike.core.program import ClientProgram

    training_batch = ClientProgram.training_batch

    def false_batch(self: Any, index: Tensor) -> Any:
        x, y = training_batch(self, index)
        if self.client.id == "ben":
            y = 1 - y if y.dim() > 1 else len(self.client.task.labels) - 1 - y
        return x, y

    try:
        if attack == "labels":
            ClientProgram.training_batch = false_batch  # type: ignore[method-assign]
        yield
    finally:
        ClientProgram.training_batch = training_batch  # type: ignore[method-assign]


def gains(method: str, defence: str, attack: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Gain over local training of each client, and what failed, in one run."""
    chosen = [*SETTINGS, *SCENARIOS[method], f"algorithm.robust={defence}", *settings]
    scenario, algorithm = load("digits", settings=chosen, seed=seed)
    with tempfile.TemporaryDirectory() as folder, poisoned(attack, seed), flipped_labels(attack):
        results, _ = run_scenario(scenario, algorithm, out=Path(folder) / "run")
    return {
        "gains": {id: entry["gain"] for id, entry in results["clients"].items()},
        "named": sorted({failure["client"] for failure in results["failures"]}),
        "seconds": results["seconds"],
    }


@benchmark("attacks")
def bench_attacks(study: Study) -> dict:
    """What one or two of six poisoned clients do to the others on `digits`, with each defence and without.

    A figure is the mean gain over local training of the clients that are honest in that row; with
    it stands the same clients' gain in the run without attack and defence, and the share kept of it.
    Rows are METHOD/DEFENCE/ATTACK; `--only fedmuscle` or `--only /flip` chooses some.
    """
    seeds = study.seeds or ((0,) if study.quick else (0, 1, 2))
    settings = ["rounds=2", *study.settings] if study.quick else list(study.settings)
    rows: dict[str, Any] = {}
    for method, defences in DEFENCES.items():
        names = [f"{method}/{d}/{a}" for d in ("never", *defences) for a in ("none", *ATTACKS)]
        names = [name for name in names if study.selects(name)]
        if not names:
            continue
        honest = {s: gains(method, "never", "none", s, settings) for s in seeds}
        for name in names[:2] if study.quick else names:
            _, defence, attack = name.split("/")
            run = partial(gains, method, defence, attack, settings=settings)
            rows[name] = row(honest, run, attack)
            print(name, rows[name], flush=True)
    return {"rows": rows, "bar_kept": 0.9, "bar_kept_without_attack": 0.97}


def row(honest: dict[int, Any], run: Callable[[int], Any], attack: str) -> dict[str, Any]:
    """Mean gains over seeds and honest clients of one row."""
    attackers = ATTACKERS.get(attack, ("ben",))
    outcomes = {seed: run(seed) for seed in honest}

    def average(runs: dict[int, Any]) -> dict[int, float]:
        return {
            seed: mean(
                gain if gain is not None else -100.0
                for id, gain in outcome["gains"].items()
                if id not in attackers and honest[seed]["gains"][id] is not None
            )
            for seed, outcome in runs.items()
        }

    before, after = average(honest), average(outcomes)
    kept = mean(after.values()) / mean(before.values())
    return {
        "gain": round(mean(after.values()), 1),
        "honest_gain": round(mean(before.values()), 1),
        "kept": round(kept, 3) if math.isfinite(kept) else None,
        "seeds": {str(seed): round(gain, 1) for seed, gain in after.items()},
        "named": sorted({name for outcome in outcomes.values() for name in outcome["named"]}),
        "seconds": round(max(outcome["seconds"] for outcome in outcomes.values()), 1),
    }
