"""Models with several exits: a client trains the first layers of a common model, as deep as it can.

The family of DepthFL and ScaleFL. After several layers of the encoder, evenly spread, a head
predicts from their output; the model's output is the mean of its exits. A client of capacity c
holds that share of the exits, the first ones, and the layers up to the last of these. The server
averages every tensor over the clients that have it.

A method derives from `EarlyExitMethod` and says what a client minimises, `exits_loss`.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.base.message import Value
from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.core.operations import query, sends
from unalike.core.program import ClientProgram
from unalike.methods.averaging import Averaging, AveragingProgram, mean_states, shape_hash
from unalike.models.model import Model
from unalike.tasks import Task
from unalike.training.loop import Positive


class ExitsReply(TypedDict):
    """A hash of the full model's names and shapes, and the names of those that the client has."""

    shape: str
    names: list[str]


class EarlyExits(Model):
    """An encoder with a head after several of its layers; its output is the mean of all exits."""

    def __init__(self, encoder: nn.Module, layers: list[str], heads: nn.ModuleList):
        super().__init__(encoder, nn.Identity(), heads)
        self.layers = tuple(layers)

    def exits(self, x: Tensor | dict) -> list[Tensor]:
        """Logits of every exit, the shallowest first."""
        heads: Any = self.head
        outputs = run_layers(self.encoder, self.layers, x)
        return [head(output) for head, output in zip(heads, outputs, strict=True)]

    def features(self, x: Tensor | dict) -> Tensor:
        """The input of the deepest head."""
        return run_layers(self.encoder, self.layers, x)[-1]

    def forward(self, x: Tensor | dict) -> Tensor:
        return torch.stack(self.exits(x)).mean(0)


def run_layers(encoder: nn.Module, names: tuple[str, ...], x: Tensor | dict) -> list[Tensor]:
    """Outputs of these layers of an encoder, (n, width) each: means over positions."""
    outputs: list[Tensor] = []
    hooks = [
        encoder.get_submodule(name).register_forward_hook(lambda layer, x, out: outputs.append(out))
        for name in names
    ]
    try:
        encoder(x)
    finally:
        for hook in hooks:
            hook.remove()
    return [pool(output) for output in outputs]


def pool(output: Tensor) -> Tensor:
    """(n, width) of a feature map (n, width, ...) or of tokens (n, tokens, width)."""
    if output.dim() == 3:
        return output.mean(1)
    return output.flatten(2).mean(2) if output.dim() > 3 else output


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) of logits (n, labels), mean over rows.

    >>> round(kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])).item(), 3)
    0.12
    """
    target = teacher.log_softmax(-1)
    return (target.exp() * (target - student.log_softmax(-1))).sum(-1).mean()


def exit_layers(encoder: nn.Module, exits: int) -> list[str]:
    """Names of layers to leave the encoder after, evenly spread, the last one included.

    They are children of the outermost module that has more than one, from the first on that learns.

    >>> exit_layers(nn.Sequential(nn.Flatten(), *[nn.Linear(2, 2) for _ in range(6)]), 3)
    ['2', '4', '6']
    """
    prefix, module = "", encoder
    children = list(module.named_children())
    while len(children) == 1:
        prefix, module = f"{prefix}{children[0][0]}.", children[0][1]
        children = list(module.named_children())
    learns = [any(True for _ in child.parameters()) for _, child in children]
    if True not in learns:
        raise UserError(f"{type(encoder).__name__} has no layers to leave it after")
    names = [name for name, _ in children[learns.index(True) :]]
    steps = sorted({ceil((i + 1) * len(names) / exits) - 1 for i in range(exits)})
    return [prefix + names[step] for step in steps]


def cut_after(encoder: nn.Module, layer: str) -> None:
    """Replace the layers behind this one by identities, in place."""
    parent, _, last = layer.rpartition(".")
    module = encoder.get_submodule(parent)
    names = [name for name, _ in module.named_children()]
    for name in names[names.index(last) + 1 :]:
        setattr(module, name, nn.Identity())


class EarlyExitProgram(AveragingProgram):
    """The client's half: holds the first exits, and trains all of them together."""

    algorithm: "EarlyExitMethod"
    model: EarlyExits

    def build(self, encoder: nn.Module) -> EarlyExits:
        """The client's part of the model; the initial full model is kept to be sent."""
        layers = exit_layers(encoder, self.algorithm.exits)
        x = self.example_input()
        was_training = encoder.training
        with torch.no_grad():
            widths = [output.shape[1] for output in run_layers(encoder.eval(), tuple(layers), x)]
        encoder.train(was_training)
        full = EarlyExits(encoder, layers, nn.ModuleList([self.head(width) for width in widths]))
        full.to(self.client.device, self.client.dtype)
        self.initial = {name: tensor.clone() for name, tensor in full.state_dict().items()}
        depth = max(1, ceil(self.client.capacity * len(layers) - 1e-9))
        cut_after(encoder, layers[depth - 1])
        heads: Any = full.head
        return EarlyExits(encoder, layers[:depth], heads[:depth])

    @query
    @sends("open")
    def shape(self) -> ExitsReply:  # type: ignore[override]
        """The full model's shape, and which part of it this client has."""
        return {"shape": shape_hash(self.initial), "names": list(self.model.state_dict())}

    @query
    @sends("first")
    def begin(self) -> Parameters:
        """The initial full model."""
        return self.initial

    def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        return self.algorithm.exits_loss(self, self.model.exits(x), y)


@dataclass
class EarlyExitMethod(Averaging):
    """Averages models of different depth.

    Args:
        exits: of the full model; fewer where it has fewer layers.
    """

    personalised: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True
    merges: ClassVar[bool] = False  # tensor by tensor, over unlike sets of clients
    Program: ClassVar[type[ClientProgram]] = EarlyExitProgram

    exits: Positive = 4

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.single_label and not task.dense

    def exits_loss(self, program: EarlyExitProgram, outputs: list[Tensor], y: Tensor) -> Tensor:
        """What a client minimises on a batch.

        Args:
            outputs: logits of its exits, the shallowest first, (n, labels) each.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss: write exits_loss")

    def group_key(self, fed: Federation, client: str, answer: ExitsReply) -> str:
        return super().group_key(fed, client, answer["shape"])

    def add_group(self, fed: Federation, key: str, answer: ExitsReply, initial: Parameters) -> bool:
        return super().add_group(fed, key, answer["shape"], initial)

    def add_member(self, fed: Federation, key: str, client: str, answer: ExitsReply) -> None:
        super().add_member(fed, key, client, answer)
        known = fed.state["models"][key]
        names = [name for name in answer["names"] if name in known]
        fed.state.setdefault("names", {})[client] = names

    def build_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        """What each client is sent: its part of the model of its group."""
        models, group, names = fed.state["models"], fed.state["group"], fed.state["names"]
        messages: dict[str, dict[str, Value]] = {}
        for client in clients:
            model = models[group[client]]
            messages[client] = {"parameters": {name: model[name] for name in names[client]}}
        return messages

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """The mean of every tensor over the clients that have it; others stay as they are."""
        model = fed.state["models"][group]
        for name in model:
            parts = {c: {name: state[name]} for c, state in states.items() if name in state}
            if parts:
                model |= mean_states(parts, weights)
