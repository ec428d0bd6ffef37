"""CLIP and SigLIP in the format of Hugging Face, as vision-language models.

References: CLIP, Radford et al. 2021, https://arxiv.org/abs/2103.00020;
SigLIP, Zhai et al. 2023, https://arxiv.org/abs/2303.15343
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.models.checks import check_rgb_or_grey
from unalike.models.hub import input_size, load_pretrained, preprocess
from unalike.models.vlm import VisionLanguageModel


class Clip(VisionLanguageModel):
    """CLIP by its name on the Hugging Face hub, or its folder. Needs `pip install unalike[hub]`.

    Its places are the last layer's tokens, normed and projected like the class token.
    """

    kind = "clip"

    def __init__(self, shape: Sequence[int], model: str = ""):
        super().__init__()
        self.image_mean: Tensor
        self.image_std: Tensor
        check_rgb_or_grey(self.kind, shape)
        if not model:
            raise UserError(f"{self.kind} needs the model's name or folder: model: ...")
        self.model, preprocessing = load_pretrained(model)
        config = self.model.config
        if config.model_type != self.kind:
            raise UserError(
                f"{self.kind} takes models of that kind, {model!r} is {config.model_type}"
            )
        self.tokenizer = load_tokenizer(model, config.text_config.vocab_size)
        self.size = input_size(config.vision_config, preprocessing, shape)
        for name in ("image_mean", "image_std"):
            values = torch.tensor(preprocessing[name]).reshape(1, -1, 1, 1)
            self.register_buffer(name, values, persistent=False)
        self.word = config.text_config.hidden_size
        self.context = config.text_config.max_position_embeddings
        self.scale = math.exp(self.model.logit_scale.item())
        self.begin, self.end = self.begin_and_end()
        self.requires_grad_(False).eval()
        with torch.no_grad():
            places, whole = self.see(torch.zeros(1, *shape))
        self.width = whole.shape[1]
        self.places = (places.shape[2], places.shape[3])

    def begin_and_end(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids before and after every text."""
        return (self.tokenizer.bos_token_id,), (self.tokenizer.eos_token_id,)

    def see(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = preprocess(images, self.size, self.image_mean, self.image_std)
        out = self.model.vision_model(pixel_values=pixels)
        places, whole = self.project(out.last_hidden_state, out.pooler_output)
        side = math.isqrt(places.shape[1])
        return places.mT.unflatten(-1, (side, side)), whole

    def project(self, tokens: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Places (n, rows x columns, width) and whole (n, width).

        Args:
            tokens: the last layer's, (n, L, hidden).
            pooled: (n, hidden).
        """
        projection = self.model.visual_projection
        # the first token is the class token
        places = projection(self.model.vision_model.post_layernorm(tokens[:, 1:]))
        return places, projection(pooled)

    def split(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.text_model.embeddings.token_embedding(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        # CLIP uses token ids only to find the end of a text: all others may be 0
        last = mask.sum(1, keepdim=True) - 1
        end = self.model.config.text_config.eos_token_id
        ids = torch.zeros_like(mask, dtype=torch.long).scatter(1, last, end)
        pooled = self.run_text_model(embeddings, input_ids=ids, attention_mask=mask.long())
        return self.model.text_projection(pooled)

    def run_text_model(self, embeddings: Tensor, **inputs: Tensor) -> Tensor:
        """The text model's pooled output with these embeddings instead of its tokens' own."""
        text_model = self.model.text_model
        token_embedding = text_model.embeddings.token_embedding
        hook = token_embedding.register_forward_hook(lambda *_: embeddings)
        try:
            return text_model(**inputs).pooler_output
        finally:
            hook.remove()


class Siglip(Clip):
    """SigLIP by its name on the Hugging Face hub, or its folder. Needs `pip install unalike[hub]`.

    A place's vector is what the pooling attention makes of that token alone. Texts are padded to
    the context length, as in its training.
    """

    kind = "siglip"

    def begin_and_end(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), (self.tokenizer.eos_token_id,)

    def project(self, tokens: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        single_tokens = tokens.flatten(0, 1)[:, None]  # (n L, 1, hidden)
        places = self.model.vision_model.head(single_tokens).unflatten(0, tokens.shape[:2])
        return places, pooled

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        rows, length = embeddings.shape[:2]
        device = embeddings.device
        padding_ids = torch.full((rows, self.context), self.tokenizer.pad_token_id, device=device)
        padding = self.embed(padding_ids)
        start = torch.where(mask[..., None], embeddings, padding[:, :length])
        ids = torch.zeros(rows, self.context, dtype=torch.long, device=device)
        return self.run_text_model(torch.cat([start, padding[:, length:]], 1), input_ids=ids)


def load_tokenizer(name: str, vocabulary: int) -> Any:
    """The tokenizer stored with a model whose vocabulary has so many tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as problem:
        raise UserError(
            f"the tokenizer of {name!r} cannot be loaded: {str(problem).splitlines()[0]}"
        ) from None
    # transformers builds an empty one if its files are missing
    if len(tokenizer) < vocabulary // 2:
        raise UserError(
            f"the tokenizer of {name!r} knows {len(tokenizer)} tokens, the model {vocabulary}: "
            "put its files beside the model"
        )
    return tokenizer
