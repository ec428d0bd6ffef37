"""Rows kept on the device, or as a frozen trunk sees them: the same numbers, looked at once."""

from functools import partial

import pytest
import torch

from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fedmuscle import FedMuscle
from unalike.core.client import Client
from unalike.core.program import ClientProgram
from unalike.data import Lazy, Tensors
from unalike.data.device_cache import DeviceCache, cache_on_device
from unalike.data.samples import resize
from unalike.methods.public_data import public_batch
from unalike.models import build_encoder
from unalike.models.efficientnet import EfficientNetLite
from unalike.models.model import find_trunk
from unalike.tasks import Classification
from unalike.training.loop import Training


def test_rows_are_seen_once_and_taken_before_they_are_seen():
    seen = []
    look = lambda x: seen.append(len(x)) or x.float() * 2
    held = cache_on_device(Tensors(torch.arange(6), torch.arange(6)), "cpu", look)
    for _ in range(2):
        x, y = held.rows(torch.tensor([5, 0]))
        assert x.tolist() == [10, 0] and y.tolist() == [5, 0]
    assert seen == [6] and held.shape == ()
    assert held.subset(torch.tensor([4])).rows(torch.tensor([0]))[0].tolist() == [8]


def test_what_would_be_too_large_to_keep_is_seen_anew(monkeypatch):
    """By what is made of the rows, which may be more than these."""
    seen, given = [], Tensors(torch.arange(20), torch.arange(20))
    look = lambda x: seen.append(len(x)) or x[:, None].expand(-1, 10).float() * 2
    monkeypatch.setattr("unalike.data.device_cache.MAX_BYTES", 20 * 10 * 4 - 1)
    held = cache_on_device(given, "cpu", look)
    for _ in range(2):
        x, y = held.rows(torch.tensor([5, 0]))
        assert x[:, 3].tolist() == [10, 0] and y.tolist() == [5, 0]
    assert isinstance(held, DeviceCache) and held.cache is None and seen == [16, 2, 2]
    monkeypatch.setattr("unalike.data.device_cache.MAX_BYTES", 20 * 10 * 4)
    assert cache_on_device(given, "cpu", look).rows(torch.tensor([5]))[0][0, 3] == 10 and seen[
        3:
    ] == [
        16,
        4,
    ]


@pytest.mark.parametrize("index", [None, torch.tensor([2, 0, 1])])
def test_a_reader_may_change_what_it_was_given(index):
    held = DeviceCache(Tensors(torch.arange(6.0), torch.arange(6), index), "cpu")
    numbers = [0, 1, 2, 3, 4, 5] if index is None else [2, 0, 1]
    for _ in range(2):
        for order in (slice(None), slice(None, None, -1)):
            rows = torch.tensor(list(range(len(held)))[order])
            x, y = held.rows(rows)
            assert x.tolist() == y.tolist() == numbers[order]
            x.zero_()
            y.zero_()


def test_what_is_here_already_or_read_on_demand_stays_as_it_is():
    here, lazy = (
        Tensors(torch.arange(3), None),
        Lazy(torch.utils.data.TensorDataset(torch.arange(3))),
    )
    assert (
        cache_on_device(here, "cpu") is here
        and cache_on_device(lazy, "cuda") is lazy
        and cache_on_device(None, "cuda") is None
    )
    assert isinstance(cache_on_device(here, "cuda"), DeviceCache)


@pytest.mark.parametrize("options", [{"stage": 6}, {"adapted": 8}])
def test_a_client_with_a_frozen_trunk_learns_the_same_from_what_that_saw(options):
    hides = type(
        "Hides", (EfficientNetLite,), {"has_fixed_trunk": False}
    )  # nobody knows of its trunk
    x, y = (
        torch.randint(
            256, (12, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        ),
        torch.arange(12) % 3,
    )

    def trained(hidden):
        def model():
            return (hides if hidden else EfficientNetLite)(
                (3, 32, 32), weights="none", adapters=2, **options
            )

        client = Client("ada", model, Classification(3), train=(x, y), test=(x, y))
        program = ClientProgram(client, FedAvg(), Training(batch_size=4), 0)
        program.learn(range(2))
        return program

    plain, kept = trained(True), trained(False)
    assert isinstance(plain.client.train, Tensors) and isinstance(kept.client.train, DeviceCache)
    for a, b in zip(plain.model.parameters(), kept.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert plain.evaluate() == kept.evaluate() and kept.example_input().shape == (1, 3, 32, 32)
    assert kept.client.info() == plain.client.info()


@pytest.mark.parametrize(
    "name, options, x",
    [
        (
            "resnet18",
            {"base": 8, "size": 8},
            torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        ),
        (
            "gru",
            {"words": 20, "embedding": 4, "width": 4, "length": 3},
            torch.arange(96).view(12, 8).int() % 30 + 90,
        ),
    ],
)
def test_images_are_resized_and_words_numbered_once(name, options, x):
    client = Client(
        "ada",
        partial(build_encoder, name, tuple(x.shape[1:]), options),
        Classification(3),
        train=(x, torch.arange(12) % 3),
    )
    program = ClientProgram(client, FedAvg(), Training(batch_size=4), 0)
    assert isinstance(program.client.train, DeviceCache)
    encoder, rows = program.model.encoder.eval(), torch.arange(5)
    torch.testing.assert_close(encoder(program.client.train.rows(rows)[0]), encoder(x[:5]))
    plain = ClientProgram(
        Client(
            "ben",
            partial(build_encoder, "resnet18", (3, 16, 16), {"base": 8}),
            Classification(3),
            train=(torch.rand(4, 3, 16, 16), torch.arange(4) % 3),
        ),
        FedAvg(),
        Training(),
        0,
    )
    assert isinstance(plain.client.train, Tensors), "a trunk that does nothing is not asked"


def test_public_pictures_are_no_larger_than_a_clients_own():
    """With a frozen trunk and without; what is no picture of its kind, or smaller, stays. What it tells of the public set is as it was."""
    draw = torch.Generator().manual_seed(0)
    pictures = lambda rows, channels, program: torch.randint(
        256, (rows, channels, program, program), dtype=torch.uint8, generator=draw
    )
    own, public = pictures(4, 3, 32), pictures(5, 3, 64)
    client = Client(
        "ada",
        partial(
            build_encoder,
            "efficientnet",
            (3, 32, 32),
            {"stage": 6, "weights": "none", "adapters": 2},
        ),
        Classification(2),
        train=(own, torch.arange(4) % 2),
        public=public,
    )
    seen = client.public_to_device(public)
    assert (
        torch.equal(seen, client.to_device(resize(public, (32, 32))))
        and float((seen.mean() - client.to_device(public).mean()).abs()) < 0.01
    )
    assert float(seen.std()) < 0.6 * float(client.to_device(public).std()), (
        "every pixel counts, or noise would be left"
    )
    encoder = client.encoder(0)
    kept = client.with_cached_features(find_trunk(encoder))
    assert isinstance(kept.public, DeviceCache)
    torch.testing.assert_close(kept.public.rows(torch.arange(5))[0], encoder.trunk(seen))
    assert kept.info() == client.info() and client.info().public_shape == "(3, 64, 64)"
    for other in (pictures(5, 3, 16), pictures(5, 24, 64), pictures(5, 1, 64)):
        assert torch.equal(client.public_to_device(other), client.to_device(other))
    assert client.public_to_device(pictures(2, 3, 64)[:, :, :, :20]).shape == (2, 3, 32, 20), (
        "no side is longer than its own, none made longer"
    )
    words = torch.arange(60).view(5, 12)
    assert client.public_to_device({"image": public, "text": words})["text"] is words
    assert client.public_to_device({"image": public})["image"].shape == (5, 3, 32, 32)


def test_what_a_trunk_has_enlarged_stays_so():
    """The trunk of `resnet18` gives pictures, too."""
    draw = torch.Generator().manual_seed(0)
    own, public = torch.rand(4, 3, 16, 16, generator=draw), torch.rand(5, 3, 24, 24, generator=draw)
    client = Client(
        "ada",
        partial(build_encoder, "resnet18", (3, 16, 16), {"base": 8, "size": 32}),
        Classification(2),
        train=(own, torch.arange(4) % 2),
        public=public,
    )
    program = FedMuscle.Program(client, FedMuscle(), Training(), 0)
    seen = public_batch(program, torch.arange(5))
    assert isinstance(program.client.public, DeviceCache) and seen.shape == (5, 3, 32, 32)
    torch.testing.assert_close(seen, resize(resize(public, (16, 16)), (32, 32)))
    assert public_batch(program, torch.arange(5), raw=True).shape == (5, 3, 16, 16)


def test_pictures_among_modalities_are_no_larger_either():
    own = {"image": torch.rand(4, 3, 16, 16), "sound": torch.rand(4, 6)}
    client = Client("ada", torch.nn.Identity(), Classification(2), train=(own, torch.arange(4) % 2))
    seen = client.public_to_device(
        {
            "image": torch.rand(5, 3, 32, 32),
            "sound": torch.rand(5, 6),
            "text": torch.zeros(5, 3, 20, 20),
        }
    )
    assert {name: tuple(part.shape[1:]) for name, part in seen.items()} == {
        "image": (3, 16, 16),
        "sound": (6,),
        "text": (3, 20, 20),
    }
