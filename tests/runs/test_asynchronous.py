"""Asynchronous runs: the same end with worker processes, more evaluations, or stops."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from unalike import FederationConfig
from unalike.base.errors import UserError
from unalike.engines.store import Store
from unalike.methods.averaging import Averaging


@dataclass
class Passing(Averaging):
    """Each client's update is mixed in as it comes; it then goes on from the mixture."""

    def serve(self, fed):
        self.register_clients(fed)
        models, group = fed.state["models"], fed.state["group"]

        def take(replies):
            for client, reply in replies.items():
                mine = models[group[client]]
                models[group[client]] = {
                    name: (mine[name] + tensor) / 2 if tensor.is_floating_point() else tensor
                    for name, tensor in reply["parameters"].items()
                }
            return {}

        yield from fed.run_async(
            lambda client: ("update", {"parameters": models[group[client]]}), take
        )


class Stopped(BaseException):
    pass


def go(toys, folder, stop=None, evaluations=10, rounds=3, speeds=(1000.0, 310.0, 90.0), **options):
    """Run three clients of different speed; raise Stopped before round `stop` is saved."""
    clients = [
        toys.client(id, speed=speed, link=1e6) for id, speed in zip("abc", speeds, strict=True)
    ]

    def watch(event, **facts):
        if event == "round" and facts["round"] == stop:
            raise Stopped

    return toys.execute(
        folder,
        Passing(),
        clients,
        federation=FederationConfig(evaluations=evaluations),
        watch=watch,
        rounds=rounds,
        **options,
    )


@pytest.fixture(scope="module")
def whole(toys, tmp_path_factory):
    return go(toys, tmp_path_factory.mktemp("drive") / "whole")


def test_every_client_has_as_many_visits_at_its_own_speed(whole):
    assert (
        whole["rounds"] == 3
        and whole["visits"] == {"a": 3, "b": 3, "c": 3}
        and not whole["failures"]
    )
    assert whole["clock"] == pytest.approx(
        3 * 20 / 90, rel=0.3
    )  # as long as the slowest needs for 20 rows, three times
    assert all(entry["hash"] and entry["value"] is not None for entry in whole["clients"].values())


def test_worker_processes_give_the_same_models(toys, whole, tmp_path):
    assert toys.hashes(go(toys, tmp_path / "there", workers=2)) == toys.hashes(whole)


def test_the_number_of_evaluations_changes_nothing(toys, whole, tmp_path):
    seldom = go(toys, tmp_path / "seldom", evaluations=1)
    assert (
        toys.hashes(seldom) == toys.hashes(whole)
        and seldom["clock"] == whole["clock"]
        and seldom["bytes"] == whole["bytes"]
    )


@pytest.mark.parametrize("checkpoint", [1, 2])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_stopped_and_resumed_run_ends_the_same(toys, whole, tmp_path, stop, checkpoint):
    with pytest.raises(Stopped):
        go(toys, tmp_path / "cut", stop=stop, checkpoint=checkpoint)
    again = go(toys, tmp_path / "cut", checkpoint=checkpoint)
    for key in ("clients", "metrics", "bytes", "clock", "rounds", "failures"):
        assert again[key] == whole[key]


def order(folder):
    """Instant and client of each arrival, from the events."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(event["instant"], event["client"]) for event in events if event["event"] == "arrival"]


def backwards(whole, folder):
    """Write the events of a run in which the slowest clients arrive first, one by one."""
    events = [
        json.loads(line)
        for line in (Path(whole["folder"]) / "events.jsonl").read_text().splitlines()
    ]
    arrivals = sorted(
        (event for event in events if event["event"] == "arrival"),
        key=lambda event: (event["round"], -ord(event["client"])),
    )
    folder.mkdir()
    (folder / "events.jsonl").write_text(
        "\n".join(json.dumps({**event, "instant": i}) for i, event in enumerate(arrivals, 1))
    )
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_of_arrivals_can_be_replayed(toys, whole, tmp_path, workers):
    """Clients of other speeds, heard in the order of those before them: the same end."""
    again = go(
        toys,
        tmp_path / "again",
        replay=whole["folder"],
        speeds=(70.0, 500.0, 1000.0),
        workers=workers,
    )
    other = go(toys, tmp_path / "other", speeds=(70.0, 500.0, 1000.0))
    assert (
        toys.hashes(again) == toys.hashes(whole) != toys.hashes(other)
        and again["bytes"] == whole["bytes"]
    )
    assert order(tmp_path / "again") == order(Path(whole["folder"])) != order(tmp_path / "other")


def test_a_replay_can_be_stopped_and_resumed(toys, whole, tmp_path):
    past = backwards(whole, tmp_path / "past")
    straight = go(toys, tmp_path / "straight", replay=past)
    assert toys.hashes(straight) != toys.hashes(whole)
    for stop in (1, 2):
        with pytest.raises(Stopped):
            go(toys, tmp_path / "cut", stop=stop, replay=past)
    cut = go(toys, tmp_path / "cut", replay=past)
    assert toys.hashes(cut) == toys.hashes(straight) and cut["bytes"] == straight["bytes"]
    third = go(toys, tmp_path / "third", replay=tmp_path / "cut")  # what was told twice counts once
    assert toys.hashes(third) == toys.hashes(straight)


def test_a_replay_of_another_kind_or_length_is_refused(toys, whole, tmp_path):
    with pytest.raises(
        UserError, match="has no order of arrivals to replay; only runs of asynchronous methods"
    ):
        toys.execute(tmp_path / "sync", toys.method("local"), toys.clients(), rounds=1)
        go(toys, tmp_path / "1", replay=tmp_path / "sync")
    with pytest.raises(UserError, match="cannot be read"):
        go(toys, tmp_path / "2", replay=tmp_path / "nowhere")
    with pytest.raises(UserError, match="ended after 9 instants, and this one goes on"):
        go(toys, tmp_path / "3", replay=whole["folder"], rounds=4)


def test_the_last_snapshot_is_the_final_model(toys, whole, tmp_path):
    results = go(toys, tmp_path / "end")
    store = Store(tmp_path / "end" / "checkpoints" / "clients")
    for client, entry in results["clients"].items():
        program = Passing.Program(toys.client(client), Passing(), toys.training(), 0)
        program.restore(store.read_latest(client))
        assert program.describe()["hash"] == entry["hash"]
