"""Small random models in the format of Hugging Face, for tests: nothing is fetched."""

import pytest
import torch


def small(kind):
    """A model of that kind, of 16 channels or fewer and one or two layers."""
    t = pytest.importorskip("transformers")
    plain = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    pyramid = {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
    if kind == "vit":
        return t.ViTModel(t.ViTConfig(**plain, image_size=32, patch_size=8))
    if kind == "dinov2":
        return t.Dinov2Model(t.Dinov2Config(**plain, image_size=28, patch_size=7))
    if kind == "registers":
        config = t.Dinov2WithRegistersConfig(**plain, image_size=28, patch_size=7)
        return t.Dinov2WithRegistersModel(config)
    if kind == "swin":
        config = t.SwinConfig(
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[1, 2],
            window_size=4,
        )
        return t.SwinModel(config)
    if kind == "convnext":
        return t.ConvNextModel(t.ConvNextConfig(**pyramid, image_size=128))
    if kind == "resnet":
        return t.ResNetModel(t.ResNetConfig(embedding_size=8, **pyramid, layer_type="basic"))
    if kind == "segformer":
        config = t.SegformerConfig(
            num_encoder_blocks=2,
            hidden_sizes=[8, 8],
            depths=[1, 2],
            num_attention_heads=[1, 1],
            sr_ratios=[2, 1],
            patch_sizes=[3, 3],
            strides=[4, 2],
            mlp_ratios=[1, 1],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return t.SegformerModel(config)
    if kind == "bert":
        config = t.BertConfig(**plain, vocab_size=20, max_position_embeddings=12)
        return t.BertModel(config)
    if kind == "distilbert":
        config = t.DistilBertConfig(
            dim=8, n_layers=1, n_heads=2, hidden_dim=16, vocab_size=20, max_position_embeddings=12
        )
        return t.DistilBertModel(config)
    raise ValueError(f"no small model of kind {kind!r}")


def save_reader(folder, kind, words):
    """A model of texts whose tokenizer knows these words, in this order, after its own."""
    t = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    small(kind).save_pretrained(folder)
    return str(folder)
