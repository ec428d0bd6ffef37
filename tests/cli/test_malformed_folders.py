"""Run folders that somebody else may have sent, whose files are not as we write them.

Each command that reads one ends in one sentence or does its work; it never ends in a traceback, and
writes nothing outside of the folder.
"""

import copy
import io
import json
import random
import shutil
import sys

import numpy
import pytest
import yaml
from rich.console import Console

import unalike
from unalike import report
from unalike.base.errors import UserError
from unalike.base.events import append_event
from unalike.base.record import find_problem_in_event, find_problem_in_results
from unalike.base.yaml_text import MAX_DEPTH, load_yaml
from unalike.cli import commands
from unalike.cli.benchmarks import benchmark_module
from unalike.report.folder import read
from unalike.report.live_run import LiveRun
from unalike.report.live_server import Feed
from unalike.report.metrics import format_metrics
from unalike.runs.explain import explain
from unalike.runs.export import export, trained
from unalike.runs.verify import verify
from unalike.tracking import follow

run_tiny = benchmark_module("faults").run_tiny
DEEP = 20_000
HUGE = 10**400


class Sink:
    """A tracker that takes everything."""

    def open(self, run):
        return set()

    def log(self, values, step):
        pass

    def close(self, files, finished):
        pass


def track(folder, other):
    assert follow.replay(folder, ["sink"], lambda text: None, lambda: False) == []


def compare(folder, other):
    result = report.compare([folder, other])
    report.show_comparison(result, Console(file=io.StringIO(), width=120))
    for form in report.FORMATS:
        report.format_comparison(result, form)


def watch(folder, other):
    Feed(LiveRun(folder, is_running=lambda: True)).page().encode()


COMMANDS = {
    "report": lambda folder, other: report.write(folder),
    "metrics": lambda folder, other: format_metrics(folder),
    "track": track,
    "watch": watch,
    "compare": compare,
    "verify": lambda folder, other: verify(folder),
    "trained": lambda folder, other: trained(folder),
    "export": lambda folder, other: export(folder, "ada", onnx=False),
    "explain": lambda folder, other: explain(folder, "0"),
}
REPORTS = ("report", "metrics", "track", "compare")
MODELS = ("trained", "export", "explain")

# Texts that are no JSON, no YAML, or neither of a run: what each command says of them.
WHOLE_FILES = {
    "deep lists": "[" * DEEP + "]" * DEEP,
    "deep values": '{"a":' * DEEP + "1" + "}" * DEEP,
    "no text": b"\xff\xfe\x00\x81",
    "zeros": bytes(100),
    "nothing": "",
    "null": "null",
    "a list": "[1]",
    "a number": "9" * 5000,
    "a word": '"run"',
    "half": '{"clients": {"ada": {"val',
}
# In place of a value at a path: what is not of its form.
WRONG_RESULTS = {
    "clients": [[1], {"ada": 1}, {"ada": None}, "ada", None],
    "clients.ada": [[1], 3, "x"],
    "clients.ada.metrics": [[1], 3],
    "clients.ada.bytes": [[1], {"up": "x"}, {"up": [1]}],
    "clients.ada.modalities": [3, {"a": 1}],
    "failures": [{}, [1], 3],
    "by_label": [[1], {"even": 3}],
    "sharing": [[1], {"heads": 3}, {"heads": [3]}, {"heads": [[{}]]}],
    "federation_metrics": [3, [[]], {"a": 1}],
    "scenario": [[1], {"a": 1}],
    "seed": [[1], {"a": 1}],
}
WRONG_CONFIG = {
    "clients": [3, [3], {"a": 1}, "x"],
    "training": [3, [1]],
    "training.rounds": ["x", [1]],
    "federation": [[1], 3],
    "algorithm": [[1], 3],
    "seed": [[1], {"a": 1}, HUGE],
    "name": [[1], {"a": 1}],
}
WRONG_EVENTS = [
    {"event": "start", "clients": [1]},
    {"event": "start", "clients": {"ada": 3}},
    {"event": "start", "config": 3},
    {"event": "evaluation", "round": [1], "values": {}},
    {"event": "evaluation", "round": 1, "values": [1]},
    {"event": "evaluation", "round": 1, "values": {"ada": [1]}},
    {"event": "evaluation", "round": 1, "values": {}, "figures": [1]},
    {"event": "note", "round": 1, "name": "x", "values": "x"},
    {"event": "round", "round": {}, "bytes": {"up": 1}},
    {"event": "round", "round": 1, "bytes": [1]},
    {"event": "failure", "client": [1]},
    {"event": "sharing", "groups": {"heads": 3}},
    {"event": "labels", "labels": 3},
    {"event": "labels", "labels": ["a", "b"], "counts": {"ada": [1]}},
    {"event": "labels", "labels": ["a", "b"], "together": [[1, 2]]},
    {"event": "labels", "labels": ["a"], "counts": {"ada": ["x"]}},
]


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Two finished runs, and one that was stopped."""
    folder = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNALIKE_CACHE", str(folder / "cache"))
        run_tiny(folder / "finished")
        run_tiny(folder / "other", seed=1)
        run_tiny(folder / "stopped", ("round", 3))
    for run in folder.iterdir():
        (run / "manifest.json").unlink(missing_ok=True)  # its sender can write another
    return folder


@pytest.fixture
def run(templates, tmp_path, monkeypatch):
    """A run that somebody sent."""
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(follow, "build_tracker", lambda name: Sink())
    return shutil.copytree(templates / "finished", tmp_path / "run")


def replace_at(value, path, new):
    *parents, last = path.split(".")
    value = changed = copy.deepcopy(value)
    for name in parents:
        value = value[name]
    value[last] = new
    return changed


def write_text(file, text):
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def refused(names, folder, other):
    """The sentence of each command, which must all end in one."""
    sentences = []
    for name in names:
        with pytest.raises(UserError) as refusal:
            COMMANDS[name](folder, other)
        sentences.append(str(refusal.value))
        assert "Traceback" not in sentences[-1]
    return sentences


@pytest.mark.parametrize("text", WHOLE_FILES.values(), ids=WHOLE_FILES)
def test_a_file_that_is_none_of_a_run_ends_commands_in_a_sentence(run, templates, text):
    for name, readers in (
        ("config.yaml", (*REPORTS, *MODELS, "watch")),
        ("results.json", (*REPORTS, *MODELS)),
    ):
        before = (run / name).read_bytes()
        write_text(run / name, text)
        for sentence in refused(readers, run, templates / "other"):
            assert name in sentence or "cut short" in sentence
        (run / name).write_bytes(before)


@pytest.mark.parametrize("name", ["manifest.json", "checkpoints/clients/ada/index.json"])
@pytest.mark.parametrize("text", WHOLE_FILES.values(), ids=WHOLE_FILES)
def test_hashes_that_are_none_end_commands_in_a_sentence(run, templates, name, text):
    write_text(run / name, text)
    readers = ("verify", "metrics") if name == "manifest.json" else ("trained",)
    for sentence in refused(readers, run, templates / "other"):
        assert "cannot be read" in sentence


@pytest.mark.parametrize("text", WHOLE_FILES.values(), ids=WHOLE_FILES)
def test_lines_that_are_none_are_left_out_of_events_and_ledger(run, templates, text):
    for name in ("events.jsonl", "ledger.csv"):
        with (run / name).open("ab") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
    for command in ("metrics", "track", "watch"):
        COMMANDS[command](run, templates / "other")


def cases(table):
    return [(path, value) for path, values in table.items() for value in values]


@pytest.mark.parametrize("path, value", cases(WRONG_RESULTS))
def test_results_of_another_form_end_commands_in_a_sentence(run, templates, path, value):
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(replace_at(results, path, value)))
    for sentence in refused((*REPORTS, *MODELS), run, templates / "other"):
        assert "results.json" in sentence and path.split(".")[0] in sentence


@pytest.mark.parametrize("path, value", cases(WRONG_CONFIG))
def test_a_config_of_another_form_ends_commands_in_a_sentence(run, templates, path, value):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(replace_at(config, path, value)))
    for sentence in refused((*REPORTS, *MODELS, "watch"), run, templates / "other"):
        assert path.split(".")[0] in sentence


@pytest.mark.parametrize("event", WRONG_EVENTS, ids=json.dumps)
def test_events_of_another_form_end_commands_in_a_sentence(run, templates, event):
    lines = len((run / "events.jsonl").read_text().splitlines())
    append_event(run / "events.jsonl", **event)
    for sentence in refused((*REPORTS, "watch"), run, templates / "other"):
        assert f"line {lines + 1}," in sentence


@pytest.mark.parametrize("value", ["2026-01-01", "!!set {a}", "!!binary aGk=", "{1: 2}", "1e999"])
def test_values_that_only_yaml_has_end_commands_in_a_sentence(run, templates, value):
    with (run / "config.yaml").open("a") as file:
        file.write(f"own: {value}\n")
    if value == "1e999":  # text, as YAML has it
        COMMANDS["metrics"](run, None)
        return
    assert all("own" in text for text in refused((*REPORTS, *MODELS), run, templates / "other"))


def test_a_model_that_no_machine_holds_is_not_built(run, templates):
    config = yaml.safe_load((run / "config.yaml").read_text())
    for path, value in (("hidden", [10**15]), ("width", 2**63)):
        client = config["clients"][0]
        changed = {**client, "model": {**client["model"], path: value}}
        changed_config = {**config, "clients": [changed, *config["clients"][1:]]}
        (run / "config.yaml").write_text(yaml.safe_dump(changed_config))
        assert all("no model" in text for text in refused(MODELS, run, None))
    many = [{**config["clients"][0], "count": 2**63}]
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "clients": many}))
    assert all("count" in text for text in refused(MODELS, run, None))


def test_a_site_or_a_run_from_python_without_its_settings_gives_a_sentence(run):
    for config in (
        {"python": True},
        {"python": True, "algorithm": {"name": "fedavg"}, "training": {"x": 1}, "seed": 0},
        {"client_file": "client.yaml"},
        {"client_file": [1], "about": {}, "algorithm": {"name": "fedavg"}},
    ):
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        refused(MODELS, run, None)


def test_a_yaml_file_nested_very_deep_does_not_end_the_process():
    """The loader written in C overflowed the stack."""
    for text in ("[" * 100_000, '{"a":' * 100_000, "".join(" " * n + "a:\n" for n in range(2000))):
        with pytest.raises(yaml.YAMLError, match="nested"):
            load_yaml(text)
    assert load_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)


def paths_of(value, path=()):
    """The path to each value inside a value."""
    if not isinstance(value, dict | list):
        return []
    paths = []
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        paths += [(*path, name), *paths_of(item, (*path, name))]
    return paths


NUMBERS = (True, -1, 1.5, HUGE, 2**63, 1e308, -1e308, float("nan"), float("inf"))
TEXTS = ("x", "", "\ud800", "a\x00b")
NESTED = ([], [1], [[]], {}, {"a": 1}, {"a": {"b": [1]}}, [{"a": 1}], {"ada": [1]})
VALUES = (None, *NUMBERS, *TEXTS, *NESTED)


@pytest.mark.parametrize("seed", range(3))
def test_any_value_in_any_place_gives_a_sentence_or_a_result(run, templates, seed):
    """Values at random in results, config and events, for commands that draw nothing."""
    draw = random.Random(seed)
    originals = {
        "results.json": json.loads((run / "results.json").read_text()),
        "config.yaml": yaml.safe_load((run / "config.yaml").read_text()),
    }
    lines = (run / "events.jsonl").read_text().splitlines()
    for _ in range(15):
        place = draw.randrange(len(lines))
        originals["events.jsonl"] = json.loads(lines[place])
        name = draw.choice(list(originals))
        changed = copy.deepcopy(originals[name])
        *parents, last = draw.choice(paths_of(changed))
        parent = changed
        for part in parents:
            parent = parent[part]
        if draw.random() < 0.1:
            del parent[last]
        else:
            parent[last] = draw.choice(VALUES)
        text = yaml.safe_dump(changed) if name == "config.yaml" else json.dumps(changed)
        if name == "events.jsonl":
            text = "\n".join([*lines[:place], text, *lines[place + 1 :]])
        before = (run / name).read_bytes()
        (run / name).write_text(text, errors="surrogatepass")
        for command in ("metrics", "track", "watch", "compare", "verify", "trained"):
            try:
                COMMANDS[command](run, templates / "other")
            except UserError as error:
                assert str(error)
            except Exception as error:
                raise AssertionError(f"{command}: {name} {[*parents, last]}") from error
        (run / name).write_bytes(before)


def test_what_a_run_writes_has_the_form(templates):
    for name in ("finished", "other", "stopped"):
        run = read(templates / name)
        assert run.unreadable == 0 and len(run.events) > 5
        assert not any(map(find_problem_in_event, run.events))
    assert find_problem_in_results(read(templates / "finished").results) is None


@pytest.mark.parametrize(
    "words",
    [
        ["report"],
        ["metrics"],
        ["watch"],
        ["track", "--to", "tensorboard"],
        ["compare"],
        ["verify"],
        ["export", "--client", "ada"],
        ["explain", "0"],
        ["audit"],
    ],
    ids=lambda words: words[0],
)
def test_commands_end_with_code_2_and_one_sentence(run, words, monkeypatch, capsys):
    (run / "config.yaml").write_text("[" * DEEP)
    verb, *more = words
    target = run / "config.yaml" if verb == "audit" else run
    monkeypatch.setattr(sys, "argv", ["unalike", verb, str(target), *more])
    if verb == "compare":
        sys.argv.append(str(run))
    if verb == "verify":  # of a run that is not finished
        (run / "results.json").unlink()
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        commands.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out
    assert err.startswith("unalike: ") and len(err.strip().splitlines()) == 1


def test_arrays_that_unfold_to_gigabytes_are_not_shown(run, monkeypatch):
    """A file of a few kilobytes may hold any number of zeros."""
    (run / "pictures").mkdir(exist_ok=True)
    numpy.savez_compressed(run / "pictures" / "weights-1.npz", matrix=numpy.zeros((1000, 1000)))
    assert "weights" in read(run).method_arrays()
    monkeypatch.setattr("unalike.report.folder.MAX_ARRAYS", 10**6)
    assert "weights" not in read(run).method_arrays()


@pytest.mark.parametrize("number", [1e99, -1e99, 0.5, -5])
def test_odd_numbers_are_drawn_or_left_out(run, templates, number):
    facts = {"round": number, "values": {"ada": {"accuracy": number}}}
    append_event(run / "events.jsonl", "evaluation", **facts, who="together", when="end")
    pairs = [[number, number], [number, -number]]
    counts = {"ada": pairs[0], "ben": pairs[1]}
    append_event(
        run / "events.jsonl", "labels", labels=["a", "b"], counts=counts, together=pairs,
        pairs={"ada": pairs},
    )  # fmt: skip
    append_event(run / "events.jsonl", "arrival", at=number, client="ada", round=number)
    results = json.loads((run / "results.json").read_text())
    results["clients"]["ada"] |= dict.fromkeys(("alone", "value", "gain", "samples"), number)
    results |= dict.fromkeys(("delta", "losers", "seconds", "clock", "rounds"), number)
    results["safeguard"] = {"delta": number, "losers": number}
    (run / "results.json").write_text(json.dumps(results))
    for command in ("report", "metrics", "watch", "compare"):
        COMMANDS[command](run, templates / "other")


def test_an_export_does_not_write_through_a_link(run, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    target = run / "exports" / "ada"
    target.mkdir(parents=True)
    (target / "README.md").symlink_to(mine)
    with pytest.raises(UserError, match="leads out"):
        export(run, "ada", onnx=False)
    assert mine.read_text() == "mine"
    (target / "README.md").unlink()
    target.rmdir()
    target.symlink_to(tmp_path)
    with pytest.raises(UserError, match="leads out"):
        export(run, "ada", onnx=False)


def test_a_manifest_that_names_files_elsewhere_opens_none_of_them(run):
    for name in ("../../mine", "/etc/hostname"):
        manifest = {name: {"bytes": 4, "sha256": "x"}}
        (run / "manifest.json").write_text(json.dumps(manifest))
        problems, _ = verify(run)
        assert len(problems) == 1 and "outside" in problems[0]


def test_an_exported_folder_that_is_damaged_gives_a_sentence(run, tmp_path):
    export(run, "ada", tmp_path / "out", onnx=False)
    config = tmp_path / "out" / "unalike.json"
    whole = config.read_text()
    assert unalike.rebuild(tmp_path / "out") is not None
    for text in (*WHOLE_FILES.values(), '{"client": 3, "scenario": {}}', '{"client": "ada"}'):
        write_text(config, text)
        with pytest.raises(UserError):
            unalike.rebuild(tmp_path / "out")
    config.write_text(whole)
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="no model"):
        unalike.rebuild(tmp_path / "out")
