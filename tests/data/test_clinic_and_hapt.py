"""Patients, persons and photographs: what rows mean, that nobody is on both sides, and real files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from unalike import UserError
from unalike.data import load_dataset
from unalike.data.hapt import window_starts
from unalike.models import build_encoder

REAL = Path(os.environ.get("UNALIKE_DATA") or Path(__file__).parents[3] / "shared" / "data")


def real(file):
    """The data folder; the test is skipped, and says so, where it has no such file."""
    if not (REAL / file).is_file():
        pytest.skip(f"needs {file} in UNALIKE_DATA or ../shared/data")
    return str(REAL)


def test_clinic_has_one_outcome_in_three_forms():
    table = load_dataset("clinic")
    score, severity = table.targets["progression"], table.targets["severity"]
    time, event = table.targets["advanced"].unbind(1)
    assert len(table.train) == 300 and len(table.test) == 142
    assert table.targets["severity"][table.train].bincount().tolist() == [101, 99, 100], (
        "ties at the border"
    )
    assert score[severity == 0].max() <= score[severity == 1].min()
    seen = event == 1
    assert torch.allclose(time[seen], 150 / score[seen])
    assert (time[~seen] < 150 / score[~seen]).all() and 0.4 < event.mean() < 0.7
    assert sorted(table.x[:, 1].unique().tolist()) == [0, 1]
    numbers = table.x[table.train][:, [0, *range(2, 10)]]
    assert numbers.mean(0).abs().max() < 1e-5 and (numbers.std(0) - 1).abs().max() < 1e-4
    encoder = build_encoder("table", table.x.shape[1:], {"categories": [0, 2] + [0] * 8})
    assert encoder(table.x).shape == (442, 64)


def hapt_file(folder):
    """Two persons, twice the protocol each: sitting (200 readings), nothing (100), lying (128)."""
    label = np.tile(np.repeat([4, -1, 6], [200, 100, 128]), 4)
    user = np.repeat([3, 8], 2 * 428)
    experiment = np.tile(np.repeat([0, 1], 428), 2)
    x = np.random.default_rng(0).normal(size=(len(label), 6)).astype(np.float16)
    np.savez(folder / "hapt_raw.npz", x=x, label=label, user=user, experiment=experiment)
    return x


def test_hapt_windows_lie_within_one_activity_of_one_person(tmp_path):
    x = hapt_file(tmp_path)
    table = load_dataset("hapt", str(tmp_path))
    assert table.x.shape == (12, 6, 128)
    assert table.targets["activity"].tolist() == [3, 3, 5] * 4
    assert table.targets["person"].tolist() == [0] * 6 + [1] * 6
    assert table.tasks["person"].labels == ("person 3", "person 8")
    assert table.train.tolist() == [0, 1, 2, 6, 7, 8]
    second = torch.from_numpy(x[64:192].astype(np.float32)).T
    correlation = torch.corrcoef(torch.stack([second[0], table.x[1, 0]]))[0, 1]
    assert correlation == pytest.approx(1, abs=1e-5), "the second window starts 64 readings later"


def test_stretches_to_test_lie_in_every_recording(tmp_path):
    """Everyone sits, lies, sits: the second time they sit is to test, in both recordings."""
    label = np.tile(np.repeat([4, 6, 4], [200, 128, 128]), 4)
    user = np.repeat([3, 8], 2 * 456)
    experiment = np.tile(np.repeat([0, 1], 456), 2)
    x = np.random.default_rng(0).normal(size=(len(label), 6)).astype(np.float16)
    np.savez(tmp_path / "hapt_raw.npz", x=x, label=label, user=user, experiment=experiment)
    table = load_dataset("hapt", str(tmp_path), split="stretches")
    assert table.test.tolist() == [3, 7, 11, 15]
    assert table.train.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]


def test_a_stretch_shorter_than_a_window_gives_none():
    assert window_starts(np.repeat([[1], [2]], [127, 127], axis=0)).tolist() == []


@pytest.mark.parametrize("name", ["hapt", "chestxray14", "ham10000", "tinyimagenet100"])
def test_a_missing_file_is_named(name, tmp_path):
    with pytest.raises(UserError, match=f"{name} needs .*npz, not found in .*get it from http"):
        load_dataset(name, str(tmp_path))


def test_the_real_hapt():
    table = load_dataset("hapt", real("hapt_raw.npz"))
    assert len(table.tasks["person"].labels) == 30
    for rows in (table.train, table.test):
        assert table.targets["person"][rows].bincount(minlength=30).min() > 100
        assert table.targets["activity"][rows].bincount(minlength=12).min() > 10


def test_the_real_chestxray14_is_split_by_patient():
    folder = real("chestxray14_first_128_gray_jpeg.npz")
    table = load_dataset("chestxray14", folder)
    assert table.x.shape == (4999, 1, 128, 128) and len(table.tasks["findings"].labels) == 14
    patient = torch.from_numpy(
        np.load(Path(folder) / "chestxray14_first_128_gray_jpeg.npz")["patient"]
    )
    assert not torch.isin(patient[table.test], patient[table.train]).any()
    assert int((table.targets["findings"].sum(1) == 0).sum()) == 2756


def test_the_real_ham10000():
    table = load_dataset("ham10000", real("ham10000_5984_64_jpeg.npz"))
    y = table.targets["lesion"]
    assert table.x.shape == (5984, 3, 64, 64) and len(table.tasks["lesion"].labels) == 7
    shares = [y[rows].bincount(minlength=7) / len(rows) for rows in (table.train, table.test)]
    assert (shares[0] - shares[1]).abs().max() < 0.01, "stratified"


def test_the_real_tinyimagenet100():
    folder = real("tinyimagenet100_32_jpeg.npz")
    table = load_dataset("tinyimagenet100", folder)
    y = table.targets["thing"]
    assert y[table.train].bincount().tolist() == [130] * 100
    assert y[table.test].bincount().tolist() == [50] * 100


def test_radiographs_without_a_finding_may_have_a_label_of_their_own():
    folder = real("chestxray14_first_128_gray_jpeg.npz")
    plain = load_dataset("chestxray14", folder).targets["findings"]
    table = load_dataset("chestxray14", folder, background=True)
    y = table.targets["findings"]
    assert y.shape[1] == 15 and table.tasks["findings"].labels[-1] == "no finding"
    assert torch.equal(y[:, :14], plain)
    assert torch.equal(y[:, 14] == 1, plain.sum(1) == 0) and int(y[:, 14].sum()) == 2756


def test_canvases_of_lesions_have_one_or_two_kinds():
    folder = real("ham10000_5984_64_jpeg.npz")
    table = load_dataset("lesion_composites", folder, train=30, test=10)
    assert table.x.shape == (40, 3, 128, 128)
    assert set(table.targets["objects"].sum(1).tolist()) == {1.0, 2.0}
