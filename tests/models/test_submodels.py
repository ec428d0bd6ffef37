"""Submodels: which units go together, that nothing is lost on the way, and what is said where it cannot be done."""

import pytest
import torch
from torch import nn

from unalike.base.errors import UserError
from unalike.models import CNN, MLP, Transformer
from unalike.models.classics import VGG11, FastText, ResNet18
from unalike.models.flops import count_flops
from unalike.models.submodels import (
    expand,
    extract,
    find_channel_groups,
    first_units,
    narrow_model,
    reindex_groups,
    shapes,
)
from unalike.models.tracing import trace


class Mobile(nn.Module):
    """Depthwise, grouped and pointwise convolution, a residual stream, maps side by side, a gate, and a flattened map."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.point = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 16, 1),
        )
        self.gate = nn.Linear(16, 16)
        self.beside, self.grouped = nn.Conv2d(16, 16, 1), nn.Conv2d(32, 32, 3, padding=1, groups=8)
        self.out = nn.Linear(32 * 4, 5)

    def forward(self, x):
        x = self.norm(self.first(x)).relu_()
        x = x + self.point(self.depthwise(x)).relu()
        x = x * self.gate(x.mean((2, 3))).sigmoid()[..., None, None]
        x = self.grouped(torch.cat([x, self.beside(x)], 1))
        return self.out(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))


class Text(nn.Module):
    """Embedding, positions, torch's own transformer layer."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(20, 32), nn.Parameter(torch.randn(7, 32))
        self.layer, self.out = (
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            nn.Linear(32, 3),
        )

    def forward(self, x):
        return self.out(self.layer(self.words(x) + self.positions).mean(1))


MODELS = {
    "mlp": lambda: (MLP((1, 8, 8), (16, 24), 8), (1, 8, 8)),
    "batch norm": lambda: (CNN((1, 8, 8), (8, 16), 8, "batch"), (1, 8, 8)),
    "group norm": lambda: (CNN((1, 8, 8), (8, 32), 8, "group"), (1, 8, 8)),
    "vision transformer": lambda: (
        nn.Sequential(Transformer((1, 8, 8)), nn.Linear(32, 3)),
        (1, 8, 8),
    ),
    "torch's transformer": lambda: (Text(), (7,)),
    "mobile": lambda: (Mobile(), (3, 8, 8)),
    "vgg": lambda: (nn.Sequential(VGG11((3, 32, 32), 8), nn.Linear(64, 3)), (3, 32, 32)),
    "resnet": lambda: (nn.Sequential(ResNet18((3, 8, 8), 8), nn.Linear(64, 3)), (3, 8, 8)),
    "fasttext": lambda: (nn.Sequential(FastText((7,), 30, 16, 16), nn.Linear(16, 4)), (7,)),
}


def made(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    whole = name in ("torch's transformer", "fasttext")
    return model.eval(), torch.randint(1, 20, (2, *shape)) if whole else torch.randn(2, *shape)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0])
def test_extract_and_expand_undo_each_other(name, ratio):
    model, x = made(name)
    widths, full = trace(model, x), model.state_dict()
    keep = [
        torch.randperm(w.units)[: len(k)].sort().values
        for w, k in zip(widths, first_units(widths, ratio))
    ]
    small = narrow_model(model, widths, keep, x)
    assert small(x).shape == model(x).shape
    state = small.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in extract(full, widths, keep).items())
    changed = {n: t + 1 for n, t in state.items()}
    back = expand(changed, widths, keep, full)
    assert shapes(back) == shapes(full)
    assert all(torch.equal(t, changed[n]) for n, t in extract(back, widths, keep).items())
    touched = expand(
        {n: torch.ones_like(t) for n, t in state.items()},
        widths,
        keep,
        {n: torch.zeros_like(t) for n, t in full.items()},
    )
    assert all(torch.equal(back[n][touched[n] == 0], full[n][touched[n] == 0]) for n in full), (
        "what is not kept is left as it was"
    )
    assert sum(int(t.sum()) for t in touched.values()) == sum(t.numel() for t in state.values())
    if ratio < 1:
        assert count_flops(small, x) < count_flops(model, x)


@pytest.mark.parametrize("name", MODELS)
def test_units_of_no_effect_can_go_without_one(name):
    """Whatever the tracer ties is all there is of a unit: with its columns zero, the units left out are not missed."""
    model, x = made(name)
    widths = trace(model, x)
    keep = first_units(widths, 0.5)
    if any(isinstance(m, nn.LayerNorm | nn.TransformerEncoderLayer) for m in model.modules()):
        keep = [
            torch.arange(w.units) if w.units == 32 else k for w, k in zip(widths, keep)
        ]  # a layer norm sees all of its stream
        if name == "torch's transformer":
            return  # and torch wants heads to be as wide as the stream
    with torch.no_grad():
        for width, units in zip(widths, keep):
            for place in width.slices:
                if not place.is_output:
                    model.get_parameter(place.tensor).index_fill_(
                        place.axis, place.entries[len(units) :].flatten(), 0
                    )
        if name == "mobile":  # its gate sees the whole stream, grouped ones their group
            return
        small = narrow_model(model, widths, keep, x)
        assert torch.allclose(small(x), model(x), atol=1e-5)


def test_the_widths_of_what_is_tied():
    model, x = made("resnet")
    widths = trace(model, x)
    assert [w.units for w in widths] == [8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64], (
        "one stream and two inner widths a stage"
    )
    stream = {p.tensor for p in widths[0].slices}
    assert {
        "0.first.0.weight",
        "0.blocks.0.inner.3.weight",
        "0.blocks.1.inner.3.weight",
        "0.blocks.2.beside.0.weight",
    } <= stream
    model, x = made("vision transformer")
    assert [w.units for w in trace(model, x)] == [32, 4, 128, 4, 128], (
        "a stream, and in each block heads and a hidden layer"
    )
    model, x = made("mobile")
    assert [w.units for w in trace(model, x)] == [4, 4], (
        "channels that a grouped convolution takes together stay together"
    )


def test_a_submodels_widths_are_those_of_its_own():
    model, x = made("resnet")
    widths = trace(model, x)
    keep = first_units(widths, 0.5)
    own, told = trace(narrow_model(model, widths, keep), x), reindex_groups(widths, keep)
    assert [
        [(p.tensor, p.axis, p.entries.tolist(), p.is_output) for p in w.slices] for w in own
    ] == [[(p.tensor, p.axis, p.entries.tolist(), p.is_output) for p in w.slices] for w in told]


def test_models_that_differ_only_in_heads_are_not_taken_for_alike():
    x = torch.zeros(1, 1, 8, 8)
    few, many = (
        find_channel_groups(nn.Sequential(Transformer((1, 8, 8), heads=heads), nn.Linear(32, 2)), x)
        for heads in (2, 4)
    )
    assert few[1].units == 2 and many[1].units == 4


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.spectrum, self.after = nn.Linear(4, 8), Spectrum(), nn.Linear(8, 2)

    def forward(self, x):
        return self.after(self.spectrum(self.before(x)))


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.linalg.eigh(x.unsqueeze(-1) * x.unsqueeze(-2)).eigenvalues


def test_an_operation_that_cannot_be_followed_is_named_with_the_way_out():
    with pytest.raises(UserError, match=r"layer 'spectrum' uses .*name it in `fixed`"):
        trace(Odd(), torch.randn(2, 4))
    assert trace(Odd(), torch.randn(2, 4), fixed=["spectrum"]) == []
    with pytest.raises(UserError, match="no layer 'spectrums' to keep; there are: before"):
        trace(Odd(), torch.randn(2, 4), fixed=["spectrums"])


class Folding(nn.Module):
    """Its layers' units are added up, and what the last one takes in is made by no layer."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.after(self.before(x).view(-1, 2, 4).sum(1).repeat(1, 2))


def test_units_that_no_layer_makes_are_not_left_out():
    widths = trace(Folding(), torch.randn(2, 4))
    assert all(any(place.is_output for place in width.slices) for width in widths)
    with pytest.raises(UserError, match="cannot be made narrower"):
        narrow_model(Folding(), widths, first_units(widths, 0.5), torch.randn(2, 4))


class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.after(self.before(x).reshape(-1, 8))


class Silent(nn.Module):
    """Four heads, and nobody to tell that they are fewer."""

    def __init__(self):
        super().__init__()
        self.all, self.after = nn.Linear(4, 48), nn.Linear(16, 2)

    def forward(self, x):
        q, k, v = self.all(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.after(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)).mean(1)


class Waves(nn.Module):
    """What it does between its layers is a sum of waves, which mixes all units, in complex numbers or in NumPy's."""

    def __init__(self, numpy=False):
        super().__init__()
        self.before, self.after, self.numpy = nn.Linear(4, 8), nn.Linear(8, 2), numpy

    def forward(self, x):
        x = self.before(x)
        return self.after(
            torch.from_numpy(x.detach().numpy().copy()) if self.numpy else torch.fft.fft(x).real
        )


def test_what_the_tracer_cannot_follow_is_told_with_its_layer_and_the_way_out():
    x = torch.randn(2, 4)
    with pytest.raises(
        UserError,
        match=r"the model itself uses _fft_r2c, which the tracer cannot follow; .*`fixed`",
    ):
        trace(Waves(), x)
    widths = trace(Waves(numpy=True), x)
    with pytest.raises(
        UserError, match=r"in layer 'after' .* That layer, or one before it, .* name it in `fixed`"
    ):
        narrow_model(Waves(numpy=True), widths, first_units(widths, 0.5), x)
    assert (
        trace(Waves(), x, fixed=["before"]) == trace(Waves(numpy=True), x, fixed=["before"]) == []
    )


@pytest.mark.parametrize("model, x", [(Stubborn, (2, 4)), (Silent, (2, 3, 4))])
def test_a_layer_that_reckons_with_its_full_width_is_refused(model, x):
    model, x = model(), torch.randn(x)
    widths = trace(model, x)
    with pytest.raises(UserError, match="cannot be made narrower"):
        narrow_model(model, widths, first_units(widths, 0.5), x)


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5])
def test_a_width_at_which_a_layer_vanishes_is_refused(ratio):
    model, x = made("mlp")
    with pytest.raises(UserError, match=r"above 0 and at most 1.*layers.1.weight would have"):
        first_units(trace(model, x), ratio)
    widths = trace(model, x)
    with pytest.raises(UserError, match="would vanish"):
        extract(model.state_dict(), widths, [torch.arange(0)] * len(widths))
    assert [len(k) for k in first_units(widths, 1e-6)] == [1, 1]
