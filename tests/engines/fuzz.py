"""Hostile inputs at every door: `make fuzz` runs a million, test_fuzz.py a share of them.

`PYTHONPATH=.:tests python tests/engines/fuzz.py COUNT FIRST` runs COUNT inputs, from number FIRST on.

A door takes one input that is drawn from a seed, and raises unless the program holds: nothing but
the declared errors comes out, nothing malformed gets in. All engines share these doors: the codec,
cards, replies at the server, requests at a client, and the endpoint of a client of another
organisation. FLARE's and Flower's own are the transports, here without their networks.
"""

import copy
import json
import math
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import conftest as toys
import organisations
import torch
from test_hostile import RUBBISH, at_the_door, message_of, scrambled, spoilt

from unalike.algorithms import ALGORITHMS
from unalike.base.message import (
    BLOCK,
    FRAME,
    MAGIC,
    MessageError,
    decode,
    encode,
    find_nonfinite,
)
from unalike.core.admission import find_misfits, parse_info
from unalike.core.client import VERSION
from unalike.core.engine import Arrival
from unalike.core.federation import MAX_MAGNITUDE, Failure
from unalike.core.runtime import ClientRuntime
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.engines.host import Host
from unalike.engines.realtime import parse_reply
from unalike.engines.remote import RemoteEngine, handshake
from unalike.engines.store import Store
from unalike.methods.averaging import Averaging

ABOUT = {"name": "toy", "algorithm": "fedavg", "seed": 0}
WORDS = ['"$"', '"value"', '"tensors"', "null", "true", "0", "0.0", "1", "-1", "1e400", '"float32"']
NUMBERS = [10**400, -(2**63), 2**63, 1e308, -1e300, 5e-324, 10**15, 2**31, math.nan, -math.inf]
HOSTILE = [*RUBBISH, *NUMBERS, "\x1b[31m", "\ud800", ["x"] * 300, {"$": 0}]


def hostile_value(draw, depth=0):
    """Any value, small or odd."""
    kind = draw.randrange(6 if depth < 4 else 4)
    if kind < 3:
        return draw.choice(HOSTILE)
    if kind == 3:
        dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.bool, torch.float16])
        shape = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randrange(4))]
        return torch.full(shape, draw.choice([0, 1]), dtype=dtype)
    items = [hostile_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 4:
        return items
    return {
        draw.choice(["a", "b", "", "x" * 50, "loss", "body"]) + str(i): v
        for i, v in enumerate(items)
    }


def hostile_bytes(value, draw):
    """The encoding of a value, or of something like it; None where nobody could send it."""
    try:
        data = bytes(encode(value))
    except MessageError:
        return None
    return data if draw.random() < 0.7 else scrambled(data, draw)


class Doors:
    """All doors, with the honest things that inputs are made of."""

    def __init__(self, folder, methods=("fedavg", "heterofl", "fedmuscle", "fedhenn")):
        torch.set_num_threads(1)
        self.folder = Path(folder)
        self.card = toys.client("b").info().as_dict()
        self.infos = {id: toys.client(id).info() for id in "acde"}
        self.servers = [self._server(name) for name in methods]
        self.host, self.requests = self._client()
        self.endpoint = ClientEndpoint(organisations.describe(self.folder / "b", "b"), "b")
        self.endpoint.report = lambda incident: None
        self.doors = [
            (self.codec, 30),
            (self.header, 20),
            (self.cards, 15),
            (self.replies, 20),
            (self.requests_at_host, 8),
            (self.hellos, 3),
            (self.acknowledgements, 2),
            (self.endpoints, 1),
            (self.flare, 1),
        ]

    def _server(self, name):
        kit = SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name])))
        folder = self.folder / name
        folder.mkdir(parents=True)
        return at_the_door(kit, name, folder)

    def _client(self):
        method, training = toys.method("fedavg"), toys.training()
        host = Host(
            toys.clients(1),
            lambda client: ClientRuntime(method.Program(client, method, training, 0)),
            Store(self.folder / "host"),
        )
        host.handle("a", message_of("describe", 1))
        parameters = copy.deepcopy(dict(host.programs["a"].model.state_dict()))
        return host, [
            message_of("receive", 2, parameters=parameters),
            message_of("shape", 3),
            message_of("begin", 4),
            message_of("evaluate", 5, common=False),
        ]

    def run(self, seed):
        """One input at one door; returns the name of the door."""
        draw = random.Random(seed)
        (door,) = draw.choices([d for d, _ in self.doors], [w for _, w in self.doors])
        door(draw)
        return door.__name__

    def codec(self, draw):
        """Bytes of a message, scrambled."""
        data = hostile_bytes(hostile_value(draw), draw)
        if data is not None:
            check_decoding(data)

    def header(self, draw):
        """A header of random JSON tokens."""
        tokens = draw.choices([*WORDS, "[", "]", "{", "}", ",", ":"], k=draw.randrange(1, 12))
        value = draw.choice(["".join(tokens), "[" * draw.randrange(60), json.dumps("x" * 99)])
        text = (
            '{"value":' + value + ',"tensors":' + draw.choice(["[]", '[["float32",2]]', "0"]) + "}"
        )
        header = text.encode()
        count = draw.choice([0, 0, 1, 3, 2**32 - 1])
        numbers = b"".join(struct.pack("<q", draw.getrandbits(40)) for _ in range(min(count, 3)))
        start = FRAME.pack(MAGIC, len(header), count) + header + numbers
        check_decoding(start + bytes(-len(start) % BLOCK) + bytes(draw.choice([0, BLOCK])))

    def cards(self, draw):
        """What a client announces."""
        card = dict(self.card)
        for _ in range(draw.randint(1, 3)):
            name = draw.choice(sorted(card))
            odd = [draw.choice(HOSTILE), spoilt(card[name], draw), [draw.choice(HOSTILE)]]
            card[name] = draw.choice(odd)
        data = hostile_bytes(card, draw)
        if data is None:
            return
        try:
            info = parse_info(decode(data))
        except (MessageError, ValueError) as error:
            assert len(str(error)) < 600
            return
        json.dumps(info.as_dict(), allow_nan=False)
        others = {id: other for id, other in self.infos.items() if id != info.id}
        assert set(find_misfits({**others, info.id: info}, Averaging())) <= {info.id}

    def replies(self, draw):
        """A reply at the server of a method."""
        fed, answers = draw.choice(self.servers)
        sent, honest, sizes = draw.choice(answers)
        body = draw.choice([spoilt(honest["body"], draw), hostile_value(draw)])
        reply = draw.choice([{**honest, "body": body}, spoilt(honest, draw)])
        data = hostile_bytes(reply, draw)
        if data is None:
            return
        parsed = parse_reply(data, honest["number"], 2**20)
        fed.in_flight[honest["number"]] = copy.copy(sent)
        got = fed.accept(Arrival(sent.client, 0.0, len(data), parsed), sizes=sizes)
        if isinstance(got, Failure):
            assert got.client == sent.client and len(got.reason) <= 500
            assert got.reason.isprintable()
        else:
            assert find_nonfinite(got, MAX_MAGNITUDE) is None
        fed.ill.clear()

    def requests_at_host(self, draw):
        """A request at a client."""
        message = draw.choice(self.requests)
        odd = {**message, "body": spoilt(message["body"], draw)}
        data = hostile_bytes(draw.choice([odd, spoilt(message, draw), hostile_value(draw)]), draw)
        if data is None:
            return
        reply = decode(self.host.answer("a", data, 2**20))
        assert isinstance(reply["number"], int) and ("failure" in reply) != ("body" in reply)
        if "body" in reply:
            self.host.forget()
            self.host.handle("a", message_of("describe", 1))
        self.host.answered.clear()

    def hellos(self, draw):
        """What clients say at `hello`, all of them hostile but one."""
        honest = {"version": VERSION, "card": self.card}
        replies = {"b": bytes(encode(honest))}
        for name in "acd":
            value = draw.choice([spoilt(honest, draw), hostile_value(draw)])
            replies[name] = hostile_bytes(value, draw) or b"x"
        transport = Line(replies)
        infos, refused = handshake(transport, ABOUT, 1.0)
        assert "b" in infos and set(infos) | set(refused) >= set("acd")
        find_misfits(infos, Averaging())

    def acknowledgements(self, draw):
        """What clients say at `begin` and `save`."""
        replies = {"b": bytes(encode({}))}
        for name in "acd":
            replies[name] = hostile_bytes(hostile_value(draw), draw) or b""
        engine = RemoteEngine(Line(replies), "r", "clients", dict.fromkeys(replies), {})
        engine.load(0, 0.0, [])
        engine.save(1)
        assert "b" not in engine.unsaved
        assert all(reason.isprintable() for reason in engine.unsaved.values())

    def endpoints(self, draw):
        """Requests at a client of another organisation; those that fit do nothing here."""
        action = draw.choice(["hello", "call", "save", "x" * 300, ""])
        content = draw.choice(
            [
                {
                    "version": draw.choice([VERSION, *HOSTILE]),
                    "about": draw.choice([ABOUT, *HOSTILE]),
                },
                {"round": draw.choice(HOSTILE)},
                draw.choice(self.requests),
                hostile_value(draw),
            ]
        )
        data = hostile_bytes(content, draw) or b"x"
        run, place = (
            draw.choice(["r", "../../x", "\x00"]),
            draw.choice(["clients", "alone", "../x"]),
        )
        assert isinstance(decode(self.endpoint.answer(action, data, run, place)), dict)

    def flare(self, draw):
        """What FLARE hands over as a reply: anything."""
        outcome = draw.choice([*HOSTILE, hostile_bytes(hostile_value(draw), draw)])
        engine = RemoteEngine(Line({"a": outcome}), "r", "clients", {"a": None}, {})
        engine.send({"a": message_of("shape", 1)})
        (arrival,) = engine.receive({1})
        assert "failure" in arrival.reply or "body" in arrival.reply


class Line:
    """A transport on which every request has its answer already."""

    def __init__(self, replies):
        self.replies = replies

    def names(self):
        return list(self.replies)

    def admit(self, name, id):
        if name != id:
            raise ValueError("another's name")

    def check(self):
        pass

    def request(self, client, *arguments):
        answer = Future()
        answer.set_result(self.replies[client])
        return answer


def check_decoding(data):
    """A MessageError, or a value that could have been sent."""
    try:
        value = decode(data)
    except MessageError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    else:
        assert decode(encode(value)) is not None or value is None


def fuzz(count, seed=0, folder=None):
    """Run inputs seed, seed + 1, ... and return how many there were at each door."""
    with tempfile.TemporaryDirectory() as own:
        doors = Doors(folder or own)
        counts = Counter()
        for i in range(seed, seed + count):
            try:
                counts[doors.run(i)] += 1
            except BaseException:
                sys.stderr.write(f"input {i}\n")
                raise
        return counts


def main():
    """Fuzz in as many processes as there are cores, with all inputs of this call new by their seed."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    processes = int(os.environ.get("FUZZ_PROCESSES", os.cpu_count() or 1))
    start, total = time.time(), Counter()
    share = 10_000
    tasks = [(min(share, count - at), first + at) for at in range(0, count, share)]
    with get_context("fork").Pool(processes) as pool:
        for counts in pool.imap_unordered(_fuzz_share, tasks):
            total += counts
            print(f"{sum(total.values()):,} inputs, {time.time() - start:.0f} s", flush=True)
    print(json.dumps(dict(sorted(total.items()))))


def _fuzz_share(task):
    return fuzz(*task)


if __name__ == "__main__":
    main()
