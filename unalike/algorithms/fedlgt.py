"""FedLGT: label queries from a frozen text encoder, and masks of the labels that are hard.

Liu et al., "Language-Guided Transformer for Federated Multi-Label Classification", AAAI 2024,
https://arxiv.org/abs/2312.07165.

A label's query is the frozen model's text feature of its name (universal label embedding) plus a
learnt state: unknown, absent or present. A transformer layer lets queries look at the patches and
at each other; what is averaged is this layer. In training, labels that the model which was sent is
unsure of, |p - 0.5| < `unsure` (client-aware masked label embedding, sec. 3.3), and a random share,
as in C-Tran, are unknown and learnt; the states of the others tell the truth. To test all are
unknown. Left out: the image backbone learns, too, in the paper; here it is the vision-language
model's, frozen.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import (
    PromptTuning,
    PromptTuningProgram,
    check_attention_heads,
)
from unalike.models.prompts import INITIAL_WORDS
from unalike.models.vlm import VisionLanguageModel

UNKNOWN, ABSENT, PRESENT = 0, 1, 2


@dataclass
class FedLGT(PromptTuning):
    """Averages a transformer layer over label queries and patches.

    Args:
        heads: of the attention.
        unsure: epsilon: a label is masked where the sent model's probability is within it of 0.5.
    """

    heads: PositiveInt = 4
    unsure: Annotated[float, Field(ge=0, le=0.5)] = 0.02

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        check_attention_heads(self, model, self.heads)
        return LabelQueries(model, labels, self.heads)

    class Program(PromptTuningProgram):
        algorithm: "FedLGT"

        def train_round(self) -> float:
            self.sent: Any = copy.deepcopy(self.model.head).requires_grad_(False)
            return super().train_round()

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """The task's loss of the labels whose states are unknown."""
            head: Any = self.model.head
            x = x if isinstance(x, dict) else self.model.look(x)
            with torch.no_grad():
                sure = (self.sent(self.model.encoder, **x).sigmoid() - 0.5).abs()
            share = torch.rand(len(y), 1)
            drawn = torch.rand(y.shape) < share
            hidden = (sure < self.algorithm.unsure) | drawn.to(y.device) | ~(y >= 0)
            states = torch.where(hidden, UNKNOWN, torch.where(y > 0, PRESENT, ABSENT))
            output = head(self.model.encoder, **x, states=states)
            return self.error(output, torch.where(hidden, y, -1.0))


class LabelQueries(nn.Module):
    """A logit per label from a transformer layer over label queries and patches."""

    names: Tensor  # text features of the labels, (labels, width)

    def __init__(self, model: VisionLanguageModel, labels: Sequence[str], heads: int):
        super().__init__()
        width = model.width
        names = normalize(model.texts([f"{INITIAL_WORDS} {label}" for label in labels]), dim=-1)
        self.register_buffer("names", width**0.5 * names, persistent=False)
        self.states = nn.Embedding(3, width)
        self.layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.verdict = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))

    def forward(
        self,
        model: VisionLanguageModel,
        patches: Tensor,
        whole: Tensor,
        states: Tensor | None = None,
    ) -> Tensor:
        """Logits (n, labels); `states` (n, labels) are 0 unknown, 1 absent, 2 present."""
        if states is None:
            states = torch.zeros(len(patches), len(self.names), dtype=torch.int64).to(
                patches.device
            )
        queries = self.names + self.states(states)
        places = self.names.shape[-1] ** 0.5 * normalize(patches, dim=-1)
        seen = self.layer(torch.cat([queries, places], 1))[:, : len(self.names)]
        return (self.verdict(seen) * self.names).sum(-1) / self.names.shape[-1] ** 0.5
