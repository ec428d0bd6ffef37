"""FedKD: a small mentee is exchanged, and learns mutually with the client's own mentor.

Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature
Communications 2022, https://arxiv.org/abs/2108.13323.

On each client mentor and mentee learn the task, each other's predictions (eq. 1) and each other's
features through a linear map W (eq. 2); both distillation losses are divided by the sum of the task
losses, so that a poor teacher counts little. The mentee is averaged. Left out: compression of the
exchanged parameters by singular values, whose size depends on the data.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from unalike.base.randomness import scope
from unalike.methods.common_model import CommonModel, CommonModelProgram
from unalike.training.loop import Positive

MAP = "map"  # in a program's memory: W


@dataclass
class FedKD(CommonModel):
    """Adaptive mutual distillation of predictions and features.

    Args:
        width: of the mentee's features.
    """

    width: Positive = 64

    class Program(CommonModelProgram):
        algorithm: "FedKD"

        def train_round(self) -> float:
            mentee = self.encoder_width(self.exchanged.encoder)
            mentor = self.encoder_width(self.model.encoder)
            with scope(self.seed, MAP, self.client.id):
                self.map = nn.Linear(mentee, mentor, bias=False)
            self.map.to(self.client.device, self.client.dtype)
            if MAP in self.memory:
                self.map.load_state_dict(self.memory[MAP])
            loss = self.train_together(self.map)
            self.memory[MAP] = dict(self.map.state_dict())
            return loss

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Both task losses + distillation both ways over their sum."""
            task = self.client.task
            h, h_mentee = self.own.features(x), self.exchanged.features(x)
            mentor, mentee = self.own.head(h), self.exchanged.head(h_mentee)
            task_loss = self.error(mentor, y) + self.error(mentee, y)
            predictions = task.imitate(mentor, mentee.detach()) + task.imitate(
                mentee, mentor.detach()
            )
            features = ((h - self.map(h_mentee)) ** 2).mean()
            return task_loss + (predictions + 2 * features) / task_loss.detach()
