"""A whole asynchronous run, where nobody waits: the same end with processes, with more looking on, and after being stopped anywhere."""

from dataclasses import dataclass

import pytest

from unalike import Terms
from unalike.averaging import Averaging
from unalike.engines.store import Store


@dataclass
class Passing(Averaging):
    """Each client's update is mixed in as it comes; it then goes on from the mixture."""

    def serve(self, fed):
        self.acquaint(fed)
        models, group = fed.state["models"], fed.state["group"]

        def take(replies):
            for client, reply in replies.items():
                mine = models[group[client]]
                models[group[client]] = {name: (mine[name] + tensor) / 2 if tensor.is_floating_point() else tensor
                                         for name, tensor in reply["parameters"].items()}
            return {}

        yield from fed.drive(lambda client: ("update", {"parameters": models[group[client]]}), take)


class Stopped(BaseException):
    pass


def go(toys, folder, stop=None, evaluations=10, **options):
    """A run of three clients of different speed; stopped before visit `stop` of everyone is saved, if there is one."""
    clients = [toys.client(id, speed=speed, link=1e6) for id, speed in (("a", 1000.0), ("b", 310.0), ("c", 90.0))]

    def watch(event, **facts):
        if event == "round" and facts["round"] == stop:
            raise Stopped

    return toys.execute(folder, Passing(), clients, terms=Terms(evaluations=evaluations), watch=watch, rounds=3, **options)


@pytest.fixture(scope="module")
def whole(toys, tmp_path_factory):
    return go(toys, tmp_path_factory.mktemp("drive") / "whole")


def test_everyone_has_its_turns_at_its_own_speed(whole):
    assert whole["rounds"] == 3 and whole["visits"] == {"a": 3, "b": 3, "c": 3} and not whole["failures"]
    assert whole["clock"] == pytest.approx(3 * 20 / 90, rel=0.3)        # as long as the slowest needs for 20 rows, three times
    assert all(entry["hash"] and entry["value"] is not None for entry in whole["clients"].values())


def test_processes_give_the_same(toys, whole, tmp_path):
    assert toys.hashes(go(toys, tmp_path / "there", workers=2)) == toys.hashes(whole)


def test_looking_on_changes_nothing(toys, whole, tmp_path):
    seldom = go(toys, tmp_path / "seldom", evaluations=1)
    assert toys.hashes(seldom) == toys.hashes(whole) and seldom["clock"] == whole["clock"] and seldom["bytes"] == whole["bytes"]


@pytest.mark.parametrize("checkpoint", [1, 2])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_stopped_and_resumed_is_as_if_nothing_had_happened(toys, whole, tmp_path, stop, checkpoint):
    with pytest.raises(Stopped):
        go(toys, tmp_path / "cut", stop=stop, checkpoint=checkpoint)
    again = go(toys, tmp_path / "cut", checkpoint=checkpoint)
    for key in ("clients", "metrics", "bytes", "clock", "rounds", "failures"):
        assert again[key] == whole[key]


def test_what_is_on_disk_in_the_end_is_the_final_model(toys, whole, tmp_path):
    """The last snapshot must be the last."""
    results = go(toys, tmp_path / "end")
    store = Store(tmp_path / "end" / "checkpoints" / "clients")
    for client, entry in results["clients"].items():
        side = Passing.Side(toys.client(client), Passing(), toys.training(), 0)
        side.restore(store.newest(client))
        assert side.describe()["hash"] == entry["hash"]
