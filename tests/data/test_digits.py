"""The embedded digits: what they hold, and that a table refuses what does not fit."""

import dataclasses

import pytest
import torch

from unalike.data import DATASETS, load_dataset
from unalike.tasks import Classification


@pytest.fixture(scope="module")
def table():
    return load_dataset("digits")


def test_inputs_and_targets(table):
    assert table.x.shape == (1797, 1, 8, 8) and table.x.dtype == torch.float32
    assert table.x.min() == 0 and table.x.max() == 1
    assert {name: task.name for name, task in table.tasks.items()} == {
        "digit": "classification",
        "attributes": "multilabel",
        "ink": "segmentation",
    }
    assert torch.equal(table.targets["ink"], (table.x[:, 0] * 16 >= 8).long())


def test_attributes_describe_the_digit(table):
    even, large, loop, prime = table.targets["attributes"].bool().T
    digit = table.targets["digit"]
    assert torch.equal(even, digit % 2 == 0) and torch.equal(large, digit >= 5)
    assert digit[loop].unique().tolist() == [0, 6, 8, 9] and digit[prime].unique().tolist() == [
        2,
        3,
        5,
        7,
    ]
    assert table.tasks["attributes"].labels == ("even", "at least five", "has a loop", "prime")


def test_the_split_is_fixed_and_stratified(table):
    assert len(table.train) == 1200 and len(table.test) == 597
    assert torch.equal(torch.cat([table.train, table.test]).sort().values, torch.arange(1797))
    shares = table.targets["digit"][table.train].bincount() / table.targets["digit"].bincount()
    assert (shares - 1200 / 1797).abs().max() < 0.01
    again = load_dataset("digits", "/nowhere")
    assert torch.equal(again.train, table.train) and torch.equal(again.x, table.x)


def test_an_unknown_dataset_is_refused():
    with pytest.raises(
        ValueError, match=r'no dataset "digit". Did you mean "digits"\? There are: .*bdgp, .*digits'
    ):
        load_dataset("digit")
    assert "digits" in DATASETS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tasks": {}}, "every target needs a task"),
        ({"train": torch.tensor([0]), "test": torch.tensor([0])}, "some twice or outside"),
        ({"test": torch.tensor([1797])}, "some twice or outside"),
        (
            {
                "targets": {"digit": torch.zeros(3, dtype=torch.int64)},
                "tasks": {"digit": Classification(2)},
            },
            "3 rows for 1797 inputs",
        ),
        (
            {"targets": {"digit": torch.full((1797,), 9)}, "tasks": {"digit": Classification(2)}},
            "label 9 does not fit 2 classes",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(table, change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(table, **change)


def test_captions_say_what_an_image_shows():
    from unalike.data.digits import digits_captions

    table = digits_captions()
    words = table.x["caption"]
    assert words.shape == (1797, 6) and words.min() == 1 and words.max() == 35
    assert torch.equal(words[:, 0] - 1, table.targets["digit"])
    assert len(words.unique(dim=0)) > 1200  # most can be told from all others
    ink = table.x["image"].mean((1, 2, 3))
    assert ink[words[:, 1] == 15].min() > ink[words[:, 1] == 11].max()
