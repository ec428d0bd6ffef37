"""Which neuron of one network is which of another, by optimal transport. Knows tensors and widths, nothing of clients."""

from unalike.matching.solvers import entropic, exact, plans
from unalike.matching.transport import Matcher

__all__ = ["Matcher", "entropic", "exact", "plans"]
