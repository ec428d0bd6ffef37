"""OwnName: federated averaging with a proximal term and momentum at the server. Make it yours.

Try it:   unalike run digits --algorithm own_name:OwnName --set rounds=5
Python:   unalike.run(OwnName(mu=0.1), clients)
Install:  an entry point `own_name = "own_name:OwnName"` in the group `unalike.algorithms` of your
          pyproject.toml; then it is called own_name, and `unalike list` shows it.
"""

from dataclasses import dataclass

from torch import Tensor

import unalike

Parameters = dict[str, Tensor]


@dataclass
class OwnName(unalike.Averaging):
    """Averaging, with two changes: one in the client's loss, one in the server's step."""

    # Fields are the method's hyperparameters: `--set mu=0.1`, or `algorithm: {..., mu: 0.1}`.
    mu: float = 0.01
    momentum: float = 0.5

    # The server's half. `states` is what clients of one shape sent, `weights` their weights.
    def aggregate(
        self,
        fed: unalike.Federation,
        group: str,
        states: dict[str, Parameters],
        weights: dict[str, float],
    ) -> None:
        before = fed.state["models"][group]
        mean = self.average(states, weights)
        # Whatever the server must remember is in fed.state: it is saved after every round.
        velocities = fed.state.setdefault("velocities", {})
        velocity = velocities.get(group, {})
        model: Parameters = {}
        for name, tensor in mean.items():
            if not tensor.is_floating_point():  # counters of batch norm
                model[name] = tensor
                continue
            step = tensor - before[name]
            velocity[name] = step + self.momentum * velocity[name] if name in velocity else step
            model[name] = before[name] + velocity[name]
        velocities[group] = velocity
        fed.state["models"][group] = model

    # The client's half: what local training minimises on a batch.
    class Program(unalike.AveragingProgram):
        algorithm: "OwnName"

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            return super().loss(x, y) + self.algorithm.mu / 2 * self.squared_drift()
