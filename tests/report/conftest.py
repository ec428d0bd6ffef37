"""Fabricated run folders, small and complete, without running anything."""

import json
import math

import pytest
import yaml

CLIENTS = {  # id: model, task, metric, alone, together
    "leaf": ("cnn", "classification", "accuracy", 61.2, 83.0),
    "moss": ("vit-tiny", "classification", "accuracy", 70.4, 88.9),
    "fern": ("mlp", "multi-label", "mAP", 48.0, 66.1),
    "reed": ("unet", "segmentation", "mIoU", 35.5, 41.0),
    "pine": ("bert-mini", "classification", "accuracy", 80.0, 81.7),
    "oak": ("mlp", "clustering", "NMI", 52.0, 49.5),
}
SENT = [
    ("down", "fit", 120),
    ("up", "represent", 52_000),
    ("down", "represent", 900),
    ("down", "align", 52_100),
    ("up", "align", 80),
]
ROUNDS = 8


def fabricate(
    folder,
    *,
    clients=None,
    algorithm="fedmuscle",
    fields=None,
    training=None,
    federation=None,
    scenario="digits",
    seed=0,
    alone=True,
    finished=True,
    safeguard=False,
    failures=(),
    arrivals=False,
    shift=0.0,
    python=False,
    by_label=None,
):
    """Write one run folder. `shift` moves every value reached together."""
    clients = clients or CLIENTS
    folder.mkdir(parents=True)
    config = {
        "name": scenario,
        "summary": "Clients with different models and tasks share one public set of digits.",
        "algorithm": {"name": algorithm, "peers": 3, "temperature": 0.2, **(fields or {})},
        "training": {
            "rounds": ROUNDS,
            "epochs": 1,
            "optimizer": {"name": "sgd", "rate": 0.01},
            **(training or {}),
        },
        "federation": {"sample": 1.0, **(federation or {})},
        "clients": [
            {"id": client.encode(errors="replace").decode(), "model": about[0], "task": about[1]}
            for client, about in clients.items()
        ],
        "seed": seed,
        **({"python": True} if python else {}),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    infos = {client: {"task": about[1], "metric": about[2]} for client, about in clients.items()}
    events = [
        {
            "event": "start",
            "scenario": scenario,
            "algorithm": algorithm,
            "seed": seed,
            "clients": infos,
        }
    ]
    ledger = ["round,client,direction,operation,messages,bytes"]
    for at in range(1, ROUNDS + 1):
        grown = 1 - math.exp(-at / 2.5)
        for training in ["together"] + ["alone"] * alone:
            for when, part in (
                (("after local", 0.95), ("after alignment", 1.0))
                if training == "together"
                else (("after local", 1.0),)
            ):
                values = {}
                for place, (client, (_, _, metric, low, high)) in enumerate(clients.items()):
                    top = high + shift if training == "together" else low
                    values[client] = {
                        metric: top * (0.3 + 0.7 * grown) * part + math.sin(3 * at + place),
                        "loss": 1 / at,
                    }
                events.append(
                    {
                        "event": "evaluation",
                        "round": at,
                        "when": when,
                        "who": training,
                        "values": values,
                    }
                )
        for name, scale in (("muscle_loss", 4.0), ("train_loss", 2.0)):
            values = {client: scale / (at + place / 2 + 1) for place, client in enumerate(clients)}
            events.append({"event": "note", "round": at, "name": name, "values": values})
        for client in clients:
            safe = '"' + client.replace('"', '""').replace("\n", " ") + '"'
            for direction, operation, size in SENT:
                ledger.append(f"{at},{safe},{direction},{operation},4,{size}")
        if arrivals:
            events += [
                {"event": "arrival", "at": at * (1.0 + 0.37 * place), "client": client}
                for place, client in enumerate(clients)
            ]
        events.append(
            {
                "event": "round",
                "round": at,
                "seconds": 2.5,
                "clock": 2.5 * at,
                "bytes": {"up": 1, "down": 1},
            }
        )
    events += [{"event": "failure", **failure} for failure in failures]

    if finished:
        events.append({"event": "finish", "seconds": 20.1})
        came = results(clients, algorithm, scenario, seed, alone, safeguard, failures, shift)
        if by_label is not None:
            came["by_label"] = by_label
        (folder / "results.json").write_text(json.dumps(came))
    (folder / "events.jsonl").write_text(
        "".join(
            json.dumps({"time": 1.7e9 + place, **event}) + "\n"
            for place, event in enumerate(events)
        )
    )
    (folder / "ledger.csv").write_text("\n".join(ledger) + "\n", errors="replace")
    return folder


def results(
    clients,
    algorithm="fedmuscle",
    scenario="digits",
    seed=0,
    alone=True,
    safeguard=False,
    failures=(),
    shift=0.0,
):
    """What results.json would hold."""
    entries = {}
    for place, (client, (model, task, metric, low, high)) in enumerate(clients.items()):
        value = high + shift
        entries[client] = {
            "model": model,
            "task": task,
            "metric": metric,
            "alone": low if alone else None,
            "value": value,
            "gain": 100 * (value - low) / low if alone else None,
            "hash": f"{place:064x}",
            "parameters": 12_345 * (place + 1),
            "samples": 40 + place,
            "test": "own",
            "metrics": {metric: value, "loss": 0.5},
            "after_local": value - 3,
        }
        if safeguard:
            safeguarded = max(low, value)
            entries[client] |= {
                "safeguarded": safeguarded,
                "safeguarded_gain": 100 * (safeguarded - low) / low,
                "kept": "together" if value >= low else "alone",
            }
    gains = [about["gain"] for about in entries.values()]
    whole = {
        "scenario": scenario,
        "algorithm": algorithm,
        "seed": seed,
        "clients": entries,
        "metrics": {"loss": 0.5},
        "delta": sum(gains) / len(gains) if alone else None,
        "losers": sum(gain < 0 for gain in gains) if alone else None,
        "bytes": {"up": 2_499_840, "down": 2_549_760},
        "seconds": 20.1,
        "clock": 20.0,
        "commit": "abc1234",
        "failures": list(failures),
    }
    if safeguard:
        safeguarded_gains = [about["safeguarded_gain"] for about in entries.values()]
        whole["safeguard"] = {"delta": sum(safeguarded_gains) / len(safeguarded_gains), "losers": 0}
    return whole


@pytest.fixture
def make(tmp_path):
    """Make a run folder of that name: make("a", seed=1)."""
    return lambda name="run", **how: fabricate(tmp_path / name, **how)


@pytest.fixture
def make_results():
    """Make results without a folder: make_results(safeguard=True)."""
    return lambda clients=CLIENTS, **how: results(clients, **how)
