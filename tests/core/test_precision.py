"""Lower precision of forward and backward passes."""

import pytest
import torch

from unalike.algorithms.fedavg import FedAvg
from unalike.core.program import ClientProgram
from unalike.training.precision import precision_scope


@pytest.mark.parametrize("stack", ["never", "always"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_passes_are_in_low_precision_and_weights_are_not(
    precision, stack, toys, tmp_path, monkeypatch
):
    seen = set()
    error = ClientProgram.error

    def look(self, output, y):
        seen.add(output.dtype)
        return error(self, output, y)

    monkeypatch.setattr(ClientProgram, "error", look)
    ends = {}
    for name in ("float32", precision):
        clients = [toys.client(id, dtype=torch.float32) for id in "abcd"]
        results = toys.execute(
            tmp_path / name,
            FedAvg(),
            clients,
            rounds=5,
            epochs=3,
            precision=name,
            options={"stack": stack},
        )
        ends[name] = sum(entry["value"] for entry in results["clients"].values()) / 4
        assert not results["failures"]
    assert seen == {torch.float32, getattr(torch, precision)}
    weights = toys.states(tmp_path / precision)["a"].values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}
    assert ends["float32"] > 60 and abs(ends[precision] - ends["float32"]) < 10


def test_clients_in_float64_keep_their_precision(toys, tmp_path):
    clients = lambda: [toys.client(id) for id in "ab"]
    for name in ("float32", "bfloat16"):
        toys.execute(tmp_path / name, FedAvg(), clients(), precision=name)
    assert toys.apart(toys.states(tmp_path / "float32"), toys.states(tmp_path / "bfloat16")) == 0


def test_tf32_is_on_inside_the_block_only():
    before = torch.backends.cuda.matmul.allow_tf32
    with precision_scope("tf32", "cuda"):
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
