"""Runs from Python: settings are checked before anything is written; models come back."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import unalike
from unalike import Classification, Client, FedAvg, FedMuscle, Local, Training, run
from unalike.base.errors import UserError
from unalike.engines import store
from unalike.models import build_encoder
from unalike.runs import RunPlan, config_differences
from unalike.runs.compatibility import check_plan
from unalike.runs.local_baseline import cache_path
from unalike.runs.run_folder import Folder

ONCE = Training(rounds=1, batch_size=8)


class Broken(Dataset):
    """Readable so many times, then the disk is gone."""

    def __init__(self, reads):
        self.reads = reads

    def __len__(self):
        return 12

    def __getitem__(self, row):
        self.reads -= 1
        if self.reads < 0:
            raise OSError("scan 17 is missing")
        return torch.zeros(6, dtype=torch.float64), row % 4


def go(folder, algorithm, clients, **options):
    return run(algorithm, clients, **({"training": ONCE, "out": folder, "alone": False} | options))


def refused(tmp_path, says, algorithm, clients, **options):
    with pytest.raises(ValueError, match=says):
        go(tmp_path / "run", algorithm, clients, **options)
    assert not (tmp_path / "run").exists()


# what is given


@pytest.mark.parametrize(
    "given, says",
    [
        ("fedavg", "must be a method, such as unalike.FedMuscle.., got 'fedavg'"),
        (FedAvg, r"the class FedAvg; pass an instance of it: FedAvg\(\)"),
        (
            FedMuscle(loss="mussel"),
            "algorithm.loss   must be 'muscle', 'pairwise' or 'gramian', got 'mussel'",
        ),
        (FedMuscle(peers=2.5), "algorithm.peers .*got 2.5"),
        (FedMuscle(peers=True), "algorithm.peers .*whole number, got True"),
        (FedMuscle(temperature=float("nan")), "algorithm.temperature"),
    ],
)
def test_a_method_is_checked_as_in_a_file(tmp_path, toys, given, says):
    refused(tmp_path, says, given, toys.clients())


def test_numbers_and_tensors_are_converted_as_in_a_file(tmp_path, toys):
    given = FedMuscle(peers=2.0, width=8, batch=8, temperature=torch.full((3, 3), 0.25))
    go(tmp_path, given, toys.clients())
    told = Folder.open(tmp_path).config["algorithm"]
    assert (
        told["peers"] == 2
        and isinstance(told["peers"], int)
        and told["temperature"] == [[0.25] * 3] * 3
    )
    assert isinstance(given.temperature, torch.Tensor), "what was given stays as it is"


def test_a_users_method_may_have_any_field(tmp_path, toys):
    from dataclasses import dataclass

    @dataclass
    class Own(FedAvg):
        scale: torch.Tensor = None

    go(tmp_path, Own(scale=torch.ones(2)), toys.clients())
    algorithm = Folder.open(tmp_path).config["algorithm"]
    assert algorithm["name"] == "own" and algorithm["scale"] == [1.0, 1.0]
    with pytest.raises(UserError, match="the method own, which is your own: pass algorithm="):
        unalike.trained(tmp_path, toys.clients())
    assert unalike.trained(tmp_path, toys.clients(), Own()).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"training": {"rounds": 1}},
            r"training must be made by unalike.Training\(...\), got {'rounds': 1}",
        ),
        (
            {"privacy": {"noise": 1}},
            r"privacy must be made by unalike.Privacy\(...\), got {'noise': 1}",
        ),
        ({"workers": -1}, "workers must be a whole number, at least 0, got -1"),
        ({"seed": "1"}, "seed must be a whole number, got '1'"),
        ({"workers": True}, "workers must be a whole number, at least 0, got True"),
        ({"engine": 3}, 'engine is a name, or a dict with "name" and its options, got 3'),
        ({"engine": "rey"}, 'There is no engine "rey". Did you mean "ray"'),
        ({"engine": {"name": "ray", "timeout": 0}}, "engine.timeout   must be above 0, got 0"),
        ({"out": None, "resume": True}, "resume=True needs out="),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path, toys, options, says):
    refused(tmp_path, says, Local(), toys.clients(), **options)


@pytest.mark.parametrize(
    "made, says",
    [
        (
            lambda: Training(rounds=0, lrr=1),
            "2 problems in Training\n  rounds   must be at least 1, got 0.\n"
            '  lrr      There is no field "lrr". Did you mean "lr"?',
        ),
        (
            lambda: Training(lr=True),
            "1 problem in Training\n  lr   must be a number, got True.",
        ),
        (
            lambda: unalike.FederationConfig(dropout=1.0),
            "1 problem in FederationConfig\n  dropout   must be below 1, got 1",
        ),
        (
            lambda: unalike.FederationConfig(participation=2),
            "1 problem in FederationConfig\n  participation   must be at most 1, got 2.",
        ),
        (lambda: unalike.Privacy(), "1 problem in Privacy\n  noise   is missing."),
    ],
)
def test_settings_are_checked_when_they_are_created(made, says):
    with pytest.raises(UserError) as told:
        made()
    assert str(told.value).startswith(says) and "pydantic" not in str(told.value)


def test_an_engine_whose_package_is_missing_says_how_to_get_it(tmp_path, toys, monkeypatch):
    monkeypatch.setattr("unalike.engines.find_spec", lambda name: None)
    refused(
        tmp_path,
        r'the engine ray needs the package ray: pip install "unalike\[ray\]"',
        Local(),
        toys.clients(),
        engine="ray",
    )


def test_a_method_that_needs_a_public_set_says_how_to_give_it(tmp_path, toys):
    without = [toys.client(c, public=None) for c in "ab"]
    refused(
        tmp_path,
        "public   fedmuscle needs a public set.*pass public=",
        FedMuscle(peers=1, width=8, batch=8),
        without,
    )
    go(
        tmp_path / "with",
        FedMuscle(peers=1, width=8, batch=8),
        without,
        public=toys.blobs(24, 2000)[0],
    )
    assert without[0].public is None, "the next run may have another public set"


@pytest.mark.parametrize(
    "changed, says",
    [
        (
            {"train": (torch.zeros(4, 6), torch.tensor([0, 1, 2, 4]))},
            "client a, train: label 4 does not fit 4 classes",
        ),
        (
            {"test": (torch.zeros(4, 6), torch.zeros(4))},
            "client a, test: classification labels are whole numbers",
        ),
        ({"train": (torch.zeros(4, 6), None)}, "client a, train: there are no labels"),
        (
            {"train": (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))},
            "client a, train: there are no rows",
        ),
        ({"train": torch.zeros(4, 6)}, "client a, train: data is"),
        ({"speed": 0}, "client a: speed must be a number above 0, got 0"),
        ({"capacity": True}, "at most 1, got True"),
        ({"device": "cudaa"}, "client a: there is no device 'cudaa'; cpu"),
        ({"dtype": "float32"}, "client a: dtype must be torch.float32"),
        (
            {"model": "mlp"},
            "client a: model must be an nn.Module, or a function that makes one, got 'mlp'",
        ),
        ({"task": Classification}, "client a: task must be a Task"),
    ],
)
def test_a_client_is_checked_when_it_is_created(toys, changed, says):
    with pytest.raises(ValueError, match=says):
        toys.client("a", **changed)
    with pytest.raises(ValueError, match="id is a word, got 1"):
        Client(1, nn.Linear(6, 8), Classification(4), train=toys.blobs(8, 1))


def test_missing_values_are_reported_as_such(tmp_path, toys):
    x, y = toys.blobs(12, 3)
    x[4] = torch.nan
    told = go(
        tmp_path / "run",
        FedAvg(),
        [toys.client("a"), toys.client("b"), toys.client("c", train=(x, y))],
    )
    assert (
        told["failures"][0]["reason"]
        == "there is NaN or infinity in 1 of 12 samples: fill them in or leave the samples out, "
        "or take an encoder that knows missing values, such as table"
    )
    with pytest.raises(
        ValueError, match="in the public set there is NaN or infinity in 1 of 12 samples"
    ):
        go(tmp_path / "public", FedMuscle(peers=1, width=8, batch=8), toys.clients(), public=x)
    with pytest.raises(ValueError, match="client a, public: in the public set there is NaN"):
        toys.client("a", public=x)


def test_a_run_name_never_leads_out_of_the_runs_folder():
    from unalike.runs import run_path

    assert run_path(None, "../../evil", "fedavg", 0).parent.name == "runs"
    assert run_path(None, "afmcc-digits", "local", 1).name.startswith("afmcc-digits-local-s1-")


def test_models_are_named_after_class_or_factory(toys):
    named = lambda model: toys.client("a", model=model).info().model
    models = (
        nn.Linear(6, 8),
        toys.noisy,
        lambda: nn.Linear(6, 8),
        toys.partial(nn.Linear, 6, 8),
        nn.Identity,
    )
    assert [named(model) for model in models] == ["Linear", "noisy", "Linear", "Linear", "Identity"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_cannot_be_read_is_reported_with_its_client(tmp_path, toys, workers):
    clients = [toys.client("a"), toys.client("b", train=Broken(0))]
    refused(
        tmp_path,
        r"client b: its data cannot be read \(OSError: scan 17 is missing\)"
        r"|clients.b   OSError: scan 17",
        Local(),
        clients,
        workers=workers,
        alone=True,
    )


def test_the_info_of_a_client_reads_its_data_once(toys):
    client = toys.client("a", train=Broken(1))
    assert client.info() == client.info()


# what comes back


@pytest.mark.parametrize(
    "name, options, x, taken, said",
    [
        (
            "efficientnet",
            {"stage": 1, "adapted": 1, "weights": "none", "adapters": 2},
            torch.zeros(8, 3, 16, 16),
            [3, 16, 16],
            "input x: float32 (rows, 3, 16, 16)",
        ),
        (
            "gru",
            {"words": 20, "embedding": 4, "width": 4, "length": 3},
            torch.arange(64).view(8, 8).int() % 30 + 90,
            [3],
            "trunk makes of",
        ),
    ],
)
def test_a_model_with_a_cached_trunk_is_exported_whole(
    name, options, x, taken, said, tmp_path, toys
):
    """ONNX takes raw samples; where the trunk cannot be exported, the features it computes."""
    pytest.importorskip("onnxscript")
    import onnx

    y, encoder = torch.arange(8) % 4, partial(build_encoder, name, tuple(x.shape[1:]), options)
    client = toys.client("a", model=encoder, dtype=torch.float32, train=(x, y), test=(x, y))
    go(tmp_path / "run", FedAvg(), [client], training=toys.training(rounds=1))
    assert said in unalike.export(tmp_path / "run", "a", clients=[client])[-1]
    exported = onnx.load(tmp_path / "run" / "exports" / "a" / "model.onnx")
    assert [size.dim_value for size in exported.graph.input[0].type.tensor_type.shape.dim][
        1:
    ] == taken


def test_trained_models_come_back(tmp_path, toys, capsys):
    results = go(tmp_path / "own", FedAvg(), toys.clients(), training=toys.training(rounds=2))
    assert (
        results["folder"] == str(tmp_path / "own")
        and json.loads((tmp_path / "own" / "results.json").read_text()) == results
    )
    models = unalike.trained(results["folder"], toys.clients())
    x, y = toys.client("a").test.rows(torch.arange(40))
    x = x.double()
    right = 100 * float((models["a"](x).argmax(1) == y).double().mean())
    assert (
        right == pytest.approx(results["clients"]["a"]["value"])
        and models.keys() == results["clients"].keys()
    )
    assert unalike.trained(results["folder"], toys.clients()[:1]).keys() == {"a"}
    unalike.export(results["folder"], "c", clients=toys.clients(), onnx=False)
    rebuilt = unalike.rebuild(tmp_path / "own" / "exports" / "c", toys.clients())
    assert torch.equal(rebuilt(x), models["c"](x)) and not rebuilt.training
    with pytest.raises(UserError, match='no client "d"'):
        unalike.export(results["folder"], "d", clients=toys.clients())
    with pytest.raises(UserError, match="pass clients="):
        unalike.trained(results["folder"])
    for other in (toys.client("a", model=nn.Linear(6, 8)), toys.client("a", head=nn.Linear(8, 4))):
        with pytest.raises(UserError, match="model of a is not the one it had"):
            unalike.trained(results["folder"], [other])
    unalike.show(results)
    assert "own/report.html" in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("options", [{"safeguard": True}, {"workers": 2, "alive": 1}])
def test_trained_models_have_the_hashes_of_the_results(tmp_path, toys, options):
    from unalike.core.program import hash_model

    results = go(tmp_path, FedMuscle(peers=1, width=8, batch=8), toys.clients(), **options)
    assert {
        id: hash_model(model) for id, model in unalike.trained(tmp_path, toys.clients()).items()
    } == toys.hashes(results)


def test_a_moved_run_reports_its_new_folder(tmp_path, toys):
    go(tmp_path / "here", Local(), toys.clients())
    (tmp_path / "here").rename(tmp_path / "there")
    assert unalike.resume(tmp_path / "there")["folder"] == str(tmp_path / "there")


class Cut(BaseException):
    """Power is gone."""


def cut(event, **facts):
    if event == "round" and facts["round"] == 2:
        raise Cut


def test_an_unfinished_run_has_models_only_where_clients_keep_them(tmp_path, toys):
    half = {"training": toys.training(rounds=3), "watch": cut}
    with pytest.raises(Cut):
        go(tmp_path / "avg", FedAvg(), toys.clients(), **half)
    with pytest.raises(UserError, match="avg is not finished; resume it first"):
        unalike.trained(tmp_path / "avg", toys.clients())
    with pytest.raises(Cut):
        go(tmp_path / "local", Local(), toys.clients(), **half)
    assert len(unalike.trained(tmp_path / "local", toys.clients())) == 3, (
        "who keeps all of its model has it at any time"
    )


def test_a_failed_client_has_no_model(tmp_path, toys):
    go(
        tmp_path,
        FedAvg(),
        [toys.client("a"), toys.client("b"), toys.client("c", train=Broken(4))],
        training=ONCE,
    )
    with pytest.raises(UserError, match="c has no model to take home: it failed in the run"):
        unalike.trained(tmp_path, [toys.client("c")])


def test_progress_is_shown_and_events_are_still_watched(tmp_path, toys, capsys):
    heard = []
    go(
        tmp_path,
        Local(),
        toys.clients(),
        progress=True,
        watch=lambda event, **facts: heard.append(event),
    )
    assert "local: 1 of 1 round, " in capsys.readouterr().err and "finish" in heard


# going on


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"training": Training(rounds=2, batch_size=8)}, "training.rounds was 1, is 2"),
        ({"safeguard": True}, "safeguard was False, is True"),
        ({"alone": True}, "alone was False, is True"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"federation": unalike.FederationConfig(quorum=0)}, "federation.quorum was 0.5, is 0.0"),
    ],
)
def test_resume_names_what_changed(tmp_path, toys, changed, says):
    go(tmp_path, Local(), toys.clients())
    assert go(tmp_path, Local(), toys.clients(), resume=True, workers=2)["rounds"] == 1, (
        "who computes it does not matter"
    )
    with pytest.raises(UserError, match=f"holds another run: {says}; resume it as it was"):
        go(tmp_path, Local(), toys.clients(), resume=True, **changed)
    with pytest.raises(UserError, match=r"resume it with resume=True"):
        go(tmp_path, Local(), toys.clients())


def test_resume_names_another_method_or_client(tmp_path, toys):
    go(tmp_path, FedMuscle(peers=1, width=8, batch=8), toys.clients())
    with pytest.raises(UserError, match=r"algorithm.peers was 1, is 2"):
        go(tmp_path, FedMuscle(peers=2, width=8, batch=8), toys.clients(), resume=True)
    with pytest.raises(
        UserError, match=r"clients.b.samples was 20, is 21, clients.c was \{.*\}, is None"
    ):
        go(
            tmp_path,
            FedMuscle(peers=1, width=8, batch=8),
            [toys.client("a"), toys.client("b", rows=21)],
            resume=True,
        )
    assert config_differences({"a": [1, 2]}, {"a": [1, 3]}) == ["a was [1, 2], is [1, 3]"]


def test_a_full_disk_is_reported_in_a_sentence(tmp_path, toys, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise store.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(
        OSError,
        match=r"safetensors cannot be written \(I/O error: No space left.*"
        r"; check whether the disk is full",
    ):
        go(tmp_path, Local(), toys.clients())
    assert not list(tmp_path.rglob("*.partial"))


# what is kept of everyone alone


def test_the_local_baseline_is_shared_only_between_equal_trainings(toys, tmp_path):
    class Milder(FedAvg):
        half: float = 0.5

        class Program(FedAvg.Program):
            def task_loss(self, x, y):
                return self.algorithm.half * super().task_loss(x, y)

    class Louder(FedAvg):
        class Program(FedAvg.Program):
            def loss(self, x, y):
                return 2 * super().loss(x, y)

    class Softer(FedAvg):
        class Program(FedAvg.Program):
            def build(self, encoder):
                return super().build(nn.Sequential(*encoder, nn.Dropout(0.5)))

    def key(algorithm, **fields):
        clients = [toys.client("a", model=lambda: nn.Sequential(nn.Linear(6, 8)), **fields)]
        plan = RunPlan(algorithm, clients, toys.training())
        _, architectures = check_plan(plan)
        return cache_path(plan, architectures, {"a": {"hash": "first"}})

    stronger = Milder()
    stronger.half = 2.0
    assert key(FedAvg()) == key(unalike.FedProx(mu=1.0)) == key(Louder())
    assert len({key(FedAvg()), key(Milder()), key(stronger), key(Softer())}) == 4
    smoothed = unalike.Classification(4, label_smoothing=0.1)
    assert key(FedAvg()) != key(FedAvg(), task=smoothed)
