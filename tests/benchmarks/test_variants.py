"""Methods that only benchmarks need."""

import pytest
import torch

from benchmarks.variants import (
    Alone,
    ClassMeans,
    CoFEDWithParts,
    FedDFWithParts,
    FedProtoWithParts,
    MultilabelHeads,
    Newcomer,
    OneRound,
)
from unalike import MultiLabel
from unalike.algorithms import FedMuscle


def test_class_means_are_those_of_the_rows(toys):
    """Three classes far apart on an encoder that does nothing: each row is told; two labels."""
    x = 9 * torch.eye(3).repeat(4, 1) + 0.1 * torch.randn(12, 3)
    y = torch.arange(3).repeat(4)
    client = toys.client("a", model=torch.nn.Identity, train=(x, y), test=(x, y))
    program = ClassMeans.Program(client, ClassMeans(), toys.training(), 0)
    program.fit_means()
    assert (program.model(x.to(client.dtype)).argmax(1) == y).all()
    several = torch.nn.functional.one_hot(y, 4).float()
    several[:, 2:] = 0  # nobody has them
    client = toys.client("a", model=torch.nn.Identity, train=(x, y), test=(x, y))
    program = ClassMeans.Program(client, ClassMeans(), toys.training(), 0)
    program.training_batch = lambda rows: (x[rows], several[rows])
    program.fit_means()
    assert ((program.model(x.to(client.dtype)) > 0) == (several == 1)).all()


def test_one_round_without_its_fields_is_fedmuscle(toys, tmp_path):
    ends = []
    for kind in (FedMuscle, OneRound):
        method = kind(peers=2, width=8, batch=8)
        fed = toys.federation(tmp_path / kind.__name__, method, toys.clients())
        ends.append(toys.serve(fed, method))
    assert toys.apart(*ends) == 0


def test_refitting_moves_the_head_alone(toys):
    method = Alone(width=8, refit=3)
    program = Alone.Program(toys.client("a"), method, toys.training(), 0)
    before = {name: tensor.clone() for name, tensor in program.model.state_dict().items()}
    program.refit_head()
    moved = {n for n, t in program.model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved and all(name.startswith("head.") for name in moved)


def test_a_newcomer_is_away_until_it_arrives(toys, tmp_path):
    method = Newcomer(peers=2, width=8, batch=8, newcomer="b", arrives=3)
    clients = [toys.client(id) for id in "abcd"]
    fed = toys.federation(tmp_path / "run", method, clients, rounds=4)
    toys.serve(fed, method)
    rounds = {key[0] for key in fed.ledger.rows if key[1:] == ("b", "up", "train")}
    assert rounds == {3, 4} and not fed.failures


RIVALS = [(FedDFWithParts, {"batch": 8}), (CoFEDWithParts, {"batch": 8}), (FedProtoWithParts, {})]


@pytest.mark.parametrize("kind, fields", RIVALS)
def test_rivals_start_in_one_subspace_and_average_their_heads(kind, fields, toys, tmp_path):
    """All toys have one task and the same labels, so that in the end they have one head."""

    def end(name, **parts):
        method = kind(width=8, **fields, **parts)
        fed = toys.federation(tmp_path / name, method, toys.clients())
        models = toys.serve(fed, method)
        operations = {key[3] for key in fed.ledger.rows}
        heads = [
            {name: tensor for name, tensor in model.items() if name.startswith("head.")}
            for model in models.values()
        ]
        return operations & {"outline", "fit", "give", "take"}, heads

    assert end("neither")[0] <= {"give", "take"} if kind is FedDFWithParts else not end("not")[0]
    operations, heads = end("both", joint_start=True, average_heads=True)
    assert operations == {"outline", "fit", "give", "take"}
    for head in heads[1:]:
        assert all(torch.equal(tensor, heads[0][name]) for name, tensor in head.items())


def test_feddf_averages_whole_models_or_heads_alone(toys, tmp_path):
    """Clients a and b have one architecture, c another."""

    def averaged(name, **parts):
        method = FedDFWithParts(width=8, batch=8, **parts)
        fed = toys.federation(tmp_path / name, method, toys.clients())
        toys.serve(fed, method)
        return {c: p.averaged_parameters() for c, p in fed.engine.host.programs.items()}

    assert {name.split(".")[0] for name in averaged("whole")["a"]} == {
        "encoder",
        "projection",
        "head",
    }
    heads = averaged("heads", average_heads=True)
    assert {name.split(".")[0] for name in heads["a"]} == {"head"}
    assert all(torch.equal(heads["a"][name], heads["c"][name]) for name in heads["a"])


def test_the_safeguard_evaluates_classifiers_where_multilabel_clients_alone_average(toys, tmp_path):
    """As in `muscle-noniid` with the safeguard: a and b name one class, c and d several labels."""

    def several(id):
        x, y = toys.blobs(20, ord(id))
        labels = torch.nn.functional.one_hot(y, 4).float()
        return toys.client(id, task=MultiLabel(4), train=(x, labels), test=(x, labels))

    clients = [toys.client("a"), toys.client("b"), several("c"), several("d")]
    method = MultilabelHeads(peers=2, width=8, batch=8, average_heads="round")
    results = toys.execute(tmp_path / "run", method, clients, safeguard=True)
    judged = {c: bool(entry["judged"]) for c, entry in results["clients"].items()}
    assert judged == {"a": True, "b": True, "c": False, "d": False}
