"""What a client's owner allows a server: `policy:`, `accept:` and `privacy:` in a client.yaml."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from unalike.algorithms import ALGORITHMS
from unalike.base.errors import unknown_name
from unalike.base.registry import installed_parts
from unalike.base.settings import Settings
from unalike.core.privacy import Privacy
from unalike.scenarios.schema import Count, Named, Positive

AGREED = ("algorithm", "training", "seed")  # parts of a run's terms that a digest is of


def _name_to_mapping(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _require_method(name: str) -> str:
    known = {*ALGORITHMS, *installed_parts("algorithm")}
    if name not in known:
        text = unknown_name("algorithm", name, known)
        raise PydanticCustomError("unknown_method", text)  # type: ignore[arg-type]
    return name


class SitePolicy(Settings):
    """Limits that hold in every run, whatever the server asks for."""

    # Methods that may be run; None: any.
    methods: list[str] | None = None
    # Operations that may be requested; None: all of the method's.
    operations: list[str] | None = None
    # The most rounds of a run, and local epochs of a round.
    rounds: Count = 10_000
    epochs: Count = 100
    # Seconds that the operations of a round may take together; None: no limit.
    round_seconds: Positive | None = None
    # Bytes that an operation may allocate on top of what the process has; None: no limit.
    memory_bytes: Count | None = None
    # What a server may measure: nothing, or the client's own metrics. Features and labels never.
    measuring: Literal["none", "own"] = "own"
    # How many saved rounds a server may take back. The newest model is kept all the same.
    rewind: Annotated[int, Field(ge=0)] = 2

    @field_validator("methods")
    @classmethod
    def _known_methods(cls, names: list[str] | None) -> list[str] | None:
        return names and [_require_method(name) for name in names]


class AcceptedRun(Settings):
    """A run that the client takes part in; what is left out may be anything."""

    # The method, and values of its fields.
    algorithm: Annotated[Named, BeforeValidator(_name_to_mapping)] | None = None
    # Values of training settings; of rounds and epochs, the most.
    training: dict[str, Any] = {}
    # Who may run it: names on the certificates of those who submit FLARE jobs.
    run_by: list[str] | None = None
    # Of the very run that was audited (`unalike audit` shows it), or its first 12 digits or more.
    digest: Annotated[str, Field(min_length=12, max_length=64)] | None = None

    @field_validator("algorithm")
    @classmethod
    def _known_algorithm(cls, named: Named | None) -> Named | None:
        if named is not None:
            _require_method(named.name)
        return named

    def mismatch(self, terms: Mapping[str, Any], submitter: str | None) -> str | None:
        """Why a run is not this one; None: it is.

        Args:
            terms: the run's terms, as a server sends them.
            submitter: who runs it, by certificate; None where the engine does not say.
        """
        if self.algorithm is not None:
            offered = dict(terms["algorithm"])
            wanted = {"name": self.algorithm.name, **self.algorithm.options}
            for name, value in wanted.items():
                if to_plain(offered.get(name)) != to_plain(value):
                    return _difference(f"algorithm.{name}", value, offered.get(name))
        for name, value in self.training.items():
            offer = terms["training"].get(name)
            is_most = name in ("rounds", "epochs") and isinstance(offer, int)
            if (is_most and offer > value) or (not is_most and to_plain(offer) != to_plain(value)):
                return _difference(f"training.{name}", value, offer)
        if self.digest is not None and not run_digest(terms).startswith(self.digest):
            return f"its digest is {run_digest(terms)[:16]}, not {self.digest[:16]}"
        if self.run_by is not None and submitter not in self.run_by:
            return f"it is run by {submitter or 'somebody whose name the engine does not say'}"
        return None


class ClientPrivacy(Privacy):
    """The least protection that a client demands: `privacy:` in a client.yaml."""

    noise: Annotated[float, Field(ge=0)] = 0.0
    # Seeded noise protects nothing from a server, which knows the seed.
    entropy: Literal["seed", "secret"] = "secret"
    # The most that all runs together may cost, with `delta`; None: no limit.
    epsilon: Positive | None = None


class SiteRules(Settings):
    """What a client.yaml says of runs, whichever way it describes the client."""

    policy: SitePolicy = SitePolicy()
    # Runs that the client takes part in; None: all that the policy allows.
    accept: list[AcceptedRun] | None = None
    # The least protection it accepts.
    privacy: ClientPrivacy | None = None


def run_digest(terms: Mapping[str, Any]) -> str:
    """SHA-256 of method, training and seed of a run, as 64 hexadecimal digits.

    Args:
        terms: what `plan_to_dict` returns, or what a server sent.
    """
    agreed = {name: terms[name] for name in AGREED}
    return hashlib.sha256(json.dumps(to_plain(agreed), sort_keys=True).encode()).hexdigest()


def to_plain(value: Any) -> Any:
    """The value as JSON would give it back: tuples are lists, whole floats stay floats."""
    return json.loads(json.dumps(value, default=str))


def _difference(name: str, accepted: Any, offered: Any) -> str:
    return f"its {name} is {str(offered)[:60]}, not {str(accepted)[:60]}"
