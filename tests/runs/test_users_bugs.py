"""A bug in the user's own code is shown with its file and line, not as a mistake in settings."""

import json

import pytest
import torch
from torch import nn

import unalike
from unalike import FedAvg, Training
from unalike.base.errors import Problems

ONCE = Training(rounds=1, batch_size=8)


def line_of(text):
    """The number of the line of this file that ends with a text."""
    with open(__file__) as file:
        for number, line in enumerate(file, start=1):
            if line.rstrip().removesuffix("  # noqa: F821").endswith(text):
                return number
    raise AssertionError(f"no line ends with {text}")


class BrokenEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x):
        return self.layer(scaled(x))  # bug in forward  # noqa: F821


class BrokenLoss(FedAvg):
    class Program(FedAvg.Program):
        def loss(self, x, y):
            return wieght * super().loss(x, y)  # bug in loss  # noqa: F821


def events(folder, kind):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_bug_in_a_model_is_found_before_the_run_with_file_and_line(tmp_path, toys):
    clients = [toys.client("a"), toys.client("b", model=BrokenEncoder)]
    with pytest.raises(Problems) as error:
        unalike.run(FedAvg(), clients, training=ONCE, out=tmp_path / "run")
    line = line_of("# bug in forward")
    sentence = f"NameError: name 'scaled' is not defined ({__file__}, line {line}, in forward)"
    assert sentence in str(error.value) and "clients.b" in str(error.value)
    (note,) = error.value.__notes__
    assert note.startswith("Traceback") and f"line {line}, in forward" in note
    assert isinstance(error.value.__cause__, NameError)
    assert not (tmp_path / "run").exists()


def test_a_recognised_mistake_is_one_sentence(toys):
    clients = [toys.client("a"), toys.client("b", model=nn.Linear(5, 8))]
    with pytest.raises(Problems) as error:
        unalike.run(FedAvg(), clients, training=ONCE)
    assert "clients.b   RuntimeError: mat1 and mat2 shapes" in str(error.value)
    assert not hasattr(error.value, "__notes__")


class BrokenAtOneClient(BrokenLoss):
    class Program(BrokenLoss.Program):
        def loss(self, x, y):
            return super().loss(x, y) if self.client.id == "c" else self.task_loss(x, y)


def test_a_bug_at_every_client_ends_the_run_with_file_and_line(tmp_path, toys):
    with pytest.raises(unalike.QuorumError) as error:
        unalike.run(BrokenLoss(), toys.clients(), training=ONCE, out=tmp_path)
    location = f"{__file__}, line {line_of('# bug in loss')}, in loss"
    assert f"a, b, c: NameError: name 'wieght' is not defined ({location})" in str(error.value)


def test_a_bug_at_one_client_is_in_results_table_and_events_with_file_and_line(
    tmp_path, toys, capsys
):
    clients = toys.clients()
    result = unalike.run(BrokenAtOneClient(), clients, training=ONCE, out=tmp_path, alone=False)
    location = f"{__file__}, line {line_of('# bug in loss')}, in loss"
    (entry,) = result["failures"]
    assert (entry["client"], entry["round"], entry["location"]) == ("c", 1, location)
    assert result.failures[0].reason == f"NameError: name 'wieght' is not defined ({location})"
    (event,) = events(tmp_path, "failure")
    assert event["traceback"].startswith("Traceback") and "in loss" in event["traceback"]
    result.show()
    assert location.replace(" ", "") in "".join(capsys.readouterr().out.split())


def test_a_bug_in_the_local_baseline_is_recorded_with_its_traceback(tmp_path, toys):
    class BrokenAlone(FedAvg):
        class Program(FedAvg.Program):
            def train(self, epoch=None):
                return super().train(epochs=epoch)  # no such argument

            train.operation = "changes"

    unalike.run(BrokenAlone(), toys.clients(), training=ONCE, out=tmp_path)
    failures = events(tmp_path, "failure")
    assert {event["client"] for event in failures} == {"a", "b", "c"}
    assert f"line {line_of('# no such argument')}, in train" in failures[0]["traceback"]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_debug_raises_the_exception_where_it_happened(tmp_path, toys, alone, workers):
    with pytest.raises(NameError, match="wieght") as error:
        options = {"training": ONCE, "out": tmp_path / "run", "alone": alone, "workers": workers}
        unalike.run(BrokenLoss(), toys.clients(), debug=True, **options)
    assert error.traceback[-1].lineno + 1 == line_of("# bug in loss")
    with pytest.raises(NameError, match="scaled"):
        clients = [toys.client("a", model=BrokenEncoder)]
        unalike.run(FedAvg(), clients, training=ONCE, debug=True)


def test_debug_ends_with_the_run(toys, monkeypatch):
    import os

    monkeypatch.delenv("UNALIKE_DEBUG", raising=False)
    with pytest.raises(NameError):
        unalike.run(FedAvg(), [toys.client("a", model=BrokenEncoder)], debug=True)
    assert "UNALIKE_DEBUG" not in os.environ


class BrokenServer(unalike.Local):
    def serve(self, fed):
        for number in fed.rounds():
            if number == self.breaks:
                raise KeyError("mean")  # bug in serve
            fed.call("train")
            yield number

    breaks = 1


def test_an_exception_at_the_server_is_recorded_with_its_traceback(tmp_path, toys):
    with pytest.raises(KeyError):
        unalike.run(BrokenServer(), toys.clients(), training=ONCE, out=tmp_path, alone=False)
    (failed,) = events(tmp_path, "failed")
    assert failed["error"] == "KeyError: 'mean'"
    assert f"line {line_of('# bug in serve')}, in serve" in failed["traceback"]


def test_a_start_that_failed_does_not_block_the_next(tmp_path, toys):
    options = {"training": ONCE, "out": tmp_path, "alone": False}
    for _ in range(2):
        with pytest.raises(KeyError):
            unalike.run(BrokenServer(), toys.clients(), **options)
    assert unalike.run(FedAvg(), toys.clients(), **options).rounds == 1
    assert len(events(tmp_path / "failed-1", "failed")) == 1
    assert (tmp_path / "failed-2" / "config.yaml").exists()
    assert events(tmp_path, "failed") == []
    assert [event["algorithm"] for event in events(tmp_path, "start")] == ["fedavg"]


def test_a_run_that_failed_after_a_checkpoint_is_kept(tmp_path, toys):
    class LaterBroken(BrokenServer):
        breaks = 2

    options = {"training": Training(rounds=3, batch_size=8), "out": tmp_path, "alone": False}
    with pytest.raises(KeyError):
        unalike.run(LaterBroken(), toys.clients(), **options)
    with pytest.raises(unalike.UserError, match="already holds a run; resume it with resume=True"):
        unalike.run(LaterBroken(), toys.clients(), **options)


def test_a_model_that_fails_on_the_public_rows_keeps_its_exception(toys):
    client = toys.client("a", public=torch.zeros(24, 5))
    with pytest.raises(Problems, match="cannot take those of the public set"):
        unalike.run(unalike.FedMuscle(peers=1, width=8, batch=8), [client, toys.client("b")])


def test_numbers_of_a_large_scale_are_told_before_the_run(tmp_path):
    """Columns of inputs and targets that a small learning rate does not reach are told."""
    x = torch.arange(12.0).reshape(6, 2) / 10
    years = {"targets": torch.linspace(100, 140, 6), "small": torch.linspace(-1, 1, 6)}
    tasks = {"targets": unalike.Regression(), "small": unalike.Regression()}
    clients = [
        unalike.Client(id, lambda: nn.Linear(2, 4), tasks[id], (x, y)) for id, y in years.items()
    ]
    large = (x + 120, torch.tensor([0, 1] * 3))
    clients.append(
        unalike.Client("inputs", lambda: nn.Linear(2, 4), unalike.Classification(2), large)
    )
    notices = []

    def watch(event, **facts):
        if event == "notice":
            notices.append(facts["text"])

    budget = Training(rounds=1)
    unalike.run(FedAvg(), clients, training=budget, out=tmp_path / "run", watch=watch)
    targets, inputs = notices
    assert targets.startswith("targets: its targets have mean 120 and deviation 15:")
    assert inputs.startswith("inputs: columns of the inputs have means up to 121;")
