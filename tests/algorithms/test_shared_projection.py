"""Shared initialisation of projections, and local epochs with a slower backbone."""

from functools import wraps

import pytest
import torch
from torch import nn

from unalike import FederationConfig
from unalike.algorithms import FedMusclePlus
from unalike.base.errors import Problems
from unalike.base.randomness import stream
from unalike.core.operations import operation
from unalike.core.privacy import Privacy
from unalike.methods.public_data import public_batch, public_samples
from unalike.methods.shared_subspace import (
    fit_shared_subspace,
    principal_components,
    rms_length,
)
from unalike.methods.slow_backbone import SLOW_BACKBONE
from unalike.models import MLP
from unalike.scenarios.validate import validate_algorithm

from .test_public_baselines import diverse_clients


def joint(toys, **fields):
    return toys.method("fedmuscleplus", projection_init="shared", **fields)


@pytest.mark.parametrize("rows, features", [(40, 7), (7, 40), (5, 5)])
def test_principal_components_equal_those_of_the_singular_value_decomposition(rows, features):
    """Columns beyond the rank are 0, and signs do not depend on the order of features."""
    x = torch.randn(
        rows, features, generator=stream(0, "rows"), dtype=torch.float64
    ) * torch.arange(1, features + 1)
    components = principal_components(x, width := 6)
    vectors, values, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    rank = min(rows, features, width)
    assert torch.allclose(components[:, :rank].abs(), (vectors * values)[:, :rank].abs(), atol=1e-6)
    assert (components[:, rank:] == 0).all() and components.shape == (rows, width)
    assert all(column[column.abs().argmax()] >= 0 for column in components.T), (
        "its sign is no accident of the machine"
    )
    assert torch.allclose(
        principal_components(x[:, torch.randperm(features)], width), components, atol=1e-6
    ), "nor is the order of features"


def test_rotated_encoders_have_the_same_representations_after_the_fit(toys, tmp_path):
    """Encoders whose features differ by a rotation and a scale."""

    class Turned(nn.Module):
        width = 6

        def __init__(self, shape, seed=0):
            super().__init__()
            turn = torch.linalg.qr(
                torch.randn(6, 6, generator=stream(seed, "turn"), dtype=torch.float64)
            )[0]
            self.register_buffer("turn", turn * (1 + seed))

        def forward(self, x):
            return x @ self.turn

    clients = [toys.client(id, model=Turned((6,), seed)) for seed, id in enumerate("abc")]
    fed = toys.federation(tmp_path / "run", joint(toys), clients)
    fed.start_round(1)
    fed.call("kind_of")
    programs = fed.engine.host.programs
    apart = lambda: max(
        (programs["a"].represent_all(0) - programs[c].represent_all(0)).norm(dim=1).mean().item()
        for c in "bc"
    )
    before, results = apart(), fit_shared_subspace(fed)
    assert before > 0.5 and apart() < 0.05
    assert results.keys() == set("abc") and all(0.7 < fit <= 1 for fit in results.values())
    features = programs["b"].model.features(public_batch(programs["b"], torch.arange(24)))
    assert (
        rms_length(features).item() == pytest.approx(features.shape[1] ** 0.5, rel=1e-4)
        and features.mean(0).abs().max() < 1e-4
    )


def test_later_clients_fit_to_the_existing_subspace(toys, tmp_path):
    method = joint(toys)
    fed = toys.federation(tmp_path / "run", method, toys.clients())
    fed.start_round(1)
    fed.sampled = ["a", "b"]
    calls, call = [], fed.call
    fed.call = lambda operation, **about: (
        calls.append((operation, list(about["per_client"]))) or call(operation, **about)
    )
    assert fit_shared_subspace(fed).keys() == set("ab") and fit_shared_subspace(fed) == {}
    space = fed.state["joint"].clone()
    fed.sampled = ["a", "b", "c"]
    assert fit_shared_subspace(fed).keys() == {"c"} and torch.equal(fed.state["joint"], space)
    assert calls == [("outline", ["a", "b"]), ("fit", ["a", "b"]), ("fit", ["c"])]


def test_a_client_that_cannot_fit_is_left_out_of_the_round(toys, tmp_path, monkeypatch):
    """Also where it is the only one called; clients that dropped out are not called."""
    fed = toys.federation(tmp_path / "run", method := joint(toys), toys.clients())
    fed.start_round(1)
    fed.sampled = ["a", "b"]
    fit_shared_subspace(fed)
    fed.sampled = ["a", "b", "c"]
    fit = FedMusclePlus.Program.fit

    def broken(self, target):
        raise ValueError("no memory")

    broken.operation = fit.operation
    with monkeypatch.context() as patched:
        patched.setattr(FedMusclePlus.Program, "fit", broken)
        assert (
            fit_shared_subspace(fed) == {}
            and fed.active == ["a", "b"]
            and fed.state["met"] == ["a", "b"]
        )
    gone = toys.federation(
        tmp_path / "gone",
        method,
        toys.clients(),
        federation=FederationConfig(dropout=0.99, quorum=0),
    )
    gone.start_round(1)
    assert fit_shared_subspace(gone) == {} and "joint" not in gone.state


def test_without_any_outline_there_is_no_subspace_yet(toys, tmp_path, monkeypatch):
    fed = toys.federation(
        tmp_path / "run", joint(toys), toys.clients(), federation=FederationConfig(quorum=0)
    )
    fed.start_round(1)
    with monkeypatch.context() as patched:
        patched.setattr(FedMusclePlus.Program, "public_features", lambda self: 1 / 0)
        assert fit_shared_subspace(fed) == {} and "joint" not in fed.state


def test_a_client_refuses_a_subspace_of_another_shape(toys, tmp_path):
    fed = toys.federation(tmp_path / "run", joint(toys), toys.clients())
    fed.start_round(1)
    fed.call("kind_of")
    program = fed.engine.host.programs["a"]
    for target in (torch.zeros(3, 4), torch.zeros(len(public_samples(program)), 3)):
        with pytest.raises(ValueError, match="expected a shared subspace of"):
            program.fit(target)
    program.model.projection = nn.Identity()
    with pytest.raises(ValueError, match="expected a linear projection"):
        program.fit(program.outline())


@pytest.mark.parametrize("local, moves", [(0.0, False), (0.1, True), (1.0, True)])
def test_local_epochs_train_the_backbone_at_its_own_learning_rate(local, moves, toys, tmp_path):
    """The head learns all the same; alone everybody moves as ever."""
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscleplus", backbone_lr_scale=local),
        toys.clients(),
        epochs=2,
    )
    fed.start_round(1)
    fed.call("kind_of")
    program = fed.engine.host.programs["a"]
    first = {name: tensor.clone() for name, tensor in program.model.state_dict().items()}
    gone = lambda part: max(
        float((t - first[n]).abs().max())
        for n, t in program.model.state_dict().items()
        if n.startswith(part)
    )
    fed.call("train_gently")
    assert gone("head.") > 1e-3 and (gone("encoder.") > 0) is moves
    groups = program.optimizers[SLOW_BACKBONE].param_groups
    assert [group["lr"] for group in groups] == pytest.approx(
        [fed.training.lr, local * fed.training.lr]
    )
    assert sum(len(group["params"]) for group in groups) == len(list(program.model.parameters()))
    slow, _ = gone("encoder."), fed.call("train")
    assert gone("encoder.") > slow


def test_batch_statistics_stay_with_a_frozen_backbone(toys, tmp_path):
    """Those of batch norm, with dropout beside it; the encoder is in training mode afterwards."""
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscleplus", backbone_lr_scale=0.0),
        [toys.client(id, model=toys.noisy) for id in "abc"],
    )
    fed.start_round(1)
    fed.call("kind_of")
    program = fed.engine.host.programs["a"]
    first = {name: tensor.clone() for name, tensor in program.model.encoder.state_dict().items()}
    assert any("running_mean" in name for name in first)
    fed.call("train_gently")
    assert all(
        torch.equal(tensor, first[name])
        for name, tensor in program.model.encoder.state_dict().items()
    )
    assert program.model.encoder.training


def test_clients_with_different_modalities_and_tasks_fit_one_subspace(toys, tmp_path):
    """The map of a dense task is averaged; an encoder without a map is refused."""
    fed = toys.federation(
        tmp_path / "run", method := joint(toys, backbone_lr_scale=0.0), diverse_clients(), rounds=1
    )
    toys.serve(fed, method)
    program = next(program for program in fed.engine.host.programs.values() if program.model.dense)
    assert len(fed.state["met"]) == len(diverse_clients()) and program.public_features().shape == (
        len(public_samples(program)),
        program.model.projection.in_features,
    )
    with pytest.raises(ValueError, match="a dense task needs an encoder with grid"):
        program.model.encoder = nn.Identity()
        program.public_features()


def test_fold_replicas_are_fitted_like_their_client(toys, tmp_path, monkeypatch):
    """The space knows no labels, so that the safeguard may judge who met the others."""
    fitted = []
    fit = FedMusclePlus.Program.fit

    @operation
    @wraps(fit)
    def watched(self, target):
        fitted.append((self.client.id, fit(self, target)))
        return fitted[-1][1]

    monkeypatch.setattr(FedMusclePlus.Program, "fit", watched)
    results = toys.execute(
        tmp_path / "run", joint(toys, backbone_lr_scale=0.5), toys.clients(), safeguard=True
    )
    fits = {c: {value for id, value in fitted if id == c} for c in "abc"}
    assert all(len([id for id, _ in fitted if id == c]) > 1 and len(fits[c]) == 1 for c in "abc"), (
        "each shadow, and alike"
    )
    assert {entry["kept"] for entry in results["clients"].values()} <= {"alone", "together"}


def test_shared_init_and_slow_backbone_in_a_whole_run_that_resumes(toys, tmp_path):
    """An interrupted run ends at the same bits; the exchange adds to the bytes of both ways."""

    def interrupted(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise KeyboardInterrupt

    wide = toys.partial(MLP, (6,), (8,), 12)  # has a projection whatever its start
    clients = lambda: [toys.client(id, model=wide) for id in "abc"]
    method = lambda: joint(toys, backbone_lr_scale=0.1, average_heads="epoch")
    whole = toys.execute(tmp_path / "whole", method(), clients(), alone=True)
    with pytest.raises(KeyboardInterrupt):
        toys.execute(tmp_path / "cut", method(), clients(), alone=True, watch=interrupted)
    cut = toys.execute(tmp_path / "cut", method(), clients(), alone=True, workers=2)
    assert cut["clients"] == whole["clients"] and cut["bytes"] == whole["bytes"]
    own = toys.execute(
        tmp_path / "own",
        toys.method("fedmuscleplus", backbone_lr_scale=0.1, average_heads="epoch"),
        clients(),
        alone=True,
    )
    assert (
        whole["bytes"]["up"] > own["bytes"]["up"] and whole["bytes"]["down"] > own["bytes"]["down"]
    )
    assert toys.apart(toys.states(tmp_path / "whole"), toys.states(tmp_path / "own")) > 1e-3
    alone = [[entry["alone"] for entry in results["clients"].values()] for results in (whole, own)]
    assert alone[0] == alone[1] and None not in alone[0], "alone nobody meets anybody"


def test_distillation_has_a_learning_rate_of_its_own(toys, tmp_path):
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscleplus", distill_lr=0.02, align_lr=0.01),
        toys.clients(),
    )
    fed.start_round(1)
    fed.call("kind_of")
    program = fed.engine.host.programs["a"]
    assert (
        program.algorithm.public_optimizer(program, "public").param_groups[0]["lr"] == 0.02
        and program.algorithm.public_optimizer(program, "align").param_groups[0]["lr"] == 0.01
    )
    program.algorithm = FedMusclePlus(align_lr=0.01)
    program.optimizers.clear()
    assert program.algorithm.public_optimizer(program, "public").param_groups[0]["lr"] == 0.01


def test_an_outline_is_one_privacy_release_a_row(toys, tmp_path):
    rows = lambda how: toys.execute(
        tmp_path / how,
        toys.method("fedmuscleplus", projection_init=how),
        [toys.client(id, model=toys.partial(MLP, (6,), (8,), 12)) for id in "abc"],
        privacy=Privacy(noise=1.0),
    )["clients"]["a"]["privacy"]["releases"]
    assert rows("shared") - rows("random") == 24, "one for each of the public rows"


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"backbone_lr_scale": 1.5}, "must be at most 1, got 1.5"),
        ({"backbone_lr_scale": -0.1}, "must be at least 0"),
        ({"distill_lr": 0}, "must be above 0"),
    ],
)
def test_fields_that_do_not_fit_are_refused_before_anything_runs(fields, sentence, toys, tmp_path):
    with pytest.raises(Problems, match=sentence):
        method = validate_algorithm(toys.method("fedmuscleplus", **fields))
        toys.execute(tmp_path / "run", method, toys.clients())
