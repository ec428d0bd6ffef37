"""Who works with whom: said before the run and in its results; nobody at all is a warning."""

from functools import partial

import pytest
import torch

from unalike import (
    Classification,
    Client,
    FedAvg,
    FedDF,
    FedMuscle,
    FedMusclePlus,
    FedProto,
    Local,
    Training,
    run,
)
from unalike.models import build_encoder
from unalike.report import outcome
from unalike.report.page import write

PUBLIC = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def client(id, width, labels=2):
    """A client with 12 random rows and an MLP of that width."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(width))
    y = torch.arange(12) % labels
    task = Classification([f"{labels}-{i}" for i in range(labels)])
    model = partial(build_encoder, "mlp", (6,), {"hidden": [width], "width": width})
    return Client(id, model, task, (x, y), (x, y), public=PUBLIC)


def train(algorithm, clients, folder, **options):
    events = []
    result = run(
        algorithm,
        clients,
        training=Training(rounds=2, batch_size=6),
        out=folder,
        watch=lambda event, **facts: events.append((event, facts)),
        **options,
    )
    return result, events


def test_fedavg_of_two_unlike_shapes_is_a_warning_not_a_success(tmp_path, capsys):
    result, events = train(FedAvg(), [client("ann", 4), client("bob", 5)], tmp_path, progress=True)
    assert result.sharing == {}
    assert outcome.verdict(result).startswith(
        "Two clients trained each by itself, because no two of them share anything"
    )
    # Before the first training, alone or together.
    names = [event for event, _ in events]
    assert names.index("sharing") < names.index("alone") < names.index("round")
    assert names.count("sharing") == 1
    warning = "Warning: no two of 2 clients share anything: each trains by itself"
    assert warning in capsys.readouterr().err
    result.show()
    assert "shared     nothing: no two clients worked together" in capsys.readouterr().out
    page = write(tmp_path).read_text()
    assert 'class="verdict lost"' in page and "no two of them share anything" in page


def test_groups_and_clients_that_work_alone_are_named(tmp_path, capsys):
    clients = [client("ann", 4), client("bob", 5), client("cem", 4), client("dee", 4, labels=3)]
    result, events = train(FedAvg(), clients, tmp_path, alone=False, progress=True)
    assert result.sharing == {"parameters": [["ann", "cem"]]}
    names = [event for event, _ in events]
    assert names.index("sharing") < names.index("round")
    line = "Who shares what: parameters: ann and cem | nothing: bob and dee"
    assert line in capsys.readouterr().err
    assert outcome.verdict(result).startswith("Four clients trained together")
    assert "parameters: ann and cem | nothing: bob and dee" in write(tmp_path).read_text()


@pytest.mark.parametrize(
    "algorithm, expected",
    [
        (FedMuscle(peers=2, width=4, batch=8), {"public set": [["a", "b", "c"]]}),
        (
            FedMusclePlus(peers=2, width=4, batch=8, average_heads="round"),
            {"public set": [["a", "b", "c"]], "heads": [["a", "b"]]},
        ),
        (FedDF(batch=8), {"public predictions": [["a", "b"]]}),
        (FedProto(width=4), {"labels": [["a", "b"]]}),
        (Local(), None),
    ],
)
def test_what_is_shared_depends_on_the_method(tmp_path, algorithm, expected):
    clients = [client("a", 4), client("b", 5), client("c", 6, labels=3)]
    assert train(algorithm, clients, tmp_path, alone=False)[0].sharing == expected
