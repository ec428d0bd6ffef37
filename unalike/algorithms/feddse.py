"""FedDSE: submodels of the units that a client's data activate most.

Wang et al., "FedDSE: Distribution-aware Sub-model Extraction for Federated Learning over
Resource-constrained Devices", WWW 2024.

Every few rounds a client gets the full model, whose bytes count, and reports the mean activation of
each unit on its data, after its activation function. It then trains the most active units of every
layer, as many as its capacity allows; the server averages every entry over the clients that have
it. Written from the paper's description, without its code.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod
from unalike.models.submodels import first_units, kept_units


@dataclass
class FedDSE(SubmodelMethod):
    """The most active units of every layer, measured every few rounds.

    Args:
        every: rounds between two measurements of activity.
    """

    every: Annotated[int, Field(ge=1)] = 10

    def privacy_problem(self) -> str | None:
        return "FedDSE's clients send how active their data make each unit, which nothing protects"

    def register_clients(self, fed: Federation) -> None:
        """Register clients, and measure activity where it is missing or out of date."""
        super().register_clients(fed)
        measured = fed.state.setdefault("activity", {})
        due = [
            c
            for c in fed.active
            if c in fed.state["group"]
            and (c not in measured or fed.round >= measured[c]["round"] + self.every)
        ]
        for client, groups in self.fetch_activity(fed, due).items():
            means = [activity[:, 0] for activity in groups]
            measured[client] = {"round": fed.round, "mean": means}

    def select_units(self, fed: Federation, client: str) -> list[Tensor]:
        groups, ratio = self.channel_groups(fed, client), fed.state["ratio"][client]
        if client not in fed.state["activity"]:
            return first_units(groups, ratio)
        units = []
        for group, activity in zip(groups, fed.state["activity"][client]["mean"], strict=True):
            order = activity.cpu().argsort(descending=True, stable=True)
            units.append(order[: kept_units(group, ratio)].sort().values)
        return units
