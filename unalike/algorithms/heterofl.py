"""HeteroFL (Diao 2021): each client trains the first channels of every layer; entries are averaged over those who hold them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unalike.methods.submodels import SubmodelMethod, SubmodelProgram
from unalike.models.model import Model


@dataclass
class HeteroFL(SubmodelMethod):
    """With its two aids. Clients are measured with the submodel they trained, so it is scaled and has its batch statistics then too."""

    scaler: bool = True  # what a narrowed layer gives is divided by the submodel's width, so that widths agree in scale (sec. 3.2)
    masked: bool = True  # sec. 3.3

    class Program(SubmodelProgram):
        algorithm: "HeteroFL"

        def made(self, units: Any) -> Model:
            small, width = super().made(units), sum(units) / max(sum(self.everything), 1)

            def scale(layer: Any, x: Any, out: Tensor) -> Tensor:
                return out / width

            makers = {
                place.tensor
                for w in self.widths
                for place in w.slices
                if place.is_output and place.tensor.endswith("weight")
            }
            for name in sorted(makers) if self.algorithm.scaler else ():
                if small.get_parameter(name).dim() > 1:
                    small.get_submodule(name.rpartition(".")[0]).register_forward_hook(scale)
            return small
