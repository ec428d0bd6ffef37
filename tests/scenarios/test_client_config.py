"""A client.yaml gives the client it describes, or sentences about what is wrong with it."""

from importlib import resources

import numpy as np
import pytest
import yaml

from unalike.base.errors import UserError
from unalike.scenarios.client_config import load_client


@pytest.fixture
def folder(tmp_path):
    """An organisation's folder with data files and a module of its own."""
    x, y = np.random.default_rng(0).normal(size=(12, 6)).astype("float32"), np.arange(12) % 3
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.savez(tmp_path / "public.npz", x=x)
    (tmp_path / f"mine_{tmp_path.name}.py").write_text(
        "import torch\nfrom torch import nn\nfrom unalike import Classification, Client\n"
        "def encoder(width): return nn.Linear(6, width)\n"
        "def rows(): return torch.zeros(4, 6), torch.arange(4) % 3\n"
        "def make(run, id): return Client(id=id, model=encoder(4), task=Classification(3), "
        "train=rows(), model_name=run['algorithm'])\n"
    )
    return tmp_path


def write(folder, text):
    (folder / "client.yaml").write_text(text.replace("MINE", f"mine_{folder.name}"))
    return folder / "client.yaml"


VALID = """
id: st-mary
model: {name: mlp, width: 8}
task: {name: classification, labels: [a, b, c]}
data: {train: train.npz, public: public.npz}
"""


def test_a_client_with_a_shipped_model_and_data_files(folder):
    client = load_client(write(folder, VALID))
    assert (
        client.id == "st-mary"
        and client.task.labels == ("a", "b", "c")
        and len(client.train) == len(client.public) == 12
    )
    assert client.encoder(0).width == 8 and client.info().model == "mlp"


def test_a_client_with_its_own_model_and_data_functions(folder):
    client = load_client(
        write(
            folder,
            VALID.replace("{name: mlp, width: 8}", "{name: MINE:encoder, width: 5}").replace(
                "train.npz", "MINE:rows"
            ),
        )
    )
    assert client.encoder(0).out_features == 5 and len(client.train) == 4


def test_a_factory_gets_the_description_of_the_run(folder):
    client = load_client(
        write(folder, "factory: MINE:make\noptions: {id: ada}\n"), {"algorithm": "fedavg"}
    )
    assert client.id == "ada" and client.info().model == "fedavg"


def test_a_client_of_a_scenario(folder):
    scenario = resources.files("unalike.scenarios") / "digits.yaml"
    id = yaml.safe_load(scenario.read_text())["clients"][0]["id"]
    assert load_client(write(folder, f"scenario: {scenario}\nclient: {id}\n")).id == id
    with pytest.raises(UserError, match="There is no client"):
        load_client(write(folder, f"scenario: {scenario}\nclient: nobody\n"))


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ("name: mlp", "name: mpl", 'no model "mpl". Did you mean "mlp"?'),
        ("name: mlp", "name: nowhere:encoder", "nowhere:encoder cannot be imported"),
        ("width: 8", "widht: 8", 'no field "widht"'),
        ("name: classification", "name: clasification", 'Did you mean "classification"?'),
        ("labels: [a, b, c]", "labels: [a, a]", "must differ"),
        ("train: train.npz", "train: gone.npz", "gone.npz cannot be read"),
        ("train: train.npz", "train: train.txt", "rows are an .npz file"),
        ("labels: [a, b, c]", "labels: [a, b]", "train"),
        ("id: st-mary", "idd: st-mary", 'no field "idd"'),
    ],
)
def test_a_problem_is_reported_in_a_sentence(folder, old, new, expected):
    with pytest.raises(ValueError) as caught:
        load_client(write(folder, VALID.replace(old, new)))
    assert expected in str(caught.value)


def test_all_problems_are_reported_at_once(folder):
    with pytest.raises(UserError, match="3 problems"):
        load_client(
            write(
                folder,
                VALID.replace("mlp", "mpl")
                .replace("classification", "clss")
                .replace("train.npz", "gone.npz"),
            )
        )
