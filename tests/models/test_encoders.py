"""Every encoder: shapes, a stack as one program, and what it refuses."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

from unalike.data import load_dataset
from unalike.models import CNN, MLP, Transformer, build_encoder

SMALL = ["mlp", "cnn", "transformer", "autoencoder"]  # the others: elsewhere
MAKERS = {
    "mlp": lambda: MLP((1, 8, 8), hidden=(16, 16), width=12),
    "cnn": lambda: CNN((1, 8, 8), channels=(4, 8), width=12),
    "cnn group": lambda: CNN((1, 8, 8), channels=(4, 6), width=12, norm="group"),
    "cnn batch": lambda: CNN((1, 8, 8), channels=(4, 8), width=12, norm="batch"),
    "transformer": lambda: Transformer((1, 8, 8), width=12, heads=3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_stack_equals_one_by_one(name):
    encoders = [MAKERS[name]().double() for _ in range(3)]
    alone = copy.deepcopy(encoders)
    x = torch.randn(3, 5, 1, 8, 8, dtype=torch.float64)
    parameters, buffers = stack_module_state(encoders)
    base = copy.deepcopy(encoders[0])

    def energy(parameters, buffers, x):
        return functional_call(base, (parameters, buffers), (x,)).pow(3).mean()

    z = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)))(
        parameters, {k: v.clone() for k, v in buffers.items()}, x
    )
    slopes = vmap(grad(energy))(parameters, buffers, x)
    for i, encoder in enumerate(alone):
        one = encoder(x[i])
        torch.testing.assert_close(z[i], one, rtol=1e-10, atol=1e-12)
        one.pow(3).mean().backward()
        for key, parameter in encoder.named_parameters():
            torch.testing.assert_close(slopes[key][i], parameter.grad, rtol=1e-9, atol=1e-12)
        for (
            key,
            buffer,
        ) in encoder.named_buffers():  # running means move in the stack as they do alone
            torch.testing.assert_close(buffers[key][i], buffer)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 8)])
@pytest.mark.parametrize("name", SMALL)
def test_features_have_the_width_and_are_the_mean_of_the_grid(name, shape):
    encoder = build_encoder(name, shape, {"width": 24})
    x = torch.randn(2, *shape)
    assert encoder.width == 24 and encoder(x).shape == (2, 24)
    if hasattr(encoder, "grid"):
        torch.testing.assert_close(encoder.grid(x).mean((-2, -1)), encoder(x))
        assert encoder.grid(x).shape == (2, 24, shape[1] // 2, shape[2] // 2)


def test_mlp_takes_vectors_and_no_hidden_layer():
    assert build_encoder("mlp", [5], {"hidden": [], "width": 3})(torch.zeros(2, 5)).shape == (2, 3)


def test_the_transformer_attends_as_the_fused_kernel_does():
    block = Transformer((1, 8, 8), width=12, heads=3).double().blocks[0]
    tokens = torch.randn(2, 16, 12, dtype=torch.float64)
    q, k, v = (
        part.reshape(2, 16, 3, 4).transpose(1, 2)
        for part in block.queries_keys_values(tokens).chunk(3, -1)
    )
    fused = (
        torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 12)
    )
    torch.testing.assert_close(block.attention(tokens), block.after_attention(fused))


def test_the_transformer_knows_where_a_patch_is():
    encoder = Transformer((1, 8, 8))
    x = torch.rand(1, 1, 8, 8)
    assert not torch.allclose(encoder(x), encoder(x.roll(4, -1)), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "options", "said"),
    [
        (
            "cn",
            (1, 8, 8),
            {},
            r'Did you mean "cnn"\? There are: autoencoder, .*cnn, .*mlp, .*transformer',
        ),
        (
            "cnn",
            (1, 8, 8),
            {"wide": 3},
            r'no field "wide". Did you mean "width"\? It has: channels, width, norm',
        ),
        ("mlp", (4,), {"shape": (5,)}, 'no field "shape"'),
        ("cnn", (64,), {}, r"\(channels, height, width\), got \(64,\)"),
        ("cnn", (1, 8, 8), {"norm": "layer"}, "got 'layer'"),
        ("cnn", (1, 8, 8), {"channels": (2, 2, 2, 2, 2)}, "5 stages do not fit an image of 8x8"),
        ("cnn", (1, 8, 8), {"channels": ()}, "one stage or more"),
        ("transformer", (1, 8, 8), {"patch": 3}, "3 must divide height and width, got 8x8"),
        ("transformer", (1, 8, 8), {"heads": 5}, "5 heads do not divide width 32"),
        ("mlp", (4,), {"width": 0}, "mlp needs width .* got 0"),
        ("mlp", (4,), {"width": "8"}, "got '8'"),
        ("mlp", (4,), {"hidden": [3, -1]}, r"mlp needs hidden .* got \[3, -1\]"),
    ],
)
def test_wrong_encoders_are_refused(name, shape, options, said):
    with pytest.raises(ValueError, match=said):
        build_encoder(name, shape, options)


@pytest.mark.parametrize("name", SMALL)
def test_a_few_epochs_on_digits_teach_something(name):
    table = load_dataset("digits")
    task, y = table.tasks["digit"], table.targets["digit"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = build_encoder(name, (1, 8, 8), {})
        model = torch.nn.Sequential(encoder, task.head(encoder.width))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for rows in [*table.train.split(32)] * 3:
        optimizer.zero_grad()
        task.loss(model(table.x[rows]), y[rows]).backward()
        optimizer.step()
    meter = task.meter()
    with torch.no_grad():
        meter.add(model(table.x[table.test]), y[table.test])
    assert meter.result()["accuracy"] > 30  # chance is 10


@pytest.mark.parametrize("name", ["vgg11", "resnet18"])
def test_classics_are_as_wide_as_eight_times_their_base_and_average_their_grid(name):
    encoder, x = build_encoder(name, (3, 32, 32), {"base": 2}).eval(), torch.randn(2, 3, 32, 32)
    assert encoder(x).shape == (2, encoder.width) == (2, 16)
    torch.testing.assert_close(encoder.grid(x).mean((-2, -1)), encoder(x))
    assert (
        sum(p.numel() for p in build_encoder(name, (3, 32, 32), {}).parameters())
        == {"vgg11": 9_223_232, "resnet18": 11_168_832}[name]
    )
    with pytest.raises(ValueError, match="halves images"):
        build_encoder(name, (3, 4, 4), {})


def test_resnet18_brings_images_to_a_size():
    encoder, x = (
        build_encoder("resnet18", (3, 48, 40), {"base": 2, "size": 16}).eval(),
        torch.randn(2, 3, 48, 40),
    )
    assert encoder.grid(x).shape == (2, 16, 2, 2) and encoder.grid(x[:, :, :16, :16]).shape == (
        2,
        16,
        2,
        2,
    )
    with pytest.raises(ValueError, match="halves images"):
        build_encoder("resnet18", (3, 48, 40), {"size": 4})


def test_fasttext_averages_the_words_that_are_there():
    encoder = build_encoder("fasttext", (4,), {"words": 9, "embedding": 3, "width": 5})
    two = encoder.linear(encoder.vectors.weight[[1, 2]].mean(0)).relu()
    torch.testing.assert_close(encoder(torch.tensor([[1, 0, 2, 0], [0, 0, 0, 0]]))[0], two)
    with pytest.raises(ValueError, match="rows of word numbers"):
        build_encoder("fasttext", (1, 8, 8), {})
