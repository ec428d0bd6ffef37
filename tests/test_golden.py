"""The golden file: what two rounds of every embedded scenario end in, to the bit.

A change that is meant to keep behaviour keeps `golden.json`. One that is meant to change it writes the file again
(`python tests/test_golden.py`) and says so in CHANGELOG.md.
"""

import hashlib
import json
import platform
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unalike.runs import run_scenario
from unalike.scenarios import load

GOLDEN = Path(__file__).with_name("golden.json")
SCENARIOS = (
    "digits",
    "afmcc-digits",
    "subflot-digits",
    "fedmpt-digits",
    "fednca-digits",
    "creamfl-digits",
)


def machine() -> str:
    """What decides the last bits of floating-point sums: processors and torch versions choose other kernels."""
    names = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{platform.machine()} {names[:1]} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def outcome(scenario: str, folder: Path) -> dict:
    """Hashes and norms of all clients' models, hashes of the ledger and values of local training, after two rounds."""
    settings = ["training.rounds=2", "dtype=float64", "seed=0", "threads=1"]
    results, path = run_scenario(*load(scenario, settings=settings), out=folder)
    clients = {}
    for client, entry in results["clients"].items():
        state = load_file(max((path / "checkpoints" / "clients" / client).glob("*.safetensors")))
        square = sum(float(tensor.double().square().sum()) for tensor in state.values())
        clients[client] = {
            "hash": entry["hash"],
            "norm": square**0.5,
            "local": entry["alone"],
            "value": entry["value"],
        }
    ledger = hashlib.sha256((path / "ledger.csv").read_bytes()).hexdigest()
    return {"clients": clients, "ledger": ledger}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_rounds_end_in_the_same_models_and_bytes_as_before(scenario, tmp_path):
    golden = json.loads(GOLDEN.read_text())
    expected, got = golden[scenario], outcome(scenario, tmp_path / "run")
    assert got["ledger"] == expected["ledger"]
    assert {c: e["norm"] for c, e in got["clients"].items()} == pytest.approx(
        {c: e["norm"] for c, e in expected["clients"].items()}, rel=1e-6
    )
    if golden["machine"] == machine():
        assert got == expected


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        golden = {name: outcome(name, Path(folder) / name) for name in SCENARIOS}
    GOLDEN.write_text(json.dumps({"machine": machine(), **golden}, indent=1) + "\n")
