"""Benches on a lent machine: the same runs as elsewhere, by processes that live on."""

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.lent import LentStudy, Workers, encode_once
from benchmarks.study import Study
from unalike.data import Tensors
from unalike.methods.prompt_tuning import encode_images

ROWS = {"digits": ("digits", ["rounds=1", "alone=false", "clients.0.count=2"])}


@pytest.fixture
def workers(tmp_path):
    workers = Workers(1, tmp_path / "kept", tf32=False)
    yield workers
    workers.close()


def test_runs_of_a_lent_machine_are_those_of_a_bench_elsewhere(workers):
    (lent,) = LentStudy(minutes=5, workers=workers).runs(ROWS, seeds=(3,))["digits"]
    (elsewhere,) = Study().runs(ROWS, seeds=(3,))["digits"]
    assert lent.results["metrics"] == elsewhere.results["metrics"]


def test_a_run_that_fails_is_left_out_and_the_next_one_is_made(workers):
    rows = {"wrong": ("digits", ["rounds=0"]), **ROWS}
    study = LentStudy(minutes=5, workers=workers)
    runs = study.runs(rows, seeds=(3,))
    assert study.left_out == ["wrong, seed 3"]
    assert list(runs) == ["digits"]


def test_runs_beyond_the_time_are_left_out(workers):
    study = LentStudy(minutes=1, workers=workers, started=time.monotonic() - 60)
    assert study.runs(ROWS, seeds=(3,)) == {}
    assert study.left_out == ["digits, seed 3"]


def test_the_same_run_of_two_studies_is_made_once_by_the_smaller_order(tmp_path):
    workers = Workers(0, tmp_path, tf32=False)
    later, sooner = ("a", (), 0, "cpu", None), ("b", (), 0, "cpu", None)
    first = workers.submit(2, later)
    workers.submit(1, sooner)
    assert workers.submit(0, later) is first
    assert workers.waiting.get()[-1] == later


def test_features_of_an_image_seen_before_are_those_computed_now():
    class Model:
        encoder = SimpleNamespace(places=(1, 1))
        seen = 0

        def look(self, x):
            self.seen += len(x)
            return {"patches": x.flatten(1)[:, None], "whole": x.flatten(1)}

    images = torch.arange(4 * 12, dtype=torch.uint8).reshape(4, 3, 2, 2)
    data = Tensors(images, torch.arange(4.0)[:, None])
    client = SimpleNamespace(device="cpu", dtype=torch.float32, to_device=lambda x: x / 255)
    model = Model()
    expected = encode_images(model, data, client).labelled_batch(torch.arange(4))
    model.seen = 0
    encode_once(model, data.subset(torch.tensor([2, 3])), client)
    features = encode_once(model, data, client).labelled_batch(torch.arange(4))
    assert model.seen == 4
    assert torch.equal(features[1], expected[1])
    for part in ("patches", "whole"):
        assert torch.equal(features[0][part], expected[0][part])
