"""The local baseline: every client trained alone, with the data, order and budget of the run.

Its values are what gains are measured against. They do not depend on the method unless the method
changes what a client does alone, so they are cached and shared between runs.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from unalike.algorithms.local import Local
from unalike.base.cache import cache_folder
from unalike.base.integrity import seal, unseal
from unalike.core.client import Client
from unalike.core.engine import Engine
from unalike.core.federation import Federation, Replies
from unalike.core.participation import FederationConfig
from unalike.core.program import ClientProgram
from unalike.data.samples import Samples, fingerprint
from unalike.runs.environment import environment
from unalike.runs.plan import RunPlan
from unalike.runs.run_folder import BASELINE, Folder

Metrics = dict[str, dict[str, float]]  # by client, then by metric

# What of a client's program decides how it trains alone. A method that changes none of these
# shares its local baseline with plain local training.
TRAINING_METHODS = ("train", "task_loss", "learn", "optimizer", "evaluate")


class LocalBaseline:
    """Trains all clients of a plan alone, or reads the values of an equal training from the cache.

    Args:
        plan: what to run.
        architectures: the printed model of one client of each kind, as the dry run built it.
        folder: the run's folder; its alone.json holds the values once they are known.
        build_engine: makes an engine with the plan's clients that stores states in a folder.
        emit: records an event of the run.
    """

    def __init__(
        self,
        plan: RunPlan,
        architectures: list[str],
        folder: Folder,
        build_engine: Callable[[Path], Engine],
        emit: Callable[..., None],
    ):
        self.plan = plan
        self.architectures = architectures
        self.folder = folder
        self.build_engine = build_engine
        self.emit = emit
        self.evaluations: list[dict[str, Any]] = []

    def values(self, digest: str | None = None) -> Metrics:
        """Return the metrics of each client after training alone.

        Args:
            digest: hash of the file that the run went on with, where it is known. A file that was
                changed since is reported, and the clients are trained again.
        """
        known = self.folder.read_baseline(digest)
        if known is not None:
            return known
        if (self.folder.path / BASELINE).exists():
            reason = (
                f"{self.folder.path / BASELINE} was changed; each client is trained alone again"
            )
            self.emit("damaged", reason=reason, round=0)
        self.emit("stage", text="alone", round=0)
        states = self.folder.path / "checkpoints" / "alone"
        engine = self.build_engine(states)
        try:
            values = self._train_or_recall(engine)
        finally:
            engine.close()
            shutil.rmtree(states, ignore_errors=True)
        self.folder.write_json(BASELINE, seal(values))
        return values

    def _train_or_recall(self, engine: Engine) -> Metrics:
        engine.load(0, 0.0, [])
        fed = self._federation(engine)
        self.plan.algorithm.alone(fed)
        path = None
        if self.plan.use_cache:
            initial = fed.call("describe", clients=fed.clients, quorum=0)
            path = cache_path(self.plan, self.architectures, initial)
        cached = read_cache(path) if path is not None else None
        if cached is not None:
            for event in cached["evaluations"]:
                self.emit("evaluation", **event)
            return cached["values"]
        metrics: Replies | None = None
        for number in Local().serve(fed):
            fed.finished = number
            metrics = fed.evaluate()
            self.emit("alone", round=number)
        values = dict(metrics or {})  # the last round is always measured
        if path is not None:
            write_cache(path, {"values": values, "evaluations": self.evaluations})
        return values

    def _federation(self, engine: Engine) -> Federation:
        """The clients as local training sees them: same rounds and dropout, no quorum."""
        config = self.plan.federation
        fed = Federation(
            engine,
            training=self.plan.training,
            config=FederationConfig(
                evaluations=config.evaluations,
                participation=config.participation,
                dropout=config.dropout,
                quorum=0,
            ),
            seed=self.plan.seed,
            algorithm=self.plan.algorithm,
            log_event=self._log_event,
        )
        personalised = self.plan.algorithm.keeps_own_models()
        have_common = all(info.tested_on == "common" for info in fed.infos.values())
        # Measured on the same test rows as the federated models will be.
        fed.evaluator = lambda fed: fed.call(
            "evaluate", clients=fed.clients, quorum=0, common=have_common and not personalised
        )
        return fed

    def _log_event(self, event: str, **facts: Any) -> None:
        """Record evaluations, failures and who will work together; leave everything else out."""
        if event == "evaluation":
            self.evaluations.append({**facts, "who": "alone"})
            self.emit("evaluation", **self.evaluations[-1])
        elif event in ("failure", "sharing"):
            self.emit(event, **facts)


def cache_path(plan: RunPlan, architectures: list[str], initial: dict[str, Any]) -> Path:
    """Return where the values of this very training are cached.

    Equal paths mean equal code, versions, threads, clients, data, budget, seed and initial weights;
    and an equal method, where the method changes what a client does alone.

    Args:
        plan: what to run.
        architectures: printed models, see `LocalBaseline`.
        initial: replies to `describe` before the first round, with a hash of each model.
    """
    program = plan.algorithm.Program
    changes_training = any(
        getattr(program, name) is not getattr(ClientProgram, name) for name in TRAINING_METHODS
    )
    method: Any = "as local"
    if changes_training:
        method = [f"{program.__module__}.{program.__qualname__}", vars(plan.algorithm)]
    changes_model = program.build is not ClientProgram.build
    key = {
        "method": method,
        "architectures": architectures if changes_model else [],
        "training": plan.training.model_dump(),
        "seed": plan.seed,
        "personalised": plan.algorithm.keeps_own_models(),
        "federation": plan.federation.model_dump(),
        "environment": environment(plan.threads),
        "clients": {c.id: _describe_client(c, initial.get(c.id)) for c in plan.clients},
    }
    digest = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()
    return cache_folder() / "alone" / f"{digest[:32]}.json"


def _describe_client(client: Client, initial: Any) -> dict[str, Any]:
    """What of a client decides how it trains alone."""
    return {
        "model": initial,
        "task": repr(client.task),
        "capacity": client.capacity,
        "dtype": str(client.dtype),
        "device": client.device,
        "train": fingerprint(client.train),
        "test": _fingerprint_or_zero(client.test),
        "common": _fingerprint_or_zero(client.common),
    }


def _fingerprint_or_zero(samples: Samples | None) -> str | int:
    return fingerprint(samples) if samples is not None else 0


def read_cache(path: Path) -> dict[str, Any] | None:
    """Return what an earlier run wrote; None where there is nothing that can be read."""
    try:
        entry = unseal(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.keys() != {"values", "evaluations"}:
        return None
    return entry


def write_cache(path: Path, entry: dict[str, Any]) -> None:
    """Write an entry whole; a cache that cannot be written is done without."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(seal(entry)))
        partial.replace(path)
