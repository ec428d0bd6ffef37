"""AFMCC (asynchronous federated multi-modal constrained clustering): clients that own some of the modalities learn features to cluster.

A client is visited again and again and never waits for another: it gets a mixture of everyone's latest models, weighted for it, trains
on every subset of its modalities, and gives its model back. Reconstruction, a contrast with the fused feature and the class-correlation
constraint are what it minimises (eq. 7). What is measured is the mixture a client would get next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unalike.algorithm import Algorithm, ClientSide, operation, question
from unalike.federation import Federation, Messages, Replies, mean_states
from unalike.losses.clustering import class_correlation_loss, fusion_contrast, reconstruction
from unalike.message import Value
from unalike.models.autoencoder import Autoencoder, fuse, modalities
from unalike.models.model import Model
from unalike.randomness import number, stream
from unalike.tasks.clustering import clustering_scores, federated_groups, kmeans
from unalike.training import step

Parameters = dict[str, Tensor]


@dataclass
class AFMCC(Algorithm):
    """alpha, beta, lambda and tau are the paper's for BDGP; `training.rounds` is the number of visits to each client."""

    evaluates: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("clustering",)

    alpha: float = 0.01                                           # weight of the contrast
    beta: float = 0.01                                            # weight of the constraint
    flexibility: float = 0.3                                      # lambda
    temperature: float = 0.5                                      # tau
    steps: int = 2                                                # gradient steps a visit for each subset of modalities
    pretraining: int = 45                                         # gradient steps of the first client, before anyone else
    error: Literal["feature", "sample"] = "feature"               # reconstruction: mean or sum over a sample's features
    weights: Literal["uniform", "far", "near"] = "far"            # eq. 6 as printed: the farther a model's features, the more it counts
    sharpness: float = 1.0                                        # of these weights; distances are taken relative to their mean
    exchange: Literal["encoders", "paper"] = "encoders"           # what a client gets to find its weights by: encoders it can use, or all
    starts: int = 100                                             # of k-means, when measuring

    # the server

    def serve(self, fed: Federation) -> Iterator[int]:
        self.begin(fed)
        for instant in fed.drive("visit", lambda client: self.invite(fed, client), lambda replies: self.answer(fed, replies)):
            done = sum(fed.state["visits"].values())
            if done >= fed.state["measured"] + len(fed.cards) * max(1, fed.training.rounds // fed.terms.evaluations):
                fed.state["measured"] = done
                self.record(fed, done // len(fed.cards))
            yield instant

    def begin(self, fed: Federation) -> None:
        """One client with as many modalities as anyone has trains first; everybody starts where it ends."""
        if "models" in fed.state:
            return
        first = max(fed.cards, key=lambda c: len(fed.cards[c].modalities))
        start = fed.call("pretrain", clients=[first], quorum=1.0)[first]
        fed.state |= {"models": {c: start for c in fed.cards}, "visits": {c: 0 for c in fed.cards}, "measured": 0,
                      "shares": {c: [1 / len(fed.cards)] * len(fed.cards) for c in fed.cards}}

    def invite(self, fed: Federation, client: str) -> dict[str, Value]:
        """The first message of a visit."""
        models = fed.state["models"]
        if self.weights == "uniform":
            return {"parameters": self.mixture(fed, client)}
        if self.exchange == "paper":
            return {"models": models}
        own = tuple(f"encoder.encoders.{name}." for name in fed.cards[client].modalities)
        return {"encoders": {c: {name: t for name, t in model.items() if name.startswith(own)} for c, model in models.items()}}

    def answer(self, fed: Federation, replies: Replies) -> Messages:
        """Weights found: send the mixture. Trained: keep the model, and invite again unless that was the last visit."""
        for client, reply in replies.items():           # all of this instant first: they count for everyone's next message
            if "shares" in reply:
                fed.state["shares"][client] = reply["shares"]
            if "parameters" in reply:
                fed.state["models"][client] = reply["parameters"]
                fed.state["visits"][client] += 1
        trained = [client for client, reply in replies.items() if "parameters" in reply]
        again = {c: self.invite(fed, c) for c in trained if fed.state["visits"][c] < fed.training.rounds}
        return again | {c: {"parameters": self.mixture(fed, c)} for c in replies if c not in trained}

    def mixture(self, fed: Federation, client: str) -> Parameters:
        """Everyone's latest models, weighted for this client (eq. 6)."""
        return mean_states(fed.state["models"], dict(zip(fed.cards, fed.state["shares"][client], strict=True)))

    def finish(self, fed: Federation) -> None:
        for client in fed.everyone:
            fed.call("receive", clients=[client], quorum=0, parameters=self.mixture(fed, client))

    def evaluate(self, fed: Federation) -> Replies:
        """Both protocols on the fused features of everyone; each client's share of the first one."""
        told: dict[str, Any] = {}
        for client in fed.everyone:
            told |= fed.call("evaluate", clients=[client], quorum=0, parameters=self.mixture(fed, client))
        features, labels = [t["features"] for t in told.values()], [t["y"] for t in told.values()]
        clusters = len(next(iter(fed.cards.values())).labels)
        groups, joint = federated_groups(features, clusters, number(fed.seed, "k-means"), self.starts)
        y = torch.cat(labels)
        fed.state["scores"] = {**clustering_scores(torch.cat(groups), y), "joint": clustering_scores(joint, y)}
        return Replies({client: clustering_scores(own, t["y"]) for (client, t), own in zip(told.items(), groups, strict=True)})

    def record(self, fed: Federation, visits: int) -> None:
        values = self.evaluate(fed)
        fed.record("evaluation", round=visits, when="end", who="together", values=dict(values), scores=fed.state["scores"])

    def figures(self, fed: Federation, metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
        return dict(fed.state["scores"])

    # the client

    class Side(ClientSide):
        algorithm: "AFMCC"

        def build(self, encoder: nn.Module) -> Model:
            if not isinstance(encoder, Autoencoder):
                raise ValueError(f"AFMCC needs the model autoencoder, got {type(encoder).__name__}")
            return Model(encoder, nn.Identity(), self.head(encoder.width))

        @operation
        def pretrain(self) -> Value:
            self.train_on_subsets(self.algorithm.pretraining, turns=5)
            return dict(self.model.state_dict())

        @operation
        def visit(self, parameters: Parameters | None = None, encoders: dict | None = None, models: dict | None = None) -> Value:
            """Find weights, or take the mixture and train; both at once where all models came."""
            known = models or encoders
            shares = self.shares(known) if known else None
            if models and shares:
                parameters = mean_states(models, dict(zip(models, shares, strict=True)))
            if parameters is None:
                return {"shares": shares}
            self.receive(parameters)
            self.train_on_subsets(self.algorithm.steps * len(self.subsets()), turns=self.algorithm.steps)
            return {"parameters": dict(self.model.state_dict()), **({"shares": shares} if shares else {})}

        @operation
        def train(self) -> Value:
            """A visit without the others."""
            turns = self.algorithm.steps * len(self.subsets())
            return self.train_on_subsets(turns + (self.algorithm.pretraining if self.round == 1 else 0), turns=self.algorithm.steps)

        @operation
        def receive(self, parameters: Parameters) -> None:
            self.model.load_state_dict(parameters)

        @question
        def evaluate(self, common: bool = False, parameters: Parameters | None = None) -> Value:
            """Fused features of given parameters, for the server to cluster; without any, how well the client clusters by itself."""
            own = {name: t.clone() for name, t in self.model.state_dict().items()}
            self.model.load_state_dict(parameters or own)
            h, y = self.fused()
            self.model.load_state_dict(own)
            if parameters is not None:
                return {"features": h, "y": y}
            clusters = len(self.client.task.labels)
            groups, _ = kmeans(nn.functional.normalize(h, dim=-1), clusters, number(self.seed, "k-means"), self.algorithm.starts)
            return clustering_scores(groups, y)

        def fused(self) -> tuple[Tensor, Tensor]:
            x, y = self.client.train.labelled(torch.arange(len(self.client.train)))
            with torch.no_grad():
                return self.model.features(self.client.place(x)).cpu(), y

        def subsets(self) -> list[tuple[str, ...]]:
            names = self.client.card().modalities
            return [subset for size in range(1, len(names) + 1) for subset in combinations(names, size)]

        def train_on_subsets(self, steps: int, turns: int) -> float:
            """Gradient steps with a fresh Adam, `turns` of them on each fusion set in turn, over whole batches of the client's samples."""
            optimiser, subsets, data = self.optimiser(fresh=True), self.subsets(), self.client.train
            self.memory["trained"] = self.memory.get("trained", 0) + 1
            draws = stream(self.seed, "batches", self.client.id, self.memory["trained"])
            self.model.train()
            loss = torch.zeros(())
            for at in range(steps):
                rows = torch.randperm(len(data), generator=draws)[:self.training.batch]
                loss = self.objective(self.client.place(data.rows(rows)[0]), subsets[at // turns % len(subsets)])
                step(loss, optimiser, self.training.clip)
                self.work += len(rows)
            return float(loss.detach())

        def objective(self, given: dict[str, Tensor] | Tensor, subset: tuple[str, ...]) -> Tensor:
            """Eq. 7 for one fusion set; every modality the client owns is rebuilt from it, also those outside."""
            how, x, encoder = self.algorithm, modalities(given), self.autoencoder
            codes = encoder.codes(x)
            h = fuse([codes[name] for name in subset])
            parts = [reconstruction(rows.flatten(1), encoder.decoders[name](h), how.error) for name, rows in x.items()]
            if how.alpha:
                parts += [how.alpha * fusion_contrast(h, z, how.temperature) for z in codes.values()]
            if how.beta:
                parts.append(how.beta * class_correlation_loss(self.model.head(h).softmax(-1), how.flexibility))
            return torch.stack(parts).sum()

        @property
        def autoencoder(self) -> Autoencoder:
            encoder = self.model.encoder
            assert isinstance(encoder, Autoencoder)      # build() made sure
            return encoder

        def shares(self, models: dict[str, Parameters]) -> list[float]:
            """How much each model counts here: a softmax of how far its codes are from this client's fused features, in units of the
            mean distance; as printed, eq. 6 overflows."""
            x, _ = self.client.train.rows(torch.arange(len(self.client.train)))
            x, encoder = modalities(self.client.place(x)), self.autoencoder
            own = {name: t.clone() for name, t in encoder.state_dict().items()}
            with torch.no_grad():
                h, far = encoder(x), []
                for model in models.values():
                    known = {k.removeprefix("encoder."): v for k, v in model.items() if k.startswith("encoder.encoders.")}
                    encoder.load_state_dict(known, strict=False)
                    far.append(torch.stack([(z - h).norm() for z in encoder.codes(x).values()]).mean())
            encoder.load_state_dict(own)
            self.work += len(self.client.train) * len(models) / 3
            distance = torch.stack(far)
            sign = 1 if self.algorithm.weights == "far" else -1
            return (sign * self.algorithm.sharpness * distance / distance.mean().clamp_min(1e-12)).softmax(0).tolist()
