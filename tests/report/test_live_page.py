"""The live page: it appears, moves, shows failures, ends; only readers it is meant for see it."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from unalike.base.events import append_event
from unalike.base.lock import is_locked, lock
from unalike.cli.live import page_token
from unalike.report.folder import read
from unalike.report.live_page import SENTENCES, format_clock, render_sections
from unalike.report.live_run import LiveRun, gains_so_far
from unalike.report.live_server import Feed, bind, build_app, usual_port
from unalike.report.page import render_page, write

CLIENTS = {
    "ada": {"model": "mlp", "metric": "accuracy", "unit": "%", "higher_is_better": True},
    "<b>eve</b>": {"model": "cnn", "metric": "mae", "unit": "", "higher_is_better": False},
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("name: digits\nalgorithm: {name: fedavg}\n")
    return path


class Writer:
    """Writes the events of a run as a run would, five seconds a round."""

    def __init__(self, path):
        self.path = path / "events.jsonl"

    def __call__(self, event, **facts):
        append_event(self.path, event, **facts)

    def start(self, **facts):
        self("start", round=0, rounds=4, clients=CLIENTS, **facts)

    def local(self, number, ada, eve):
        self.measure(number, ada, eve, "alone")

    def measure(self, number, ada, eve, who="together"):
        values = {"ada": {"accuracy": ada}, "<b>eve</b>": {"mae": eve}}
        self("evaluation", round=number, who=who, when="end", values=values)

    def round(self, number):
        sizes = {"up": 1000 * number, "down": 2000 * number}
        self("round", round=number, seconds=5.0 * number, bytes=sizes)


@pytest.fixture
def writer(folder):
    return Writer(folder)


def live_run(folder, running=True):
    return LiveRun(folder, is_running=lambda: running)


def page(live):
    return "\n".join(html for _, html in render_sections(live)).replace("\xa0", " ")


def test_progress_and_time_left_follow_from_the_rounds(folder, writer, monkeypatch):
    now = iter([100.0, 105.0, 110.0])
    monkeypatch.setattr(time, "time", lambda: next(now))
    writer.start()
    writer.round(1)
    writer.round(2)
    progress = live_run(folder).progress(now=111.0)
    assert (progress.position, progress.rounds) == (2, 4)
    assert progress.elapsed == 11.0  # ten seconds of work at the end of round 2, and one since
    assert progress.left == 9.0  # two rounds of five seconds, less the second since round 2
    assert live_run(folder, running=False).progress(now=111.0).left is None


def test_gains_so_far_are_over_training_alone_for_as_many_rounds(folder, writer):
    writer.start()
    for number, ada, eve in ((1, 20.0, 2.0), (4, 50.0, 1.0)):
        writer.local(number, ada, eve)
    writer.measure(2, 30.0, 1.5)
    assert gains_so_far(live_run(folder).run) == {"ada": 50.0, "<b>eve</b>": 25.0}
    html = page(live_run(folder))
    assert "+37.5 %" in html and "0 of 2" in html
    writer("failure", client="ada", operation="train", round=3, reason="no disk", lasting=True)
    assert gains_so_far(live_run(folder).run) == {"<b>eve</b>": 25.0}  # ada will end without one


def test_values_without_a_finite_gain_or_scale_leave_the_page_standing(folder, writer):
    """Two clients with infinite gains of opposite sign, and a range that no float can hold."""
    writer.start()
    writer.local(1, ada=5e-324, eve=5e-324)
    writer.measure(1, ada=1e15, eve=1e15)
    writer.round(1)
    live = LiveRun(folder, lambda: True)
    assert gains_so_far(live.run) == {} and render_sections(live)
    writer.measure(2, ada=1e308, eve=5.0)
    writer.measure(3, ada=-1e308, eve=5.0)
    writer.round(3)
    live.update()
    assert render_sections(live)


def test_the_page_tells_who_failed_and_why_and_what_happened(folder, writer):
    writer.start()
    writer.local(1, 20.0, 2.0)
    reason = "out of memory <script>"
    writer("failure", client="ada", operation="train", round=1, reason=reason)
    for event in SENTENCES:
        writer(event, text="a notice", reason="a reason", client="ada", round=1, error="an error")
    html = page(live_run(folder))
    assert "ada failed at train in round 1: out of memory &lt;script&gt;" in html
    assert "a notice" in html and "ada was rejected: a reason" in html
    assert "<b>eve</b>" not in html and "&lt;b&gt;eve&lt;/b&gt;" in html


def test_clients_of_the_local_baseline_that_were_away_are_no_failures(folder, writer):
    writer.start()
    writer("failure", client="ada", operation="train", round=1, reason="away", lasting=False)
    writer.local(4, 20.0, 2.0)
    assert "missed" not in page(live_run(folder))
    writer("failure", client="ada", operation="train", round=1, reason="away", lasting=False)
    assert "Rounds missed: ada 1 (away)" in page(live_run(folder))


def test_a_client_that_failed_alone_is_told_with_its_reason_until_all_work_together(folder, writer):
    writer.start()
    writer("failure", client="ada", operation="train", round=1, reason="no disk", lasting=True)
    writer.local(4, 20.0, 2.0)
    html = page(live_run(folder))
    assert "ada failed at train in round 1: no disk" in html and "failed</span>" in html
    writer.measure(1, 30.0, 1.5)
    html = page(live_run(folder))
    assert "no disk" not in html and "failed</span>" not in html


def test_a_run_that_nobody_works_on_is_stopped_and_goes_on_after_a_resume(folder, writer):
    writer.start()
    writer.round(1)
    here = SimpleNamespace(running=False)
    live = LiveRun(folder, is_running=lambda: here.running)
    assert live.state == "stopped" and f"unalike resume {folder}" in page(live)
    here.running = True
    writer("resume", round=1, rounds=4, clients=CLIENTS)
    assert live.update() and live.state == "running"
    assert "resumed after round 1" in page(live)
    assert not live.update()


def test_a_start_that_was_set_aside_is_forgotten(folder, writer):
    writer.start()
    writer("failed", error="UserError: no such file")
    live = live_run(folder, running=False)
    assert live.state == "failed" and "no such file" in page(live)
    writer.path.rename(folder / "old.jsonl")
    writer.start()
    live.update()
    assert "no such file" not in page(live)


def test_a_finished_run_is_its_report(make):
    live = live_run(make(), running=False)
    assert live.state == "finished"
    html = page(live)
    assert "Local and federated" in html and "unalike run" in html


def test_the_page_of_a_run_takes_the_report_that_the_run_has_drawn(make, monkeypatch):
    """It waits for that one, shows it, and draws one only where the run drew none."""
    folder = make()
    live = LiveRun(folder, is_running=lambda: False, own=True)
    assert "Its report is being drawn" in page(live) and not live.update()
    feed = Feed(live)
    with monkeypatch.context() as patch:
        write(folder)
        patch.setattr("unalike.report.live_page.render_parts", lambda run: 1 / 0)
        text = feed.page()
    assert "Local and federated" in text and text.count("<h1>") == 1 and "</main>" in text
    assert live.report is not None and live.report in render_page(read(folder))


def test_a_report_that_is_drawn_just_before_the_end_is_taken(make, monkeypatch):
    folder = make()
    feed = Feed(LiveRun(folder, is_running=lambda: False, own=True))
    feed.page()
    write(folder)
    monkeypatch.setattr("unalike.report.live_page.render_parts", lambda run: 1 / 0)

    async def end_with_a_reader():
        seen = []

        async def read():
            async for text in feed.read():
                seen.append(text)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        await feed.end()
        await reader
        return seen

    seen = asyncio.run(end_with_a_reader())
    assert "Local and federated" in seen[-1]


def test_a_report_from_before_the_results_is_not_taken(make):
    folder = make()
    os.utime(write(folder), ns=(0, 0))
    live = LiveRun(folder, is_running=lambda: False, own=True)
    assert live.report is None
    feed = Feed(live)
    feed.page()
    asyncio.run(feed.end())  # the run is over: whoever asks now gets one that is drawn here
    assert "Local and federated" in feed.page() and live.report is None


def test_results_that_were_changed_are_told(make):
    folder = make()
    (folder / "results.json").write_text("{}")
    live = live_run(folder, running=False)
    assert "should name the clients" in page(live)


def test_a_report_that_cannot_be_drawn_is_told_and_the_rest_is_shown(make, monkeypatch):
    feed = Feed(live_run(make(), running=False))
    monkeypatch.setattr("unalike.report.live_page.render_parts", lambda run: 1 / 0)
    text = feed.page()
    assert "The report cannot be shown: division by zero" in text and "Every client" in text


@pytest.mark.parametrize("number", [30, 1000])
def test_of_many_clients_each_has_a_row_with_a_curve(folder, writer, number):
    clients = {f"c{place}": CLIENTS["ada"] for place in range(number)}
    writer("start", round=0, rounds=4, clients=clients)
    for at in (1, 2):
        values = {client: {"accuracy": 50.0 + at} for client in clients}
        writer("evaluation", round=at, who="together", when="end", values=values)
    html = page(live_run(folder))
    assert html.count('<polyline class="federated"') == min(number, 300)


def test_every_event_that_is_worth_a_sentence_has_one_for_missing_facts(folder, writer):
    for event in SENTENCES:
        writer(event)
    assert page(live_run(folder))


def test_clocks_are_rounded():
    assert format_clock(0.4) == "0 s" and format_clock(3600) == "1 h 00 min"


# over HTTP


TOKEN = "s3cret"


def call(app, path=f"/{TOKEN}/", host="127.0.0.1:80", method="GET", **headers):
    """The answer of an ASGI application, without a network: status, headers, text."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    where, _, query = path.partition("?")
    named = {"host": host, **headers}
    scope = {
        "type": "http", "method": method, "path": where, "query_string": query.encode(),
        "headers": [(name.replace("_", "-").encode(), text.encode()) for name, text in named.items()],
        "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    text = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, text


@pytest.fixture
def app(folder, writer):
    pytest.importorskip("starlette")
    writer.start()
    return lambda *hosts: build_app(Feed(live_run(folder)), TOKEN, set(hosts) or None)


def test_the_page_lets_no_script_but_its_own_run(app):
    status, headers, text = call(app("127.0.0.1"))
    assert status == 200 and "fedavg on digits" in text
    assert "script-src 'self'" in headers["content-security-policy"]
    assert text.count("<script") == 1 and 'src="live.js"' in text and "http:" not in text
    status, _, text = call(app("127.0.0.1"), f"/{TOKEN}/live.js")
    assert status == 200 and "EventSource" in text and "http" not in text


def test_the_page_is_read_only(app):
    assert call(app("127.0.0.1"), method="POST")[0] == 405
    assert call(app("127.0.0.1"), f"/{TOKEN}/config.yaml")[0] == 404
    assert call(app("127.0.0.1"), f"/{TOKEN}/report")[0] == 200


def test_without_the_token_nothing_is_shown(app):
    """Also on loopback, where every user of the machine and every page in the browser may ask."""
    for guarded in (app("127.0.0.1"), app()):
        for path in ("/", "/events", "/live.js", "/report", "/wrong/", "//", f"/?token={TOKEN}"):
            status, _, text = call(guarded, path)
            assert status == 403 and "digits" not in text
        assert call(guarded, "/", cookie=f"unalike-watch-80={TOKEN}")[0] == 403


def test_a_page_that_an_attacker_points_here_gets_nothing(app):
    """DNS rebinding: the browser takes evil.example for this machine, and says so."""
    for host in ("evil.example:80", "evil.example", "127.0.0.1.evil.example:80", "", "[::1"):
        status, _, text = call(app("127.0.0.1"), host=host)
        assert status == 403 and "digits" not in text
        assert host in ("", "[::1") or host not in text


def test_another_origin_is_never_allowed_to_read(app):
    """Browsers keep an answer from the script of another page unless a header lets it through."""
    for method in ("GET", "OPTIONS"):
        _, headers, _ = call(app("127.0.0.1"), method=method, origin="http://evil.example")
        assert not [name for name in headers if name.startswith("access-control")]
    _, headers, _ = call(app("127.0.0.1"), origin="http://evil.example")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_the_token_reaches_no_other_port_or_page(app):
    """A cookie would go to every port of the host, a referrer to the next page."""
    _, headers, text = call(app("127.0.0.1"))
    assert "set-cookie" not in headers and headers["referrer-policy"] == "no-referrer"
    assert TOKEN not in text


def test_the_way_in_leads_to_no_other_host(app):
    status, headers, _ = call(app(), f"/{TOKEN}")
    assert status == 303 and headers["location"] == f"/{TOKEN}/"
    assert call(app(), "//evil.example/")[0] == 403


def test_a_page_keeps_its_address_after_a_resume_and_each_user_has_another(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "ada"))
    token = page_token(folder)
    assert token == page_token(folder) != page_token(tmp_path) and len(token) == 32
    assert (tmp_path / "ada" / "watch.key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "ben"))
    assert page_token(folder) != token
    assert not [file for file in folder.rglob("*") if token in file.read_text(errors="replace")]


@pytest.mark.parametrize("damage", ["readable", "cut", "unwritable"])
def test_a_key_that_others_may_know_is_not_used(folder, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path))
    key = tmp_path / "watch.key"
    if damage == "unwritable":
        key.mkdir()
    else:
        key.write_bytes(bytes(32) if damage == "readable" else b"")
        key.chmod(0o644 if damage == "readable" else 0o600)
    assert page_token(folder) != page_token(folder)


def test_a_run_has_the_same_port_after_a_resume_unless_it_is_taken(folder, monkeypatch):
    with bind("127.0.0.1", 0, folder) as free:
        number = free.getsockname()[1]
    monkeypatch.setattr("unalike.report.live_server.FIRST_PORT", number)
    monkeypatch.setattr("unalike.report.live_server.PORTS", 1)
    with bind("127.0.0.1", None, folder) as first:
        assert first.getsockname()[1] == usual_port(folder)
        with bind("127.0.0.1", None, folder) as second:
            assert second.getsockname()[1] != usual_port(folder)


def test_readers_get_the_page_its_changes_and_the_end(folder, writer):
    async def look():
        feed = Feed(live_run(folder))
        follow = asyncio.create_task(feed.follow())
        seen = []
        async for text in feed.read():
            if text.startswith("id"):
                seen.append(json.loads(text.partition("data: ")[2]))
            if len(seen) == 1 and seen[-1]["state"] == "waiting":
                writer.start()
            if len(seen) == 2:
                writer.round(1)
                await feed.end()
        await follow
        return seen

    feed_pause = "unalike.report.live_server.EVERY"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_pause, 0.01)
        patch.setattr("unalike.report.live_server.GRACE", 0.01)
        seen = asyncio.run(look())
    assert [message["state"] for message in seen] == ["waiting", "running", "running"]
    assert "1 of 4 rounds" in str(seen[2]["sections"])


def test_while_nobody_looks_nothing_is_drawn_and_what_a_page_drew_all_readers_get(
    folder, writer, monkeypatch
):
    monkeypatch.setattr("unalike.report.live_server.EVERY", 0.01)

    async def look():
        feed = Feed(live_run(folder))
        follow = asyncio.create_task(feed.follow())
        await asyncio.sleep(0.1)
        assert feed.drawn == 0
        changes = feed.read()
        states = []
        async for text in changes:
            if text.startswith("id"):
                states.append(json.loads(text.partition("data: ")[2])["state"])
                if len(states) == 2:
                    break
                writer.start()
                feed.page()  # somebody else loads the page: this reader is told all the same
        await changes.aclose()
        drawn = feed.drawn
        writer.round(1)
        await asyncio.sleep(0.1)
        assert feed.drawn == drawn
        await feed.end()
        await follow
        return states

    assert asyncio.run(look()) == ["waiting", "running"]


def test_looking_whether_a_run_is_going_on_never_keeps_a_start_out(folder):
    assert not is_locked(folder)
    with lock(folder):
        assert is_locked(folder)
    (folder / ".lock").chmod(0o444)
    assert not is_locked(folder)


@pytest.fixture
def server(folder, writer):
    """`unalike watch` of a folder, as `unalike run --watch` starts it: process and address."""
    pytest.importorskip("uvicorn")
    writer.start()
    command = [sys.executable, "-m", "unalike", "watch", str(folder), "--leash"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        yield process, process.stdout.readline().strip()
        process.stdin.close()
        process.wait(10)


def test_the_command_streams_and_ends_with_its_leash(server, writer):
    process, url = server
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w=-]{32}/", url)
    for address in (url[: -len("/") - 32], f"{url}events".replace(url[-9:-1], "0" * 8)):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address, timeout=10)
    rebound = urllib.request.Request(url, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(rebound, timeout=10)
    with urllib.request.urlopen(f"{url}events", timeout=10) as stream:
        lines = (line.decode() for line in stream)
        first = next(line for line in lines if line.startswith("data"))
        assert '"state": "stopped"' in first
        start = time.monotonic()
        writer.round(1)
        second = next(line for line in lines if line.startswith("data"))
        assert "1 of 4 rounds" in second and time.monotonic() - start < 5
        process.stdin.close()
        assert process.wait(10) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=2)


def test_a_run_has_one_server_which_ends_with_it(monkeypatch, capsys):
    from unalike.cli import live

    ended = []
    server = SimpleNamespace(stdin=SimpleNamespace(close=lambda: ended.append(True)))
    started = []
    monkeypatch.setattr(live, "start_server", lambda path: started.append(path) or server)
    shown = []
    with live.live_page(lambda event, **_: shown.append(event), wanted=True) as show:
        show("folder", path="runs/a")
        show("folder", path="runs/a")  # FLARE starts its server's program again
        show("round", round=1)
        assert started == ["runs/a"] and not ended
    assert ended == [True] and shown == ["folder", "folder", "round"]


# in a browser


@pytest.fixture
def browser():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def wait_for(page, expected, seconds=15):
    deadline = time.monotonic() + seconds
    while not expected():
        assert time.monotonic() < deadline, page.locator("main").inner_text()
        page.wait_for_timeout(100)


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_it_appears_moves_shows_a_failure_and_ends(
    browser, server, folder, writer, make, width
):
    _, url = server
    view = browser.new_page(viewport={"width": width, "height": 844})
    errors = []
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.on("console", lambda message: errors.append(message.text))
    text = lambda: view.locator("main").inner_text().replace("\xa0", " ")
    with lock(folder):
        view.goto(url)
        wait_for(view, lambda: "0 of 4 rounds" in text() and "running" in text())
        writer.local(4, 20.0, 2.0)
        writer.measure(1, 30.0, 1.5)
        writer.round(1)
        wait_for(view, lambda: view.title().startswith("1/4"))
        writer.measure(2, 40.0, 1.0)
        writer.round(2)
        wait_for(view, lambda: "2 of 4 rounds" in text() and "left" in text())
        assert view.locator("circle").count() == 2
        reason = "<img src=x onerror=alert(1)>"
        writer("failure", client="ada", operation="train", round=3, reason=reason)
        wait_for(view, lambda: f"ada failed at train in round 3: {reason}" in text())
        assert view.locator(".badge.bad").inner_text() == "failed"
        before = view.evaluate("document.querySelector('[data-tick=up]').textContent")
        wait_for(
            view,
            lambda: view.evaluate("document.querySelector('[data-tick=up]').textContent") != before,
        )
        ended = {"ada": ("mlp", "classification", "accuracy", 20.0, 40.0)}
        finished = make("finished", clients=ended)
        for name in ("config.yaml", "results.json", "ledger.csv"):
            shutil.copy(finished / name, folder / name)
        writer("finish", seconds=20.0)
        wait_for(view, lambda: "Its report is being drawn" in text())
        write(folder)
        wait_for(view, lambda: "finished" in text() and "To repeat this run" in text())
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert errors == []
