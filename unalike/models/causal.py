"""Language models in the format of Hugging Face (GPT-2, Llama), whole or with LoRA.

Token ids go in, logits of the next token come out, by the model's own output layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.frozen import Frozen
from unalike.models.hub import add_lora, check_source, load_model
from unalike.models.reader import longest_text


class Causal(Frozen):
    """A causal language model by its name on the Hugging Face hub, or its folder.

    Token ids (n, length), -1 after the end of a text, to logits (n, length, vocabulary). Needs
    `pip install unalike[hub]`.

    Args:
        model: name or folder.
        lora: rank of LoRA adapters; the model itself is then frozen, without dropout. 0: all of
            it learns.
        targets: layers that get adapters, by the last parts of their names; default: attention.
        config: instead of `model`, a config with its `model_type`: random weights.
    """

    tied_names: frozenset[str] = frozenset()

    def __init__(
        self,
        shape: Sequence[int],
        model: str = "",
        lora: int = 0,
        targets: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        check_source("causal", model, config, lora)
        if len(shape) != 1:
            raise UserError(f"causal takes texts as token ids (length,), got {tuple(shape)}")
        self.model = load_model("causal", "AutoModelForCausalLM", model, config, frozen=lora > 0)
        longest = longest_text(self.model, shape[0])
        if shape[0] > longest:
            raise UserError(f"causal: the model reads {longest} tokens, texts have {shape[0]}")
        self.vocabulary = int(self.model.config.vocab_size)
        self.width = int(self.model.config.hidden_size)
        self.send_tied_once()
        if lora:
            add_lora(self.model, lora, targets)
            self.exclude_frozen()

    def send_tied_once(self) -> None:
        """From now on leave out of `state_dict` the second name of a parameter that has two.

        Many models use their embeddings as output layer, too.
        """
        first_names = {name for name, _ in self.named_parameters()}
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        self.tied_names = frozenset(names - first_names)
        if self.tied_names:
            self.register_state_dict_post_hook(_remove_tied_keys)
            self.register_load_state_dict_post_hook(_ignore_tied_keys)

    def forward(self, ids: Tensor) -> Tensor:
        # no token looks at what follows it, so padding needs no mask
        return self.model(input_ids=ids.clamp(min=0).long(), use_cache=False).logits

    def train(self, mode: bool = True) -> "Causal":
        super().train(mode)
        if self.frozen_names:
            self.model.eval()  # no dropout
        return self


def _remove_tied_keys(module: nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
    """After `state_dict`: leave out second names."""
    for name in module.tied_names:  # type: ignore[union-attr]
        state.pop(prefix + name, None)


def _ignore_tied_keys(module: nn.Module, keys: Any) -> None:
    """After `load_state_dict`: second names are not missing."""
    suffixes = tuple(f".{name}" for name in module.tied_names)  # type: ignore[union-attr]
    keys.missing_keys[:] = [key for key in keys.missing_keys if not f".{key}".endswith(suffixes)]
