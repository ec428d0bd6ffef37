"""CLIP and SigLIP, small random ones saved to disk: the same vectors as their own classes give, and prompts in embedding space."""

import pytest
import torch

from unalike.models import build_encoder

t = pytest.importorskip("transformers")
WORDS = ("[pad]", "[end]", "[begin]", "a", "photo", "of", "dog", "two", "cats", "the", "[unknown]")
TEXTS = ["a photo of a dog", "two cats"]


def tokenizer(kind):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unknown]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"bos_token": "[begin]"} if kind == "clip" else {}
    return t.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="[end]", pad_token="[pad]", unk_token="[unknown]", **ends
    )


@pytest.fixture(params=["clip", "siglip"])
def saved(request, tmp_path):
    kind = request.param
    plain = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    text = {
        **plain,
        "vocab_size": len(WORDS),
        "max_position_embeddings": 10,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {**plain, "image_size": 32, "patch_size": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "clip":
            model = t.CLIPModel(
                t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
            )
        else:
            model = t.SiglipModel(
                t.SiglipConfig(text_config={**text, "projection_size": 16}, vision_config=vision)
            )
    model.eval().save_pretrained(tmp_path)
    tokenizer(kind).save_pretrained(tmp_path)
    how = {
        "size": {"height": 32, "width": 32},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
    }
    t.SiglipImageProcessorPil(**how).save_pretrained(tmp_path)
    return kind, model, str(tmp_path)


def pooled(features):
    return features if isinstance(features, torch.Tensor) else features.pooler_output


def test_it_sees_and_reads_as_its_own_class_does(saved):
    kind, model, folder = saved
    ours = build_encoder(kind, (3, 32, 32), {"model": folder}).train()
    x = torch.rand(2, 3, 32, 32)
    prepared = (x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[
        :, None, None
    ]
    begin, end = ([2], [1]) if kind == "clip" else ([], [1])
    rows = [begin + [WORDS.index(word) for word in text.split()] + end for text in TEXTS]
    ids = torch.tensor([row + [0] * (10 - len(row)) for row in rows])
    with torch.no_grad():
        torch.testing.assert_close(
            ours(x), pooled(model.get_image_features(pixel_values=prepared)), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            ours.texts(TEXTS), pooled(model.get_text_features(input_ids=ids)), rtol=1e-4, atol=1e-5
        )
        places, _ = ours.patches(x)
    assert places.shape == (2, 16, ours.width) and ours.places == (4, 4)
    assert ours.scale == pytest.approx(model.logit_scale.exp().item())
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())


def test_places_are_where_they_are_seen(saved):
    """Each place is projected as the whole is: a picture of one patch only has them all alike where positions are taken away."""
    kind, _, folder = saved
    ours = build_encoder(kind, (3, 32, 32), {"model": folder})
    ours.model.vision_model.embeddings.position_embedding.weight.data.zero_()
    x = torch.rand(1, 3, 8, 8).repeat(1, 1, 4, 4)
    x[..., 8:16, 24:] = torch.rand(3, 8, 8)
    places = ours.patches(x)[0][0]
    apart = (places - places[0]).abs().amax(1)
    assert apart.argmax() == 1 * 4 + 3 and apart[[1, 2, 4, 15]].max() < 1e-4
    if kind == "siglip":
        x = torch.rand(1, 3, 8, 8).repeat(1, 1, 4, 4)
        torch.testing.assert_close(ours.patches(x)[0][:, 0], ours(x), rtol=1e-4, atol=1e-5)


def test_prompts_learn_and_the_own_pass_is_left_as_it_was(saved):
    kind, _, folder = saved
    ours = build_encoder(kind, (3, 32, 32), {"model": folder})
    before = ours.texts(TEXTS)
    learnt = torch.zeros(2, 3, ours.word, requires_grad=True)
    ids, mask = ours.tokens(["dog", "two cats"])
    features = ours.read(
        *ours.prompt((learnt, torch.ones(2, 3, dtype=torch.bool)), (ours.embed(ids), mask))
    )
    features.pow(3).sum().backward()
    assert learnt.grad.abs().sum() > 0
    assert torch.equal(ours.texts(TEXTS), before)


def test_what_cannot_be_loaded_is_told(saved, tmp_path):
    kind, _, folder = saved
    other = {"clip": "siglip", "siglip": "clip"}[kind]
    with pytest.raises(ValueError, match=rf"{other} takes models of that kind, .* is {kind}"):
        build_encoder(other, (3, 32, 32), {"model": folder})
    with pytest.raises(ValueError, match="needs the model's name or folder"):
        build_encoder(kind, (3, 32, 32), {})
    for file in tmp_path.glob("*token*"):
        file.unlink()
    with pytest.raises(
        ValueError, match=r"the tokenizer of .* (cannot be loaded|put its files beside)"
    ):
        build_encoder(kind, (3, 32, 32), {"model": folder})
