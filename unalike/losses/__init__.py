"""Losses on paired rows of representations. Know nothing of clients, models or rounds."""

from .contrastive import gramian_loss, infonce, pairwise_loss
from .muscle import consistent_lower, information_bound, muscle_loss

__all__ = ["consistent_lower", "gramian_loss", "infonce", "information_bound", "muscle_loss", "pairwise_loss"]
