"""Which methods go through real engines: all of them take minutes, so without UNALIKE_FAULTS those that stand for the rest."""

import os

from unalike.algorithms import ALGORITHMS

REAL = tuple(ALGORITHMS) if os.environ.get("UNALIKE_FAULTS") else ("fedmuscle", "afmcc", "fedavg", "subflot", "creamfl")
