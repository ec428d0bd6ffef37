"""AFMCC: clusters are found, by whom and in which process does not matter, a stopped run ends the same, the formulas are the paper's."""

import pytest
import torch

from unalike import Clustering
from unalike.algorithms.afmcc import AFMCC
from unalike.losses.clustering import class_correlation_loss, fusion_contrast, reconstruction
from unalike.models.autoencoder import Autoencoder

SHAPE = {"left": (3,), "right": (3,)}


def clients(toys, owned=("left right", "left right", "left", "right"), **about):
    """Blobs whose first three features are one modality and whose last three are another."""
    made = []
    for id, names in zip("abcd", owned, strict=False):
        x, y = toys.blobs(24, ord(id))
        x = {name: part for name, part in (("left", x[:, :3]), ("right", x[:, 3:])) if name in names.split()}
        made.append(toys.client(id, model=lambda: Autoencoder(SHAPE, (8,), 4), task=Clustering(4), train=(x, y), test=(x, y),
                                public=None, **about))
    return made


def small(**changed):
    return AFMCC(**({"starts": 5, "pretraining": 20, "steps": 2} | changed))


def test_finds_clusters(toys, tmp_path):
    results = toys.execute(tmp_path / "run", small(), clients(toys), rounds=6, rate=0.01)
    assert results["metrics"]["acc"] > 60 and results["metrics"]["joint"]["acc"] > 60
    assert set(results["clients"]["c"]["metrics"]) == {"acc", "nmi", "ari"} and not results["failures"]


@pytest.mark.parametrize("weights", ["uniform", "far", "near"])
def test_processes_and_memory_make_no_difference(toys, tmp_path, weights):
    ends = []
    for i, how in enumerate(({}, {"workers": 2}, {"alive": 1})):
        toys.execute(tmp_path / str(i), small(weights=weights), clients(toys), rounds=2, **how)
        ends.append(toys.states(tmp_path / str(i)))
    assert toys.apart(ends[0], ends[1]) <= 1e-9 and toys.apart(ends[0], ends[2]) <= 1e-9


def test_sending_all_models_gives_the_same(toys, tmp_path):
    """Where all arrive at the same instants; else two messages a visit meet other models than one does."""
    for how in ("encoders", "paper"):
        toys.execute(tmp_path / how, small(exchange=how), clients(toys, ["left right"] * 3), rounds=2)
    assert toys.apart(toys.states(tmp_path / "encoders"), toys.states(tmp_path / "paper")) <= 1e-9


def test_a_stopped_run_ends_the_same(toys, tmp_path):
    class Stopped(BaseException):
        pass

    def stop(event, **facts):
        if event == "round" and facts["round"] == 5:
            raise Stopped

    whole = toys.execute(tmp_path / "whole", small(), clients(toys), rounds=3)
    with pytest.raises(Stopped):
        toys.execute(tmp_path / "cut", small(), clients(toys), rounds=3, watch=stop)
    assert toys.hashes(toys.execute(tmp_path / "cut", small(), clients(toys), rounds=3)) == toys.hashes(whole)


def test_slow_clients_are_not_waited_for(toys, tmp_path):
    quick, slow = (toys.execute(tmp_path / str(i), small(), [*clients(toys)[:2], *clients(toys, speed=speed)[2:]], rounds=2)["clock"]
                   for i, speed in enumerate((1000.0, 10.0)))
    visits = [row for row in (tmp_path / "1" / "events.jsonl").read_text().splitlines() if '"arrival"' in row]
    first = [row.split('"client": "')[1][0] for row in visits]
    assert slow > 5 * quick
    assert {"c", "d"}.isdisjoint(first[:6]) and {"a", "b"}.isdisjoint(first[-4:])      # two visits of two messages each


def test_objective_is_equation_7(toys):
    method = small(alpha=0.7, beta=0.3, error="sample")
    side = method.Side(clients(toys)[0], method, toys.training(), 0)
    x = side.client.place(side.client.train.rows(torch.arange(10))[0])
    auto = side.model.encoder
    z = {name: auto.encoders[name](x[name]) for name in x}
    h = z["left"]                                       # fused from one modality, both are rebuilt
    by_hand = sum(reconstruction(x[v], auto.decoders[v](h), "sample") + 0.7 * fusion_contrast(h, z[v], 0.5) for v in x)
    by_hand = by_hand + 0.3 * class_correlation_loss((h @ side.model.head.weight.mT).softmax(-1), 0.3)
    assert torch.allclose(side.objective(x, ("left",)), by_hand, rtol=1e-12)


def test_weights_follow_the_distance(toys):
    """A model whose codes lie farther from the client's own fused features counts more as printed, less the other way round."""
    shares = {}
    for weights in ("far", "near"):
        method = small(weights=weights, sharpness=2.0)
        side = method.Side(clients(toys)[0], method, toys.training(), 0)
        own = {name: t.clone() for name, t in side.model.state_dict().items()}
        away = {name: t + 1.0 if "encoders" in name else t for name, t in own.items()}
        shares[weights] = side.shares({"a": own, "b": away})
        assert sum(shares[weights]) == pytest.approx(1) and all(torch.equal(t, own[n]) for n, t in side.model.state_dict().items())
    assert shares["far"][1] > 0.5 > shares["near"][1]


def test_other_models_and_tasks_are_refused(toys, tmp_path):
    with pytest.raises(ValueError, match="autoencoder"):
        toys.execute(tmp_path / "1", small(), [toys.client("a", task=Clustering(4))])
    with pytest.raises(ValueError, match="clustering"):
        toys.execute(tmp_path / "2", small(), [toys.client("a")])
