"""The commands of `unalike`: each reads its options, calls the package and prints the result.

Imports that take time are inside the functions, so that `unalike --help` stays fast.
"""

import atexit
import errno
import gc
import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from unalike.base.interrupts import exit_on_interrupt, raise_on_interrupt
from unalike.engines import ENGINES

INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def enable_debug(enabled: bool) -> None:
    """Set UNALIKE_DEBUG, which worker processes inherit."""
    if enabled:
        os.environ["UNALIKE_DEBUG"] = "1"


def print_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        from unalike.base.version import __version__

        typer.echo(f"unalike {__version__}")
        raise typer.Exit


ScenarioName = Annotated[str, typer.Argument(help="A shipped scenario or a YAML file.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Method = Annotated[str | None, typer.Option(help="Use this method instead of the scenario's.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a field of the scenario: a dotted path, or a field's name. Repeatable.",
    ),
]
DataDir = Annotated[str | None, typer.Option(envvar="UNALIKE_DATA", help="Folder of the datasets.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Import code that the run's folder names; it then runs on this machine."
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Serve the run's page on this machine while it goes on.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=enable_debug,
        help="Stop at the first exception and show its traceback.",
    ),
]


@app.callback()
def unalike(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Federated learning for clients with different models, tasks, labels or compute."""


@app.command()
def run(
    scenario: ScenarioName,
    algorithm: Method = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    engine: Annotated[
        str | None, typer.Option(help=f"Where clients run: {', '.join(ENGINES)}.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Repeat the order of replies of an asynchronous run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes of the local engine for clients; 0: this process."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of this process.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone/--no-alone", help="Also train each client alone, as the baseline."),
    ] = True,
    safeguard: Annotated[
        bool,
        typer.Option(
            "--safeguard",
            help="Each client keeps the local or the federated model, by cross-validation.",
        ),
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Also write to tensorboard, mlflow, wandb or trackio. Repeatable."),
    ] = None,
    watch: Watch = False,
    report: Annotated[
        bool,
        typer.Option("--report/--no-report", help="Draw report.html; `unalike report` does later."),
    ] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a scenario and show each client's gain over training alone."""
    from functools import partial

    from unalike.cli.live import live_page
    from unalike.report.progress import progress
    from unalike.runs import run_scenario
    from unalike.runs.compatibility import scenario_problems
    from unalike.scenarios import load

    loaded, method = load(
        scenario,
        algorithm,
        settings,
        partial(scenario_problems, folder=data_dir),
        seed=seed,
        engine=engine,
        replay=replay and str(replay),
        workers=workers,
        threads=threads,
        device=device,
        dtype=dtype,
        alone=None if alone else False,
        safeguard=safeguard or None,
        track=track or None,
    )
    with progress(quiet=as_json) as show, live_page(show, watch) as show_all:
        results, path = run_scenario(
            loaded,
            method,
            out=out,
            data_dir=data_dir,
            source=scenario,
            watch=show_all,
            report=report,
        )
    if report or as_json:
        print_results(results, as_json)
    else:
        print_results({**results, "folder": None}, as_json)
        typer.echo(f"No report was drawn: `unalike report {path}` does.")


@app.command()
def resume(
    path: RunFolder,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Go on although code, versions or threads are not those the run began with.",
        ),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Let a finished run go on until it has so many rounds in all."),
    ] = None,
    watch: Watch = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Resume a stopped run from its last finished round."""
    from unalike import runs
    from unalike.cli.live import live_page
    from unalike.report.progress import progress

    with progress(quiet=as_json) as show, live_page(show, watch) as show_all:
        results = runs.resume(path, show_all, accept_changes=accept_changes, rounds=rounds)
    print_results(results, as_json)


@app.command()
def track(
    path: RunFolder,
    to: Annotated[
        list[str], typer.Option(help="tensorboard, mlflow, wandb or trackio. Repeatable.")
    ],
) -> None:
    """Write a run to a tracker, from its events; one that is running, until it ends."""
    from unalike.base.lock import is_locked
    from unalike.tracking import check_trackers
    from unalike.tracking.follow import replay

    failed = replay(
        path,
        check_trackers(to),
        tell=lambda text: typer.echo(f"unalike: {text}", err=True),
        is_running=lambda: is_locked(path),
    )
    if failed:
        raise typer.Exit(1)
    typer.echo(f"{path} is in {', '.join(to)}.")


@app.command()
def watch(
    path: RunFolder,
    host: Annotated[
        str,
        typer.Option(help="Address to listen at; by default only this machine reaches it."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Default: one that follows from the folder."),
    ] = None,
    leash: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve the page of a run, which goes on by itself while the run does, until Ctrl-C.

    It does not matter who works on the run, or on which engine; a run that was stopped and is
    resumed goes on there.
    """
    raise_on_interrupt()
    from unalike.base.lock import is_locked
    from unalike.cli.live import page_token
    from unalike.report.live_run import LiveRun
    from unalike.report.live_server import is_loopback, serve

    token = page_token(path) if is_loopback(host) else None
    live = LiveRun(path, is_running=lambda: is_locked(path), own=leash)
    tell = lambda url: typer.echo(url if leash else f"{path} is shown at {url} until Ctrl-C.")
    serve(live, host, port, tell, sys.stdin.buffer if leash else None, token)


@app.command()
def sweep(
    scenario: ScenarioName,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=V,V",
            help="Values to try, such as lr=0.001,0.003; with --trials also a range, "
            "lr=0.0001..0.1. Repeatable.",
        ),
    ],
    seeds: Annotated[str, typer.Option(help="Seeds for choosing, such as 0-2.")] = "0",
    report_seeds: Annotated[
        str | None,
        typer.Option(help="Seeds for the best one's result. Default: as many that follow."),
    ] = None,
    by: Annotated[
        str,
        typer.Option(help="Choose by value (of all clients), or delta (gain over each run's own)."),
    ] = "value",
    trials: Annotated[
        int | None,
        typer.Option(min=2, help="Search with so many trials (Optuna) instead of the whole grid."),
    ] = None,
    algorithm: Method = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs in parallel.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for all runs. Default: sweeps/SCENARIO.")
    ] = None,
    device: Device = "cpu",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Try settings, choose the best, and run it on other seeds. Started again, it goes on."""
    raise_on_interrupt()
    from unalike.cli.sweep import show
    from unalike.runs.sweep import Sweep, parse_seeds

    made = Sweep(
        scenario=scenario,
        grid=settings,
        keep=keep or Path("sweeps") / Path(scenario).stem,
        seeds=parse_seeds(seeds),
        report_seeds=parse_seeds(report_seeds) if report_seeds else None,
        by=by,
        algorithm=algorithm,
        jobs=jobs,
        trials=trials,
        options=["--device", device, *(["--data-dir", data_dir] if data_dir else [])],
        tell=lambda line: typer.echo(line, err=True),
    )
    try:
        result = made.run()
    except KeyboardInterrupt:
        from unalike.base.errors import Interrupted

        raise Interrupted(
            f"stopped. Finished runs are in {made.keep}: the same command goes on with them."
        ) from None
    if as_json:
        print_json(result)
    else:
        show(result, made.keep)


@app.command()
def verify(path: RunFolder) -> None:
    """Check that all files of a run are as it wrote them, by their hashes."""
    from unalike.runs.verify import verify as verify_run

    problems, files = verify_run(path)
    for problem in problems:
        typer.echo(f"unalike: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{path} is as it was written: {_count(files, 'file')}.")


@app.command(name="list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="Only this kind, with details: fields of algorithms, targets and options of "
            "datasets, options of models."
        ),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """List the scenarios, algorithms, datasets, models, tasks and benchmarks there are."""
    from unalike.cli.lists import show

    show(kind, data_dir)


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="method, scenario or client.")],
    name: Annotated[str, typer.Argument(help="A name of your own, such as fedmine.")],
) -> None:
    """Write a commented template that runs: a method, a scenario or a client.yaml."""
    from unalike.cli.new import write_template

    for line in write_template(kind, name):
        typer.echo(line)


@app.command()
def check(
    file: ScenarioName,
    settings: Settings = None,
    engine: Annotated[
        str | None, typer.Option(help=f"The engine it will be run with: {', '.join(ENGINES)}.")
    ] = None,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Check a scenario without running it, and show all its problems at once.

    A scenario without clients is one of several organisations, which bring their own.
    """
    from functools import partial

    from unalike.runs import prepare
    from unalike.runs.compatibility import scenario_problems
    from unalike.scenarios import load, load_mapping

    described = load_mapping(file)
    if engine is None and not {"engine", "clients", "data"} & described.keys():
        engine = "flare" if find_spec("nvflare") else "flower"
    scenario, algorithm = load(
        file, None, settings, partial(scenario_problems, folder=data_dir), engine=engine
    )
    clients = prepare(scenario, algorithm, None, data_dir, file).plan.clients
    clients_text = _count(len(clients), "client") if clients else "clients bring themselves"
    rounds_text = _count(scenario.training.rounds, "round")
    typer.echo(f"{file} is fine: {clients_text}, {type(algorithm).__name__}, {rounds_text}.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@app.command()
def audit(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Your client.yaml; or a scenario, shipped or a file."),
    ],
    algorithm: Annotated[
        str | None,
        typer.Option(help="The method; with a scenario: instead of the scenario's."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO", help="With a client.yaml: the scenario its server runs."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this client. Repeatable.")
    ] = None,
    settings: Settings = None,
    engine: Annotated[
        str | None, typer.Option(help="With a client.yaml: the engine its server uses.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write it as a page in plain words to sign: Markdown, or HTML for *.html.",
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show what a client would send and receive, to the byte, by doing each operation once."""
    from functools import partial

    from unalike.base.errors import UserError
    from unalike.cli.audit import show
    from unalike.cli.audit_page import check_page, write_page
    from unalike.runs import prepare
    from unalike.runs.audit import audit as audit_run
    from unalike.runs.audit import audit_client_file
    from unalike.runs.compatibility import scenario_problems
    from unalike.scenarios import load
    from unalike.scenarios.client_config import describes_client

    if page is not None:
        check_page(page)
    if describes_client(file):
        if client:
            raise UserError(f"{file} describes one client: leave --client out")
        result = audit_client_file(Path(file), run, algorithm, settings, engine)
    elif run is not None:
        raise UserError(f"--run goes with a client.yaml, and {file} is a scenario: leave it out")
    else:
        scenario, method = load(
            file, algorithm, settings, partial(scenario_problems, folder=data_dir)
        )
        result = audit_run(prepare(scenario, method, None, data_dir, file).plan, client)
    if page is not None:
        typer.echo(write_page(page, result), err=as_json)
    if as_json:
        print_json(result)
    elif page is None:
        show(result)


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="One baseline for all, such as local: a method among the runs. Default: each "
            "run's own local baseline.",
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="table, markdown, latex, csv or json.")] = "table",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw curves: .pdf, .svg or .png.")
    ] = None,
    label_metric: Annotated[
        str,
        typer.Option(
            metavar="METRIC",
            help="Of each label of multi-label clients: f1, auc, average_precision, precision "
            "or recall.",
        ),
    ] = "f1",
    as_json: Json = False,
) -> None:
    """Compare runs, paired over seeds, with confidence intervals.

    Runs of several scenarios are ranked, with the tests of Friedman and Nemenyi.
    """
    from unalike import report
    from unalike.base.errors import UserError, unknown_name

    formats = ("table", "json", *report.FORMATS)
    if format not in formats:
        raise UserError(unknown_name("format", format, formats))
    if len({report.read(path).scenario for path in paths}) > 1:
        if plot is not None:
            raise UserError("--plot draws the curves of one scenario: give runs of one")
        show_ranks(paths, against, "json" if as_json else format)
        return
    result = report.compare(paths, against)
    if plot is not None:
        report.plot_comparison(result, plot)
    if as_json or format == "json":
        print_json(result)
    elif format == "table":
        report.show_comparison(result, label_metric=label_metric)
    else:
        typer.echo(report.format_comparison(result, format, label_metric), nl=False)


def show_ranks(paths: list[Path], against: str | None, format: str) -> None:
    """Print ranks of methods over several scenarios."""
    from unalike.report.comparison_formats import format_rows
    from unalike.report.ranks import describe_ranks, rank_methods, rank_rows

    result = rank_methods(paths, against)
    if format == "json":
        print_json(result)
    else:
        typer.echo(format_rows(rank_rows(result), describe_ranks(result), format), nl=False)


@app.command()
def cite(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="Names from `unalike list`.")
    ],
) -> None:
    """Print the BibTeX entries of methods' papers."""
    from unalike.cli.cite import bibliography

    typer.echo(bibliography(methods), nl=False)


@app.command(name="suggest")
def suggest_method(
    file: ScenarioName,
    data_dir: DataDir = None,
    methods: Annotated[int, typer.Option(help="How many methods to show.")] = 5,
    join: Annotated[
        bool,
        typer.Option(
            "--join",
            help="Also measure, before any training, what each client may hope for: labels in "
            "common, fit of the encoders, nearness of the public set.",
        ),
    ] = False,
) -> None:
    """Say which methods suit a scenario, judged by our own tables, and which do not fit it."""
    from unalike.cli.suggest import print_advice, print_prospects
    from unalike.runs.prospects import prospects
    from unalike.runs.suggest import suggest

    print_advice(suggest(file, data_dir), methods)
    if join:
        print_prospects(prospects(file, data_dir))


@app.command()
def report(path: RunFolder) -> None:
    """Write a run's report.html again."""
    from unalike.report import write

    typer.echo(write(path))


@app.command()
def metrics(
    path: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write them there, whole, instead of printing them."),
    ] = None,
) -> None:
    """Print a run's rounds, clients, bytes and seconds in the text format of Prometheus."""
    from unalike.base.integrity import write_whole
    from unalike.report.metrics import format_metrics

    text = format_metrics(path)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text.encode())
        out.chmod(0o644)


@app.command()
def export(
    path: RunFolder,
    client: Annotated[str, typer.Option(help="Id of the client whose model is exported.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx/--no-onnx", help="Also write ONNX, if the model supports it.")
    ] = True,
    trust: Trust = False,
) -> None:
    """Export a client's model: safetensors, a config that rebuilds it, and ONNX."""
    from unalike.runs.export import export as write

    for line in write(path, client, out, onnx, trust=trust):
        typer.echo(line)


@app.command()
def explain(
    path: RunFolder,
    image: Annotated[str, typer.Argument(help="An image file, or the number of a test image.")],
    client: Annotated[
        str | None, typer.Option(help="Id of the client whose model is used; default: the first.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of labels.")] = 3,
    out: Annotated[Path | None, typer.Option(help="File for the picture.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Show a model's predictions on an image; with FedMPT also attention maps and conditions."""
    from unalike.runs.explain import explain as explain_image

    result = explain_image(path, image, client, top, out, trust)
    if as_json:
        print_json(result)
        return
    if "there" in result:
        typer.echo(f"{'true labels':12}{', '.join(result['there']) or 'none'}")
    for key in ("labels", "conditions"):
        title = key
        for name, share in result.get(key, {}).items():
            typer.echo(f"{title:12}{name:24}{100 * share:5.1f} %")
            title = ""
    if "picture" in result:
        typer.echo(result["picture"])


@app.command()
def deploy(
    engine: Annotated[str, typer.Argument(help="flower or flare")],
    scenario: Annotated[
        str | None,
        typer.Argument(help="A shipped scenario or a YAML file; each of its clients is a site."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where clients reach the server. Default: a port of this machine, for them alone.",
        ),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(metavar="ID,ID", help="FLARE: sites that get a startup kit."),
    ] = None,
    settings: Settings = None,
    renew: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Only renew certificates of this deployment, or add clients."
        ),
    ] = None,
) -> None:
    """Write what a federation of organisations starts from: certificates, keys and commands."""
    from unalike.base.errors import UserError, unknown_name
    from unalike.cross_silo import flower_deploy

    if engine not in ("flower", "flare"):
        raise UserError(unknown_name("engine to deploy", engine, ["flower", "flare"]))
    if engine == "flower" and clients is not None:
        raise UserError(
            "--clients is FLARE's: with Flower each client makes its own key, and the README that "
            "deploy writes says how it is registered"
        )
    sites = [id.strip() for id in (clients or "").split(",") if id.strip()]
    if renew is not None:
        if scenario is not None or out is not None:
            raise UserError("--renew FOLDER goes alone: leave the scenario and --out out")
        from unalike.cross_silo import flare_deploy

        done = (
            flower_deploy.renew(renew) if engine == "flower" else flare_deploy.renew(renew, sites)
        )
        typer.echo(done)
        return
    if scenario is None or out is None:
        raise UserError("deploy needs a scenario and --out FOLDER; or --renew FOLDER")
    if engine == "flower":
        written = flower_deploy.prepare(scenario, out, address or "127.0.0.1:9092", settings)
    else:
        from unalike.cross_silo import flare_deploy

        written = flare_deploy.prepare(scenario, out, address or "localhost:8002", sites, settings)
    for line in written:
        typer.echo(line)


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="The startup kit from FLARE's administrator.")],
    client: Annotated[
        Path | None, typer.Argument(help="Your client.yaml; leave it out with a server's kit.")
    ] = None,
    check_only: Annotated[
        bool, typer.Option("--check", help="Only check whether everything is ready.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO", help="With --check: the scenario its server runs."),
    ] = None,
) -> None:
    """Join a FLARE federation as a client or as its server, until Ctrl-C."""
    raise_on_interrupt()
    from unalike.cross_silo.flare_kits import join as join_federation
    from unalike.engines import engine_class

    if check_only:
        check_site(kit, client, run)
        return

    engine_class("flare")  # raises a UserError if FLARE is not installed
    join_federation(kit, client)


def check_site(kit: Path, client: Path | None, run: str | None) -> None:
    """Print what `unalike join --check` finds; exit with 1 where something is not ready."""
    from unalike.base.errors import UserError
    from unalike.cross_silo.preflight import preflight

    if client is None:
        raise UserError("--check looks at a client: give its client.yaml, too")
    findings = preflight(kit, client, run)
    for finding in findings:
        mark = "ok" if finding.fine else "PROBLEM"
        typer.echo(f"{mark:8}{finding.subject:13}{finding.text}")
    if not all(finding.fine for finding in findings):
        raise typer.Exit(1)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="A benchmark from `unalike list`.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small version, as a test.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Only rows with this word in their name. Repeatable."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="SEEDS", help="Such as 0-4 or 100,101.")
    ] = None,
    settings: Settings = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Folder for finished runs, so that a stopped benchmark can go on."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs in parallel.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after so long; what is finished by then is written."),
    ] = None,
    device: Device = "cpu",
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("results"),
) -> None:
    """Run a benchmark and write its results as JSON.

    Seed, device and row options apply to benchmarks made of runs.
    """
    raise_on_interrupt()
    from unalike.cli.benchmarks import benchmark_module

    benchmark_module("runner").run(
        name,
        out,
        seeds,
        quick=quick,
        only=tuple(only or ()),
        settings=tuple(settings or ()),
        jobs=jobs,
        device=device,
        keep=keep,
        minutes=minutes,
        data_dir=data_dir,
    )


@app.command(name="train-vlm")
def train_vlm(
    model: Annotated[
        str,
        typer.Argument(
            help="small (Flickr8k; EfficientNet-lite0 and MiniLM) or tiny (scenes of digits)."
        ),
    ] = "small",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the weights; without it they are not saved.")
    ] = None,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a small vision-language model and evaluate it."""
    from unalike.base.errors import UserError, unknown_name
    from unalike.models.train_vlm import train_small, train_tiny

    if model not in ("small", "tiny"):
        raise UserError(unknown_name("model to train", model, ("small", "tiny")))
    if model == "tiny":
        result = train_tiny(out, seed=seed)
    else:
        result = train_small(data_dir, out, device, seed=seed)
    if as_json:
        print_json(result)
        return
    for title, numbers in result.items():
        if isinstance(numbers, dict):
            texts = [f"{name} {value:.1f}" for name, value in _flatten(numbers).items()]
            typer.echo(f"{title}: " + ", ".join(texts))


def _flatten(numbers: dict[str, Any]) -> dict[str, float]:
    """`{"a": {"b": 1}}` as `{"a, b": 1}`; a flat dict as it is."""
    flat: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            flat |= {f"{name}, {inner}": number for inner, number in value.items()}
        else:
            flat[name] = value
    return flat


@app.command()
def conditions(
    classes: Annotated[str, typer.Option(help="Class names, separated by commas.")],
    endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="An OpenAI-compatible server, up to /v1; its key in UNALIKE_API_KEY.",
        ),
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="Model on that server.")],
    count: Annotated[int, typer.Option(min=1, help="Number of conditions.")] = 5,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="YAML file for the conditions and their source.")
    ] = None,
) -> None:
    """Generate FedMPT's condition names with a language model.

    Without this FedMPT uses five built-in ones.
    """
    from unalike.base.errors import UserError
    from unalike.models.conditions import query_conditions, write_conditions

    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {out.parent} to write {out.name} to: create it first")
    result = query_conditions(
        classes.split(","),
        endpoint,
        model,
        count,
        timeout,
        watch=lambda line: typer.echo(line, err=True),
    )
    if out is not None:
        write_conditions(out, result)
    for name in result["conditions"]:
        typer.echo(name)


def print_results(results: dict[str, Any], as_json: bool) -> None:
    """Print the results of a run as a table or as one line of JSON."""
    from unalike.report import show

    if as_json:
        print_json(results)
    else:
        show(results)


def print_json(value: dict[str, Any]) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


def main() -> None:
    """Run the command.

    Recognised errors become one sentence: the user's mistakes with exit code 2, runs that cannot
    go on with code 1, Ctrl-C with code 130. All other exceptions are bugs, ours or in the user's
    code, and keep their traceback.
    """
    # Threads that wait for others sleep instead of spinning: four times as fast on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    exit_on_interrupt()
    from unalike.base.errors import Interrupted, RunError, UserError, describe_error
    from unalike.base.logs import configure_logging

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: runs end in order
    # Garbage of a process that ends is not collected: with torch that takes half a second.
    atexit.register(gc.freeze)
    try:
        configure_logging()
        app()
    except UserError as error:
        exit_with(error, str(error), 2)
    except RunError as error:
        exit_with(error, str(error), INTERRUPTED if isinstance(error, Interrupted) else 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        exit_with(error, describe_error(error), 1)
    finally:
        raise_on_interrupt()


def exit_with(error: Exception, sentence: str, code: int) -> None:
    """Print a sentence and the error's notes, and exit; with UNALIKE_DEBUG raise the error."""
    from unalike.base.logs import ROOT, logs_json
    from unalike.report.formatting import replace_unprintable

    if os.environ.get("UNALIKE_DEBUG"):
        raise error
    lines = [f"unalike: {sentence}", *getattr(error, "__notes__", [])]
    text = "\n".join(replace_unprintable(line) for line in "\n".join(lines).split("\n"))
    if logs_json():
        ROOT.error(text, extra={"facts": {"code": code}})
    else:
        typer.echo(text, err=True)
    sys.exit(code)
