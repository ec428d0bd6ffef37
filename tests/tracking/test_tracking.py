"""Trackers: series are read back from the stores; one that fails does not end the run."""

import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

import unalike
from unalike import FedAvg, Training
from unalike.base.errors import UserError
from unalike.tracking import TRACKERS, check_trackers, follow
from unalike.tracking.points import PointReader

TRAINING = Training(rounds=3, batch_size=8)


class Stopped(Exception):
    """Ends a run from its watch, as a crash would."""


def stop_after(round_number):
    def watch(event, **facts):
        if event == "round" and facts["round"] == round_number:
            raise Stopped

    return watch


def evaluations(folder):
    """{(client, metric, round): value} of the federated models after a round, from the events."""
    points = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "evaluation" and event["who"] == "together":
            for client, metrics in event["values"].items():
                for metric, value in metrics.items():
                    points[f"{client}/{metric}", event["round"]] = value
    return points


def tensorboard_series(folder):
    """[(name, step, value)] as written: double points are seen."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    points = []
    for file in sorted((folder / "tensorboard").iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("tensor") and value.tensor.float_val:
                    points.append((value.tag, event.step, value.tensor.float_val[0]))
    return points


@pytest.fixture
def run(tmp_path, toys):
    def make(**options):
        options = {"out": tmp_path / "run", "training": TRAINING, "alone": False} | options
        return unalike.run(FedAvg(), toys.clients(2), **options)

    return make


def assert_same_series(points, folder):
    places = [(name, step) for name, step, _ in points]
    assert len(places) == len(set(places))  # no point twice
    written = {(name, step): value for name, step, value in points}
    expected = evaluations(folder)
    assert len(expected) >= 6
    assert {place: written[place] for place in expected} == pytest.approx(expected)


def test_tensorboard_has_every_evaluation_by_client_and_round(run):
    pytest.importorskip("tensorboard")
    result = run(track="tensorboard")
    points = tensorboard_series(result.folder)
    assert_same_series(points, result.folder)
    assert ("federation/bytes_up", 3) in {(name, step) for name, step, _ in points}


def test_a_resumed_run_leaves_no_double_points(run, tmp_path):
    pytest.importorskip("tensorboard")
    with pytest.raises(Stopped):
        run(track=["tensorboard"], watch=stop_after(2))
    before = tensorboard_series(tmp_path / "run")
    assert ("federation/bytes_up", 2) in {(name, step) for name, step, _ in before}
    result = run(track=["tensorboard"], resume=True)
    assert_same_series(tensorboard_series(result.folder), result.folder)
    assert (
        unalike.tracking.follow.replay(
            result.folder, ["tensorboard"], tell=print, is_running=lambda: False
        )
        == []
    )
    assert_same_series(tensorboard_series(result.folder), result.folder)


def test_mlflow_has_series_parameters_and_the_report(run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    (tmp_path / "here").mkdir()
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store/mlflow.db")
    with pytest.raises(Stopped):
        run(track="mlflow", watch=stop_after(2), name="blobs")
    result = run(track="mlflow", resume=True, name="blobs")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("blobs").experiment_id
    (tracked,) = client.search_runs([experiment])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["training.rounds"] == "3"
    assert tracked.data.params["algorithm.name"] == "fedavg"
    points = []
    for name in tracked.data.metrics:
        history = client.get_metric_history(tracked.info.run_id, name)
        points += [(name, point.step, point.value) for point in history]
    assert_same_series(points, result.folder)
    files = {file.path for file in client.list_artifacts(tracked.info.run_id)}
    assert files == {"report.html", "results.json", "config.yaml"}
    assert not list((tmp_path / "here").iterdir())  # files are with the store, not where we are
    (report,) = (tmp_path / "store" / "mlruns" / "blobs").rglob("report.html")
    assert report.read_bytes() == (result.folder / "report.html").read_bytes()


def test_files_of_mlflow_lie_beside_a_sqlite_store_and_elsewhere_where_mlflow_says(tmp_path):
    pytest.importorskip("mlflow")
    from unalike.tracking.mlflow import artifact_folder

    beside = (tmp_path / "mlruns" / "a_b").as_uri()
    assert artifact_folder(f"sqlite:///{tmp_path}/mlflow.db", "a b") == beside
    for other in ("http://127.0.0.1:5000", "postgresql://host/mlflow", "sqlite:///:memory:"):
        assert artifact_folder(other, "a b") is None


class Store:
    """Stands for wandb and trackio: one object is module, run and artifact."""

    def __init__(self):
        self.inits, self.points, self.files, self.ended = [], [], [], 0

    def init(self, **options):
        self.inits.append(options)
        return SimpleNamespace(
            define_metric=lambda *_, **__: None,
            log=self.log,
            log_artifact=lambda *_, **__: self.files.append(_[0]),
            finish=self.finish,
        )

    def log(self, values, step=None):
        step = values["round"] if step is None else step
        self.points += [(name, step, value) for name, value in values.items() if name != "round"]

    def finish(self, **_):
        self.ended += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_packages_that_are_not_here_get_the_same_by_a_stand_in(name, run, monkeypatch):
    store = Store()
    module = ModuleType(name)
    module.__spec__ = SimpleNamespace(name=name)
    module.init = store.init
    module.Artifact = lambda *_, **__: SimpleNamespace(add_file=lambda path: None)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"unalike.tracking.{name}", raising=False)
    with pytest.raises(Stopped):
        run(track=name, watch=stop_after(2))
    result = run(track=name, resume=True)
    assert_same_series(store.points, result.folder)
    assert store.ended == 2 and store.files
    first, second = store.inits
    assert first["name"] == second["name"] and first.get("id") == second.get("id")
    assert first["config"]["training.rounds"] == 3
    monkeypatch.delitem(sys.modules, f"unalike.tracking.{name}")


class Broken:
    """A tracker that fails at one of its calls."""

    def __init__(self, call):
        self.call = call
        self.calls = 0

    def open(self, run):
        self.fail("open")
        return set()

    def log(self, values, step):
        self.calls += 1
        self.fail("log")

    def close(self, files, finished):
        self.fail("close")

    def fail(self, call):
        if call == self.call:
            raise ConnectionError("no store\nhere")


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(call, run, monkeypatch):
    broken = Broken(call)
    monkeypatch.setattr(follow, "build_tracker", lambda name: broken)
    notices = []

    def watch(event, **facts):
        if event == "notice":
            notices.append(facts["text"])
        time.sleep(0.01)

    result = run(track="tensorboard", watch=watch)
    assert result.rounds == 3
    (notice,) = notices
    assert "ConnectionError: no store here" in notice and "unalike track" in notice
    assert broken.calls <= 1 or call == "close"


def test_without_a_watch_it_is_a_warning(run, monkeypatch):
    monkeypatch.setattr(follow, "build_tracker", lambda name: Broken("open"))
    with pytest.warns(RuntimeWarning, match="no longer tracks this run"):
        assert run(track="tensorboard").rounds == 3


def test_a_store_that_hangs_does_not_hold_the_run(run, monkeypatch):
    hanging = Broken("")
    hanging.log = lambda values, step: time.sleep(30)
    monkeypatch.setattr(follow, "build_tracker", lambda name: hanging)
    monkeypatch.setattr(follow, "PATIENCE", 0.2)
    start = time.time()
    with pytest.warns(RuntimeWarning, match=r"within 0.2 s"):
        run(track="tensorboard")
    assert time.time() - start < 15


def test_a_run_does_not_wait_for_the_import_of_a_tracker(run, monkeypatch):
    order = []

    def build_slowly(name):
        time.sleep(0.3)
        order.append("tracker is there")
        return Broken("open")

    def watch(event, **facts):
        order.append(event)

    monkeypatch.setattr(follow, "build_tracker", build_slowly)
    run(track="tensorboard", watch=watch)
    assert order.index("start") < order.index("tracker is there")


def test_a_tracker_whose_package_cannot_be_imported_is_told(run, monkeypatch):
    def build(name):
        raise ImportError("no module of that name")

    monkeypatch.setattr(follow, "build_tracker", build)
    with pytest.warns(RuntimeWarning, match="ImportError: no module of that name"):
        assert run(track="tensorboard").rounds == 3


def test_unknown_and_missing_trackers_are_mistakes(run, monkeypatch, tmp_path):
    with pytest.raises(UserError, match='Did you mean "mlflow"'):
        run(track="mlfow")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("unalike.tracking.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'unalike\[wandb\]'"):
        check_trackers(["wandb"])
    assert not (tmp_path / "run").exists()


def test_a_scenario_names_its_trackers():
    from unalike.scenarios import load

    scenario, _ = load("digits", track="tensorboard")
    assert scenario.track == ["tensorboard"]
    with pytest.raises(UserError, match='There is no tracker "tensorbord"'):
        load("digits", track=["tensorbord"])


def test_a_running_run_is_followed_until_it_ends(run, monkeypatch):
    """Events that come after `track` began are passed on, too."""
    result = run()
    events = result.folder / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(lines[:4]))
    results = (result.folder / "results.json").rename(result.folder / "later.json")
    logged = []
    tracker = Broken("")
    tracker.log = lambda values, step: logged.extend((name, step) for name in values)
    monkeypatch.setattr(follow, "build_tracker", lambda name: tracker)
    turns = iter([True, True])

    def is_running():
        if next(turns, None) is None:
            return False
        events.write_text("".join(lines))
        if results.exists():
            results.rename(result.folder / "results.json")
        return True

    follow.replay(result.folder, ["mlflow"], print, is_running, every=0.01)
    assert set(evaluations(result.folder)) <= set(logged)
    assert len(logged) == len(set(logged))


def test_clients_whose_names_are_alike_keep_series_of_their_own():
    reader = PointReader()
    reader.read({"event": "start", "clients": {"a b": {}, "a/b": {}}, "rounds": 2})
    values = {"a b": {"acc": 1.0}, "a/b": {"acc": 2.0}}
    event = {"event": "evaluation", "round": 1, "who": "together", "when": "end", "values": values}
    assert reader.read(event) == (1, {"a_b/acc": 1.0, "a_b-2/acc": 2.0})


def test_of_stages_inside_a_round_the_last_is_the_round():
    reader = PointReader()
    reader.read({"event": "start", "clients": {"a": {}}, "rounds": 2})
    for stage, value in (("after local", 1.0), ("after alignment", 2.0)):
        event = {"event": "evaluation", "round": 1, "who": "together", "when": stage}
        reader.read(event | {"values": {"a": {"acc": value}}})
    _, values = reader.read({"event": "round", "round": 1})
    assert values == {"a/acc": 2.0}


def test_every_tracker_has_an_extra():
    import tomllib
    from pathlib import Path

    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(TRACKERS) <= set(metadata["project"]["optional-dependencies"])
