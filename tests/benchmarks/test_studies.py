"""Benches made of whole runs: every setting they ask for is one that loads, what they tell follows from the runs, and one really runs."""

import json
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from statistics import mean
from unittest.mock import Mock

import pytest

from unalike.base.errors import Interrupted, UserError
from unalike.cli.benchmarks import benchmark_module
from unalike.report import Run
from unalike.scenarios import load

BENCHMARKS = benchmark_module().load_benchmarks()
command = benchmark_module("runner")
study = benchmark_module("study")
Study, averages = study.Study, study.averages
figures = benchmark_module("afmcc").figures
SHOWN = benchmark_module("fednca").SHOWN

STUDIES = [
    "afmcc",
    "afmcc-asynchronous",
    "afmcc-ablation",
    "afmcc-defaults",
    "afmcc-rivals",
    "afmcc-parameters",
    "afmcc-federation",
    "afmcc-speeds",
    "afmcc-degeneration",
    "afmcc-stop",
    "budget",
    "safeguard",
    "fednca",
    "fednca-bars",
    "subflot",
    "subflot-bars",
    "subflot-ablation",
    "subflot-scale",
    "subflot-sweep",
    "fedmpt",
    "fedmpt-ablation",
    "fedmpt-annotation",
    "fedmpt-labels",
    "fedmpt-readings",
    "fedmpt-settings",
    "fedmpt-heterogeneity",
    "fedmpt-participation",
    "rivals",
    "rivals-rates",
    "muscle-vision",
    "muscle-ert",
    "muscle-public",
    "muscle-batch",
    "muscle-d-temperature",
    "muscle-map",
    "muscle-multimodal",
    "muscle-cross-temperature",
    "muscle-noniid",
    "muscle-peers",
    "muscle-r1",
    "muscle-printed",
    "muscle-headroom",
    "muscle-rank",
    "muscle-losses",
    "muscle-messages",
    "muscle-one-round",
    "muscle-parts",
    "muscle-factorial",
    "creamfl",
    "hetlora",
    "language",
    "hapt-causes",
    "hapt-methods",
    "strangers",
]


def made_up(scenario, algorithm, seed):
    """A run of that scenario that never was: everyone in step with its speed, accuracy rising by the visit."""
    rounds = scenario.training.rounds
    speeds = {
        f"{group.id}-{i}": group.speed for group in scenario.clients for i in range(group.count)
    }
    lasts = {
        client: max(1000 / speed, scenario.federation.tick) for client, speed in speeds.items()
    }
    rest = getattr(algorithm, "rest", True)
    had = {
        client: rounds if rest else int(rounds * max(lasts.values()) / its)
        for client, its in lasts.items()
    }
    scores = {"acc": 50.0 + seed, "nmi": 40.0, "ari": 30.0}
    events = [{"event": "start", "clients": {client: {"metric": "acc"} for client in speeds}}]
    for client, its in lasts.items():
        events += [
            {"event": "arrival", "client": client, "round": visit, "at": 5 + visit * its}
            for visit in range(1, had[client] + 1)
        ]
    for at in range(1, rounds + 1):
        events.append({"event": "round", "round": at, "clock": 5 + at * max(lasts.values())})
        events.append(
            {
                "event": "evaluation",
                "round": at,
                "figures": {"acc": 10.0 + at, "joint": {"acc": 20.0 + at}},
            }
        )
    told = {
        "metric": "acc",
        "gain": seed - 1,
        "safeguarded_gain": 0,
        "kept": "alone",
        "alone": 50,
        "value": 60,
        "round_flops": 3e9,
    }
    known = dict.fromkeys(SHOWN, 60.0) | {
        "macro_f1": 40.0 + 9 * (type(algorithm).__name__ == "FedNCA"),
        "accuracy": 70.0,
        "best_macro_f1": 45.0,
    }
    results = {
        "metrics": scores | known | {"joint": scores},
        "rounds": rounds,
        "bytes": {"up": 10, "down": 10},
        "seconds": 2.0,
        "seed": seed,
        "clock": 5 + rounds * max(lasts.values()),
        "server": {
            "metrics": {
                "i2t_R@1": 10.0 + (getattr(algorithm, "contrast", "") == "muscle"),
                "t2i_R@1": 20.0,
                "rank": 3.0,
            }
        },
        "visits": had,
        "clients": {client: told for client in speeds},
        "delta": 3.0,
        "losers": 1,
    }
    return Run(Path("nowhere"), {}, results, events)


@pytest.fixture
def asked(monkeypatch):
    """Runs that were asked for, none of which is made."""
    seen = []

    def once(study, scenario, settings, seed):
        seen.append((scenario, tuple(settings), seed))
        return made_up(*load(scenario, settings=list(settings), seed=seed), seed)

    monkeypatch.setattr(Study, "once", once)
    return seen


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", STUDIES)
def test_every_setting_loads_and_every_row_is_told(asked, tmp_path, name, quick):
    command.run(name, tmp_path, None, quick=quick, jobs=3)
    told = json.loads((tmp_path / f"{name}{'-quick' * quick}.json").read_text())
    rows = next(told[key] for key in ("rows", "by_budget", "by_setting") if key in told)
    assert len(rows) == 2 if quick else len(rows) >= 2
    on_others = name in (
        "rivals-rates",
        "hapt-causes",
        "hapt-methods",
        "afmcc-defaults",
    )  # not on those reported
    first = 100 if on_others else 0
    pairs = ("rivals-rates", "afmcc-defaults")
    searches = name in ("subflot", "subflot-bars", "fednca", "fednca-bars", "muscle-rank")
    searched = {100, 101} if searches and not quick else set()  # for learning rates
    assert {seed for _, _, seed in asked} - searched == {
        first + i
        for i in range(1 if quick else 2 if name in pairs else 5 if "afmcc" in name else 3)
    }
    assert len(set(asked)) == len(asked)
    if "afmcc" in name:
        assert {scenario for scenario, _, _ in asked if quick} <= {"afmcc-digits"}
        acc = 50 + mean(seed for _, _, seed in asked)
        assert all(
            row["acc"] == acc and row["joint_nmi"] == 40 and row["seconds"] == 2
            for row in rows.values()
        )


def test_made_up_views_mix_up_two_kinds_each():
    table = benchmark_module("afmcc").made_up_views()
    kind = table.targets["class"]

    def apart(view, a, b):
        rows = table.x[view]
        return (rows[kind == a].mean(0) - rows[kind == b].mean(0)).norm()

    assert apart("narrow", 0, 1) < 0.3 * apart("narrow", 2, 3)
    assert apart("wide", 2, 3) < 0.5 * apart("wide", 0, 1)


def test_the_tables_rows_are_their_mixes(asked, tmp_path):
    command.run("afmcc", tmp_path, "7", only=("0:1:1", "bdgp 1:2"), settings=("steps=3",))
    assert [(scenario, settings[-2:], seed) for scenario, settings, seed in asked] == [
        ("afmcc-bdgp", ("clients.0.mix={full: 1, single: 2}", "steps=3"), 7),
        ("afmcc-multi-fashion", ("clients.0.mix={full: 0, multi: 1, single: 1}", "steps=3"), 7),
    ]
    assert (tmp_path / "afmcc-0-1-1-bdgp-1-2.json").exists()  # some rows do not pass for all


def test_rows_measured_at_several_visits_tell_the_way():
    """ACC 60, 70, 64 beside joint ACC 61, 73, 64; groups hold best at the first visit."""
    events = []
    for visit, acc, joint, held in (
        (1, 60.0, 61.0, 0.9),
        (2, 70.0, 73.0, 0.8),
        (3, 64.0, 64.0, 0.1),
    ):
        known = {"acc": acc, "joint": {"acc": joint}}
        events.append({"event": "note", "name": "stability", "round": visit, "values": {"c": held}})
        events.append({"event": "evaluation", "round": visit, "figures": known})
    told = {"clients": {"c": {"metric": "acc"}}}
    visit_figures = benchmark_module("afmcc").visit_figures
    assert visit_figures(Run(Path("nowhere"), {}, told, events)) == {
        "behind_joint": 3.0,
        "below_peak": 6.0,
        "stop_below_peak": 10.0,
    }
    assert visit_figures(Run(Path("nowhere"), {}, told, events[:2])) == {}


def test_clusters_of_labels_make_three_tables(asked, tmp_path, monkeypatch):
    """The lead of each is FedMPT's over the best of its own table."""
    told = BENCHMARKS["fedmpt-labels"](Study(seeds=(0,), only=("90 % absent",)))
    assert all(name.endswith(", 90 % absent") for name in told["rows"]) and len(told["rows"]) == 14
    assert told["mAP_lead"] == {"90 % absent": 0.0}  # made up: all the same
    assert all("clients.0.masked_as=absent" in settings for _, settings, _ in asked)
    everything = BENCHMARKS["fedmpt-labels"](Study(seeds=(0,)))
    assert set(everything["mAP_lead"]) == {"all told", "90 % unknown", "90 % absent"}


def test_rates_of_clusters_of_labels_are_chosen_on_photographs_set_aside(asked, tmp_path):
    """Made-up scores are all the same, so that the first rate, half of each method's own, is kept."""
    bench = BENCHMARKS["fedmpt-labels-searched"]
    result = bench(Study(seeds=(0,), only=("fedmpt, all told", "fedram, all told")))
    choosing = "data.options={choosing: true}"
    searched = [(settings[-1], seed) for _, settings, seed in asked if choosing in settings]
    assert sorted(rate for rate, _ in searched) == [
        "lr=0.002",
        "lr=0.004",
        "lr=0.004",
        "lr=0.008",
        "lr=0.008",
        "lr=0.016",
    ]
    assert {seed for _, seed in searched} == {100}
    assert result["rates"] == {"fedmpt": 0.004, "fedram": 0.002}
    tables = [(settings[-1], seed) for _, settings, seed in asked if choosing not in settings]
    assert sorted(tables) == [("lr=0.002", 0), ("lr=0.004", 0)]


def test_who_does_not_wait_needs_less_time_for_as_many_visits(asked, tmp_path):
    """Six clients at 1 s a visit, six at 1/3 s: 10 s for 60 + 180 visits; waiting, 12 visits take 1 s."""
    told = BENCHMARKS["afmcc-speeds"](Study(seeds=(0,), only=("3:1",)))["rows"]["E/O 3:1"]
    assert told["visits"] == 240 and told["waiting_visits"] == 240
    assert told["clock"] == pytest.approx(10) and told["waiting_clock"] == pytest.approx(
        20, rel=1e-3
    )
    assert told["times_less_to_same_visits"] == 2 and told["times_less_to_same_acc"] == 1


def test_degeneration_is_told_by_gradient_steps(asked, tmp_path):
    rows = BENCHMARKS["afmcc-degeneration"](Study(seeds=(0,)))["rows"]
    told = rows["without the constraint, 5 steps"]  # 15 a visit, 54 visits; made up: 10 + visit
    assert (
        told["peak_acc"] == 64
        and told["acc_at_200"] == 23
        and told["courses"]["0"]["joint acc"]["15"] == 21
    )
    assert rows["with the constraint, 2 steps"]["peak_acc"] == 144
    told = rows["fmcsc with the constraint"]  # Table 3c: 10 a round, 80 rounds
    assert told["acc_at_200"] == 30 and told["acc_at_800"] == told["peak_acc"] == 90
    methods = [
        (type(load(where, settings=list(settings))[1]).__name__, settings)
        for where, settings, _ in asked
    ]
    assert [
        next(s for s in settings if "constraint" in s)
        for name, settings in methods
        if name == "FMCSC"
    ] == ["algorithm={name: fmcsc, constraint: 0.01}", "algorithm={name: fmcsc, constraint: 0.0}"]


def test_leads_are_told_of_the_rows_that_were_run(asked):
    told = BENCHMARKS["fednca"](Study(seeds=(0,)))
    assert (
        len(told["rows"]) == 3 * (16 * 2 + 1) + 2
        and told["macro_f1_lead"] == 9
        and told["macro_f1_lead_on_etf"] == told["macro_f1_drop"] == 0
    )
    some = BENCHMARKS["fednca"](Study(seeds=(0,), only=("ETF", "centralised")))
    assert set(some) == {"rates", "rows"} and len(some["rows"]) == 9
    uniform = {
        type(load(where, settings=list(s))[1]).__name__: load(where, settings=list(s))[1].mean
        for where, s, _ in asked
        if "local" not in str(s)
    }
    assert set(uniform) == {"FedNCA", "FedAvg", "FedProx", "FedLGT"}
    assert set(uniform.values()) == {"uniform"}


def test_rates_are_those_of_the_method_on_another_seed_and_lost_runs_leave_rows_out(monkeypatch):
    """SubFLOT is best at the lowest rate, HeteroFL at the highest; alone, seed 2 was not finished."""
    seen = []

    def once(study, scenario, settings, seed):
        loaded, algorithm = load(scenario, settings=list(settings), seed=seed)
        if loaded.alone and seed == 2:
            raise UserError("lost")
        run = made_up(loaded, algorithm, seed)
        sign = -1 if type(algorithm).__name__ == "SubFLOT" else 1
        run.results["metrics"]["accuracy"] = 70 + sign * loaded.training.lr
        seen.append((type(algorithm).__name__, seed, loaded.training.lr, loaded.training.rounds))
        return run

    monkeypatch.setattr(Study, "once", once)
    told = BENCHMARKS["subflot-bars"](Study(minutes=1, only=("pacs",), settings=("rounds=8",)))
    assert {rounds for _, seed, _, rounds in seen if seed == 100} == {4}
    reported = {(name, lr) for name, seed, lr, _ in seen if seed < 100}
    assert {lr for name, lr in reported if name == "SubFLOT"} == {0.00667}
    assert (("HeteroFL", 0.06) in reported) and told["rates"]["pacs subflot; training.lr=0.02"]
    assert list(told["rows"]["pacs local, own width"]["seeds"]) == ["0", "1"]
    spread = told["rows"]["pacs subflot, spread plans"]
    assert list(spread["seeds"]) == ["0", "1", "2"] and spread["degraded"] == 0

    monkeypatch.setattr(Study, "once", Mock(side_effect=UserError("lost")))
    study = Study(minutes=1, only=("fednca, alpha 0.1",))
    assert BENCHMARKS["fednca-bars"](study)["rows"] == {}
    assert "fednca, alpha 0.1: no learning rate" in study.left_out


@pytest.mark.parametrize("dataset", ["cifar10", "pacs", "agnews", "hapt"])
def test_clients_of_every_submodel_row_train_as_many_epochs(dataset):
    """Own epochs at the end take the place of rounds; early exits end with a round of them, since
    without they would be measured before their last training."""
    bench = benchmark_module("subflot")
    rows = bench.rows_of(Study(settings=("rounds=8",)), (dataset,), bench.METHODS)
    epochs, own = {}, {}
    for name, (scenario, settings) in rows.items():
        loaded, algorithm = load(scenario, settings=["rounds=8", *settings])
        own[name] = getattr(algorithm, "finetune", 0) // loaded.training.epochs
        epochs[name] = (loaded.training.rounds + own[name]) * loaded.training.epochs
    assert len(set(epochs.values())) == 1
    assert own[f"{dataset} depthfl"] == 1 and own[f"{dataset} subflot, finetune"] == 2


def test_rows_with_the_safeguard_have_the_accuracy_of_what_clients_keep():
    """Two clients with 60 and 80 keep 70 and 80: 75; without the safeguard the run's 70."""
    clients = {
        name: {"value": value, "safeguarded": kept, "round_flops": 0}
        for name, value, kept in (("a", 60.0, 70.0), ("b", 80.0, 80.0))
    }
    results = {
        "metrics": {"accuracy": 70.0},
        "clients": clients,
        "rounds": 1,
        "bytes": {"up": 0, "down": 0},
        "clock": 1.0,
    }
    figures = benchmark_module("subflot").figures
    guarded = figures(Run(Path("nowhere"), {}, results, []))
    assert (guarded["accuracy"], guarded["worst"]) == (75, 70)
    for client in clients.values():
        del client["safeguarded"]
    plain = figures(Run(Path("nowhere"), {}, results, []))
    assert (plain["accuracy"], plain["worst"]) == (70, 60)


def test_leads_of_the_muscle_loss_are_of_the_same_seeds(monkeypatch):
    """8 - 5, 6 - 7, 4 - 3: 1 on the average, 2 apart; one seed has no spread."""
    other = {"0": 5.0, "1": 7.0, "2": 3.0}
    deltas = {"muscle": {"0": 8.0, "1": 6.0, "2": 4.0}, "pairwise": other, "gramian": other}
    bench = benchmark_module("fedmuscle")
    monkeypatch.setattr(
        bench,
        "table",
        lambda study, rows: {"rows": {name: {"seeds": its} for name, its in deltas.items()}},
    )
    told = bench.bench_muscle_vision(Study())
    assert (
        told["lead_on_pairwise"] == told["lead_on_gramian"] == 1
        and told["lead_on_pairwise_spread"] == 2
    )
    deltas = {name: {"1": its["1"]} for name, its in deltas.items() if name != "gramian"}
    told = bench.bench_muscle_vision(Study())
    assert (
        told["lead_on_pairwise"] == -1
        and told["lead_on_pairwise_spread"] is None
        and "lead_on_gramian" not in told
    )


def test_sweeps_are_drawn_and_drops_are_told(asked, tmp_path):
    command.run("fedmpt-heterogeneity", tmp_path, "0", only=("fedmpt", "promptfl"))
    told = json.loads((tmp_path / "fedmpt-heterogeneity-fedmpt-promptfl.json").read_text())
    assert told["mAP_drop"] == {"fedmpt": 0, "promptfl": 0}
    assert list(told["curves"]["lines"]["fedmpt"]) == ["10", "20", "40", "60", "80", "100"]
    counts = {said for _, settings, _ in asked for said in settings if said.startswith("clients")}
    assert counts == {f"clients.0.count={count}" for count in (2, 4, 8, 12, 16, 20)}
    assert "<svg" in (tmp_path / "fedmpt-heterogeneity-fedmpt-promptfl.svg").read_text()


def test_studies_of_fedmuscle_are_drawn(asked, tmp_path):
    """Delta by what is changed; four clients of `muscle-noniid` are the first of those who would share a dataset."""
    drawn = {
        "noniid": ["4", "8", "12"],
        "peers": ["1", "2", "3", "4", "5"],
        "batch": ["8", "16", "32", "64", "128"],
        "ert": ["1", "10", "25"],
        "d-temperature": ["64", "128", "256", "512"],
        "public": ["1e-05"],
    }
    for name, at in drawn.items():
        curves = BENCHMARKS[f"muscle-{name}"](Study(seeds=(0,)))["curves"]
        line = next(iter(curves["lines"].values()))
        assert list(line) == at or (name == "public" and len(line) == 1), name
    clients = [
        load(scenario, settings=list(settings))[0].clients
        for scenario, settings, _ in asked
        if scenario == "muscle-noniid"
    ]
    assert [len(each) for each in clients] == [12, 8, 4] * 4 and {
        group.data.name if group.data else "" for group in clients[2]
    } == {"caltech101", "cifar10", "pacs", ""}


def test_a_newcomer_is_compared_with_itself_alone_and_the_others_with_themselves(monkeypatch):
    """Alone 40, in a new federation 50, as a newcomer 60: a gain of 50 %. Others: 70, and 72 where
    it came at the start."""

    def scored(own, others):
        clients = {"ada": {"value": own}, "ben": {"value": others}, "emil": {"value": others}}
        return Run(Path("nowhere"), {}, {"seed": 0, "seconds": 1, "clients": clients}, [])

    made = {"alone": [scored(40, 1)], "fresh": [scored(50, 1)], "from the start": [scored(65, 72)]}
    made["ada joins late"] = [scored(60, 70)]
    monkeypatch.setattr(Study, "runs", lambda self, rows, quick, seeds: made)
    (row,) = BENCHMARKS["muscle-newcomer"](Study())["rows"].values()
    assert (row["gain"], row["newcomer"], row["alone"], row["fresh"]) == (50, 60, 40, 50)
    assert (row["others"], row["others_before"]) == (70, 72)


def test_ceilings_are_of_clients_with_all_labels_of_their_task():
    (row,) = BENCHMARKS["muscle-ceilings"](Study(quick=True, settings=("public.size=64",)))[
        "rows"
    ].values()
    assert set(row["gains"]) == {"ada", "ben", "cleo", "dora", "emil", "fay"}
    assert row["delta"] > 5, "130 labels teach more than 30 in as many epochs"


def test_recalls_are_compared_with_a_server_alone(asked):
    """Of 10 and 20, 11 and 20 are 5 % more; a median rank is no recall."""
    told = BENCHMARKS["creamfl"](Study(seeds=(0, 1)))
    assert [row["delta"] for row in told["rows"].values()] == [0, 0, 5] and told[
        "lead_of_muscle"
    ] == 5
    assert (
        "delta"
        not in BENCHMARKS["creamfl"](Study(seeds=(0,), only=("muscle",)))["rows"][
            "creamfl + muscle"
        ]
    )


def test_gains_are_over_clients_alone_of_the_same_seed(monkeypatch):
    """Alone 50 (60 where a row trains its own), together 40 + 10 a seed: by hand."""

    def once(study, scenario, settings, seed):
        own = [setting for setting in settings if setting.startswith("alone=")][-1] == "alone=true"
        its = {"value": 40.0 + 10 * seed} | (
            {"alone": 60.0 if "width=8" in settings else 50.0} if own else {}
        )
        return Run(
            Path("nowhere"),
            {},
            {
                "seed": seed,
                "seconds": 1.0,
                "clients": {"ada": its},
                "rounds": 2,
                "bytes": {"up": 4e6, "down": 2e6},
            },
        )

    monkeypatch.setattr(Study, "once", once)
    rows = benchmark_module("fedmuscle").table(
        Study(seeds=(0, 1, 2)),
        {
            "a": ("digits", []),
            "b": ("digits", ["peers=2"]),
            "c": ("digits", ["width=8", "alone=true"]),
        },
    )["rows"]
    assert rows["a"]["delta"] == rows["b"]["delta"] == 0 and rows["b"]["losers_beyond_noise"] == 0
    assert rows["c"]["delta"] == pytest.approx(-100 / 6, abs=0.001) and rows["c"]["gains"] == {
        "ada": -16.67
    }
    assert rows["a"]["megabytes"] == 3


def test_a_row_says_how_much_its_clients_train():
    """30 rows in batches of 8 are 4 steps an epoch; 3 rounds of 2 epochs and 4 own ones are 40
    steps, and a rate of 0.1 goes ten times as far with momentum 0.9."""
    config = {
        "training": {"epochs": 2, "batch_size": 8, "lr": 0.1, "optimizer": "sgd", "momentum": 0.9},
        "algorithm": {"name": "fedavg", "finetune": 4},
    }
    events = [{"event": "start", "clients": {"a": {"samples": 20}, "b": {"samples": 40}}}]
    run = Run(Path("nowhere"), config, {"rounds": 3, "seed": 0, "seconds": 1.0}, events)
    assert averages([run], lambda run: {"acc": 1.0})["budget"] == {
        "rows": 30,
        "steps": 40,
        "rate_x_steps": 40.0,
    }


def test_mean_and_spread():
    runs = [Run(Path("nowhere"), {}, {"seed": seed, "seconds": 1.0 + seed}) for seed in (0, 1)]
    told = averages(runs, lambda run: {"acc": 10.0 + 2 * run.seed})
    assert told == {
        "acc": 11,
        "acc_spread": 1.414,
        "seconds": 1.5,
        "seeds": {"0": 10, "1": 12},
        "budget": {},
    }
    assert averages(runs[:1], lambda run: {"acc": 1.0})["acc_spread"] is None


@pytest.mark.parametrize(
    "name, options, told",
    [
        ("afmcc", {"only": ("bgdp",)}, "no row of this bench is called bgdp; its rows: bdgp 2:1"),
        (
            "muscle",
            {"device": "cuda"},
            "bench muscle makes no runs of a scenario, so it takes no device",
        ),
        ("afmcc", {"seeds": "0..4"}, "such as 0-4 or 100,101"),
        (
            "afmcc",
            {"settings": ("stps=1",), "quick": True},
            'failed:\nunalike: --set stps: There is no field "stps".',
        ),
    ],
)
def test_bad_options_say_so(tmp_path, name, options, told):
    with pytest.raises(UserError, match=re.escape(told)):
        command.run(name, tmp_path, options.pop("seeds", None), **options)


def test_a_study_really_runs(tmp_path):
    tiny = (
        "afmcc-digits",
        [
            "alone=false",
            "evaluations=1",
            "starts=1",
            "pretraining=1",
            "steps=1",
            "clients.0.train=12",
        ],
    )
    (run,) = Study(quick=True).runs({"tiny": tiny}, ["rounds=1"])["tiny"]
    assert (
        len(run.clients) == 9
        and run.results["rounds"] == 1
        and averages([run], figures)["joint_acc"] > 0
    )


def test_stacked_is_timed_against_one_by_one(tmp_path):
    settings = ("starts=1", "pretraining=1", "steps=1", "clients.0.train=12")
    told = BENCHMARKS["afmcc-stack"](Study(quick=True, settings=settings))
    times = told["seconds_a_round"]
    assert (
        min(times.values()) > 0
        and told["times_faster"] == times["one by one"] / times["stacked and recorded"]
    )


@pytest.mark.parametrize(
    "name, told", [("engine", "overhead_workers_0"), ("bytes", "down_equals_up")]
)
def test_benches_of_the_core_run(tmp_path, monkeypatch, name, told):
    """Smaller even than quick, and without pages."""
    monkeypatch.setattr("benchmarks.engines.CLIENTS", 20)
    monkeypatch.setattr("benchmarks.engines.SAMPLES", 16)
    monkeypatch.setattr("benchmarks.engines.BATCH", 8)
    monkeypatch.setattr("unalike.report.write", lambda path: path)
    command.run(name, tmp_path, None, quick=True)
    assert json.loads((tmp_path / f"{name}-quick.json").read_text())[told]


class FakeRun:
    """Stands for the process of a run: copies a finished run to where it was asked for."""

    def __init__(self, source, code, seconds=0.0):
        self.source, self.code, self.seconds = source, code, seconds
        self.made = []
        self.killed = threading.Event()

    def __call__(self, command, **_):
        self.made.append(command)
        process = Mock(returncode=0, kill=self.killed.set)
        out = Path(command[command.index("--out") + 1])
        process.communicate = lambda timeout=None: self.make(out, timeout)
        return process

    def make(self, out, timeout=None):
        if timeout is not None and timeout < self.seconds:
            self.killed.wait(timeout)
            raise subprocess.TimeoutExpired("run", timeout)
        self.killed.wait(self.seconds)
        shutil.copytree(self.source, out)
        results = {"clients": {}, "seconds": 1.0, "environments": [{"code": self.code}]}
        (out / "results.json").write_text(json.dumps(results))
        return "", ""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.yaml").write_text("name: digits")
    monkeypatch.setattr(study, "hash_of_the_code", lambda: "first")
    made = FakeRun(source, "first")
    monkeypatch.setattr(study.subprocess, "Popen", made)
    return made


def test_kept_runs_are_not_made_again_unless_the_code_is_other(fake, tmp_path, monkeypatch):
    bench = Study(keep=str(tmp_path / "kept"))
    for seed in (0, 0, 1):
        bench.once("digits", ("rounds=1",), seed)
    assert len(fake.made) == 2
    monkeypatch.setattr(study, "hash_of_the_code", lambda: "edited")
    fake.code = "edited"
    bench.once("digits", ("rounds=1",), 0)
    assert len(fake.made) == 3
    fake.code = "edited once more"
    with pytest.raises(UserError, match="changed while this bench was running"):
        bench.once("digits", ("rounds=1",), 5)


def test_an_edited_scenario_is_another_run(fake, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("name: own\nsummary: before")
    before = Study().run_key(str(file), (), 0)
    assert before == Study().run_key(str(file), (), 0)
    file.write_text("name: own\nsummary: after")
    assert before != Study().run_key(str(file), (), 0)


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("keep", [True, False])
def test_ctrl_c_ends_a_bench_at_once_and_says_what_is_kept(fake, tmp_path, interruptible, keep):
    bench = Study(keep=str(tmp_path / "kept") if keep else None, jobs=2)
    fake.seconds = 60.0
    main = threading.main_thread().ident
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    words = "0 of 4 runs are in .*: the same command goes on" if keep else "--keep FOLDER keeps"
    start = time.monotonic()
    with pytest.raises(Interrupted, match=words):
        bench.runs({"a": ("digits", ())}, seeds=range(4))
    assert time.monotonic() - start < 1.3 and len(fake.made) <= 3


def test_a_bench_writes_what_is_finished_when_its_minutes_are_over(fake, tmp_path):
    fake.seconds = 0.2
    bench = Study(keep=str(tmp_path / "kept"), minutes=0.5 / 60)
    runs = bench.runs({"a": ("digits", ()), "b": ("digits", ("rounds=3",))}, seeds=range(8))
    assert list(runs) == ["a"] and 1 <= len(runs["a"]) <= 3
    assert len(bench.left_out) == 16 - len(runs["a"])
    again = Study(keep=str(tmp_path / "kept"), minutes=1e-9)
    assert len(again.runs({"a": ("digits", ())}, seeds=range(8))["a"]) == len(runs["a"])


def test_a_bench_without_runs_keeps_its_numbers(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(command, "hash_of_the_code", lambda root=None: "first")
    keep = Study(keep=str(tmp_path), jobs=2)
    for _ in range(2):
        told = command.measure("own", lambda quick: calls.append(quick) or {"a": 1}, keep)
    assert told == {"a": 1} and calls == [False]
    assert "--jobs 2 changes nothing" in capsys.readouterr().err
    monkeypatch.setattr(command, "hash_of_the_code", lambda root=None: "edited")
    command.measure("own", lambda quick: calls.append(quick) or {"a": 1}, keep)
    assert len(calls) == 2


def test_all_studies_are_listed():
    alone = {
        "afmcc-stack",
        "afmcc-time",
        "fednca-cost",
        "subflot-server",
        "fedmpt-step",
        "rivals-flops",
        "muscle-flops",
    }
    assert set(STUDIES) | alone <= set(BENCHMARKS)


@pytest.mark.parametrize("name", ["subflot-server", "fedmpt-step"])
def test_costs_are_told_beside_their_bars(name):
    if name == "fedmpt-step":
        pytest.importorskip("transformers")
    told = BENCHMARKS[name](Study(quick=True))
    if name == "fedmpt-step":
        assert (
            min(
                told[key]
                for key in ("step_ms", "seen_step_ms", "called_step_ms", "called_seen_step_ms")
            )
            > 0
        )
    else:
        assert told["seconds_a_client"] > 0 and all(
            row["both"] >= row["otp"] > 0 for row in told["rows"].values()
        )


def test_rivals_are_ranked_and_the_best_try_of_each_is_told(asked, tmp_path):
    told = BENCHMARKS["rivals"](Study(seeds=(0,), only=("sage", "cofed")))
    assert (
        list(told["rows"]) == ["sage", "cofed"]
        and told["first"] == "sage"
        and told["rows"]["cofed"]["delta"] == 3
    )
    tried = BENCHMARKS["rivals-rates"](Study(seeds=(0,), only=("fedhenn",)))
    assert (
        tried["best"]["fedhenn"] == "fedhenn, eta 0.01"
        and tried["best"]["sage"] is None
        and len(tried["rows"]) == 3
    )


def test_operations_of_a_round_are_counted_forward_and_backward():
    round_of = benchmark_module("baselines").round_of

    one = "clients=[{id: a, model: {name: mlp, hidden: [8], width: 4}, target: digit, train: 10}]"
    told = round_of("digits", ["algorithm={name: local}", "epochs=1", one])
    layers = [
        (64, 8),
        (8, 4),
        (4, 4),
        (4, 10),
    ]  # forward, gradient of weights, gradient of inputs but the first
    by_hand = 2 * 10 * sum(3 * a * b for a, b in layers) - 2 * 10 * 64 * 8
    assert told["a"] == told["clients"] == round(by_hand / 1e6, 3) and told["server"] == 0
    few = Study(quick=True, only=("local",), settings=("epochs=1", one))
    assert BENCHMARKS["muscle-flops"](few) == {
        "scenario": "digits",
        "rows": {"local": told},
    }


def test_speed_has_a_picture_by_clients_a_round(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.speed.PER_ROUND", (1,))
    command.run("speed", tmp_path, None, quick=True, only=("clients a round",))
    measured = json.loads((tmp_path / "speed-clients-a-round-quick.json").read_text())
    assert measured["rows"] == {} and "start with 100,000 clients" not in measured
    for line in measured["curves"]["lines"].values():
        assert set(line) == {"1"}
    assert "<svg" in (tmp_path / "speed-clients-a-round-quick.svg").read_text()


def test_speed_is_compared_with_a_loop(tmp_path):
    command.run("speed", tmp_path, None, quick=True, only=("three kinds",))
    measured = json.loads((tmp_path / "speed-three-kinds-quick.json").read_text())
    (row,) = measured["rows"].values()
    assert row["times the loop"] == pytest.approx(row["unalike"] / row["by hand"], abs=0.01)
