"""A scenario for use from Python: its clients, public set and settings, ready to run."""

from dataclasses import dataclass
from typing import Any

from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.core.participation import FederationConfig
from unalike.data import Samples
from unalike.runs.api import run
from unalike.runs.result import Result
from unalike.scenarios import build_clients, build_server, load
from unalike.training.loop import Training


@dataclass
class LoadedScenario:
    """What a scenario describes, to run with a method of one's own.

    Attributes:
        name: the scenario's.
        clients: its clients, with their data and the public set.
        public: the public set, None where there is none.
        training: rounds, local epochs, learning rate, batch size, optimizer.
        federation: participation, dropout, deadline, quorum and message limits.
        algorithm: the scenario's own method.
        server: model and data of the server itself, for methods that train one.
        seed: decides which rows each client holds, and all random numbers of a run.
    """

    name: str
    clients: list[Client]
    public: Samples | None
    training: Training
    federation: FederationConfig
    algorithm: Algorithm
    server: Client | None
    seed: int

    def run(self, algorithm: Algorithm | None = None, **options: Any) -> Result:
        """Run a method on the scenario, by default the scenario's own.

        Args:
            algorithm: the method with its hyperparameters.
            options: of `unalike.run`, such as `out=`, `training=` or `progress=True`.
        """
        settings: dict[str, Any] = {
            "training": self.training,
            "federation": self.federation,
            "seed": self.seed,
            "name": self.name,
            "server": self.server,
        }
        return run(algorithm or self.algorithm, self.clients, **(settings | options))


def scenario(
    name: str,
    settings: list[str] | None = None,
    *,
    seed: int | None = None,
    data_dir: str | None = None,
) -> LoadedScenario:
    """A shipped scenario, or one of a file, for use from Python.

    Args:
        name: of a shipped scenario (`unalike list scenarios`), or the path of a YAML file.
        settings: changes, as the command's `--set`: `["rounds=5", "clients.ada.train=20"]`.
        seed: instead of the scenario's.
        data_dir: folder of the datasets; default: UNALIKE_DATA.
    Raises: UserError, or Problems with everything that is wrong with the scenario.
    """
    described, algorithm = load(name, None, settings, seed=seed)
    clients = list(build_clients(described, data_dir))
    public = next((client.public for client in clients if client.public is not None), None)
    return LoadedScenario(
        name=described.name,
        clients=clients,
        public=public,
        training=described.training,
        federation=described.federation,
        algorithm=algorithm,
        server=build_server(described, data_dir),
        seed=described.seed,
    )
