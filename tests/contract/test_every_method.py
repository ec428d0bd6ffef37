"""What every method in the list must keep, whatever it does. A new method is tested here without a line of its own."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from unalike import FederationConfig
from unalike.algorithms import ALGORITHMS
from unalike.base.errors import UserError
from unalike.core.federation import QuorumError
from unalike.core.operations import list_measurements
from unalike.engines import process as worker
from unalike.engines.host import Host
from unalike.training.stacked_epochs import StackedEpochs


@pytest.fixture
def toys(toys, name):
    """Clients whose task the method serves."""
    return SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name])))


class Stopped(BaseException):
    """As rude as Ctrl-C."""


def stop_at(event, count):
    """A watcher that stops the run at the count-th event of a kind."""
    seen = Counter()

    def watch(told, **facts):
        seen[told] += 1
        if told == event and seen[told] == count:
            raise Stopped

    return watch


def named(results, client):
    """Why a client failed, each time."""
    return [failure["reason"] for failure in results["failures"] if failure["client"] == client]


def test_fits_the_toy(name, toys):
    problems = toys.method(name).check(3, 24)
    assert not problems, (
        f"{name} refuses the toy federation: {problems}; make its field small in tests/conftest.py, SMALL"
    )


def test_learns(name, toys, tmp_path):
    results = toys.execute(
        tmp_path / "run", toys.method(name), toys.clients(dtype=torch.float32), rounds=5, epochs=3
    )
    values = {id: entry["value"] for id, entry in results["clients"].items()}
    assert results["rounds"] == 5 and not results["failures"]
    assert min(values.values()) > 60, f"chance is {100 / toys.classes:g}%, got {values}"


def test_processes_equal_in_process_and_ledger_equals_what_was_encoded(
    name, toys, tmp_path, monkeypatch
):
    toys.execute(tmp_path / "here", toys.method(name), toys.clients(), rounds=2)
    passed = Counter()
    send, take = worker.Worker._send, worker.Worker.take

    def count_down(self, order, data=None):
        passed[order.get("client"), "down"] += len(data or b"")
        send(self, order, data)

    def count_up(self):
        client, data = take(self)
        passed[client, "up"] += len(data)
        return client, data

    monkeypatch.setattr(worker.Worker, "_send", count_down)
    monkeypatch.setattr(worker.Worker, "take", count_up)
    toys.execute(tmp_path / "there", toys.method(name), toys.clients(), rounds=2, workers=2)
    assert toys.apart(toys.states(tmp_path / "here"), toys.states(tmp_path / "there")) <= 1e-9
    ledger = (tmp_path / "here" / "ledger.csv").read_text()
    assert ledger == (tmp_path / "there" / "ledger.csv").read_text()
    counted = Counter()
    for _, client, direction, _, _, size in (line.split(",") for line in ledger.splitlines()[1:]):
        counted[client, direction] += int(size)
    assert counted == {key: size for key, size in passed.items() if size}


def test_same_seed_same_bytes_another_seed_others(name, toys, tmp_path):
    first, again, other = (
        toys.execute(
            tmp_path / f"{i}",
            toys.method(name),
            toys.clients(dtype=torch.float32),
            rounds=2,
            seed=seed,
        )
        for i, seed in enumerate((3, 3, 4))
    )
    assert toys.hashes(first) == toys.hashes(again)
    assert (tmp_path / "0" / "ledger.csv").read_bytes() == (
        tmp_path / "1" / "ledger.csv"
    ).read_bytes()
    assert all(toys.hashes(first)[c] != toys.hashes(other)[c] for c in "abc")


FIRST_CALL, MIDDLE, BETWEEN_ROUNDS = ("call", 1), ("call", 2), ("round", 3)


@pytest.mark.parametrize(
    "workers, stops",
    [
        (0, (FIRST_CALL, ("round", 2), MIDDLE, BETWEEN_ROUNDS, ("call", 3))),
        (2, (MIDDLE, BETWEEN_ROUNDS)),
    ],
    ids=["0", "2"],
)
def test_resumed_equals_undisturbed(name, workers, stops, toys, tmp_path):
    """Stopped after a round, in the middle of one, before the first checkpoint and after the last round, and resumed each time."""
    federation = FederationConfig(participation=0.7, dropout=0.1, quorum=0)
    whole = toys.execute(
        tmp_path / "whole",
        toys.method(name),
        toys.clients(4),
        rounds=4,
        federation=federation,
        workers=workers,
    )
    for event, count in stops:
        with pytest.raises(Stopped):
            toys.execute(
                tmp_path / "cut",
                toys.method(name),
                toys.clients(4),
                rounds=4,
                federation=federation,
                workers=workers,
                watch=stop_at(event, count),
            )
    cut = toys.execute(
        tmp_path / "cut",
        toys.method(name),
        toys.clients(4),
        rounds=4,
        federation=federation,
        workers=workers,
    )
    same = ("clients", "bytes", "clock", "failures", "metrics", "rounds")
    assert {key: cut[key] for key in same} == {key: whole[key] for key in same}
    assert (tmp_path / "cut" / "ledger.csv").read_bytes() == (
        tmp_path / "whole" / "ledger.csv"
    ).read_bytes()


def test_memory_is_a_cache(name, toys, tmp_path):
    """One client in memory at a time: each is saved and loaded between any two of its calls, and nothing changes."""
    for alive in (256, 1):
        toys.execute(
            tmp_path / str(alive), toys.method(name), toys.clients(), rounds=2, alive=alive
        )
    assert toys.apart(toys.states(tmp_path / "256"), toys.states(tmp_path / "1")) <= 1e-9


@pytest.mark.parametrize("workers", [0, 2])
def test_client_that_breaks_is_named_and_left_out(name, workers, toys, tmp_path, monkeypatch):
    run, run_together = Host._run, Host._run_together
    measurements = list_measurements(ALGORITHMS[name].Program)

    def breaks(self, client, message):
        if client == "b" and message["round"] == 2 and message["operation"] not in measurements:
            raise RuntimeError("the battery is empty")
        return run(self, client, message)

    def breaks_together(self, messages):
        if "b" in messages and messages["b"]["round"] == 2:
            raise RuntimeError("somebody's battery is empty")
        return run_together(self, messages)

    monkeypatch.setattr(Host, "_run", breaks)
    monkeypatch.setattr(Host, "_run_together", breaks_together)
    with pytest.raises(Stopped):
        toys.execute(
            tmp_path / "run",
            toys.method(name),
            toys.clients(),
            rounds=4,
            workers=workers,
            watch=stop_at("round", 4),
        )
    results = toys.execute(
        tmp_path / "run", toys.method(name), toys.clients(), rounds=4, workers=workers
    )
    assert named(results, "b") == ["RuntimeError: the battery is empty"]
    assert [failure["round"] for failure in results["failures"]] == [2]
    assert (
        results["rounds"] == 4
        and results["clients"]["a"]["value"] is not None
        and results["clients"]["b"]["value"] is None
    )
    rows = [
        line.split(",") for line in (tmp_path / "run" / "ledger.csv").read_text().splitlines()[1:]
    ]
    assert not [row for row in rows if row[1] == "b" and int(row[0]) > 2], (
        "a client in quarantine was called, after a resume too"
    )


def spoilt(toys):
    """Three clients; the data of one hold NaN."""
    x, y = toys.blobs(20, 5)
    x[3] = float("nan")
    return [toys.client("a"), toys.client("b", train=(x, y)), toys.client("c", model=toys.noisy)]


def test_nan_is_named_and_left_out(name, toys, tmp_path):
    results = toys.execute(tmp_path / "run", toys.method(name), spoilt(toys), alone=True)
    assert len(named(results, "b")) <= 3 and "nan" in named(results, "b")[0].lower()
    assert not named(results, "a") and not named(results, "c")
    assert all(
        torch.isfinite(t).all()
        for c in "ac"
        for t in toys.states(tmp_path / "run")[c].values()
        if t.is_floating_point()
    )


def test_nan_breaks_a_quorum_of_all(name, toys, tmp_path):
    with pytest.raises(
        QuorumError, match=r"2 of 3 clients replied, the quorum is 3\. b: .*(nan|NaN)"
    ):
        toys.execute(
            tmp_path / "run",
            toys.method(name),
            spoilt(toys),
            federation=FederationConfig(quorum=1.0),
        )


def test_survives_dropouts(name, toys, tmp_path):
    results = toys.execute(
        tmp_path / "run",
        toys.method(name),
        toys.clients(),
        rounds=6,
        federation=FederationConfig(dropout=0.3, quorum=0),
    )
    reasons = {failure["reason"] for failure in results["failures"]}
    assert results["rounds"] == 6 and reasons == {"dropped out"}
    assert all(entry["value"] is not None for entry in results["clients"].values())


def test_survives_partial_participation(name, toys, tmp_path):
    results = toys.execute(
        tmp_path / "run",
        toys.method(name),
        toys.clients(4),
        rounds=6,
        federation=FederationConfig(participation=0.75),
    )
    rows = [
        line.split(",") for line in (tmp_path / "run" / "ledger.csv").read_text().splitlines()[1:]
    ]
    for round in (
        range(2, 6) if not ALGORITHMS[name].asynchronous else ()
    ):  # in the first they get acquainted, in the last they leave
        called = {
            client
            for number, client, _, operation, *_ in rows
            if int(number) == round and operation not in list_measurements(ALGORITHMS[name].Program)
        }
        assert len(called) == 3
    assert not results["failures"] and all(entry["hash"] for entry in results["clients"].values())


@pytest.mark.parametrize("why", ["slow", "far"])
def test_survives_a_late_client(name, why, toys, tmp_path):
    late = toys.client("b", **({"speed": 1e-3} if why == "slow" else {"latency": 100.0}))
    results = toys.execute(
        tmp_path / "run",
        toys.method(name),
        [toys.client("a"), late, toys.client("c")],
        federation=FederationConfig(deadline=60.0),
    )
    assert results["rounds"] == 3 and {failure["client"] for failure in results["failures"]} == {
        "b"
    }
    assert all(reason.startswith("late: ") for reason in named(results, "b"))
    assert {failure["round"] for failure in results["failures"]} >= {1, 2, 3}, (
        "who is late once may come again"
    )


def test_one_client_runs_or_is_refused_in_a_sentence(name, toys, tmp_path):
    try:
        results = toys.execute(tmp_path / "run", toys.method(name), toys.clients(1), rounds=2)
    except UserError as error:
        assert "1 client" in str(error) or "has 1" in str(error), error
    else:
        assert results["rounds"] == 2 and results["clients"]["a"]["hash"]


def test_survives_a_client_with_one_class(name, toys, tmp_path):
    x, _ = toys.blobs(20, 5)
    single = toys.client("b", train=(x, torch.full((20,), 2)), test=(x, torch.full((20,), 2)))
    results = toys.execute(
        tmp_path / "run",
        toys.method(name),
        [toys.client("a"), single, toys.client("c", model=toys.noisy)],
        alone=True,
    )
    assert not results["failures"] and results["clients"]["b"]["alone"] is not None


def test_survives_a_last_batch_of_one(name, toys, tmp_path):
    """Batches of 8: 17 labelled rows, 25 public ones, 257 in the test set; batch statistics of one row do not exist."""
    public = (toys.blobs(25, 2000)[0], None)
    odd = [
        toys.client(id, rows=17, model=toys.noisy, public=public, test=toys.blobs(257, 7))
        for id in "abc"
    ]
    results = toys.execute(tmp_path / "run", toys.method(name), odd, rounds=2, alone=True)
    assert not results["failures"] and all(
        entry["value"] is not None for entry in results["clients"].values()
    )


def test_a_client_with_one_sample_runs_or_is_refused_in_a_sentence(name, toys, tmp_path):
    some = [
        toys.client("a"),
        toys.client("b", rows=1, test=toys.blobs(1, 6)),
        toys.client("c", model=toys.noisy),
    ]
    try:
        results = toys.execute(tmp_path / "run", toys.method(name), some, alone=True)
    except UserError as error:
        assert "clients.b" in str(error) and "1 sample" in str(error), error
    else:
        assert not results["failures"] and results["clients"]["b"]["samples"] == 1


def test_takes_inputs_of_another_precision(name, toys, tmp_path):
    """Doubles from NumPy, a model of singles, and an encoder that does not say how wide it is."""
    double = lambda rows, seed: (toys.blobs(rows, seed)[0].double(), toys.blobs(rows, seed)[1])
    clients = [
        toys.client(
            id,
            model=toys.noisy,
            dtype=torch.float32,
            train=double(20, 1),
            test=double(40, 2),
            public=(double(24, 3)[0], None),
        )
        for id in "abc"
    ]
    assert not toys.execute(tmp_path / "run", toys.method(name), clients, rounds=1, alone=True)[
        "failures"
    ]


def test_safeguard_works_or_is_refused_before_anything_runs(name, toys, tmp_path):
    """It changes nothing of what was reached together, unless rows are held out of everything, and
    survives a resume; one client has a single label."""
    small = lambda: [toys.client("a", rows=1), toys.client("b"), toys.client("c", model=toys.noisy)]
    if toys.method(name).safeguard_problem():
        with pytest.raises(UserError, match="safeguard"):
            toys.execute(
                tmp_path / "run",
                toys.method(name),
                small(),
                safeguard=True,
                watch=stop_at("start", 1),
            )
        return
    free = toys.execute(tmp_path / "free", toys.method(name), small())
    safe = toys.execute(tmp_path / "safe", toys.method(name), small(), safeguard=True)
    with pytest.raises(Stopped):
        toys.execute(
            tmp_path / "cut", toys.method(name), small(), safeguard=True, watch=stop_at("round", 2)
        )
    cut = toys.execute(tmp_path / "cut", toys.method(name), small(), safeguard=True, workers=2)
    assert not safe["failures"] and {entry["kept"] for entry in safe["clients"].values()} <= {
        "alone",
        "together",
    }
    values = [{c: run["clients"][c]["value"] for c in run["clients"]} for run in (free, safe)]
    assert values[0] == values[1] or toys.method(name).holds_out()
    assert cut["clients"] == safe["clients"] and cut["bytes"] == safe["bytes"]
    assert safe["bytes"]["up"] == free["bytes"]["up"], "nothing more leaves a client"


def test_test_data_are_never_trained_on(name, toys, tmp_path):
    """Other test labels, the same parameters."""
    shuffled = [
        toys.client(c, test=(toys.blobs(40, 9)[0], torch.zeros(40, dtype=torch.int64)))
        for c in "abc"
    ]
    one = toys.execute(
        tmp_path / "one", toys.method(name), [toys.client(c) for c in "abc"], rounds=2
    )
    other = toys.execute(tmp_path / "other", toys.method(name), shuffled, rounds=2)
    assert toys.hashes(one) == toys.hashes(other)


# Methods whose local training is never a stack, and why.
ONE_BY_ONE = {
    "afmcc": "it has an operation of its own for many clients at once",
    "apfl": "its loss is that of a mixture of two models' parameters",
    "fedlgt": "its loss draws which labels are hidden",
    "fedmpt": "it has dropout, which must repeat by its seed",
    "pfedme": "its loss moves the personal model",
    "perfedavg": "its loss takes a gradient of its own",
    "fedrcl": "its loss looks at requires_grad, which tensors in a stack do not have",
}


def test_a_stack_of_clients_ends_like_clients_one_by_one(name, toys, tmp_path, monkeypatch):
    """With unequal numbers of rows, and the safeguard's replicas where the method has them.

    Not with AdamW: it enlarges rounding errors wherever a gradient is about 0. FedDF then ends
    2e-7 apart if the inputs of clients one by one are multiplied by 1 + 1e-15.
    """
    stacked = Counter()
    train = StackedEpochs.train

    def count(self, members):
        stacked["members"] += len(members)
        return train(self, members)

    monkeypatch.setattr(StackedEpochs, "train", count)
    method = toys.method(name)
    for mode in ("never", "always"):
        results = toys.execute(
            tmp_path / mode,
            method,
            [toys.client(id, rows=20 + 3 * (i % 2)) for i, id in enumerate("abde")],
            rounds=3,
            epochs=2,
            optimizer="adam",
            max_grad_norm=1.0,
            options={"stack": mode},
            safeguard=method.supports_safeguard,
        )
        assert not results["failures"]
    assert toys.apart(toys.states(tmp_path / "never"), toys.states(tmp_path / "always")) <= 1e-9
    ledgers = [(tmp_path / mode / "ledger.csv").read_bytes() for mode in ("never", "always")]
    assert ledgers[0] == ledgers[1]
    assert bool(stacked) == (name not in ONE_BY_ONE)


# Methods whose clients are no one object, because a program holds tensors of its own.
OWN_TENSORS = {"depthfl", "fedrod", "scalefl"}


def test_clients_as_one_object_end_like_clients_one_by_one(name, toys, tmp_path, monkeypatch):
    """With unequal numbers of rows; half of the clients take part in a round."""
    at_once = Counter()
    train_from = StackedEpochs.train_from

    def count(self, start, own, *args):
        at_once["members"] += len(own)
        return train_from(self, start, own, *args)

    monkeypatch.setattr(StackedEpochs, "train_from", count)
    for mode in ("never", "always"):
        results = toys.execute(
            tmp_path / mode,
            toys.method(name),
            [toys.client(id, rows=20 + 3 * (i % 2)) for i, id in enumerate("abdefg")],
            rounds=3,
            epochs=2,
            optimizer="adam",
            federation=FederationConfig(participation=0.5),
            options={"stack": mode},
        )
        assert not results["failures"]
    assert toys.apart(toys.states(tmp_path / "never"), toys.states(tmp_path / "always")) <= 1e-9
    ledgers = [(tmp_path / mode / "ledger.csv").read_bytes() for mode in ("never", "always")]
    assert ledgers[0] == ledgers[1]
    assert bool(at_once) == (name not in {*ONE_BY_ONE, *OWN_TENSORS})
