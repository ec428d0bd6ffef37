"""Text encoders in the format of Hugging Face (BERT, DistilBERT, GPT-2), whole or with LoRA.

Texts arrive as code points and each encoder has its own tokenizer, so clients that share public
texts need not share a tokenizer.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.data.text_codes import codes_to_texts
from unalike.models.frozen import Frozen
from unalike.models.gru import LETTERS
from unalike.models.hub import add_lora, check_folder, check_source, load_model

PADDING = -1  # token id beyond the end of a text; 0 is a token of some tokenizers


class Reader(Frozen):
    """A pretrained text encoder by its name on the Hugging Face hub, or its folder.

    int32 code points (n, letters), 0 for padding, to (n, width), the mean over tokens. Inputs of
    any other integer dtype are token ids, -1 after the end; give those where every token has a
    label (`SequenceLabelling`). Needs `pip install unalike[hub]`.

    Args:
        model: name or folder.
        lora: rank of LoRA adapters; the model itself is then frozen, without dropout, and texts
            are tokenized once. 0: the whole model learns.
        length: how many tokens of a text are used.
        targets: layers that get adapters, by the last parts of their names; default: attention.
        config: instead of `model`, a config with its `model_type`: random weights.
        tokenizer: name or folder of the tokenizer, where it is not the model's; with a config by
            default bytes of UTF-8 are tokens.
    """

    kind = "reader"
    auto_class = "AutoModel"

    def __init__(
        self,
        shape: Sequence[int],
        model: str = "",
        lora: int = 0,
        length: int = 64,
        targets: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        tokenizer: str = "",
    ):
        super().__init__()
        check_source(self.kind, model, config, lora)
        text_model = load_model(self.kind, self.auto_class, model, config, frozen=lora > 0)
        source = tokenizer or model
        own_tokenizer = load_fast_tokenizer(self.kind, source) if source else byte_tokenizer()
        text_model = text_part(self.kind, model or "the config", text_model)
        check_vocabulary(self.kind, text_model.config, own_tokenizer)
        self.set_model(self.kind, shape, text_model, own_tokenizer, lora, length, targets)

    def set_model(
        self,
        name: str,
        shape: Sequence[int],
        model: Any,
        tokenizer: Any,
        lora: int,
        length: int,
        targets: Sequence[str] = (),
    ) -> None:
        """Check the options and use that model; the tokenizer is of the package tokenizers."""
        if len(shape) != 1:
            raise UserError(
                f"{name} takes texts as rows of letters, (letters,), got {tuple(shape)}"
            )
        longest = longest_text(model, length)
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
        self.filler = model.config.pad_token_id or 0  # any token will do: the mask hides it
        self.width = int(model.config.hidden_size)
        if lora:
            add_lora(self.model, lora, targets)
            self.exclude_frozen()

    def trunk(self, x: Tensor) -> Tensor:
        """Token ids (n, length) int64 with the tokenizer's start and end tokens.

        Inputs that are token ids already stay as they are.
        """
        if x.dtype != LETTERS:
            return x
        if x.is_meta:  # shapes only: there is no text to read
            return torch.zeros(len(x), self.length, dtype=torch.int64, device=x.device)
        self.tokenizer.enable_truncation(self.length)
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(codes_to_texts(x))]
        self.tokenizer.no_truncation()
        padded = [row + [PADDING] * (self.length - len(row)) for row in rows]
        return torch.tensor(padded, device=x.device).reshape(-1, self.length)

    def forward(self, x: Tensor) -> Tensor:
        return mean_over_tokens(*self.tokens(x))

    def grid(self, x: Tensor) -> Tensor:
        """Features of every token (B, width, length), for labels of tokens."""
        return self.tokens(x)[0].mT

    def tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features of every token (n, length, width), and which tokens are no padding."""
        ids = self.trunk(x)
        mask = ids != PADDING
        ids = ids.masked_fill(~mask, self.filler)
        # without values (a count of operations) there is no mask to look at
        attention_mask = None if ids.is_meta else mask.long()
        out = self.model(input_ids=ids, attention_mask=attention_mask)
        return out.last_hidden_state, mask

    def save_preprocessing(self, folder: str | os.PathLike) -> None:
        """Write the tokenizer's files, as transformers reads them."""
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_object=self.tokenizer).save_pretrained(folder)

    def train(self, mode: bool = True) -> "Reader":
        super().train(mode)
        if self.frozen_names:
            self.model.eval()  # no dropout
        return self


def mean_over_tokens(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean (n, width) of the tokens (n, L, width) where the mask (n, L) is true."""
    weights = mask[..., None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1)


def text_part(encoder: str, name: str, model: Any) -> Any:
    """The text encoder of a model, without its pooler."""
    model = getattr(model, "text_model", model)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UserError(
            f"{encoder} takes models of texts with a fast tokenizer, {name!r} is "
            f"{type(model).__name__}; hub takes images"
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def load_fast_tokenizer(encoder: str, name: str) -> Any:
    """The tokenizer of that name or folder, of the package tokenizers.

    It needs no padding token: padding is masked.
    """
    from transformers import AutoTokenizer

    check_folder(encoder, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as problem:
        reason = str(problem).splitlines()[0]
        raise UserError(f"{encoder} cannot load the tokenizer of {name!r}: {reason}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UserError(
            f"{encoder} takes models of texts with a fast tokenizer, that of {name!r} is "
            f"{type(tokenizer).__name__}"
        )
    # without its files transformers makes a tokenizer that knows no word and says nothing
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"{encoder} finds no tokenizer in {name!r}: save the model's there "
            "(tokenizer.save_pretrained), or name its folder (tokenizer: ...)"
        )
    return tokenizer.backend_tokenizer


def byte_tokenizer() -> Any:
    """A tokenizer whose 256 tokens are bytes of UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def check_vocabulary(encoder: str, config: Any, tokenizer: Any) -> None:
    """Raise UserError if the tokenizer has more tokens than the model has embeddings."""
    size = getattr(config, "vocab_size", None)
    tokens = tokenizer.get_vocab_size()
    if size is not None and tokens > size:
        raise UserError(
            f"{encoder}: the tokenizer has {tokens} tokens, the model {size} (vocab_size); give "
            "a config with as many, or the model's own tokenizer"
        )


def longest_text(model: Any, default: int) -> int:
    """How many tokens a model reads.

    Models like RoBERTa count positions from the one after the padding token's.
    """
    longest = int(getattr(model.config, "max_position_embeddings", None) or default)
    embeddings = getattr(model, "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    offset = getattr(positions, "padding_idx", None)
    return longest if offset is None else longest - offset - 1
