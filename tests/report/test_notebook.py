"""What Jupyter shows: a table of the results, figures, and one bar that is drawn again."""

import pytest

from unalike.report.mpl import Drawing, ReportFigure
from unalike.report.notebook import Figures, figure_html, results_html
from unalike.report.notebook_progress import NotebookBars


def entry(value, gain):
    return {
        "model": "mlp", "modalities": ["x"], "task": "classification", "metric": "accuracy",
        "samples": 10, "test": "own", "alone": 50.0, "value": value, "gain": gain, "metrics": {},
        "bytes": {"up": 1, "down": 1},
    }  # fmt: skip


RESULTS = {
    "scenario": "s", "algorithm": "fedavg", "seed": 0, "delta": -5.0, "losers": 1, "seconds": 1.0,
    "bytes": {"up": 2, "down": 2}, "failures": [],
    "clients": {"<b>ada</b>": entry(60.0, 20.0), "ben": entry(35.0, -30.0)},
}  # fmt: skip


def test_results_are_a_table_with_degraded_clients_in_red_and_names_escaped():
    shown = results_html(RESULTS)
    assert shown.count("<tr>") == 3
    assert "&lt;b&gt;ada&lt;/b&gt;" in shown and "<b>ada" not in shown
    assert "color:#b3311f;font-weight:bold'>−30.0 %</td>" in shown
    assert "<b>degraded</b> 1 of 2: ben" in shown
    assert shown.count("<td class='detail'") == 2 * 2  # model and task: no room on a phone


def test_figures_carry_their_colours_and_escape_their_words():
    figure = ReportFigure("A < B", "caption", Drawing("<svg></svg>"), [("line", "c0", "ada & ben")])
    shown = figure_html(figure)
    assert "--c0:#0072b2" in shown and "<svg></svg>" in shown
    assert "<span style='color:var(--c0)'>—</span> ada &amp; ben" in shown
    assert "A &lt; B" in shown
    assert Figures([figure, figure])._repr_html_() == 2 * shown


class Handle:
    def __init__(self):
        self.shown = []

    def update(self, content):
        self.shown.append(content.data)


def test_one_bar_is_drawn_again_and_leaves_how_far_it_came():
    pytest.importorskip("IPython")
    handle = Handle()
    bars = NotebookBars(lambda content, display_id: handle)
    task = bars.add_task("fedavg", total=4, completed=0, count="0 of 4 rounds", doing="")
    bars.update(task, completed=2, count="2 of 4 rounds", doing="1 <kB>")
    assert "max='4' value='2'" in handle.shown[-1] and "1 &lt;kB&gt;" in handle.shown[-1]
    bars.remove_task(task)
    bars.add_task("the report", total=None, count="", doing="")
    assert handle.shown[-1] == "<div><progress></progress> the report</div>"
    bars.close()
    assert handle.shown[-1] == "fedavg, 2 of 4 rounds"
