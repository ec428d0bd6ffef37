"""The smallest engine that keeps the contract: clients in this process, on a real clock.

docs/engines.md shows it as the example of how to add one.
"""

from unalike.base.message import encode
from unalike.core.engine import Arrival, EngineSettings
from unalike.engines.host import Host, SimulatedAnswer, counted_bytes
from unalike.engines.realtime import RealTimeEngine, parse_reply
from unalike.engines.store import Store


class ToyEngine(RealTimeEngine):
    """Answers every message when it is sent. `slow` is an option, like any engine may have."""

    hosts_clients = True
    uses_this_machine = True

    @classmethod
    def shares_process(cls, options):
        return True

    def __init__(self, clients, build_runtime, folder, settings=None, *, slow=False):
        super().__init__()
        settings = settings or EngineSettings()
        self.limit, self.slow = settings.max_message_bytes, slow
        self.store = Store(folder, snapshots=3)
        self.host = Host(clients, build_runtime, self.store, settings.max_loaded_clients)
        self.client_infos = self.host.infos()

    def send(self, messages):
        sizes = {}
        for client, message in messages.items():
            data = encode(message, self.limit)
            answer = self.host.answer(client, data, self.limit)
            reply = parse_reply(answer, message["number"], self.limit, SimulatedAnswer)
            size = counted_bytes(reply, len(answer))
            self.arrivals[message["number"]] = Arrival(client, self.now, size, reply)
            sizes[client] = len(data)
        return sizes

    def _in_flight(self):
        return set()

    def save(self, round):
        self.host.save(round)

    def load(self, round, now, pending):
        self.restore_pending(now, pending)
        self.store.rewind(round)
        self.host.forget()

    def close(self):
        pass
