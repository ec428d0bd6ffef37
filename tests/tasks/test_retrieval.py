"""Retrieval: loss and recalls by hand, ties, several texts of one image, what is refused."""

import pytest
import torch

from unalike.tasks import Retrieval


def pairs(images, texts):
    return torch.stack([torch.tensor(images), torch.tensor(texts)], 1)


def test_loss_is_symmetric_cross_entropy_without_pairs_of_the_same_thing():
    z = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    unit = torch.nn.functional.normalize(z, dim=-1)
    logits = unit[:, 0] @ unit[:, 1].mT / 0.07
    here = torch.arange(5)
    by_hand = (
        torch.nn.functional.cross_entropy(logits, here)
        + torch.nn.functional.cross_entropy(logits.mT, here)
    ) / 2
    assert torch.allclose(Retrieval().loss(z, here), by_hand)
    logits[0, 1] = logits[1, 0] = -1e9  # rows 0 and 1 are of one image
    by_hand = (
        torch.nn.functional.cross_entropy(logits, here)
        + torch.nn.functional.cross_entropy(logits.mT, here)
    ) / 2
    assert torch.allclose(Retrieval().loss(z, torch.tensor([7, 7, 2, 3, 4])), by_hand)


def test_recalls_by_hand():
    """Text 1 is nearer to image 0 than its own; image 1 finds its text."""
    meter = Retrieval().meter()
    meter.add(pairs([[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.8], [0.8, 0.6]]), torch.tensor([0, 1]))
    metrics = meter.result()
    assert (
        metrics["i2t_R@1"] == 0
        and metrics["t2i_R@1"] == 0
        and metrics["i2t_R@5"] == 100
        and metrics["rank"] == 2
    )
    assert metrics["recall"] == pytest.approx(400 / 6)


def test_an_image_with_several_texts_is_one_query_and_any_text_is_right():
    meter = Retrieval().meter()
    meter.add(
        pairs([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [-1.0, 0.0], [0.1, 1.0]]),
        torch.tensor([4, 4, 9]),
    )
    metrics = meter.result()
    assert metrics["i2t_R@1"] == 100 and metrics["t2i_R@1"] == pytest.approx(200 / 3)


def test_ties_count_half():
    meter = Retrieval().meter()
    meter.add(torch.ones(100, 2, 3), torch.arange(100))
    metrics = meter.result()
    assert metrics["i2t_R@1"] == 0 and metrics["rank"] == pytest.approx(50.5)


def test_invalid_labels_and_temperatures_are_refused():
    with pytest.raises(ValueError, match="between two kinds"):
        Retrieval(("image",))
    with pytest.raises(ValueError, match="above 0"):
        Retrieval(temperature=0.0)
    with pytest.raises(ValueError, match="no pair"):
        Retrieval().meter().result()
    with pytest.raises(ValueError, match="whole numbers"):
        Retrieval().check(torch.ones(3))
