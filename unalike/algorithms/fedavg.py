"""FedAvg (McMahan 2017): train from the shared parameters, average what comes back by number of samples."""

from dataclasses import dataclass

from unalike.methods.averaging import Averaging


@dataclass
class FedAvg(Averaging):
    """The plain average; all of it is `Averaging`."""
