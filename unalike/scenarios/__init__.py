"""Scenarios: the clients of a federation, their data and models, the method and its budget.

Shipped scenarios are the YAML files in this folder.
"""

from unalike.scenarios.build import build_clients, build_server
from unalike.scenarios.load import load, load_mapping, shipped_scenarios
from unalike.scenarios.schema import Scenario
from unalike.scenarios.validate import parse_scenario

__all__ = [
    "Scenario",
    "build_clients",
    "build_server",
    "load",
    "load_mapping",
    "parse_scenario",
    "shipped_scenarios",
]
