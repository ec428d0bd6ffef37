"""What the bench of trackers counts, without runs."""

import json
import sqlite3

import pytest

from benchmarks import tracking


def test_costs_are_those_of_pairs_that_change_places(monkeypatch):
    """Plain runs take 10 s and 8 s of CPU, tracked ones 10.4 and 9: 4 and 12.5 percent.

    The page takes 0.3 s and the tracker 0.1, 5 percent of 8.
    """
    asked = []

    def time_run(options):
        watched = "--watch" in options
        asked.append(watched)
        if not watched:
            return tracking.Measured(10.0, 8.0, cpu_tracker=0.1)
        return tracking.Measured(10.4, 9.0, 0.3, first={"page": 0.5, options[-2]: 1.5})

    monkeypatch.setattr(tracking, "time_run", time_run)
    result = tracking.bench_tracking(quick=False)
    assert asked[:4] == [True, False, False, True] and len(asked) == 2 * 3 + 2
    assert result["cost_wall_percent"] == 4.0 and result["cost_cpu_percent"] == 12.5
    assert result["seconds_cpu_of_parts"] == {"page": 0.3, "tracker": 0.1}
    assert result["cost_cpu_percent_of_parts"] == 5.0
    assert result["first_point_seconds"]["mlflow"] == {"page": 0.5, "mlflow": 1.5}


def test_stores_are_asked_for_the_first_point(tmp_path):
    assert not tracking.in_mlflow(tmp_path) and not tracking.in_tensorboard(tmp_path)
    store = sqlite3.connect(tmp_path / "mlflow.db")
    assert not tracking.in_mlflow(tmp_path)  # its tables are still being made
    store.execute("create table metrics (key text)")
    store.execute("insert into metrics values ('ada/local/accuracy')")
    store.commit()
    assert not tracking.in_mlflow(tmp_path)
    store.execute("insert into metrics values ('ada/accuracy')")
    store.commit()
    store.close()
    assert tracking.in_mlflow(tmp_path)


def test_the_first_round_ends_with_its_event(tmp_path):
    events = [{"event": "start", "time": 1.0}, {"event": "round", "round": 1, "time": 2.5}]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    assert tracking.end_of_first_round(tmp_path) == 2.5
    (tmp_path / "events.jsonl").write_text(json.dumps(events[0]))
    with pytest.raises(RuntimeError, match="no first round"):
        tracking.end_of_first_round(tmp_path)
