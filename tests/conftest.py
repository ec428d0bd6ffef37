"""Tiny federations for tests of whole methods: blobs in six dimensions, models of width 8. Knows no method by name."""

import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unalike import Classification, Client, Federation, FederationConfig, Training
from unalike.algorithms import ALGORITHMS
from unalike.core.runtime import ClientRuntime
from unalike.engines.local import LocalEngine
from unalike.engines.store import Store
from unalike.methods.prompt_tuning import PromptTuning
from unalike.models import MLP
from unalike.models.autoencoder import Autoencoder
from unalike.models.vlm import VisionLanguageModel
from unalike.runs import Run, RunPlan
from unalike.runs.run_folder import Folder
from unalike.tasks import Clustering, MultiLabel

sys.path[:0] = [
    str(Path(__file__).parent / "engines"),
    str(Path(__file__).parent),
]  # programs that tests run know each other by name
collect_ignore = [
    "engines/on_ray.py",
    "engines/on_flare.py",
    "engines/on_flower.py",
    "engines/organisations.py",
    "engines/storms.py",
]  # what tests run
CLASSES = 4
CENTRES = 2 * torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(0))
# fields of methods, by name: as small as the toy
SMALL = {
    "conditions": ("pose", "layout"),
    "rank": 4,
    "peers": 2,
    "width": 8,
    "batch": 8,
    "pretraining": 45,
    "threshold": 0.3,
    "server_lr": 0.1,
    "server_epochs": 3,
    "warm_up": 1,
    "sub_width": 4,
    "distill_public": "never",  # by itself it depends on whether a run has the safeguard
}


def blobs(rows, seed):
    """x (rows, 6) around one centre a class, y (rows,)."""
    y = torch.arange(rows) % CLASSES
    return CENTRES[y] + torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)), y


def mlp():
    return MLP((6,), (8,), 8)


def noisy():
    """An encoder with all that makes repeating hard: batch statistics and dropout."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8)
    )


def client(id, rows=20, model=mlp, dtype=torch.float64, **fields):
    number = sum(map(ord, id))
    given = {
        "task": Classification(CLASSES),
        "train": blobs(rows, number),
        "test": blobs(40, 1000 + number),
        "public": (blobs(24, 2000)[0], None),
    }
    return Client(id=id, model=model, dtype=dtype, **(given | fields))


class Seeing(nn.Module):
    """An encoder with a feature map (8, 2, 2), perhaps with all that makes repeating hard."""

    def __init__(self, noisy=False):
        super().__init__()
        more = (
            [nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32)]
            if noisy
            else [nn.ReLU(), nn.Linear(32, 32)]
        )
        self.layers = nn.Sequential(nn.Linear(6, 32), *more)

    def grid(self, x):
        return self.layers(x).unflatten(1, (8, 2, 2))

    def forward(self, x):
        return self.grid(x).mean((-2, -1))


class Telling(VisionLanguageModel):
    """A model that sees and reads, of one linear step each: an image's patches are its six numbers and noise, a label's word its centre."""

    width, word, context, scale, places, begin, end = 8, 6, 40, 20.0, (2, 2), (), ()

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.joint = nn.Parameter(torch.randn(6, 8, generator=draw) / 6**0.5)
        self.shifts = nn.Parameter(0.3 * torch.randn(4, 6, generator=draw))
        self.words = nn.Parameter(torch.cat([CENTRES, 0.1 * torch.randn(9, 6, generator=draw)]))
        self.requires_grad_(False).eval()

    def see(self, images):
        patches = (images[:, None] + self.shifts) @ self.joint
        return patches.mT.unflatten(-1, (2, 2)), patches.mean(1)

    def split(self, text):
        return [int(word) if word.isdigit() else CLASSES + len(word) % 9 for word in text.split()]

    def embed(self, ids):
        return self.words[ids]

    def read(self, embeddings, mask):
        return (embeddings * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) @ self.joint


def several(id, rows=20, model=None, noisy=False, **about):
    """A client with one of several labels a row; classes that are given as numbers become such labels."""
    number = sum(map(ord, id))
    sets = {"train": blobs(rows, number), "test": blobs(40, 1000 + number)} | about
    marked = {
        name: (sets[name][0], nn.functional.one_hot(sets[name][1], CLASSES).float())
        for name in ("train", "test")
    }
    return client(
        id,
        model=model or partial(Seeing, noisy=noisy),
        **(about | {"task": MultiLabel(CLASSES)} | marked),
    )


def toys_for(method):
    """The same toys for methods that serve other tasks than classification."""
    if issubclass(method, PromptTuning):
        telling = lambda id, model=None, **about: several(id, model=Telling, **about)
        return {
            "client": telling,
            "noisy": Telling,
            "clients": lambda count=3, **about: [
                telling("abcdefgh"[i], **about) for i in range(count)
            ],
        }
    if not method.serves(Classification) and method.serves(MultiLabel):
        return {
            "client": several,
            "noisy": partial(Seeing, noisy=True),
            "clients": lambda count=3, **about: [
                several("abcdefgh"[i], noisy=i == 2, **about) for i in range(count)
            ],
        }
    if method.serves(Classification):
        return {}
    auto = lambda: Autoencoder((6,), (8,), 4)

    def single(id, model=None, **about):
        return client(id, model=auto, **({"task": Clustering(CLASSES)} | about))

    return {
        "client": single,
        "clients": lambda count=3, **about: [single("abcdefgh"[i], **about) for i in range(count)],
        "noisy": auto,
    }


def clients(count=3, **fields):
    """Two alike and the rest not: `c` has batch norm and dropout."""
    return [client("abcdefgh"[i], model=noisy if i == 2 else mlp, **fields) for i in range(count)]


def method(name, **changed):
    """A method with its defaults, but as small as the toy."""
    made = ALGORITHMS[name]
    small = {f.name: SMALL[f.name] for f in fields(made) if f.name in SMALL}
    return made(**(small | changed))


def training(**changed):
    return Training(**({"rounds": 3, "batch_size": 8, "lr": 0.02} | changed))


def quiet(event, **facts):
    pass


def execute(
    folder,
    algorithm,
    clients,
    *,
    seed=0,
    workers=0,
    federation=None,
    rounds=3,
    watch=quiet,
    alone=False,
    **changed,
):
    """A run in a folder, new or resumed; returns the results."""
    options = {
        k: changed.pop(k)
        for k in ("safeguard", "privacy", "checkpoint", "engine", "replay")
        if k in changed
    }
    if "alive" in changed:
        options["max_loaded_clients"] = changed.pop("alive")
    engine_options = changed.pop("options", {})
    if workers:
        engine_options = {**engine_options, "workers": workers}
    there = (
        Folder(folder)
        if (Path(folder) / "config.yaml").exists()
        else Folder.create(folder, {"name": "toy"})
    )
    plan = RunPlan(
        algorithm,
        clients,
        training(rounds=rounds, **changed),
        federation or FederationConfig(),
        name="toy",
        method=type(algorithm).__name__,
        seed=seed,
        local_baseline=alone,
        engine_options=engine_options,
        **options,
    )
    return Run(plan, there, watch).execute()


def federation(folder, algorithm, clients, *, seed=0, federation=None, **changed):
    """The server's view of an engine in this process; its sides are in `fed.engine.host.sides`."""
    budget = training(**changed)
    engine = LocalEngine(
        clients, lambda c: ClientRuntime(algorithm.Program(c, algorithm, budget, seed)), folder
    )
    return Federation(engine, budget, federation or FederationConfig(), seed)


def serve(fed, algorithm):
    """All rounds; returns everyone's parameters."""
    for finished in algorithm.serve(fed):
        fed.finished = finished
    algorithm.finish(fed)
    return {c: dict(fed.engine.host.programs[c].model.state_dict()) for c in fed.clients}


def states(folder):
    """Parameters that each client has in the end, from its newest checkpoint."""
    store = Store(Path(folder) / "checkpoints" / "clients")
    return {
        entry.name: store.read_latest(entry.name)["model"]
        for entry in sorted(store.folder.iterdir())
    }


def apart(one, other):
    """The largest difference between two clients' worth of parameters; infinite where names or shapes differ."""
    if one.keys() != other.keys() or any(one[c].keys() != other[c].keys() for c in one):
        return float("inf")
    return max(
        float((one[c][n].double() - other[c][n].double()).abs().max()) for c in one for n in one[c]
    )


def hashes(results):
    return {id: entry["hash"] for id, entry in results["clients"].items()}


@pytest.fixture(scope="session")
def toys():
    return SimpleNamespace(
        blobs=blobs,
        mlp=mlp,
        noisy=noisy,
        client=client,
        clients=clients,
        method=method,
        training=training,
        execute=execute,
        federation=federation,
        serve=serve,
        states=states,
        apart=apart,
        hashes=hashes,
        partial=partial,
        classes=CLASSES,
        toys_for=toys_for,
        Telling=Telling,
    )


@pytest.fixture(autouse=True)
def one_thread():
    """Small models run fastest so, and forked processes with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
