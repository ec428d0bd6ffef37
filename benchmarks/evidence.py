"""Collects what our tables say of methods, for `unalike suggest`."""

import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.study import ROOT, benchmark
from unalike.algorithms import ALGORITHMS
from unalike.methods.early_exits import EarlyExitMethod
from unalike.methods.submodels import SubmodelMethod
from unalike.runs.suggest import EVIDENCE
from unalike.scenarios import load_mapping

SOURCES = Path(__file__).parent / "evidence.yaml"
RESULTS = ROOT / "results"
BEYOND = "trains the whole network, which not all of these clients can"
FEWEST = 5  # methods of a leaderboard's setting, below which it says too little
SITUATION = ("tasks", "models", "public", "capacity", "frozen", "adapters", "server", "modalities")


@benchmark("evidence")
def bench_evidence(quick: bool = False) -> dict:
    """Write unalike/runs/evidence.json, which `unalike suggest` reads, from the tables in results/."""
    tables = collect()
    if not quick:
        EVIDENCE.write_text(json.dumps(tables, indent=1) + "\n")
    return {"tables": len(tables), "methods": sum(len(table["rows"]) for table in tables)}


def collect() -> list[dict[str, Any]]:
    """Every table of evidence.yaml whose file is there, its methods best first."""
    tables = []
    for source in yaml.safe_load(SOURCES.read_text()):
        path = RESULTS / f"{source['table']}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text())
        if "setting" in source and source["setting"] not in result["settings"]:
            continue
        rows = sorted(rows_of(source, result), key=lambda row: -row["score"])
        if "setting" in source and len(rows) < FEWEST:
            continue
        tables.append(
            {
                "source": f"results/{path.name}",
                "setting": source.get("setting"),
                "metric": source.get("metric", "mean of the clients' own metrics"),
                "date": result["date"],
                "scenarios": source.get("scenarios", []),
                "like": source.get("like", []),
                "situation": {key: source[key] for key in SITUATION if key in source},
                "rows": rows,
            }
        )
    return tables


def rows_of(source: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """A table's methods with score, spread over seeds and megabytes a client and round."""
    if "setting" in source:
        return leaderboard_rows(source, result["settings"][source["setting"]]["rows"])
    rows = measured_rows(source, result)
    if source["metric"] == "delta":  # gains are over training alone
        rows.append(
            {"algorithm": {"name": "local"}, "score": 0.0, "spread": None, "megabytes": 0.0}
        )
    return rows


def measured_rows(source: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that a source names."""
    metric = source["metric"]
    if "whole" in source:  # the result is one row
        deltas = [entry[metric] for entry in result["by_seed"].values()]
        spread = (sum((d - result[metric]) ** 2 for d in deltas) / (len(deltas) - 1)) ** 0.5
        row = {"score": round(result[metric], 3), "spread": round(spread, 3), "megabytes": None}
        return [{"algorithm": fields_of(source, source["whole"]), **row}]
    rows = []
    for kind in ("rows", "beyond"):
        for name, algorithm in source.get(kind, {}).items():
            found = result[source.get("rows_in", "rows")].get(source.get("prefix", "") + name)
            if found is None:
                continue
            row = {"score": found[metric], "spread": found.get(f"{metric}_spread")}
            entry = {"algorithm": fields_of(source, algorithm), **row}
            entry["megabytes"] = found.get("megabytes")
            rows.append(entry | {"problem": BEYOND} if kind == "beyond" else entry)
    return rows


def fields_of(source: dict[str, Any], algorithm: dict[str, Any] | str) -> dict[str, Any]:
    """A method with its fields; "shipped" is that of the table's first scenario."""
    if isinstance(algorithm, dict):
        return algorithm
    return load_mapping(source["scenarios"][0])["algorithm"]


def leaderboard_rows(source: dict[str, Any], table: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a setting; with `submodels` only methods that respect a client's capacity."""
    rows = []
    for name, row in table.items():
        whole = not issubclass(ALGORITHMS[name], SubmodelMethod | EarlyExitMethod)
        if row["failed"] or row.get("works_alone") or (source.get("submodels") and whole):
            continue
        algorithm: dict[str, Any] = {"name": name}
        for setting in row["chosen"]:
            key, _, value = setting.partition("=")
            if key.startswith("algorithm."):
                algorithm[key.removeprefix("algorithm.")] = yaml.safe_load(value)
        measured = {key: row[key] for key in ("score", "spread", "megabytes")}
        rows.append({"algorithm": algorithm, **measured})
    return rows
