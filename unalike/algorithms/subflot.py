"""SubFLOT (2026): personal submodels, cut from the server's model and merged into it by optimal transport between neurons."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe
from unalike.matching import Matcher
from unalike.methods.averaging import cast_like
from unalike.methods.submodels import Carried, SubmodelMethod, SubmodelProgram
from unalike.models.submodels import column_scales, reindex_groups, rescale_columns

Share = Annotated[float, Field(ge=0, le=1)]
AT_ONCE = 8  # clients matched together


@dataclass
class SubFLOT(SubmodelMethod):
    """OTP: what a client is sent is the server's model carried over to the neurons of its last upload, mixed with that upload.
    SAR: it is held near that while it trains, the more the narrower it is: task loss + lambda rho ||W - W_sent||^2.
    OTA: uploads are carried over to the neurons of the server's model, and averaged.

    A client's last upload stands for its data, however old; one that has none, or had another width, gets the first units.
    """

    alpha: Share = 0.5  # of the server's model in what is sent
    penalty: Annotated[float, Field(ge=0)] = 1.0  # lambda
    otp: bool = True
    ota: bool = True
    inputs: Literal["mass", "barycentre"] = (
        "mass"  # how columns are carried over (matching/transport.py)
    )
    level: bool = True  # narrow clients learn at the pace of full ones
    solver: Literal["picked", "auto", "exact", "entropic"] = "picked"
    server_mix: Share = 0.0  # of its last model in the server's next

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        if self.solver in ("exact", "auto") and find_spec("ot") is None:
            return [
                (
                    "solver",
                    'exact plans need POT: install "unalike[matching]", or take solver entropic.',
                )
            ]
        return []

    def parameters_for(
        self, fed: Federation, keep: dict[str, list[Tensor]]
    ) -> dict[str, tuple[Parameters, list[int]]]:
        units = {c: [len(kept) for kept in its] for c, its in keep.items()}
        known = {
            c: its
            for c, its in units.items()
            if self.otp and fed.state.get("uploads", {}).get(c, {}).get("units") == its
        }
        made = {
            c: (self.rescale_columns(fed, c, sent, its), its)
            for c, (sent, its) in super()
            .parameters_for(fed, {c: its for c, its in keep.items() if c not in known})
            .items()
        }
        for some in self.alike(fed, known):
            made |= {
                c: (sent, units[c]) for c, sent in self.extracted(fed, some, units[some[0]]).items()
            }
        return made

    def rescale_columns(
        self, fed: Federation, client: str, sent: Parameters, units: list[int]
    ) -> Parameters:
        """A first submodel as strong as the whole: it takes in fewer units, so each counts more, as it does in what OTP sends."""
        return sent | {
            name: sent[name] * more.to(sent[name])
            for name, more in self.column_scales(fed, client, sent, units).items()
        }

    def column_scales(
        self, fed: Federation, client: str, state: Parameters, units: list[int]
    ) -> Parameters:
        widths = self.widths(fed, client)
        return (
            column_scales(widths, reindex_groups(widths, [torch.arange(n) for n in units]), state)
            if self.inputs == "mass"
            else {}
        )

    def extracted(
        self, fed: Federation, clients: list[str], units: list[int]
    ) -> dict[str, Parameters]:
        """OTP: the server's model in the places of each client's neurons, mixed with its last upload."""
        widths, model = self.widths(fed, clients[0]), self.model(fed, clients[0])
        own = reindex_groups(widths, [torch.arange(n) for n in units])
        last = [
            {name: tensor.to(model[name].device) for name, tensor in fed.archive[c].items()}
            for c in clients
        ]
        keys = [(c, fed.state["merged"], fed.state["uploads"][c]["round"]) for c in clients]
        aligned = self.matcher(fed).carry([model] * len(clients), last, widths, own, keys)
        return {
            c: mixed(new, old, self.alpha)
            for c, new, old in zip(clients, aligned, last, strict=True)
        }

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        before = fed.state["models"][group]
        super().aggregate(fed, group, states, weights)
        if self.server_mix:
            merged = fed.state["models"][group]
            fed.state["models"][group] = mixed(
                {n: t.to(merged[n].device) for n, t in before.items()}, merged, self.server_mix
            )
        fed.state["merged"] = fed.round
        for client, units in self.units(fed, states).items():
            fed.archive[client] = states[client]
            fed.state.setdefault("uploads", {})[client] = {"units": units, "round": fed.round}

    def carried(
        self, fed: Federation, model: Parameters, states: dict[str, Parameters]
    ) -> Iterator[Carried]:
        """OTA: uploads in the places of the server's neurons, by the plans of this round."""
        units = self.units(fed, states)
        if not self.ota:
            yield from super().carried(
                fed,
                model,
                {
                    c: state
                    | {
                        name: state[name] / more.to(state[name])
                        for name, more in self.column_scales(fed, c, state, units[c]).items()
                    }
                    for c, state in states.items()
                },
            )
            return
        everything = {
            name: tensor.new_ones([1] * tensor.dim()) for name, tensor in model.items()
        }  # is reached by plans that spread
        for some in self.alike(fed, units):
            widths, matcher = self.widths(fed, some[0]), self.matcher(fed)
            keys = [(c, "up", fed.round) for c in some] if self.solver == "picked" else None
            own = reindex_groups(widths, [torch.arange(n) for n in units[some[0]]])
            found = matcher.carry([states[c] for c in some], [model] * len(some), own, widths, keys)
            for i, (client, state) in enumerate(zip(some, found, strict=True)):
                yield client, state, matcher.reached(keys[i], widths, model) if keys else everything

    def units(self, fed: Federation, clients: Iterable[str]) -> dict[str, list[int]]:
        return {c: [len(kept) for kept in self.keep(fed, c)] for c in clients}

    def alike(self, fed: Federation, units: dict[str, list[int]]) -> Iterator[list[str]]:
        """Clients of one model and width, a few at a time."""
        kinds: dict[Any, list[str]] = {}
        for client, its in units.items():
            kinds.setdefault((fed.state["group"][client], tuple(its)), []).append(client)
        for clients in kinds.values():
            for start in range(0, len(clients), AT_ONCE):
                yield clients[start : start + AT_ONCE]

    def matcher(self, fed: Federation) -> Matcher:
        return fed.scratch.setdefault("matcher", Matcher(self.inputs, self.solver))

    class Program(SubmodelProgram):
        algorithm: "SubFLOT"

        def __init__(self, *given: Any):
            super().__init__(*given)
            self.begun: Tensor = torch.empty(0)  # parameters where this round began
            self.paced: tuple[Any, dict[str, Tensor]] = None, {}

        def learn(self, *args: Any, **options: Any) -> float:
            """At the pace of full ones. What a unit of a narrow model takes in is as much, from fewer and stronger columns: divided by the
            root of the ratio while they are trained, they are as long as a full model's, and a step of SGD changes outputs as much."""
            if len(args) < 2 and options.get("optimizer") is None:
                options["optimizer"] = (
                    self.optimizer()
                )  # made before: divided, parameters come in another order
            with rescale_columns(
                self.model,
                self.pace() if self.algorithm.level and self.algorithm.inputs == "mass" else {},
            ):
                begun = self.flat().detach()
                self.begun = (
                    self.begun.copy_(begun) if self.begun.shape == begun.shape else begun
                )  # in place: it may be recorded
                return super().learn(*args, **options)

        def pace(self) -> dict[str, Tensor]:
            if self.paced[0] is not self.model:
                state = self.model.state_dict()
                found = column_scales(
                    self.widths,
                    reindex_groups(self.widths, [torch.arange(n) for n in self.memory["units"]]),
                    state,
                )
                self.paced = (
                    self.model,
                    {name: more.sqrt().to(state[name]) for name, more in found.items()},
                )
            return self.paced[1]

        def flat(self) -> Tensor:
            return torch.cat([p.flatten() for p in self.model.parameters()])

        def drift(self) -> Tensor:
            return (self.flat() - self.begun).square().sum()

        @graph_safe
        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            hold = self.algorithm.penalty * self.rho
            return super().loss(x, y) + hold * self.drift() if hold else super().loss(x, y)


def mixed(one: Parameters, other: Parameters, share: float) -> Parameters:
    """So much of the one, the rest of the other."""
    return {
        name: cast_like(share * tensor + (1 - share) * other[name], tensor)
        for name, tensor in one.items()
    }
