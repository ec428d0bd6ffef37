"""Messages of the alignment in fewer bytes: rounded rows, and passes over a part of the public set."""

import pytest
import torch

from unalike import FederationConfig, Privacy
from unalike.base.errors import Problems
from unalike.methods.public_alignment import PublicAlignmentProgram
from unalike.methods.quantization import columns, dequantize, quantize
from unalike.runs import RunPlan
from unalike.runs.audit import audit

# Error relative to a row's largest number: half a step of a grid that is used to 5/6 or more; half
# of the last of 8 bits.
ERRORS = {"bfloat16": 2**-8, "int8": 0.6 / 127, "int4": 0.6 / 7}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("width", [1, 6, 7])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e6])
def test_rounded_rows_are_near_and_as_wide_as_announced(dtype, width, scale):
    rows = scale * torch.randn(20, width, generator=torch.Generator().manual_seed(0))
    rows[3] = 0
    sent = quantize(rows, dtype)
    assert sent.shape == (20, columns(width, dtype))
    back = dequantize(sent, dtype, width, torch.float32)
    peaks = rows.abs().amax(1, keepdim=True)
    assert ((back - rows).abs() <= ERRORS[dtype] * peaks + 1e-12).all()
    assert (back[3] == 0).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_whatever_the_bytes_are_rows_are_finite_or_marked(dtype):
    generator = torch.Generator().manual_seed(0)
    sent = torch.randint(-128, 128, (999, columns(6, dtype)), generator=generator).to(torch.int8)
    back = dequantize(sent, dtype, 6, torch.float32)
    assert (back.isfinite().all(1) == (sent[:, -1] != -128)).all()
    rows = torch.ones(3, 6)
    rows[0, 1], rows[1, 5] = float("nan"), float("-inf")
    back = dequantize(quantize(rows, dtype), dtype, 6, torch.float32)
    assert back.isnan().all(1).tolist() == [True, True, False]


def test_what_is_no_such_tensor_is_refused():
    rows = torch.ones(2, 6)
    for dtype, other in (("int8", "int4"), ("bfloat16", "int8"), (None, "int8"), ("int8", None)):
        with pytest.raises(ValueError, match="expected rows of"):
            dequantize(quantize(rows, other), dtype, 6, torch.float32)


@pytest.mark.parametrize("fields", [{}, {"exchange": "peers"}, {"sync": "epoch"}])
def test_rounded_messages_are_smaller_and_end_near(fields, outcome, toys):
    """Plain SGD, so that a small difference stays one. Rows of 8 numbers in messages of blocks of
    256 bytes: 24 rows of float64, 1536 bytes, are 384, 216 or 120."""
    plain = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}
    fields = {"batch": 24, "final_model": "aligned", "training": plain, **fields}
    whole = outcome(**fields)
    totals = [outcome.fed.ledger.total("up", client="a")]
    apart = []
    for dtype in ("bfloat16", "int8", "int4"):
        apart.append(toys.apart(whole, outcome(message_dtype=dtype, **fields)))
        totals.append(outcome.fed.ledger.total("up", client="a"))
    bfloat16, int8, int4 = apart
    assert 0 < bfloat16 < 0.01 and 0 < int8 < 0.02 and int8 < int4 < 0.2
    assert totals == sorted(totals, reverse=True) and totals[1] < totals[0]


@pytest.mark.parametrize("sync", ["batch", "epoch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_the_audit_of_small_messages_is_the_ledger_to_the_byte(sync, dtype, toys, tmp_path):
    fields = {"sync": sync, "message_dtype": dtype, "batch": 7, "pass_rows": 14}
    method = lambda: toys.method("fedmuscleplus", **fields)
    results = toys.execute(tmp_path / "run", method(), toys.clients())
    plan = RunPlan(method(), toys.clients(), toys.training(rounds=3), FederationConfig())
    clients = audit(plan)["clients"].values()
    for way in ("up", "down"):
        assert sum(client["bytes"][way] for client in clients) == results["bytes"][way] > 0


def test_a_client_whose_rounded_rows_are_not_finite_is_named(outcome, monkeypatch):
    represent = PublicAlignmentProgram.compute_representation

    def spoilt(self, epoch, batch):
        z = represent(self, epoch, batch)
        return z / 0 if self.client.id == "b" else z

    monkeypatch.setattr(PublicAlignmentProgram, "compute_representation", spoilt)
    assert set(outcome(message_dtype="int8")) == {"a", "c", "d"}
    (failure,) = outcome.fed.failures
    assert failure.client == "b" and "NaN" in failure.reason


def test_a_client_that_sends_whole_numbers_unasked_is_refused(outcome, monkeypatch):
    represent = PublicAlignmentProgram.represent

    def whole(self, epoch, batch):
        z = represent(self, epoch, batch)
        return z.to(torch.int64) if self.client.id == "b" else z

    whole.operation = "changes"
    monkeypatch.setattr(PublicAlignmentProgram, "represent", whole)
    assert set(outcome(rounds=1)) == {"a", "c", "d"}
    assert "expected rows of 8 numbers, real" in outcome.fed.failures[0].reason


def test_noise_is_not_rounded(toys, tmp_path):
    method = toys.method("fedmuscleplus", message_dtype="int8")
    with pytest.raises(Problems, match="rounded before they are noised"):
        toys.execute(tmp_path / "run", method, toys.clients(), privacy=Privacy(noise=0.5))


@pytest.mark.parametrize("sync", ["batch", "epoch"])
def test_a_pass_over_all_rows_is_the_usual_one(sync, outcome, toys):
    usual = outcome(sync=sync, batch=7)
    assert toys.apart(usual, outcome(sync=sync, batch=7, pass_rows=24)) == 0
    assert toys.apart(usual, outcome(sync=sync, batch=7, pass_rows=14)) > 1e-4


def test_a_short_pass_has_other_rows_each_time(outcome):
    outcome(rounds=1, batch=7, pass_rows=9)
    rows = outcome.fed.ledger.rows
    assert rows[1, "a", "up", "represent"][0] == 1 and rows[1, "a", "up", "align"][0] == 2
    order = outcome.fed.public(7)
    first, second = (set(torch.cat(order.batches(n, 0, 9)).tolist()) for n in (1, 2))
    assert len(first) == len(second) == 14 and first != second
