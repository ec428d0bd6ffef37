"""The optimizer of the alignment: shared or of its own, its learning rate and decay."""

import math

import pytest


def test_one_or_two_optimizers_and_a_learning_rate_of_the_alignment(outcome, toys):
    one = outcome(optimizers="one", final_model="aligned")
    two = outcome(optimizers="two", final_model="aligned")
    own = outcome(align_lr=1e-9, final_model="aligned")
    still = outcome(optimizers="two", align_lr=1e-9, final_model="local")
    assert toys.apart(one, two) > 1e-4 and toys.apart(two, own) > 1e-4
    assert toys.apart({"a": own["a"]}, {"a": still["a"]}) < 1e-6, (
        "at a rate of almost nothing alignment does almost nothing"
    )


def test_models_with_frozen_weights_are_aligned_at_a_tenth_of_the_learning_rate(outcome, toys):
    """Unless `align_lr` is set; models without frozen weights at the full rate."""

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


def test_decay_lowers_the_learning_rate_along_a_cosine(outcome, toys):
    outcome(rounds=4, align_lr=0.02, decay=True)
    for program in outcome.fed.engine.host.programs.values():
        assert program.optimizers["align"].param_groups[0]["lr"] == pytest.approx(
            0.02 * (1 + math.cos(0.75 * math.pi)) / 2
        )
    assert toys.apart(outcome(rounds=1, decay=True), outcome(rounds=1)) == 0, (
        "the first round is as told"
    )
