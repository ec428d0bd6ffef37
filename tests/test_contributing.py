"""The examples in CONTRIBUTING.md are whole: each runs as it stands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import unalike
from unalike.algorithms.fedprox import FedProx as ShippedFedProx
from unalike.data import Table

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def examples() -> dict:
    """What the page's Python blocks define, by name."""
    names: dict = {"__name__": "contributing"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_example_dataset_method_and_model_learn_together(tmp_path):
    names = examples()
    table: Table = names["wine"]()
    test = (table.x[table.test], table.targets["cultivar"][table.test])
    clients = []
    for i in range(2):
        rows = table.train[i::2]
        train = (table.x[rows], table.targets["cultivar"][rows])
        model = lambda: names["RandomFourier"]((13,), width=16)
        task = table.tasks["cultivar"]
        clients.append(unalike.Client(f"cellar-{i}", model, task, train=train, test=test))
    training = unalike.Training(rounds=40)
    result = unalike.run(names["FedSGD"](), clients, training=training, out=tmp_path / "run")
    values = [client["value"] for client in result["clients"].values()]
    assert values[0] == values[1] > 60  # one model for both; chance is 40


def test_the_example_of_fedprox_is_the_shipped_one(toys):
    example = examples()["FedProx"]
    programs = [
        method.Program(toys.client("a"), method(mu=0.5), toys.training(), 0)
        for method in (example, ShippedFedProx)
    ]
    client = toys.client("a")
    x, y = (client.to_device(rows) for rows in client.train.rows(torch.arange(4)))
    losses = []
    for program in programs:
        program.round_start = {name: p + 1 for name, p in program.model.named_parameters()}
        losses.append(program.loss(x, y).item())
    assert losses[0] == losses[1]


def test_the_example_dataset_works_where_the_page_says_to_put_it(tmp_path):
    """A file in unalike/data and an entry in its list, in a copy of the package."""
    package = shutil.copytree(PAGE.parent / "unalike", tmp_path / "unalike")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (package / "data" / "wine.py").write_text(next(b for b in blocks if "def wine" in b))
    listing = package / "data" / "__init__.py"
    text = re.sub(r"(DATASETS: .* = {)", r'\1"wine": wine,', listing.read_text(), count=1)
    listing.write_text(
        text.replace("import Table\n", "import Table\nfrom unalike.data.wine import wine\n")
    )
    program = "from unalike.data import load_dataset; print(len(load_dataset('wine')))"
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "178", done.stderr[-500:]
