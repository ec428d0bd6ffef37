"""HetLoRA: federated LoRA among clients of unlike ranks.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", 2024, https://arxiv.org/abs/2402.11505.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", 2024,
https://arxiv.org/abs/2401.06432.

Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", 2024, https://arxiv.org/abs/2409.05976.

A client adapts frozen weights W by W + s B A with B (out, r) and A (r, in), and chooses its own
rank r. The server combines what clients learnt, weighted by samples, in one of three ways:

- `svd`: it forms the mean product sum_i w_i s_i B_i A_i and sends each client the best
  approximation of its rank, by singular value decomposition.
  FlexLoRA, Bai et al. 2024, eqs. 2 to 4
- `pad`: it pads B and A with zeros to the highest rank, averages them one by one, and sends each
  client the first r rows and columns.
  HetLoRA, Cho et al. 2024, sec. 3
- `stack`: it adds the mean product, which stacked factors give without error, to what all clients
  fold into their frozen weights; adapters start anew each round.
  FLoRA, Wang et al. 2024, eq. 6

All other parameters that learn (heads, statistics of batch norms) are averaged. Left out: the
pruning of ranks during training (HetLoRA, sec. 3.2) and its weighting by norms. With `stack` the
server sends the folded products whole, so that a client that missed rounds gets them as well.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.base.types import Parameters
from unalike.core.federation import Federation, Replies
from unalike.core.operations import measurement, operation, query, sends
from unalike.core.program import Embedding, State
from unalike.methods.averaging import (
    Averaging,
    AveragingProgram,
    Update,
    mean_states,
    shape_hash,
    short_hash,
)
from unalike.models.frozen import hash_frozen

A, B = ".lora_A.", ".lora_B."  # in the names of parameters
ROW_NORM = 3**-0.5  # of a row of A when LoRA starts: uniform in +-1 / sqrt(in)


class AdapterReply(TypedDict):
    """Names and shapes without ranks; ranks and scales (s = alpha / r) by the name of A."""

    shape: str
    ranks: dict[str, int]
    scales: dict[str, float]


class HetLoRAProgram(AveragingProgram):
    """The client's half: trains adapters of its own rank."""

    algorithm: "HetLoRA"

    @query
    @sends("open")
    def shape(self) -> AdapterReply:  # type: ignore[override]
        """What the server must know to send adapters of this client's ranks."""
        shared = self.shared()
        names = [name for name in shared if A in name]
        layers = {name: self.model.get_submodule(name.split(A)[0]) for name in names}
        return {
            "shape": " ".join([shape_hash(without_ranks(shared)), hash_frozen(self.model)]).strip(),
            "ranks": {name: len(shared[name]) for name in names},
            "scales": {
                name: float(layers[name].scaling[name.split(A)[1].split(".")[0]])  # type: ignore
                for name in names
            },
        }

    @operation
    def receive(self, parameters: Parameters, folded: Parameters | None = None) -> None:
        """Load shared parameters; rows of A that are zero keep this client's initial values."""
        self.fold(folded or {})
        super().receive(self.fill(parameters))

    @operation
    @sends(parameters="parameters", samples="open")
    def update(self, parameters: Parameters, folded: Parameters | None = None) -> Update:
        """Train the local epochs from these parameters."""
        self.fold(folded or {})
        return super().update(self.fill(parameters))

    @query
    @measurement
    def appraise(
        self, parameters: Parameters, common: bool, folded: Parameters | None = None
    ) -> dict[str, float] | Embedding:
        """Evaluate these parameters without keeping them."""
        before = self.memory.get("folded", {})
        self.fold(folded or {})
        try:
            return super().appraise(parameters, common)
        finally:
            self.fold(before)

    def fill(self, parameters: Parameters) -> Parameters:
        """Parameters with this client's initial rows where rows of A are zero.

        Both factors of a product would be zero there and could not learn.
        """
        filled = dict(parameters)
        initial = self.initial_factors()
        for name in initial:
            if name in filled:
                rows = filled[name]
                is_zero = ~rows.flatten(1).any(1).view(-1, *[1] * (rows.dim() - 1))
                filled[name] = torch.where(is_zero, initial[name].to(rows), rows)
        return filled

    def initial_factors(self) -> Parameters:
        """A of every layer as this client's seed makes it."""
        if not hasattr(self, "_initial"):
            state = self.fresh_copy().shared()
            self._initial = {name: t.clone() for name, t in state.items() if A in name}
        return self._initial

    def fold(self, folded: Parameters) -> None:
        """Make the frozen weights the original ones plus these products, in place."""
        before = self.memory.get("folded", {})
        if not hasattr(self, "_originals"):
            self._originals: Parameters = {}
        with torch.no_grad():
            for name in before.keys() | folded.keys():
                weight = self.base_weight(name)
                # from the original each time: sums of differences would depend on the order
                weight.copy_(self._originals.setdefault(name, weight.clone()))
                if name in folded:
                    weight.add_(self.oriented(name, folded[name], weight))
        if folded or before:
            self.memory["folded"] = dict(folded)

    def base_weight(self, name: str) -> Tensor:
        """The frozen weight that the adapter of that name adapts."""
        layer = self.model.get_submodule(name.split(A)[0])
        return layer.base_layer.weight  # type: ignore[union-attr, return-value]

    def oriented(self, name: str, product: Tensor, weight: Tensor) -> Tensor:
        """A product (out, ...) as the weight has it; GPT-2 has (in, out)."""
        product = product.to(weight)
        layer = self.model.get_submodule(name.split(A)[0])
        if getattr(layer, "fan_in_fan_out", False):
            product = product.T
        return product.reshape(weight.shape)

    def restore(self, state: State) -> None:
        """Take up a saved state, with what was folded into the frozen weights."""
        folded = state["memory"].get("folded", {})
        self.fold(folded)
        super().restore(state)


@dataclass
class HetLoRA(Averaging):
    """Averages adapters of unlike ranks; see the top of this file.

    Args:
        combine: how the server combines adapters of unlike ranks: best approximation of the mean
            product ("svd"), zero padding ("pad"), or the exact product ("stack").
    """

    merges: ClassVar[bool] = False  # products of adapters are combined, not averaged
    Program = HetLoRAProgram

    combine: Literal["svd", "pad", "stack"] = "svd"

    def group_key(self, fed: Federation, client: str, answer: AdapterReply) -> str:
        key = super().group_key(fed, client, answer["shape"])
        return f"{key} {short_hash(sorted(answer['ranks']))}" if answer["ranks"] else key

    def add_group(
        self, fed: Federation, key: str, answer: AdapterReply, initial: Parameters
    ) -> bool:
        announced = answer["shape"].split(" ")[0]
        if shape_hash(without_ranks(initial)) != announced:
            return False
        if any(len(initial[name]) != rank for name, rank in answer["ranks"].items()):
            return False
        model = dict(initial)
        for name, scale in answer["scales"].items():
            model[name.replace(A, B)] = model[name.replace(A, B)] * scale
        fed.state["models"][key] = model  # scales are included in B
        fed.state.setdefault("folded", {})[key] = {}
        return True

    def add_member(self, fed: Federation, key: str, client: str, answer: AdapterReply) -> None:
        super().add_member(fed, key, client, answer)
        fed.state.setdefault("ranks", {})[client] = answer["ranks"]
        fed.state.setdefault("scales", {})[client] = answer["scales"]

    def build_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        """To each client the parameters of its group, with adapters cut or padded to its ranks."""
        messages: dict[str, dict[str, Value]] = {}
        for client in clients:
            group = fed.state["group"][client]
            parameters = dict(fed.state["models"][group])
            for name, rank in fed.state["ranks"][client].items():
                scale = fed.state["scales"][client][name]
                other = name.replace(A, B)
                parameters[name] = resize(parameters[name], rank, axis=0)
                parameters[other] = resize(parameters[other], rank, axis=1) / scale
            messages[client] = {"parameters": parameters}
            if self.combine == "stack":
                messages[client]["folded"] = fed.state["folded"][group]
        return messages

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """Combine adapters by their products, and average everything else."""
        total = sum(weights[client] for client in states)
        shares = {client: weights[client] / total for client in states}
        previous = fed.state["models"][group]
        model = mean_states(
            {
                c: {n: t for n, t in s.items() if A not in n and B not in n}
                for c, s in states.items()
            },
            weights,
        )
        for name in previous:
            if A not in name:
                continue
            other = name.replace(A, B)
            factors = {}
            for client, state in states.items():
                scale = fed.state["scales"][client][name]
                factors[client] = state[name].double(), state[other].double() * scale
            ranks = [
                r[name] for c, r in fed.state["ranks"].items() if fed.state["group"][c] == group
            ]
            a, b = self.combine_factors(factors, shares, max(ranks))
            if self.combine == "stack":
                folded = fed.state["folded"][group]
                weighted = [shares[c] * multiply(*pair) for c, pair in factors.items()]
                product = torch.stack(weighted).sum(0)
                if name in folded:
                    product += folded[name].to(product)
                folded[name] = product.float()
            model[name] = a.to(previous[name].dtype)
            model[other] = b.to(previous[other].dtype)
        # in the order of before: names of messages are compared in order
        fed.state["models"][group] = {name: model[name] for name in previous}

    def combine_factors(
        self, factors: dict[str, tuple[Tensor, Tensor]], shares: dict[str, float], rank: int
    ) -> tuple[Tensor, Tensor]:
        """A and B of that rank, the scale included in B, from those of the clients."""
        if self.combine == "svd":
            return best_factors([(shares[c], a, b) for c, (a, b) in factors.items()], rank)
        keep = 0 if self.combine == "stack" else 1  # products are folded: adapters start anew
        a = sum(keep * shares[c] * resize(a, rank, axis=0) for c, (a, _) in factors.items())
        b = sum(keep * shares[c] * resize(b, rank, axis=1) for c, (_, b) in factors.items())
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        return a, b

    def evaluate_groups(self, fed: Federation, members: list[str]) -> Replies:
        """Metrics on the common test set; clients of one group differ in their ranks."""
        return self.ask_metrics(fed, members, common=True)


def without_ranks(parameters: Parameters) -> Parameters:
    """Parameters with adapters of rank 1: equal shapes for clients whose ranks alone differ."""
    cut = {}
    for name, tensor in parameters.items():
        if A in name:
            tensor = tensor[:1]
        elif B in name:
            tensor = tensor[:, :1]
        cut[name] = tensor
    return cut


def resize(factor: Tensor, rank: int, axis: int) -> Tensor:
    """The first rows (axis 0) or columns (axis 1) of a factor, with zeros where there are fewer."""
    have = factor.shape[axis]
    if have >= rank:
        return factor.narrow(axis, 0, rank)
    shape = list(factor.shape)
    shape[axis] = rank - have
    return torch.cat([factor, factor.new_zeros(shape)], axis)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The product B A, (out, in); of convolutions (out, in, height, width)."""
    return (b.flatten(1) @ a.flatten(1)).reshape(len(b), *a.shape[1:])


def best_factors(terms: list[tuple[float, Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """Factors of the best approximation of sum_i w_i B_i A_i of that rank.

    Args:
        terms: (w_i, A_i, B_i) with A_i (r_i, in, ...) and B_i (out, r_i, ...).
        rank: of the result.
    Returns: A (rank, in, ...), whose rows are orthogonal and as long as when LoRA starts, and
        B (out, rank, ...); components come by falling singular value.

    >>> a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [2.0]])
    >>> best = best_factors([(0.5, a, b), (0.5, a, b)], 1)
    >>> multiply(*best).abs().round(decimals=4).tolist()
    [[0.0, 0.0], [2.0, 0.0]]
    """
    a_shape, b_shape = terms[0][1].shape, terms[0][2].shape
    a = torch.cat([a.flatten(1) for _, a, _ in terms])  # (sum of ranks, in)
    b = torch.cat([w * b.flatten(1) for w, _, b in terms], 1)  # (out, sum of ranks)
    # B A = Q_b (R_b R_a^T) Q_a^T: only the small matrix in the middle is decomposed
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.T)
    u, s, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    best_a = resize(ROW_NORM * (q_a @ v.T).T, rank, axis=0)
    best_b = resize(q_b @ u * s / ROW_NORM, rank, axis=1)
    return best_a.reshape(rank, *a_shape[1:]), best_b.reshape(b_shape[0], rank, *b_shape[2:])
