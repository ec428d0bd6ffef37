"""A client's model to take home. Knows run folders and how to build the client again."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unalike.client import Client
from unalike.engines.store import Store
from unalike.errors import UserError, unknown
from unalike.runs.folder import Folder


def export(run: Path, client: str, to: Path, onnx: bool = True) -> list[str]:
    """Writes model.safetensors, config.json and, where it can, model.onnx; returns a line for each."""
    from unalike.runs import reopen
    folder = Folder.open(Path(run))
    made = reopen(folder)
    clients = {c.id: c for c in made.clients}
    if client not in clients:
        raise UserError(unknown("client", client, clients))
    state = Store(folder.clients).newest(client)
    if state is None:
        raise UserError(f"{client} has no model yet: the run has not finished a round")
    side = made.algorithm.Side(clients[client], made.algorithm, made.training, made.seed)
    side.restore(state)
    model = side.model.eval().cpu()
    to = Path(to)
    to.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous().clone() for name, t in model.state_dict().items()}, to / "model.safetensors")
    card = clients[client].card()
    (to / "config.json").write_text(json.dumps({"client": client, "scenario": folder.config, "labels": card.labels, "task": card.task,
                                                "finished": folder.results is not None}, indent=1))
    lines = [f"{to / 'model.safetensors'}   {sum(p.numel() for p in model.parameters()):,} parameters",
             f"{to / 'config.json'}   rebuild with unalike.runs.export.rebuild({str(to)!r})"]
    return [*lines, _onnx(model, clients[client], to)] if onnx else lines


def rebuild(folder: str | Path) -> nn.Module:
    """The exported model, from its two files."""
    from safetensors.torch import load_file

    from unalike.runs import prepare
    from unalike.scenarios import read
    told = json.loads((Path(folder) / "config.json").read_text())
    config = dict(told["scenario"])
    data_dir = config.pop("data_dir", None)
    scenario, algorithm = read(config, str(folder))
    made = prepare(scenario, algorithm, None, data_dir, lambda event, **facts: None)
    side = made.algorithm.Side(next(c for c in made.clients if c.id == told["client"]), made.algorithm, made.training, made.seed)
    side.model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return side.model.eval()


def _onnx(model: nn.Module, client: Client, to: Path) -> str:
    x, _ = client.train.rows(torch.arange(min(2, len(client.train))))
    if not isinstance(x, Tensor):
        return f"no ONNX: this model takes several inputs by name ({', '.join(x)}), and only one is exported"
    x = client.place(x).cpu()
    try:
        import contextlib
        import io
        import logging
        import warnings
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (x,), to / "model.onnx", input_names=["x"], output_names=["output"], dynamo=True,
                              dynamic_shapes=({0: torch.export.Dim("rows")},), verbose=False, external_data=False)
    except ImportError as error:
        return f"no ONNX: {error}; install unalike[onnx]"
    except Exception as error:      # what an exporter may raise is open
        return f"no ONNX: this model does not export ({str(error).splitlines()[0][:160]})"
    return f"{to / 'model.onnx'}   input x, any number of rows"
