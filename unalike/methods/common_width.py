"""Features of one width for clients with different models: what lies behind can be shared."""

from typing import Any

from torch import nn

from unalike.core.program import ClientProgram
from unalike.models.model import Model


class CommonWidthProgram(ClientProgram):
    """Adds a linear projection from the encoder to the `width` of the method, where they differ."""

    algorithm: Any

    def build(self, encoder: nn.Module) -> Model:
        task = self.client.task
        task.check_encoder(encoder, self.client.info().modalities)
        width = self.algorithm.width
        own = self.encoder_width(encoder)
        projection = nn.Identity() if own == width else nn.Linear(own, width)
        return Model(encoder, projection, self.build_head(width), task.dense)

    def build_head(self, width: int) -> nn.Module:
        """The head on features of the common width; by default the task's."""
        return self.head(width)
