"""FedMPT (2026): several labels told by prompts under conditions, matched with image patches by transport, weighed by a gate, averaged.

Each condition ("background", "pose") has learnt tokens before it and a low-rank adapter of the patches; what goes with what under a
condition is general, what goes together in one client's images is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.base.errors import UserError
from unalike.core.federation import Federation, Replies
from unalike.core.operations import query
from unalike.core.signatures import Shape
from unalike.losses.transport import transport
from unalike.methods.averaging import Parameters
from unalike.methods.prompt_tuning import PromptTuning, PromptTuningProgram
from unalike.models.conditions import SHIPPED, read_conditions
from unalike.models.prompts import Prompts, ScoresToLogits, initial_tokens, zero_linear
from unalike.models.vlm import VisionLanguageModel

SHOWN = 256  # test images that pictures are made of


class Explained(TypedDict):
    """What pictures are made of."""

    fired: Annotated[Tensor, Shape("labels", "named")]
    places: Annotated[Tensor, Shape(None, None)]


@dataclass
class FedMPT(PromptTuning):
    """Its ablation: prompts, adapters, transport and gate can each be switched off (Table 4)."""

    mean: Literal["uniform", "samples"] = "uniform"  # eq. 13
    conditions: tuple[str, ...] | str = (
        SHIPPED  # their names, or a file that `unalike conditions` wrote
    )
    condition_tokens: int = 4  # learnt, before the condition; each has its own
    class_tokens: int = 4  # learnt, before the class; shared
    rank: int = 32  # D_s, of adapters and gate
    dropout: Annotated[float, Field(ge=0, lt=1)] = (
        0.3  # share of an adapter's inner numbers left out in training
    )
    whole: bool = True  # the image as a whole counts as one more patch
    temperature: float = 4.0  # tau, on similarities of scale x cosine
    scale: float = 20.0
    entropy: float = 0.02  # lambda
    steps: int = 10  # of Sinkhorn
    prompts: bool = True  # no: one prompt without conditions
    adapters: bool = True
    transport: bool = True  # no: patches are weighed by how much they stand out for a label
    gate: bool = True  # no: all conditions count the same

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        positive = {
            name: getattr(self, name)
            for name in ("class_tokens", "rank", "temperature", "scale", "entropy", "steps")
        }
        problems = [
            (name, f"must be above 0, got {value:g}.")
            for name, value in positive.items()
            if not value > 0
        ]
        if self.condition_tokens < 0:
            problems.append(
                ("condition_tokens", f"must be at least 0, got {self.condition_tokens}.")
            )
        try:
            names = self.named
        except UserError as error:
            return [*problems, ("conditions", f"{error}.")]
        if not names:
            problems.append(
                ("conditions", "must name one condition or more; prompts=false does without.")
            )
        twice = sorted({one for one in names if names.count(one) > 1})
        return problems + [
            ("conditions", f"must differ, got more than once: {', '.join(twice)}.")
        ] * bool(twice)

    @property
    def named(self) -> tuple[str, ...]:
        """The conditions by name."""
        return (
            read_conditions(self.conditions)
            if isinstance(self.conditions, str)
            else tuple(self.conditions)
        )

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> "Conditioned":
        return Conditioned(self, model, labels)

    def evaluate(self, fed: Federation) -> Replies:
        """And two pictures from one client's test images: which conditions fire for which label, and where the surest label was seen."""
        replies = super().evaluate(fed)
        for client in [c for c in fed.clients if c in fed.state["group"]][:1]:
            for told in fed.call(
                "explain",
                clients=[client],
                quorum=0,
                per_client=self.messages(fed, [client]),
                sizes={"named": len(self.named)},
            ).values():
                labels = fed.infos[client].labels
                fed.log_figure(
                    "conditions by label",
                    matrix=told["fired"],
                    rows=list(labels),
                    columns=list(self.named),
                )
                fed.log_figure("places of the surest label", matrix=told["places"])
        return replies

    class Program(PromptTuningProgram):
        @query
        def explain(self, parameters: Parameters) -> Explained:
            """Of the first test images: the mean weight of each condition by label (labels, conditions), and the plan of the label that is
            surest, as a map (rows, columns)."""
            data = self.held("common" if self.client.common is not None else "test")
            if data is None or not len(data):
                raise ValueError("there are no test images to explain")
            own = {name: tensor.clone() for name, tensor in self.shared().items()}
            self.model.load_state_dict(parameters, strict=False)
            x, y = data.labelled_batch(torch.arange(min(len(data), SHOWN)))
            with torch.no_grad():
                x, model = self.client.to_device(x), self.model.eval()
                logits, told = model(x), model.explain(x)
            self.model.load_state_dict(own, strict=False)
            image, label = divmod(int(logits.argmax()), logits.shape[1])
            there = (self.client.to_device(y) == 1).to(logits.dtype)
            return {
                "fired": there.mT @ told["fired"] / there.sum(0)[:, None].clamp(min=1),
                "places": told["plan"][image, ..., label],
            }


class Conditioned(nn.Module):
    """Logits (n, labels) from patches (n, places, width): one guess a condition, weighed by the gate."""

    def __init__(self, how: FedMPT, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.how, self.labels, self.conditions = how, len(labels), how.named
        count = len(self.conditions)
        rows: list[list[str | int]]
        if how.prompts:
            rows = [
                [how.condition_tokens, condition, how.class_tokens, label]
                for condition in self.conditions
                for label in labels
            ]
            self.condition_tokens = (
                initial_tokens(model, count, how.condition_tokens) if how.condition_tokens else None
            )
        else:
            rows = [[how.class_tokens, label] for label in labels]
        self.texts = Prompts(model, rows)
        self.class_tokens = initial_tokens(model, how.class_tokens)
        if how.adapters:
            self.down, self.up = low_rank(count, model.width, how.rank)
        if how.gate:
            self.route = nn.Sequential(
                nn.Linear(model.width, how.rank, bias=False), zero_linear(how.rank, count)
            )
        self.dropout = nn.Dropout(how.dropout)
        self.verdict = ScoresToLogits()

    def read(self, model: VisionLanguageModel) -> Tensor:
        """Unit vectors of the labels under each condition (conditions or 1, labels, width)."""
        learnt: Tensor = self.class_tokens
        if self.how.prompts:
            learnt = learnt.expand(len(self.conditions), -1, -1)
            if self.condition_tokens is not None:
                learnt = torch.cat([self.condition_tokens, learnt], 1)
            learnt = learnt.repeat_interleave(self.labels, 0)
        return normalize(model.read(*self.texts(learnt)), dim=-1).unflatten(0, (-1, self.labels))

    def similarity(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        """scale x cosine of each patch, the whole as the last, and label under each condition (n, conditions or 1, places, labels)."""
        f = torch.cat([patches, whole[:, None]], 1) if self.how.whole else patches
        f = normalize(f, dim=-1)[:, None]  # (n, 1, places, width)
        if self.how.adapters:
            f = normalize(f + self.dropout(f @ self.down) @ self.up, dim=-1)
        return self.how.scale * f @ self.read(model).mT

    def plan(self, similarity: Tensor) -> Tensor:
        """What each patch has to do with each label, like `similarity`; sums to 1 over patches."""
        if self.how.transport:
            return self.labels * transport(
                similarity, self.how.temperature, self.how.entropy, self.how.steps
            )
        return (similarity / self.how.temperature).softmax(-2)

    def fired(self, patches: Tensor) -> Tensor:
        """How much each condition counts for each image (n, conditions)."""
        count = len(self.conditions)
        if not self.how.gate:
            return patches.new_full((len(patches), count), 1 / count)
        return self.route(normalize(patches, dim=-1).mean(1)).softmax(-1)

    def explain(
        self, model: VisionLanguageModel, patches: Tensor, whole: Tensor
    ) -> dict[str, Tensor]:
        """How much each condition counts (n, conditions), and what each place has to do with each label (n, rows, columns, labels); what
        is missing there to 1 is the whole's."""
        fired = self.fired(patches)
        plan = self.plan(self.similarity(model, patches, whole))[
            ..., : patches.shape[1], :
        ]  # (n, conditions or 1, places, labels)
        return {
            "fired": fired,
            "plan": (fired[..., None, None] * plan).sum(1).unflatten(1, model.places),
        }

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        similarity = self.similarity(model, patches, whole)
        psi = (self.plan(similarity) * similarity).sum(-2)  # (n, conditions or 1, labels)
        return self.verdict((self.fired(patches)[..., None] * psi).sum(1))


def low_rank(count: int, width: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Maps down to `rank` and up again, one a condition, that change nothing at first (LoRA's start)."""
    return nn.Parameter(torch.randn(count, width, rank) / width**0.5), nn.Parameter(
        torch.zeros(count, rank, width)
    )
