"""Whether a method, its clients and its settings fit together, found out before the work begins.

Most checks only look. The dry run builds one client of each kind and feeds it two rows.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from unalike.base.errors import Problem, Problems, UserError, describe_error, unknown_name
from unalike.base.randomness import scope
from unalike.base.tracebacks import format_traceback, is_bug, is_debugging, user_location
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client, ClientInfo
from unalike.core.lazy_clients import LazyClients, NumberedIds, announced_infos, examples_of
from unalike.core.privacy import Privacy, accounting_problem
from unalike.core.program import ClientProgram
from unalike.core.signatures import tensor_spec
from unalike.data import Tensors
from unalike.engines import engine_class
from unalike.runs.initial_models import SharedFactory
from unalike.runs.plan import RunPlan
from unalike.scenarios import Scenario
from unalike.scenarios.build import try_build_clients
from unalike.tasks import TASKS
from unalike.training.loop import Training

LARGE = 10.0  # mean of a column of inputs that a user is told of


@dataclass
class Report:
    """What the checks found.

    Attributes:
        problems: (where, sentence) of each.
        architectures: printed models of the clients that the dry run built.
        bugs: exceptions in the user's own code, which are shown with their tracebacks.
    """

    problems: list[Problem] = field(default_factory=list)
    architectures: list[str] = field(default_factory=list)
    bugs: list[Exception] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Append what other checks found."""
        self.problems += other.problems
        self.architectures += other.architectures
        self.bugs += other.bugs

    def raise_problems(self, source: str) -> None:
        """Raise all problems at once, with the tracebacks of bugs as notes; or do nothing."""
        if not self.problems:
            return
        error = Problems(source, self.problems)
        for bug in self.bugs:
            error.add_note(format_traceback(bug))
        raise error from (self.bugs[0] if self.bugs else None)


def check_plan(
    plan: RunPlan, needs_clients: bool = True
) -> tuple[Mapping[str, ClientInfo], list[str]]:
    """Check everything that can be known before a run.

    Args:
        plan: what to run.
        needs_clients: False where other organisations bring the clients later.
    Returns: what each client announces, and the printed models of the dry run.
    Raises: UserError or Problems.
    """
    if needs_clients and not plan.clients and not plan.infos:
        raise UserError("a federation needs at least one client")
    examples = examples_of(plan.clients)
    ids = plan.clients.ids if isinstance(plan.clients, LazyClients) else [c.id for c in examples]
    if not isinstance(ids, NumberedIds) and len(set(ids)) != len(ids):
        raise UserError("two clients have the same id; ids must differ")
    infos = plan.infos if plan.infos is not None else announced_infos(plan.clients)
    known = {id: infos[id] for id in (ids[0], ids[-1])} if plan.lazy else infos
    count = len(plan.clients) if plan.lazy else len(infos)
    report = Report(problems=settings_problems(plan, known, count) if known else [])
    sound = not report.problems
    report.add(
        check_clients(
            plan.algorithm,
            examples,
            plan.training,
            plan.seed,
            safeguard=plan.safeguard,
            privacy=plan.privacy,
            sound=sound,
        )
    )
    if plan.server is not None:
        report.add(
            check_clients(plan.algorithm, [plan.server], plan.training, plan.seed, sound=sound)
        )
    report.raise_problems(plan.source or plan.name)
    return infos, report.architectures


def describe_scales(clients: Iterable[Client]) -> list[str]:
    """Sentences about clients whose inputs or targets are far from mean 0 and deviation 1.

    Only data in memory are looked at, flat inputs, and no more than 1,024 rows of each client.
    """
    found = {}
    advice = []
    for client in clients:
        if not isinstance(client.train, Tensors):
            continue
        x, y = client.train.rows(torch.arange(min(len(client.train), 1024)))
        sentence = None if y is None else client.task.advice(y)
        if sentence is not None:
            advice.append(f"{client.id}: {sentence}")
        if isinstance(x, torch.Tensor) and x.ndim == 2 and x.is_floating_point():
            means = x.nansum(0) / x.isfinite().sum(0).clamp(min=1)
            found[client.id] = means.abs().max().item()
    large = {id: mean for id, mean in found.items() if LARGE < mean < float("inf")}
    if large:
        names = ", ".join(list(large)[:5]) + (" and others" if len(large) > 5 else "")
        advice.append(
            f"{names}: columns of the inputs have means up to {max(large.values()):.3g}; most "
            "models learn faster from columns of mean 0 and deviation 1, scaled alike everywhere"
        )
    return advice


def check_lazy_clients(plan: RunPlan) -> RunPlan:
    """Return the plan with lazy clients that are checked when they are built; others as they are.

    Raises: UserError where the run would have to visit all of them.
    """
    if not isinstance(plan.clients, LazyClients):
        return plan
    method = type(plan.algorithm).__name__
    if plan.algorithm.asynchronous:
        raise UserError(
            f"{method} visits every client, again and again: pass a list of clients instead of "
            "LazyClients, or choose a method with rounds"
        )
    if plan.safeguard:
        raise UserError(
            "the safeguard trains every client alone, and LazyClients are too many for that: "
            "leave safeguard out, or pass a list of clients"
        )
    if not getattr(engine_class(plan.engine), "takes_lazy_clients", False):
        raise UserError(
            f"the engine {plan.engine} starts with all clients built: "
            "run LazyClients on the engine local"
        )
    device = plan.clients[0].device

    def check(client: Client) -> Client:
        if client.device != device:
            raise UserError(f"it is on {client.device}, and the first client on {device}")
        report = check_clients(
            plan.algorithm,
            [client],
            plan.training,
            plan.seed,
            privacy=plan.privacy,
            tries=False,
        )
        for _, sentence in report.problems:
            raise UserError(sentence)
        return client

    return replace(plan, clients=plan.clients.changed(check))


def settings_problems(plan: RunPlan, infos: Mapping[str, ClientInfo], count: int) -> list[Problem]:
    """Fields of the method that do not fit the number of clients or public rows.

    Args:
        infos: what the clients announce, or a few of lazy ones.
        count: number of all clients.
    """
    algorithm = plan.algorithm
    public_rows = [info.public_rows for info in infos.values() if info.public is not None]
    lacks_public = algorithm.needs_public and not public_rows
    # Without a public set its size cannot be wrong: that it is missing is reported below.
    rows = sys.maxsize if lacks_public else min(public_rows, default=0)
    misfits = algorithm.check(count, rows)
    misfits = misfits or algorithm.check_round(plan.federation.clients_per_round(count))
    problems = [(f"algorithm.{name}", sentence) for name, sentence in misfits]
    if lacks_public:
        sentence = (
            f"{plan.method} needs a public set, unlabelled rows that every client may read: "
            "pass public=."
        )
        problems.append(("public", sentence))
    return problems


def scenario_problems(
    scenario: Scenario, algorithm: Algorithm | None, sound: bool, folder: str | None = None
) -> list[Problem]:
    """Everything wrong with a scenario's clients, by themselves and with the method.

    Args:
        scenario: as it was read.
        algorithm: its method; None where that could not be read.
        sound: whether the method's own fields are right.
        folder: where data files are.
    """
    clients, problems = try_build_clients(scenario, folder)
    if algorithm is None:
        report = dry_run(Algorithm(), clients, scenario.training, scenario.seed)
    else:
        report = check_clients(
            algorithm,
            clients,
            scenario.training,
            scenario.seed,
            safeguard=scenario.safeguard,
            privacy=scenario.privacy,
            sound=sound,
        )
    return problems + report.problems


def check_clients(
    algorithm: Algorithm,
    clients: Sequence[Client],
    training: Training,
    seed: int,
    *,
    safeguard: bool = False,
    privacy: Privacy | None = None,
    sound: bool = True,
    tries: bool = True,
) -> Report:
    """Find what the method cannot do with these clients.

    Args:
        tries: make the dry run, too.
        sound: whether the method's own fields are right. If not, only what no method could do is
            reported of the clients.
    """
    problems = privacy_problems(algorithm if sound else None, clients, privacy)
    problems = task_problems(algorithm, clients, safeguard, problems)
    suited = [client for client in clients if algorithm.serves(client.task)]
    reasons: dict[str, str] = {}
    for client in suited:
        reason = metric_problem(client)
        if reason is None and sound:
            reason = algorithm.client_problem(client)
        if reason is not None:
            reasons[client.id] = reason
    for task in {type(client.task): None for client in suited}:
        conflicts = task.check_clients([c for c in suited if type(c.task) is task])
        for id, reason in conflicts.items():
            reasons.setdefault(id, reason)
    problems += group_by_reason(reasons)
    report = Report(problems)
    if not tries:
        return report
    remaining = [client for client in suited if client.id not in reasons]
    report.add(dry_run(algorithm if sound else Algorithm(), remaining, training, seed))
    return report


def privacy_problems(
    algorithm: Algorithm | None, clients: Iterable[Client], privacy: Privacy | None
) -> list[Problem]:
    """Why the run cannot be private, or is less private than a client asks for."""
    problems: list[Problem] = []
    if privacy is not None:
        reasons = [
            algorithm.privacy_problem() if algorithm is not None else None,
            accounting_problem(),
        ]
        problems += [("privacy", f"{reason}.") for reason in reasons if reason is not None]
    for client in clients:
        reason = client.privacy.shortfall(privacy) if client.privacy is not None else None
        if reason:
            problems.append((f"clients.{client.id}", f"{reason}."))
    return problems


def task_problems(
    algorithm: Algorithm,
    clients: Sequence[Any],
    safeguard: bool,
    privacy_problems: Sequence[Problem] = (),
) -> list[Problem]:
    """What can be told from the tasks of clients, which everyone knows.

    Args:
        clients: anything with an `id` and a `task`.
        privacy_problems: listed after those of the safeguard.
    """
    problems: list[Problem] = []
    if safeguard:
        reason = algorithm.safeguard_problem()
        unlabelled = next((client for client in clients if not client.task.labelled), None)
        if reason:
            problems.append(("safeguard", f"{reason}. Leave it out, or set it to false."))
        elif unlabelled is not None:
            sentence = (
                f"safeguard judges by a client's own labels; client {unlabelled.id} learns "
                f"without ({unlabelled.task.name})."
            )
            problems.append(("safeguard", sentence))
    problems += privacy_problems
    served = [name for name, task in TASKS.items() if algorithm.serves(task)]
    supported = f"{type(algorithm).__name__} does {', '.join(served)}"
    reported: set[str] = set()
    for client in clients:
        task = client.task.name
        if task not in reported and not algorithm.serves(client.task):
            reported.add(task)
            sentence = f"{supported}; client {client.id} wants {task}."
            problems.append((f"clients.{client.id}", sentence))
    return problems


def group_by_reason(reasons: dict[str, str]) -> list[Problem]:
    """Report each reason once, at the first client, with the names of the others.

    >>> group_by_reason({"a": "no rows.", "b": "no rows."})
    [('clients.a', 'no rows. The same is true of b.')]
    """
    clients: dict[str, list[str]] = {}
    for id, reason in reasons.items():
        clients.setdefault(reason, []).append(id)
    problems = []
    for reason, (first, *more) in clients.items():
        same = f". The same is true of {', '.join(more)}." if more else ""
        problems.append(
            (f"clients.{first}", f"{reason.removesuffix('.')}{same}" if more else reason)
        )
    return problems


def metric_problem(client: Client) -> str | None:
    """Why the client's metric has no value on its test rows in memory; None: it has one."""
    test = client.test
    if not isinstance(test, Tensors) or test.y is None:
        return None
    reason = client.task.unmeasured(test.y[test.index.to(test.y.device)])
    if reason is None:
        return None
    return (
        f"its {client.task.metric} is undefined on its {len(test)} test rows: {reason}. Give it "
        "others; without any it takes part and is not measured."
    )


def dry_run(
    algorithm: Algorithm, clients: Sequence[Client], training: Training, seed: int
) -> Report:
    """Build one client of each kind, feed it two rows and throw it away.

    An exception in the user's model, loss or data becomes a problem with its file and line; with
    UNALIKE_DEBUG it is raised as it is.
    """
    report = Report()
    kinds: set[Any] = set()
    reported: set[Any] = set()
    first: tuple[str, Any] | None = None  # a client, and names and shapes of its parameters
    for client in clients:
        kind = client_kind(client)
        if kind in kinds:
            continue
        kinds.add(kind)
        try:
            # On the CPU: worker processes are forked later, which CUDA does not survive.
            on_cpu = replace(client, device="cpu")
            program = algorithm.Program(on_cpu, algorithm, training, seed)
            report.architectures.append(str(program.model))
            with scope(seed, "fit", client.id), torch.no_grad():
                _feed_two_rows(program, on_cpu, algorithm.needs_public)
            spec = tensor_spec(program.model.state_dict())
            first = first or (client.id, spec)
            if algorithm.requires_identical_models and spec != first[1]:
                raise UserError(
                    f"its model has other parameters than that of {first[0]}, and "
                    f"{type(algorithm).__name__} mixes them all: give everyone the same, made for "
                    "the modalities of all"
                )
        except Exception as error:
            if is_debugging():
                raise
            location = user_location(error) if is_bug(error) else None
            sentence = describe_error(error) if location is None else _describe_bug(error, location)
            # Clients that differ only in their data fail alike: reported once.
            if (kind[0], sentence) not in reported:
                reported.add((kind[0], sentence))
                report.problems.append((f"clients.{client.id}", sentence))
                if location is not None:
                    report.bugs.append(error)
    return report


def _check_score(program: ClientProgram, client: Client) -> None:
    """Raise UserError where the metric that the user chose is none of the task's."""
    x, y = client.train.labelled_batch(torch.arange(min(2, len(client.train))))
    meter = client.task.meter()
    meter.add(program.model(client.to_device(x)).cpu(), y)
    metrics = meter.result()
    if client.task.metric not in metrics:
        raise UserError(unknown_name("metric", client.task.metric, metrics))


def _describe_bug(error: Exception, location: str) -> str:
    return f"{type(error).__name__}: {error} ({location})"


def client_kind(client: Client) -> tuple[Any, ...]:
    """What clients must have in common for one of them to stand for all in the dry run."""
    model: Any = client.model.factory if isinstance(client.model, SharedFactory) else client.model
    if isinstance(model, partial):
        model = repr((model.func, model.args, model.keywords))
    else:
        model = id(model)
    return (
        model,
        client.task,
        id(client.head),
        str(client.train.shape),
        str(client.public.shape) if client.public is not None else "",
        len(client.train) > 1,
    )


def _feed_two_rows(program: ClientProgram, client: Client, needs_public: bool) -> None:
    """Pass two of the client's rows, and of the public set, through the model and the loss.

    `client` holds its rows as they came; those of `program.client` may be features of all rows.
    """
    x, y = client.train.rows(torch.arange(min(2, len(client.train))))
    program.model.train()
    if not client.task.labelled or y is None:  # the method brings its own loss
        program.model(client.to_device(x))
    else:
        client.task.check(y)
        program.task_loss(client.to_device(x), client.to_device(y))
    if isinstance(client.task.score, str):
        _check_score(program, client)
    if not needs_public or client.public is None:
        return
    public, _ = client.public.rows(torch.arange(min(2, len(client.public))))
    try:
        program.model.features(client.public_to_device(public))
    except (RuntimeError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"its model takes rows such as its own, {client.train.shape}, and cannot take those of "
            f"the public set, {client.public.shape}"
        ) from error
