"""Unalike: federated learning for clients that are nothing alike.

Names are loaded when first used, so that `import unalike` and the command's help are quick.
"""

from importlib import import_module
from typing import Any

from unalike.base.version import __version__

HOMES = {
    "Client": "unalike.core.client",
    "ClientInfo": "unalike.core.client",
    "Federation": "unalike.core.federation",
    "FederationConfig": "unalike.core.participation",
    "Algorithm": "unalike.core.algorithm",
    "ClientProgram": "unalike.core.algorithm",
    "operation": "unalike.core.operations",
    "question": "unalike.core.operations",
    "sends": "unalike.core.operations",
    "Privacy": "unalike.core.privacy",
    "Averaging": "unalike.methods.averaging",
    "AveragingProgram": "unalike.methods.averaging",
    "Training": "unalike.training.loop",
    "Classification": "unalike.tasks",
    "Clustering": "unalike.tasks",
    "MultiLabel": "unalike.tasks",
    "Segmentation": "unalike.tasks",
    "AFMCC": "unalike.algorithms",
    "FMCSC": "unalike.algorithms",
    "FedNCA": "unalike.algorithms",
    "SubFLOT": "unalike.algorithms",
    "FedMuscle": "unalike.algorithms",
    "FedAvg": "unalike.algorithms",
    "FedProx": "unalike.algorithms",
    "Local": "unalike.algorithms",
    "run": "unalike.runs",
    "resume": "unalike.runs",
    "show": "unalike.report",
    "compare": "unalike.report",
    "trained": "unalike.runs.export",
    "export": "unalike.runs.export",
    "rebuild": "unalike.runs.export",
}

__all__ = [*HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'unalike' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
