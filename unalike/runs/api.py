"""How runs are started and resumed, from Python and from scenarios."""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from unalike.base.errors import Problems, UserError
from unalike.base.registry import own_names
from unalike.base.tracebacks import DEBUG, format_traceback
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client, as_public_samples
from unalike.core.engine import Watch
from unalike.core.lazy_clients import LazyClients, examples_of
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.data.samples import Inputs, Samples
from unalike.engines import engine_class, hosts_clients
from unalike.runs.compatibility import check_clients
from unalike.runs.execution import Run, ignore
from unalike.runs.label_statistics import label_statistics
from unalike.runs.plan import RunPlan
from unalike.runs.result import Result
from unalike.runs.run_folder import Folder, config_differences, without_resumable
from unalike.scenarios import Scenario, build_server, parse_scenario
from unalike.scenarios.build import describe_shortages, try_build_clients
from unalike.scenarios.options import engine_options as parse_engine_options
from unalike.scenarios.schema import Named
from unalike.scenarios.validate import validate_algorithm
from unalike.tracking import check_trackers
from unalike.tracking.follow import track_live
from unalike.training.loop import Training


def run(
    algorithm: Algorithm,
    clients: Iterable[Client] | LazyClients,
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
    accept_changes: bool = False,
    track: str | list[str] | None = None,
) -> Result:
    """Run a method on clients made in Python.

    Args:
        algorithm: the method with its hyperparameters, such as `unalike.FedMuscle(peers=3)`.
        clients: the participants; `unalike.LazyClients` for very many, each built when it first
            takes part.
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
        accept_changes: with `resume`, go on although code, versions or threads have changed.
        track: trackers that get the curves, settings and report: "tensorboard", "mlflow", "wandb",
            "trackio", or a list of them.
    Returns: the results; `result.folder` holds everything else.
    Raises: UserError where method, clients and settings do not fit each other, QuorumError where
        too many clients failed.
    """
    algorithm = validate_algorithm(algorithm)
    clients = _as_sequence(clients)
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
        if isinstance(clients, LazyClients):
            rows = as_public_samples(public)
            clients = clients.changed(partial(_with_public, public=rows))
        else:
            rows = as_public_samples(public, lambda: all(c.accepts_missing() for c in clients))
            clients = [_with_public(client, rows) for client in clients]
        server = _with_public(server, rows) if server is not None else None
    trackers = check_trackers([track] if isinstance(track, str) else list(track or ()))
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
        config = _python_config(execution, named) | {"track": trackers}
        _open_folder(execution, out, config, resume)
        if accept_changes:
            execution.accept_changes()
        result = execute(execution, progress)
    result._clients = clients
    result._algorithm = algorithm
    return result


def _as_sequence(clients: Any) -> Sequence[Client]:
    if isinstance(clients, Client):
        return [clients]
    return clients if isinstance(clients, LazyClients) else list(clients)


def _check_types(
    training: Any, federation: Any, privacy: Any, server: Any, clients: Sequence[Any]
) -> None:
    """Raise UserError for settings or clients that were not made by their classes."""
    expected: list[tuple[str, Any, type]] = [
        ("training", training, Training),
        ("federation", federation, FederationConfig),
    ]
    if privacy is not None:
        expected.append(("privacy", privacy, Privacy))
    expected += [("each client", client, Client) for client in examples_of(clients)]
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
        "clients": _client_entries(execution),
        "seed": plan.seed,
        "python": True,
        "engine": engine.model_dump(),
        "replay": str(plan.replay) if plan.replay else plan.replay,
    }
    return to_plain(config)


def _client_entries(execution: Run) -> list[dict[str, Any]]:
    """What each client announces; of lazy clients the first and the last, and their number."""
    clients = execution.plan.clients
    if not isinstance(clients, LazyClients):
        return [info.as_dict() for info in execution.infos.values()]
    examples = [client.info().as_dict() for client in clients.examples()]
    return [{**entry, "lazy_clients": len(clients)} for entry in examples]


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
    free = {key: config[key] for key in ("engine", "track")}
    changes = config_differences(execution.folder.config | free, config)
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
    report: bool = True,
) -> tuple[Result, Path]:
    """Run a scenario in a new folder.

    Args:
        scenario: as it was read.
        algorithm: its method.
        out: the run's folder; by default a new one below `runs/`.
        data_dir: where data files are.
        source: where the scenario was read, for error messages.
        watch: called as `watch(event, **facts)` while the run goes on.
        report: draw report.html at the end; `unalike report` draws it later.
    Returns: the results, and the run's folder.
    """
    config = scenario.model_dump(mode="json")
    check_trackers(scenario.track)
    config["algorithm"] = {"name": scenario.algorithm.name, **vars(algorithm)}
    config["data_dir"] = data_dir or scenario.data_dir
    config["engine"] = with_absolute_paths(config["engine"])
    execution = prepare(scenario, algorithm, None, data_dir, source or scenario.name, watch)
    path = run_path(out, scenario.name, scenario.algorithm.name, scenario.seed)
    folder = create_folder(execution, path, config)
    return execute(execution, report=report), folder.path


def with_absolute_paths(engine: dict[str, Any]) -> dict[str, Any]:
    """An engine's options with paths that hold in any folder, so that a run is resumed from any."""
    paths: tuple[str, ...] = getattr(engine_class(engine["name"]), "PATHS", ())
    absolute = {key: str(Path(engine[key]).resolve()) for key in paths if engine.get(key)}
    return engine | absolute


def create_folder(execution: Run, path: Path, config: dict[str, Any]) -> Folder:
    """Create the folder of a run and record which labels its clients hold."""
    execution.folder = Folder.create(path, config)
    statistics = label_statistics(execution.plan.clients)
    if statistics is not None:
        execution.folder.record("labels", **statistics)
    return execution.folder


def resume(
    path: str | Path,
    watch: Watch = ignore,
    progress: bool = False,
    accept_changes: bool = False,
    rounds: int | None = None,
) -> Result:
    """Go on with a run of a scenario after its last finished round.

    The end is the same as if the run had never stopped. A finished run returns its results, unless
    it is to have more rounds.

    Args:
        path: the run's folder.
        watch: called as `watch(event, **facts)` while the run goes on.
        progress: show a progress bar.
        accept_changes: go on although code, versions or threads are not those the run began with;
            the end is then another, and the results list all of them.
        rounds: let a finished run go on until so many rounds, see `extend`.
    Raises: UserError where the run was started from Python, its config was edited, its files were
        changed, or another process is at work on it.
    """
    folder = Folder.open(Path(path))
    if rounds is not None:
        extend(folder, rounds)
    results = folder.results
    if results is not None:
        _check_unedited(folder)
        return Result(results)
    execution = reopen(folder, watch)
    if accept_changes:
        execution.accept_changes()
    return execute(execution, progress)


def _check_unedited(folder: Folder) -> None:
    """Raise UserError where the config is not the one that the run began, or was extended, with."""
    start = folder.config_at_start
    if start is None:
        return
    changes = config_differences(without_resumable(start), without_resumable(folder.config))
    if changes:
        source = folder.path / "config.yaml"
        done = "; its results are of the config before" if folder.results is not None else ""
        raise UserError(
            f"{source} was edited since the run began: {', '.join(changes[:3])}{done}. Put it "
            f"back, or begin a new run: unalike run {source}. For more rounds of a finished run: "
            f"unalike resume {folder.path} --rounds N"
        )


def extend(folder: Folder, rounds: int) -> None:
    """Let a finished run go on until it has more rounds.

    The end is that of a run of so many rounds from the start, unless its method asks for the number
    of rounds. The results until now are kept as `results-N.json`; the local baseline is trained
    again, for as many rounds.

    Args:
        folder: of a finished run.
        rounds: in all, not in addition.
    Raises: UserError where the run has not finished, has as many rounds, or cannot go on.
    """
    path = folder.path
    with folder.lock():
        results = folder.results
        if results is None:
            raise UserError(f"{path} has not finished: resume it without --rounds first")
        _check_unedited(folder)
        config = folder.config
        before = config["training"]["rounds"]
        if rounds <= before:
            raise UserError(f"{path} has {before} rounds: --rounds takes more, got {rounds}")
        if config["training"].get("schedule", "constant") != "constant":
            raise UserError(
                f"the learning rate of {path} follows a schedule over its {before} rounds, so it "
                f"cannot go on: begin a new run with --set rounds={rounds}"
            )
        if not hosts_clients(config["engine"]["name"]):
            raise UserError(
                f"clients of {path} are with their organisations, who agreed to {before} rounds: "
                f"begin a new run with --set rounds={rounds}"
            )
        if not folder.has_checkpoints():
            raise UserError(f"{path} has no checkpoint to go on from: begin a new run")
        folder.extend(rounds)


def reopen(folder: Folder, watch: Watch = ignore) -> Run:
    """Build the run that a folder holds, ready to go on."""
    config = folder.config
    if config.get("python"):
        raise UserError(
            f"{folder.path} was started from Python with clients that only that program can make; "
            "call unalike.run(..., resume=True) there"
        )
    _check_unedited(folder)
    source = str(folder.path / "config.yaml")
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
        # Code of the user's may change without our noticing.
        use_cache=not own_names(scenario.model_dump(exclude={"modules"})),
        source=source,
        server=build_server(scenario, data_dir),
        notices=describe_shortages(scenario, clients),
    )
    return Run(plan, folder, watch)


def engine_options(source: str, engine: Named, workers: int) -> dict[str, Any]:
    """Return the options of an engine, checked and converted to their types."""
    options, problems = parse_engine_options(engine, workers)
    if problems:
        raise Problems(source, problems)
    return options


def execute(execution: Run, progress: bool = False, report: bool = True) -> Result:
    """Run to the end, write the report if asked, and return the results.

    An exception is recorded in the run's events with its traceback, then raised.
    """
    from unalike.report import write

    if progress:
        return _execute_with_progress_bar(execution)
    path = execution.folder.path
    trackers = execution.folder.config.get("track") or []
    watch = execution.watch
    with track_live(path, trackers, watch, quiet=watch is ignore) as execution.watch:
        try:
            results = execution.execute()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # a full disk may be the very error
                execution.folder.record("failed", error=message, traceback=format_traceback(error))
            raise
        if report:
            execution.watch("stage", text="the report")
            write(path)
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


def run_path(out: str | Path | None, name: str, method: str, seed: int) -> Path:
    """Return `out`, or a path below runs/ that does not exist yet, whatever the name holds."""
    if out is not None:
        return Path(out)
    safe_name = re.sub(r"[^\w-]+", "-", f"{name}-{method}").strip("-") or "run"
    base = Path("runs") / f"{safe_name}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = base
    number = 1
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path
