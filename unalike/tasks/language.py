"""Language: predict the next token of a text, scored by perplexity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.tasks.task import Inputs, Labels, Task, check_whole

PADDING = -1  # in token ids, after the end of a text
IGNORE = -100  # in targets, as in PyTorch and Hugging Face


@dataclass(frozen=True)
class Language(Task):
    """Next-token prediction: output (B, length, vocabulary) logits, y (B, length) token ids.

    Inputs are token ids (n, length) with -1 after the end of a text. Position t of y is the token
    at position t + 1 of the input, and -100 where there is none; a client whose data are inputs
    alone gets it from them. The output is the encoder's own, such as `causal`: there is no head.

    Args:
        vocabulary: number of tokens; ids run from 0 to one less.
        labels: a name for what is predicted; clients with unlike names are not averaged.
    """

    vocabulary: int
    labels: tuple[str, ...] = field(default=("next token",), kw_only=True)

    name: ClassVar[str] = "language"
    metric: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = ""
    headless: ClassVar[bool] = True

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, vocabulary: int, *, labels: Labels = ("next token",)) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.vocabulary, int) and not isinstance(self.vocabulary, bool)
        if not is_number or self.vocabulary < 2:
            raise ValueError(
                f"a language task has a vocabulary of 2 tokens or more, got {self.vocabulary!r}"
            )

    @property
    def has_confidence(self) -> bool:
        return True

    @property
    def unknown_label(self) -> int:
        return IGNORE

    def head(self, width: int) -> nn.Module:
        """Return the identity: logits come from the encoder."""
        return nn.Identity()

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy, mean over the tokens that are predicted; 0 if there are none.

        >>> round(Language(4).loss(torch.zeros(1, 3, 4), torch.tensor([[2, 0, -100]])).item(), 4)
        1.3863
        """
        total = F.cross_entropy(output.mT, y.long(), ignore_index=IGNORE, reduction="sum")
        return total / (y != IGNORE).sum().clamp(min=1)

    def derive_labels(self, x: Inputs) -> Tensor:
        if isinstance(x, dict):
            raise ValueError(f"language takes token ids (n, length), got modalities {sorted(x)}")
        check_whole(x, "language: token ids in place of", ("n", "length"))
        self._check_ids(x, PADDING, "after the end of a text")
        is_padding = x == PADDING
        if (is_padding[:, :-1] & ~is_padding[:, 1:]).any():
            raise ValueError("padding (-1) follows the tokens of a text, got some before a token")
        return next_tokens(x)

    def meter(self) -> "LanguageMeter":
        return LanguageMeter()

    def check(self, y: Tensor) -> None:
        check_whole(y, self.name, ("n", "length"))
        self._check_ids(y, IGNORE, "where nothing is predicted")

    def _check_ids(self, ids: Tensor, filler: int, meaning: str) -> None:
        outside = ids[((ids < 0) | (ids >= self.vocabulary)) & (ids != filler)]
        if len(outside):
            raise ValueError(
                f"token id {int(outside[0])} does not fit a vocabulary of {self.vocabulary}: ids "
                f"run from 0 to {self.vocabulary - 1}, and {filler} {meaning}"
            )

    def check_encoder(self, encoder: nn.Module, modalities: Sequence[str]) -> None:
        tokens = getattr(encoder, "vocabulary", None)
        if not isinstance(tokens, int):
            raise ValueError(
                "language needs an encoder from token ids (n, length) to logits (n, length, "
                "vocabulary), with attributes vocabulary and width, such as causal; "
                f"{type(encoder).__name__} has no vocabulary"
            )
        if tokens < self.vocabulary:
            raise ValueError(
                f"the task has a vocabulary of {self.vocabulary} tokens, {type(encoder).__name__} "
                f"one of {tokens}: give a model with as many, or texts in its own tokens"
            )

    def unmeasured(self, y: Tensor) -> str | None:
        return None if bool((y != IGNORE).any()) else "no text of them has two tokens"


def next_tokens(ids: Tensor) -> Tensor:
    """Return what comes after each token of (n, length) ids: -100 at the end and in padding.

    >>> next_tokens(torch.tensor([[5, 6, 7], [8, 9, -1]])).tolist()
    [[6, 7, -100], [9, -100, -100]]
    """
    following = F.pad(ids[:, 1:].long(), (0, 1), value=PADDING)
    return following.masked_fill(following == PADDING, IGNORE)


class LanguageMeter:
    """`perplexity`, e to the `log_loss` per token; `accuracy` of the likeliest token in percent."""

    def __init__(self) -> None:
        self.log_loss = 0.0  # sum over tokens
        self.hits = 0
        self.tokens = 0

    def add(self, output: Tensor, y: Tensor) -> None:
        known = y != IGNORE
        truth = y[known].long()
        logits = output.detach()[known]  # (tokens, vocabulary)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits, truth, reduction="none")
        self.log_loss += losses.sum(dtype=torch.float64).item()
        self.hits += int((logits.argmax(1) == truth).sum())
        self.tokens += len(truth)

    def result(self) -> dict[str, float]:
        if not self.tokens:
            raise ValueError("nothing to measure: the meter was given no text of two tokens")
        log_loss = self.log_loss / self.tokens
        return {
            "perplexity": math.exp(log_loss) if log_loss < 700 else math.inf,
            "log_loss": log_loss,
            "accuracy": 100 * self.hits / self.tokens,
        }
