"""The page: whole, self-contained, and deaf to what a run puts into its names."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as tree
from html.parser import HTMLParser

import pytest
import yaml

from unalike.report import curves, mpl, read, write
from unalike.report.mpl import CLIENT_COLOURS, drawing_style
from unalike.report.plots import plot_run

FAILED = [{"client": "oak", "round": 3, "operation": "align", "reason": "<b>out of memory</b>"}]
HOSTILE = {
    "<script>alert(1)</script>": (
        "<img src=x onerror=alert(1)>",
        "classification",
        "accuracy",
        50.0,
        60.0,
    ),
    "\"'><svg onload=alert(1)>": ("cnn", "</style><script>x</script>", "$\\frac{", 50.0, 40.0),
    "_a $x$\x00\x1b\ud800 日本語": ("cnn", "classification", "", 50.0, 50.0),
    "c" * 300: ("cnn", "classification", "accuracy", 0.0001, 60.0),
}
PARTS = [
    "fedmuscle on digits",
    "one lost (oak −4.8 %)",
    "Local and federated",
    "Over the rounds",
    "Logged by the method",
    "What was sent",
    "Who was visited when",
    "What failed",
    "oak failed at align in round 3: <b>out of memory</b>",
    "run/config.yaml",
    "5.05 MB",
    "2.5 MB up, 2.55 MB down",
    "commit abc1234",
    "optimizer:",
    "muscle loss",
    "round",
    "value of each client's own metric (%)",
    "value (%)",
    "sent in the whole run (MB)",
    "clock of the run (s)",
    "over all clients",
]
TWO = {
    "x": ("cnn", "classification", "accuracy", 50.0, 60.0),
    "y": ("mlp", "clustering", "NMI", 50.0, 40.0),
}


class Outline(HTMLParser):
    """The elements of a page, with every opened one closed again."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open, self.ids, self.words = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)


def outline(folder):
    path = write(folder)
    assert path == folder / "report.html"
    page = Outline(path.read_text())
    assert page.open == [] and len(set(page.ids)) == len(page.ids)
    return page


def test_a_whole_run_shows_every_part_and_needs_no_network(make):
    folder = make(arrivals=True, safeguard=True, failures=FAILED)
    page = outline(folder)
    texts_to_codes = (folder / "report.html").read_text()
    assert (
        "http:" not in texts_to_codes
        and "https:" not in texts_to_codes
        and "#a5f0" not in texts_to_codes
    )
    text = " ".join(page.words).replace("\N{NO-BREAK SPACE}", " ")
    for part in PARTS:
        assert part in text, part
    assert page.tags.count("svg") == 2 * 5 and "script" not in page.tags  # desktop and phone
    assert all(value for name, value in page.attributes if name == "aria-label")


@pytest.mark.parametrize(
    "how",
    [
        {"alone": False, "clients": {"x": ("m", "t", "m", 1.0, 2.0)}},
        {"finished": False, "failures": FAILED},
    ],
)
def test_unfinished_runs_and_runs_without_baseline_have_a_page(make, how):
    page = outline(make(**{"clients": TWO} | how))
    unfinished = "This run has not finished: eight rounds so far, and no results yet." in " ".join(
        page.words
    )
    assert unfinished == (not how.get("finished", True))


def bare(make):
    """A run that has only just begun."""
    folder = make(finished=False)
    for file in ("events.jsonl", "ledger.csv"):
        (folder / file).unlink()
    return folder


def test_figures_without_data_are_left_out(make):
    page = outline(bare(make))
    assert "svg" not in page.tags and "figure" not in page.tags


def test_hostile_names_stay_text(make):
    failed = [{"client": "<script>", "round": None, "operation": None, "reason": "\x1b"}]
    page = outline(
        make(clients=HOSTILE, scenario="a b; rm -rf <x>", arrivals=True, failures=failed)
    )
    assert "script" not in page.tags and "img" not in page.tags
    assert page.tags.count("svg") == 2 * 5
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    text = " ".join(page.words)
    assert "<script>alert(1)</script>" in text and "fedmuscle on a b; rm -rf <x>" in text
    assert "\x00" not in text and "\x1b" not in text


def test_each_figure_is_well_formed_and_gives_a_client_one_colour(make):
    run = read(make(clients=TWO, arrivals=True))
    pictures = plot_run(run)
    with drawing_style():
        assert pictures[3] == curves.plot_traffic(run)  # the same run, the same picture
    for figure in pictures:
        assert tree.fromstring(figure.svg).get("aria-label").endswith(".")
    used = [
        {name for name in CLIENT_COLOURS if f"var(--{name})" in figure.svg} for figure in pictures
    ]
    assert used == [{"c0", "c1"}, {"c0", "c1"}, {"c0", "c1"}, set(), {"c0", "c1"}]


def test_a_run_from_python_has_no_command_and_server_metrics_are_shown(make):
    folder = make(clients=TWO, python=True)
    (folder / "events.jsonl").unlink()
    results = json.loads((folder / "results.json").read_text()) | {
        "server": {"recall": {"at_1": 12.34}},
        "bytes": {"up": 1000, "down": 0},
    }
    (folder / "results.json").write_text(json.dumps(results))
    text = " ".join(outline(folder).words)
    assert "started from Python" in text and "unalike run" not in text
    assert "recall at 1" in text and "12.34" in text
    assert "up to the server, 1 kB" in text and "1 kB up, 0 B down" in text
    assert "Measuring took 1.68 MB of it, left out of the totals above." in text


def test_the_command_to_repeat_a_run_is_its_config(make):
    text = " ".join(outline(folder := make("my run")).words)
    assert f"unalike run '{folder}/config.yaml'" in text


def test_epsilon_is_on_the_page(make):
    folder = make()
    results = json.loads((folder / "results.json").read_text())
    results["privacy"] = results["clients"]["oak"]["privacy"] = {
        "epsilon": 12.34,
        "delta": 1e-5,
        "releases": 21,
    }
    (folder / "results.json").write_text(json.dumps(results))
    text = write(folder).read_text()
    for whole in (
        "<dt>Epsilon</dt>",
        "at most, delta 1e-05, 21 releases",
        '<td class="number">12.3</td>',
    ):
        assert whole in text


def test_missed_rounds_are_counted_and_are_no_failures(make):
    away = [
        {"client": "oak", "round": at, "operation": "train", "reason": why, "lasting": False}
        for at, why in (
            (2, "dropped out"),
            (3, "late: 4 s, the deadline is 3 s"),
            (5, "late: 9 s, the deadline is 3 s"),
        )
    ]
    text = " ".join(outline(make(failures=away)).words)
    assert "Missed counts the rounds a client was away (dropped out and late)." in text
    assert "What failed" not in text and "failed at least once" not in text


def test_a_line_shows_one_stage_of_each_round_and_rings_another(make):
    folder = make(clients=TWO)
    (folder / "events.jsonl").open("a").write(
        json.dumps(
            {
                "event": "evaluation",
                "round": 8,
                "when": "end",
                "who": "together",
                "values": {"x": {"accuracy": 99.0}, "y": {"NMI": 99.0}},
            }
        )
        + "\n"
    )
    figure = plot_run(read(folder))[1]
    assert [text for _, _, text in figure.legend] == [
        "federated, after local",
        "local",
        "federated, after alignment",
    ]
    assert "Federated they end at: x 99.0 and y 99.0." in figure.svg
    tops = [float(label) for label in re.findall(r">(\d+)</text>", figure.svg)]
    assert max(tops) < 99  # neither line nor circles go there


def test_svg_files_of_a_method_are_shown_as_images(make):
    folder = bare(make)
    (folder / "pictures").mkdir()
    (folder / "pictures" / "transport_plan.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'
    )
    page = outline(folder)
    assert ("alt", "transport plan") in page.attributes and "Transport plan" in page.words
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_a_phone_gets_narrow_drawings_with_letters_as_large_and_nothing_left_out(make):
    sizes = lambda svg: set(re.findall(r"font-size: ([\d.]+px)", svg))
    for figure in plot_run(read(make(arrivals=True))):
        wide, narrow = (
            float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])
            for svg in (figure.svg, figure.drawing.narrow)
        )
        assert narrow < 0.5 * wide, figure.title
        assert sizes(figure.drawing.narrow) == sizes(figure.svg) != set()
        names = lambda svg: set(re.findall(r">([^<>]*[a-z][^<>]*)</text>", svg))
        assert names(figure.drawing.narrow) == names(figure.svg) != set()


def test_many_clients_show_the_smallest_gains(make, monkeypatch):
    for limit in ("MAX_ROWS", "MAX_PANELS"):
        monkeypatch.setattr(mpl, limit, 3)
    monkeypatch.setattr(curves, "CLIENT_COLOURS", ["c0", "c1"])
    many = {
        f"c{place}": ("cnn", "classification", "accuracy", 50.0, 55.0 - place) for place in range(5)
    }
    gains, client_curves, logged, _, visits = plot_run(read(make(clients=many, arrivals=True)))
    assert (
        "The 3 smallest gains of 5 clients." in gains.caption
        and "c4, accuracy" in gains.svg
        and "c0, accuracy" not in gains.svg
    )
    assert (
        "The 3 clients with the smallest gain, of 5." in client_curves.caption
        and "c4, accuracy" in client_curves.svg
    )
    assert [text for _, _, text in logged.legend] == [
        "median of the clients",
        "from the lowest to the highest",
    ]
    assert "of 5" in visits.caption


def test_importing_the_package_imports_nothing_heavy():
    heavy = (
        "import sys, unalike.report; "
        "print([n for n in ('matplotlib', 'scipy', 'torch', 'numpy') if n in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", heavy], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_of_many_clients_only_a_few_are_drawn(make):
    many = {
        f"c{place}": ("cnn", "classification", "accuracy", 50.0, 55.0 - place)
        for place in range(60)
    }
    gains, client_curves, *_ = plot_run(read(make(clients=many)))
    assert "The 20 smallest gains of 60 clients." in gains.caption
    assert "The 9 clients with the smallest gain, of 60." in client_curves.caption


def test_a_narrow_screen_leaves_out_model_and_task_in_head_and_body(make):
    page = write(make(clients=TWO)).read_text()
    table = page.split("Every client", 1)[1].split("</table>", 1)[0]
    assert table.count('<th scope="col" class="detail">') == 2
    assert table.count('<td class="detail">') == 2 * table.count("<tr><td>")
    assert ".detail { display: none; }" in page


def test_simulated_time_is_told_where_clients_have_unlike_speeds_or_a_deadline(make):
    def page(name, speeds, **federation):
        folder = make(name, federation=federation)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        for place, client in enumerate(config["clients"]):
            client["speed"] = speeds[place % len(speeds)]
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return write(folder).read_text()

    clock = "20.0 s on the simulated clock"
    assert clock not in page("alike", [1000.0], deadline=None, tick=0.0)
    assert clock in page("unlike", [1000.0, 200.0])
    assert clock in page("late", [1000.0], deadline=3.0)
