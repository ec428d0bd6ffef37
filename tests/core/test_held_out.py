"""The safeguard of methods that average: judged by rows held out of everything."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

import unalike
from unalike import FederationConfig
from unalike.algorithms import FedAvg, FedFomo, HeteroFL, SubFLOT
from unalike.base.errors import UserError
from unalike.core.safeguard import hold_out
from unalike.runs.api import run_scenario
from unalike.scenarios import load

CAPACITIES = {"a": 1.0, "b": 0.5, "c": 0.25}


def narrow_clients(toys, rows=30):
    return [toys.client(id, rows=rows, capacity=share) for id, share in CAPACITIES.items()]


def rows_of(samples):
    x, _ = samples.rows(torch.arange(len(samples)))
    return {tuple(row.tolist()) for row in x}


def test_a_fifth_is_held_out_and_the_rest_is_trained_on(toys):
    client = toys.client("a", rows=30)
    split = hold_out(client, 0)
    held, rest = rows_of(split.held_out.rows), rows_of(split.train)
    assert (len(held), len(rest)) == (6, 24)
    assert not held & rest and held | rest == rows_of(client.train)
    assert split.info().samples == 24
    assert hold_out(toys.client("a", rows=2), 0).held_out is None


def test_a_label_that_only_rows_held_out_have_is_not_masked(toys):
    """The model that is kept alone learnt it from all rows."""
    client = toys.client("a", rows=30)
    split = hold_out(client, 0)
    _, y = split.held_out.rows.rows(torch.arange(6))
    _, all_labels = client.train.rows(torch.arange(30))
    without = client.train.subset((all_labels != y[0]).nonzero()[:, 0])
    split = replace(split, train=without)
    assert split.label_mask[y[0]] and torch.equal(split.label_mask, client.label_mask)
    assert not replace(split, held_out=None).label_mask[y[0]]


@pytest.mark.parametrize("method", [FedAvg(), HeteroFL(), SubFLOT(), HeteroFL(start="own")])
def test_no_request_of_a_run_reads_a_row_that_is_held_out(toys, method, monkeypatch):
    """Until the decision, that is: rows held out are read by it alone."""
    held = {}
    seen = []

    def remember(client, seed):
        split = hold_out(client, seed)
        held[client.id] = rows_of(split.held_out.rows)
        read = split.train.labelled_batch

        def watch(rows):
            x, y = read(rows)
            seen.extend((client.id, tuple(row.tolist())) for row in x)
            return x, y

        split.train.labelled_batch = watch
        return split

    monkeypatch.setattr("unalike.runs.execution.hold_out", remember)
    unalike.run(method, narrow_clients(toys), safeguard=True, training=toys.training(rounds=1))
    assert len(held) == 3 and seen
    assert not any(row in held[client] for client, row in seen)


@pytest.mark.parametrize(
    "method", [FedAvg(finetune=1), HeteroFL(), SubFLOT(), SubFLOT(start="own")]
)
def test_a_client_that_stays_alone_has_the_model_of_the_local_baseline(toys, method, monkeypatch):
    """Trained on all its rows, from where the federation began."""
    monkeypatch.setattr("unalike.core.safeguard.MARGIN", 1e9)
    result = unalike.run(
        method, narrow_clients(toys), safeguard=True, training=toys.training(rounds=2)
    )
    for client in result.clients.values():
        assert client.kept == "alone"
        assert client.safeguarded == pytest.approx(client.local, abs=1e-9)


def test_the_better_of_both_by_rows_held_out_is_kept(toys, monkeypatch):
    """A margin of minus infinity keeps every federated model, one of infinity none."""
    run = partial(unalike.run, clients=narrow_clients(toys), training=toys.training(rounds=1))
    monkeypatch.setattr("unalike.core.safeguard.MARGIN", -1e9)
    result = run(FedAvg(), safeguard=True)
    assert {client.kept for client in result.clients.values()} == {"together"}
    assert all(c.safeguarded == pytest.approx(c.value) for c in result.clients.values())
    assert all(set(c.log_loss) == {"alone", "together", "doubt"} for c in result.clients.values())


def test_a_stopped_run_decides_as_the_whole_one(toys, tmp_path):
    run = partial(
        unalike.run, SubFLOT(), narrow_clients(toys), safeguard=True, training=toys.training()
    )
    whole = run(out=tmp_path / "whole")
    run(out=tmp_path / "stopped")
    (tmp_path / "stopped" / "results.json").unlink()
    again = run(out=tmp_path / "stopped", resume=True)
    assert toys.hashes(again) == toys.hashes(whole)


def test_methods_that_cannot_start_alone_where_they_began_refuse(toys):
    with pytest.raises(UserError, match="safeguard is for methods"):
        unalike.run(FedFomo(), [toys.client("a"), toys.client("b")], safeguard=True)


def test_a_common_test_set_judges_the_kept_models_too(toys):
    common = toys.blobs(40, 5)
    clients = [replace(c, test=None, common=common) for c in narrow_clients(toys)]
    clients = [replace(c, capacity=1.0) for c in clients]
    result = unalike.run(
        FedAvg(), clients, safeguard=True, training=toys.training(rounds=1),
        federation=FederationConfig(evaluations=1),
    )  # fmt: skip
    saved = json.loads((result.folder / "results.json").read_text())
    assert all("safeguarded" in entry for entry in saved["clients"].values())


def test_between_organisations_it_is_refused_before_anything_starts(tmp_path):
    """Clients there announce their number of rows before they know that some are held out."""
    settings = ["engine=flare", "safeguard=true"]
    with pytest.raises(UserError, match="between organisations it cannot yet"):
        run_scenario(*load("subflot-digits", settings=settings), out=tmp_path / "run")
