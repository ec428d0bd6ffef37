"""The optimizer of the alignment: FedMuscle's is that of local epochs, FedMusclePlus has one of its own."""

import math

import pytest


def test_fedmuscle_has_one_optimizer_at_the_rate_of_the_training_settings(toys, tmp_path):
    """Also with frozen weights: nothing is silently gentler."""

    def holding():
        model = toys.mlp()
        next(model.parameters()).requires_grad_(False)
        return model

    fed = toys.federation(
        tmp_path,
        toys.method("fedmuscle", peers=1),
        [toys.client("a"), toys.client("b", model=holding)],
        lr=0.02,
    )
    toys.serve(fed, toys.method("fedmuscle", peers=1))
    for program in fed.engine.host.programs.values():
        assert list(program.optimizers) == ["task"]
        assert program.optimizers["task"].param_groups[0]["lr"] == 0.02


def test_fedmuscleplus_has_an_optimizer_and_a_rate_for_the_alignment(outcome, toys):
    own = outcome(align_lr=1e-9, final_model="aligned")
    still = outcome(align_lr=1e-9, final_model="local")
    assert toys.apart(outcome(final_model="aligned"), own) > 1e-4
    assert toys.apart({"a": own["a"]}, {"a": still["a"]}) < 1e-6, (
        "at a rate of almost nothing alignment does almost nothing"
    )
    outcome(align_lr=0.02)
    for program in outcome.fed.engine.host.programs.values():
        assert program.optimizers["align"].param_groups[0]["lr"] == 0.02


def test_decay_lowers_the_learning_rate_along_a_cosine(outcome, toys):
    outcome(rounds=4, align_lr=0.02, decay=True)
    for program in outcome.fed.engine.host.programs.values():
        assert program.optimizers["align"].param_groups[0]["lr"] == pytest.approx(
            0.02 * (1 + math.cos(0.75 * math.pi)) / 2
        )
    assert toys.apart(outcome(rounds=1, decay=True), outcome(rounds=1)) == 0, (
        "the first round is as told"
    )
