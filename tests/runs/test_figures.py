"""Figures that a method logs: by round, thinned, equal after a stop, not counted as traffic."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from unalike.methods.averaging import Averaging
from unalike.runs.figures import write_figure


@dataclass
class Pictured(Averaging):
    keeps: bool = True

    def evaluate(self, fed):
        if self.keeps:
            fed.log_figure(
                "two things",
                points=torch.rand(700, 3, generator=torch.Generator().manual_seed(fed.round)),
                classes=torch.arange(700),
            )
            fed.log_figure(
                "weights",
                matrix=np.eye(100),
                rows=[f"c{i}" for i in range(100)],
                columns=["same"] * 100,
            )
        return super().evaluate(fed)


class Stopped(BaseException):
    pass


def figure_files(folder):
    return {file.name: file.read_bytes() for file in (folder / "pictures").iterdir()}


def test_a_stopped_run_writes_the_same_figures_without_traffic(toys, tmp_path):
    def stop(event, **facts):
        if event == "round" and facts["round"] == 3:
            raise Stopped

    drawing, plain = [
        toys.execute(
            tmp_path / str(keeps), Pictured(keeps), [toys.client(c) for c in "ab"], rounds=3
        )
        for keeps in (True, False)
    ]
    assert drawing["bytes"] == plain["bytes"] and not (tmp_path / "False" / "pictures").exists()
    assert sorted(figure_files(tmp_path / "True")) == [
        f"{name}-00000{at}.npz" for name in ("two_things", "weights") for at in (1, 2, 3)
    ]
    with pytest.raises(Stopped):
        toys.execute(
            tmp_path / "cut", Pictured(), [toys.client(c) for c in "ab"], rounds=3, watch=stop
        )
    toys.execute(tmp_path / "cut", Pictured(), [toys.client(c) for c in "ab"], rounds=3)
    assert figure_files(tmp_path / "cut") == figure_files(tmp_path / "True")
    events = [
        json.loads(line) for line in (tmp_path / "True" / "events.jsonl").read_text().splitlines()
    ]
    assert "picture" not in {event["event"] for event in events}


def test_large_arrays_are_thinned_evenly(toys, tmp_path):
    toys.execute(tmp_path / "run", Pictured(), [toys.client(c) for c in "ab"], rounds=1)
    with np.load(tmp_path / "run" / "pictures" / "two_things-000001.npz") as arrays:
        assert arrays["points"].shape == (500, 3) and arrays["points"].dtype == np.float32
        assert (
            arrays["classes"][0] == 0
            and arrays["classes"][-1] == 699
            and len(set(arrays["classes"])) == 500
        )
    with np.load(tmp_path / "run" / "pictures" / "weights-000001.npz") as arrays:
        assert (
            arrays["matrix"].shape == (64, 64)
            and (arrays["matrix"].diagonal() == 1).all()
            and arrays["rows"][-1] == "c99"
        )


@pytest.mark.parametrize(
    "name, part, message",
    [("../up", "points", "letters, numbers and spaces"), ("a", "pionts", 'Did you mean "points"')],
)
def test_unknown_names_and_parts_are_refused(tmp_path, name, part, message):
    with pytest.raises(ValueError, match=message):
        write_figure(tmp_path, name, 1, **{part: [[1.0]]})
