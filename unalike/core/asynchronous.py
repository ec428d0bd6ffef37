"""The asynchronous server loop: clients are visited again and again, nobody waits for the slow."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from unalike.base.errors import RunError
from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.core.engine import Arrival
from unalike.core.participation import Failure, QuorumError, Replies

if TYPE_CHECKING:
    from unalike.core.federation import Federation

Ask = tuple[str, dict[str, Value]]  # an operation and its arguments
Invite = Callable[[str], Ask]
Act = Callable[[Replies[Any]], dict[str, Ask]]


def run_visits(fed: "Federation", invite: Invite, act: Act, even: bool) -> Iterator[int]:
    """See `Federation.run_async`."""
    fed.sampled = list(fed.infos)
    if not fed.visits:
        fed.visits = {client: 0 for client in fed.infos}
        fed.waiting = _first_order(fed)
    while True:
        invitations = _invitations(fed, invite, even)
        fed.send(invitations, _visit_numbers(fed, invitations))
        arrived, replies = _receive(fed)
        proposed = act(replies) if arrived else {}
        # In the order of arrival, which the numbers of messages and the next visits follow.
        requests = {c: proposed[c] for c in arrived if c in proposed and c in replies}
        fed.send(requests, _visit_numbers(fed, requests))
        for client in arrived:
            if client not in requests:
                _finish_visit(fed, client)
        _check_quorum(fed)
        visits = [fed.visits[client] for client in fed.clients]
        done = sum(visits) // max(len(visits), 1)
        if done > fed.finished:
            fed.round = done
            yield done
        if not fed.in_flight and not fed.waiting:
            return


def _first_order(fed: "Federation") -> list[str]:
    """Clients in the order of their first visits: random if only some are visited at a time."""
    clients = list(fed.infos)
    if fed.config.participation == 1:
        return clients
    order = torch.randperm(len(clients), generator=stream(fed.seed, "participation"))
    return [clients[i] for i in order]


def _visit_numbers(fed: "Federation", requests: dict[str, Ask]) -> dict[str, int]:
    """The number of the current visit of each client that is requested something, from 1."""
    return {client: fed.visits[client] + 1 for client in requests}


def _invitations(fed: "Federation", invite: Invite, even: bool) -> dict[str, Ask]:
    """What starts a visit, for as many of the waiting clients as may be visited at a time."""
    visited = {sent.client for sent in fed.in_flight.values()}
    places = fed.config.clients_per_round(len(fed.infos)) - len(visited)
    invitations: dict[str, Ask] = {}
    while fed.waiting and len(invitations) < places:
        client = fed.waiting.pop(0)
        number = fed.visits[client] + 1
        has_visits_left = number <= fed.training.rounds or (not even and _someone_is_behind(fed))
        fed.ask_again(client, number)
        if client in fed.quarantined or not has_visits_left:
            continue
        if fed.config.drops_out(client, fed.seed, number):
            fed.fail(Failure(client, "visit", number, "dropped out", lasting=False))
            _finish_visit(fed, client)
        else:
            invitations[client] = invite(client)
    return invitations


def _someone_is_behind(fed: "Federation") -> bool:
    visits = [fed.visits[client] for client in fed.clients]
    return min(visits, default=0) < fed.training.rounds


def _receive(fed: "Federation") -> tuple[list[str], Replies[Any]]:
    """Clients in the order of arrival at the next instant, and their replies and failures."""
    arrivals, outcomes = _next_arrivals(fed) if fed.in_flight else ([], {})
    fed.clock = fed.engine.now
    arrived: list[str] = []
    replies: dict[str, Value] = {}
    failures: dict[str, Failure] = {}
    for arrival in arrivals:
        sent = fed.in_flight[arrival.reply["number"]]
        arrived.append(sent.client)
        reply = fed.accept(arrival, outcomes.get(sent.client))
        facts: dict[str, Any] = {}
        if isinstance(reply, Failure):
            failures[sent.client] = reply
            ill = sent.round in fed.ill.get(sent.client, [])
            facts = {"reason": reply.reason, "lasting": reply.lasting, "passing": ill}
        else:
            replies[sent.client] = reply
        fed.log_event(
            "arrival",
            at=fed.clock,
            instant=fed.instants,
            client=sent.client,
            round=sent.round,
            operation=sent.operation,
            **facts,
        )
    for failure in failures.values():
        fed.fail(failure)
    return arrived, Replies({c: replies[c] for c in fed.infos if c in replies}, failures)


def _next_arrivals(fed: "Federation") -> tuple[list[Arrival], dict[str, dict[str, Any]]]:
    """Arrivals of the next instant; in a replay also what became of them in the earlier run."""
    fed.instants += 1
    if fed.replay is not None:
        return fed.replay.next(fed.instants, set(fed.in_flight), fed.engine.receive)
    arrivals = fed.engine.receive(set(fed.in_flight))
    if not arrivals:
        clients = ", ".join(sent.client for sent in fed.in_flight.values())
        raise RunError(f"the engine lost what {clients} were asked; resume the run")
    return arrivals, {}


def _finish_visit(fed: "Federation", client: str) -> None:
    fed.visits[client] += 1
    fed.waiting.append(client)
    fed.dropped.discard(client)
    fed.turns = {key: turn for key, turn in fed.turns.items() if key[1] != client}


def _check_quorum(fed: "Federation") -> None:
    needed = math.ceil(fed.config.quorum * len(fed.infos) - 1e-9)
    if len(fed.clients) < needed:
        failures = list(fed.quarantined.values())
        where = f"visit {fed.finished + 1}"
        raise QuorumError(where, len(fed.clients), len(fed.infos), needed, failures)
