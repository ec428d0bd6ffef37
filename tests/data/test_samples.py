"""Samples in memory and on demand say the same, views copy nothing, fingerprints tell data apart."""

import re

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from unalike.data.samples import Lazy, Tensors, as_samples, concat, fingerprint

X, Y = torch.arange(40.0).reshape(10, 4), torch.arange(10)
PICK = torch.tensor([7, 2, 2])


class Stored(Dataset):
    def __init__(self, *tensors):
        self.tensors, self.read = tensors, []

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, row):
        self.read.append(row)
        item = tuple(tensor[row] for tensor in self.tensors)
        return item if len(item) > 1 else item[0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "held", [as_samples((X, Y)), as_samples(TensorDataset(X, Y)), as_samples(Stored(X, Y))]
)
def test_rows_views_and_shape_agree(held):
    assert len(held) == 10 and held.shape == (4,) and as_samples(held) is held
    x, y = held.rows(PICK)
    assert torch.equal(x, X[PICK]) and torch.equal(y, Y[PICK])
    view = held.subset(torch.tensor([9, 8, 7])).subset(torch.tensor([2, 0]))
    assert len(view) == 2 and torch.equal(view.rows(torch.tensor([0, 1]))[1], torch.tensor([7, 9]))


def test_views_share_memory():
    view = as_samples((X, Y)).subset(PICK)
    assert view.x is X and view.y is Y


def test_a_dataset_is_read_only_where_asked():
    stored = Stored(X, Y)
    held = as_samples(stored).subset(PICK)
    assert stored.read == []
    held.rows(torch.tensor([0, 1]))
    assert stored.read == [7, 2]


def test_labels_may_be_missing():
    for held in (as_samples((X, None)), as_samples(TensorDataset(X)), as_samples(Stored(X))):
        x, y = held.rows(PICK)
        assert torch.equal(x, X[PICK]) and y is None


def test_inputs_may_be_modalities():
    held = as_samples(
        ({"image": torch.zeros(3, 1, 2, 2), "text": torch.ones(3, 5)}, torch.arange(3))
    )
    assert held.shape == {"image": (1, 2, 2), "text": (5,)} and len(held) == 3
    x, y = held.subset(torch.tensor([2, 1])).rows(torch.tensor([0]))
    assert x["text"].shape == (1, 5) and y.tolist() == [2]


def test_a_subset_of_tensors_stays_in_memory():
    held = as_samples(Subset(TensorDataset(X, Y), [4, 1]))
    assert isinstance(held, Tensors) and held.rows(torch.tensor([0]))[1].tolist() == [4]
    assert isinstance(as_samples(Subset(Stored(X, Y), [4])), Lazy)


def test_fingerprints_tell_data_apart():
    changed = X.clone()
    changed[9, 3] += 1
    prints = [
        fingerprint(as_samples(data))
        for data in (
            (X, Y),
            (X, None),
            (changed, Y),
            (X, Y.flip(0)),
            (X.double(), Y),
            (X.reshape(10, 2, 2), Y),
            (X[:9], Y[:9]),
            ({"a": X}, Y),
            ({"b": X}, Y),
            (torch.zeros(0, 4), None),
        )
    ]
    assert len(set(prints)) == len(prints)
    assert all(re.fullmatch("[0-9a-f]{16}", print) for print in prints)


def test_fingerprints_depend_on_the_rows_alone():
    assert fingerprint(as_samples((X, Y)).subset(PICK)) == fingerprint(
        as_samples((X[PICK], Y[PICK]))
    )
    assert fingerprint(as_samples((X.T.contiguous().T, Y))) == fingerprint(as_samples((X, Y)))
    assert fingerprint(as_samples(Stored(X, Y))) == fingerprint(as_samples((X, Y)))  # up to 64 rows
    for dtype in (torch.bfloat16, torch.bool, torch.uint8):
        fingerprint(as_samples((X.to(dtype), Y)))
    many = torch.arange(3000)
    assert fingerprint(as_samples((many, None))) != fingerprint(as_samples((many.flip(0), None)))


def test_a_fingerprint_on_demand_reads_64_rows():
    stored = Stored(torch.arange(500))
    fingerprint(as_samples(stored))
    assert stored.read == list(range(64))
    assert fingerprint(as_samples(Stored(torch.arange(501)))) != fingerprint(as_samples(stored))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("digits", "got str"),
        (X, "got Tensor"),
        ((X, Y, Y), "got tuple of 3"),
        (TensorDataset(X, Y, Y), "got tuple of 3"),
        ((X, Y[:3]), "same number of rows, got .*'x': 10, 'y': 3"),
        (("abcdefghij", Y), "got str for x"),
        (([[1.0, 2.0], [3.0]], Y), "rows of a list must have one shape"),
        ((X, ["no", "yes"] * 5), "an array must hold numbers, got <U3"),
        (({}, None), "no modality"),
        (({"left": X, "right": X[:3]}, Y), "same number of rows, got .*'left': 10, 'right': 3"),
        (
            ({"left": X, "right?": Y > 0}, Y),
            r'"right\?" says which samples have modality "right", which must be there',
        ),
        (
            ({"left": X, "left?": torch.ones(10)}, Y),
            r"truth value \(torch.bool\) a sample, got torch.float32",
        ),
        (
            ({"left": X, "left?": Y > 1}, Y),
            "2 of 10 samples have no modality at all, the first is row 0",
        ),
        ((torch.tensor(1.0), None), "without rows"),
        (Stream(), "Stream has not"),
    ],
)
def test_what_is_not_data_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        as_samples(data)


def test_lists_of_numbers_and_of_arrays_are_taken():
    samples = as_samples((list(X.numpy()), Y.tolist()))
    assert torch.equal(samples.rows(PICK)[0], X[PICK])
    assert torch.equal(samples.rows(PICK)[1], Y[PICK])


def test_a_dataset_of_triples_or_no_rows_is_refused():
    with pytest.raises(ValueError, match="yields 3 things"):
        as_samples(Stored(X, Y, Y)).rows(PICK)
    with pytest.raises(ValueError, match="0 rows"):
        as_samples(Stored(X, Y)).rows(PICK[:0])


def test_sets_of_one_kind_are_joined_and_pictures_brought_to_the_largest():
    """Bytes stay bytes; those of the largest set are as they were, and a smaller picture of one brightness stays of that brightness."""
    large, small = (
        torch.randint(256, (4, 3, 8, 6), dtype=torch.uint8),
        torch.full((3, 3, 4, 6), 77, dtype=torch.uint8),
    )
    made = concat(
        {"large": Tensors(large, torch.arange(4), torch.tensor([2, 0])), "small": Tensors(small)}
    )
    x, y = made.rows(torch.arange(5))
    assert y is None and x.dtype == torch.uint8 and made.shape == (3, 8, 6)
    assert torch.equal(x[:2], large[[2, 0]]) and (x[2:] == 77).all()
    rows = concat({"a": Tensors(torch.zeros(2, 5)), "b": Tensors(torch.ones(1, 5))}).rows(
        torch.arange(3)
    )[0]
    assert rows.sum(1).tolist() == [0, 0, 5]
    ramp = torch.arange(4.0).reshape(1, 1, 1, 4).expand(1, 1, 4, 4)
    stretched = concat({"a": Tensors(torch.zeros(1, 1, 8, 8)), "b": Tensors(ramp)}).rows(
        torch.tensor([1])
    )[0][0, 0]
    assert (stretched.diff(dim=1) >= 0).all() and stretched[0, 0] < 0.5 and stretched[0, -1] > 2.5


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            torch.zeros(2, 3, 4, 4),
            "rows of bytes are pictures of 3 channels in uint8, those of other pictures of 3 channels in float32",
        ),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "pictures of 1 channel in uint8"),
        (torch.zeros(2, 12, dtype=torch.uint8), r"of shape \(12,\) in uint8"),
        ({"image": torch.zeros(2, 3, 4, 4)}, "other has several modalities"),
    ],
)
def test_sets_of_other_kinds_are_not_joined(other, said):
    with pytest.raises(ValueError, match=said):
        concat(
            {"bytes": Tensors(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)), "other": Tensors(other)}
        )
