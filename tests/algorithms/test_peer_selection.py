"""Choice of peers: at random or by relevance, how often, and the client itself as a peer."""

import pytest
import torch

from unalike.algorithms import FedMuscle


def test_peers_by_relevance_are_the_similar_ones(toys, tmp_path):
    """a and b represent the rows alike but for a rotation, c and d likewise; the two pairs have
    nothing in common."""
    draws = torch.Generator().manual_seed(0)
    shapes = {
        pair: torch.randn(24, 8, dtype=torch.float64, generator=draws) for pair in ("ab", "cd")
    }
    turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=draws))[0]
    views = {
        "a": shapes["ab"],
        "b": shapes["ab"] @ turn,
        "c": shapes["cd"],
        "d": shapes["cd"] @ turn,
    }
    algorithm = toys.method("fedmuscle", peer_selection="relevance", peers=1)
    fed = toys.federation(tmp_path, algorithm, [toys.client(c) for c in "abcd"])
    assert algorithm.draw_peers(fed, views, 1, 0, 0) == {
        "a": ["b"],
        "b": ["a"],
        "c": ["d"],
        "d": ["c"],
    }
    assert (
        fed.state["relevance"]["a"]["b"] == pytest.approx(1)
        and fed.state["relevance"]["a"]["c"] < 0.7
    )


def test_random_peers_are_all_other_clients_in_turn(toys, tmp_path):
    algorithm = toys.method("fedmuscle", peers=2)
    fed = toys.federation(tmp_path, algorithm, [toys.client(c) for c in "abcd"])
    views = {c: torch.zeros(2, 8) for c in "abcd"}
    draws = [algorithm.draw_peers(fed, views, round, 0, 0)["a"] for round in range(1, 30)]
    assert all("a" not in peers and len(set(peers)) == 2 for peers in draws)
    assert {frozenset(peers) for peers in draws} == {frozenset(p) for p in ("bc", "bd", "cd")}
    assert algorithm.draw_peers(fed, {"a": views["a"]}, 1, 0, 0) == {}, "nobody to be pulled to"


@pytest.mark.parametrize(
    "fields", [{}, {"loss": "pairwise"}, {"temperature": [[0.2] * 4] * 4}, {"samples": 4}]
)
def test_self_peers_are_the_detached_client_whoever_computes_the_loss(
    fields, outcome, toys, tmp_path
):
    states = {
        way: outcome(peers=2, self_peers=1, final_model="aligned", exchange=way, **fields)
        for way in ("gradient", "peers")
    }
    if "samples" not in fields:  # combinations are drawn by whoever computes
        assert toys.apart(states["gradient"], states["peers"]) < 1e-9
    if not fields:
        assert (
            toys.apart(
                states["gradient"],
                outcome(peers=2, self_peers=1, final_model="aligned", exchange="paper"),
            )
            < 1e-9
        )
    assert toys.apart(states["gradient"], outcome(peers=2, final_model="aligned", **fields)) > 1e-4
    assert toys.apart(states["gradient"], outcome(peers=1, final_model="aligned", **fields)) > 1e-4
    algorithm = toys.method("fedmuscle", peers=2, self_peers=1)
    fed = toys.federation(tmp_path / "fed", algorithm, [toys.client(c) for c in "abcd"])
    chosen = algorithm.draw_peers(fed, {c: torch.zeros(2, 8) for c in "abcd"}, 1, 0, 0)
    assert all(len(peers) == 1 and peers[0] != client for client, peers in chosen.items())
    assert algorithm.draw_peers(fed, {"a": torch.zeros(2, 8)}, 1, 0, 0) == {}


def test_with_self_peers_only_other_clients_do_not_matter(outcome, toys):
    settings = {"peers": 3, "self_peers": 3, "final_model": "aligned"}
    many, few = outcome(**settings), outcome([toys.client("a"), toys.client("c")], **settings)
    assert toys.apart({"a": many["a"]}, {"a": few["a"]}) < 1e-12
    assert (
        toys.apart(
            {"a": many["a"]},
            {
                "a": outcome(
                    final_model="local", **{k: v for k, v in settings.items() if k != "final_model"}
                )["a"]
            },
        )
        > 1e-6
    )


def test_peers_are_redrawn_per_batch_or_per_pass(outcome, toys, monkeypatch):
    draws = []
    draw = FedMuscle.draw_peers
    monkeypatch.setattr(
        FedMuscle, "draw_peers", lambda self, *a: draws.append(draw(self, *a)) or draws[-1]
    )
    outcome(rounds=1, redraw="pass")
    assert len(draws) == 3 and all(chosen == draws[0] for chosen in draws)
    draws.clear()
    outcome(rounds=1, redraw="batch")
    assert any(chosen != draws[0] for chosen in draws)
