"""The list of methods, by the name that scenarios use.

A new method is one file in this folder and one line in `ALGORITHMS`: the command line, the contract
tests and the documentation check read this list.
"""

from unalike.algorithms.afmcc import AFMCC
from unalike.algorithms.cofed import CoFED
from unalike.algorithms.creamfl import CreamFL
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.feddf import FedDF
from unalike.algorithms.feddropout import FedDropout
from unalike.algorithms.feddse import FedDSE
from unalike.algorithms.feddualcoop import FedDualCoOp
from unalike.algorithms.fedhenn import FedHeNN
from unalike.algorithms.fedmpt import FedMPT
from unalike.algorithms.fedmuscle import FedMuscle
from unalike.algorithms.fedmvp import FedMVP
from unalike.algorithms.fednca import FedNCA
from unalike.algorithms.fedprox import FedProx
from unalike.algorithms.fedram import FedRAM
from unalike.algorithms.fedrcl import FedRCL
from unalike.algorithms.fedrolex import FedRolex
from unalike.algorithms.fedtpg import FedTPG
from unalike.algorithms.flexfl import FlexFL
from unalike.algorithms.fmcsc import FMCSC
from unalike.algorithms.heterofl import HeteroFL
from unalike.algorithms.linearprobe import LinearProbe
from unalike.algorithms.local import Local
from unalike.algorithms.promptfl import PromptFL
from unalike.algorithms.pseudolabel import PseudoLabel
from unalike.algorithms.sage import SAGE
from unalike.algorithms.simclr import SimCLR
from unalike.algorithms.subflot import SubFLOT
from unalike.algorithms.zeroshot import ZeroShot
from unalike.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "heterofl": HeteroFL,
    "fedrolex": FedRolex,
    "feddropout": FedDropout,
    "feddse": FedDSE,
    "flexfl": FlexFL,
    "subflot": SubFLOT,
    "fedmuscle": FedMuscle,
    "fedhenn": FedHeNN,
    "feddf": FedDF,
    "cofed": CoFED,
    "fedrcl": FedRCL,
    "sage": SAGE,
    "simclr": SimCLR,
    "pseudolabel": PseudoLabel,
    "creamfl": CreamFL,
    "afmcc": AFMCC,
    "fmcsc": FMCSC,
    "fednca": FedNCA,
    "fedmpt": FedMPT,
    "promptfl": PromptFL,
    "feddualcoop": FedDualCoOp,
    "fedtpg": FedTPG,
    "fedmvp": FedMVP,
    "fedram": FedRAM,
    "linearprobe": LinearProbe,
    "zeroshot": ZeroShot,
}
