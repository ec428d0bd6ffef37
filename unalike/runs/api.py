"""How runs are started and resumed, from Python and from scenarios."""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from unalike.base.errors import Problems, UserError
from unalike.base.tracebacks import DEBUG, format_traceback
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client, as_public_samples
from unalike.core.engine import Watch
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.data.samples import Inputs, Samples
from unalike.engines import hosts_clients
from unalike.runs.compatibility import check_clients
from unalike.runs.execution import Run, ignore
from unalike.runs.label_statistics import label_statistics
from unalike.runs.plan import RunPlan
from unalike.runs.result import Result
from unalike.runs.run_folder import Folder
from unalike.scenarios import Scenario, build_server, parse_scenario
from unalike.scenarios.build import try_build_clients
from unalike.scenarios.options import engine_options as parse_engine_options
from unalike.scenarios.schema import Named
from unalike.scenarios.validate import validate_algorithm
from unalike.training.loop import Training

# Settings that say where a run is computed and kept, not what comes of it: they may change
# between a start and a resume.
RESUMABLE = ("engine", "workers", "threads", "device", "data_dir", "checkpoint")


def run(
    algorithm: Algorithm,
    clients: Iterable[Client],
    *,
    public: Samples | Dataset | Inputs | None = None,
    training: Training | None = None,
    federation: FederationConfig | None = None,
    seed: int = 0,
    engine: str | dict[str, Any] = "local",
    replay: str | Path | None = None,
    workers: int = 0,
    threads: int = 1,
    alive: int = 256,
    out: str | Path | None = None,
    alone: bool = True,
    safeguard: bool = False,
    privacy: Privacy | None = None,
    resume: bool = False,
    name: str = "own",
    progress: bool = False,
    server: Client | None = None,
    watch: Watch = ignore,
    debug: bool = False,
) -> Result:
    """Run a method on clients made in Python.

    Args:
        algorithm: the method with its hyperparameters, such as `unalike.FedMuscle(peers=3)`.
        clients: the participants.
        public: unlabelled rows that every client may read, for methods that need them.
        training: rounds, local epochs, learning rate, batch size, optimizer.
        federation: participation, dropout, deadline, quorum and message limits.
        seed: all random numbers of the run derive from it.
        engine: name of the engine, or a dict with its options: `{"name": "ray", "gpus": 0.25}`.
        replay: folder of an asynchronous run whose order of arrivals is repeated.
        workers: processes of the local engine; 0 runs the clients in this process.
        threads: CPU threads of this process.
        alive: clients in memory at once; the others wait on disk.
        out: the run's folder; by default a new one below `runs/`.
        alone: also train every client alone, to compare (the local baseline).
        safeguard: let each client keep the better of both models, by its own data.
        privacy: clip what clients send and add noise.
        resume: go on with the run in `out` if there is one. Clients and settings must be equal.
        name: of the run, for folder and report.
        progress: show a progress bar.
        server: model and data of the server itself, for methods that train one.
        watch: called as `watch(event, **facts)` while the run goes on.
        debug: stop at the first exception in a client and raise it where it happened, instead of
            going on without that client.
    Returns: the results; `result.folder` holds everything else.
    Raises: UserError where method, clients and settings do not fit each other, QuorumError where
        too many clients failed.
    """
    algorithm = validate_algorithm(algorithm)
    clients = [clients] if isinstance(clients, Client) else list(clients)
    training = training if training is not None else Training()
    federation = federation if federation is not None else FederationConfig()
    _check_types(training, federation, privacy, server, clients)
    _check_whole("seed", seed)
    _check_whole("workers", workers, least=0)
    _check_whole("threads", threads, least=1)
    _check_whole("alive", alive, least=1)
    if resume and out is None:
        raise UserError("resume=True needs out=, the folder of the run to go on with")
    if public is not None:
        rows = as_public_samples(public)
        clients = [_with_public(client, rows) for client in clients]
        server = _with_public(server, rows) if server is not None else None
    named = _named_engine(engine)
    options = engine_options("unalike.run", named, workers)
    if clients and not hosts_clients(named.name):
        raise UserError(
            "clients made in Python cannot go to another organisation: each describes its own in "
            "a client.yaml, with a factory where Python is needed; pass clients=[] here "
            "(docs/engines.md)"
        )
    plan = RunPlan(
        algorithm=algorithm,
        clients=clients,
        training=training,
        federation=federation,
        name=name,
        seed=seed,
        engine=named.name,
        engine_options=options,
        replay=replay,
        threads=threads,
        max_loaded_clients=alive,
        local_baseline=alone,
        safeguard=safeguard,
        privacy=privacy,
        source="unalike.run",
        server=server,
    )
    with debug_mode(debug):
        execution = Run(plan, watch=watch)
        _open_folder(execution, out, _python_config(execution, named), resume)
        result = execute(execution, progress)
    result._clients = clients
    result._algorithm = algorithm
    return result


def _check_types(
    training: Any, federation: Any, privacy: Any, server: Any, clients: list[Any]
) -> None:
    """Raise UserError for settings or clients that were not made by their classes."""
    expected: list[tuple[str, Any, type]] = [
        ("training", training, Training),
        ("federation", federation, FederationConfig),
    ]
    if privacy is not None:
        expected.append(("privacy", privacy, Privacy))
    expected += [("each client", client, Client) for client in clients]
    if server is not None:
        expected.append(("server", server, Client))
    for name, value, kind in expected:
        if not isinstance(value, kind):
            raise UserError(f"{name} must be made by unalike.{kind.__name__}(...), got {value!r}")


def _check_whole(name: str, value: Any, least: int | None = None) -> None:
    """Raise UserError for what is not a whole number, or too small."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        bound = "" if least is None else f", at least {least}"
        raise UserError(f"{name} must be a whole number{bound}, got {value!r}")


def _with_public(client: Client, public: Samples) -> Client:
    """The client with this public set, unless it has one already."""
    return client if client.public is not None else replace(client, public=public)


def _named_engine(engine: Any) -> Named:
    if isinstance(engine, str):
        return Named.model_validate({"name": engine})
    if isinstance(engine, dict) and isinstance(engine.get("name"), str):
        return Named.model_validate(engine)
    raise UserError(f'engine is a name, or a dict with "name" and its options, got {engine!r}')


def _python_config(execution: Run, engine: Named) -> dict[str, Any]:
    """The config.yaml of a run from Python: settings, and what each client announces."""
    plan = execution.plan
    config = {
        "name": plan.name,
        "summary": "clients given in Python",
        "algorithm": {"name": plan.method, **vars(plan.algorithm)},
        "training": plan.training.model_dump(),
        "federation": plan.federation.model_dump(),
        "safeguard": plan.safeguard,
        "alone": plan.local_baseline,
        "privacy": plan.privacy.model_dump() if plan.privacy is not None else None,
        "clients": [info.as_dict() for info in execution.infos.values()],
        "seed": plan.seed,
        "python": True,
        "engine": engine.model_dump(),
        "replay": str(plan.replay) if plan.replay else plan.replay,
    }
    return to_plain(config)


def _open_folder(
    execution: Run, out: str | Path | None, config: dict[str, Any], resume: bool
) -> None:
    """Give a run from Python its folder: the one to resume, or a new one."""
    plan = execution.plan
    path = run_path(out, plan.name, plan.method, plan.seed)
    if not resume or not (path / "config.yaml").exists():
        create_folder(execution, path, config)
        return
    execution.folder = Folder.open(path)
    changes = config_differences(execution.folder.config | {"engine": config["engine"]}, config)
    if changes:
        raise UserError(
            f"{path} holds another run: {', '.join(changes[:3])}; resume it as it was, or choose "
            "another folder"
        )


def run_scenario(
    scenario: Scenario,
    algorithm: Algorithm,
    *,
    out: str | Path | None = None,
    data_dir: str | None = None,
    source: str | None = None,
    watch: Watch = ignore,
) -> tuple[Result, Path]:
    """Run a scenario in a new folder.

    Args:
        scenario: as it was read.
        algorithm: its method.
        out: the run's folder; by default a new one below `runs/`.
        data_dir: where data files are.
        source: where the scenario was read, for error messages.
        watch: called as `watch(event, **facts)` while the run goes on.
    Returns: the results, and the run's folder.
    """
    config = scenario.model_dump(mode="json")
    config["algorithm"] = {"name": scenario.algorithm.name, **vars(algorithm)}
    config["data_dir"] = data_dir or scenario.data_dir
    execution = prepare(scenario, algorithm, None, data_dir, source or scenario.name, watch)
    path = run_path(out, scenario.name, scenario.algorithm.name, scenario.seed)
    folder = create_folder(execution, path, config)
    return execute(execution), folder.path


def create_folder(execution: Run, path: Path, config: dict[str, Any]) -> Folder:
    """Create the folder of a run and record which labels its clients hold."""
    execution.folder = Folder.create(path, config)
    statistics = label_statistics(execution.plan.clients)
    if statistics is not None:
        execution.folder.record("labels", **statistics)
    return execution.folder


def resume(path: str | Path, watch: Watch = ignore, progress: bool = False) -> Result:
    """Go on with a run of a scenario after its last finished round.

    The end is the same as if the run had never stopped. A finished run returns its results.

    Raises: UserError where the run was started from Python, or its config was edited.
    """
    folder = Folder.open(Path(path))
    results = folder.results
    if results is not None:
        return Result(results)
    return execute(reopen(folder, watch), progress)


def reopen(folder: Folder, watch: Watch = ignore) -> Run:
    """Build the run that a folder holds, ready to go on."""
    config = folder.config
    if config.get("python"):
        raise UserError(
            f"{folder.path} was started from Python with clients that only that program can make; "
            "call unalike.run(..., resume=True) there"
        )
    source = str(folder.path / "config.yaml")
    start = folder.config_at_start
    if start is not None:
        equal = dict.fromkeys(RESUMABLE)  # None in both, so that they do not differ
        changes = config_differences(start | equal, config | equal)
        if changes:
            raise UserError(
                f"{source} was edited since the run began: {', '.join(changes[:3])}; put it back, "
                f"or begin a new run: unalike run {source}"
            )
    data_dir = config.pop("data_dir", None)
    scenario, algorithm = parse_scenario(config, source)
    return prepare(scenario, algorithm, folder, data_dir, source, watch)


def prepare(
    scenario: Scenario,
    algorithm: Algorithm,
    folder: Folder | None,
    data_dir: str | None,
    source: str,
    watch: Watch = ignore,
) -> Run:
    """Build the clients of a scenario and check that everything fits; nothing is executed yet.

    Args: as for `run_scenario`; `folder` is None for a run that gets its folder later.
    Raises: Problems with everything that is wrong.
    """
    clients, problems = try_build_clients(scenario, data_dir)
    if problems:
        report = check_clients(
            algorithm,
            clients,
            scenario.training,
            scenario.seed,
            safeguard=scenario.safeguard,
            privacy=scenario.privacy,
        )
        report.problems[:0] = problems
        report.raise_problems(source)
    plan = RunPlan(
        algorithm=algorithm,
        clients=clients,
        training=scenario.training,
        federation=scenario.federation,
        name=scenario.name,
        method=scenario.algorithm.name,
        seed=scenario.seed,
        engine=scenario.engine.name,
        engine_options=engine_options(source, scenario.engine, scenario.workers),
        replay=scenario.replay,
        threads=scenario.threads,
        local_baseline=scenario.alone,
        safeguard=scenario.safeguard,
        privacy=scenario.privacy,
        checkpoint=scenario.checkpoint,
        use_cache=True,
        source=source,
        server=build_server(scenario, data_dir),
    )
    return Run(plan, folder, watch)


def engine_options(source: str, engine: Named, workers: int) -> dict[str, Any]:
    """Return the options of an engine, checked and converted to their types."""
    options, problems = parse_engine_options(engine, workers)
    if problems:
        raise Problems(source, problems)
    return options


def execute(execution: Run, progress: bool = False) -> Result:
    """Run to the end, write the report and return the results.

    An exception is recorded in the run's events with its traceback, then raised.
    """
    from unalike.report import write

    if progress:
        return _execute_with_progress_bar(execution)
    try:
        results = execution.execute()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk may be the very error
            execution.folder.record("failed", error=message, traceback=format_traceback(error))
        raise
    execution.watch("stage", text="the report")
    write(execution.folder.path)
    return Result(results)


def _execute_with_progress_bar(execution: Run) -> Result:
    from unalike.report.progress import progress

    watch = execution.watch
    with progress() as show:

        def show_and_watch(event: str, **facts: Any) -> None:
            show(event, **facts)
            watch(event, **facts)

        execution.watch = show_and_watch
        return execute(execution)


@contextmanager
def debug_mode(on: bool) -> Iterator[None]:
    """Set UNALIKE_DEBUG inside: exceptions are raised where they happen."""
    before = os.environ.get(DEBUG)
    if on:
        os.environ[DEBUG] = "1"
    try:
        yield
    finally:
        if on and before is None:
            del os.environ[DEBUG]


def to_plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of numbers, strings, lists and dicts only.

    Tensors become lists; of anything else that a user's method may hold, the name remains.
    """

    def replacement(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        return getattr(value, "__qualname__", type(value).__qualname__)

    return json.loads(json.dumps(config, default=replacement))


def config_differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Describe what changed between two configs; clients are compared by id.

    >>> config_differences({"training": {"rounds": 3}}, {"training": {"rounds": 5}})
    ['training.rounds was 3, is 5']
    """
    if path == "clients":
        before = {info["id"]: info for info in before or []}
        after = {info["id"]: info for info in after or []}
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [] if before == after else [f"{path} was {before}, is {after}"]
    prefix = f"{path}." if path else ""
    changes = []
    for key in {**before, **after}:
        changes += config_differences(before.get(key), after.get(key), f"{prefix}{key}")
    return changes


def run_path(out: str | Path | None, name: str, method: str, seed: int) -> Path:
    """Return `out`, or a path below runs/ that does not exist yet, whatever the name holds."""
    if out is not None:
        return Path(out)
    safe_name = re.sub(r"[^\w-]+", "-", name).strip("-") or "run"
    base = Path("runs") / f"{safe_name}-{method}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = base
    number = 1
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path
