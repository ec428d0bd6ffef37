"""CLIP (Radford 2021) and SigLIP (Zhai 2023) in the format of Hugging Face, as models that see and read. Knows no prompts and no tasks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.models.hub import input_size, load_pretrained, preprocess
from unalike.models.vlm import VisionLanguageModel


class Clip(VisionLanguageModel):
    """CLIP by its name on the Hugging Face hub, or its folder. Needs `pip install unalike[hub]`.

    Its places are the last tokens, normed and projected as the class token is.
    """

    kind = "clip"

    def __init__(self, shape: Sequence[int], model: str = ""):
        super().__init__()
        self.image_mean: Tensor
        self.image_std: Tensor
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(
                f"{self.kind} takes images of shape (1 or 3 channels, height, width), got {tuple(shape)}"
            )
        if not model:
            raise UserError(f"{self.kind} needs the model's name or folder: model: ...")
        self.model, told = load_pretrained(model)
        if (kind := self.model.config.model_type) != self.kind:
            raise UserError(f"{self.kind} takes models of that kind, {model!r} is {kind}")
        self.tokenizer = tokenizer(model, self.model.config.text_config.vocab_size)
        self.size = input_size(self.model.config.vision_config, told, shape)
        for name in ("image_mean", "image_std"):
            self.register_buffer(
                name, torch.tensor(told[name]).reshape(1, -1, 1, 1), persistent=False
            )
        text = self.model.config.text_config
        self.word, self.context, self.scale = (
            text.hidden_size,
            text.max_position_embeddings,
            math.exp(self.model.logit_scale.item()),
        )
        self.begin, self.end = self.ends()
        self.requires_grad_(False).eval()
        with torch.no_grad():
            places, whole = self.see(torch.zeros(1, *shape))
        self.width, self.places = whole.shape[1], (places.shape[2], places.shape[3])

    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.tokenizer.bos_token_id,), (self.tokenizer.eos_token_id,)

    def see(self, images: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.model.vision_model(
            pixel_values=preprocess(images, self.size, self.image_mean, self.image_std)
        )
        places, whole = self.projected(seen.last_hidden_state, seen.pooler_output)
        program = math.isqrt(places.shape[1])
        return places.mT.unflatten(-1, (program, program)), whole

    def projected(self, tokens: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Places (n, rows x columns, width) and whole (n, width) from the last tokens and the pooled one."""
        project = self.model.visual_projection
        return project(self.model.vision_model.post_layernorm(tokens[:, 1:])), project(pooled)

    def split(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.text_model.embeddings.token_embedding(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        last = mask.sum(1, keepdim=True) - 1  # of a text all that CLIP looks for is where it ends
        ids = torch.zeros_like(mask, dtype=torch.long).scatter(
            1, last, self.model.config.text_config.eos_token_id
        )
        return self.model.text_projection(
            self.passed(embeddings, input_ids=ids, attention_mask=mask.long())
        )

    def passed(self, embeddings: Tensor, **inputs: Tensor) -> Tensor:
        """The text model's own pass, with these vectors in place of those of its tokens."""
        text = self.model.text_model
        hook = text.embeddings.token_embedding.register_forward_hook(lambda *_: embeddings)
        try:
            return text(**inputs).pooler_output
        finally:
            hook.remove()


class Siglip(Clip):
    """SigLIP by its name on the Hugging Face hub, or its folder. Needs `pip install unalike[hub]`.

    A place is what the whole would be if attention saw that token alone. Texts are filled up to the context, as it was trained.
    """

    kind = "siglip"

    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), (self.tokenizer.eos_token_id,)

    def projected(self, tokens: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.vision_model.head(tokens.flatten(0, 1)[:, None]).unflatten(
            0, tokens.shape[:2]
        ), pooled

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        rows = len(embeddings)
        filling = self.embed(
            torch.full((rows, self.context), self.tokenizer.pad_token_id, device=embeddings.device)
        )
        short = embeddings.shape[1]
        whole = torch.cat(
            [torch.where(mask[..., None], embeddings, filling[:, :short]), filling[:, short:]], 1
        )
        return self.passed(
            whole,
            input_ids=torch.zeros(rows, self.context, dtype=torch.long, device=embeddings.device),
        )


def tokenizer(name: str, words: int) -> Any:
    """The tokenizer that lies with a model of so many tokens."""
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as problem:
        raise UserError(
            f"the tokenizer of {name!r} cannot be loaded: {str(problem).splitlines()[0]}"
        ) from None
    if len(made) < words // 2:  # transformers makes an empty one where its files are missing
        raise UserError(
            f"the tokenizer of {name!r} knows {len(made)} tokens, the model {words}: put its files beside the model"
        )
    return made
