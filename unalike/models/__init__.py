"""Encoders and the model around them. Knows nothing of clients or methods.

To add an encoder: a file with a module that maps (n, *shape) to (n, width), and a line in
`registry.ENCODERS`.
"""

from unalike.models.autoencoder import Autoencoder
from unalike.models.encoders import CNN, MLP, Transformer
from unalike.models.registry import ENCODERS, build_encoder

__all__ = ["CNN", "ENCODERS", "MLP", "Autoencoder", "Transformer", "build_encoder"]
