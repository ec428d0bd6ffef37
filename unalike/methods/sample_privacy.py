"""Differential privacy of single samples: a client trains by DP-SGD, and sends its model as it is.

Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1,
https://arxiv.org/abs/1607.00133. In a step every sample takes part with the same probability, the
gradient of each is clipped by itself, and noise is added to their sum. Whatever is made of the
model afterwards, at the server too, protects each sample in the same way; no server is trusted.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map
from typing_extensions import TypedDict

from unalike.base.errors import Refusal
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.privacy import Privacy, accounting
from unalike.training.loop import Training, apply_gradients

if TYPE_CHECKING:
    from unalike.core.program import ClientProgram

ROWS_AT_ONCE = 64  # whose gradients are in memory together
Gradients = dict[str, Tensor]  # of trainable parameters, by name


class SamplePrivacy(TypedDict):
    """`sample:` of an averaging method; a dictionary, since it is sent with the method's fields.

    Fields:
        clip: L2 norm that the gradient of each sample is clipped to.
        noise: standard deviation of the noise on their sum, in multiples of `clip`.
        delta: of (epsilon, delta); 1e-5 by default.
        entropy: where samples and noise are drawn from, as in `Privacy`; `seed` by default.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    clip: Annotated[float, Field(gt=0)]
    noise: Annotated[float, Field(gt=0)]
    delta: NotRequired[Annotated[float, Field(gt=0, lt=1)]]
    entropy: NotRequired[Literal["seed", "secret"]]


class _Loss(nn.Module):
    """The loss of a program as a module, so that functional_call can exchange its parameters."""

    def __init__(self, program: "ClientProgram"):
        super().__init__()
        self.model = program.model
        self.program = program

    def forward(self, x: Any, y: Tensor) -> Tensor:
        return self.program.loss(x, y)


def train_privately(
    program: "ClientProgram", settings: SamplePrivacy, optimizer: torch.optim.Optimizer
) -> None:
    """Train this round's local epochs by DP-SGD.

    Each step divides the noised sum by the batch size, which is the mean number of samples drawn.

    Raises: Refusal for a model or a task of which a sample is not trained by itself.
    """
    check_trainable(program)
    rows = len(program.client.train)
    privacy = Privacy(
        noise=settings["noise"], bound=settings["clip"], entropy=settings.get("entropy", "seed")
    )
    draw = privacy.draws(program.seed, program.client.id, "samples", program.round)
    batch_size = min(program.training.batch_size, rows)
    program.work += rows * program.training.epochs
    program.model.train()
    for _ in range(steps_per_round(rows, program.training)):
        # the normal distribution function makes uniform numbers of normal ones
        drawn = torch.special.ndtr(draw(torch.Size([rows]))) < batch_size / rows
        total = sum_clipped_gradients(program, drawn.nonzero().flatten(), privacy.bound)
        for name, parameter in program.model.named_parameters():
            if parameter.requires_grad:
                noise = privacy.noise * privacy.bound * draw(parameter.shape)
                mean = (total[name] + noise.to(parameter.device)) / batch_size
                parameter.grad = mean.to(parameter.dtype)
        apply_gradients(optimizer, program.training.max_grad_norm)


def check_trainable(program: "ClientProgram") -> None:
    """Raise Refusal where what one sample does to the model is not bounded by its gradient."""
    problem = client_sample_problem(program.client, program.model)
    if problem is not None:
        raise Refusal(f"sample: {problem}")


def client_sample_problem(client: Client, model: nn.Module | None = None) -> str | None:
    """Why the samples of a client cannot be protected one by one; None: they can.

    Args:
        model: what is trained; default: the client's encoder.
    """
    model = model if model is not None else client.encoder(0)
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return (
            "batch normalisation mixes samples, and its statistics have no noise: use group norm "
            "or layer norm"
        )
    if client.task.fitted_to_labels:
        return "class_weights: balanced depend on all samples: give numbers"
    return None


def sum_clipped_gradients(program: "ClientProgram", index: Tensor, clip: float) -> Gradients:
    """Sum over these rows of the gradient of each, clipped to an L2 norm; float64.

    A gradient that is not finite counts as zero: NaN would tell of its sample.
    """
    trainable = {n: p for n, p in program.model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
    for part in index.split(ROWS_AT_ONCE):
        if not len(part):
            continue
        for gradients in row_gradients(program, trainable, part):
            squares = [g.double().flatten(1).square().sum(1) for g in gradients.values()]
            norms = torch.stack(squares).sum(0).sqrt()
            factors = (clip / norms.clamp(min=clip)).nan_to_num(0.0, posinf=0.0)
            for name, gradient in gradients.items():
                finite = gradient.double().nan_to_num(0.0, posinf=0.0, neginf=0.0)
                total[name] += torch.tensordot(factors, finite, dims=1)
    return total


def row_gradients(
    program: "ClientProgram", trainable: dict[str, nn.Parameter], index: Tensor
) -> Iterator[Gradients]:
    """Gradients (n, ...) of the loss of every row by itself, all at once or one after another."""
    x, y = map(program.client.to_device, program.training_batch(index))
    loss = _Loss(program)

    def loss_of_row(parameters: Gradients, x: Any, y: Tensor) -> Tensor:
        named = {f"model.{name}": p for name, p in parameters.items()}
        row = tree_map(lambda tensor: tensor[None], (x, y))
        return torch.func.functional_call(loss, named, row)

    parameters = {name: p.detach() for name, p in trainable.items()}
    gradient = torch.func.grad(loss_of_row)
    try:
        yield torch.func.vmap(gradient, in_dims=(None, 0, 0), randomness="different")(
            parameters, x, y
        )
        return
    except RuntimeError:  # vmap does not know an operation of the model
        pass
    for row in range(len(index)):
        one_x, one_y = tree_map(lambda tensor, row=row: tensor[row], (x, y))
        one = gradient(parameters, one_x, one_y)
        yield {name: g[None] for name, g in one.items()}


def steps_per_round(rows: int, training: Training) -> int:
    """Steps that a client with so many samples takes in a round."""
    return training.epochs * math.ceil(rows / training.batch_size)


def sample_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon of so many steps of DP-SGD between data sets that differ by one sample more or less.

    Renyi divergences of the Gaussian mechanism on a Poisson sample (Mironov et al. 2019,
    https://arxiv.org/abs/1908.10530), an upper bound.

    Args:
        noise: standard deviation of the noise, in multiples of the clipping norm.
        rate: probability with which a sample takes part in a step.

    >>> sample_epsilon(1.0, 0.01, 0, 1e-5)
    0.0
    """
    if not steps:
        return 0.0
    dp = accounting()
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
    accountant.compose(step, steps)
    return float(accountant.get_epsilon(delta))


def count_updates(fed: Federation, clients: Iterable[str]) -> None:
    """Count a round's training for the clients that are asked for it, answered or not."""
    counts = fed.state.setdefault("trained", {})
    for client in clients:
        counts[client] = counts.get(client, 0) + 1


def sample_results(settings: SamplePrivacy, fed: Federation) -> dict[str, dict[str, Any]]:
    """What training cost the samples of each client: epsilon, delta, releases (steps)."""
    delta = settings.get("delta", 1e-5)
    costs = {}
    for client in fed.infos:
        rows = fed.infos[client].samples
        rounds = fed.state.get("trained", {}).get(client, 0)
        steps = rounds * steps_per_round(rows, fed.training)
        rate = min(fed.training.batch_size, rows) / rows
        value = sample_epsilon(settings["noise"], rate, steps, delta)
        costs[client] = {"epsilon": value, "delta": delta, "releases": steps}
    return costs
