"""Runs: one execution each, in a folder that tells all of it and from which it can go on."""

import time
from pathlib import Path
from typing import Any

from unalike.algorithm import Algorithm
from unalike.client import Client
from unalike.data.samples import samples
from unalike.errors import UserError
from unalike.federation import Terms
from unalike.runs.folder import Folder
from unalike.runs.run import Run, Watch
from unalike.scenarios import Scenario, build, read
from unalike.training import Training


def quiet(event: str, **facts: Any) -> None:
    """Nobody watches."""


def run(algorithm: Algorithm, clients: list[Client], *, public: Any = None, training: Training | None = None,
        terms: Terms | None = None, seed: int = 0, workers: int = 0, threads: int = 1, alive: int = 256, out: str | Path | None = None,
        alone: bool = True, safeguard: bool = False, resume: bool = False, name: str = "own", watch: Watch = quiet) -> dict[str, Any]:
    """Run a method on clients of your own and return the results; the run's folder has everything else.

    `public` is the unlabelled set every client may read: inputs as a tensor, a dataset or Samples. `resume=True` goes on with the
    run in `out` if there is one; the clients must be the same again.
    """
    if public is not None:
        public = samples((public, None)) if hasattr(public, "dim") else samples(public)
        for client in clients:
            client.public = client.public if client.public is not None else public
    training, terms, method = training or Training(), terms or Terms(), type(algorithm).__name__.lower()
    config = {"name": name, "summary": "clients given in Python", "algorithm": {"name": method, **vars(algorithm)},
              "training": training.model_dump(), "federation": terms.model_dump(), "clients": [c.card().as_dict() for c in clients],
              "seed": seed, "python": True}
    made = Run(None, algorithm, clients, training, terms, name=name, method=method, seed=seed, workers=workers, threads=threads,
               alive=alive, alone=alone, safeguard=safeguard, watch=watch)
    path = place(out, name, method, seed)
    going_on = resume and (path / "config.yaml").exists()
    made.folder = Folder.open(path) if going_on else Folder.create(path, config)
    if going_on and (was := {k: v for k, v in made.folder.config.items() if k != "summary"}) != {k: config[k] for k in was if k in config}:
        raise UserError(f"{out} holds a run with other clients or settings; resume needs the same ones")
    return report(made)


def run_scenario(scenario: Scenario, algorithm: Algorithm, *, out: str | Path | None = None, data_dir: str | None = None,
                 watch: Watch = quiet) -> tuple[dict[str, Any], Path]:
    """Run a scenario in a new folder."""
    config = scenario.model_dump(mode="json") | {"algorithm": {"name": scenario.algorithm.name, **vars(algorithm)}}
    made = prepare(scenario, algorithm, None, data_dir, watch)
    made.folder = Folder.create(place(out, scenario.name, scenario.algorithm.name, scenario.seed), config | {"data_dir": data_dir})
    return report(made), made.folder.path


def resume(path: str | Path, watch: Watch = quiet) -> dict[str, Any]:
    """Go on from the last finished round; the end is the same as if nothing had happened."""
    folder = Folder.open(Path(path))
    if (done := folder.results) is not None:
        return done
    return report(reopen(folder, watch))


def reopen(folder: Folder, watch: Watch = quiet) -> Run:
    """The run behind a folder, ready to go on."""
    config = folder.config
    if config.get("python"):
        raise UserError(f"{folder.path} was started from Python with clients that only that program can make; "
                        "call unalike.run(..., resume=True) there")
    data_dir = config.pop("data_dir", None)
    scenario, algorithm = read(config, str(folder.path / "config.yaml"))
    return prepare(scenario, algorithm, folder, data_dir, watch)


def prepare(scenario: Scenario, algorithm: Algorithm, folder: Folder | None, data_dir: str | None, watch: Watch) -> Run:
    clients = build.clients(scenario, data_dir)
    return Run(folder, algorithm, clients, scenario.training, scenario.federation, name=scenario.name, method=scenario.algorithm.name,
               seed=scenario.seed, workers=scenario.workers, threads=scenario.threads, alone=scenario.alone, safeguard=scenario.safeguard,
               checkpoint=scenario.checkpoint, cache=True, watch=watch)


def report(made: Run) -> dict[str, Any]:
    results = made.go()
    from unalike.report import write
    made.watch("stage", text="the report")
    write(made.folder.path)
    return results


def place(out: str | Path | None, name: str, method: str, seed: int) -> Path:
    """The folder asked for, or a new one under runs/."""
    if out is not None:
        return Path(out)
    base = Path("runs") / f"{name}-{method}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        path, n = base.with_name(f"{base.name}-{n}"), n + 1
    return path
