"""Views of samples: what they may change and what they leave."""

import pytest
import torch

from unalike.data.augmentation import augment


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("strong", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (4, 1, 5, 9), (4, 6), (1, 6), (4, 2, 3)])
def test_shape_and_kind_stay_and_something_changes(shape, strong):
    x = torch.randn(shape)
    seen = augment(x, strong)
    assert seen.shape == x.shape and seen.dtype == x.dtype and torch.isfinite(seen).all()
    assert not torch.equal(seen, x) or shape == (1, 6)


def test_where_nothing_may_move_a_weak_view_changes_nothing_and_a_strong_one_the_light():
    x = torch.rand(8, 1, 8, 8)
    assert torch.equal(augment(x, strong=False, moves=False), x)
    seen = augment(x, moves=False)
    gone = (seen == 0).flatten(1).sum(1)
    assert gone.tolist() == [4] * 8
    for one, other in zip(x, seen, strict=True):  # what is left is a line through what was there
        left = other != 0
        assert torch.corrcoef(torch.stack([one[left], other[left]]))[0, 1] > 0.999


def test_mirrored_only_where_allowed():
    x = torch.arange(8.0).expand(200, 1, 8, 8)
    slopes = lambda flips: torch.sign(
        (augment(x, strong=False, flips=flips)[..., 3:6].diff(dim=-1)).mean((1, 2, 3))
    )
    assert set(slopes(True).tolist()) == {1, -1} and set(slopes(False).tolist()) == {1}


def test_texts_only_lack_words_and_marks_stay():
    x = torch.randint(1, 9, (50, 40))
    weak, strong = augment(x, strong=False), augment(x)
    assert ((weak == x) | (weak == 0)).all() and ((strong == x) | (strong == 0)).all()
    assert (
        0.05 < float((weak == 0).float().mean()) < 0.15 < float((strong == 0).float().mean()) < 0.25
    )
    letters = torch.tensor(
        [[ord(letter) for letter in "one two three four five"]] * 50, dtype=torch.int32
    )
    texts = {"".join(map(chr, filter(None, row))).strip() for row in augment(letters).tolist()}
    assert len(texts) > 5 and all(
        set(text.split()) <= {"one", "two", "three", "four", "five"} for text in texts
    )
    mark = torch.tensor([True, False])
    seen = augment({"left": torch.rand(2, 3), "left?": mark})
    assert torch.equal(seen["left?"], mark) and seen["left"].shape == (2, 3)
