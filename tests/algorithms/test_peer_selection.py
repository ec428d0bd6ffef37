"""Choice of peers: at random, how often, and the client itself as its only peer."""

import torch

from benchmarks.variants import SelfOnly
from unalike.methods.alignment import Alignment


def test_random_peers_are_all_other_clients_in_turn(toys, tmp_path):
    algorithm = toys.method("fedmuscle", peers=2)
    fed = toys.federation(tmp_path, algorithm, [toys.client(c) for c in "abcd"])
    views = {c: torch.zeros(2, 8) for c in "abcd"}
    draws = [algorithm.draw_peers(fed, views, round, 0, 0)["a"] for round in range(1, 30)]
    assert all("a" not in peers and len(set(peers)) == 2 for peers in draws)
    assert {frozenset(peers) for peers in draws} == {frozenset(p) for p in ("bc", "bd", "cd")}
    assert algorithm.draw_peers(fed, {"a": views["a"]}, 1, 0, 0) == {}, "nobody to be pulled to"


def test_fedmuscle_draws_peers_once_a_pass_and_fedmuscleplus_for_each_batch(
    toys, tmp_path, monkeypatch
):
    """24 public rows in batches of 8, two passes: six batches."""
    draws = []
    draw = Alignment.draw_peers
    monkeypatch.setattr(
        Alignment, "draw_peers", lambda self, *a: draws.append(draw(self, *a)) or draws[-1]
    )
    for name in ("fedmuscle", "fedmuscleplus"):
        method = toys.method(name, passes=2, peers=1, batch=8)
        clients = [toys.client(id) for id in "abcd"]
        toys.serve(toys.federation(tmp_path / name, method, clients, rounds=1), method)
    printed, plus = draws[:6], draws[6:]
    assert len(plus) == 6
    assert printed[0] == printed[1] == printed[2] and printed[3] == printed[4] == printed[5]
    assert printed[0] != printed[3]
    assert any(chosen != plus[0] for chosen in plus[:3])


def test_a_client_that_is_its_own_peer_is_not_moved_by_others(toys, tmp_path):
    """The control `SelfOnly`: whoever else takes part, its model ends the same."""
    states = []
    for ids in ("abcd", "ac"):
        method = SelfOnly(peers=1, width=8, batch=8, final_model="aligned", distill_public="never")
        clients = [toys.client(id) for id in ids]
        states.append(toys.serve(toys.federation(tmp_path / ids, method, clients), method))
    many, few = states
    assert toys.apart({"a": many["a"]}, {"a": few["a"]}) < 1e-12
