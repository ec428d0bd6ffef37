"""What to run: one value with everything a run needs to know, and the part that travels.

A server and its clients must agree on the method, its settings and the seed. That part can be
written as plain values, from which a client builds its program; no code travels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from unalike.base.errors import Problems, Refusal
from unalike.base.registry import own_names
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client, ClientInfo
from unalike.core.lazy_clients import LazyClients
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.scenarios.validate import parse_algorithm
from unalike.training.loop import Training


@dataclass
class RunPlan:
    """A method, its clients and all settings of a run.

    Attributes:
        algorithm: the method with its hyperparameters.
        clients: the participants, perhaps lazy; empty where other organisations bring them.
        training: rounds, local epochs, learning rate, batch size, optimizer.
        federation: participation, dropout, deadline, quorum and message limits.
        name: the scenario's name, for folders and reports.
        method: the method's name, for folders and reports.
        seed: all random numbers of the run derive from it.
        engine: name of the engine that carries messages.
        engine_options: options of that engine.
        replay: folder of an asynchronous run whose order of arrivals is repeated.
        threads: CPU threads of this process.
        max_loaded_clients: clients in memory at once; the others wait on disk.
        local_baseline: also train every client alone, to compare.
        safeguard: each client keeps the better of both models by its own data.
        privacy: clipping and noise on what clients send.
        checkpoint: rounds between two checkpoints.
        use_cache: keep values of the local baseline between runs.
        source: file the plan was read from, for error messages.
        server: model and data of the server itself, for methods that train one.
        infos: what the clients announce; given where the clients are not in this process.
        notices: sentences that the user should read before the run.
    """

    algorithm: Algorithm
    clients: Sequence[Client]
    training: Training = field(default_factory=Training)
    federation: FederationConfig = field(default_factory=FederationConfig)
    name: str = "own"
    method: str = ""
    seed: int = 0
    engine: str = "local"
    engine_options: dict[str, Any] = field(default_factory=dict)
    replay: str | Path | None = None
    threads: int = 1
    max_loaded_clients: int = 256
    local_baseline: bool = True
    safeguard: bool = False
    privacy: Privacy | None = None
    checkpoint: int = 1
    use_cache: bool = False
    source: str | None = None
    server: Client | None = None
    infos: Mapping[str, ClientInfo] | None = None
    notices: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.method = self.method or type(self.algorithm).__name__.lower()

    @property
    def noise_is_secret(self) -> bool:
        """Whether clients draw noise that nobody can draw again, as in a real deployment."""
        return self.privacy is not None and self.privacy.entropy == "secret"

    @property
    def lazy(self) -> bool:
        """Whether clients are built when they first take part."""
        return isinstance(self.clients, LazyClients)

    @property
    def compares(self) -> bool:
        """Whether clients are also trained alone.

        One client would be compared with itself. Where noise is secret or a client asks for
        privacy, training without protection would tell what privacy is to hide. Lazy clients
        are too many to train them all.
        """
        if self.lazy:
            return False
        sample = getattr(self.algorithm, "sample", None) or {}
        secret = self.noise_is_secret or sample.get("entropy") == "secret"
        protected = secret or any(client.privacy for client in self.clients)
        return self.local_baseline and len(self.clients) != 1 and not protected


def plan_to_dict(
    algorithm: Algorithm,
    method: str,
    training: Training,
    seed: int,
    guarded: bool,
    privacy: Privacy | None,
) -> dict[str, Any]:
    """Write what a client needs to build its program as plain values, as a server sends it."""
    hyperparameters = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    return {
        "algorithm": {"name": method, **hyperparameters},
        "seed": seed,
        "training": training.model_dump(),
        "guarded": guarded,
        "privacy": privacy.model_dump() if privacy is not None else None,
    }


def plan_from_dict(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build_runtime` from what `plan_to_dict` wrote.

    Raises: Refusal where this installation does not know the method or one of its fields, or the
        server names code by `module:name`.
    """
    own = own_names([plan["algorithm"].get("name"), plan["training"].get("optimizer")])
    if own:  # a client imports nothing because a server says so
        raise Refusal(
            f"the server names {own[0]}, and only what is installed here under a name of its own "
            "is run: put it into a package with an entry point (docs/scenarios.md) that all install"
        )
    algorithm, problems, _ = parse_algorithm(plan["algorithm"])
    if algorithm is None or problems:
        raise Refusal(str(Problems("what the server wants to run", problems)))
    return {
        "algorithm": algorithm,
        "training": Training(**plan["training"]),
        "seed": int(plan["seed"]),
        "guarded": bool(plan["guarded"]),
        "privacy": Privacy(**plan["privacy"]) if plan["privacy"] else None,
    }
