"""The command `unalike`. Reads words, calls the rooms, prints; every import that takes time waits until it is needed."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change any part of the scenario; dotted path, or a bare field name.",
    ),
]
DataDir = Annotated[str | None, typer.Option(envvar="UNALIKE_DATA", help="Where datasets lie.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as one line of JSON, last.")]


def version(wanted: bool) -> None:
    if wanted:
        from unalike.base.version import __version__

        typer.echo(f"unalike {__version__}")
        raise typer.Exit


@app.callback()
def unalike(
    wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=version, is_eager=True, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """Federated learning for clients that are nothing alike."""


@app.command()
def run(
    scenario: Annotated[str, typer.Argument(help="A shipped scenario or a YAML file.")],
    algorithm: Annotated[
        str | None, typer.Option(help="Another method than the scenario's.")
    ] = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Number all randomness comes from.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="What carries the calls: local, ray, flare, flower.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Hear clients in the order of this asynchronous run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Processes of the local engine that keep the clients; 0: this one."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of this process.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    alone: Annotated[
        bool, typer.Option("--alone/--no-alone", help="Train every client alone too, to compare.")
    ] = True,
    safeguard: Annotated[
        bool, typer.Option("--safeguard", help="Let each client keep what its own data speak for.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a scenario and show what each client gained."""
    from functools import partial

    from unalike.report.progress import progress
    from unalike.runs import run_scenario
    from unalike.runs.compatibility import scenario_problems
    from unalike.scenarios import load

    made, method = load(
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
    )
    with progress(quiet=as_json) as watch:
        results, _ = run_scenario(
            made, method, out=out, data_dir=data_dir, source=scenario, watch=watch
        )
    tell(results, as_json)


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    as_json: Json = False,
) -> None:
    """Go on with a run that was stopped, from its last finished round."""
    from unalike import runs
    from unalike.report.progress import progress

    with progress(quiet=as_json) as watch:
        results = runs.resume(path, watch)
    tell(results, as_json)


@app.command(name="list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="One of these kinds, with its fields and defaults, targets or options."
        ),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Scenarios, algorithms, datasets, models and benches there are."""
    from unalike.cli.lists import show

    show(what, data_dir)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A scenario file, or a shipped scenario's name.")],
    settings: Settings = None,
    data_dir: DataDir = None,
) -> None:
    """Every problem of a scenario at once."""
    from functools import partial

    from unalike.runs import prepare
    from unalike.runs.compatibility import scenario_problems
    from unalike.scenarios import load

    scenario, algorithm = load(file, None, settings, partial(scenario_problems, folder=data_dir))
    clients = prepare(scenario, algorithm, None, data_dir, file).plan.clients
    counts = [
        f"{count} {what}{'s' * (count != 1)}"
        for count, what in ((len(clients), "client"), (scenario.training.rounds, "round"))
    ]
    typer.echo(f"{file} is fine: {counts[0]}, {type(algorithm).__name__}, {counts[1]}.")


@app.command()
def audit(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Your client.yaml; or a scenario, shipped or a YAML file."
        ),
    ],
    algorithm: Annotated[
        str | None, typer.Option(help="The method; another than the scenario's.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO", help="With a client.yaml: the scenario its server runs."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only of this client; may be repeated.")
    ] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """What a client would send and be sent, to the byte, by a rehearsal: each operation is done once."""
    from functools import partial

    from unalike.base.errors import UserError
    from unalike.cli.audit import show
    from unalike.runs import prepare
    from unalike.runs.audit import audit as rehearse
    from unalike.runs.audit import audit_client_file
    from unalike.runs.compatibility import scenario_problems
    from unalike.scenarios import load
    from unalike.scenarios.client_config import describes_client

    if describes_client(file):
        if client:
            raise UserError(f"{file} describes one client: leave --client out")
        found = audit_client_file(Path(file), run, algorithm, settings)
    elif run is not None:
        raise UserError(f"--run goes with a client.yaml, and {file} is a scenario: leave it out")
    else:
        scenario, method = load(
            file, algorithm, settings, partial(scenario_problems, folder=data_dir)
        )
        found = rehearse(prepare(scenario, method, None, data_dir, file).plan, client)
    if as_json:
        print_json(found)
    else:
        show(found)


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Runs side by side, paired over seeds, with confidence intervals."""
    from unalike import report

    result = report.compare(paths)
    if as_json:
        print_json(result)
    else:
        report.show_comparison(result)


@app.command()
def report(path: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    """Write a run's report.html again."""
    from unalike.report import write

    typer.echo(write(path))


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN")],
    client: Annotated[str, typer.Option(help="Whose model.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx/--no-onnx", help="Also write ONNX, where the model exports.")
    ] = True,
) -> None:
    """A client's model to take home: safetensors, a config that rebuilds it, ONNX."""
    from unalike.runs.export import export as write

    for line in write(path, client, out, onnx):
        typer.echo(line)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(metavar="RUN")],
    image: Annotated[str, typer.Argument(help="A file, or the number of a test image.")],
    client: Annotated[
        str | None, typer.Option(help="Whose model; the first client's if not said.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many labels.")] = 3,
    out: Annotated[Path | None, typer.Option(help="The picture's file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """What a trained model sees on an image; with FedMPT also where, and under which conditions."""
    from unalike.runs.explain import explain as explained

    told = explained(path, image, client, top, out)
    if as_json:
        print_json(told)
        return
    if "there" in told:
        typer.echo(f"{'there':12}{', '.join(told['there']) or 'none'}")
    for key in ("labels", "conditions"):
        for name, share in told.get(key, {}).items():
            typer.echo(
                f"{key if name == next(iter(told[key])) else '':12}{name:24}{100 * share:5.1f} %"
            )
    if "picture" in told:
        typer.echo(told["picture"])


@app.command()
def deploy(
    engine: Annotated[str, typer.Argument(help="flower")],
    scenario: Annotated[
        str,
        typer.Argument(
            help="A shipped scenario or a YAML file; its clients are played, one SuperNode each."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients reach the SuperLink.")
    ] = "127.0.0.1:9092",
    settings: Settings = None,
) -> None:
    """Write what a federation needs: the app, certificates, keys, configuration and the exact commands."""
    from unalike.cross_silo.flower_deploy import prepare

    for line in prepare(engine, scenario, out, address, settings):
        typer.echo(line)


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="The startup kit FLARE's administrator gave you.")],
    client: Annotated[
        Path | None, typer.Argument(help="Your client.yaml; none with the server's kit.")
    ] = None,
) -> None:
    """Take part in a FLARE federation, with your client or as its server, until Ctrl-C."""
    from unalike.cross_silo.flare_kits import join as begin
    from unalike.engines import engine_class

    engine_class("flare")  # or it says what to install
    begin(kit, client)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="One of those in `unalike list`.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, to see that it works.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Only rows with this word in their name; may be repeated."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="SEEDS", help="Such as 0-4 or 100,101.")
    ] = None,
    settings: Settings = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Folder where finished runs stay, so that a bench that was cut off goes on."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    data_dir: Annotated[
        str | None, typer.Option(envvar="UNALIKE_DATA", help="Where datasets lie.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("results"),
) -> None:
    """Make a number again: runs a bench and writes its JSON. Where it is made of runs, the options say which and how."""
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
        Path | None, typer.Option(help="File for the weights; without it they are only judged.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    seed: Annotated[int, typer.Option(help="Number all randomness comes from.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a small model that sees and reads, and say how good it is."""
    from unalike.base.errors import UserError, unknown_name
    from unalike.models.train_vlm import train_small, train_tiny

    if model not in ("small", "tiny"):
        raise UserError(unknown_name("model to train", model, ("small", "tiny")))
    result = (
        train_tiny(out, seed=seed)
        if model == "tiny"
        else train_small(data_dir, out, device, seed=seed)
    )
    if as_json:
        print_json(result)
        return
    for about, numbers in result.items():
        if isinstance(numbers, dict):
            told = (
                {k: v for k, v in numbers.items()}
                if not all(isinstance(v, dict) for v in numbers.values())
                else {f"{name}, {k}": v for name, each in numbers.items() for k, v in each.items()}
            )
            typer.echo(f"{about}: " + ", ".join(f"{k} {v:.1f}" for k, v in told.items()))


@app.command()
def conditions(
    classes: Annotated[str, typer.Option(help="Names with commas between.")],
    endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="An OpenAI-compatible server, up to /v1; its key in UNALIKE_API_KEY.",
        ),
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="The model that server has.")],
    count: Annotated[int, typer.Option(min=1, help="How many conditions.")] = 5,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="YAML file, with where they come from.")] = None,
) -> None:
    """Ask a language model under which conditions classes go together (FedMPT has a list of its own for want of one)."""
    from unalike.base.errors import UserError
    from unalike.models.conditions import query_conditions, write_conditions

    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {out.parent} to write {out.name} to: make it first")
    made = query_conditions(
        classes.split(","),
        endpoint,
        model,
        count,
        timeout,
        watch=lambda line: typer.echo(line, err=True),
    )
    if out is not None:
        write_conditions(out, made)
    for name in made["conditions"]:
        typer.echo(name)


def tell(results: dict, as_json: bool) -> None:
    from unalike.report import show

    if as_json:
        print_json(results)
        return
    show(results)


def print_json(value: dict) -> None:
    import json

    sys.stdout.write(json.dumps(value) + "\n")


def main() -> None:
    """Exit code 2 and one sentence for the user's mistakes, 1 where a run could not go on."""
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # threads that wait for each other sleep: on busy cores four times as fast
    from unalike.base.errors import Interrupted

    try:
        app()
    except ValueError as error:  # UserError and what the rooms say of bad input
        fail(error, 2)
    except (RuntimeError, OSError) as error:  # quorum lost, worker died, disk full, Ctrl-C
        fail(error, 130 if isinstance(error, Interrupted) else 1)


def fail(error: Exception, code: int) -> None:
    if os.environ.get("UNALIKE_DEBUG"):
        raise error
    from unalike.base.errors import describe_error

    said = describe_error(error) if isinstance(error, OSError) else error
    typer.echo("\n".join([f"unalike: {said}", *getattr(error, "__notes__", [])]), err=True)
    sys.exit(code)
