"""Simulated clients that are built when they first take part, for federations of very many.

Nothing here or in a run visits all of them: start-up and memory grow with those who take part.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from unalike.base.errors import UserError
from unalike.core.client import Client, ClientInfo

LOADED = 256  # clients that are kept in memory between two uses
MEASURED = 100  # clients that are measured and get the final model, unless the run says otherwise


class NumberedIds(Sequence[str]):
    """The ids "c0", "c1", ... without storing them."""

    def __init__(self, count: int, prefix: str = "c"):
        self.length = count
        self.prefix = prefix

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(f"there are {self.length} clients, none has the number {index}")
        return f"{self.prefix}{index % self.length}"

    def index(self, id: Any, start: int = 0, stop: int | None = None) -> int:
        digits = str(id).removeprefix(self.prefix)
        if digits.isdecimal() and int(digits) < self.length:
            number = int(digits)
            if self[number] == id:
                return number
        raise ValueError(f"there is no client {id}")

    def __contains__(self, id: object) -> bool:
        try:
            self.index(id)
        except ValueError:
            return False
        return True


class LazyClients(Sequence[Client]):
    """Clients that a function builds, each when it first takes part.

    A run with them does not visit those that never take part. It therefore trains nobody alone
    (no local baseline), checks a client when it is built instead of at the start, and measures a
    sample of those that took part (`FederationConfig.evaluation_clients`, default 100).

    Args:
        clients: their number, whose ids are "c0", "c1", ...; or all their ids.
        build: `build(i)` returns the i-th client, from 0; the same whenever it is called. Its id
            must be the i-th id.

    >>> from torch import nn, zeros
    >>> from unalike.tasks import Classification
    >>> def build(i):
    ...     data = zeros(4, 2), zeros(4).long()
    ...     return Client(f"c{i}", nn.Linear(2, 2), Classification(2), data)
    >>> clients = LazyClients(100_000, build)
    >>> len(clients), clients[99_999].id
    (100000, 'c99999')
    """

    def __init__(self, clients: int | Sequence[str], build: Callable[[int], Client]):
        if isinstance(clients, int):
            if clients < 1:
                raise UserError(f"LazyClients needs at least one client, got {clients}")
            clients = NumberedIds(clients)
        if not callable(build):
            raise UserError(
                f"LazyClients needs a function that builds the i-th client, got {build!r}"
            )
        self.ids = clients
        self._build = build
        self._numbers: dict[str, int] | None = None  # of ids that are listed, made when needed
        self._loaded: OrderedDict[int, Client] = OrderedDict()  # the one idle longest first
        self._changes: list[Callable[[Client], Client]] = []

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Client: ...

    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...

    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        id = self.ids[index]
        number = index % len(self)
        if number in self._loaded:
            self._loaded.move_to_end(number)
            return self._loaded[number]
        client = self._build(number)
        if not isinstance(client, Client):
            raise UserError(f"the function of LazyClients must return a Client, got {client!r}")
        if client.id != id:
            raise UserError(
                f"the function of LazyClients returned client {client.id!r} for number {number}, "
                f"whose id is {id!r}: give it that id, or pass the list of ids instead of a number"
            )
        for change in self._changes:
            client = change(client)
        self._loaded[number] = client
        if len(self._loaded) > LOADED:
            self._loaded.popitem(last=False)
        return client

    def find(self, id: str) -> Client:
        """The client of this id. Raises KeyError where there is none."""
        return self[self.number(id)]

    def number(self, id: str) -> int:
        """The place of an id in the order of all. Raises KeyError where there is none."""
        if isinstance(self.ids, NumberedIds):
            if id not in self.ids:
                raise KeyError(id)
            return self.ids.index(id)
        if self._numbers is None:
            self._numbers = {id: number for number, id in enumerate(self.ids)}
        return self._numbers[id]

    def changed(self, *changes: Callable[[Client], Client]) -> "LazyClients":
        """The same clients, each passed through functions when it is built.

        A function returns the client as it came or a changed one, or raises UserError.
        """
        other = LazyClients(self.ids, self._build)
        other._changes = [*self._changes, *changes]
        return other

    def examples(self) -> list[Client]:
        """The first and the last client, which are tried before a run begins."""
        return [self[0]] if len(self) == 1 else [self[0], self[len(self) - 1]]


class ClientsById(Mapping[str, Client]):
    """Lazy clients by id. Iteration yields ids and builds nobody."""

    def __init__(self, clients: LazyClients):
        self.clients = clients

    def __getitem__(self, id: str) -> Client:
        return self.clients.find(id)

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients.ids)

    def __len__(self) -> int:
        return len(self.clients)


class LazyInfos(Mapping[str, ClientInfo]):
    """What lazy clients announce. Iteration covers those that joined, in the order of all.

    Attributes:
        ids: of all clients.
    """

    def __init__(self, clients: LazyClients):
        self.clients = clients
        self.ids = clients.ids
        self._infos: dict[str, ClientInfo] = {}
        self._joined: list[str] = []

    def __getitem__(self, id: str) -> ClientInfo:
        if id not in self._infos:
            self._infos[id] = self.clients.find(id).info()
        return self._infos[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._joined)

    def __len__(self) -> int:
        return len(self._joined)

    def join(self, ids: Iterable[str]) -> None:
        """Add clients to those that iteration covers; each announces itself."""
        joined = dict.fromkeys([*self._joined, *ids])
        for id in joined:
            self[id]
        self._joined = sorted(joined, key=self.clients.number)


def clients_by_id(clients: Sequence[Client]) -> Mapping[str, Client]:
    """Clients by id, without building those that are lazy."""
    if isinstance(clients, LazyClients):
        return ClientsById(clients)
    return {client.id: client for client in clients}


def announced_infos(clients: Sequence[Client]) -> Mapping[str, ClientInfo]:
    """What clients announce, by id; of lazy ones when they are asked for."""
    if isinstance(clients, LazyClients):
        return LazyInfos(clients)
    return {client.id: client.info() for client in clients}


def examples_of(clients: Sequence[Client]) -> Sequence[Client]:
    """The clients that are looked at before a run begins: all, or a few of lazy ones."""
    return clients.examples() if isinstance(clients, LazyClients) else clients
