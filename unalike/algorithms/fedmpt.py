"""FedMPT: federated multi-label prompt tuning of vision-language models.

"FedMPT: Federated Multi-Label Prompt Tuning of Vision-Language Models", 2026.

Labels that occur together at one client need not do so at another, but what goes together under a
condition ("background", "pose") is general. So there is a prompt "[tokens] condition [tokens]
label" for every condition and label, and a low-rank adapter of the patches for every condition.
Optimal transport matches patches with labels under each condition, a gate weights the conditions,
and the server averages prompts, adapters and gate with equal weights (eq. 13).

docs/fedmpt.md says where we read the paper in one of several ways, and what is ours: dropout in
the adapters, the whole image as one more patch, and a learnt gain and bias of the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.base.errors import UserError
from unalike.base.types import Parameters
from unalike.core.federation import Federation, Replies
from unalike.core.operations import measurement, query
from unalike.core.signatures import Shape
from unalike.losses.transport import transport
from unalike.methods.prompt_tuning import PromptTuning, PromptTuningProgram
from unalike.models.conditions import SHIPPED, read_conditions
from unalike.models.prompts import (
    Prompts,
    ScoresToLogits,
    initial_tokens,
    standardize,
    zero_linear,
)
from unalike.models.vlm import VisionLanguageModel

EXPLAINED_IMAGES = 256  # test images behind the figures of `explain`


class Explanation(TypedDict):
    """Data of two figures: gate weights by label, and a transport plan as a map."""

    fired: Annotated[Tensor, Shape("labels", "condition_names")]
    places: Annotated[Tensor, Shape(None, None)]


@dataclass
class FedMPT(PromptTuning):
    """Averages prompts, adapters and a gate; each can be switched off (ablation of Table 4).

    Args:
        mean: eq. 13: weight of a client, the same for all ("uniform") or its number of "samples".
        conditions: names of conditions, or a file that `unalike conditions` wrote.
        condition_tokens: learnt tokens before the condition, one set for each.
        class_tokens: learnt tokens before the label, the same for all.
        rank: D_s, inner width of adapters and gate.
        dropout: inside the adapters.
        whole: the image feature counts as one more patch.
        temperature: tau, of the patches' importance.
        scale: of cosines.
        entropy: lambda, weight of the plan's entropy.
        steps: Sinkhorn iterations.
        prompts: False: one prompt without conditions.
        adapters: False: no adapters.
        transport: False: a softmax over patches instead of a transport plan.
        gate: False: all conditions have the same weight; "spread": a condition counts by how far
            its scores of an image's labels lie apart, as in the published program.
        standardize: an image's scores are brought to mean 0 and spread 1 over its labels when they
            are "mixed", or those of "each" condition before, as in the published program.
        plan_gradient: False: no gradient flows through the transport plan.
        certain: whether patches that are sure of their labels weigh more; in eq. 8 as printed
            those that are unsure do.
    """

    mean: Literal["samples", "uniform"] = "uniform"
    conditions: tuple[str, ...] | str = SHIPPED
    condition_tokens: NonNegativeInt = 4
    class_tokens: PositiveInt = 4
    rank: PositiveInt = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    whole: bool = True
    temperature: PositiveFloat = 4.0
    scale: PositiveFloat = 20.0
    entropy: PositiveFloat = 0.02
    steps: PositiveInt = 10
    prompts: bool = True
    adapters: bool = True
    transport: bool = True
    gate: bool | Literal["spread"] = True
    standardize: Literal["mixed", "each"] = "mixed"
    plan_gradient: bool = True
    certain: bool = False

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        try:
            names = self.condition_names
        except UserError as error:
            return [("conditions", f"{error}.")]
        if not names:
            return [("conditions", "must name one condition or more; prompts=false does without.")]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            return [("conditions", f"must differ, got more than once: {', '.join(repeated)}.")]
        return []

    @property
    def condition_names(self) -> tuple[str, ...]:
        """The conditions; raises a UserError if their file cannot be read."""
        return (
            read_conditions(self.conditions)
            if isinstance(self.conditions, str)
            else tuple(self.conditions)
        )

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> "ConditionalPrompts":
        return ConditionalPrompts(self, model, labels)

    def evaluate(self, fed: Federation) -> Replies:
        """Metrics of the shared model; logs two figures made by the first client."""
        replies = super().evaluate(fed)
        first = self.members(fed)[:1]
        names = list(self.condition_names)
        explanations = fed.call(
            "explain",
            clients=first,
            quorum=0,
            per_client=self.build_messages(fed, first),
            sizes={"condition_names": len(names)},
        )
        for client, explanation in explanations.items():
            labels = list(fed.infos[client].labels)
            fed.log_figure(
                "conditions by label", matrix=explanation["fired"], rows=labels, columns=names
            )
            fed.log_figure("places of the surest label", matrix=explanation["places"])
        return replies

    class Program(PromptTuningProgram):
        @query
        @measurement
        def explain(self, parameters: Parameters) -> Explanation:
            """Explain predictions for the first test images under these parameters.

            Returns: `fired`, the mean gate weight of each condition over images that have the label
            (labels, conditions); `places`, the transport plan of the most confident prediction as a
            map (rows, columns).
            """
            data = self.samples("common" if self.client.common is not None else "test")
            if data is None or not len(data):
                raise ValueError("expected test images to explain, the client has none")
            own = {name: tensor.clone() for name, tensor in self.shared().items()}
            self.model.load_state_dict(parameters, strict=False)
            x, y = data.labelled_batch(torch.arange(min(len(data), EXPLAINED_IMAGES)))
            with torch.no_grad():
                x = self.client.to_device(x)
                model = self.model.eval()
                logits, reasons = model(x), model.explain(x)
            self.model.load_state_dict(own, strict=False)
            image, label = divmod(int(logits.argmax()), logits.shape[1])
            present = (self.client.to_device(y) == 1).to(logits.dtype)  # (n, labels)
            images_per_label = present.sum(0)[:, None].clamp(min=1)
            return {
                "fired": present.mT @ reasons["fired"] / images_per_label,
                "places": reasons["plan"][image, ..., label],
            }


class ConditionalPrompts(nn.Module):
    """The head: logits (n, labels) from patches (n, places, width), eq. 6 to 11."""

    def __init__(self, method: FedMPT, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.method, self.labels = method, len(labels)
        self.conditions = method.condition_names
        count = len(self.conditions)
        rows: list[list[str | int]] = []
        if method.prompts:
            for condition in self.conditions:
                for label in labels:
                    rows.append([method.condition_tokens, condition, method.class_tokens, label])
            self.condition_tokens = (
                initial_tokens(model, count, method.condition_tokens)
                if method.condition_tokens
                else None
            )
        else:
            rows += [[method.class_tokens, label] for label in labels]
        self.texts = Prompts(model, rows)
        self.class_tokens = initial_tokens(model, method.class_tokens)
        if method.adapters:
            # One low-rank adapter per condition; as in LoRA its output is zero before training.
            self.down = nn.Parameter(
                torch.randn(count, model.width, method.rank) / model.width**0.5
            )
            self.up = nn.Parameter(torch.zeros(count, method.rank, model.width))
        if method.gate is True:
            self.route = nn.Sequential(
                nn.Linear(model.width, method.rank, bias=False), zero_linear(method.rank, count)
            )
        self.dropout = nn.Dropout(method.dropout)
        self.verdict = ScoresToLogits()

    def encode_texts(self, model: VisionLanguageModel) -> Tensor:
        """Unit text features of labels under each condition, (conditions or 1, labels, width)."""
        learnt: Tensor = self.class_tokens
        if self.method.prompts:
            learnt = learnt.expand(len(self.conditions), -1, -1)
            if self.condition_tokens is not None:
                learnt = torch.cat([self.condition_tokens, learnt], 1)
            learnt = learnt.repeat_interleave(self.labels, 0)
        return normalize(model.read(*self.texts(learnt)), dim=-1).unflatten(0, (-1, self.labels))

    def similarity(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        """S: scaled cosines of patches and labels, (n, conditions or 1, places, labels).

        With `whole`, the image feature is the last place.
        """
        f = torch.cat([patches, whole[:, None]], 1) if self.method.whole else patches
        f = normalize(f, dim=-1)[:, None]  # (n, 1, places, width)
        if self.method.adapters:
            f = normalize(f + self.dropout(f @ self.down) @ self.up, dim=-1)
        return self.method.scale * f @ self.encode_texts(model).mT

    def plan(self, similarity: Tensor) -> Tensor:
        """P: weight of each patch for each label, same shape as S, sums to 1 over patches."""
        method = self.method
        if not method.transport:
            return (similarity / method.temperature).softmax(-2)
        plan = transport(
            similarity, method.temperature, method.entropy, method.steps, method.certain
        )
        return self.labels * (plan if method.plan_gradient else plan.detach())

    def gate_weights(self, patches: Tensor, psi: Tensor) -> Tensor:
        """Weight of each condition for each image, (n, conditions), sums to 1.

        Args:
            psi: scores (n, conditions or 1, labels).
        """
        count = len(self.conditions)
        if self.method.gate == "spread":
            spread = psi.std(-1, correction=0)
            return spread.expand(-1, count).softmax(-1)
        if not self.method.gate:
            return patches.new_full((len(patches), count), 1 / count)
        return self.route(normalize(patches, dim=-1).mean(1)).softmax(-1)

    def explain(
        self, model: VisionLanguageModel, patches: Tensor, whole: Tensor
    ) -> dict[str, Tensor]:
        """Where a prediction comes from.

        Returns: `fired`, the gate weights (n, conditions); `plan`, the gated plan over the image's
        patches (n, rows, columns, labels). What the plan lacks to a sum of 1 belongs to the image
        feature.
        """
        similarity = self.similarity(model, patches, whole)
        plan = self.plan(similarity)
        fired = self.gate_weights(patches, (plan * similarity).sum(-2))
        plan = plan[..., : patches.shape[1], :]  # (n, conditions or 1, places, labels)
        gated = (fired[..., None, None] * plan).sum(1)
        return {"fired": fired, "plan": gated.unflatten(1, model.places)}

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        similarity = self.similarity(model, patches, whole)
        psi = (self.plan(similarity) * similarity).sum(-2)  # (n, conditions or 1, labels)
        weights = self.gate_weights(patches, psi)
        if self.method.standardize == "each":
            psi = standardize(psi)
        return self.verdict((weights[..., None] * psi).sum(1))
