"""HeteroFL (Diao 2021): each client trains the first channels of every layer; entries are averaged over those who hold them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unalike.models.model import Model
from unalike.narrowing import Narrowing, NarrowingSide


@dataclass
class HeteroFL(Narrowing):
    """With its two aids. Clients are measured with the submodel they trained, so it is scaled and has its batch statistics then too."""

    scaler: bool = True         # what a narrowed layer gives is divided by the submodel's width, so that widths agree in scale (sec. 3.2)
    masked: bool = True         # labels a client has none of are no part of its loss (sec. 3.3)

    class Side(NarrowingSide):
        algorithm: "HeteroFL"

        def made(self, units: Any) -> Model:
            small, width = super().made(units), sum(units) / max(sum(self.everything), 1)

            def scale(layer: Any, x: Any, out: Tensor) -> Tensor:
                return out / width

            makers = {place.tensor for w in self.widths for place in w.places if place.made and place.tensor.endswith("weight")}
            for name in sorted(makers) if self.algorithm.scaler else ():
                if small.get_parameter(name).dim() > 1:
                    small.get_submodule(name.rpartition(".")[0]).register_forward_hook(scale)
            return small

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            if not self.algorithm.masked or self.client.task.name != "classification":
                return super().loss(x, y)
            return self.client.task.loss(self.model(x).masked_fill(self.absent(), 0.0), y)

        def absent(self) -> Tensor:
            """(labels,): which of them this client has no sample of."""
            if not hasattr(self, "missing"):
                _, y = self.client.train.labelled(torch.arange(len(self.client.train)))
                self.missing = self.client.place(~torch.isin(torch.arange(len(self.client.task.labels)), y.cpu()))
            return self.missing
