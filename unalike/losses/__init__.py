"""Losses on paired rows of representations. Know nothing of clients, models or rounds."""

from .clustering import class_correlation, class_correlation_loss, fusion_contrast, reconstruction
from .contrastive import gramian_loss, infonce, nt_xent, pairwise_loss
from .muscle import consistent_lower, information_bound, muscle_loss

__all__ = [
    "class_correlation", "class_correlation_loss", "consistent_lower", "fusion_contrast", "gramian_loss", "infonce", "information_bound",
    "muscle_loss", "nt_xent", "pairwise_loss", "reconstruction",
]
