"""Parts of FedMusclePlus in whole runs: resume, safeguard and privacy."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from unalike import Classification, FederationConfig
from unalike.algorithms import FedMusclePlus
from unalike.core.privacy import Privacy
from unalike.core.program import ClientProgram
from unalike.methods.group_averaging import GroupAveragingProgram
from unalike.methods.parts import Part
from unalike.report.outcome import describe_judged, kept_model


@pytest.mark.parametrize(
    "fields",
    [
        {"average_heads": "round"},
        {"average_heads": "epoch"},
        {"distill_public": "all"},
        {"average_heads": "epoch", "mask_absent_classes": True},
        {"average_heads": "round", "distill_public": "all"},
    ],
)
def test_parts_change_the_result_and_an_interrupted_run_ends_at_the_same_bits(
    fields, toys, tmp_path
):

    def interrupted(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise KeyboardInterrupt

    few = lambda id, of, **about: toys.client(
        id, train=((x := toys.blobs(20, ord(id)))[0], of[x[1] % len(of)]), **about
    )
    make = lambda: [
        few("a", torch.tensor([0, 1])),
        few("b", torch.tensor([1, 2, 3]), model=toys.noisy),
        toys.client("c"),
    ]
    shared = lambda: toys.method("fedmuscleplus", **({"distill_public": "never"} | fields))
    whole = toys.execute(tmp_path / "whole", shared(), make())
    alone = toys.method("fedmuscleplus", distill_public="never")
    own = toys.execute(tmp_path / "own", alone, make())
    with pytest.raises(KeyboardInterrupt):
        toys.execute(tmp_path / "cut", shared(), make(), watch=interrupted)
    cut = toys.execute(tmp_path / "cut", shared(), make(), workers=2)
    assert cut["clients"] == whole["clients"] and cut["bytes"] == whole["bytes"]
    assert whole["bytes"]["up"] > own["bytes"]["up"]
    assert toys.apart(toys.states(tmp_path / "whole"), toys.states(tmp_path / "own")) > 1e-3


@pytest.mark.parametrize(
    "what, how", [("average_heads", "round"), ("average_heads", "epoch"), ("distill_public", "all")]
)
def test_the_safeguard_evaluates_only_clients_without_feedback_from_their_labels(
    what, how, toys, tmp_path, monkeypatch
):
    """A fold replica would learn from the mean what its client learnt from the labels it is tested
    on. So it is dropped after the first round. A run that is interrupted before clients decide ends
    the same."""

    def interrupted(event, **facts):
        if event == "stage" and "decides" in facts["text"]:
            raise KeyboardInterrupt

    trained = Counter()
    learn = GroupAveragingProgram.learn

    def counted(self, *arguments, **named):
        results = learn(self, *arguments, **named)
        trained[self.client.id, len(self.client.train), self.round] += 1
        return results

    make = lambda: [
        toys.client("a"),
        toys.client("b", model=toys.noisy),
        toys.client("c", task=Classification(tuple("wxyz"))),
    ]
    shared = lambda: toys.method("fedmuscleplus", **{what: how})
    monkeypatch.setattr(GroupAveragingProgram, "learn", counted)
    results = toys.execute(tmp_path / "whole", shared(), make(), safeguard=True)
    whole, rows = results["clients"], len(make()[0].train)
    assert all(
        whole[c]["kept"] == "together"
        and whole[c]["judged"] == {}
        and whole[c]["safeguarded"] == whole[c]["value"]
        for c in "ab"
    )
    assert whole["c"]["judged"].keys() == {"alone", "together", "doubt"}
    assert {round for c, samples, round in trained if c == "a" and samples < rows} == {1}
    assert {round for c, samples, round in trained if c == "c" and samples < rows} == {1, 2, 3}
    assert [kept_model(whole[c]) for c in "abc"] == [
        "unjudged",
        "unjudged",
        {"alone": "local", "together": "federated"}[whole["c"]["kept"]],
    ]
    assert describe_judged(results) == ", 1 of 3 clients judged"
    with pytest.raises(KeyboardInterrupt):
        toys.execute(tmp_path / "cut", shared(), make(), safeguard=True, watch=interrupted)
    assert toys.execute(tmp_path / "cut", shared(), make(), safeguard=True)["clients"] == whole
    own = toys.execute(tmp_path / "own", toys.method("fedmuscleplus"), make(), safeguard=True)
    assert all(entry["judged"] for entry in own["clients"].values()) and describe_judged(own) == ""


@pytest.mark.parametrize("sync", ["batch", "epoch"])
def test_clients_evaluated_by_the_safeguard_are_no_peers_if_enough_others_remain(
    sync, toys, tmp_path
):
    """What peers learnt of them would bring their labels back to their own fold replicas."""

    def run(name, labels, **fields):
        unlike = toys.client("d", task=Classification(tuple("wxyz")))
        x, y = unlike.train.rows(torch.arange(len(unlike.train)))
        clients = [*toys.clients(3), replace(unlike, train=(x, (y + labels) % 4))]
        results = toys.execute(
            tmp_path / name,
            toys.method("fedmuscleplus", average_heads="round", sync=sync, **fields),
            clients,
            safeguard=True,
        )
        assert [bool(results["clients"][c]["judged"]) for c in "abcd"] == [
            False,
            False,
            False,
            True,
        ]
        return {c: state for c, state in toys.states(tmp_path / name).items() if c != "d"}

    assert toys.apart(run("one", 0, peers=2), run("other", 1, peers=2)) == 0
    assert toys.apart(run("few", 0, peers=3), run("few others", 1, peers=3)) > 1e-6


def test_an_evaluated_client_that_fails_leaves_the_others(toys, tmp_path, breaks):
    """Clients with different operations are called together: the only one with its operation needs
    no quorum of its own."""
    breaks("align_to_peers", "d")
    clients = [*toys.clients(3), toys.client("d", task=Classification(tuple("wxyz")))]
    results = toys.execute(
        tmp_path / "run",
        toys.method("fedmuscleplus", average_heads="round", peers=2),
        clients,
        safeguard=True,
    )
    assert [(f["client"], f["operation"], f["round"]) for f in results["failures"]] == [
        ("d", "align_to_peers", 2)
    ]
    assert results["rounds"] == 3 and [
        c for c in "abcd" if results["clients"][c].get("value") is not None
    ] == list("abc")


def test_a_client_that_averaged_its_head_is_a_peer_in_later_rounds_too(toys, tmp_path, monkeypatch):
    """It has no fold replicas any more, whichever clients are sampled with it."""
    messages = Counter()
    message = FedMusclePlus.peer_message

    def counted(self, fed, views, client, peers):
        messages[client] += 1
        assert "d" not in peers
        return message(self, fed, views, client, peers)

    monkeypatch.setattr(FedMusclePlus, "peer_message", counted)
    clients = [*toys.clients(3), toys.client("d", task=Classification(tuple("wxyz")))]
    sampled = {1: list("abcd"), 2: list("ad"), 3: list("bd")}
    monkeypatch.setattr(
        FederationConfig, "sample", lambda self, clients, seed, round: sampled[round]
    )
    toys.execute(
        tmp_path / "run",
        toys.method("fedmuscleplus", average_heads="round", peers=2),
        clients,
        safeguard=True,
    )
    assert messages.keys() == {"d"}


def test_clients_without_fold_replicas_get_gradients_with_the_safeguard_too(toys, tmp_path):
    shared = lambda: toys.method("fedmuscleplus", average_heads="round", distill_public="never")
    plain, guarded = (
        toys.execute(tmp_path / str(it), shared(), toys.clients(), safeguard=it)
        for it in (False, True)
    )
    assert plain["bytes"]["down"] <= guarded["bytes"]["down"] < 1.1 * plain["bytes"]["down"]
    assert toys.apart(toys.states(tmp_path / "False"), toys.states(tmp_path / "True")) == 0


@pytest.mark.parametrize("keep", ["local", "aligned"])
@pytest.mark.parametrize("what", [{"average_heads": "round"}, {"distill_public": "all"}])
def test_what_does_not_enter_the_final_model_does_not_prevent_the_safeguard(
    what, keep, toys, tmp_path
):
    """With one round the local final model is from before anything was averaged or distilled."""
    results = toys.execute(
        tmp_path / "run",
        toys.method("fedmuscleplus", **what, final_model=keep),
        toys.clients(),
        safeguard=True,
        rounds=1,
    )
    assert {bool(entry["judged"]) for entry in results["clients"].values()} == {keep == "local"}


@pytest.mark.parametrize(
    "what, more", [({"average_heads": "round"}, 1), ({"distill_public": "all"}, 24)]
)
def test_an_averaged_head_is_one_privacy_release_a_round_and_logits_one_a_row(
    what, more, toys, tmp_path
):
    results = toys.execute(
        tmp_path / "run",
        toys.method("fedmuscleplus", **what),
        toys.clients(),
        privacy=Privacy(noise=1.0),
    )
    assert results["clients"]["a"]["privacy"]["releases"] == 3 * (24 + more)


def test_the_client_halves_of_parts_derive_from_client_program_alone():
    for part in FedMusclePlus.Program.__bases__:
        assert part.__bases__ == (ClientProgram,)


class Noted(Part):
    """Notes the hooks that are called."""

    acts_between_epochs = True

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def note(self, hook, fed):
        self.notes.append((self.name, hook, fed.round))

    before_local = lambda self, fed: self.note("before", fed)
    between_epochs = lambda self, fed: self.note("between", fed)
    after_local = lambda self, fed: self.note("local", fed)
    after_exchange = lambda self, fed: self.note("exchange", fed)
    finish = lambda self, fed: self.note("finish", fed)


@pytest.mark.parametrize(
    "name, hooks",
    [
        ("fedmuscleplus", [["before", "between", "local", "exchange"]] * 2),
        # no public part in the last round, after which heads would not fit
        ("feddf", [["before", "between", "local", "exchange"], ["before", "between", "local"]]),
        # local epochs and exchange are one call
        ("fedproto", [["before", "local", "exchange"]] * 2),
        ("fedl2g", [["before", "local", "exchange"]] * 2),
        ("creamfl", [["before", "local", "exchange"]] * 2),
    ],
)
def test_parts_act_in_their_order_at_the_hooks_of_every_method(
    name, hooks, toys, tmp_path, monkeypatch
):
    notes = []
    method = toys.method(name)
    parts = [Noted("one", notes), Noted("two", notes)]
    monkeypatch.setattr(type(method), "parts", lambda self: parts)
    fed = toys.federation(tmp_path / "run", method, toys.clients(), rounds=2, epochs=2)
    toys.serve(fed, method)
    expected = [(hook, round) for round in (1, 2) for hook in hooks[round - 1]] + [("finish", 2)]
    assert notes == [(part, *at) for at in expected for part in ("one", "two")]
