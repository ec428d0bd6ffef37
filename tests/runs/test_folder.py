"""A run's folder: written whole, never over another run, not before everything fits."""

import json

import pytest
import torch
import yaml
from torch import nn

from unalike import FedAvg, FedMuscle, Local, Training, resume, run
from unalike.base.errors import UserError
from unalike.runs.run_folder import Folder


def test_a_new_folder_holds_its_config(tmp_path):
    config = {"name": "ünï", "numbers": [1, 2.5, None], "nested": {"on": True}}
    folder = Folder.create(tmp_path / "a" / "b", config)
    assert (
        Folder.open(tmp_path / "a" / "b").config
        == config
        == yaml.safe_load((folder.path / "config.yaml").read_text())
    )
    assert (
        folder.results is None
        and folder.last_checkpoint() is None
        and not list(folder.path.glob("*.partial"))
    )


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path):
    Folder.create(tmp_path, {"name": "first"})
    with pytest.raises(UserError, match="already holds a run"):
        Folder.create(tmp_path, {"name": "second"})
    assert Folder.open(tmp_path).config == {"name": "first"}


def test_a_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(UserError, match=r"is no run folder: it has no config\.yaml"):
            Folder.open(path)
    with pytest.raises(UserError, match="cannot be written"):
        Folder.create(tmp_path / "file" / "run", {})


@pytest.mark.parametrize("text", ["", "[1", "just words", "- 1", "a: \x00"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        resume(tmp_path)


def test_results_cut_short_are_refused(tmp_path):
    Folder.create(tmp_path, {"name": "a"})
    (tmp_path / "results.json").write_text('{"clients": {"a')
    with pytest.raises(
        UserError, match=r"results\.json cannot be read .* move it to another folder and resume"
    ):
        resume(tmp_path)


def test_events_are_lines_in_order(tmp_path):
    folder = Folder.create(tmp_path, {})
    folder.record("round", round=1)
    folder.record("failure", reason="two\nlines, ünï")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (
        [e["event"] for e in events] == ["round", "failure"]
        and events[1]["reason"] == "two\nlines, ünï"
        and events[0]["time"] > 0
    )


@pytest.mark.parametrize("torn", ['{"event": "rou', '{"event": "round"}'])
def test_half_a_line_does_not_swallow_the_next_event(tmp_path, torn):
    from unalike.report import read

    folder = Folder.create(tmp_path, {"name": "a"})
    folder.record("start")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(torn)
    folder.record("resume")
    folder.record("round")
    events = [event["event"] for event in read(tmp_path).events]
    assert (
        events == ["start", *["round"] * torn.endswith("}"), "resume", "round"]
        and "\n\n" not in (tmp_path / "events.jsonl").read_text()
    )


# refused before the folder exists


def refused(tmp_path, says, algorithm, clients, **options):
    with pytest.raises(ValueError, match=says):
        run(
            algorithm,
            clients,
            training=Training(rounds=1),
            out=tmp_path / "run",
            alone=False,
            **options,
        )
    assert not (tmp_path / "run").exists()


def test_a_run_without_clients_is_refused(tmp_path):
    refused(tmp_path, "at least one client", FedAvg(), [])


def test_two_clients_of_one_id_are_refused(tmp_path, toys):
    refused(tmp_path, "same id", FedAvg(), [toys.client("a"), toys.client("a")])


def test_a_public_set_smaller_than_a_batch_is_refused(tmp_path, toys):
    refused(
        tmp_path,
        "the public set has 24 rows, fewer than a batch of 32",
        FedMuscle(peers=1),
        toys.clients(2),
    )


def test_public_sets_of_different_length_are_refused(tmp_path, toys):
    clients = [toys.client("a"), toys.client("b", public=(toys.blobs(30, 1)[0], None))]
    with pytest.raises(
        ValueError, match="client b holds a public set of 30 rows, most others of 24"
    ):
        run(
            FedMuscle(peers=1, batch=8, width=8),
            clients,
            training=Training(rounds=1),
            out=tmp_path / "run",
            alone=False,
        )


def test_all_models_that_do_not_fit_are_named_at_once(tmp_path, toys):
    """The first one fits."""
    wide = lambda: nn.Linear(7, 9)
    wider = lambda: nn.Linear(8, 10)
    clients = [toys.client("a"), toys.client("b", model=wide), toys.client("c", model=wider)]
    refused(
        tmp_path,
        r"2 problems in unalike.run\n  clients.b   RuntimeError: .*shapes cannot be multiplied"
        r"(.*\n)+?.*  clients.c   RuntimeError: .*shapes cannot be multiplied",
        FedMuscle(peers=1, batch=8, width=8),
        clients,
    )


def test_a_model_that_does_not_fit_its_data_is_refused(tmp_path, toys):
    clients = [toys.client("a"), toys.client("b", model=nn.Linear(7, 3))]
    refused(tmp_path, "clients.b   RuntimeError: .*shapes cannot be multiplied", Local(), clients)


def test_the_dry_run_does_not_change_the_users_modules(tmp_path, toys):
    model = nn.Linear(6, 8)
    before = model.weight.clone()
    state = torch.get_rng_state()
    run(
        Local(),
        [toys.client("a", model=model, dtype=torch.float32)],
        training=Training(rounds=1),
        out=tmp_path / "run",
        alone=False,
    )
    assert torch.equal(model.weight, before) and torch.equal(torch.get_rng_state(), state)
