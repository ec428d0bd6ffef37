"""Who works with whom: groups of clients that have something in common."""

from collections.abc import Hashable, Iterable, Mapping

from unalike.core.federation import Federation


def connect_clients(keys: Mapping[str, Iterable[Hashable]]) -> list[list[str]]:
    """Groups of two or more clients in which each has a key in common with another.

    Args:
        keys: by client; one that no other client has connects it with nobody.

    >>> connect_clients({"a": {1}, "b": {1, 2}, "c": {2}, "d": {3}})
    [['a', 'b', 'c']]
    """
    leader = {client: client for client in keys}  # a step towards the first client of the group

    def first_of(client: str) -> str:
        while leader[client] != client:
            client = leader[client]
        return client

    holder: dict[Hashable, str] = {}  # a client with the key
    for client, own in keys.items():
        for key in own:
            other = first_of(holder.setdefault(key, client))
            leader[first_of(client)] = other
    groups: dict[str, list[str]] = {}
    for client in keys:
        groups.setdefault(first_of(client), []).append(client)
    return [group for group in groups.values() if len(group) > 1]


def clients_by_label(fed: Federation) -> list[list[str]]:
    """Groups of clients with labels of the same name and the same task in common."""
    keys = {}
    for client, info in fed.infos.items():
        keys[client] = {(info.task, info.traits, label) for label in info.labels}
    return connect_clients(keys)
