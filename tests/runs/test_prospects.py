"""What is known of a client's gain before any training."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from unalike.cli import app
from unalike.runs import prospects as module
from unalike.runs.prospects import clients_prospects, kernel_cosine, predict, prospects


def test_a_public_set_of_other_things_is_farther():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    near = [kernel_cosine(rows[:100], rows[100:] + shift) for shift in (0.0, 0.5, 1.0, 3.0)]
    assert abs(near[0] - 1) < 0.02 and near == sorted(near, reverse=True) and near[-1] < 0.5


def test_clients_partners_and_public_set_are_told(toys):
    """Clients of one task; the public set of `far` is not like its own rows."""
    clients = [toys.client("a"), toys.client("b", model=toys.noisy)]
    x = clients[0].train.rows(torch.arange(len(clients[0].train)))[0]
    public = torch.cat([x, x])[:24]
    clients = [toys.client(id, public=(public, None)) for id in "ab"]
    clients.append(toys.client("far", public=(public + 9, None)))
    a, _, far = clients_prospects(clients, 0)
    assert a.partners == ("b", "far") and a.gain is None, "nothing pretrained"
    assert a.nearness > 0.8 > far.nearness and -1 <= a.fit <= 1
    alone = replace(clients[0], public=None)
    (none,) = clients_prospects([alone], 0)
    assert none.partners == () and none.fit is None and none.nearness is None


def test_the_predicted_gain_is_the_line_that_was_measured():
    line = json.loads(Path("results/muscle-prospects.json").read_text())["line"]
    assert line["intercept"] == module.INTERCEPT and line["slope"] == module.SLOPE
    assert line["error"] == pytest.approx(module.ERROR, abs=0.05)
    assert line["error"] < line["error_of_the_mean"]
    assert predict(0.9) == pytest.approx(line["intercept"] + line["slope"])
    assert predict(1.01) == predict(0.999)


def test_the_command_shows_them():
    result = CliRunner().invoke(app, ["suggest", "digits", "--join"])
    assert result.exit_code == 0, result.output
    assert re.search(r"ada +cleo, emil, fay +0\.\d\d +[01]\.\d\d", result.output)
    assert [p.client for p in prospects("digits")][:2] == ["ada", "ben"]
