"""What clients compute with. Knows nothing of tasks, clients or methods."""

from unalike.models.autoencoder import Autoencoder
from unalike.models.encoders import CNN, ENCODERS, MLP, Transformer, build_encoder

__all__ = ["CNN", "ENCODERS", "MLP", "Autoencoder", "Transformer", "build_encoder"]
