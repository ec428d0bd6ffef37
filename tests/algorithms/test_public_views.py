"""Views of public samples that are made once: what they cost, and that they are the same whenever made."""

import pytest
import torch
from torch import nn

from unalike.core.program import ClientProgram
from unalike.methods import public_views
from unalike.methods.public_views import PublicViews
from unalike.models import flops

ROWS = 24  # of the toys' public set


class Frozen(nn.Module):
    """An encoder with a frozen trunk that counts the rows it is run on."""

    has_fixed_trunk = True
    width = 8
    seen = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 8)

    def trunk(self, x):
        Frozen.seen += len(x)
        return torch.cat([x, x.sum(1, keepdim=True)], 1)

    def forward(self, x):
        return self.layer(self.trunk(x) if x.shape[1] == 6 else x)


def seen(toys, folder, method, rounds, **options):
    """Rows that the trunk is run on, in all clients of a run."""
    Frozen.seen = 0
    flops._known.clear()  # else a later run counts no operations
    clients = [toys.client(id, model=Frozen) for id in "ab"]
    toys.execute(folder, toys.method(method, **options), clients, rounds=rounds)
    return Frozen.seen


@pytest.mark.parametrize(("method", "kinds"), [("simclr", 1), ("sage", 2)])
def test_a_pass_over_kept_views_does_not_run_the_frozen_trunk(method, kinds, toys, tmp_path):
    short, long = (
        seen(toys, tmp_path / f"kept {rounds}", method, rounds, views=3) for rounds in (2, 3)
    )
    fresh = [seen(toys, tmp_path / f"new {rounds}", method, rounds) for rounds in (2, 3)]
    assert long == short
    assert fresh[1] - fresh[0] == 2 * 2 * ROWS  # one round more, two clients, two views
    assert short - fresh[0] == (3 * kinds - 2) * 2 * ROWS


@pytest.mark.parametrize("method", ["simclr", "sage"])
def test_kept_views_are_the_same_whenever_they_are_made(method, toys, tmp_path):
    ends = []
    for alive in (2, 1):  # with one in memory, the views are made again in every round
        folder = tmp_path / str(alive)
        toys.execute(folder, toys.method(method, views=2), toys.clients(2), alive=alive)
        ends.append(toys.states(folder))
    assert toys.apart(*ends) == 0.0


def test_two_views_of_a_row_are_different_ones_of_those_that_are_kept(toys, tmp_path):
    method = toys.method("simclr", views=2)
    program: PublicViews = method.Program(toys.client("a"), method, toys.training(), 0)
    rows = torch.tensor([3, 7, 3, 0])
    pairs = [program.public_views(rows, lambda x: x + torch.rand(x.shape), count=2) for _ in "ab"]
    for one, other in pairs:
        assert not torch.isclose(one, other).any()
    kept = torch.stack(pairs[0]).sort(0).values
    assert torch.equal(kept, torch.stack(pairs[1]).sort(0).values)
    assert torch.equal(kept[:, 0], kept[:, 2])
    assert isinstance(program, ClientProgram)


def test_views_that_take_too_much_memory_are_refused(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(public_views, "MAX_BYTES", 1000)
    with pytest.raises(Exception, match=r"2 views of each public sample .* lower algorithm.views"):
        toys.execute(tmp_path / "run", toys.method("simclr", views=2), toys.clients(1))
