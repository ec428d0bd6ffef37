"""AFMCC where every other client is two or three times as fast: accuracy and simulated time, against waiting for the slowest (Table 3d)."""

from statistics import mean
from typing import Any

from unalike.benches import Study, averages
from unalike.benches.afmcc import QUICK, figures, scenario
from unalike.report import Run, history

PAPER = {2: 93.3, 3: 91.9}
COMMON = (
    "alone=false",
    "exchange=paper",
    "checkpoint=1000",
)  # one message a visit, so that a tick can hold a whole one


def run(study: Study) -> dict:
    """BDGP, F/S 1:1, until the slowest client has had 10 visits. `waiting` does as many visits in all, each round as long as the slowest;
    how much longer it takes is `times_less_to_same_visits`, and to the best ACC that both reach, `times_less_to_same_acc`."""
    going = study.runs(
        {
            f"E/O {ratio}:1": (scenario(study), [*COMMON, *settings(study, ratio)])
            for ratio in PAPER
        },
        QUICK,
    )
    told: dict[str, Any] = {}
    for name, runs in going.items():
        ratio = int(name[4])
        count = len(runs[0].clients)
        tick = 1.0001 * max(
            end - begin
            for run in runs
            for spans in history.visits(run).values()
            for begin, end in spans[1:]
        )
        rounds = round(mean(visits(run) for run in runs) / count)
        rows = {
            f"{name} waiting": (
                scenario(study),
                [
                    *COMMON,
                    *settings(study, ratio),
                    "rest=true",
                    f"tick={tick}",
                    f"rounds={rounds}",
                    f"evaluations={rounds}",
                ],
            )
        }
        waiting = study.runs(rows, QUICK)[f"{name} waiting"]
        pairs = list(zip(runs, waiting, strict=True))
        told[name] = averages(runs, figures) | {
            "paper_acc": PAPER[ratio],
            "waiting_acc": round(mean(figures(run)["acc"] for run in waiting), 3),
            "clock": round(mean(lasted(run) for run in runs), 2),
            "visits": round(mean(visits(run) for run in runs), 1),
            "waiting_clock": round(mean(lasted(run) for run in waiting), 2),
            "waiting_visits": mean(visits(run) for run in waiting),
            "times_less_to_same_visits": round(
                mean(
                    lasted(slow) / visits(slow) * visits(run) / lasted(run) for run, slow in pairs
                ),
                2,
            ),
            "bar_times_less_to_same_visits": {2: None, 3: 1.7}[ratio],
            "times_less_to_same_acc": round(mean(same_acc(run, slow) for run, slow in pairs), 2),
        }
    return {"rows": told}


def settings(study: Study, ratio: int) -> list[str]:
    """Two groups of clients instead of one: even ones `ratio` times as fast as odd ones."""
    group = "count: 6, model: {name: autoencoder}, mix: {full: 1, single: 1}, link: 1.0e+9"
    return [
        f"clients=[{{id: even, speed: {1000.0 * ratio}, {group}}}, {{id: odd, speed: 1000.0, {group}}}]",
        "rounds=10",
        "rest=false",
        "tick=0.01",
        "evaluations=10",
    ]


def begun(run: Run) -> float:
    """When pretraining was over: a client's first visit takes as long as its second."""
    return min(its[0][1] - (its[1][1] - its[1][0]) for its in history.visits(run).values())


def lasted(run: Run) -> float:
    return (run.results or {})["clock"] - begun(run)


def visits(run: Run) -> int:
    return sum((run.results or {})["visits"].values())


def same_acc(run: Run, slow: Run) -> float:
    """How many times sooner `run` has the best ACC that both of them reach."""
    courses = [timed(run), timed(slow)]
    goal = min(max(acc for _, acc in course) for course in courses)
    first, second = (next(at for at, acc in course if acc >= goal) for course in courses)
    return second / first


def timed(run: Run) -> list[tuple[float, float]]:
    """ACC by simulated seconds since the clients went their own ways."""
    clock = {event["round"]: event["clock"] for event in run.events if event["event"] == "round"}
    return [
        (clock[at] - begun(run), acc)
        for at, acc in history.figures(run)["acc"].items()
        if at in clock
    ]
