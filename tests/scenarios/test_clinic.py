"""The shipped scenario `clinic`: a classifier, a regressor and a survival client in one run."""

from unalike.runs import run_scenario
from unalike.scenarios import load


def test_clinic_runs_and_nobody_falls_far_behind(tmp_path):
    scenario, method = load("clinic", settings=["evaluations=1"])
    results, _ = run_scenario(scenario, method, out=tmp_path / "run")
    entries = results["clients"]
    assert {name: entry["metric"] for name, entry in entries.items()} == {
        "registry": "accuracy",
        "practice": "mae",
        "hospital": "c_index",
    }
    assert not results["failures"]
    assert results["delta"] > 0 and min(entry["gain"] for entry in entries.values()) > -5


def test_hapt_phones_has_thirty_persons_with_phones_of_three_strengths():
    scenario, _ = load("hapt-recordings")
    assert [client.capacity for client in scenario.clients] == [1.0, 0.5, 0.25]
    assert sum(client.count for client in scenario.clients) == 30
