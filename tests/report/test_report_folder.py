"""Reading run folders: whole, unfinished, cut short, and what is none."""

import json

import pytest

from unalike.report import history, read


def test_a_finished_run_is_read_whole(make):
    run = read(make())
    assert (
        run.scenario == "digits"
        and run.algorithm == "fedmuscle"
        and run.seed == 0
        and run.unreadable == 0
    )
    assert list(run.results["clients"]) == history.clients(run)
    assert run.ledger[0] == {
        "round": 1,
        "client": "leaf",
        "direction": "down",
        "operation": "fit",
        "messages": 4,
        "bytes": 120,
    }


def test_an_unfinished_run_is_read_without_results(make):
    run = read(make(finished=False))
    assert (
        run.results is None
        and run.scenario == "digits"
        and run.algorithm == "fedmuscle"
        and history.count_rounds(run) == 8
    )
    assert history.metric_name(run, "fern") == "mAP"


@pytest.mark.parametrize(
    "torn", ['{"event": "rou', '{"event": "round", "round": 9}garbage', '"only a string"']
)
def test_a_line_cut_short_is_skipped_and_counted(make, torn):
    folder = make()
    whole = read(folder).events
    with (folder / "events.jsonl").open("a") as file:
        file.write(torn)
    run = read(folder)
    assert run.events == whole and run.unreadable == 1
    with (folder / "ledger.csv").open("a") as file:
        file.write("9,leaf,up,al")
    assert read(folder).unreadable == 2


@pytest.mark.parametrize("missing", ["events.jsonl", "ledger.csv"])
def test_events_and_ledger_may_be_missing(make, missing):
    folder = make()
    (folder / missing).unlink()
    assert read(folder).results


def test_other_folders_are_refused_in_one_sentence(tmp_path, make):
    for path, why in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no config.yaml")):
        with pytest.raises(ValueError, match=why):
            read(path)
    broken = [
        ("results.json", "{", "is not JSON"),
        ("results.json", "[]", "should name the clients"),
        ("config.yaml", "a: [", "is not YAML"),
        ("config.yaml", "- 1", "named settings"),
        ("ledger.csv", "a,b\n", "should open with"),
    ]
    for file, text, why in broken:
        folder = make(f"bad-{why}")
        (folder / file).write_text(text)
        with pytest.raises(ValueError, match=why) as raised:
            read(folder)
        assert "\n" not in str(raised.value)


def test_after_a_resume_the_later_round_counts(make):
    folder = make(finished=False)
    again = [
        {"event": "resume", "round": 7},
        {
            "event": "evaluation",
            "round": 8,
            "when": "after alignment",
            "who": "together",
            "values": {"leaf": {"accuracy": 12.5}},
        },
        {"event": "note", "round": 8, "name": "muscle_loss", "values": {"leaf": 0.25}},
        {"event": "round", "round": 8},
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in again)
    run = read(folder)
    assert history.metric_curves(run, "together")["leaf"][8] == 12.5
    assert history.logged_metrics(run)["muscle_loss"]["leaf"][8] == 0.25
    assert history.count_rounds(run) == 8


def test_the_last_evaluation_of_a_round_is_its_value(make):
    run = read(make())
    last, local = (
        history.metric_curves(run, "together"),
        history.metric_curves(run, "together", "after local"),
    )
    assert all(last[client][at] > local[client][at] for client in last for at in last[client])
    assert list(last["oak"]) == list(range(1, 9))


def test_traffic_adds_up_to_the_ledger(make):
    run = read(make())
    traffic = history.traffic_by_operation(run)
    assert traffic["represent"] == {"up": 8 * 6 * 52_000, "down": 8 * 6 * 900}
    assert sum(sum(total.values()) for total in traffic.values()) == sum(
        row["bytes"] for row in run.ledger
    )
    assert list(traffic) == ["represent", "align", "fit"]
