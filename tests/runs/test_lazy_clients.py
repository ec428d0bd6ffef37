"""Clients that are built when they first take part."""

import json

import pytest
import torch
import yaml
from torch import nn

import unalike
from unalike import FedAvg, FederationConfig, LazyClients, Local, Training, UserError
from unalike.core.lazy_clients import LazyInfos, NumberedIds
from unalike.runs.api import run_scenario
from unalike.scenarios import load

TRAINING = Training(rounds=3, epochs=1, batch_size=8)
MANY = 10_000
TEN_A_ROUND = FederationConfig(participation=10 / MANY)
ENCODER, HEAD = nn.Linear(6, 5), nn.Linear(5, 3)


class Builder:
    """Builds clients, and remembers which."""

    def __init__(self, **about):
        self.built = []
        self.about = about

    def __call__(self, i):
        self.built.append(i)
        draw = torch.Generator().manual_seed(i)
        x, y = torch.randn(16, 6, generator=draw), torch.arange(16) % 3
        return unalike.Client(
            f"c{i}",
            model=ENCODER,
            task=unalike.Classification(3),
            train=(x[:12], y[:12]),
            test=(x[12:], y[12:]),
            **self.about,
        )


def go(folder, clients, algorithm=None, federation=TEN_A_ROUND, **options):
    return unalike.run(
        algorithm or FedAvg(),
        clients,
        training=TRAINING,
        federation=federation,
        out=folder / "run",
        **options,
    )


@pytest.mark.parametrize("algorithm", [FedAvg(), Local()])
def test_only_those_that_take_part_are_built(tmp_path, algorithm):
    build = Builder()
    result = go(tmp_path, LazyClients(MANY, build), algorithm)
    sampled = set()
    for number in (1, 2, 3):
        sampled |= set(TEN_A_ROUND.sample(NumberedIds(MANY), 0, number))
    assert {f"c{i}" for i in build.built} <= sampled | {"c0", f"c{MANY - 1}"}
    assert result.lazy == {"clients": MANY, "participants": len(sampled), "measured": len(sampled)}
    assert set(result.clients) == sampled
    assert all(client.value is not None for client in result.clients.values())
    assert all(client.local is None for client in result.clients.values())
    text = (tmp_path / "run" / "report.html").read_text()
    assert "30 of 10,000 clients took part, 30 of them were measured" in text


def test_they_end_as_clients_of_a_list_do(tmp_path):
    """Everyone starts from one module, so that it does not matter whose weights begin."""
    count = 20
    federation = FederationConfig(participation=0.2)
    build = Builder(head=HEAD)
    lazy = go(tmp_path / "lazy", LazyClients(count, build), federation=federation)
    listed = [build(i) for i in range(count)]
    eager = go(tmp_path / "eager", listed, federation=federation, alone=False)
    for id, client in lazy.clients.items():
        assert client.hash == eager.clients[id].hash
        assert client.metrics == eager.clients[id].metrics


def test_only_a_sample_of_them_is_measured(tmp_path):
    federation = FederationConfig(participation=10 / MANY, evaluation_clients=4)
    result = go(tmp_path, LazyClients(MANY, Builder()), federation=federation)
    assert result.lazy["measured"] == len(result.clients) == 4
    first_round = federation.sample(NumberedIds(MANY), 0, 1)
    assert set(result.clients) <= set(first_round)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    curves = [set(event["values"]) for event in events if event["event"] == "evaluation"]
    assert curves
    assert all(measured == set(result.clients) for measured in curves)
    assert set(result.models()) == set(result.clients)


def test_of_a_list_a_sample_can_be_measured_too(tmp_path):
    clients = [Builder()(i) for i in range(8)]
    federation = FederationConfig(evaluation_clients=3)
    result = go(tmp_path, clients, federation=federation)
    assert len(result.clients) == 8
    assert sum(client.value is not None for client in result.clients.values()) == 3
    assert sum(client.gain is not None for client in result.clients.values()) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_stopped_goes_on_to_the_same_end(tmp_path, workers):
    def stop(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "a", LazyClients(MANY, Builder()), watch=stop, workers=workers)
    resumed = go(tmp_path / "a", LazyClients(MANY, Builder()), resume=True, workers=workers)
    whole = go(tmp_path / "b", LazyClients(MANY, Builder()))
    for result in (resumed, whole):
        for key in ("folder", "seconds"):
            result.pop(key)
    assert resumed == whole
    with pytest.raises(UserError, match="lazy_clients was 10000, is 9999"):
        go(tmp_path / "a", LazyClients(MANY - 1, Builder()), resume=True)


def test_one_that_cannot_be_built_is_left_out(tmp_path):
    lost = TEN_A_ROUND.sample(NumberedIds(MANY), 0, 1)[3]
    build = Builder()

    def sometimes(i):
        if f"c{i}" == lost:
            raise OSError("disk 3 is gone")
        return build(i)

    result = go(tmp_path, LazyClients(MANY, sometimes))
    (failure,) = result.failures
    assert (failure.client, failure.operation) == (lost, "build")
    assert "disk 3 is gone" in failure.reason
    assert lost not in result.clients


def test_one_that_does_not_fit_the_method_is_left_out(tmp_path):
    odd = TEN_A_ROUND.sample(NumberedIds(MANY), 0, 1)[0]
    build = Builder()

    def pairs(i):
        client = build(i)
        if client.id == odd:
            return unalike.Client(
                odd, model=ENCODER, task=unalike.Retrieval(), train=client.train, test=client.test
            )
        return client

    result = go(tmp_path, LazyClients(MANY, pairs))
    assert "client " + odd + " wants retrieval" in result.failures[0].reason


def test_what_would_visit_everybody_is_refused(tmp_path):
    clients = LazyClients(MANY, Builder())
    with pytest.raises(UserError, match="safeguard trains every client alone"):
        go(tmp_path, clients, safeguard=True)
    with pytest.raises(UserError, match="visits every client"):
        go(tmp_path, clients, unalike.AFMCC())
    assert not (tmp_path / "run").exists()


def test_the_function_must_give_the_expected_id():
    clients = LazyClients(["ada", "ben"], Builder())
    with pytest.raises(UserError, match="returned client 'c1' for number 1, whose id is 'ben'"):
        clients[1]
    with pytest.raises(UserError, match="at least one client, got 0"):
        LazyClients(0, Builder())


def test_infos_cover_those_that_joined_in_the_order_of_all():
    infos = LazyInfos(LazyClients(MANY, Builder()))
    infos.join(["c7", "c3"])
    infos.join(["c5"])
    assert list(infos) == ["c3", "c5", "c7"]
    assert infos["c9"].samples == 12
    assert len(infos) == 3
    with pytest.raises(KeyError):
        infos["c10000"]
    with pytest.raises(KeyError):
        infos["c03"]


def test_a_scenario_can_have_lazy_clients(tmp_path):
    scenario = {
        "name": "phones",
        "algorithm": {"name": "fedavg"},
        "training": {"rounds": 2, "epochs": 1},
        "federation": {"participation": 0.02},
        "data": {"name": "digits"},
        "lazy": True,
        "clients": [
            {
                "id": "phone",
                "count": 200,
                "target": "digit",
                "train": 4,
                "model": {"name": "mlp", "hidden": [8], "width": 8},
            }
        ],
    }
    file = tmp_path / "phones.yaml"
    file.write_text(yaml.safe_dump(scenario))
    result, _ = run_scenario(*load(str(file)), out=tmp_path / "run")
    assert result.lazy == {"clients": 200, "participants": 8, "measured": 8}
    models = result.models()
    assert set(models) == set(result.clients)
