"""Fair comparisons: local baseline and federated run do equal work from equal weights."""

import json
from dataclasses import replace

import pytest
import torch

from unalike import (
    Averaging,
    AveragingProgram,
    FedAvg,
    FederationConfig,
    FedMuscle,
    FedMusclePlus,
    Local,
    MultiLabel,
)
from unalike.base.errors import UserError
from unalike.core.program import hash_model
from unalike.core.runtime import ClientRuntime
from unalike.engines.local import LocalEngine


@pytest.mark.parametrize(
    "federation",
    [
        FederationConfig(),
        FederationConfig(participation=0.4, quorum=0),
        FederationConfig(dropout=0.5, quorum=0),
    ],
)
def test_local_training_gains_nothing_over_itself(toys, tmp_path, federation):
    """With dropout layers, batch statistics, and rounds that some clients miss."""
    results = toys.execute(
        tmp_path / "run", Local(), toys.clients(4), federation=federation, rounds=5, alone=True
    )
    assert {c: entry["gain"] for c, entry in results["clients"].items()} == dict.fromkeys(
        "abcd", 0.0
    )


def test_more_evaluations_change_no_dropout_mask(toys, tmp_path):
    often, seldom = (
        toys.execute(
            tmp_path / str(n),
            Local(),
            toys.clients(),
            federation=FederationConfig(evaluations=n),
            rounds=4,
        )
        for n in (4, 1)
    )
    assert toys.hashes(often) == toys.hashes(seldom)


def test_another_client_changes_nothing_for_clients_without_contact(toys, tmp_path):
    three, four = (
        toys.hashes(toys.execute(tmp_path / str(n), Local(), toys.clients(n), rounds=2))
        for n in (3, 4)
    )
    assert all(four[c] == hash for c, hash in three.items())


def test_the_local_baseline_starts_from_the_weights_of_averaging(toys, tmp_path, monkeypatch):
    firsts = {}
    train = AveragingProgram.train

    def look(self):
        firsts.setdefault(self.client.id, hash_model(self.model))
        return train(self)

    look.operation = "changes"
    monkeypatch.setattr(AveragingProgram, "train", look)
    toys.execute(tmp_path / "run", FedAvg(), [toys.client(c) for c in "abc"], rounds=1, alone=True)
    assert len(set(firsts.values())) == 1 and len(firsts) == 3


def test_final_model_local_keeps_the_model_after_local_epochs(toys, tmp_path):
    """Also of clients that miss the last round."""
    for keep in ("local", "aligned"):
        fed = toys.federation(
            tmp_path / keep,
            FedMusclePlus(peers=1, width=8, batch=8, final_model=keep),
            toys.clients(4),
            federation=FederationConfig(participation=0.5),
            rounds=4,
        )
        for finished in FedMusclePlus(peers=1, width=8, batch=8, final_model=keep).serve(fed):
            fed.finished = finished
        settled = {
            c for c, program in fed.engine.host.programs.items() if "settled" in program.memory
        }
        assert settled == (set(fed.engine.host.programs) if keep == "local" else set())


def test_clock_does_not_depend_on_what_is_in_memory(toys, tmp_path):
    method = lambda: FedMuscle(peers=1, width=8, batch=8)
    kept, spilled = (
        toys.execute(tmp_path / str(alive), method(), toys.clients(), rounds=2, alive=alive)
        for alive in (256, 1)
    )
    assert kept["clock"] == pytest.approx(spilled["clock"], rel=1e-12)


def test_a_client_without_test_rows_can_take_part(toys, tmp_path):
    x, _ = toys.blobs(20, 1)
    nothing = toys.client(
        "b", task=MultiLabel(2), train=(x, (x[:, :2] > 0).float()), test=(x, torch.zeros(20, 2))
    )
    with pytest.raises(
        UserError,
        match=r"clients\.b   its micro_f1 is undefined on its 20 test rows: no label is present",
    ):
        toys.execute(tmp_path / "refused", Local(), [toys.client("a"), nothing], rounds=2)
    results = toys.execute(
        tmp_path / "run", Local(), [toys.client("a"), replace(nothing, test=None)], rounds=2
    )
    assert (
        not results["failures"]
        and results["clients"]["b"]["value"] is None
        and results["clients"]["b"]["hash"]
    )


def test_a_sent_message_is_not_changed_by_its_sender(toys, tmp_path):
    method, training = FedAvg(), toys.training()
    engine = LocalEngine(
        [toys.client("a")],
        lambda c: ClientRuntime(method.Program(c, method, training, 0)),
        tmp_path,
    )
    sent = {
        name: tensor.clone()
        for name, tensor in method.Program(toys.client("a"), method, training, 0)
        .model.state_dict()
        .items()
    }
    engine.send(
        {
            "a": {
                "operation": "receive",
                "number": 1,
                "round": 1,
                "turn": 0,
                "body": {"parameters": sent},
            }
        }
    )
    before = {name: tensor.clone() for name, tensor in sent.items()}
    for tensor in sent.values():
        tensor.zero_()
    engine.receive()
    assert toys.apart({"a": engine.host.programs["a"].model.state_dict()}, {"a": before}) == 0


def test_personal_averaging_keeps_its_models_on_disk(toys, tmp_path):
    class Personal(Averaging):
        personalised = True

        def evaluate(self, fed):
            return fed.call("evaluate", clients=fed.clients, quorum=0)

        def finish(self, fed):
            pass

    kept, spilled = (
        toys.execute(tmp_path / str(alive), Personal(), toys.clients(), rounds=2, alive=alive)
        for alive in (256, 1)
    )
    assert toys.hashes(kept) == toys.hashes(spilled)


def test_public_sets_in_another_order_are_refused(toys, tmp_path):
    x, _ = toys.blobs(24, 2000)
    with pytest.raises(ValueError, match="another public set"):
        toys.execute(
            tmp_path / "run",
            toys.method("feddf"),
            [toys.client("a"), toys.client("b", public=(x.flip(0), None))],
        )


def test_a_local_model_kept_by_the_safeguard_equals_the_local_baseline(tmp_path, toys):
    """Also where rounds are missed and models draw random numbers."""
    clients = [toys.client(id, model=toys.noisy) for id in "abc"]
    federation = FederationConfig(participation=0.7, dropout=0.3, quorum=0)
    results = toys.execute(
        tmp_path, Local(), clients, rounds=5, alone=True, safeguard=True, federation=federation
    )
    assert {entry["kept"] for entry in results["clients"].values()} == {"alone"}  # a tie
    assert all(entry["safeguarded"] == entry["alone"] for entry in results["clients"].values())
    assert results["safeguard"] == {"delta": 0, "losers": 0}


@pytest.mark.parametrize("method", [Local(), FedAvg()])
def test_the_end_is_measured_once(tmp_path, toys, method):
    toys.execute(tmp_path, method, toys.clients(), rounds=2, alone=True)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    ends = [(event["who"], event["round"]) for event in events if event["event"] == "evaluation"]
    assert sorted(ends) == [("alone", 1), ("alone", 2), ("together", 1), ("together", 2)]
