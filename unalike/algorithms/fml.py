"""FML: a small common model and the client's own teach each other.

Shen et al., "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765.

The common "meme" model is averaged; on a client it and the client's own, of any architecture, are
trained together (deep mutual learning): own loss alpha CE + (1 - alpha) KL to the meme model's
prediction (eq. 4), meme loss beta CE + (1 - beta) KL to the own one's (eq. 5). The meme model is a
small CNN for images, an MLP for other inputs. Nothing is left out.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from unalike.methods.common_model import CommonModel, CommonModelProgram
from unalike.training.loop import Positive

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass
class FML(CommonModel):
    """Mutual learning with a common model.

    Args:
        alpha: weight of the labels for the client's own model; the rest is the other's predictions.
        beta: the same for the common model.
        width: of the common model's features.
    """

    alpha: Share = 0.5
    beta: Share = 0.5
    width: Positive = 64

    class Program(CommonModelProgram):
        algorithm: "FML"

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Both losses; each model's prediction is fixed where it teaches the other."""
            task, method = self.client.task, self.algorithm
            own, common = self.own(x), self.exchanged(x)
            taught = task.imitate(own, common.detach())
            teaching = task.imitate(common, own.detach())
            own_loss = method.alpha * self.error(own, y) + (1 - method.alpha) * taught
            return own_loss + method.beta * self.error(common, y) + (1 - method.beta) * teaching
