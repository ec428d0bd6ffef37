"""Trained models to take home. Knows run folders and how to build the clients again."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unalike.base.errors import UserError, unknown_name
from unalike.core.algorithm import Algorithm, ClientProgram, digest
from unalike.core.client import Client
from unalike.engines.store import Store, quote
from unalike.runs.plan import plan_from_dict
from unalike.runs.run_folder import Folder
from unalike.scenarios import build_clients, parse_scenario
from unalike.scenarios.client_config import load_client
from unalike.scenarios.validate import parse_algorithm
from unalike.training.loop import Training


def trained(
    run: str | Path, clients: Iterable[Client] | None = None, algorithm: Algorithm | None = None
) -> dict[str, nn.Module]:
    """The models of a run by client, each from input to the task's output, on the CPU and in eval mode.

    `clients` are those of a run from Python, made as they were for it; some of them give the models of these. `algorithm` is
    needed only where the method is your own.
    """
    folder = Folder.open(Path(run))
    return {
        id: _deployable(_learnt(folder, program()))
        for id, program in _sides(folder.config, folder.path, clients, algorithm).items()
    }


def export(
    run: str | Path,
    client: str,
    out: str | Path | None = None,
    onnx: bool = True,
    clients: Iterable[Client] | None = None,
    algorithm: Algorithm | None = None,
) -> list[str]:
    """Writes model.safetensors, config.json and, where it can, model.onnx; returns a line for each. `clients` as for `trained`."""
    folder = Folder.open(Path(run))
    program = _learnt(folder, _side(client, _sides(folder.config, folder.path, clients, algorithm)))
    model = _deployable(program)
    to = Path(out or folder.path / "exports" / quote(client))
    to.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.contiguous().clone() for name, t in model.state_dict().items()},
        to / "model.safetensors",
    )
    info = program.client.info()
    (to / "config.json").write_text(
        json.dumps(
            {
                "client": client,
                "scenario": folder.config,
                "labels": info.labels,
                "task": info.task,
                "finished": folder.results is not None,
            },
            indent=1,
        )
    )
    own = ", clients" if folder.config.get("python") else ""
    lines = [
        f"{to / 'model.safetensors'}   {sum(p.numel() for p in model.parameters()):,} parameters",
        f"{to / 'config.json'}   rebuild with unalike.rebuild({str(to)!r}{own})",
    ]
    return [*lines, _onnx(model, program.client, to)] if onnx else lines


def rebuild(
    folder: str | Path, clients: Iterable[Client] | None = None, algorithm: Algorithm | None = None
) -> nn.Module:
    """The exported model, from its two files. `clients` as for `trained`."""
    told = json.loads((Path(folder) / "config.json").read_text())
    program = _side(told["client"], _sides(told["scenario"], Path(folder), clients, algorithm))
    held = load_file(Path(folder) / "model.safetensors")
    program.client.task.deployable(program, held)
    program.load(held)
    return program.model.eval()


def finished(run: str | Path, client: str | None = None) -> ClientProgram:
    """A client's side as the run left it, on the CPU; without a name, the first that has a model."""
    folder = Folder.open(Path(run))
    programs = _sides(folder.config, folder.path, None, None)
    told = (folder.results or {"clients": {}})["clients"]
    named = client or next(
        (id for id, about in told.items() if "parameters" in about), next(iter(programs))
    )
    program = _side(named, programs)
    _learnt(folder, program)
    return program


def _sides(
    config: dict[str, Any],
    source: Path,
    clients: Iterable[Client] | None,
    algorithm: Algorithm | None,
) -> dict[str, Callable[[], ClientProgram]]:
    """What makes each client's side as the run's config has it, untrained."""
    config = dict(config)
    if config.get("python"):
        method = algorithm or parse_algorithm(config["algorithm"])[0]
        if clients is None:
            raise UserError(
                f"{source} was run from Python with clients that only that program can make: there, pass clients=, made as for "
                "the run, to unalike.trained, unalike.export or unalike.rebuild"
            )
        if method is None:
            raise UserError(
                f"{source} was run with the method {config['algorithm']['name']}, which is your own: pass algorithm="
            )
        training, seed = Training(**config["training"]), config["seed"]
    elif "client_file" in config:  # what a client keeps of a run between organisations
        made = plan_from_dict(config)
        clients, method = [load_client(config["client_file"], config["about"])], made["algorithm"]
        training, seed = made["training"], made["seed"]
    else:
        data_dir = config.pop("data_dir", None)
        scenario, method = parse_scenario(config, str(source))
        clients, training, seed = (
            build_clients(scenario, data_dir),
            scenario.training,
            scenario.seed,
        )
    return {
        c.id: partial(method.Program, replace(c, device="cpu"), method, training, seed)
        for c in clients
    }


def _side(client: str, programs: dict[str, Callable[[], ClientProgram]]) -> ClientProgram:
    if client not in programs:
        raise UserError(unknown_name("client", client, programs))
    return programs[client]()


def _deployable(program: ClientProgram) -> nn.Module:
    return program.client.task.deployable(program)


def _learnt(folder: Folder, program: ClientProgram) -> ClientProgram:
    """A client with the model it left the run with, or has so far where a client keeps all of it; its hash is that of the results."""
    id, results, state = (
        program.client.id,
        folder.results,
        Store(folder.clients).newest(program.client.id),
    )
    if results is None and (
        state is None or state["model"].keys() != program.model.state_dict().keys()
    ):
        raise UserError(
            f"{id} has no model to take home: the run {folder.path} is not finished; resume it first"
        )
    told = results["clients"].get(id, {}) if results is not None else {}
    ended = told.get("hash")
    if results is not None and "parameters" not in told:
        raise UserError(
            f"{id} has no model to take home: it failed in the run {folder.path}, or was not in it"
        )
    try:
        if state is not None:
            program.restore(state)
        fits = ended is None or digest(program.model) == ended
    except RuntimeError:  # names or shapes differ
        fits = False
    if not fits:
        raise UserError(
            f"the model of {id} is not the one it had in the run {folder.path}: make the clients as they were for it"
        )
    return program


def _onnx(model: nn.Module, client: Client, to: Path) -> str:
    """From samples as they came or, where what a trunk makes of them first cannot be exported, from that."""
    raw, said = getattr(client.train, "raw", client.train), ""
    for data, note in ((raw, ""), (client.train, ", what the encoder's trunk makes of a sample"))[
        : 1 if raw is client.train else 2
    ]:
        x, _ = data.rows(torch.arange(min(2, len(data))))
        if not isinstance(x, Tensor):
            return f"no ONNX: this model takes its inputs by name ({', '.join(x)}), and only models of one nameless input are exported"
        try:
            _write_onnx(model, client.to_device(x).cpu(), to / "model.onnx")
            return f"{to / 'model.onnx'}   input x{note}, any number of rows"
        except ImportError as error:
            return f"no ONNX: {error}; install unalike[onnx]"
        except Exception as error:  # what an exporter may raise is open
            said = (
                said or f"no ONNX: this model does not export ({str(error).splitlines()[0][:160]})"
            )
    return said


def _write_onnx(model: nn.Module, x: Tensor, to: Path) -> None:
    import contextlib
    import io
    import logging
    import warnings

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (x,),
            to,
            input_names=["x"],
            output_names=["output"],
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("rows")},),
            verbose=False,
            external_data=False,
        )
