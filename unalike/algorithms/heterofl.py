"""HeteroFL (Diao 2021): each client trains the first channels of every layer; entries are averaged over those who hold them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from unalike.averaging import Parameters
from unalike.federation import Federation
from unalike.forms import Shape
from unalike.models.model import Model
from unalike.narrowing import Narrowing, NarrowingSide
from unalike.operations import question, sends

Present = Annotated[Tensor, Shape("labels")]        # 1 for a label that a client has samples of


@dataclass
class HeteroFL(Narrowing):
    """With its two aids. Clients are measured with the submodel they trained, so it is scaled and has its batch statistics then too.

    Masked, what a model says of a label that its client has no sample of is 0, in training and on the client's own test set, and rows of
    the last layer are averaged over clients that have their label: these tell the server which they have.
    """

    scaler: bool = True         # what a narrowed layer gives is divided by the submodel's width, so that widths agree in scale (sec. 3.2)
    masked: bool = True         # sec. 3.3; where clients classify

    def absorb(self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]) -> None:
        known = fed.state.setdefault("present", {})
        new = [c for c in states if c not in known and self.masked and fed.cards[c].task == "classification"]
        if new:
            known |= {c: present.bool().cpu() for c, present in fed.call("present", clients=new, quorum=0).items()}
        super().absorb(fed, group, states, weights)

    def counts(self, fed: Federation, client: str, state: Parameters) -> Parameters:
        marks = super().counts(fed, client, state)
        if client in fed.state["present"]:
            absent = ~fed.state["present"][client]
            last = [name for name, tensor in state.items() if tensor.dim() > 1][-1].rpartition(".")[0]
            for name in (f"{last}.weight", f"{last}.bias"):
                if name in marks and len(marks[name]) == len(absent):
                    marks[name][absent.to(marks[name].device)] = 0
        return marks

    class Side(NarrowingSide):
        algorithm: "HeteroFL"

        def __init__(self, *given: Any):
            self.masks = False
            super().__init__(*given)
            self.model.register_forward_hook(self.mask)

        def made(self, units: Any) -> Model:
            small, width = super().made(units), sum(units) / max(sum(self.everything), 1)

            def scale(layer: Any, x: Any, out: Tensor) -> Tensor:
                return out / width

            makers = {place.tensor for w in self.widths for place in w.places if place.made and place.tensor.endswith("weight")}
            for name in sorted(makers) if self.algorithm.scaler else ():
                if small.get_parameter(name).dim() > 1:
                    small.get_submodule(name.rpartition(".")[0]).register_forward_hook(scale)
            small.register_forward_hook(self.mask)
            return small

        def mask(self, model: Any, x: Any, out: Tensor) -> Tensor:
            return out.masked_fill(self.present() == 0, 0.0) if self.masks else out

        @contextmanager
        def masking(self) -> Iterator[None]:
            self.masks = self.algorithm.masked and self.client.task.name == "classification"
            try:
                yield
            finally:
                self.masks = False

        @question
        @sends("open")
        def present(self) -> Present:
            """(labels,): which of them the client has a sample of."""
            if not hasattr(self, "there"):
                _, y = self.client.train.labelled(torch.arange(len(self.client.train)))
                self.there = self.client.place(torch.isin(torch.arange(len(self.client.task.labels)), y.cpu()).float())
            return self.there

        def learn(self, *given: Any, **options: Any) -> float:
            with self.masking():
                return super().learn(*given, **options)

        @question
        def evaluate(self, common: bool = False) -> dict[str, float]:
            if common:
                return super().evaluate(common)
            with self.masking():
                return super().evaluate()

        @question
        def appraise(self, parameters: Parameters, units: list[int]) -> dict[str, float]:
            with self.masking():
                return super().appraise(parameters, units)
