"""The order in which an earlier run heard its clients, told again: who is early waits for its turn. Knows nothing of engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unalike.base import events
from unalike.base.errors import UserError
from unalike.core.engine import Arrival


class Replay:
    """For each instant of a run, who arrived and, where that was in vain, why: `{client: {}}` or `{client: {"reason", "lasting"}}`."""

    def __init__(self, instants: list[dict[str, dict[str, Any]]]):
        self.instants = instants
        self.held: dict[str, Arrival] = {}  # arrivals before their turn

    @classmethod
    def read(cls, run: Path) -> "Replay":
        """From a run's events. A run that was killed and resumed told some instants twice: the last time counts."""
        path = Path(run) / events.FILE
        try:
            path.stat()
            recorded = list(events.read_events(path))
        except OSError as error:
            raise UserError(
                f"the run to replay, {run}, cannot be read: {error.strerror or error}"
            ) from None
        instants: list[dict[str, dict[str, Any]]] = []
        again = True  # started or resumed, and no arrival since
        for event in recorded:
            again = again or event["event"] in ("start", "resume")
            if event["event"] == "arrival" and "instant" in event:
                if again:
                    del instants[event["instant"] - 1 :]
                if again or event["instant"] > len(instants):
                    instants.append({})
                again = False
                instants[-1][event["client"]] = {
                    key: event[key] for key in ("reason", "lasting") if key in event
                }
        if not instants:
            raise UserError(
                f"{run} has no order of arrivals to replay; only runs of asynchronous methods, such as afmcc, have one"
            )
        return cls(instants)

    def next(
        self, instant: int, numbers: set[int], receive: Callable[[set[int]], list[Arrival]]
    ) -> tuple[list[Arrival], dict[str, dict[str, Any]]]:
        """Arrivals of the instant of that number, from 1, and what becomes of each; `numbers` are the messages under way."""
        turns = self.instants[instant - 1] if instant <= len(self.instants) else {}
        while missing := turns.keys() - self.held.keys():
            arrivals = receive(
                numbers - {arrival.reply["number"] for arrival in self.held.values()}
            )
            self.held |= {arrival.client: arrival for arrival in arrivals}
            if not arrivals:
                raise UserError(
                    f"the run to replay heard {', '.join(sorted(missing))} at instant {instant}, and nothing was asked of them "
                    "here: replay it with the same scenario, method and seed"
                )
        if not turns:
            raise UserError(
                f"the run to replay ended after {len(self.instants)} instants, and this one goes on: "
                "replay it with the same scenario, method and seed"
            )
        return [self.held.pop(client) for client in turns], turns

    def pending(self) -> list[dict[str, Any]]:
        """What waits for its turn, to be saved with what the engine has under way."""
        return [
            {
                "at": held.at,
                "order": i - len(self.held),
                "client": held.client,
                "size": held.size,
                "reply": held.reply,
            }
            for i, held in enumerate(self.held.values())
        ]
