"""FedNova: the mean of normalised changes, so that clients with more steps do not weigh more.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, https://arxiv.org/abs/2007.07481.

The server adds tau_eff sum_i p_i d_i (eq. 8 and 9) with d_i = (y_i - x) / ||a_i||_1 and
tau_eff = sum_i p_i ||a_i||_1. ||a_i||_1 is the number of local steps tau_i or, with momentum rho,
(tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho) (Sec. 4.2). The server knows tau_i from the
announced number of samples. Left out: momentum at the server. For Adam ||a_i||_1 is tau_i.
"""

from dataclasses import dataclass

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.averaging import Averaging, cast_like
from unalike.methods.server_optimizer import is_optimized
from unalike.training.batching import batches
from unalike.training.loop import Training


@dataclass
class FedNova(Averaging):
    """Normalised averaging."""

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        start = fed.state["models"][group]
        total = sum(weights[c] for c in states)
        norms = {c: step_norm(fed.infos[c].samples, fed.training) for c in states}
        effective = sum(weights[c] / total * norms[c] for c in states)  # tau_eff
        rescaled = {
            c: rescale_change(start, state, effective / norms[c]) for c, state in states.items()
        }
        fed.state["models"][group] = self.average(rescaled, weights)


def rescale_change(start: Parameters, end: Parameters, factor: float) -> Parameters:
    """start + factor (end - start); statistics, which nobody optimizes, stay as in `end`."""
    rescaled = dict(end)
    for name, tensor in end.items():
        if is_optimized(name, tensor):
            origin = start[name].to(tensor.device).double()
            rescaled[name] = cast_like(origin + factor * (tensor.double() - origin), tensor)
    return rescaled


def step_norm(samples: int, training: Training) -> float:
    """||a||_1 of a client's local steps in a round."""
    steps = training.epochs * len(list(batches(samples, training.batch_size)))
    rho = training.momentum if training.optimizer == "sgd" else 0.0
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
