"""The alignment of FedMuscle and FedMusclePlus: three exchanges of one update, what is sent, temperatures
and refused fields."""

import pytest
import torch

from unalike import Client, FederationConfig
from unalike.algorithms import FedMuscle, FedMusclePlus
from unalike.base.errors import Problems, UserError
from unalike.core.federation import Failure
from unalike.data import load_dataset
from unalike.methods.public_alignment import PublicAlignmentProgram
from unalike.models import CNN, MLP, build_encoder
from unalike.scenarios import load
from unalike.scenarios.validate import validate_algorithm


def test_three_exchanges_give_the_same_update(outcome, toys):
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
def test_losing_the_kept_graph_changes_nothing(exchange, outcome, toys, monkeypatch):
    """Without the graph kept between two calls the batch is computed again, batch statistics and
    dropout included."""
    cached = outcome(exchange=exchange, final_model="aligned")
    represent = PublicAlignmentProgram.represent

    def forgetful(self, epoch, batch):
        z = represent(self, epoch, batch)
        del self.graph
        return z

    forgetful.operation = "changes"
    monkeypatch.setattr(PublicAlignmentProgram, "represent", forgetful)
    assert toys.apart(cached, outcome(exchange=exchange, final_model="aligned")) == 0


@pytest.mark.parametrize(
    "fields",
    [{"exchange": "gradient"}, {"exchange": "peers"}, {"exchange": "paper"}, {"sync": "epoch"}],
)
def test_a_graph_is_freed_before_the_next_forward_pass(fields, outcome, monkeypatch):
    """While the graph of a batch lives, a GPU cannot capture the backward pass of the next one."""
    alive = []
    forward = PublicAlignmentProgram.compute_representation

    def end(program):
        first = next(program.model.encoder.parameters())
        return (
            first.view_as(first).grad_fn.next_functions[0][0].metadata
        )  # lives as long as a graph has it

    def watched(self, epoch, batch):
        alive.append(end(self).get("seen", False))
        z = forward(self, epoch, batch)
        end(self)["seen"] = True
        assert end(self)["seen"], "z has it"
        return z

    monkeypatch.setattr(PublicAlignmentProgram, "compute_representation", watched)
    outcome(**fields)
    assert len(alive) > 8 and not any(alive)


def test_sync_epoch_ignores_the_exchange(outcome, toys):
    one, other = (outcome(sync="epoch", exchange=how, passes=2) for how in ("gradient", "peers"))
    assert toys.apart(one, other) == 0
    operations = {key[3] for key in outcome.fed.ledger.rows}
    assert {"represent_all", "align_all"} <= operations and not {"represent", "align"} & operations
    assert outcome.fed.ledger.rows[1, "a", "up", "represent_all"][0] == 2, "one exchange a pass"
    assert toys.apart(one, outcome(sync="batch")) > 1e-4


def test_clients_receive_as_many_bytes_as_they_send_whatever_m_is(outcome, toys):
    six = lambda: [toys.client(id) for id in "abcdef"]
    totals = {}
    for peers in (1, 5):
        outcome(six(), peers=peers)
        totals[peers] = [
            {way: outcome.fed.ledger.total(way, client=c) for way in ("up", "down")}
            for c in "abcdef"
        ]
    assert all(entry["up"] == entry["down"] > 0 for entry in totals[1])
    assert totals[1] == totals[5]
    outcome(six(), peers=5, exchange="peers")
    assert outcome.fed.ledger.total(
        "down", client="a", operation="align_to_peers"
    ) > 3 * outcome.fed.ledger.total("up", client="a", operation="align_to_peers")


@pytest.mark.parametrize("exchange", ["gradient", "peers", "paper"])
def test_a_batch_costs_one_call(exchange, outcome, toys):
    """24 rows in batches of 7: a client answers an update with the next batch, and after the last
    with no rows."""
    outcome(rounds=1, batch=7, passes=2, exchange=exchange, final_model="aligned")
    rows = outcome.fed.ledger.rows
    align = {"gradient": "align", "peers": "align_to_peers", "paper": "align_to_aggregate"}[
        exchange
    ]
    batches = len(outcome.fed.public(7))
    replies = {key[3]: count for key, (count, _) in rows.items() if key[1:3] == ("a", "up")}
    assert replies == {"train": 1, "represent": 2, align: 2 * batches}
    blocks = sum(
        -(-8 * 8 * len(entry) // 256)
        for epoch in (0, 1)
        for entry in outcome.fed.public(7).batches(1, epoch)
    )
    assert outcome.fed.ledger.total("up", client="a") == 256 * (blocks + 1 + 2 + 2 * batches)


def test_the_next_batch_is_represented_by_the_updated_model(outcome, toys, monkeypatch):
    """`align` answers what `represent` would have answered in a call of its own."""
    together = outcome(rounds=1, final_model="aligned", exchange="peers")
    noted = outcome.noted
    program, calls = PublicAlignmentProgram, []

    def represent_next(self, epoch, batch):
        return torch.zeros(0, 8, dtype=torch.float64)

    call = type(outcome.fed).call

    def apart(fed, operation, *, sizes=None, **arguments):
        replies = call(
            fed, operation, sizes=sizes if operation == "represent" else {"rows": 0}, **arguments
        )
        calls.append(operation)
        if operation == "align_to_peers" and sizes["rows"]:
            views = apart(
                fed,
                "represent",
                epoch=arguments["epoch"],
                batch=arguments["batch"] + 1,
                sizes=sizes,
            )
            replies.update({c: {**replies[c], "views": views[c]} for c in replies})
        return replies

    monkeypatch.setattr(program, "represent_next", represent_next)
    monkeypatch.setattr(type(outcome.fed), "call", apart)
    assert (
        toys.apart(together, outcome(rounds=1, final_model="aligned", exchange="peers")) == 0
        and calls.count("represent") == 3
    )
    assert outcome.noted == noted


@pytest.mark.parametrize("loss", ["muscle", "pairwise", "gramian"])
@pytest.mark.parametrize("sync", ["batch", "epoch"])
def test_every_loss_falls(loss, sync, outcome, toys):
    outcome(rounds=6, loss=loss, sync=sync, passes=2, training={"lr": 0.01})
    course = [note["values"] for note in outcome.noted if note["name"] == f"{loss}_loss"]
    assert len(course) == 12
    mean = [sum(values.values()) / len(values) for values in course]
    assert mean[-1] < 0.9 * mean[0]


@pytest.mark.parametrize("loss", ["muscle", "pairwise", "gramian"])
@pytest.mark.parametrize("exchange", ["gradient", "peers"])
def test_a_matrix_of_equal_temperatures_equals_the_number(loss, exchange, outcome, toys):
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
    """A large temperature of a pair weakens its pull: in the first step only its two clients
    change."""
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
def test_consistent_lower_temperature_solves_eq_22(temperature, outcome, toys):
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


def test_a_projection_is_added_where_widths_differ(toys, tmp_path):
    wide = toys.client("a", model=toys.partial(MLP, (6,), (8,), 12))
    fits = toys.client("b")
    program = lambda client, name, **fields: toys.method(name).Program(
        client, toys.method(name, **fields), toys.training(), 0
    )
    for name in ("fedmuscle", "fedmuscleplus"):
        assert isinstance(program(wide, name).model.projection, torch.nn.Linear)
        assert isinstance(program(fits, name).model.projection, torch.nn.Identity)
    shared = program(fits, "fedmuscleplus", projection_init="shared")
    assert isinstance(shared.model.projection, torch.nn.Linear)
    results = toys.execute(
        tmp_path / "run", toys.method("fedmuscle"), [wide, fits, toys.client("c")]
    )
    assert not results["failures"]


def test_heads_of_fedmuscle_get_unit_vectors_and_those_of_fedmuscleplus_what_is_set(toys):
    client = toys.client("a")
    x = client.to_device(client.train.rows(torch.arange(5))[0])
    lengths = {}
    printed = set()
    for name, fields in {
        "fedmuscle": {},
        "fedmuscleplus": {},
        "fedmuscleplus, unit": {"head_input": "unit"},
    }.items():
        method = toys.method(name.split(",")[0], **fields)
        model = method.Program(client, method, toys.training(), 0).model.double()
        features = model.features(x.double())
        assert torch.equal(model(x.double()), model.head(features))
        lengths[name] = features.norm(dim=1)
        printed.add(str(model))
    assert len(printed) == 2, "else they would share a cached local baseline"
    one = torch.ones(5, dtype=torch.float64)
    assert torch.allclose(lengths["fedmuscle"], one)
    assert torch.allclose(lengths["fedmuscleplus, unit"], one)
    assert (lengths["fedmuscleplus"] - one).abs().min() > 1e-3


def test_fedmuscle_ends_with_the_aligned_model(toys, tmp_path):
    """Fields of FedMusclePlus that make it FedMuscle, but for the optimizer: with plain SGD, which
    has no memory, one optimizer is as good as two."""
    sgd = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}
    plus = {"head_input": "unit", "peers": 2, "batch": 24, "distill_public": "never"}
    ends = []
    for name, fields in {
        "fedmuscle": {"peers": 2, "batch": 24},
        "fedmuscleplus": {**plus, "final_model": "aligned"},
        "fedmuscleplus, left early": {**plus, "final_model": "local"},
    }.items():
        method = toys.method(name.split(",")[0], **fields)
        clients = [toys.client(id) for id in "abcd"]
        fed = toys.federation(tmp_path / name, method, clients, rounds=2, **sgd)
        ends.append(toys.serve(fed, method))
    printed, plus, early = ends
    assert toys.apart(printed, plus) < 1e-9 < 1e-4 < toys.apart(printed, early)


@pytest.mark.parametrize("name, overlap", [("fedmuscle", 25), ("fedmuscleplus", 40)])
def test_segmentation_multilabel_and_classification_together(name, overlap, toys, tmp_path):
    table = load_dataset("digits")
    rows, public = table.train[:90].split(30), (table.x[table.train[200:224]], None)

    def digits(id, mine, target, model):
        arguments = [(table.x[r], table.targets[target][r]) for r in (mine, table.test[:40])]
        return Client(
            id=id,
            model=model,
            task=table.tasks[target],
            train=arguments[0],
            test=arguments[1],
            public=public,
        )

    cnn = toys.partial(CNN, (1, 8, 8), (4, 8), 8)
    clients = [
        digits("digit", rows[0], "digit", toys.partial(MLP, (1, 8, 8), (16,), 16)),
        digits("ink", rows[1], "ink", cnn),
        digits("attributes", rows[2], "attributes", cnn),
    ]
    results = toys.execute(tmp_path / "run", toys.method(name), clients, rounds=3, alone=True)
    assert not results["failures"]
    metrics = {id: entry["metric"] for id, entry in results["clients"].items()}
    assert metrics == {"digit": "accuracy", "ink": "miou", "attributes": "micro_f1"}
    assert results["clients"]["ink"]["value"] > overlap
    rows = [line.split(",") for line in (tmp_path / "run" / "ledger.csv").read_text().splitlines()]
    assert {row[3] for row in rows if row[1] == "ink"} >= {"train", "represent", "align"}


def test_a_client_that_fails_in_align_is_no_peer_from_then_on(outcome, breaks):
    """In the batch in which it fails it was a peer of the others."""
    breaks("align", "b")
    final = outcome(rounds=3)
    assert set(final) == {"a", "c", "d"}
    assert outcome.fed.failures == [Failure("b", "align", 2, "RuntimeError: gone")]


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"peers": 3}, "3 peers need 4 clients, the federation has 3"),
        ({"peers": 0}, "must be at least 1, got 0"),
        ({"batch": 25}, "the public set has 24 rows, fewer than a batch of 25"),
        ({"batch": 1}, "at least 2"),
        ({"temperature": 0.0}, "must be at least 0.006"),
        ({"temperature": [[0.2, 0.2], [0.2, 0.2]]}, "needs 3 rows of 3"),
        ({"lower_temperature": [[0.2, -1.0, 0.2]] * 3}, "must be at least 0.006"),
        ({"mask_absent_classes": True}, "is for averaged heads"),
        ({"exchange": "paper", "sync": "epoch"}, 'sync "batch" only'),
        ({"exchange": "paper", "loss": "gramian"}, 'loss "muscle"'),
        ({"exchange": "paper", "message_dtype": "int8"}, "aggregate is sent as it is"),
        ({"batch": 8, "pass_rows": 7}, "must be at least a batch, 8, got 7"),
    ],
)
def test_fields_that_do_not_fit_are_refused_before_anything_runs(fields, sentence, toys, tmp_path):
    with pytest.raises(Problems, match=sentence):
        method = validate_algorithm(toys.method("fedmuscleplus", **fields))
        toys.execute(tmp_path / "run", method, toys.clients())


def test_dropout_leaves_fewer_peers(outcome):
    """A client alone in its round only trains locally."""
    outcome(rounds=8, federation=FederationConfig(dropout=0.6, quorum=0))
    failed_rounds = {f.round for f in outcome.fed.failures}
    assert len(failed_rounds) > 3 and all(f.reason == "dropped out" for f in outcome.fed.failures)


def test_an_old_field_name_ends_in_an_error_that_says_the_new_one():
    with pytest.raises(TypeError, match='"heads" is called "average_heads" now'):
        FedMusclePlus(heads="shared")
    with pytest.raises(TypeError, match='"align_lr" is called "align_lr of fedmuscleplus" now'):
        FedMuscle(align_lr=0.001)
    with pytest.raises(Problems, match='"start" is called "projection_init" now'):
        load("digits", settings=["algorithm.start=joint"])
    with pytest.raises(UserError, match=r"algorithm.keep is called final_model now"):
        load("digits", settings=["keep=aligned"])


def test_flower_exchanges_once_per_pass_unless_the_scenario_says_otherwise():
    assert load("digits", engine="flower")[1].sync == "epoch"
    assert load("digits", engine="flower", settings=["sync=batch"])[1].sync == "batch"
    assert load("digits")[1].sync == "batch"


@pytest.mark.parametrize(
    "name", ["muscle-setup1", "muscle-setup1-vit", "muscle-setup2", "muscle-r1"]
)
def test_the_papers_settings_are_as_printed(name):
    """Section 6.1: M = 3, d = 256, B = 32, temperatures 0.2 and 0.15, 150 local epochs in all, AdamW
    at 1e-3, adapters of rank 16. Figure 11 has one round and five passes."""
    scenario, method = load(name)
    assert method == FedMuscle(passes=5 if name == "muscle-r1" else 1)
    assert (method.peers, method.width, method.batch) == (3, 256, 32)
    assert (method.temperature, method.lower_temperature) == (0.2, 0.15)
    training = scenario.training
    assert (training.rounds, training.epochs) == ((1, 150) if name == "muscle-r1" else (150, 1))
    assert (training.optimizer, training.lr, training.batch_size) == ("adamw", 1e-3, 32)
    assert scenario.public.size == 5000
    for group in scenario.clients:
        options = group.model.options
        assert options.get("lora", options.get("adapters")) == 16
        assert options.get("adapted", 1) == 1  # the first stage with adapters


def test_a_vit_of_the_papers_setup_has_adapters_in_queries_and_values():
    """ViT-Tiny: 12 layers, 192 wide; each adapter has two matrices of rank 16."""
    scenario, _ = load("muscle-setup1-vit")
    tiny = scenario.clients[-1].model
    encoder = build_encoder(tiny.name, (3, 32, 32), tiny.options)
    trainable = {name: p.numel() for name, p in encoder.named_parameters() if p.requires_grad}
    assert sum(trainable.values()) == 12 * 2 * 2 * 16 * 192
    assert all(".q_proj." in name or ".v_proj." in name for name in trainable)
