"""CIFAR-10, PACS and AG News from files as small as can be, and what is said where there are none."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from unalike.data import load_dataset
from unalike.data.agnews import hash_text
from unalike.data.partitions import apart


def test_cifar10(tmp_path):
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "cifar10.npz",
        x_train=draw.integers(0, 256, (6, 32, 32, 3), np.uint8),
        y_train=np.arange(6, dtype=np.uint8),
        x_test=draw.integers(0, 256, (4, 32, 32, 3), np.uint8),
        y_test=np.arange(4, dtype=np.uint8),
    )
    table = load_dataset("cifar10", str(tmp_path))
    chosen = load_dataset("cifar10", str(tmp_path), choosing=True)
    assert chosen.train.tolist() == [1, 2, 3, 4] and chosen.test.tolist() == [0, 5], (
        "none of the test set"
    )
    assert (
        table.x.shape == (10, 3, 32, 32)
        and table.x.dtype == torch.float32
        and len(table.train) == 6
        and len(table.test) == 4
    )
    torch.testing.assert_close(table.x[:6].mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    assert table.targets["thing"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


def test_pacs(tmp_path):
    images = []
    for shade in range(32):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), (7 * shade, 0, 0)).save(buffer, "JPEG")
        images.append(np.frombuffer(buffer.getvalue(), np.uint8))
    np.savez(
        tmp_path / "pacs_64_jpeg.npz",
        jpeg=np.concatenate(images),
        off=np.cumsum([0, *map(len, images)]),
        y=np.arange(32) % 2,
        domain=np.arange(32) // 8,
        classes=["dog", "horse"],
        domains=["art", "cartoon", "photo", "sketch"],
    )
    table = load_dataset("pacs", str(tmp_path))
    assert table.x.shape == (32, 3, 8, 8) and len(table.train) == 24 and len(table.test) == 8
    assert table.tasks["domain"].labels == ("art", "cartoon", "photo", "sketch")
    assert table.targets["domain"][table.test].bincount().tolist() == [2, 2, 2, 2], (
        "every style is tested alike"
    )
    assert (table.x[1:, 0].mean((1, 2)) > table.x[:-1, 0].mean((1, 2))).all()
    seen = table.x[table.train][:, 0]
    assert abs(seen.mean()) < 1e-5 < abs(table.x[:, 0].mean()) and abs(seen.std() - 1) < 1e-5, (
        "by the rows to train on alone"
    )
    red = load_dataset("pacs", str(tmp_path), pixels="bytes").x[:, 0, 0, 0]
    assert red.dtype == torch.uint8 and ((red.int() - 7 * torch.arange(32)).abs() <= 1).all()


def test_agnews(tmp_path):
    (tmp_path / "agnews_train_subset.csv").write_text(
        '3,"Oil, up",Prices rise\n1,War,"Peace talks, again"\n'
    )
    (tmp_path / "agnews_test.csv").write_text("4,Chips,Faster chips\n")
    table = load_dataset("agnews", str(tmp_path))
    assert (
        table.x.shape == (3, 64)
        and table.targets["topic"].tolist() == [2, 0, 3]
        and table.test.tolist() == [2]
    )
    assert (
        table.x[0, :7].tolist() == hash_text("oil up prices rise")[:7]
        and table.x[0, 7:].sum() == 0
        and table.x.max() <= 20000
    )


@pytest.mark.parametrize(
    "name, file",
    [("cifar10", "cifar10.npz"), ("pacs", "pacs_64_jpeg.npz"), ("agnews", "agnews_train.csv")],
)
def test_a_missing_file_is_told_with_where_to_get_it(name, file, tmp_path):
    with pytest.raises(ValueError, match=rf"{name} needs {file}.*https://"):
        load_dataset(name, str(tmp_path))


def test_apart_gives_each_client_one_class_and_shares_it_evenly():
    y = torch.arange(40) % 4
    dealt = apart(y, 8, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(dealt).tolist()) == list(range(40)) and {
        len(part) for part in dealt
    } == {5}
    assert [y[part].unique().tolist() for part in dealt] == [[0], [1], [2], [3]] * 2
    few = apart(y, 3, torch.Generator().manual_seed(0))
    assert [y[part].unique().tolist() for part in few] == [[0, 3], [1], [2]]


def test_a_clients_test_rows_are_of_what_its_rows_were_dealt_by(tmp_path):
    from unalike.scenarios import build_clients, load

    test_pacs(tmp_path)
    scenario, _ = load(
        "subflot-pacs", settings=["clients=[{id: c, count: 4, target: thing, model: {name: mlp}}]"]
    )
    domain = load_dataset("pacs", str(tmp_path)).targets["domain"]
    for i, client in enumerate(build_clients(scenario, str(tmp_path))):
        assert (
            set(domain[client.train.index].tolist())
            == set(domain[client.test.index].tolist())
            == {i}
        )
