"""Central differential privacy: a trusted server clips each client's update and noises their sum.

McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", Algorithm 1,
https://arxiv.org/abs/1710.06963. The models that leave the server protect a client's whole data
set against the other clients and the public, not against the server, which sees every update.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import ConfigDict, Field
from torch import Tensor
from typing_extensions import TypedDict

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.core.privacy import Privacy, accounting, clip_change, epsilon


class CentralPrivacy(TypedDict):
    """`central:` of an averaging method; a dictionary, since it is sent with the method's fields.

    Fields:
        clip: L2 norm that each client's update is clipped to.
        noise: standard deviation of the noise on the sum, in multiples of `clip`.
        delta: of (epsilon, delta); 1e-5 by default.
        entropy: where noise comes from, as in `Privacy`; `seed` by default.
        sampling: `known` counts nothing for sampling clients. `secret` counts amplification by
            `participation`: only against those who know neither seed nor who took part.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    clip: Annotated[float, Field(gt=0)]
    noise: Annotated[float, Field(gt=0)]
    delta: NotRequired[Annotated[float, Field(gt=0, lt=1)]]
    entropy: NotRequired[Literal["seed", "secret"]]
    sampling: NotRequired[Literal["known", "secret"]]


def privacy_settings(central: CentralPrivacy) -> Privacy:
    """The same numbers as settings of the mechanism."""
    return Privacy(
        noise=central["noise"],
        bound=central["clip"],
        delta=central.get("delta", 1e-5),
        entropy=central.get("entropy", "seed"),
    )


def noisy_mean(
    model: Parameters,
    states: Mapping[str, Parameters],
    weights: Mapping[str, float],
    privacy: Privacy,
    draw: Callable[[torch.Size], Tensor],
) -> Parameters:
    """model + (sum_i w_i clip(state_i - model) + noise * bound * max_i w_i * N(0, 1)) / sum_i w_i.

    Computed in float64. Integers, such as counters of batch norm, stay as they are in `model`.

    Args:
        states: what clients sent.
        weights: of all clients that were asked, by announced facts only. One that did not answer
            counts as one without an update, so that a failure changes no more than an update.
        draw: standard normal values of a shape, in float64.

    >>> model, states = {"w": torch.zeros(2)}, {"a": {"w": torch.tensor([6.0, 8.0])}}
    >>> privacy = Privacy(noise=1.0, bound=5.0)
    >>> noisy_mean(model, states, {"a": 1.0, "b": 1.0}, privacy, torch.zeros)["w"].tolist()
    [1.5, 2.0]
    """
    total = {
        name: torch.zeros(tensor.shape, dtype=torch.float64)
        for name, tensor in model.items()
        if tensor.is_floating_point()
    }
    for client, state in states.items():
        changes, scale = clip_change(state, model, privacy.bound)
        for name, change in changes.items():
            total[name] += weights[client] * scale * change.cpu()
    deviation = privacy.noise * privacy.bound * max(weights.values())
    merged = dict(model)
    for name, change in total.items():
        step = (change + deviation * draw(change.shape)) / sum(weights.values())
        value = model[name].double() + step.to(model[name].device)
        # Noise can make a variance of batch normalisation negative; mending it costs no privacy.
        value = value.clamp_min(0) if name.endswith("running_var") else value
        merged[name] = value.to(model[name].dtype)
    return merged


def count_round(fed: Federation) -> None:
    """Count a round for the clients that were sampled for it, whether or not they answered."""
    record = fed.state.setdefault("central", {"rounds": {}, "sampled": 0, "share": 0.0})
    for client in fed.sampled:
        record["rounds"][client] = record["rounds"].get(client, 0) + 1
    record["sampled"] += 1
    record["share"] = max(record["share"], len(fed.sampled) / len(fed.population))


def central_results(central: CentralPrivacy, fed: Federation) -> dict[str, Any]:
    """What the published models cost the client that took part most: epsilon, delta, releases."""
    record = fed.state.get("central", {"rounds": {}, "sampled": 0, "share": 0.0})
    privacy = privacy_settings(central)
    rounds = max(record["rounds"].values(), default=0)
    groups = set(fed.state.get("group", {}).values())
    if central.get("sampling") == "secret" and len(groups) < 2:
        value = amplified_epsilon(
            privacy.noise, record["sampled"], record["share"], len(fed.population), privacy.delta
        )
        return {
            "epsilon": value,
            "delta": privacy.delta,
            "releases": record["sampled"],
            "sampling": "secret",
        }
    return {**privacy.spent(rounds), "sampling": "known"}


def amplified_epsilon(
    noise: float, rounds: int, share: float, clients: int, delta: float
) -> float | None:
    """Epsilon of so many rounds, in each of which a fixed number of clients is drawn in secret.

    Neighbours differ in one client's whole data set, so a round is a Gaussian mechanism with
    multiplier noise / 2. Sampling without replacement is accounted by Renyi divergences (Wang et
    al. 2019, https://arxiv.org/abs/1808.00087). Accountants of Poisson sampling would promise too
    much here (Lebeda et al. 2024, https://arxiv.org/abs/2405.20769). That bound is loose for large
    shares: what holds without secrecy, for a client in all rounds, is taken where it is less.

    >>> amplified_epsilon(4.0, 20, 1.0, 10, 1e-5) == epsilon(4.0, 20, 1e-5)
    True
    """
    plain = epsilon(noise, rounds, delta)
    if share >= 1 or not rounds or plain is None:
        return plain
    dp = accounting()
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(
        source_dataset_size=clients,
        sample_size=math.ceil(share * clients - 1e-9),
        event=dp.GaussianDpEvent(noise / 2),
    )
    accountant.compose(event, rounds)
    return min(plain, float(accountant.get_epsilon(delta)))
