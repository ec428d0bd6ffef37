"""What does not fit between a method and its clients, told before the work rather than in the middle of it. Knows no engine."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unalike.base.errors import Problem, describe_error
from unalike.base.randomness import scope
from unalike.core.algorithm import Algorithm, ClientProgram
from unalike.core.client import Client
from unalike.core.privacy import Privacy, uncounted
from unalike.core.signatures import tensor_spec
from unalike.data import Tensors
from unalike.scenarios import Scenario
from unalike.scenarios.build import try_build_clients
from unalike.tasks import TASKS
from unalike.training.loop import Training


def rest(
    scenario: Scenario, algorithm: Algorithm | None, sound: bool, folder: str | None = None
) -> list[Problem]:
    """Everything that is wrong with a scenario's clients, alone and with the method, where it can be known."""
    clients, problems = try_build_clients(scenario, folder)
    if algorithm is None:
        return problems + tried(Algorithm(), clients, scenario.training, scenario.seed)
    return problems + compatibility_problems(
        algorithm,
        clients,
        scenario.training,
        scenario.seed,
        scenario.safeguard,
        scenario.privacy,
        sound,
    )


def compatibility_problems(
    algorithm: Algorithm,
    clients: list[Client],
    training: Training,
    seed: int,
    safeguard: bool = False,
    privacy: Privacy | None = None,
    sound: bool = True,
) -> list[Problem]:
    """What the method cannot do with these clients; where its own fields are not sound, what no method can."""
    problems: list[Problem] = []
    if privacy is not None:
        problems += [
            ("privacy", f"{why}.")
            for why in (algorithm.privacy_problem() if sound else None, uncounted())
            if why is not None
        ]
    problems += [
        (f"clients.{c.id}", f"{why}.")
        for c in clients
        if c.privacy is not None and (why := c.privacy.unmet(privacy))
    ]
    problems = unsuited(algorithm, clients, safeguard, problems)
    served = [client for client in clients if algorithm.serves(client.task)]
    refused = {
        client.id: why
        for client in served
        if (why := unmeasured(client) or (algorithm.client_problem(client) if sound else None))
    }
    for task in {type(client.task): None for client in served}:
        conflicts = task.check_clients([c for c in served if type(c.task) is task])
        refused |= {id: why for id, why in conflicts.items() if id not in refused}
    alike = {
        why: [id for id, its in refused.items() if its == why] for why in refused.values()
    }  # a sentence is told once
    problems += [
        (
            f"clients.{ids[0]}",
            why
            if len(ids) == 1
            else f"{why.removesuffix('.')}. The same is true of {', '.join(ids[1:])}.",
        )
        for why, ids in alike.items()
    ]
    return problems + tried(
        algorithm if sound else Algorithm(),
        [c for c in served if c.id not in refused],
        training,
        seed,
    )


def unsuited(
    algorithm: Algorithm, clients: list[Client], safeguard: bool, between: Sequence[Problem] = ()
) -> list[Problem]:
    """What can be told from the tasks of clients alone, which everyone knows; problems `between` come after those of the safeguard."""
    problems: list[Problem] = []
    if safeguard:
        problems += (
            [("safeguard", f"{why}. Leave it out, or set it to false.")]
            if (why := algorithm.unjudged())
            else [
                (
                    "safeguard",
                    f"safeguard judges by a client's own labels; client {c.id} learns without ({c.task.name}).",
                )
                for c in clients
                if not c.task.labelled
            ][:1]
        )
    strange = {
        client.task.name: client.id
        for client in reversed(clients)
        if not algorithm.serves(client.task)
    }
    served = [name for name, task in TASKS.items() if algorithm.serves(task)]
    does = f"{type(algorithm).__name__} does {', '.join(served)}"
    return [
        *problems,
        *between,
        *((f"clients.{id}", f"{does}; client {id} wants {task}.") for task, id in strange.items()),
    ]


def unmeasured(client: Client) -> str | None:
    """Why its metric has no value on its test rows, those in memory; None: it has."""
    test = client.test
    if (
        not isinstance(test, Tensors)
        or test.y is None
        or (why := client.task.unmeasured(test.y[test.index.to(test.y.device)])) is None
    ):
        return None
    return (
        f"its {client.task.metric} is undefined on its {len(test)} test rows: {why}. Give it others; without any it takes part and is "
        "not measured."
    )


def tried(
    algorithm: Algorithm, clients: list[Client], training: Training, seed: int
) -> list[Problem]:
    """Clients whose half cannot be built or cannot take their rows: one of each kind, on two rows, and nothing is kept of it."""
    problems: list[Problem] = []
    kinds: set[Any] = set()
    first: tuple[str, Any] | None = None  # a client, and the names and shapes of its parameters
    for client in clients:
        made = client.model
        kind = (
            repr((made.func, made.args, made.keywords)) if isinstance(made, partial) else id(made),
            client.task,
            id(client.head),
            str(client.train.shape),
            str(client.public.shape) if client.public is not None else "",
            len(client.train) > 1,
        )
        if kind in kinds:
            continue
        kinds.add(kind)
        try:
            here = replace(client, device="cpu")  # CUDA is left alone: workers fork later
            program = algorithm.Program(here, algorithm, training, seed)
            with scope(seed, "fit", client.id), torch.no_grad():
                take(program, here, algorithm.needs_public)
            first = first or (client.id, tensor_spec(program.model.state_dict()))
            if (
                algorithm.requires_identical_models
                and tensor_spec(program.model.state_dict()) != first[1]
            ):
                raise ValueError(
                    f"its model has other parameters than that of {first[0]}, and {type(algorithm).__name__} mixes them all: "
                    "give everyone the same, made for the modalities of all"
                )
        except Exception as error:
            if (
                kind[0],
                describe_error(error),
            ) not in kinds:  # the same of clients that differ in what they own is told once
                kinds.add((kind[0], describe_error(error)))
                problems.append((f"clients.{client.id}", describe_error(error)))
    return problems


def take(program: ClientProgram, client: Client, public: bool) -> None:
    """A pass over two rows of the client's and of the public set, and the loss where the task has one to learn by."""
    x, y = client.train.rows(torch.arange(min(2, len(client.train))))
    program.model.train()
    if not client.task.labelled or y is None:  # the method brings its own loss
        program.model(client.to_device(x))
    else:
        client.task.check(y)
        program.task_loss(client.to_device(x), client.to_device(y))
    if public and client.public is not None:
        try:
            program.model.features(
                client.public_to_device(
                    client.public.rows(torch.arange(min(2, len(client.public))))[0]
                )
            )
        except (RuntimeError, AttributeError, TypeError, ValueError, KeyError):
            raise ValueError(
                f"its model takes rows such as its own, {client.train.shape}, and cannot take those of the public set, "
                f"{client.public.shape}"
            ) from None
