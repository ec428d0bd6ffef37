"""SubFLOT: personalised submodels, extracted and aggregated by optimal transport between neurons.

"SubFLOT: Submodel Extraction for Efficient and Personalized Federated Learning via Optimal
Transport", 2026, https://arxiv.org/abs/2604.06631.

OTP (pruning): what a client is sent is the server's model, carried over to the neurons of the
client's last upload by optimal transport and mixed with that upload. SAR (regularisation): while
it trains, a client is kept near what it was sent, the more the narrower it is. OTA (aggregation):
uploads are carried over to the neurons of the server's model and averaged.

The last upload stands for a client's data, however old it is; a client without one, or with one of
another width, gets the first units. docs/subflot.md says what is ours: `solver` picked, `inputs`
mass, `level` and `server_mix`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe
from unalike.matching import Matcher
from unalike.methods.averaging import cast_like
from unalike.methods.submodels import SubmodelMethod, SubmodelProgram, Upload
from unalike.models.channel_groups import ChannelGroup
from unalike.models.submodels import column_scales, reindex_groups, rescale_columns

Share = Annotated[float, Field(ge=0, le=1)]
MATCHED_TOGETHER = 8  # clients matched in one batch


@dataclass
class SubFLOT(SubmodelMethod):
    """Submodels by OTP, trained with SAR, merged by OTA.

    Args:
        alpha: share of the server's model in what is sent; the rest is the client's last upload.
        penalty: lambda of SAR.
        otp: False: the first units are sent.
        ota: False: entries are averaged over the clients that have them.
        inputs: how columns are carried over, see `Matcher`.
        level: narrow clients learn at the pace of full ones, see `Program.reparametrize`.
        solver: of the transport between units; docs/subflot.md says what "picked" is.
        server_mix: share of the server's previous model in its next.
    """

    alpha: Share = 0.5
    penalty: NonNegativeFloat = 1.0
    otp: bool = True
    ota: bool = True
    inputs: Literal["mass", "barycentre"] = "mass"
    level: bool = True
    solver: Literal["picked", "auto", "exact", "entropic"] = "picked"
    server_mix: Share = 0.0

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        if self.solver in ("exact", "auto") and find_spec("ot") is None:
            message = 'exact plans need POT: install "unalike[matching]", or take solver entropic.'
            return [("solver", message)]
        return []

    # OTP: what a client is sent

    def extract_submodels(
        self, fed: Federation, units: dict[str, list[Tensor]]
    ) -> dict[str, Parameters]:
        """OTP for clients whose last upload has this width, the first units for all others."""
        counts = count_units(units)
        uploads = fed.state.get("uploads", {}) if self.otp else {}
        matched = {
            c: count for c, count in counts.items() if uploads.get(c, {}).get("units") == count
        }
        cold = {c: indices for c, indices in units.items() if c not in matched}
        submodels = {}
        for client, parameters in super().extract_submodels(fed, cold).items():
            # A submodel has fewer inputs than the full model: scale its columns up.
            scales = self.column_scales(fed, client, parameters, counts[client])
            submodels[client] = scale_tensors(parameters, scales)
        for batch in self.batch_clients(fed, matched):
            submodels |= self.transport_to_clients(fed, batch, matched[batch[0]])
        return submodels

    def transport_to_clients(
        self, fed: Federation, clients: list[str], units: list[int]
    ) -> dict[str, Parameters]:
        """OTP for clients of one model and width.

        The server's model in the order of a client's neurons, mixed with its last upload.
        """
        model = self.server_model(fed, clients[0])
        groups = self.channel_groups(fed, clients[0])
        uploads = []
        for client in clients:
            state = fed.archive[client]
            uploads.append({name: state[name].to(model[name].device) for name in state})
        keys = [(c, fed.state["merged"], fed.state["uploads"][c]["round"]) for c in clients]
        models = self.matcher(fed).transport(
            sources=[model] * len(clients),
            targets=uploads,
            source_groups=groups,
            target_groups=first_groups(groups, units),
            keys=keys,
        )
        return {
            c: interpolate(aligned, upload, self.alpha)
            for c, aligned, upload in zip(clients, models, uploads, strict=True)
        }

    def column_scales(
        self, fed: Federation, client: str, parameters: Parameters, units: list[int]
    ) -> Parameters:
        """Factors by which columns of a submodel exceed the full model's; none for barycentres."""
        if self.inputs != "mass":
            return {}
        groups = self.channel_groups(fed, client)
        return column_scales(groups, first_groups(groups, units), parameters)

    # OTA: what becomes of the uploads

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        previous = fed.state["models"][group]
        super().aggregate(fed, group, states, weights)
        if self.server_mix:
            merged = fed.state["models"][group]
            previous = {name: previous[name].to(merged[name].device) for name in previous}
            fed.state["models"][group] = interpolate(previous, merged, self.server_mix)
        fed.state["merged"] = fed.round
        uploads = fed.state.setdefault("uploads", {})
        for client, units in self.unit_counts(fed, states).items():
            fed.archive[client] = states[client]
            uploads[client] = {"units": units, "round": fed.round}

    def place_uploads(
        self, fed: Federation, model: Parameters, states: dict[str, Parameters]
    ) -> Iterator[Upload]:
        """OTA: uploads in the order of the server's neurons, by the plans of this round."""
        units = self.unit_counts(fed, states)
        if not self.ota:
            plain = {}
            for client, state in states.items():
                scales = self.column_scales(fed, client, state, units[client])
                plain[client] = divide_tensors(state, scales)
            yield from super().place_uploads(fed, model, plain)
            return
        for batch in self.batch_clients(fed, units):
            yield from self.transport_to_server(fed, model, states, batch, units[batch[0]])

    def transport_to_server(
        self,
        fed: Federation,
        model: Parameters,
        states: dict[str, Parameters],
        clients: list[str],
        units: list[int],
    ) -> Iterator[Upload]:
        """OTA for clients of one model and width."""
        groups = self.channel_groups(fed, clients[0])
        matcher = self.matcher(fed)
        # Picked plans leave units of the server without a partner; plans that spread reach all.
        spreads = self.solver != "picked"
        keys = [(c, "up", fed.round) for c in clients]
        uploads = matcher.transport(
            sources=[states[c] for c in clients],
            targets=[model] * len(clients),
            source_groups=first_groups(groups, units),
            target_groups=groups,
            keys=None if spreads else keys,
        )
        ones = {name: tensor.new_ones([1] * tensor.dim()) for name, tensor in model.items()}
        for client, key, upload in zip(clients, keys, uploads, strict=True):
            mask = ones if spreads else matcher.pop_reached(key, groups, model)
            yield Upload(client, upload, mask)

    def unit_counts(self, fed: Federation, clients: Iterable[str]) -> dict[str, list[int]]:
        """Number of units per channel group that each client was sent this round."""
        return count_units({c: self.select_units(fed, c) for c in clients})

    def batch_clients(self, fed: Federation, units: dict[str, list[int]]) -> Iterator[list[str]]:
        """Batches of clients with the same model and width."""
        alike: dict[Any, list[str]] = {}
        for client, count in units.items():
            alike.setdefault((fed.state["group"][client], tuple(count)), []).append(client)
        for clients in alike.values():
            for start in range(0, len(clients), MATCHED_TOGETHER):
                yield clients[start : start + MATCHED_TOGETHER]

    def matcher(self, fed: Federation) -> Matcher:
        """The matcher of this run, which caches plans."""
        return fed.scratch.setdefault("matcher", Matcher(self.inputs, self.solver))

    class Program(SubmodelProgram):
        algorithm: "SubFLOT"

        def __init__(self, *args: Any):
            super().__init__(*args)
            self.round_start: Tensor = torch.empty(0)  # all parameters at the start of the round
            self._training_scales: tuple[Any, Parameters] = None, {}  # and the model they are for

        @contextmanager
        def reparametrize(self) -> Iterator[None]:
            """Train columns divided by the root of their scale, so that narrow clients keep pace.

            Columns of a submodel are fewer and larger than the full model's. Divided by the root
            of that ratio they are as long, and a step of SGD changes outputs as much.
            """
            method = self.algorithm
            scales = self.training_scales() if method.level and method.inputs == "mass" else {}
            with rescale_columns(self.model, scales):
                start = self.flat_parameters().detach()
                if self.round_start.shape == start.shape:
                    self.round_start.copy_(start)  # in place: a CUDA graph may have recorded it
                else:
                    self.round_start = start
                yield

        def training_scales(self) -> Parameters:
            """Square roots of the column scales of the present submodel."""
            if self._training_scales[0] is not self.model:
                state = self.model.state_dict()
                own = first_groups(self.channel_groups, self.memory["units"])
                scales = column_scales(self.channel_groups, own, state)
                roots = {name: scale.sqrt().to(state[name]) for name, scale in scales.items()}
                self._training_scales = self.model, roots
            return self._training_scales[1]

        def flat_parameters(self) -> Tensor:
            """All parameters as one vector."""
            return torch.cat([p.flatten() for p in self.model.parameters()])

        def squared_drift(self) -> Tensor:
            """||W - W_sent||^2."""
            return (self.flat_parameters() - self.round_start).square().sum()

        @graph_safe
        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """SAR: task loss + lambda rho ||W - W_sent||^2, rho the pruning rate."""
            weight = self.algorithm.penalty * self.pruning_rate
            loss = super().loss(x, y)
            return loss + weight * self.squared_drift() if weight else loss


def first_groups(groups: Sequence[ChannelGroup], units: Iterable[int]) -> list[ChannelGroup]:
    """Channel groups of the submodel with the first `units` of each group."""
    return reindex_groups(groups, [torch.arange(count) for count in units])


def count_units(units: dict[str, list[Tensor]]) -> dict[str, list[int]]:
    """Number of units per channel group, by client."""
    return {client: list(map(len, groups)) for client, groups in units.items()}


def scale_tensors(parameters: Parameters, scales: Parameters) -> Parameters:
    """Parameters of which some are multiplied by factors."""
    scaled = {n: parameters[n] * scale.to(parameters[n]) for n, scale in scales.items()}
    return parameters | scaled


def divide_tensors(parameters: Parameters, scales: Parameters) -> Parameters:
    """Parameters of which some are divided by factors."""
    divided = {n: parameters[n] / scale.to(parameters[n]) for n, scale in scales.items()}
    return parameters | divided


def interpolate(one: Parameters, other: Parameters, share: float) -> Parameters:
    """share x one + (1 - share) x other; integers (counters) are rounded."""
    return {
        name: cast_like(share * tensor + (1 - share) * other[name], tensor)
        for name, tensor in one.items()
    }
