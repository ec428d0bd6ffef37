"""A client.yaml gives the client it describes, or says in sentences why not."""

from importlib import resources

import numpy as np
import pytest
import yaml

from unalike.base.errors import UserError
from unalike.scenarios.client_config import load_client


@pytest.fixture
def home(tmp_path):
    """An organisation's folder: rows in files, code of its own beside them."""
    x, y = np.random.default_rng(0).normal(size=(12, 6)).astype("float32"), np.arange(12) % 3
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.savez(tmp_path / "public.npz", x=x)
    (tmp_path / f"mine_{tmp_path.name}.py").write_text(
        "import torch\nfrom torch import nn\nfrom unalike import Classification, Client\n"
        "def encoder(width): return nn.Linear(6, width)\n"
        "def rows(): return torch.zeros(4, 6), torch.arange(4) % 3\n"
        "def make(run, id): return Client(id=id, model=encoder(4), task=Classification(3), train=rows(), model_name=run['algorithm'])\n"
    )
    return tmp_path


def write(home, text):
    (home / "client.yaml").write_text(text.replace("MINE", f"mine_{home.name}"))
    return home / "client.yaml"


SOUND = """
id: st-mary
model: {name: mlp, width: 8}
task: {name: classification, labels: [a, b, c]}
data: {train: train.npz, public: public.npz}
"""


def test_a_client_of_shipped_parts_and_files(home):
    made = load_client(write(home, SOUND))
    assert (
        made.id == "st-mary"
        and made.task.labels == ("a", "b", "c")
        and len(made.train) == len(made.public) == 12
    )
    assert made.encoder(0).width == 8 and made.info().model == "mlp"


def test_a_client_with_code_of_its_own(home):
    made = load_client(
        write(
            home,
            SOUND.replace("{name: mlp, width: 8}", "{name: MINE:encoder, width: 5}").replace(
                "train.npz", "MINE:rows"
            ),
        )
    )
    assert made.encoder(0).out_features == 5 and len(made.train) == 4


def test_a_factory_is_told_of_the_run(home):
    made = load_client(
        write(home, "factory: MINE:make\noptions: {id: ada}\n"), {"algorithm": "fedavg"}
    )
    assert made.id == "ada" and made.info().model == "fedavg"


def test_a_client_of_a_scenario(home):
    scenario = resources.files("unalike.scenarios") / "digits.yaml"
    id = yaml.safe_load(scenario.read_text())["clients"][0]["id"]
    assert load_client(write(home, f"scenario: {scenario}\nclient: {id}\n")).id == id
    with pytest.raises(UserError, match="There is no client"):
        load_client(write(home, f"scenario: {scenario}\nclient: nobody\n"))


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("name: mlp", "name: mpl", 'no model "mpl". Did you mean "mlp"?'),
        ("name: mlp", "name: nowhere:encoder", "nowhere:encoder cannot be imported"),
        ("width: 8", "widht: 8", 'no field "widht"'),
        ("name: classification", "name: clasification", 'Did you mean "classification"?'),
        ("labels: [a, b, c]", "labels: [a, a]", "must differ"),
        ("train: train.npz", "train: gone.npz", "gone.npz cannot be read"),
        ("train: train.npz", "train: train.csv", "rows are an .npz file"),
        ("labels: [a, b, c]", "labels: [a, b]", "train"),
        ("id: st-mary", "idd: st-mary", 'no field "idd"'),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(home, old, new, says):
    with pytest.raises(ValueError) as caught:
        load_client(write(home, SOUND.replace(old, new)))
    assert says in str(caught.value)


def test_every_problem_is_told_at_once(home):
    with pytest.raises(UserError, match="3 problems"):
        load_client(
            write(
                home,
                SOUND.replace("mlp", "mpl")
                .replace("classification", "clss")
                .replace("train.npz", "gone.npz"),
            )
        )
