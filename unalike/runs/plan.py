"""What both ends of a run must agree on, as plain values: enough to build a client's program, and no code travels."""

from dataclasses import fields
from typing import Any

from unalike.base.errors import Problems, Refusal
from unalike.core.algorithm import Algorithm
from unalike.core.privacy import Privacy
from unalike.scenarios.validate import parse_algorithm
from unalike.training.loop import Training


def plan_to_dict(
    algorithm: Algorithm,
    method: str,
    training: Training,
    seed: int,
    guarded: bool,
    privacy: Privacy | None,
) -> dict[str, Any]:
    """The plan of a run as a server sends it."""
    return {
        "algorithm": {
            "name": method,
            **{f.name: getattr(algorithm, f.name) for f in fields(algorithm)},
        },
        "seed": seed,
        "training": training.model_dump(),
        "guarded": guarded,
        "privacy": privacy.model_dump() if privacy is not None else None,
    }


def plan_from_dict(plan: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `build_runtime`, from a plan that `plan_to_dict` wrote."""
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
