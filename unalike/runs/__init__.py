"""Runs: what to run, its execution, its folder, its results, and what is made of them."""

from unalike.runs.api import (
    config_differences,
    create_folder,
    execute,
    prepare,
    reopen,
    resume,
    run,
    run_path,
    run_scenario,
    to_plain,
)
from unalike.runs.execution import Run, ignore
from unalike.runs.plan import RunPlan
from unalike.runs.result import ClientResult, Result
from unalike.runs.run_folder import Folder

__all__ = [
    "ClientResult",
    "Folder",
    "Result",
    "Run",
    "RunPlan",
    "config_differences",
    "create_folder",
    "execute",
    "ignore",
    "prepare",
    "reopen",
    "resume",
    "run",
    "run_path",
    "run_scenario",
    "to_plain",
]
