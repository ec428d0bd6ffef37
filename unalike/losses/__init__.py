"""Losses on representations and on outputs. Know nothing of clients, models or rounds."""

from unalike.losses.anchored import anchored_loss
from unalike.losses.clustering import (
    class_correlation,
    class_correlation_loss,
    fusion_contrast,
    reconstruction,
)
from unalike.losses.collapse import collapse, prototype_contrast, rejection, simplex_etf
from unalike.losses.contrastive import gramian_loss, infonce, nt_xent, pairwise_loss
from unalike.losses.multilabel import asymmetric, binary_cross_entropy, focal, known_mean
from unalike.losses.muscle import consistent_lower, information_bound, muscle_loss
from unalike.losses.sampled import muscle_sampled
from unalike.losses.transport import importance, sinkhorn, transport

__all__ = [
    "anchored_loss",
    "asymmetric",
    "binary_cross_entropy",
    "class_correlation",
    "class_correlation_loss",
    "collapse",
    "consistent_lower",
    "focal",
    "fusion_contrast",
    "gramian_loss",
    "importance",
    "infonce",
    "information_bound",
    "known_mean",
    "muscle_loss",
    "muscle_sampled",
    "nt_xent",
    "pairwise_loss",
    "prototype_contrast",
    "reconstruction",
    "rejection",
    "simplex_etf",
    "sinkhorn",
    "transport",
]
