"""FedMuscle: three exchanges of one update, what travels, whom a client is pulled to, and what it leaves with."""

import math
from collections import Counter
from dataclasses import replace
from functools import wraps

import pytest
import torch

from unalike import Classification, Client, FederationConfig, MultiLabel
from unalike.algorithms import FedMuscle
from unalike.base.errors import Problems, UserError
from unalike.base.randomness import stream
from unalike.core.federation import Failure
from unalike.core.operations import query, sends
from unalike.core.privacy import Privacy
from unalike.core.runtime import ClientRuntime
from unalike.data import load_dataset
from unalike.methods import anchored_contrast, public_alignment
from unalike.methods.absent_classes import MASK, classes_in_groups
from unalike.methods.distillation import distill_public
from unalike.methods.group_averaging import GroupAveragingProgram, HeadAveraging, average_groups
from unalike.methods.parts import train_locally
from unalike.models import CNN, MLP, build_encoder
from unalike.report.outcome import describe_judged, kept_model
from unalike.scenarios import load
from unalike.scenarios.validate import validate_algorithm


@pytest.fixture
def outcome(toys, tmp_path):
    """Everyone's parameters after some rounds of FedMuscle with these fields."""

    def made(clients=None, rounds=2, training=None, federation=None, **fields):
        made.number += 1
        algorithm = toys.method("fedmuscle", **fields)
        clients = clients or [
            toys.client("a"),
            toys.client("b", model=toys.noisy),
            toys.client("c"),
            toys.client("d"),
        ]
        made.fed = toys.federation(
            tmp_path / str(made.number),
            algorithm,
            clients,
            federation=federation,
            rounds=rounds,
            **(training or {}),
        )
        made.noted = []
        made.fed.log_event = lambda event, **facts: (
            made.noted.append(facts) if event == "note" else None
        )
        return toys.serve(made.fed, algorithm)

    made.number = 0
    return made


def test_three_exchanges_one_update(outcome, toys):
    """M = 2 and B = 6: the paper's aggregate has 36 rows."""
    gradient, peers, paper = (
        outcome(exchange=how, batch=6, final_model="aligned")
        for how in ("gradient", "peers", "paper")
    )
    assert toys.apart(gradient, peers) <= 1e-9
    assert toys.apart(gradient, paper) <= 1e-9
    assert (
        toys.apart(
            gradient, outcome(exchange="gradient", batch=6, final_model="aligned", temperature=0.3)
        )
        > 1e-4
    )


@pytest.mark.parametrize("exchange", ["gradient", "peers", "paper"])
def test_the_graph_is_a_cache(exchange, outcome, toys, monkeypatch):
    """Forgetting it between two calls changes nothing, batch statistics and dropout included."""
    kept = outcome(exchange=exchange, final_model="aligned")
    represent = FedMuscle.Program.represent

    def forgetful(self, epoch, batch):
        z = represent(self, epoch, batch)
        del self.graph
        return z

    forgetful.operation = "changes"
    monkeypatch.setattr(FedMuscle.Program, "represent", forgetful)
    assert toys.apart(kept, outcome(exchange=exchange, final_model="aligned")) == 0


@pytest.mark.parametrize(
    "fields",
    [{"exchange": "gradient"}, {"exchange": "peers"}, {"exchange": "paper"}, {"sync": "epoch"}],
)
def test_a_graph_is_gone_before_the_next_pass(fields, outcome, monkeypatch):
    """Where the graph of one batch lives when the next is looked at, a GPU cannot record the way back: the ends of both are the same."""
    found = []
    forward = FedMuscle.Program.compute_representation

    def end(program):
        first = next(program.model.encoder.parameters())
        return (
            first.view_as(first).grad_fn.next_functions[0][0].metadata
        )  # kept as long as a graph has it

    def watched(self, epoch, batch):
        found.append(end(self).get("seen", False))
        z = forward(self, epoch, batch)
        end(self)["seen"] = True
        assert end(self)["seen"], "z has it"
        return z

    monkeypatch.setattr(FedMuscle.Program, "compute_representation", watched)
    outcome(**fields)
    assert len(found) > 8 and not any(found)


def test_epoch_ignores_the_exchange(outcome, toys):
    one, other = (outcome(sync="epoch", exchange=how, passes=2) for how in ("gradient", "peers"))
    assert toys.apart(one, other) == 0
    operations = {key[3] for key in outcome.fed.ledger.rows}
    assert {"represent_all", "align_all"} <= operations and not {"represent", "align"} & operations
    assert outcome.fed.ledger.rows[1, "a", "up", "represent_all"][0] == 2, "one exchange a pass"
    assert toys.apart(one, outcome(sync="batch")) > 1e-4


def test_down_is_up_whatever_the_number_of_peers(outcome, toys):
    six = lambda: [toys.client(id) for id in "abcdef"]
    totals = {}
    for peers in (1, 5):
        outcome(six(), peers=peers)
        totals[peers] = [
            {way: outcome.fed.ledger.total(way, client=c) for way in ("up", "down")}
            for c in "abcdef"
        ]
    assert all(each["up"] == each["down"] > 0 for each in totals[1])
    assert totals[1] == totals[5]
    outcome(six(), peers=5, exchange="peers")
    assert outcome.fed.ledger.total(
        "down", client="a", operation="align_to_peers"
    ) > 3 * outcome.fed.ledger.total("up", client="a", operation="align_to_peers")


@pytest.mark.parametrize("exchange", ["gradient", "peers", "paper"])
def test_a_batch_costs_one_call(exchange, outcome, toys):
    """24 rows in batches of 7: who has aligned on one answers with the next, and after the last with no rows. As many rows travel as
    with a call for each, in fewer messages."""
    outcome(rounds=1, batch=7, passes=2, exchange=exchange, final_model="aligned")
    rows = outcome.fed.ledger.rows
    align = {"gradient": "align", "peers": "align_to_peers", "paper": "align_to_aggregate"}[
        exchange
    ]
    batches = len(outcome.fed.public(7))
    told = {key[3]: count for key, (count, _) in rows.items() if key[1:3] == ("a", "up")}
    assert told == {"train": 1, "represent": 2, align: 2 * batches}
    blocks = sum(
        -(-8 * 8 * len(each) // 256)
        for epoch in (0, 1)
        for each in outcome.fed.public(7).batches(1, epoch)
    )
    assert outcome.fed.ledger.total("up", client="a") == 256 * (blocks + 1 + 2 + 2 * batches)


def test_the_next_batch_is_that_of_the_moved_model(outcome, toys, monkeypatch):
    """What `align` answers is what `represent` would, had it been asked by itself."""
    together = outcome(rounds=1, final_model="aligned", exchange="peers")
    noted = outcome.noted
    program, asked = FedMuscle.Program, []

    def represent_next(self, epoch, batch):
        return torch.zeros(0, 8, dtype=torch.float64)

    call = type(outcome.fed).call

    def apart(fed, operation, *, sizes=None, **given):
        told = call(
            fed, operation, sizes=sizes if operation == "represent" else {"rows": 0}, **given
        )
        asked.append(operation)
        if operation == "align_to_peers" and sizes["rows"]:
            views = apart(
                fed, "represent", epoch=given["epoch"], batch=given["batch"] + 1, sizes=sizes
            )
            told.update({c: {**told[c], "views": views[c]} for c in told})
        return told

    monkeypatch.setattr(program, "represent_next", represent_next)
    monkeypatch.setattr(type(outcome.fed), "call", apart)
    assert (
        toys.apart(together, outcome(rounds=1, final_model="aligned", exchange="peers")) == 0
        and asked.count("represent") == 3
    )
    assert outcome.noted == noted


@pytest.mark.parametrize("loss", ["muscle", "pairwise", "gramian"])
@pytest.mark.parametrize("sync", ["batch", "epoch"])
def test_losses_pull_clients_together(loss, sync, outcome, toys):
    outcome(rounds=6, loss=loss, sync=sync, passes=2, training={"lr": 0.01})
    course = [note["values"] for note in outcome.noted if note["name"] == f"{loss}_loss"]
    assert len(course) == 12
    mean = [sum(values.values()) / len(values) for values in course]
    assert mean[-1] < 0.9 * mean[0]


@pytest.mark.parametrize("loss", ["muscle", "pairwise", "gramian"])
@pytest.mark.parametrize("exchange", ["gradient", "peers"])
def test_matrix_of_equal_temperatures_is_the_number(loss, exchange, outcome, toys):
    table = lambda t: [[t] * 4 for _ in range(4)]
    number = outcome(loss=loss, exchange=exchange, final_model="aligned")
    assert (
        toys.apart(
            number,
            outcome(loss=loss, exchange=exchange, final_model="aligned", temperature=table(0.2)),
        )
        <= 1e-9
    )
    assert (
        toys.apart(
            number,
            outcome(
                loss=loss, exchange=exchange, final_model="aligned", lower_temperature=table(0.15)
            ),
        )
        <= 1e-9
    )
    both = {"temperature": table(0.2), "lower_temperature": table(0.15)}
    assert (
        toys.apart(number, outcome(loss=loss, exchange=exchange, final_model="aligned", **both))
        <= 1e-9
    )


def test_temperatures_belong_to_pairs(outcome, toys):
    """A pair that is hot is hardly pulled together: only its two clients notice in the first step."""
    cool = [[0.2] * 4 for _ in range(4)]
    hot = [[5.0 if {i, j} == {0, 1} else 0.2 for j in range(4)] for i in range(4)]
    fields = {"rounds": 1, "peers": 3, "loss": "pairwise", "final_model": "aligned", "batch": 24}
    one, other = (outcome(temperature=t, **fields) for t in (cool, hot))
    moved = {c: toys.apart({c: one[c]}, {c: other[c]}) for c in one}
    assert moved["a"] > 1e-4 and moved["b"] > 1e-4 and moved["c"] == moved["d"] == 0


@pytest.mark.parametrize(
    "temperature",
    [0.2, [[0.2, 0.3, 0.4, 0.2], [0.3, 0.2, 0.2, 0.3], [0.4, 0.2, 0.2, 0.3], [0.2, 0.3, 0.3, 0.2]]],
)
def test_consistent_lower_temperature(temperature, outcome, toys):
    gradient, paper = (
        outcome(
            temperature=temperature,
            lower_temperature="consistent",
            exchange=how,
            batch=6,
            final_model="aligned",
        )
        for how in ("gradient", "paper")
    )
    assert (
        toys.apart(gradient, paper) <= 1e-8
    )  # AdamW divides rounding by the root of tiny second moments
    if temperature == 0.2:  # eq. 22: 1 / lower = 1 / 0.2 + 1 / 0.04 = 30
        assert (
            toys.apart(gradient, outcome(lower_temperature=1 / 30, batch=6, final_model="aligned"))
            <= 1e-9
        )


def test_peers_by_relevance_are_the_similar_ones(toys, tmp_path):
    """a and b see the rows alike but for a rotation, c and d likewise; the two pairs have nothing in common."""
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


def test_peers_at_random_are_all_others_in_turn(toys, tmp_path):
    algorithm = toys.method("fedmuscle", peers=2)
    fed = toys.federation(tmp_path, algorithm, [toys.client(c) for c in "abcd"])
    views = {c: torch.zeros(2, 8) for c in "abcd"}
    seen = [algorithm.draw_peers(fed, views, round, 0, 0)["a"] for round in range(1, 30)]
    assert all("a" not in peers and len(set(peers)) == 2 for peers in seen)
    assert {frozenset(peers) for peers in seen} == {frozenset(p) for p in ("bc", "bd", "cd")}
    assert algorithm.draw_peers(fed, {"a": views["a"]}, 1, 0, 0) == {}, "nobody to be pulled to"


@pytest.mark.parametrize(
    "fields", [{}, {"loss": "pairwise"}, {"temperature": [[0.2] * 4] * 4}, {"samples": 4}]
)
def test_a_client_may_be_its_own_peer(fields, outcome, toys, tmp_path):
    """Itself as it is, whoever computes it."""
    made = {
        way: outcome(peers=2, self_peers=1, final_model="aligned", exchange=way, **fields)
        for way in ("gradient", "peers")
    }
    if "samples" not in fields:  # combinations are drawn by whoever computes
        assert toys.apart(made["gradient"], made["peers"]) < 1e-9
    if not fields:
        assert (
            toys.apart(
                made["gradient"],
                outcome(peers=2, self_peers=1, final_model="aligned", exchange="paper"),
            )
            < 1e-9
        )
    assert toys.apart(made["gradient"], outcome(peers=2, final_model="aligned", **fields)) > 1e-4
    assert toys.apart(made["gradient"], outcome(peers=1, final_model="aligned", **fields)) > 1e-4
    algorithm = toys.method("fedmuscle", peers=2, self_peers=1)
    fed = toys.federation(tmp_path / "fed", algorithm, [toys.client(c) for c in "abcd"])
    drawn = algorithm.draw_peers(fed, {c: torch.zeros(2, 8) for c in "abcd"}, 1, 0, 0)
    assert all(len(peers) == 1 and peers[0] != client for client, peers in drawn.items())
    assert algorithm.draw_peers(fed, {"a": torch.zeros(2, 8)}, 1, 0, 0) == {}


def test_without_company_nobody_else_matters(outcome, toys):
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


def test_redraw_once_a_pass(outcome, toys, monkeypatch):
    asked = []
    draw = FedMuscle.draw_peers
    monkeypatch.setattr(
        FedMuscle, "draw_peers", lambda self, *a: asked.append(draw(self, *a)) or asked[-1]
    )
    outcome(rounds=1, redraw="pass")
    assert len(asked) == 3 and all(drawn == asked[0] for drawn in asked)
    asked.clear()
    outcome(rounds=1, redraw="batch")
    assert any(drawn != asked[0] for drawn in asked)


def test_what_a_client_leaves_with(outcome, toys, monkeypatch):
    """Local: the model of the last round's local epochs, before the last alignment. Aligned: after it."""
    after = {}
    train = FedMuscle.Program.train

    def spy(self):
        loss = train(self)
        after[self.client.id] = {
            name: tensor.clone() for name, tensor in self.model.state_dict().items()
        }
        return loss

    spy.operation = "changes"
    monkeypatch.setattr(FedMuscle.Program, "train", spy)
    local = outcome(final_model="local")
    assert toys.apart(local, after) == 0
    aligned = outcome(final_model="aligned")
    assert toys.apart({"a": aligned["a"]}, {"a": after["a"]}) > 1e-4


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
def test_stacked_equals_one_by_one(fields, toys, tmp_path, monkeypatch):
    algorithm = toys.method("fedmuscle", **fields)
    fed = toys.federation(tmp_path, algorithm, [toys.client(c) for c in "abcd"])
    views = dict(
        zip(
            "abcd",
            torch.randn(4, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
            strict=True,
        )
    )
    drawn = algorithm.draw_peers(fed, views, 1, 0, 0)
    pulls, losses = algorithm.contrast.gradients(list(fed.infos), views, drawn, stream(1))
    monkeypatch.setattr(anchored_contrast, "STACKED_PEERS", 0)
    one = [[0.2] * 4] * 4 if "samples" in fields else 0.2  # one per pair: nothing is stacked
    contrast = replace(algorithm, temperature=one).contrast
    alone, each = contrast.gradients(list(fed.infos), views, drawn, stream(1))
    assert list(pulls) == list(alone) == list("abcd")
    assert all(float(losses[c]) == pytest.approx(float(each[c]), abs=1e-12) for c in each)
    assert all(
        torch.allclose(pulls[c], alone[c], rtol=0, atol=1e-12) and pulls[c].abs().max() > 1e-4
        for c in pulls
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="passes are recorded on a GPU only")
@pytest.mark.parametrize(
    "fields",
    [{}, {"exchange": "peers"}, {"sync": "epoch"}, {"loss": "pairwise"}, {"loss": "gramian"}],
)
def test_recorded_passes_change_nothing(fields, toys, outcome, monkeypatch):
    """Clients with adapters in a network of which most is frozen, a plain one, and one that draws and so is not recorded."""
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

    made = {}
    for records in (False, True):
        for module in (anchored_contrast, public_alignment):
            monkeypatch.setattr(module, "USE_CUDA_GRAPHS", records)
        anchored_contrast.stacked.cache_clear()
        made[records] = outcome(clients(), rounds=4, final_model="aligned", **fields)
    programs = outcome.fed.engine.host.programs
    assert (
        all(
            programs[c].graphed_forward.kept and all(programs[c].graphed_forward.kept.values())
            for c in "abc"
        )
        and not programs["d"].graphed_forward.kept
    )
    if not fields.keys() & {"exchange", "sync"}:
        contrast = anchored_contrast.stacked(
            fields.get("loss", "muscle"), 0, temperature=0.2, lower_temperature=0.15
        )
        assert contrast.kept and all(contrast.kept.values()), (
            "the server's losses are recorded, too"
        )
    anchored_contrast.stacked.cache_clear()
    assert toys.apart(made[False], made[True]) < 1e-8


@pytest.mark.parametrize("fields", [{}, {"exchange": "peers"}, {"sync": "epoch"}])
def test_more_combinations_than_can_be_summed_are_drawn(fields, outcome, toys, monkeypatch):
    """Of 8^3 combinations: all of them, or an estimate that goes the same way, and the same twice."""
    exact = outcome(peers=3, rounds=1, final_model="aligned", **fields)
    monkeypatch.setattr(anchored_contrast, "SUMMED_TUPLES", 8**3 - 1)
    drawn, again = (outcome(peers=3, rounds=1, final_model="aligned", **fields) for _ in range(2))
    assert toys.apart(drawn, again) == 0 < toys.apart(drawn, exact)
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
    with pytest.raises(Problems, match="samples +must be at least 1, got 0"):
        validate_algorithm(FedMuscle(samples=0))


def test_projection(toys, tmp_path):
    wide = toys.client("a", model=toys.partial(MLP, (6,), (8,), 12))
    fits = toys.client("b")
    program = lambda client, how: FedMuscle.Program(
        client, toys.method("fedmuscle", projection=how), toys.training(), 0
    )
    assert isinstance(program(wide, "auto").model.projection, torch.nn.Linear)
    assert isinstance(program(fits, "auto").model.projection, torch.nn.Identity)
    assert isinstance(program(fits, "always").model.projection, torch.nn.Linear)
    assert isinstance(program(fits, "never").model.projection, torch.nn.Identity)
    with pytest.raises(ValueError, match="12 features, the federation compares 8"):
        program(wide, "never")
    results = toys.execute(
        tmp_path / "run",
        toys.method("fedmuscle", projection="auto"),
        [wide, fits, toys.client("c")],
    )
    assert not results["failures"]


def test_width_that_does_not_fit_is_told_before_anything_runs(toys, tmp_path):
    clients = [
        toys.client("a", model=toys.partial(MLP, (6,), (8,), 12)),
        toys.client("b"),
        toys.client("c"),
    ]
    with pytest.raises(
        Problems,
        match=r"clients\.a +its encoder gives 12 features.*set algorithm\.projection to auto",
    ):
        toys.execute(tmp_path / "run", toys.method("fedmuscle", projection="never"), clients)


def test_segmentation_beside_classification(toys, tmp_path):
    table = load_dataset("digits")
    rows, public = table.train[:90].split(30), (table.x[table.train[200:224]], None)

    def digits(id, mine, target, model):
        given = [(table.x[r], table.targets[target][r]) for r in (mine, table.test[:40])]
        return Client(
            id=id,
            model=model,
            task=table.tasks[target],
            train=given[0],
            test=given[1],
            public=public,
        )

    cnn = toys.partial(CNN, (1, 8, 8), (4, 8), 8)
    clients = [
        digits("digit", rows[0], "digit", toys.partial(MLP, (1, 8, 8), (16,), 16)),
        digits("ink", rows[1], "ink", cnn),
        digits("attributes", rows[2], "attributes", cnn),
    ]
    results = toys.execute(
        tmp_path / "run", toys.method("fedmuscle"), clients, rounds=3, alone=True
    )
    assert not results["failures"]
    metrics = {id: entry["metric"] for id, entry in results["clients"].items()}
    assert metrics == {"digit": "accuracy", "ink": "miou", "attributes": "micro_f1"}
    assert results["clients"]["ink"]["value"] > 40
    rows = [line.split(",") for line in (tmp_path / "run" / "ledger.csv").read_text().splitlines()]
    assert {row[3] for row in rows if row[1] == "ink"} >= {"train", "represent", "align"}


def test_two_optimizers_and_a_rate_of_its_own(outcome, toys):
    one = outcome(optimizers="one", final_model="aligned")
    two = outcome(optimizers="two", final_model="aligned")
    own = outcome(align_lr=1e-9, final_model="aligned")
    still = outcome(optimizers="two", align_lr=1e-9, final_model="local")
    assert toys.apart(one, two) > 1e-4 and toys.apart(two, own) > 1e-4
    assert toys.apart({"a": own["a"]}, {"a": still["a"]}) < 1e-6, (
        "at a rate of almost nothing alignment does almost nothing"
    )


def test_models_with_held_weights_are_aligned_gently(outcome, toys):
    """A tenth of the rate; from-scratch models, and whoever says a rate, as told."""

    def holding():
        model = toys.mlp()
        next(model.parameters()).requires_grad_(False)
        return model

    rates = {}
    for how, rate in {"auto": None, "told": 0.02}.items():
        clients = [toys.client("a"), toys.client("b", model=holding)]
        outcome(clients, peers=1, align_lr=rate)
        rates[how] = {
            c: program.optimizers["align"].param_groups[0]["lr"]
            for c, program in outcome.fed.engine.host.programs.items()
        }
    assert rates["auto"]["b"] == pytest.approx(0.1 * rates["auto"]["a"]) and rates["told"] == {
        "a": 0.02,
        "b": 0.02,
    }


def test_alignment_may_grow_gentler(outcome, toys):
    outcome(rounds=4, align_lr=0.02, decay=True)
    for program in outcome.fed.engine.host.programs.values():
        assert program.optimizers["align"].param_groups[0]["lr"] == pytest.approx(
            0.02 * (1 + math.cos(0.75 * math.pi)) / 2
        )
    assert toys.apart(outcome(rounds=1, decay=True), outcome(rounds=1)) == 0, (
        "the first round is as told"
    )


@pytest.fixture
def breaks(monkeypatch):
    """Makes an operation fail at one client in the second round."""

    def make(operation, client):
        usual = getattr(FedMuscle.Program, operation)

        @wraps(usual)
        def fails(self, **given):
            if self.client.id == client and self.round == 2:
                raise RuntimeError("gone")
            return usual(self, **given)

        monkeypatch.setattr(FedMuscle.Program, operation, fails)

    return make


def test_failing_between_the_two_calls_leaves_the_others(outcome, breaks):
    """A client that fails in align was a peer of the others all the same; from then on it is none."""
    breaks("align", "b")
    left = outcome(rounds=3)
    assert set(left) == {"a", "c", "d"}
    assert outcome.fed.failures == [Failure("b", "align", 2, "RuntimeError: gone")]


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"peers": 3}, "3 peers need 4 clients, the federation has 3"),
        ({"peers": 0}, "must be at least 1, got 0"),
        ({"peers": 1, "self_peers": 2}, "must be from 0 to algorithm.peers, 1, got 2"),
        ({"peers": 2, "self_peers": 1, "loss": "gramian"}, "set self_peers to 0"),
        ({"peers": 1, "decay": True, "optimizers": "one"}, "needs a learning rate of its own"),
        ({"batch": 25}, "the public set has 24 rows, fewer than a batch of 25"),
        ({"batch": 1}, "at least 2"),
        ({"temperature": 0.0}, "must be at least 0.006"),
        ({"temperature": [[0.2, 0.2], [0.2, 0.2]]}, "needs 3 rows of 3"),
        ({"lower_temperature": [[0.2, -1.0, 0.2]] * 3}, "must be at least 0.006"),
        ({"mask_absent_classes": True}, "is for averaged heads"),
        ({"exchange": "paper", "sync": "epoch"}, 'sync "batch" only'),
        ({"exchange": "paper", "loss": "gramian"}, 'loss "muscle"'),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(fields, sentence, toys, tmp_path):
    with pytest.raises(Problems, match=sentence):
        method = validate_algorithm(toys.method("fedmuscle", **fields))
        toys.execute(tmp_path / "run", method, toys.clients())


def test_few_are_here(outcome):
    """Fewer peers than asked for where fewer take part; a client alone in its round only trains."""
    outcome(rounds=8, federation=FederationConfig(dropout=0.6, quorum=0))
    drawn = {f.round for f in outcome.fed.failures}
    assert len(drawn) > 3 and all(f.reason == "dropped out" for f in outcome.fed.failures)


def test_shared_heads_are_the_mean_of_those_who_mean_the_same(toys, tmp_path):
    """Of one task and label set, weighted by their rows, whatever their encoders are; nobody else's head moves, and no encoder does."""
    other = toys.client("d", task=Classification(["p", "q", "r", "s"]))
    method = toys.method("fedmuscle", average_heads="round")
    fed = toys.federation(
        tmp_path / "run",
        method,
        [toys.client("a", rows=10), toys.client("b", rows=30, model=toys.noisy), other],
    )
    fed.start_round(1)
    fed.call("train")
    programs = fed.engine.host.programs
    before = {
        c: {name: tensor.clone() for name, tensor in programs[c].model.state_dict().items()}
        for c in programs
    }
    average_groups(fed)
    after = {c: programs[c].model.state_dict() for c in programs}
    heads = [name for name in before["a"] if name.startswith("head.")]
    mean = {name: 0.25 * before["a"][name] + 0.75 * before["b"][name] for name in heads}
    assert heads and all(torch.allclose(after[c][name], mean[name]) for c in "ab" for name in heads)
    assert all(
        torch.equal(after[c][name], tensor)
        for c in "abd"
        for name, tensor in before[c].items()
        if c == "d" or name not in heads
    )


def test_shared_opinions_bring_together_who_has_labels_in_common(toys, tmp_path):
    """What they think of the public set, not what they align; with the pace of the alignment. Nobody else is asked, or moved."""
    other = toys.client("d", task=Classification(["p", "q", "r", "s"]))
    method = toys.method("fedmuscle", distill_public="all", align_lr=0.01, decay=True)
    fed = toys.federation(
        tmp_path / "run",
        method,
        [toys.client("a"), toys.client("b", model=toys.noisy), other],
        rounds=3,
    )
    fed.start_round(2)
    fed.call("train")
    programs = fed.engine.host.programs
    before = {name: tensor.clone() for name, tensor in programs["d"].model.state_dict().items()}
    opinions = {c: programs[c].opinion() for c in "ab"}
    mean = (opinions["a"] + opinions["b"]) / 2
    for _ in range(5):
        told = distill_public(fed)
    for c in "ab":
        assert (programs[c].opinion() - mean).norm() < (opinions[c] - mean).norm()
        assert programs[c].optimizers["public"].param_groups[0]["lr"] == pytest.approx(
            0.01 * (1 + math.cos(math.pi / 3)) / 2
        )
    assert told.keys() == set("ab") and all(
        torch.equal(programs["d"].model.state_dict()[name], t) for name, t in before.items()
    )


def test_heads_may_be_shared_after_every_local_epoch(outcome, toys, tmp_path):
    """The same epochs: where there is one it is what sharing once is, and who shares with nobody learns what it learns in one go."""
    assert (
        toys.apart(
            outcome(average_heads="round", training={"epochs": 1}),
            outcome(average_heads="epoch", training={"epochs": 1}),
        )
        == 0
    )
    assert (
        toys.apart(
            outcome(average_heads="round", training={"epochs": 3}),
            outcome(average_heads="epoch", training={"epochs": 3}),
        )
        > 1e-3
    )
    method = toys.method("fedmuscle", average_heads="epoch")
    clients = lambda: [*toys.clients(2), toys.client("d", task=Classification(tuple("wxyz")))]
    fed, plain = (
        toys.federation(tmp_path / name, method, clients(), epochs=3)
        for name in ("united", "plain")
    )
    asked, call = [], fed.call
    fed.call = lambda operation, **about: asked.append(operation) or call(operation, **about)
    for each in (fed, plain):
        each.start_round(1)
    train_locally(fed, "train", [HeadAveraging(every_epoch=True)])
    plain.call("train")
    assert asked == ["train", "kind_of", "give", "take", "train", "give", "take", "train"]
    ends = [
        {c: program.model.state_dict() for c, program in each.engine.host.programs.items()}
        for each in (fed, plain)
    ]
    assert all(torch.equal(ends[0]["d"][name], tensor) for name, tensor in ends[1]["d"].items())
    apart = [(end["a"]["head.0.weight"] - end["b"]["head.0.weight"]).norm() for end in ends]
    assert 0 < apart[0] < apart[1]


def test_opinions_of_those_who_can_say_that_there_is_none(toys, tmp_path):
    """A classifier must name one of its classes, whatever a public row shows."""
    labels = lambda id: (
        torch.randn(12, 6, generator=stream(0, id)).double(),
        torch.ones(12, 2).double(),
    )
    tagged = [
        toys.client(id, task=MultiLabel(["sun", "sea"]), train=labels(id), test=labels(id))
        for id in "cd"
    ]
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscle", distill_public="multilabel"),
        [*toys.clients(2), *tagged],
    )
    fed.start_round(1)
    fed.call("train")
    assert distill_public(fed, multilabel_only=True).keys() == set("cd")
    assert distill_public(fed).keys() == set("abcd")


@pytest.fixture
def parted(toys, tmp_path):
    """Three who classify, two of them alike, of four classes of which a has two and b two; and one with several labels."""
    x, y = toys.blobs(24, 3)
    some = lambda id, y, **about: toys.client(
        id, train=(x.double(), y), test=(x.double(), y), **about
    )
    words = Classification(tuple("wxyz"))
    several = some("d", torch.nn.functional.one_hot(y, 4).double(), task=MultiLabel(list("pqrs")))
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscle", average_heads="round", mask_absent_classes=True),
        [
            some("a", y % 2),
            some("b", 1 + y % 2, model=toys.noisy),
            some("c", y, task=words),
            several,
        ],
    )
    fed.start_round(1)
    fed.call("train")
    return fed


def test_classes_that_only_others_have_are_left_open(parted):
    """They are no wrong answers in the local loss and no row of the head learns of them; what nobody has is one. Each is asked once."""
    asked, call, programs = [], parted.call, parted.engine.host.programs
    parted.call = lambda operation, **about: (
        asked.append((operation, about.get("clients"))) or call(operation, **about)
    )
    for _ in range(2):
        average_groups(parted, classes_in_groups)
    assert [told for told in asked if told[0] == "present"] == [("present", ["a", "b"])]
    parted.call("train")
    assert [programs[c].masked_classes.tolist() for c in "ab"] == [
        [False, False, True, False],
        [True, False, False, False],
    ]
    assert not any(programs[c].masked_classes.any() for c in "cd")
    for c, kept in (("a", [0, 1, 3]), ("b", [1, 2, 3])):
        program = programs[c]
        program.model.eval()
        x, y = program.sampled(torch.arange(24))
        loss = program.task_loss(x, y)
        left = program.model(x)[:, kept].log_softmax(1)
        torch.testing.assert_close(
            loss, -left[torch.arange(24), [kept.index(label) for label in y.tolist()]].mean()
        )
        moved = torch.autograd.grad(loss, program.model.head[-1].weight)[0].abs().sum(1) > 0
        assert moved.nonzero().flatten().tolist() == kept
        torch.testing.assert_close(program.head_loss(x, y), loss)


def test_what_one_of_a_kind_has_ever_had_stays_open(parted):
    """A head knows it from whom it was shared with before; one of another kind is not spoken of."""
    kind = parted.engine.host.programs["a"].kind_of()
    parted.state["kinds"] = {"gone": kind, "other": "another"}
    parted.state["present"] = {
        "gone": torch.tensor([False, False, False, True]),
        "other": torch.tensor([True, True, True, True]),
    }
    average_groups(parted, classes_in_groups)
    assert [parted.engine.host.programs[c].memory[MASK].tolist() for c in "ab"] == [
        [False, False, True, True],
        [True, False, False, True],
    ]


def test_which_labels_one_has_is_told_only_where_it_matters(toys, tmp_path, parted):
    """And never by a client that asks for privacy, whatever the server keeps to."""
    fed = toys.federation(
        tmp_path / "run", toys.method("fedmuscle", average_heads="round"), toys.clients(2)
    )
    fed.start_round(1)
    assert "only with mask_absent_classes" in str(
        fed.call("present", clients=["a"], quorum=0).failures["a"]
    )
    program, other = parted.engine.host.programs["a"], fed.engine.host.programs["a"]
    private = ClientRuntime(program, Privacy(noise=4.0))
    assert private.perform("present", 1, 0, {}) is None
    before = {name: tensor.clone() for name, tensor in program.averaged_parameters().items()}
    more = {name: tensor + 1 for name, tensor in before.items()}
    with pytest.raises(ValueError, match=r"expected a class mask of shape \(4,\), got \(3,\)"):
        program.take(more, had=torch.ones(3))
    assert all(
        torch.equal(program.averaged_parameters()[name], tensor) for name, tensor in before.items()
    ), "what is refused changes nothing"
    with pytest.raises(ValueError, match="masks no absent classes"):
        other.take(other.averaged_parameters(), had=torch.ones(4))
    assert (
        "set algorithm.mask_absent_classes to false"
        in (FedMuscle(average_heads="round", mask_absent_classes=True).privacy_problem() or "")
        and FedMuscle().privacy_problem() is None
    )


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
def test_what_is_shared_is_so_in_a_whole_run_that_resumes(fields, toys, tmp_path):
    """It learns another thing than where all have their own, and an interrupted run ends at the same bits."""

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
    shared = lambda: toys.method("fedmuscle", **fields)
    whole = toys.execute(tmp_path / "whole", shared(), make())
    own = toys.execute(tmp_path / "own", toys.method("fedmuscle"), make())
    with pytest.raises(KeyboardInterrupt):
        toys.execute(tmp_path / "cut", shared(), make(), watch=interrupted)
    cut = toys.execute(tmp_path / "cut", shared(), make(), workers=2)
    assert cut["clients"] == whole["clients"] and cut["bytes"] == whole["bytes"]
    assert whole["bytes"]["up"] > own["bytes"]["up"]
    assert toys.apart(toys.states(tmp_path / "whole"), toys.states(tmp_path / "own")) > 1e-3


@pytest.mark.parametrize(
    "what, how", [("average_heads", "round"), ("average_heads", "epoch"), ("distill_public", "all")]
)
def test_who_shares_is_not_judged_and_who_does_not_is(what, how, toys, tmp_path, monkeypatch):
    """A shadow would learn from the mean what its client learnt from the labels it is tested on. Who cannot be judged has none after the
    first round. A run that is interrupted before everyone decides ends the same."""

    def interrupted(event, **facts):
        if event == "stage" and "decides" in facts["text"]:
            raise KeyboardInterrupt

    trained = Counter()
    learn = GroupAveragingProgram.learn

    def counted(self, *given, **named):
        told = learn(self, *given, **named)
        trained[self.client.id, len(self.client.train), self.round] += 1
        return told

    make = lambda: [
        toys.client("a"),
        toys.client("b", model=toys.noisy),
        toys.client("c", task=Classification(tuple("wxyz"))),
    ]
    shared = lambda: toys.method("fedmuscle", **{what: how})
    monkeypatch.setattr(GroupAveragingProgram, "learn", counted)
    told = toys.execute(tmp_path / "whole", shared(), make(), safeguard=True)
    whole, rows = told["clients"], len(make()[0].train)
    assert all(
        whole[c]["kept"] == "together"
        and whole[c]["judged"] == {}
        and whole[c]["safeguarded"] == whole[c]["value"]
        for c in "ab"
    )
    assert whole["c"]["judged"].keys() == {"alone", "together", "doubt"}
    assert {round for c, held, round in trained if c == "a" and held < rows} == {1}
    assert {round for c, held, round in trained if c == "c" and held < rows} == {1, 2, 3}
    assert [kept_model(whole[c]) for c in "abc"] == [
        "unjudged",
        "unjudged",
        {"alone": "local", "together": "federated"}[whole["c"]["kept"]],
    ]
    assert describe_judged(told) == ", 1 of 3 clients judged"
    with pytest.raises(KeyboardInterrupt):
        toys.execute(tmp_path / "cut", shared(), make(), safeguard=True, watch=interrupted)
    assert toys.execute(tmp_path / "cut", shared(), make(), safeguard=True)["clients"] == whole
    own = toys.execute(tmp_path / "own", toys.method("fedmuscle"), make(), safeguard=True)
    assert all(its["judged"] for its in own["clients"].values()) and describe_judged(own) == ""


@pytest.mark.parametrize("sync", ["batch", "epoch"])
def test_who_is_judged_only_listens(sync, toys, tmp_path):
    """What others learnt of it would come back to its shadows, its labels with it: so nobody learns of it. Unless too few speak."""

    def run(name, labels, **fields):
        unlike = toys.client("d", task=Classification(tuple("wxyz")))
        x, y = unlike.train.rows(torch.arange(len(unlike.train)))
        clients = [*toys.clients(3), replace(unlike, train=(x, (y + labels) % 4))]
        told = toys.execute(
            tmp_path / name,
            toys.method("fedmuscle", average_heads="round", sync=sync, **fields),
            clients,
            safeguard=True,
        )
        assert [bool(told["clients"][c]["judged"]) for c in "abcd"] == [False, False, False, True]
        return {c: state for c, state in toys.states(tmp_path / name).items() if c != "d"}

    assert toys.apart(run("one", 0, peers=2), run("other", 1, peers=2)) == 0
    assert toys.apart(run("few", 0, peers=3), run("few others", 1, peers=3)) > 1e-6


def test_a_judged_client_that_fails_leaves_the_others(toys, tmp_path, breaks):
    """Whoever is told what, all of a batch are called as one: the only one of its kind is no quorum of its own."""
    breaks("align_to_peers", "d")
    clients = [*toys.clients(3), toys.client("d", task=Classification(tuple("wxyz")))]
    told = toys.execute(
        tmp_path / "run",
        toys.method("fedmuscle", average_heads="round", peers=2),
        clients,
        safeguard=True,
    )
    assert [(f["client"], f["operation"], f["round"]) for f in told["failures"]] == [
        ("d", "align_to_peers", 2)
    ]
    assert told["rounds"] == 3 and [
        c for c in "abcd" if told["clients"][c].get("value") is not None
    ] == list("abc")


def test_who_has_shared_a_head_speaks_in_rounds_without_its_kin(toys, tmp_path, monkeypatch):
    """It has no shadows any more, whoever is drawn beside it."""
    heard = Counter()
    message = FedMuscle.peer_message

    def counted(self, fed, views, client, peers):
        heard[client] += 1
        assert "d" not in peers
        return message(self, fed, views, client, peers)

    monkeypatch.setattr(FedMuscle, "peer_message", counted)
    clients = [*toys.clients(3), toys.client("d", task=Classification(tuple("wxyz")))]
    drawn = {1: list("abcd"), 2: list("ad"), 3: list("bd")}
    monkeypatch.setattr(FederationConfig, "sample", lambda self, clients, seed, round: drawn[round])
    toys.execute(
        tmp_path / "run",
        toys.method("fedmuscle", average_heads="round", peers=2),
        clients,
        safeguard=True,
    )
    assert heard.keys() == {"d"}


def test_who_has_no_shadows_is_sent_gradients_with_the_safeguard_too(toys, tmp_path):
    shared = lambda: toys.method("fedmuscle", average_heads="round")
    plain, guarded = (
        toys.execute(tmp_path / str(it), shared(), toys.clients(), safeguard=it)
        for it in (False, True)
    )
    assert plain["bytes"]["down"] <= guarded["bytes"]["down"] < 1.1 * plain["bytes"]["down"]
    assert toys.apart(toys.states(tmp_path / "False"), toys.states(tmp_path / "True")) == 0


@pytest.mark.parametrize("keep", ["local", "aligned"])
@pytest.mark.parametrize("what", [{"average_heads": "round"}, {"distill_public": "all"}])
def test_what_nobody_leaves_with_is_no_reason_not_to_judge(what, keep, toys, tmp_path):
    """With one round everybody leaves as it was before anything was shared, unless it leaves as aligned."""
    made = toys.execute(
        tmp_path / "run",
        toys.method("fedmuscle", **what, final_model=keep),
        toys.clients(),
        safeguard=True,
        rounds=1,
    )
    assert {bool(its["judged"]) for its in made["clients"].values()} == {keep == "local"}


@pytest.mark.parametrize("keep", ["local", "aligned"])
def test_who_leaves_after_local_epochs_leaves_with_a_head_of_its_own(keep, outcome):
    left = outcome(average_heads="round", final_model=keep)
    assert torch.equal(left["a"]["head.0.weight"], left["c"]["head.0.weight"]) == (
        keep == "aligned"
    )


@pytest.mark.parametrize(
    "what, more", [({"average_heads": "round"}, 1), ({"distill_public": "all"}, 24)]
)
def test_a_shared_head_is_a_release_a_round_and_an_opinion_one_a_row(what, more, toys, tmp_path):
    told = toys.execute(
        tmp_path / "run",
        toys.method("fedmuscle", **what),
        toys.clients(),
        privacy=Privacy(noise=1.0),
    )
    assert told["clients"]["a"]["privacy"]["releases"] == 3 * (24 + more)


def test_a_client_takes_only_what_it_shares(toys, tmp_path):
    fed = toys.federation(
        tmp_path / "run", toys.method("fedmuscle", average_heads="round"), toys.clients()
    )
    fed.start_round(1)
    fed.call("train")
    program = fed.engine.host.programs["a"]
    for wrong in (
        {},
        dict(program.model.state_dict()),
        {name: tensor[:1] for name, tensor in program.averaged_parameters().items()},
    ):
        with pytest.raises(ValueError, match="expected the parameters that are averaged"):
            program.take(wrong)


def test_a_head_without_company_stays_at_home(toys, tmp_path, monkeypatch):
    """Where its sibling fails, a client is not given its own head back."""
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscle", average_heads="round"),
        toys.clients(2),
        federation=FederationConfig(quorum=0.5),
    )
    fed.start_round(1)
    fed.call("train")
    asked, call = [], fed.call
    fed.call = lambda operation, **about: asked.append(operation) or call(operation, **about)

    @query
    @sends("parameters")
    def give(self):
        if self.client.id == "b":
            raise ValueError("no disk")
        return self.averaged_parameters()

    monkeypatch.setattr(FedMuscle.Program, "give", give)
    average_groups(fed)
    assert asked == ["kind_of", "give"] and fed.active == ["a"]


def test_an_old_field_name_ends_in_an_error_that_says_the_new_one():
    with pytest.raises(TypeError, match='"heads" is called "average_heads" now'):
        FedMuscle(heads="shared")
    with pytest.raises(Problems, match='"start" is called "projection_init" now'):
        load("digits", settings=["algorithm.start=joint"])
    with pytest.raises(UserError, match=r"algorithm.own is called self_peers now"):
        load("digits", settings=["own=1"])


def test_flower_exchanges_once_per_pass_unless_the_scenario_says_otherwise():
    assert load("digits", engine="flower")[1].sync == "epoch"
    assert load("digits", engine="flower", settings=["sync=batch"])[1].sync == "batch"
    assert load("digits")[1].sync == "batch"
