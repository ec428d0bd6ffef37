"""ScaleFL: submodels with early exits, whose shallow exits learn from the deepest one.

Ilhan, Su and Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients",
CVPR 2023, https://openaccess.thecvf.com/content/CVPR2023/html/Ilhan_ScaleFL_Resource-Adaptive_Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.html

A client with n exits minimises sum_j j (CE_j + gamma T^2 KL_T(exit n || exit j)) / (n (n + 1) / 2)
(eq. 5 and 6), the distillation from a quarter of the rounds on. The server averages every tensor
over the clients that have it. Left out: the paper also narrows layers; here models differ in depth
alone, and the mean of the exits predicts.
"""

from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from unalike.methods.early_exits import EarlyExitMethod, EarlyExitProgram, kl

FIRST_SHARE = 0.25  # of the rounds, without distillation


@dataclass
class ScaleFL(EarlyExitMethod):
    """Deeper exits count more, and teach.

    Args:
        gamma: weight of the distillation from the deepest exit.
        temperature: T, of the distillation.
    """

    gamma: NonNegativeFloat = 0.05
    temperature: PositiveFloat = 3.0

    def exits_loss(self, program: EarlyExitProgram, outputs: list[Tensor], y: Tensor) -> Tensor:
        distils = program.round > FIRST_SHARE * program.training.rounds
        t, last, total = self.temperature, outputs[-1].detach(), y.new_zeros(()).to(outputs[0])
        for number, output in enumerate(outputs, 1):
            cost = program.error(output, y)
            if distils:
                cost = cost + self.gamma * t**2 * kl(last / t, output / t)
            total = total + number * cost
        return total / (len(outputs) * (len(outputs) + 1) / 2)
