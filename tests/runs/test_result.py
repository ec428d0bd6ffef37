"""The result of a run: typed attributes, and the dictionary of results.json."""

import json
import sys

import pytest
import torch

import unalike
from unalike import FedAvg, Local, Training
from unalike.base.errors import UserError

ONCE = Training(rounds=1, batch_size=8)


@pytest.fixture
def result(tmp_path, toys):
    return unalike.run(FedAvg(), toys.clients(), training=ONCE, out=tmp_path / "run")


def test_a_result_equals_results_json(result):
    written = json.loads((result.folder / "results.json").read_text())
    assert result == written
    assert json.loads(json.dumps(result)) == written
    assert result.to_dict() == written and type(result.to_dict()) is dict


def test_attributes_are_the_values_of_the_dictionary(result):
    entry = result["clients"]["a"]
    client = result.clients["a"]
    assert (client.model, client.task, client.metric) == ("mlp", "classification", "accuracy")
    assert (client.local, client.value, client.gain) == (
        entry["alone"],
        entry["value"],
        entry["gain"],
    )
    assert client.bytes.up == entry["bytes"]["up"] and client.hash == entry["hash"]
    assert client.metrics["accuracy"] == client.value and client.parameters > 0
    assert result.delta == pytest.approx(sum(c.gain for c in result.clients.values()) / 3)
    assert result.degraded == sum(c.gain < 0 for c in result.clients.values())
    assert result.bytes.up == sum(c.bytes.up for c in result.clients.values())
    assert (result.rounds, result.failures, result.privacy) == (1, [], None)


def test_every_field_of_results_json_has_an_attribute(tmp_path, toys):
    result = unalike.run(
        unalike.FedMuscle(peers=1, width=8, batch=8),
        toys.clients(),
        training=ONCE,
        out=tmp_path,
        safeguard=True,
    )
    renamed = {"losers": "degraded", "lost": "failed_rounds"}
    for key in result:
        assert hasattr(type(result), renamed.get(key, key)), key
        assert getattr(type(result), renamed.get(key, key)).__doc__
    renamed = {"alone": "local", "judged": "log_loss"}
    for key, value in result["clients"]["a"].items():
        attribute = getattr(result.clients["a"], renamed.get(key, key))
        if key not in ("bytes", "modalities"):
            assert attribute == value, key


def test_models_of_a_run_come_back_without_naming_its_clients_again(result, toys):
    models = result.models()
    x, y = toys.client("a").test.rows(torch.arange(40))
    accuracy = 100 * float((models["a"](x.double()).argmax(1) == y).double().mean())
    assert accuracy == pytest.approx(result.clients["a"].value)
    assert models.keys() == result.clients.keys()


def test_models_of_a_result_of_another_program_need_the_clients(result, toys):
    read_again = unalike.resume(result.folder)
    with pytest.raises(UserError, match="pass clients="):
        read_again.models()
    assert read_again.models(toys.clients()).keys() == {"a", "b", "c"}


def test_a_client_that_failed_has_no_hash(tmp_path, toys):
    class Fragile(FedAvg):
        class Program(FedAvg.Program):
            def loss(self, x, y):
                if self.client.id == "c":
                    raise RuntimeError("out of memory")
                return super().loss(x, y)

    result = unalike.run(Fragile(), toys.clients(), training=ONCE, out=tmp_path, alone=False)
    (failure,) = result.failures
    assert (failure.client, failure.operation, failure.round) == ("c", "update", 1)
    assert result.clients["c"].hash is None and result.clients["c"].parameters is None
    assert result.delta is None and result.degraded is None


def test_show_prints_the_table(result, capsys):
    result.show()
    assert "accuracy" in capsys.readouterr().out


def test_to_pandas_has_a_row_for_each_client(result):
    pytest.importorskip("pandas")
    table = result.to_pandas()
    assert list(table.index) == ["a", "b", "c"] and table.index.name == "id"
    assert table.loc["a", "gain"] == result.clients["a"].gain
    assert table["gain"].mean() == pytest.approx(result.delta)
    assert table["bytes_up"].sum() == result.bytes.up
    assert table["value"].dtype == "float64" and table["metric"].unique() == ["accuracy"]


def test_to_pandas_says_what_to_install(tmp_path, toys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = unalike.run(Local(), toys.clients(1), training=ONCE, out=tmp_path)
    with pytest.raises(UserError, match="pip install pandas"):
        result.to_pandas()
