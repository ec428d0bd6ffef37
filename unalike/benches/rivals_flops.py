"""What a round costs each client and the server with FedMuscle and its rivals, in floating-point operations as torch counts them.

The last row of the paper's Table 1, on `digits`. Products of matrices and convolutions count, forward and backward, whatever else does not.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unalike.base.ledger import MEASUREMENTS
from unalike.benches.rivals import METHODS
from unalike.scenarios import load

ROUNDS = 3  # in the first, images go through what is frozen, once; the last has no public part with some; the second is counted


def run(quick: bool = False) -> dict:
    """Megaflops of a round: each client's, their sum, and the server's own."""
    rows = {"local": "{name: local}", **METHODS}
    chosen = list(rows)[: 3 if quick else None]
    return {
        "scenario": "digits",
        "rows": {name: round_of("digits", [f"algorithm={rows[name]}"]) for name in chosen},
    }


def round_of(scenario: str, settings: Sequence[str], folder: str | None = None) -> dict[str, float]:
    """Of one round of a scenario with these settings."""
    from torch.utils.flop_counter import FlopCounterMode

    from unalike.core.federation import Federation
    from unalike.engines.local import LocalEngine
    from unalike.scenarios import build
    from unalike.training.cuda_graphs import GraphedFunction

    told, algorithm = load(scenario, settings=[*settings, f"training.rounds={ROUNDS}"])
    found: Counter[str] = Counter()

    def counted(client: str, perform: Callable) -> Callable:
        def count(name: str, *given: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                reply = perform(name, *given)
            found[client] += counter.get_total_flops() if name not in MEASUREMENTS else 0
            return reply

        return count

    def program(client: Any) -> Any:
        made: Any = algorithm.Program(client, algorithm, told.training, told.seed)
        made.perform = counted(client.id, made.perform)
        return made

    seen = GraphedFunction.SEEN
    with tempfile.TemporaryDirectory() as place:
        engine = LocalEngine(build.clients(told, folder), program, Path(place))
        fed = Federation(engine, told.training, told.federation, told.seed)
        rounds = iter(algorithm.serve(fed))
        try:
            GraphedFunction.SEEN = (
                sys.maxsize
            )  # what a GPU plays is not counted: nothing is recorded
            fed.finished = next(rounds)
            found.clear()
            with FlopCounterMode(display=False) as everything:
                next(rounds)
        finally:
            GraphedFunction.SEEN = seen
    all_of_it = everything.get_total_flops()
    each = {client: round(found[client] / 1e6, 3) for client in fed.infos}
    return {
        "clients": round(sum(found.values()) / 1e6, 3),
        "server": round((all_of_it - sum(found.values())) / 1e6, 3),
        **each,
    }
