"""The list of methods, by the name that scenarios use.

A new method is one file in this folder and one line in `ALGORITHMS`: the command line, the contract
tests and the documentation check read this list.
"""

from unalike.algorithms.adaptivefl import AdaptiveFL
from unalike.algorithms.afmcc import AFMCC
from unalike.algorithms.apfl import APFL
from unalike.algorithms.cofed import CoFED
from unalike.algorithms.creamfl import CreamFL
from unalike.algorithms.depthfl import DepthFL
from unalike.algorithms.ditto import Ditto
from unalike.algorithms.fccl import FCCL
from unalike.algorithms.fd import FD
from unalike.algorithms.fedadagrad import FedAdagrad
from unalike.algorithms.fedadam import FedAdam
from unalike.algorithms.fedala import FedALA
from unalike.algorithms.fedamp import FedAMP
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fedavgft import FedAvgFT
from unalike.algorithms.fedavgm import FedAvgM
from unalike.algorithms.fedawa import FedAWA
from unalike.algorithms.fedbabu import FedBABU
from unalike.algorithms.fedbn import FedBN
from unalike.algorithms.feddf import FedDF
from unalike.algorithms.feddropout import FedDropout
from unalike.algorithms.feddse import FedDSE
from unalike.algorithms.feddualcoop import FedDualCoOp
from unalike.algorithms.feddyn import FedDyn
from unalike.algorithms.fedfomo import FedFomo
from unalike.algorithms.fedgen import FedGen
from unalike.algorithms.fedgh import FedGH
from unalike.algorithms.fedhenn import FedHeNN
from unalike.algorithms.fedkd import FedKD
from unalike.algorithms.fedl2g import FedL2G
from unalike.algorithms.fedlgt import FedLGT
from unalike.algorithms.fedmd import FedMD
from unalike.algorithms.fedmlp import FedMLP
from unalike.algorithms.fedmp import FedMP
from unalike.algorithms.fedmpt import FedMPT
from unalike.algorithms.fedmrl import FedMRL
from unalike.algorithms.fedmuscle import FedMuscle
from unalike.algorithms.fedmuscleplus import FedMusclePlus
from unalike.algorithms.fedmvp import FedMVP
from unalike.algorithms.fednca import FedNCA
from unalike.algorithms.fednova import FedNova
from unalike.algorithms.fedper import FedPer
from unalike.algorithms.fedpgp import FedPGP
from unalike.algorithms.fedproto import FedProto
from unalike.algorithms.fedprox import FedProx
from unalike.algorithms.fedram import FedRAM
from unalike.algorithms.fedrcl import FedRCL
from unalike.algorithms.fedrep import FedRep
from unalike.algorithms.fedrod import FedRoD
from unalike.algorithms.fedrolex import FedRolex
from unalike.algorithms.fedtgp import FedTGP
from unalike.algorithms.fedtpg import FedTPG
from unalike.algorithms.fedyogi import FedYogi
from unalike.algorithms.flexfl import FlexFL
from unalike.algorithms.fmcsc import FMCSC
from unalike.algorithms.fml import FML
from unalike.algorithms.heterofl import HeteroFL
from unalike.algorithms.hetlora import HetLoRA
from unalike.algorithms.ktpfl import KTpFL
from unalike.algorithms.lgfedavg import LGFedAvg
from unalike.algorithms.linearprobe import LinearProbe
from unalike.algorithms.local import Local
from unalike.algorithms.moon import MOON
from unalike.algorithms.perfedavg import PerFedAvg
from unalike.algorithms.pfedme import PFedMe
from unalike.algorithms.poscoop import PosCoOp
from unalike.algorithms.promptfl import PromptFL
from unalike.algorithms.pseudolabel import PseudoLabel
from unalike.algorithms.sage import SAGE
from unalike.algorithms.scaffold import Scaffold
from unalike.algorithms.scalefl import ScaleFL
from unalike.algorithms.simclr import SimCLR
from unalike.algorithms.subflot import SubFLOT
from unalike.algorithms.zeroshot import ZeroShot
from unalike.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbn": FedBN,
    "fedbabu": FedBABU,
    "lgfedavg": LGFedAvg,
    "fedavgft": FedAvgFT,
    "ditto": Ditto,
    "apfl": APFL,
    "pfedme": PFedMe,
    "perfedavg": PerFedAvg,
    "fedrod": FedRoD,
    "fedamp": FedAMP,
    "fedfomo": FedFomo,
    "fedala": FedALA,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "moon": MOON,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedawa": FedAWA,
    "fedproto": FedProto,
    "fedtgp": FedTGP,
    "fedgh": FedGH,
    "fd": FD,
    "fml": FML,
    "fedkd": FedKD,
    "fedgen": FedGen,
    "fedmrl": FedMRL,
    "fedl2g": FedL2G,
    "fedmp": FedMP,
    "adaptivefl": AdaptiveFL,
    "depthfl": DepthFL,
    "scalefl": ScaleFL,
    "fedmd": FedMD,
    "ktpfl": KTpFL,
    "fccl": FCCL,
    "hetlora": HetLoRA,
    "heterofl": HeteroFL,
    "fedrolex": FedRolex,
    "feddropout": FedDropout,
    "feddse": FedDSE,
    "flexfl": FlexFL,
    "subflot": SubFLOT,
    "fedmuscle": FedMuscle,
    "fedmuscleplus": FedMusclePlus,
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
    "fedmlp": FedMLP,
    "fedmpt": FedMPT,
    "promptfl": PromptFL,
    "feddualcoop": FedDualCoOp,
    "poscoop": PosCoOp,
    "fedtpg": FedTPG,
    "fedmvp": FedMVP,
    "fedram": FedRAM,
    "fedpgp": FedPGP,
    "fedlgt": FedLGT,
    "linearprobe": LinearProbe,
    "zeroshot": ZeroShot,
}
