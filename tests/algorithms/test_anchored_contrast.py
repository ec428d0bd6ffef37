"""The loss of anchors against peers: stacked, sampled, and with CUDA graphs."""

from dataclasses import replace

import pytest
import torch

from unalike.algorithms import FedMuscle
from unalike.base.errors import Problems
from unalike.base.randomness import stream
from unalike.methods import anchored_contrast, public_alignment
from unalike.models import build_encoder
from unalike.scenarios.validate import validate_algorithm


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"loss": "pairwise"},
        {"loss": "gramian"},
        {"lower_temperature": "consistent"},
        {"peers": 1},
        {"peers": 3},
        {"peers": 3, "samples": 5},
    ],
)
def test_stacked_gradients_equal_those_one_by_one(fields, toys, tmp_path, monkeypatch):
    algorithm = toys.method("fedmuscle", **fields)
    fed = toys.federation(tmp_path, algorithm, [toys.client(c) for c in "abcd"])
    views = dict(
        zip(
            "abcd",
            torch.randn(4, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
            strict=True,
        )
    )
    chosen = algorithm.draw_peers(fed, views, 1, 0, 0)
    pulls, losses = algorithm.contrast.gradients(list(fed.infos), views, chosen, stream(1))
    monkeypatch.setattr(anchored_contrast, "STACKED_PEERS", 0)
    one = [[0.2] * 4] * 4 if "samples" in fields else 0.2  # one per pair: nothing is stacked
    contrast = replace(algorithm, temperature=one).contrast
    alone, separate_losses = contrast.gradients(list(fed.infos), views, chosen, stream(1))
    assert list(pulls) == list(alone) == list("abcd")
    assert all(
        float(losses[c]) == pytest.approx(float(separate_losses[c]), abs=1e-12)
        for c in separate_losses
    )
    assert all(
        torch.allclose(pulls[c], alone[c], rtol=0, atol=1e-12) and pulls[c].abs().max() > 1e-4
        for c in pulls
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="passes are recorded on a GPU only")
@pytest.mark.parametrize(
    "fields",
    [{}, {"exchange": "peers"}, {"sync": "epoch"}, {"loss": "pairwise"}, {"loss": "gramian"}],
)
def test_cuda_graphs_change_nothing(fields, toys, outcome, monkeypatch):
    """Clients with adapters in a mostly frozen network, a plain one, and a random one that is not
    captured."""
    images = lambda rows, seed: torch.randint(
        256, (rows, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    seeing = toys.partial(
        build_encoder, "efficientnet", (3, 32, 32), {"weights": "none", "adapters": 4}
    )

    def clients():
        see = [
            toys.client(
                id,
                model=seeing,
                device="cuda",
                train=(images(20, i), torch.arange(20) % 4),
                test=None,
                public=(images(24, 9), None),
            )
            for i, id in enumerate("ab")
        ]
        return [
            *see,
            toys.client("c", device="cuda"),
            toys.client("d", model=toys.noisy, device="cuda"),
        ]

    results = {}
    for records in (False, True):
        for module in (anchored_contrast, public_alignment):
            monkeypatch.setattr(module, "USE_CUDA_GRAPHS", records)
        anchored_contrast.stacked.cache_clear()
        results[records] = outcome(clients(), rounds=4, final_model="aligned", **fields)
    programs = outcome.fed.engine.host.programs
    assert (
        all(
            programs[c].graphed_forward.graphs and all(programs[c].graphed_forward.graphs.values())
            for c in "abc"
        )
        and not programs["d"].graphed_forward.graphs
    )
    if not fields.keys() & {"exchange", "sync"}:
        contrast = anchored_contrast.stacked(
            fields.get("loss", "muscle"), temperature=0.2, lower_temperature=0.15
        )
        assert contrast.graphs and all(contrast.graphs.values()), (
            "the server's losses are recorded, too"
        )
    anchored_contrast.stacked.cache_clear()
    assert toys.apart(results[False], results[True]) < 1e-8


@pytest.mark.parametrize("fields", [{}, {"exchange": "peers"}, {"sync": "epoch"}])
def test_too_many_index_tuples_are_sampled(fields, outcome, toys, monkeypatch):
    """Of 8^3 index tuples: all, or an estimate that converges to it and is reproducible."""
    exact = outcome(peers=3, rounds=1, final_model="aligned", **fields)
    monkeypatch.setattr(anchored_contrast, "SUMMED_TUPLES", 8**3 - 1)
    chosen, again = (outcome(peers=3, rounds=1, final_model="aligned", **fields) for _ in range(2))
    assert toys.apart(chosen, again) == 0 < toys.apart(chosen, exact)
    few, many = (
        outcome(
            peers=3,
            rounds=1,
            final_model="aligned",
            samples=count,
            training={"optimizer": "sgd"},
            **fields,
        )
        for count in (2, 5000)
    )
    monkeypatch.undo()
    exact = outcome(
        peers=3, rounds=1, final_model="aligned", training={"optimizer": "sgd"}, **fields
    )
    assert toys.apart(many, exact) < toys.apart(few, exact) / 4


def test_nine_peers(outcome, toys):
    outcome([toys.client(c) for c in "abcdefghij"], peers=9, rounds=1)
    (noted,) = [note["values"] for note in outcome.noted if note["name"] == "muscle_loss"]
    assert len(noted) == 10 and all(0 < value < 60 for value in noted.values())
    problems = dict(FedMuscle(peers=9, exchange="paper").check(10, 100))
    assert "32^9 rows" in problems["exchange"]
    with pytest.raises(Problems, match=r"samples +must be at least 1, got 0"):
        validate_algorithm(FedMuscle(samples=0))
