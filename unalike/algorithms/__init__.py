"""The list of methods. A new method is one file and one line here; the command, the docs table and the contract tests follow."""

from unalike.algorithms.afmcc import AFMCC
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fedmuscle import FedMuscle
from unalike.algorithms.fednca import FedNCA
from unalike.algorithms.fedprox import FedProx
from unalike.algorithms.fmcsc import FMCSC
from unalike.algorithms.local import Local

ALGORITHMS = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedmuscle": FedMuscle,
    "afmcc": AFMCC,
    "fmcsc": FMCSC,
    "fednca": FedNCA,
}
