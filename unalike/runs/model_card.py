"""A model card: README.md of an exported model, from the results of its run."""

from collections.abc import Mapping
from typing import Any

import yaml

from unalike.core.client import ClientInfo
from unalike.report.formatting import (
    MISSING,
    describe_privacy,
    format_epsilon,
    format_gain,
    format_metric,
    to_number,
)

MAX_LABELS = 50  # listed by name


def model_card(
    info: ClientInfo,
    results: Mapping[str, Any] | None,
    in_transformers: bool,
    onnx_inputs: Mapping[str, str],
    from_python: bool = False,
) -> str:
    """The text of README.md.

    Args:
        info: what the client announces whose model it is.
        results: of the run; None where it is not finished.
        in_transformers: whether the folder has the layout of transformers.
        onnx_inputs: what model.onnx takes, by name; empty where there is none.
        from_python: whether a program made the clients, so that none are described in the files.
    """
    front = {
        "library_name": "transformers" if in_transformers else "unalike",
        "tags": ["federated-learning", "unalike", info.task],
    }
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", ""]
    lines += [f"# Model of {_cell(info.id)}", "", *_facts(info, results), ""]
    if results is not None:
        lines += [*_participants(results), ""]
    lines += ["## How to load it", "", *_usage(in_transformers, onnx_inputs, from_python)]
    return "\n".join(lines) + "\n"


def _facts(info: ClientInfo, results: Mapping[str, Any] | None) -> list[str]:
    """A table of what the model does and how it was trained."""
    rows = {
        "task": f"{info.task}, metric {info.metric}",
        "labels": _labels(info.labels),
        "encoder": info.model,
        "training samples": _count(info.samples),
    }
    if results is None:
        rows["state"] = "of a run that is not finished"
    else:
        entry = results["clients"].get(info.id, {})
        unit = entry.get("unit", "%")
        rows["method"] = str(results.get("algorithm"))
        rows["rounds"] = str(results.get("rounds"))
        rows[f"{info.metric}, trained alone"] = format_metric(entry.get("alone"), unit)
        rows[f"{info.metric}, trained together"] = format_metric(entry.get("value"), unit)
        if entry.get("kept"):
            rows["kept by the safeguard"] = f"the model trained {entry['kept']}"
        spent = entry.get("privacy")
        rows["privacy"] = "no noise was added: there is no epsilon"
        if spent:
            rows["privacy"] = f"epsilon {format_epsilon(spent)} {describe_privacy(spent)}"
        rows["scenario, seed"] = f"{results.get('scenario')}, {results.get('seed')}"
        rows["commit"] = str(results.get("commit"))
    return ["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows.items())]


def _participants(results: Mapping[str, Any]) -> list[str]:
    """A table of who took part."""
    lines = [
        "## Who took part",
        "",
        "| client | model | task | samples | metric | alone | together | gain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for id, entry in results["clients"].items():
        unit = entry.get("unit", "%")
        alone, together = (format_metric(entry.get(name), unit) for name in ("alone", "value"))
        cells = [id, entry.get("model"), entry.get("task"), _count(entry.get("samples"))]
        cells += [entry.get("metric"), alone, together, format_gain(entry.get("gain"))]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return lines


def _usage(in_transformers: bool, onnx_inputs: Mapping[str, str], from_python: bool) -> list[str]:
    """How to load the files, without us where that is possible."""
    lines = []
    if in_transformers:
        lines += [
            "The encoder, with its adapters if it has some; projection and head are in "
            "`head.safetensors`:",
            "```python",
            "from transformers import AutoModel",
            "",
            'encoder = AutoModel.from_pretrained("FOLDER")',
            "```",
            "",
        ]
    if onnx_inputs:
        alone = set(onnx_inputs) == {"x"}
        facts = onnx_inputs["x"] if alone else "a dict of arrays: "
        if not alone:
            facts += "; ".join(f"{_cell(name)} {text}" for name, text in onnx_inputs.items())
        lines += [
            f"From input to output, without torch; x is {facts}:",
            "```python",
            "import onnxruntime",
            "",
            'session = onnxruntime.InferenceSession("FOLDER/model.onnx")',
            'output = session.run(None, {"x": x})' if alone else "output = session.run(None, x)",
            "```",
            "",
        ]
    condition = "where the run's scenario can be read"
    arguments = ""
    if from_python:
        condition = "with clients made as for the run"
        arguments = ", clients"
    lines += [
        f"The whole model in torch, {condition}:",
        "```python",
        "import unalike",
        "",
        f'model = unalike.rebuild("FOLDER"{arguments})',
        "```",
    ]
    return lines


def _count(samples: Any) -> str:
    number = to_number(samples)
    return MISSING if number is None else f"{number:,.0f}"


def _labels(labels: tuple[str, ...]) -> str:
    shown = ", ".join(labels[:MAX_LABELS])
    if len(labels) > MAX_LABELS:
        return f"{shown} and {len(labels) - MAX_LABELS} more"
    return shown or "none"


def _cell(text: Any) -> str:
    """Text of a table's cell: names come from clients and must not break the table."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
