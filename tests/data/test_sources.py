"""Data as people have them: arrays, frames, Hugging Face datasets, loaders, files, partitioners."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unalike
from unalike import Classification, Client, FedAvg, FedMuscle, Local, Training, UserError
from unalike.data.samples import Lazy, Tensors, as_samples, fingerprint
from unalike.models import build_encoder
from unalike.scenarios.client_config import load_client

ROWS = {
    "age": [30.0, 50.0, 70.0, 20.0],
    "bmi": [20.0, 30.0, 25.0, 22.0],
    "ill": ["no", "yes", "yes", "no"],
}


def read(samples, *rows):
    return samples.rows(torch.tensor(rows))


def encoder():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))


def run(clients, tmp_path, method=None, **options):
    training = Training(rounds=1, batch_size=4)
    return unalike.run(
        method or FedAvg(), clients, training=training, out=tmp_path / "run", alone=False, **options
    )


def test_numpy_arrays_are_data(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(12, 3)), np.arange(12) % 2
    clients = [
        Client(id, nn.Linear(3, 4), Classification(2), (x, y), test=(x, y.astype(np.uint16)))
        for id in "ab"
    ]
    assert clients[0].train.x.data_ptr() == torch.from_numpy(x).data_ptr()  # the same memory
    assert 0 <= run(clients, tmp_path)["clients"]["a"]["value"] <= 100
    with pytest.raises(UserError, match=r"must hold numbers, got <U1.*unalike.samples"):
        as_samples((x, np.array(["a"] * 12)))


def test_a_memory_mapped_array_stays_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.float32).reshape(20, 2))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    samples = as_samples((x, None))
    assert samples.x.data_ptr() == x.ctypes.data and read(samples, 3)[0].tolist() == [[6.0, 7.0]]


def test_a_loader_gives_its_dataset():
    loader = DataLoader(
        torch.utils.data.TensorDataset(torch.ones(6, 2), torch.arange(6)), batch_size=4
    )
    assert read(as_samples(loader), 5)[1].item() == 5


def test_any_object_with_length_and_rows_is_a_dataset():
    class Rows:
        def __len__(self):
            return 3

        def __getitem__(self, row):
            return torch.full((2,), float(row)), row

    x, y = read(as_samples(Rows()), 2, 0)
    assert x.tolist() == [[2, 2], [0, 0]] and y.tolist() == [2, 0]


def test_columns_of_a_frame_by_name():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    samples = unalike.samples(frame, x=["age", "bmi"], y="ill")
    x, y = read(samples, 1, 0)
    assert (x.tolist(), y.tolist(), samples.labels) == ([[50, 30], [30, 20]], [1, 0], ("no", "yes"))
    assert samples.subset(torch.tensor([2])).labels == ("no", "yes")
    ages = unalike.samples(frame, x="bmi", y="age")  # a number: for regression
    assert read(ages, 3)[1].tolist() == [20.0] and ages.labels == ()
    assert isinstance(as_samples((frame[["age"]], frame["bmi"])), Tensors)
    with pytest.raises(UserError, match=r"unalike.samples\(frame, x=..., y=...\)"):
        as_samples(frame)


def test_columns_of_categories_become_numbers_and_may_be_missing(tmp_path):
    """A client's table of a number and a category, from a frame to an encoder of tables."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS | {"leg": ["left", None, "right", "left"]})
    columns = {"x": ["age", "leg"], "y": "ill"}
    samples = unalike.samples(frame, **columns, categories={"leg": ["right", "left"]})
    x, y = read(samples, 0, 1, 2)
    assert x[:, 0].tolist() == [30, 50, 70] and y.tolist() == [0, 1, 1]
    assert x[[0, 2], 1].tolist() == [1, 0] and x[1, 1].isnan()
    model = partial(build_encoder, "table", (2,), {"categories": [0, 2]})
    clients = [Client(id, model, Classification(samples.labels), samples, samples) for id in "ab"]
    assert not run(clients, tmp_path)["failures"]
    with pytest.raises(UserError, match='"leg", row 2: There is no category "right"'):
        unalike.samples(frame, **columns, categories={"leg": ["left"]})
    with pytest.raises(UserError, match=r'no column "lge"\. Did you mean "leg"'):
        unalike.samples(frame, **columns, categories={"lge": ["left"]})
    with pytest.raises(UserError, match='column "leg" holds text beside other columns: name its'):
        read(unalike.samples(frame, **columns), 0)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"x": "aeg", "y": "ill"}, 'no column "aeg". Did you mean "age"'),
        ({"x": "age", "y": "il"}, 'no column "il". Did you mean "ill"'),
        (
            {"x": "age", "y": "ill", "labels": ["no", "maybe"]},
            'column "ill", row 1: There is no label "yes"',
        ),
    ],
)
def test_a_column_or_label_that_is_not_there_is_named(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        unalike.samples(ROWS, **arguments)


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_row_without_a_label_is_named(missing):
    """Words and empty cells in one column: what a table with gaps looks like in pandas."""
    table = {"age": [30.0, 50.0], "ill": np.array(["no", missing], dtype=object)}
    for labels in (None, ["no", "yes"]):
        with pytest.raises(UserError, match='column "ill" is empty in 1 of 2 rows: drop them'):
            unalike.samples(table, x=["age"], y="ill", labels=labels)


def test_what_is_no_table_is_named(tmp_path):
    with pytest.raises(UserError, match="columns need the same number of rows"):
        unalike.samples({"a": [1], "b": [1, 2]})
    with pytest.raises(UserError, match=r"takes a pandas DataFrame.*got int"):
        unalike.samples(3)
    with pytest.raises(UserError, match=r"x.csv cannot be read: No such file"):
        unalike.samples(tmp_path / "x.csv")
    with pytest.raises(
        UserError, match=r".csv or .parquet file, or a folder of images, got .*x.txt"
    ):
        unalike.samples(tmp_path / "x.txt")


def test_a_hugging_face_dataset_is_data(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "topic": datasets.ClassLabel(names=["arts", "science"])}
    )
    news = datasets.Dataset.from_dict(
        {"text": ["a b", "atoms", "c"] * 4, "topic": [0, 1, 0] * 4}, features=features
    )
    samples = as_samples(news)
    x, y = read(samples, 1)
    assert isinstance(samples, Lazy) and samples.labels == ("arts", "science")
    assert x.dtype == torch.int32 and chr(int(x[0, 0])) == "a" and y.tolist() == [1]
    own = unalike.samples(
        news, x="text", y="topic", transform=lambda text: torch.tensor([float(len(text))])
    )
    clients = [
        Client(id, nn.Linear(1, 4), Classification(own.labels), own, test=own) for id in "ab"
    ]
    assert run(clients, tmp_path)["clients"]["a"]["value"] is not None


def test_columns_of_a_hugging_face_dataset_must_be_clear():
    datasets = pytest.importorskip("datasets")
    unclear = datasets.Dataset.from_dict({"title": ["a"], "text": ["b"], "label": [0]})
    with pytest.raises(
        UserError, match=r"not clear among title, text, label: write unalike.samples"
    ):
        as_samples(unclear)
    numbers = datasets.Dataset.from_dict({"a": [1.0, 2.0], "b": [3, 4], "label": [0, 1]})
    assert read(as_samples(numbers), 1)[0].tolist() == [[2.0, 4.0]]


def test_images_of_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pictures = [Image.new("RGB", (6, 4), (level, 0, 0)) for level in (10, 20)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    samples = as_samples(
        datasets.Dataset.from_dict({"image": pictures, "label": [0, 1]}, features=features)
    )
    x, _ = read(samples, 1)
    assert x.shape == (1, 3, 4, 6) and x.dtype == torch.uint8 and int(x[0, 0, 0, 0]) == 20


def test_tables_and_image_folders_from_files(tmp_path):
    pandas = pytest.importorskip("pandas")
    from PIL import Image

    for name, level in (("cats/a.png", 1), ("cats/b.png", 2), ("dogs/c.png", 3)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (5, 5), level).save(tmp_path / name)
    folder = unalike.samples(tmp_path, size=4)
    x, y = read(folder, 2)
    assert x.shape == (1, 1, 4, 4) and int(x[0, 0, 0, 0]) == 3 and y.tolist() == [1]
    assert folder.labels == ("cats", "dogs")
    frame = pandas.DataFrame({"file": ["dogs/c.png", "cats/a.png"], "age": [3.5, 1.0]})
    for suffix, write in ((".csv", frame.to_csv), (".parquet", frame.to_parquet)):
        write(tmp_path / f"ages{suffix}", index=False)
        table = unalike.samples(tmp_path / f"ages{suffix}", x="file", y="age", images=tmp_path)
        assert read(table, 0)[0].shape == (1, 1, 5, 5) and read(table, 0)[1].item() == 3.5
    broken = unalike.samples({"file": ["none.png"], "y": [0]}, images=tmp_path)
    with pytest.raises(UserError, match=r"none.png cannot be read: No such file"):
        read(broken, 0)


def test_a_client_file_takes_tables(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(ROWS).to_csv(tmp_path / "rows.csv", index=False)
    text = (
        "id: a\nmodel: {name: mlp, width: 4}\ntask: {name: classification, labels: [yes, no]}\n"
        "data: {train: {file: rows.csv, x: [age, bmi], y: ill}}\n"
    ).replace("[yes, no]", '["yes", "no"]')
    (tmp_path / "client.yaml").write_text(text)
    client = load_client(tmp_path / "client.yaml")
    labels = [client.task.labels[label] for label in client.train.y.tolist()]
    assert labels == ROWS["ill"]
    (tmp_path / "client.yaml").write_text(text.replace("x: [", "xs: ["))
    with pytest.raises(UserError, match=r'data.train .*no field "xs". Did you mean "x"'):
        load_client(tmp_path / "client.yaml")


def test_rows_that_change_shape_are_named():
    class Growing(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, row):
            return torch.ones(2, row + 1), 0

    with pytest.raises(
        UserError, match=r"rows of Growing change shape: \(2, 2\), \(2, 4\); resize or pad"
    ):
        read(as_samples(Growing()), 1, 3)


class WithLabel(Dataset):
    """Four rows, the third of which has this label, the others 1."""

    def __init__(self, label):
        self.label = label

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return torch.ones(3), self.label if row == 2 else torch.ones_like(self.label)


WRONG_LABELS = [
    (Classification(2), torch.tensor(7), "label 7 does not fit 2 classes"),
    (unalike.Regression(["age"]), torch.tensor(torch.nan), "must be finite, got NaN"),
    (unalike.Survival(["death"]), torch.tensor([-2.0, 1.0]), "times are 0 or more, got -2"),
]


@pytest.mark.parametrize(("task", "label", "sentence"), WRONG_LABELS)
def test_wrong_labels_of_a_dataset_are_named_when_they_are_read(task, label, sentence, tmp_path):
    """Also where another client, with another task, reads the same rows."""
    data = as_samples(WithLabel(label))
    client = Client("a", nn.Linear(3, 4), task, data)
    assert read(client.train, 0, 1)[1] is not None
    with pytest.raises(UserError, match=f"WithLabel, among rows 1, 2: .*{sentence}"):
        read(client.train, 1, 2)
    with pytest.raises(UserError, match=sentence):
        read(client.train.subset(torch.tensor([2])), 0)
    assert read(data, 2)[1] is not None


@pytest.mark.parametrize(("task", "label", "sentence"), WRONG_LABELS)
def test_wrong_labels_of_samples_in_memory_are_named(task, label, sentence):
    x, y = read(as_samples(WithLabel(label)), 0, 1, 2, 3)
    samples = Tensors(x, y)
    with pytest.raises(UserError, match=f"client a, train: .*{sentence}"):
        Client("a", nn.Linear(3, 4), task, samples)
    Client("a", nn.Linear(3, 4), task, samples.subset(torch.tensor([0, 1, 3])))


class Dealt:
    """As the partitioners of flwr-datasets are used."""

    num_partitions = 2

    def load_partition(self, number):
        return {"age": [float(number)] * 3, "label": [number] * 3}


def test_objects_that_deal_out_rows_themselves():
    parts = unalike.partition(Dealt(), columns={"x": ["age"], "labels": ["a", "b"]})
    assert [read(part, 0)[0].item() for part in parts] == [0.0, 1.0] and len(parts) == 2
    assert len(unalike.partition(Dealt(), 1, columns={"x": ["age"]})) == 1


def test_a_partition_may_be_a_function():
    def in_turns(y, clients, generator, first=0):
        return [torch.arange((first + i) % clients, len(y), clients) for i in range(clients)]

    parts = unalike.partition((torch.arange(5.0)[:, None], torch.arange(5)), 2, in_turns, first=1)
    assert [part.rows(torch.arange(2))[1].tolist() for part in parts] == [[1, 3], [0, 2]]


def test_a_frame_is_dealt_out_by_its_usual_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [1.0, 2.0, 3.0, 4.0], "target": [0, 1, 0, 1]})
    parts = unalike.partition(frame, 2, "apart")
    assert [part.rows(torch.arange(2))[0].flatten().tolist() for part in parts] == [[1, 3], [2, 4]]


def test_partitions_from_python():
    x, y = torch.arange(40.0)[:, None], torch.arange(40) % 4
    parts = unalike.partition((x, y), 4, "apart")
    assert [part.rows(torch.arange(len(part)))[1].unique().tolist() for part in parts] == [
        [0],
        [1],
        [2],
        [3],
    ]
    dealt = [unalike.partition((x, y), 3, "dirichlet", alpha=0.5, seed=seed) for seed in (0, 0, 1)]
    rows = [[part.index.tolist() for part in parts] for parts in dealt]
    assert rows[0] == rows[1] != rows[2] and sorted(
        row for part in rows[0] for row in part
    ) == list(range(40))
    by = (x[:, 0] < 20).long()
    assert [len(part) for part in unalike.partition((x, None), 2, "apart", by=by)] == [20, 20]
    for arguments, sentence in [
        ((2, "dirichlet", {"alhpa": 1}), 'no option of dirichlet "alhpa". Did you mean "alpha"'),
        ((2, "dirichle", {}), 'no partition "dirichle". Did you mean "dirichlet"'),
        ((50, "iid", {}), "40 rows cannot give 50 clients"),
    ]:
        with pytest.raises(UserError, match=sentence):
            unalike.partition((x, y), arguments[0], arguments[1], **arguments[2])


def public_clients(**publics):
    x, y = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2
    return [
        Client(id, nn.Linear(public.shape[0], 4), Classification(2), (x[:, : public.shape[0]], y), test=(x[:, : public.shape[0]], y), public=public)
        for id, public in publics.items()
    ]  # fmt: skip


def test_clients_may_preprocess_one_public_set_each_in_their_own_way(tmp_path):
    """Fingerprints are those of the rows before the transform: scaled, cut, or as they are."""
    raw = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    scaled, cut = (
        unalike.preprocess(raw, lambda x: x / 2),
        unalike.preprocess(raw, lambda x: x[:, :2]),
    )
    assert fingerprint(scaled) == fingerprint(cut) == fingerprint(as_samples((raw, None)))
    assert fingerprint(scaled.subset(torch.arange(4))) != fingerprint(scaled)
    clients = public_clients(a=scaled, b=cut, c=as_samples((raw, None)))
    method = FedMuscle(peers=1, width=4, batch=8)
    assert len(run(clients, tmp_path, method)["clients"]) == 3
    other = unalike.preprocess(raw + 1, lambda x: x)
    with pytest.raises(ValueError, match="another public set"):
        run(public_clients(a=scaled, b=other), tmp_path / "other", method)


def test_a_public_set_may_be_known_by_a_name(tmp_path):
    small, large = torch.ones(16, 3), torch.zeros(16, 3)
    named = [unalike.preprocess(rows, lambda x: x, id="photos-16") for rows in (small, large)]
    assert fingerprint(named[0]) == fingerprint(named[1]) != fingerprint(as_samples((small, None)))


def test_a_method_without_public_data_does_not_compare_public_sets(tmp_path):
    sets = {id: as_samples((torch.full((16, 3), float(i)), None)) for i, id in enumerate("ab")}
    assert len(run(public_clients(**sets), tmp_path, Local())["clients"]) == 2
