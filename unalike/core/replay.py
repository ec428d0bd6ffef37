"""Repeats the order of arrivals of an earlier asynchronous run: early replies wait their turn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unalike.base import events
from unalike.base.errors import UserError
from unalike.core.engine import Arrival


class Replay:
    """The arrivals of an earlier run.

    Args:
        instants: for each instant the clients that arrived, with `{}` or, where the reply was not
            used, `{"reason", "lasting", "passing"}`.
    """

    def __init__(self, instants: list[dict[str, dict[str, Any]]]):
        self.instants = instants
        self.early: dict[str, Arrival] = {}  # arrivals before their turn, by client

    @classmethod
    def read(cls, run: Path) -> "Replay":
        """Read the arrivals from a run's events.

        Of instants that a killed and resumed run recorded twice, the last record counts.

        Raises:
            UserError: the run cannot be read, or was not asynchronous.
        """
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
                    key: event[key] for key in ("reason", "lasting", "passing") if key in event
                }
        if not instants:
            raise UserError(
                f"{run} has no order of arrivals to replay; only runs of asynchronous methods, "
                "such as afmcc, have one"
            )
        return cls(instants)

    def next(
        self, instant: int, numbers: set[int], receive: Callable[[set[int]], list[Arrival]]
    ) -> tuple[list[Arrival], dict[str, dict[str, Any]]]:
        """The arrivals of an instant, in the order of the earlier run.

        Args:
            instant: its number, from 1.
            numbers: of the messages in flight.
            receive: the engine's.

        Returns: the arrivals, and what became of each in the earlier run.

        Raises:
            UserError: the earlier run went otherwise.
        """
        outcomes = self.instants[instant - 1] if instant <= len(self.instants) else {}
        if not outcomes:
            raise UserError(
                f"the run to replay ended after {len(self.instants)} instants, and this one goes "
                "on: replay it with the same scenario, method and seed"
            )
        while not outcomes.keys() <= self.early.keys():
            received = {arrival.reply["number"] for arrival in self.early.values()}
            arrivals = receive(numbers - received)
            self.early |= {arrival.client: arrival for arrival in arrivals}
            if not arrivals:
                missing = ", ".join(sorted(outcomes.keys() - self.early.keys()))
                raise UserError(
                    f"the run to replay heard {missing} at instant {instant}, and nothing was "
                    "asked of them here: replay it with the same scenario, method and seed"
                )
        return [self.early.pop(client) for client in outcomes], outcomes

    def pending(self) -> list[dict[str, Any]]:
        """Early replies, to be saved with those that the engine has not delivered."""
        return [
            {
                "at": arrival.at,
                "order": i - len(self.early),
                "client": arrival.client,
                "size": arrival.size,
                "reply": arrival.reply,
            }
            for i, arrival in enumerate(self.early.values())
        ]
