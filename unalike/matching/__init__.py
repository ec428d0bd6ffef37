"""Matching the neurons of two networks by optimal transport.

Used by SubFLOT to carry parameters between models whose neurons are in another order, or of
another number. Knows tensors and channel groups, no clients.
"""

from unalike.matching.solvers import entropic_plans, exact_plan, solve_plans
from unalike.matching.transport import Matcher

__all__ = ["Matcher", "entropic_plans", "exact_plan", "solve_plans"]
