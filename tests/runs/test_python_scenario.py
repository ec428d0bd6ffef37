"""Shipped scenarios from Python, to run with a method of one's own."""

from dataclasses import dataclass

import pytest

import unalike


@dataclass
class Half(unalike.FedAvg):
    """A method of one's own."""


def test_a_shipped_scenario_gives_clients_public_set_and_training(tmp_path):
    digits = unalike.scenario("digits", ["rounds=1", "epochs=1"], seed=3)
    assert [client.id for client in digits.clients] == "ada ben cleo dora emil fay".split()
    assert (digits.seed, digits.training.rounds) == (3, 1)
    assert digits.public is not None and len(digits.public) == digits.clients[0].info().public_rows
    result = digits.run(Half(), alone=False, out=tmp_path / "own")
    assert (result["scenario"], result["algorithm"], result["seed"]) == ("digits", "half", 3)


def test_it_is_the_same_run_as_the_commands(tmp_path):
    from unalike.runs import run_scenario
    from unalike.scenarios import load

    settings = ["rounds=1", "epochs=1"]
    here = unalike.scenario("digits", settings).run(out=tmp_path / "here", alone=False)
    there, _ = run_scenario(*load("digits", settings=settings, alone=False), out=tmp_path / "there")
    assert [c["hash"] for c in here["clients"].values()] == [
        c["hash"] for c in there["clients"].values()
    ]


def test_an_unknown_scenario_is_named():
    with pytest.raises(unalike.UserError, match=r'no scenario "digit"\. Did you mean "digits"'):
        unalike.scenario("digit")
