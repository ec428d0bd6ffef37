"""Text encoders in the format of Hugging Face (BERT, DistilBERT and their like), whole or with LoRA. Knows no tasks.

Texts come as letters, and each reader splits them by a tokenizer of its own: clients that read the same public texts need not agree on one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unalike.models.frozen import Frozen
from unalike.models.hub import adapt, check_folder
from unalike.models.pairs import LETTERS

NONE = -1  # where a text has no more tokens: 0 is a token of some tokenizers


class Reader(Frozen):
    """A pretrained model of texts by its name on the Hugging Face hub, or its folder: int32 code points (n, letters), 0 where there are no
    more, to (n, width), the mean over tokens. Its first `length` tokens are read.

    `lora` is the rank of adapters that learn in its place (0: all of it learns); then it drops nothing in training, and texts are split
    once. Needs `pip install unalike[hub]`.
    """

    def __init__(self, shape: Sequence[int], model: str = "", lora: int = 0, length: int = 64):
        super().__init__()
        if not model:
            raise ValueError("reader needs the name of a model of texts, or its folder")
        self.take("reader", shape, *fetched(model), lora, length)

    def take(
        self, name: str, shape: Sequence[int], model: Any, tokenizer: Any, lora: int, length: int
    ) -> None:
        """Be that model; the tokenizer is of the package tokenizers."""
        if len(shape) != 1:
            raise ValueError(
                f"{name} takes texts as rows of letters, (letters,), got {tuple(shape)}"
            )
        most = getattr(model.config, "max_position_embeddings", length)
        if lora < 0 or not 3 <= length <= most:
            raise ValueError(
                f"{name} has a rank of LoRA of 0 or more and reads 3 to {most} tokens, got lora {lora}, length {length}"
            )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.model, self.tokenizer, self.length, self.width = (
            model,
            tokenizer,
            length,
            int(model.config.hidden_size),
        )
        if lora:
            adapt(self.model, lora)
            self.hold()

    def trunk(self, x: Tensor) -> Tensor:
        """Letters as tokens of its own (n, length) int64, between its begin and end."""
        texts = ["".join(map(chr, filter(None, row))) for row in x.tolist()]
        self.tokenizer.enable_truncation(self.length)
        rows = [told.ids for told in self.tokenizer.encode_batch(texts)]
        self.tokenizer.no_truncation()
        return torch.tensor(
            [row + [NONE] * (self.length - len(row)) for row in rows], device=x.device
        ).reshape(-1, self.length)

    def forward(self, x: Tensor) -> Tensor:
        ids = self.trunk(x) if x.dtype == LETTERS else x
        there = ids != NONE
        return mean(
            self.model(input_ids=ids.clamp(min=0), attention_mask=there.long()).last_hidden_state,
            there,
        )

    def train(self, mode: bool = True) -> "Reader":
        super().train(mode)
        if self.held:
            self.model.eval()
        return self


def mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean (n, width) of the tokens (n, L, width) that are there."""
    there = mask[..., None].to(tokens.dtype)
    return (tokens * there).sum(1) / there.sum(1).clamp(min=1)


def fetched(name: str) -> tuple[nn.Module, Any]:
    """A model of texts without its pooler, and its tokenizer."""
    check_folder("reader", name)
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise ValueError(
            "models of the hub need transformers and peft: pip install 'unalike[hub]'"
        ) from None
    try:
        model, tokenizer = AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as problem:
        raise ValueError(f"reader cannot load {name!r}: {str(problem).splitlines()[0]}") from None
    model = getattr(model, "text_model", model)
    if (
        getattr(model, "main_input_name", "input_ids") != "input_ids"
        or getattr(tokenizer, "backend_tokenizer", None) is None
    ):
        raise ValueError(
            f"reader takes models of texts with a fast tokenizer, {name!r} is {type(model).__name__}; hub takes images"
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model, tokenizer.backend_tokenizer
