"""Trained models of a run: as modules, and as files. Rebuilds the clients from the run's folder."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from unalike.base.errors import Problems, RunError, UserError, describe_error, unknown_name
from unalike.base.json_text import parse_json
from unalike.base.record import FLAG, TEXT, WHOLE, Form, find_problem_in_config, mapping, required
from unalike.base.registry import without_imports
from unalike.base.settings import to_problem
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.core.lazy_clients import LazyClients
from unalike.core.program import ClientProgram, hash_model
from unalike.data.samples import Samples
from unalike.engines.store import Store, quote
from unalike.models.frozen import including_frozen
from unalike.report.folder import check_inside
from unalike.runs.model_card import model_card
from unalike.runs.model_files import HEAD, read_weights, write_weights
from unalike.runs.plan import plan_from_dict
from unalike.runs.run_folder import Folder
from unalike.scenarios import build_clients, parse_scenario
from unalike.scenarios.client_config import load_client
from unalike.scenarios.validate import parse_algorithm
from unalike.training.loop import Training

CONFIG = "unalike.json"
EXPORTED = required(client=TEXT, scenario=mapping())  # what it holds
# Configs of a run started from Python, and of what a site keeps of a run.
PYTHON_RUN = required(algorithm=required(name=TEXT), training=mapping(), seed=WHOLE)
SITE_RUN = required(
    algorithm=required(name=TEXT),
    training=mapping(),
    seed=WHOLE,
    guarded=FLAG,
    client_file=TEXT,
    about=mapping(),
)
BuildProgram = Callable[[], ClientProgram]


def trained(
    run: str | Path,
    clients: Iterable[Client] | None = None,
    algorithm: Algorithm | None = None,
    trust: bool = False,
) -> dict[str, nn.Module]:
    """Return the trained models of a run by client, on the CPU and in eval mode.

    Each model goes from input to the task's output.

    Args:
        run: the run's folder.
        clients: of a run from Python, made as they were for it. Some of them give the models of
            these. Not needed for a scenario.
        algorithm: needed only where the method is your own.
        trust: import what the folder names as `module:name`. Its code then runs here, so first
            see who wrote it.
    Raises: UserError where a client has no model, or is not the one the run was made with.
    """
    folder = Folder.open(Path(run))
    models = {}
    with _reading(folder.path, trust, clients, algorithm):
        for id, build in _program_builders(folder.config, folder.path, clients, algorithm).items():
            program = _restore(folder, build())
            models[id] = program.client.task.deployable(program)
    return models


def export(
    run: str | Path,
    client: str,
    out: str | Path | None = None,
    onnx: bool = True,
    clients: Iterable[Client] | None = None,
    algorithm: Algorithm | None = None,
    trust: bool = False,
) -> list[str]:
    """Write one client's whole model, what is frozen included, and its model card.

    Files: the weights (`unalike.runs.model_files`: in the layout of transformers and peft where the
    encoder is a transformers model), unalike.json, from which `rebuild` builds the model again,
    README.md and, where possible, model.onnx.

    Args:
        run: the run's folder.
        client: id of the client.
        out: folder to write to; by default `exports/CLIENT` in the run's folder.
        onnx: whether to write model.onnx.
        clients, algorithm, trust: as for `trained`.
    Returns: a line about each file.
    """
    folder = Folder.open(Path(run))
    with _reading(folder.path, trust, clients, algorithm):
        builders = _program_builders(folder.config, folder.path, clients, algorithm)
        program = _restore(folder, _build_program(client, builders))
    model = program.client.task.deployable(program)
    target = Path(out or folder.path / "exports" / quote(client))
    if out is None:
        for path in (target, *target.rglob("*")):
            check_inside(path, folder.path)
    target.mkdir(parents=True, exist_ok=True)
    lines = write_weights(model, target)
    info = program.client.info()
    config = {
        "client": client,
        "scenario": folder.config,
        "labels": info.labels,
        "task": info.task,
        # a site of several organisations has no results, but was told the end
        "finished": folder.results is not None or any(folder.events("finish")),
    }
    (target / CONFIG).write_text(json.dumps(config, indent=1))
    from_python = bool(folder.config.get("python"))
    arguments = ", clients" if from_python else ""
    lines.append(f"{target / CONFIG}   rebuild with unalike.rebuild({str(target)!r}{arguments})")
    onnx_inputs: dict[str, str] = {}
    if onnx:
        line, onnx_inputs = _export_onnx(model, program.client, target / "model.onnx")
        lines.append(line)
    card = model_card(
        info,
        folder.results,
        in_transformers=(target / HEAD).is_file(),
        onnx_inputs=onnx_inputs,
        from_python=from_python,
    )
    (target / "README.md").write_text(card)
    return [*lines[:-1], f"{target / 'README.md'}   model card", lines[-1]]


def rebuild(
    folder: str | Path,
    clients: Iterable[Client] | None = None,
    algorithm: Algorithm | None = None,
    trust: bool = False,
) -> nn.Module:
    """Return an exported model from the folder that `export` wrote.

    Args:
        folder: that `export` wrote to.
        clients, algorithm, trust: as for `trained`.
    """
    folder = Path(folder)
    file = folder / CONFIG
    if not file.is_file():  # of earlier versions
        file = folder / "config.json"
    try:
        config = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {describe_error(error)}") from None
    problem = EXPORTED(config, "") or find_problem_in_config(config["scenario"])
    if problem:
        raise UserError(f"{file} does not describe an exported model: {problem}")
    with _reading(folder, trust, clients, algorithm):
        builders = _program_builders(config["scenario"], folder, clients, algorithm)
        program = _build_program(config["client"], builders)
        _load_weights(program, folder)
    return program.model.eval()


def _load_weights(program: ClientProgram, folder: Path) -> None:
    """Load the weights that `export` wrote to a folder."""
    weights = read_weights(program.model, folder)
    encoder = program.model.__dict__.get("encoder")
    if isinstance(encoder, nn.Module):  # one that is no part of the model's state
        prefix = "encoder."
        frozen = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        encoder.load_state_dict(frozen)
        weights = {n: t for n, t in weights.items() if not n.startswith(prefix)}
    program.client.task.deployable(program, weights)
    program.load(weights)


def trained_program(
    run: str | Path, client: str | None = None, trust: bool = False
) -> ClientProgram:
    """Return a client's program as a scenario's run left it, on the CPU.

    Args:
        run: the run's folder.
        client: id of the client; by default the first that has a model.
        trust: as for `trained`.
    """
    folder = Folder.open(Path(run))
    with _reading(folder.path, trust):
        builders = _program_builders(folder.config, folder.path, None, None)
        if client is None:
            entries = (folder.results or {"clients": {}})["clients"]
            with_model = [id for id, entry in entries.items() if "parameters" in entry]
            client = next(iter(with_model or builders))
        return _restore(folder, _build_program(client, builders))


@contextmanager
def _reading(folder: Path, trust: bool, *own: object) -> Iterator[None]:
    """Build models from a folder: without `trust` none of its code runs (`without_imports`).

    Then a model that cannot be built, say of 10**15 columns, is the folder's mistake, which
    becomes a sentence. Where code of the user's takes part, its exceptions keep their traceback.

    Args:
        own: clients and a method of the user's; None for those that the folder describes.
    """
    with without_imports(folder, trust):
        try:
            yield
        except (UserError, RunError):
            raise
        except Exception as error:
            if trust or any(part is not None for part in own):
                raise
            reason = describe_error(error).splitlines()[0]
            raise UserError(f"{folder} holds no model that can be rebuilt: {reason}") from error


def _program_builders(
    config: Mapping[str, Any],
    source: Path,
    clients: Iterable[Client] | None,
    algorithm: Algorithm | None,
) -> dict[str, BuildProgram]:
    """Return, by client, a function that builds its untrained program as the run's config has it.

    The config is that of a run from Python, of a scenario, or what a client of a cross-silo run
    keeps at its site.
    """
    config = dict(config)
    method: Algorithm | None
    if config.get("python"):
        _check_form(PYTHON_RUN, config, source)
        method = algorithm or parse_algorithm(config["algorithm"])[0]
        if clients is None:
            raise UserError(
                f"{source} was run from Python with clients that only that program can make: "
                "there, pass clients=, made as for the run, to unalike.trained, unalike.export or "
                "unalike.rebuild"
            )
        if method is None:
            name = config["algorithm"]["name"]
            message = f"{source} was run with the method {name}, which is your own: pass algorithm="
            raise UserError(message)
        training = _parse_training(config["training"], source)
        seed = config["seed"]
    elif "client_file" in config:
        _check_form(SITE_RUN, config, source)
        _parse_training(config["training"], source)
        plan = plan_from_dict({**config, "privacy": None})
        method, training, seed = plan["algorithm"], plan["training"], plan["seed"]
        clients = [load_client(config["client_file"], config["about"])]
    else:
        data_dir = config.pop("data_dir", None)
        scenario, method = parse_scenario(config, str(source))
        training, seed = scenario.training, scenario.seed
        clients = build_clients(scenario, data_dir)
    if isinstance(clients, LazyClients):
        clients = _clients_with_results(clients, source)
    builders: dict[str, BuildProgram] = {}
    for client in clients:
        on_cpu = replace(client, device="cpu")
        builders[client.id] = partial(method.Program, on_cpu, method, training, seed)
    return builders


def _check_form(form: Form, config: Mapping[str, Any], source: Path) -> None:
    problem = form(config, "")
    if problem:
        raise UserError(f"{source} has not the config of a run: {problem}")


def _parse_training(settings: dict[str, Any], source: Path) -> Training:
    try:
        return Training(**settings)
    except ValidationError as error:
        problems = [to_problem(detail, Training) for detail in error.errors()]
        raise Problems(f"training of {source}", problems) from None


def _clients_with_results(clients: LazyClients, run: Path) -> list[Client]:
    """The lazy clients that a finished run lists: the measured ones, which have its final model."""
    results = Folder.open(run).results
    if results is None:
        raise UserError(f"the run {run} is not finished; resume it first")
    return [clients.find(id) for id in results["clients"]]


def _build_program(client: str, builders: Mapping[str, BuildProgram]) -> ClientProgram:
    if client not in builders:
        raise UserError(unknown_name("client", client, builders))
    return builders[client]()


def _restore(folder: Folder, program: ClientProgram) -> ClientProgram:
    """Load the state that a client had at the end of the run, and compare it with the results.

    Before the end of a run the newest state is loaded, where it holds the whole model.
    """
    id = program.client.id
    results = folder.results
    state = Store(folder.clients).read_latest(id)
    expected_hash = None
    if results is None:
        names = program.model.state_dict().keys()
        if state is None or state["model"].keys() != names:
            raise UserError(
                f"{id} has no model to take home: the run {folder.path} is not finished; resume it "
                "first"
            )
    else:
        entry = results["clients"].get(id, {})
        if "parameters" not in entry:
            raise UserError(
                f"{id} has no model to take home: it failed in the run {folder.path}, or was not "
                "in it"
            )
        expected_hash = entry.get("hash")
    try:
        if state is not None:
            program.restore(state)
        is_equal = expected_hash is None or hash_model(program.model) == expected_hash
    except RuntimeError:  # names or shapes of parameters differ
        is_equal = False
    if not is_equal:
        raise UserError(
            f"the model of {id} is not the one it had in the run {folder.path}: make the clients "
            "as they were for it"
        )
    return program


def _export_onnx(model: nn.Module, client: Client, file: Path) -> tuple[str, dict[str, str]]:
    """Write an ONNX file. Returns: a line about it, or why there is none; and what its inputs are.

    The model takes samples as they came, images of bytes in [0, 1], modalities by their names.
    Where the encoder's frozen trunk cannot be exported, the model takes the features that the trunk
    computes.
    """
    samples: Samples = getattr(client.train, "raw", client.train)
    raw, _ = samples.rows(torch.arange(min(2, len(samples))))
    x: Any = client.to_device(raw)
    notes = {}
    for name, rows in _by_name(raw).items():
        notes[name] = ", bytes divided by 255" if rows.dtype == torch.uint8 else ""
    sources: list[tuple[Callable[[], Any], dict[str, str]]] = [(lambda: x, notes)]
    trunk = getattr(getattr(model, "encoder", None), "trunk", None)
    if callable(trunk) and isinstance(x, Tensor):
        of_trunk = {"x": ", what the encoder's trunk makes of a sample"}
        sources.append((lambda: trunk(x), of_trunk))
    problem = ""
    for read, said in sources:
        try:
            with torch.no_grad():
                inputs = read()
            _write_onnx(model, inputs, file)
        except ImportError as error:
            return f"no ONNX: {error}; install unalike[onnx]", {}
        except Exception as error:  # an exporter may raise anything
            reason = str(error.__cause__ or error).strip().partition("\n")[0][:160]
            problem = problem or f"no ONNX: this model does not export ({reason})"
            continue
        described = {}
        for name, rows in _by_name(inputs).items():
            shape = ", ".join(["rows", *map(str, rows.shape[1:])])
            dtype = str(rows.dtype).removeprefix("torch.")
            described[name] = f"{dtype} ({shape}){said[name]}"
        listed = "; ".join(f"{name}: {text}" for name, text in described.items())
        return f"{file}   input {listed}", described
    return problem, {}


def _by_name(x: Any) -> dict[str, Tensor]:
    """Inputs by name; a single one is called "x"."""
    return x if isinstance(x, dict) else {"x": x}


def _write_onnx(model: nn.Module, x: Any, file: Path) -> None:
    """Write an ONNX file of a model with any number of rows.

    Args:
        x: (rows, ...), or by name.
    """
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    quiet = contextlib.redirect_stdout(io.StringIO())
    rows = torch.export.Dim("rows")
    axes: Any = {name: {0: rows} for name in x} if isinstance(x, dict) else {0: rows}
    with quiet, warnings.catch_warnings(), including_frozen():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (x, {}),  # a last dict would be taken for keyword arguments
            file,
            input_names=list(_by_name(x)),
            output_names=["output"],
            dynamo=True,
            dynamic_shapes=(axes,),
            verbose=False,
            external_data=False,
        )
