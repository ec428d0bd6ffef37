"""Text encoders in the format of Hugging Face (BERT, DistilBERT and the like), whole or with LoRA.

Texts arrive as code points and each encoder has its own tokenizer, so clients that share public
texts need not share a tokenizer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.data.text_codes import codes_to_texts
from unalike.models.frozen import Frozen
from unalike.models.gru import LETTERS
from unalike.models.hub import add_lora, check_folder

PADDING = -1  # token id beyond the end of a text; 0 is a token of some tokenizers


class Reader(Frozen):
    """A pretrained text encoder by its name on the Hugging Face hub, or its folder.

    int32 code points (n, letters), 0 for padding, to (n, width), the mean over tokens. Needs
    `pip install unalike[hub]`.

    Args:
        model: name or folder.
        lora: rank of LoRA adapters; the model itself is then frozen, without dropout, and texts
            are tokenized once. 0: the whole model learns.
        length: how many tokens of a text are used.
    """

    def __init__(self, shape: Sequence[int], model: str = "", lora: int = 0, length: int = 64):
        super().__init__()
        if not model:
            raise UserError("reader needs the name of a model of texts, or its folder")
        text_model, tokenizer = load_text_model(model)
        self.set_model("reader", shape, text_model, tokenizer, lora, length)

    def set_model(
        self, name: str, shape: Sequence[int], model: Any, tokenizer: Any, lora: int, length: int
    ) -> None:
        """Check the options and use that model; the tokenizer is of the package tokenizers."""
        if len(shape) != 1:
            raise UserError(
                f"{name} takes texts as rows of letters, (letters,), got {tuple(shape)}"
            )
        longest = getattr(model.config, "max_position_embeddings", length)
        if lora < 0 or not 3 <= length <= longest:
            raise UserError(
                f"{name} has a rank of LoRA of 0 or more and reads 3 to {longest} tokens, "
                f"got lora {lora}, length {length}"
            )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.model = model
        self.tokenizer = tokenizer
        self.length = length
        self.width = int(model.config.hidden_size)
        if lora:
            add_lora(self.model, lora)
            self.exclude_frozen()

    def trunk(self, x: Tensor) -> Tensor:
        """Token ids (n, length) int64 with the tokenizer's start and end tokens."""
        self.tokenizer.enable_truncation(self.length)
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(codes_to_texts(x))]
        self.tokenizer.no_truncation()
        padded = [row + [PADDING] * (self.length - len(row)) for row in rows]
        return torch.tensor(padded, device=x.device).reshape(-1, self.length)

    def forward(self, x: Tensor) -> Tensor:
        ids = self.trunk(x) if x.dtype == LETTERS else x
        mask = ids != PADDING
        out = self.model(input_ids=ids.clamp(min=0), attention_mask=mask.long())
        return mean_over_tokens(out.last_hidden_state, mask)

    def train(self, mode: bool = True) -> "Reader":
        super().train(mode)
        if self.frozen_names:
            self.model.eval()  # no dropout
        return self


def mean_over_tokens(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean (n, width) of the tokens (n, L, width) where the mask (n, L) is true."""
    weights = mask[..., None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1)


def load_text_model(name: str) -> tuple[nn.Module, Any]:
    """A text model without its pooler, and its tokenizer."""
    check_folder("reader", name)
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise UserError(
            "models of the hub need transformers and peft: pip install 'unalike[hub]'"
        ) from None
    try:
        model = AutoModel.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as problem:
        raise UserError(f"reader cannot load {name!r}: {str(problem).splitlines()[0]}") from None
    model = getattr(model, "text_model", model)
    takes_text = getattr(model, "main_input_name", "input_ids") == "input_ids"
    if not takes_text or getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UserError(
            f"reader takes models of texts with a fast tokenizer, {name!r} is "
            f"{type(model).__name__}; hub takes images"
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model, tokenizer.backend_tokenizer
