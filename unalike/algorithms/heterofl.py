"""HeteroFL: submodels made of the first channels of every layer.

Diao et al., "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264.

A client trains the first channels of every layer, as many as its capacity allows. The server
averages every entry of the full model over the clients that have it. Two of the paper's aids are
here: the scaler (sec. 3.2) and masked cross-entropy (sec. 3.3). Its static batch norm is not
needed: clients are evaluated with the submodel that they trained, whose batch-norm statistics are
recomputed on their own data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unalike.methods.submodels import SubmodelMethod, SubmodelProgram
from unalike.models.model import Model


@dataclass
class HeteroFL(SubmodelMethod):
    """The first units of every layer, with the paper's two aids.

    Args:
        scaler: divide the output of narrowed layers by the width ratio, so that all widths have one
            scale.
        masked: mask labels that a client lacks, where clients classify.
    """

    scaler: bool = True
    masked: bool = True

    class Program(SubmodelProgram):
        algorithm: "HeteroFL"

        def build_submodel(self, units: Sequence[int]) -> Model:
            submodel = super().build_submodel(units)
            if self.algorithm.scaler:
                self.add_scaler(submodel, sum(units) / max(sum(self.full_units), 1))
            return submodel

        def add_scaler(self, submodel: Model, ratio: float) -> None:
            """Divide the output of every narrowed layer by the width ratio (sec. 3.2)."""

            def scale(layer: Any, x: Any, out: Any) -> Any:
                if isinstance(out, tuple):  # torch's attention also returns its weights
                    return out[0] / ratio, *out[1:]
                return out / ratio

            weights: set[str] = set()
            for group in self.channel_groups:
                outputs = [part.tensor for part in group.slices if part.is_output]
                weights.update(name for name in outputs if name.endswith("weight"))
            for name in sorted(weights):
                if submodel.get_parameter(name).dim() > 1:
                    layer = submodel.get_submodule(name.rpartition(".")[0])
                    layer.register_forward_hook(scale)
