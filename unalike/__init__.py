"""Unalike: federated learning for clients with different models, tasks, labels or compute.

Everything a program needs is here: `unalike.Client`, `unalike.FedMuscle`, `unalike.run` ...
Each name is imported when it is first used, so that `import unalike` and `unalike --help` do not
wait for torch. Type checkers and editors read the imports below `TYPE_CHECKING` instead.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from unalike.base.version import __version__

if TYPE_CHECKING:
    from unalike.algorithms import *  # noqa: F403
    from unalike.base.errors import Problems, Refusal, RunError, UserError
    from unalike.base.randomness import scope, stream
    from unalike.core.algorithm import Algorithm
    from unalike.core.client import Client, ClientInfo
    from unalike.core.federation import Federation
    from unalike.core.lazy_clients import LazyClients
    from unalike.core.operations import graph_safe, operation, query, sends
    from unalike.core.participation import Failure, FederationConfig, QuorumError, Replies
    from unalike.core.privacy import Privacy
    from unalike.core.program import ClientProgram
    from unalike.core.signatures import Shape
    from unalike.data import Samples, Table, load_dataset, partition, preprocess, samples
    from unalike.methods.averaging import Averaging, AveragingProgram
    from unalike.methods.prompt_tuning import PromptTuning, PromptTuningProgram
    from unalike.methods.public_data import (
        PublicTraining,
        predict_public,
        public_batch,
        train_on_public,
    )
    from unalike.methods.submodels import SubmodelMethod, SubmodelProgram
    from unalike.models.model import Model
    from unalike.report import compare, show
    from unalike.runs import ClientResult, Result, resume, run
    from unalike.runs.export import export, rebuild, trained
    from unalike.runs.python_scenario import LoadedScenario, scenario
    from unalike.runs.suggest import Advice, suggest
    from unalike.tasks import *  # noqa: F403
    from unalike.training.loop import Training

# Where each public name is imported from at run time: the imports above, as data. Methods and tasks
# are looked up in their own packages, so that a new one needs no line here.
_MODULES = {
    "Problems": "unalike.base.errors",
    "Refusal": "unalike.base.errors",
    "RunError": "unalike.base.errors",
    "UserError": "unalike.base.errors",
    "scope": "unalike.base.randomness",
    "stream": "unalike.base.randomness",
    "Algorithm": "unalike.core.algorithm",
    "ClientProgram": "unalike.core.program",
    "Client": "unalike.core.client",
    "ClientInfo": "unalike.core.client",
    "Federation": "unalike.core.federation",
    "LazyClients": "unalike.core.lazy_clients",
    "graph_safe": "unalike.core.operations",
    "operation": "unalike.core.operations",
    "query": "unalike.core.operations",
    "sends": "unalike.core.operations",
    "Failure": "unalike.core.participation",
    "FederationConfig": "unalike.core.participation",
    "QuorumError": "unalike.core.participation",
    "Replies": "unalike.core.participation",
    "Privacy": "unalike.core.privacy",
    "Shape": "unalike.core.signatures",
    "Samples": "unalike.data",
    "Table": "unalike.data",
    "load_dataset": "unalike.data",
    "partition": "unalike.data",
    "preprocess": "unalike.data",
    "samples": "unalike.data",
    "Averaging": "unalike.methods.averaging",
    "AveragingProgram": "unalike.methods.averaging",
    "PromptTuning": "unalike.methods.prompt_tuning",
    "PromptTuningProgram": "unalike.methods.prompt_tuning",
    "PublicTraining": "unalike.methods.public_data",
    "predict_public": "unalike.methods.public_data",
    "public_batch": "unalike.methods.public_data",
    "train_on_public": "unalike.methods.public_data",
    "SubmodelMethod": "unalike.methods.submodels",
    "SubmodelProgram": "unalike.methods.submodels",
    "Model": "unalike.models.model",
    "compare": "unalike.report",
    "show": "unalike.report",
    "ClientResult": "unalike.runs",
    "Result": "unalike.runs",
    "resume": "unalike.runs",
    "run": "unalike.runs",
    "LoadedScenario": "unalike.runs.python_scenario",
    "scenario": "unalike.runs.python_scenario",
    "Advice": "unalike.runs.suggest",
    "suggest": "unalike.runs.suggest",
    "export": "unalike.runs.export",
    "rebuild": "unalike.runs.export",
    "trained": "unalike.runs.export",
    "Training": "unalike.training.loop",
}

__all__ = [
    "Advice",
    "Algorithm",
    "Averaging",
    "AveragingProgram",
    "Client",
    "ClientInfo",
    "ClientProgram",
    "ClientResult",
    "Failure",
    "Federation",
    "FederationConfig",
    "LazyClients",
    "LoadedScenario",
    "Model",
    "Privacy",
    "Problems",
    "PromptTuning",
    "PromptTuningProgram",
    "PublicTraining",
    "QuorumError",
    "Refusal",
    "Replies",
    "Result",
    "RunError",
    "Samples",
    "Shape",
    "SubmodelMethod",
    "SubmodelProgram",
    "Table",
    "Training",
    "UserError",
    "__version__",
    "compare",
    "export",
    "graph_safe",
    "load_dataset",
    "operation",
    "partition",
    "predict_public",
    "preprocess",
    "public_batch",
    "query",
    "rebuild",
    "resume",
    "run",
    "samples",
    "scenario",
    "scope",
    "sends",
    "show",
    "stream",
    "suggest",
    "train_on_public",
    "trained",
]

if not TYPE_CHECKING:  # else a checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        """Import a public name on first use, and keep it as an attribute of the package."""
        if name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        elif not name.startswith("_") and name in _methods_and_tasks():
            value = _methods_and_tasks()[name]
        else:
            raise AttributeError(f"module 'unalike' has no attribute {name!r}")
        globals()[name] = value
        return value


def _methods_and_tasks() -> dict[str, type]:
    """The listed methods and tasks, and the base class of tasks, by the name of their class."""
    tasks = import_module("unalike.tasks")
    listed = [*import_module("unalike.algorithms").ALGORITHMS.values(), *tasks.TASKS.values()]
    return {kind.__name__: kind for kind in [*listed, tasks.Task, tasks.Meter]}


def __dir__() -> list[str]:
    return sorted({*__all__, *_methods_and_tasks()})
