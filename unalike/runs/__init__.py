"""Runs: one execution each, in a folder that tells all of it and from which it can go on."""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import stack

from unalike.base.errors import Problems, UserError
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client, unlabelled
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.data import Tensors
from unalike.engines import hosts_clients
from unalike.runs.compatibility import compatibility_problems
from unalike.runs.run import Run, Watch
from unalike.runs.run_folder import Folder
from unalike.scenarios import Scenario, build_server, parse_scenario
from unalike.scenarios.build import try_build_clients
from unalike.scenarios.options import engine_options as parse_engine_options
from unalike.scenarios.schema import Named
from unalike.scenarios.validate import validate_algorithm
from unalike.training.loop import Training

FREE = (
    "engine",
    "workers",
    "threads",
    "device",
    "data_dir",
    "checkpoint",
)  # where a run is computed and kept: may change on the way


def quiet(event: str, **facts: Any) -> None:
    """Nobody watches."""


def run(
    algorithm: Algorithm,
    clients: Iterable[Client],
    *,
    public: Any = None,
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
    watch: Watch = quiet,
) -> dict[str, Any]:
    """Run a method on clients of your own and return the results; the run's folder, `results["folder"]`, has everything else.

    `public` is the unlabelled set every client may read: inputs as a tensor, a dataset or Samples. `resume=True` goes on with the
    run in `out` if there is one; clients and settings must be the same again. `progress=True` shows how far it is. `engine` is a name
    or a dict with its options too, `{"name": "ray", "gpus": 0.25}`; `replay` a run whose order of arrivals is kept (docs/engines.md).
    `server` is a model of the server's own with the data it learns from, for methods that have use for one (docs/creamfl.md).
    """
    algorithm, training, federation = (
        validate_algorithm(algorithm),
        training or Training(),
        federation or FederationConfig(),
    )
    clients = [clients] if isinstance(clients, Client) else list(clients)
    given = [
        ("training", training, Training),
        ("federation", federation, FederationConfig),
        *([("privacy", privacy, Privacy)] if privacy is not None else []),
        *(("each client", c, Client) for c in clients),
        *([("server", server, Client)] if server is not None else []),
    ]
    for what, value, kind in given:
        if not isinstance(value, kind):
            raise UserError(f"{what} must be made by unalike.{kind.__name__}(...), got {value!r}")
    for what, value, least in [
        ("seed", seed, None),
        ("workers", workers, 0),
        ("threads", threads, 1),
        ("alive", alive, 1),
    ]:
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or (least is not None and value < least)
        ):
            raise UserError(
                f"{what} must be a whole number{'' if least is None else f', at least {least}'}, got {value!r}"
            )
    if resume and out is None:
        raise UserError("resume=True needs out=, the folder of the run to go on with")
    if public is not None:
        public = unlabelled(public)
        clients = [replace(c, public=public) if c.public is None else c for c in clients]
        server = (
            replace(server, public=public)
            if server is not None and server.public is None
            else server
        )
    method = type(algorithm).__name__.lower()
    if not isinstance(engine, str) and not (
        isinstance(engine, dict) and isinstance(engine.get("name"), str)
    ):
        raise UserError(f'engine is a name, or a dict with "name" and its options, got {engine!r}')
    carrier = Named.model_validate({"name": engine} if isinstance(engine, str) else engine)
    if clients and not hosts_clients(carrier.name):
        raise UserError(
            "clients made in Python cannot go to another organisation: each describes its own in "
            "a client.yaml, with a factory where Python is needed; pass clients=[] here "
            "(docs/engines.md)"
        )
    made = Run(
        None,
        algorithm,
        clients,
        training,
        federation,
        name=name,
        method=method,
        seed=seed,
        engine=carrier.name,
        options=engine_options("unalike.run", carrier, workers),
        replay=replay,
        threads=threads,
        alive=alive,
        alone=alone,
        safeguard=safeguard,
        privacy=privacy,
        source="unalike.run",
        server=server,
        watch=watch,
    )
    config = plain(
        {
            "name": name,
            "summary": "clients given in Python",
            "algorithm": {"name": method, **vars(algorithm)},
            "training": training.model_dump(),
            "federation": federation.model_dump(),
            "safeguard": safeguard,
            "alone": alone,
            "privacy": privacy.model_dump() if privacy is not None else None,
            "clients": [info.as_dict() for info in made.infos.values()],
            "seed": seed,
            "python": True,
            "engine": carrier.model_dump(),
            "replay": replay and str(replay),
        }
    )
    path = place(out, name, method, seed)
    if resume and (path / "config.yaml").exists():
        made.folder = Folder.open(path)
        if changed := differences(made.folder.config | {"engine": config["engine"]}, config):
            raise UserError(
                f"{path} holds another run: {', '.join(changed[:3])}; resume it as it was, or choose another folder"
            )
    else:
        begin(made, path, config)
    return report(made, progress)


def run_scenario(
    scenario: Scenario,
    algorithm: Algorithm,
    *,
    out: str | Path | None = None,
    data_dir: str | None = None,
    source: str | None = None,
    watch: Watch = quiet,
) -> tuple[dict[str, Any], Path]:
    """Run a scenario in a new folder; `source` is where it was read, for what is wrong with it."""
    config = scenario.model_dump(mode="json") | {
        "algorithm": {"name": scenario.algorithm.name, **vars(algorithm)},
        "data_dir": data_dir or scenario.data_dir,
    }
    made = prepare(scenario, algorithm, None, data_dir, source or scenario.name, watch)
    folder = begin(made, place(out, scenario.name, scenario.algorithm.name, scenario.seed), config)
    return report(made), folder.path


def begin(made: Run, path: Path, config: dict[str, Any]) -> Folder:
    """A new folder for a run, with what its clients hold written down."""
    made.folder = Folder.create(path, config)
    if (told := held_labels(made.clients)) is not None:
        made.folder.event("labels", **told)
    return made.folder


def held_labels(clients: list[Client]) -> dict[str, Any] | None:
    """Which labels each client holds and, of multi-label ones, which go together; None where clients have unlike labels.

    For the report's pictures: a simulation may look, a server never sees it.
    """
    if not clients:  # between organisations they are elsewhere
        return None
    task, counts, pairs = clients[0].task, {}, {}
    countable = task.classifies and not task.dense
    if not countable or any(c.task.labels != task.labels for c in clients):
        return None
    for client in clients:
        if not isinstance(client.train, Tensors) or client.train.y is None:
            return None
        y = client.train.y[client.train.index]
        marks = task.label_matrix(y).long()
        counts[client.id] = marks.sum(0).tolist()
        if task.multilabel:
            pairs[client.id] = marks.mT @ marks
    together = stack(list(pairs.values())).sum(0).tolist() if pairs else None
    return {
        "labels": task.labels,
        "counts": counts,
        "together": together,
        "pairs": {id: matrix.tolist() for id, matrix in list(pairs.items())[:5]},
    }


def resume(path: str | Path, watch: Watch = quiet, progress: bool = False) -> dict[str, Any]:
    """Go on from the last finished round; the end is the same as if nothing had happened."""
    folder = Folder.open(Path(path))
    if (done := folder.results) is not None:
        return done
    return report(reopen(folder, watch), progress)


def reopen(folder: Folder, watch: Watch = quiet) -> Run:
    """The run behind a folder, ready to go on."""
    config = folder.config
    if config.get("python"):
        raise UserError(
            f"{folder.path} was started from Python with clients that only that program can make; "
            "call unalike.run(..., resume=True) there"
        )
    free = dict.fromkeys(FREE)  # None for both
    if (begun := folder.begun) is not None and (
        changed := differences(begun | free, config | free)
    ):
        raise UserError(
            f"{folder.path / 'config.yaml'} was edited since the run began: {', '.join(changed[:3])}; put it back, or begin "
            f"a new run: unalike run {folder.path / 'config.yaml'}"
        )
    data_dir = config.pop("data_dir", None)
    source = str(folder.path / "config.yaml")
    return prepare(*parse_scenario(config, source), folder, data_dir, source, watch)


def prepare(
    scenario: Scenario,
    algorithm: Algorithm,
    folder: Folder | None,
    data_dir: str | None,
    source: str,
    watch: Watch = quiet,
) -> Run:
    clients, problems = try_build_clients(scenario, data_dir)
    if problems:
        raise Problems(
            source,
            problems
            + compatibility_problems(
                algorithm,
                clients,
                scenario.training,
                scenario.seed,
                scenario.safeguard,
                scenario.privacy,
            ),
        )
    return Run(
        folder,
        algorithm,
        clients,
        scenario.training,
        scenario.federation,
        name=scenario.name,
        method=scenario.algorithm.name,
        seed=scenario.seed,
        engine=scenario.engine.name,
        options=engine_options(source, scenario.engine, scenario.workers),
        replay=scenario.replay,
        threads=scenario.threads,
        alone=scenario.alone,
        safeguard=scenario.safeguard,
        privacy=scenario.privacy,
        checkpoint=scenario.checkpoint,
        cache=True,
        source=source,
        server=build_server(scenario, data_dir),
        watch=watch,
    )


def engine_options(source: str, named: Named, workers: int) -> dict[str, Any]:
    good, problems = parse_engine_options(named, workers)
    if problems:
        raise Problems(source, problems)
    return good


def report(made: Run, progress: bool = False) -> dict[str, Any]:
    from unalike.report import write

    if progress:
        from unalike.report.progress import progress as bar

        watch = made.watch
        with bar() as shown:
            made.watch = lambda event, **facts: (shown(event, **facts), watch(event, **facts))[1]
            return report(made)
    results = made.go()
    made.watch("stage", text="the report")
    write(made.folder.path)
    return results


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Numbers, words, lists and mappings only: tensors as lists, and of what else a method of one's own may hold, the name."""

    def name(value: Any) -> Any:
        return (
            value.tolist()
            if hasattr(value, "tolist")
            else getattr(value, "__qualname__", type(value).__qualname__)
        )

    return json.loads(json.dumps(config, default=name))


def differences(was: Any, now: Any, where: str = "") -> list[str]:
    """What changed between two configs, a few words each; clients go by their id.

    >>> differences({"seed": 0, "training": {"rounds": 3}}, {"seed": 0, "training": {"rounds": 5}})
    ['training.rounds was 3, is 5']
    """
    if where == "clients":
        was, now = ({info["id"]: info for info in infos or []} for infos in (was, now))
    if not isinstance(was, dict) or not isinstance(now, dict):
        return [] if was == now else [f"{where} was {was}, is {now}"]
    at = f"{where}." if where else ""
    return [
        told
        for key in {**was, **now}
        for told in differences(was.get(key), now.get(key), f"{at}{key}")
    ]


def place(out: str | Path | None, name: str, method: str, seed: int) -> Path:
    """The folder asked for, or a new one under runs/, whatever the name."""
    if out is not None:
        return Path(out)
    plain_name = re.sub(r"[^\w-]+", "-", name).strip("-") or "run"
    base = Path("runs") / f"{plain_name}-{method}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        path, n = base.with_name(f"{base.name}-{n}"), n + 1
    return path
