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
        config = t.ConvNextConfig(**pyramid, image_size=128, layer_scale_init_value=0.5)
        return t.ConvNextModel(config)
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
    if kind == "mobilenet":
        config = t.MobileNetV2Config(
            image_size=32, depth_multiplier=0.1, depth_divisible_by=4, min_depth=4
        )
        return t.MobileNetV2Model(config)
    return small_reader(kind, plain) if kind in READERS else small_pair(kind, plain)


READERS = ("bert", "distilbert", "roberta", "gpt2", "llama")


def small_reader(kind, plain):
    """A model of texts."""
    t = pytest.importorskip("transformers")
    if kind == "bert":
        config = t.BertConfig(**plain, vocab_size=20, max_position_embeddings=12)
        return t.BertModel(config)
    if kind == "distilbert":
        config = t.DistilBertConfig(
            dim=8, n_layers=1, n_heads=2, hidden_dim=16, vocab_size=20, max_position_embeddings=12
        )
        return t.DistilBertModel(config)
    if kind == "roberta":
        config = t.RobertaConfig(**plain, vocab_size=20, max_position_embeddings=14)
        return t.RobertaModel(config)
    if kind == "gpt2":
        config = t.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=12)
        return t.GPT2Model(config)
    if kind == "llama":
        config = t.LlamaConfig(
            **plain, num_key_value_heads=1, vocab_size=20, max_position_embeddings=12
        )
        return t.LlamaModel(config)
    raise ValueError(f"no small model of kind {kind!r}")


def small_pair(kind, plain):
    """A model of images and texts."""
    t = pytest.importorskip("transformers")
    if kind in ("clip", "siglip"):
        text = {**plain, "vocab_size": 20, "max_position_embeddings": 12, "projection_dim": 16}
        vision = {**plain, "image_size": 32, "patch_size": 8, "projection_dim": 16}
        config_class = t.CLIPConfig if kind == "clip" else t.SiglipConfig
        model_class = t.CLIPModel if kind == "clip" else t.SiglipModel
        return model_class(config_class(text_config=text, vision_config=vision))
    raise ValueError(f"no small model of kind {kind!r}")


def save_reader(folder, kind, words, padding="[PAD]"):
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
        pad_token=padding,
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    small(kind).save_pretrained(folder)
    return str(folder)
