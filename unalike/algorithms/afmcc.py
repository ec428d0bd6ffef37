"""AFMCC (asynchronous federated multi-modal constrained clustering): clients that own some of the modalities learn features to cluster.

A client is visited again and again and never waits for another: it gets a mixture of everyone's latest models, weighted for it, trains
on every subset of its modalities, and gives its model back. Reconstruction, a contrast with the fused feature and the class-correlation
constraint are what it minimises (eq. 7). What is measured is the mixture a client would get next.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.randomness import stream
from unalike.base.types import Parameters
from unalike.core.algorithm import Algorithm, ClientProgram, Embedded, State
from unalike.core.evaluation import score_federation
from unalike.core.federation import Ask, Federation, Replies
from unalike.core.operations import measurement, operation, query, sends, together
from unalike.core.signatures import Shape, tensor_spec
from unalike.data.modalities import MARK, modalities
from unalike.losses.clustering import class_correlation_loss, fusion_contrast, reconstruction
from unalike.models.autoencoder import Autoencoder, fuse
from unalike.models.model import Model
from unalike.tasks import Task
from unalike.training.batching import pad_and_mask
from unalike.training.cuda_graphs import RecordedSteps
from unalike.training.loop import Diverged
from unalike.training.stacked import Stack

Weight = Annotated[float, Field(ge=0)]
RECORDS = 4  # that a client keeps: which others it comes together with may vary


class Weighed(TypedDict):
    shares: Annotated[list[float], Shape("clients")]  # how much each model counts


class Visited(TypedDict):
    parameters: Parameters


class Chosen(Weighed, Visited):
    pass


@dataclass
class AFMCC(Algorithm):
    """alpha, beta, lambda and tau are the paper's for BDGP; `training.rounds` is the number of visits to each client.

    Its ablation: without A is alpha=0, without B is beta=0, without C is weights=uniform.
    """

    asynchronous: ClassVar[bool] = True
    requires_identical_models: ClassVar[bool] = True

    alpha: Weight = 0.01  # weight of the contrast
    beta: Weight = 0.01  # weight of the constraint
    flexibility: Annotated[float, Field(ge=0, le=1)] = 0.3  # lambda
    temperature: Annotated[float, Field(gt=0)] = 0.5  # tau
    steps: Annotated[int, Field(ge=1)] = 2  # gradient steps a visit for each subset of modalities
    pretraining: Annotated[int, Field(ge=0)] = (
        45  # gradient steps of the first client, before anyone else
    )
    error: Literal["feature", "sample"] = (
        "feature"  # reconstruction: mean or sum over a sample's features
    )
    weights: Literal["uniform", "far", "near"] = (
        "far"  # eq. 6 as printed: the farther a model's features, the more it counts
    )
    sharpness: Weight = 1.0  # of these weights; distances are taken relative to their mean
    exchange: Literal["encoders", "paper"] = (
        "encoders"  # what a client gets to find its weights by: encoders it can use, or all
    )
    rest: bool = True  # no: quick clients go on until the slowest has had its visits
    starts: Annotated[int, Field(ge=1)] = 100  # of k-means, when the server measures

    # the server

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.labelled

    def serve(self, fed: Federation) -> Iterator[int]:
        self.begin(fed)
        yield from fed.run_async(
            lambda client: self.invite(fed, client),
            lambda replies: self.take(fed, replies),
            self.rest,
        )

    def begin(self, fed: Federation) -> None:
        """One client with as many modalities as anyone has trains first; everybody starts where it ends."""
        if "models" in fed.state:
            return
        firsts = sorted(fed.infos, key=lambda c: -len(fed.infos[c].modalities))
        start = next(
            reply[c]
            for c in firsts
            if (reply := fed.call("pretrain", clients=[c], quorum=float(c == firsts[-1])))
        )
        count = len(fed.infos)
        fed.state |= {
            "models": {
                name: torch.stack([t] * count) for name, t in start.items()
            },  # (clients, ...) each
            "shares": torch.full((count, count), 1 / count, dtype=torch.float64),
        }

    def invite(self, fed: Federation, client: str) -> Ask:
        """What begins a visit: the models to find weights by; where all count the same, their mean."""
        models = fed.state["models"]
        if self.weights == "uniform":
            return "visit", {"parameters": self.mixtures(fed, [client])[client]}
        own = list(fed.infos).index(client)
        if self.exchange == "paper":
            return "choose", {"models": models, "own": own}
        usable = tuple(f"encoder.encoders.{name}." for name in fed.infos[client].modalities)
        return "weigh", {
            "models": {name: t for name, t in models.items() if name.startswith(usable)},
            "own": own,
        }

    def take(self, fed: Federation, replies: Replies) -> dict[str, Ask]:
        """Weights found: send the mixture. Trained: keep the model."""
        place = {client: i for i, client in enumerate(fed.infos)}
        known = tensor_spec({name: each[0] for name, each in fed.state["models"].items()})
        for client in [
            c
            for c, reply in replies.items()
            if "parameters" in reply and tensor_spec(reply["parameters"]) != known
        ]:
            fed.refuse(
                client, "visit", "its parameters have other names or shapes than the federation's"
            )
            del replies[client]
        for (
            client,
            reply,
        ) in replies.items():  # all of this instant first: they count for everyone's next message
            if "shares" in reply:
                fed.state["shares"][place[client]] = torch.tensor(
                    reply["shares"], dtype=torch.float64
                )
            for name, tensor in reply.get("parameters", {}).items():
                fed.state["models"][name][place[client]] = tensor
        weighed = [client for client, reply in replies.items() if "parameters" not in reply]
        return {
            client: ("visit", {"parameters": mixed})
            for client, mixed in self.mixtures(fed, weighed).items()
        }

    def mixtures(self, fed: Federation, clients: list[str]) -> dict[str, Parameters]:
        """Everyone's latest models, weighted for each of these clients (eq. 6)."""
        place = {client: i for i, client in enumerate(fed.infos)}
        shares = fed.state["shares"][[place[client] for client in clients]]
        mixed = {name: mix(shares, models) for name, models in fed.state["models"].items()}
        return {
            client: {name: tensor[i] for name, tensor in mixed.items()}
            for i, client in enumerate(clients)
        }

    def finish(self, fed: Federation) -> None:
        fed.call(
            "receive",
            clients=fed.clients,
            quorum=0,
            per_client={
                c: {"parameters": mixed} for c, mixed in self.mixtures(fed, fed.clients).items()
            },
        )

    def evaluate(self, fed: Federation) -> Replies:
        """Both protocols on the fused features of everyone; each client's share of the first one."""
        fed.log_figure(
            "aggregation weights",
            matrix=fed.state["shares"],
            rows=list(fed.infos),
            columns=list(fed.infos),
        )
        return score_federation(
            fed,
            fed.call(
                "appraise",
                clients=fed.clients,
                quorum=0,
                per_client={
                    c: {"parameters": mixed} for c, mixed in self.mixtures(fed, fed.clients).items()
                },
            ),
            starts=self.starts,
        )

    def privacy_problem(self) -> str | None:
        """Weights of eq. 6 are found on a client's own data, and would have to be told."""
        return (
            super().privacy_problem()
            if self.weights == "uniform"
            else (
                "weights made from private data would leave the clients; set algorithm.weights to uniform"
            )
        )

    # the client

    class Program(ClientProgram):
        algorithm: "AFMCC"
        transient = (
            False  # the model is the server's to keep, and comes again with the next message
        )

        def __init__(self, *about: Any):
            super().__init__(*about)
            self.recorded: dict[
                tuple, RecordedSteps | None
            ] = {}  # on a GPU: the steps of visits with these clients; None: seen once

        @operation
        @sends("parameters")
        def pretrain(self) -> Parameters:
            """Five steps on each fusion set in turn; fewer where they would not reach them all."""
            self.transient = True
            steps = self.algorithm.pretraining
            return descend(
                [self],
                [dict(self.model.state_dict())],
                steps,
                turns=min(5, max(1, steps // len(self.subsets()))),
            )[0]

        def blank_pretrain(self) -> Parameters:
            return dict(self.model.named_parameters())

        def blank_visit(self, parameters: Parameters) -> Visited:
            return {
                "parameters": {name: parameters[name] for name, _ in self.model.named_parameters()}
            }

        @query
        @together
        def weigh(
            programs: "list[AFMCC.Program]", models: list[Parameters], own: list[int]
        ) -> list[Weighed]:
            """How much each model counts here."""
            distances = deviations(programs, models, own)
            return [
                {"shares": program.shares(each)}
                for program, each in zip(programs, distances, strict=True)
            ]

        @operation
        def choose(self, models: Parameters, own: int) -> Chosen:
            """Weigh, mix and train: all models came."""
            shares = self.shares(deviations([self], [models], [own])[0])
            mixed = {
                name: mix(torch.tensor([shares], dtype=torch.float64), each)[0]
                for name, each in models.items()
            }
            return {
                "shares": shares,
                "parameters": AFMCC.Program.visit([self], [mixed])[0]["parameters"],
            }

        @operation
        @together
        @sends(parameters="parameters")
        def visit(programs: "list[AFMCC.Program]", parameters: list[Parameters]) -> list[Visited]:
            """Train from the mixture."""
            for program in programs:
                program.transient = True
            turns = programs[0].algorithm.steps
            return [
                {"parameters": after}
                for after in descend(
                    programs, parameters, turns * len(programs[0].subsets()), turns
                )
            ]

        @operation
        @together
        def train(programs: "list[AFMCC.Program]") -> list[None]:
            """A visit without the others."""
            first, how = programs[0], programs[0].algorithm
            steps = how.steps * len(first.subsets()) + (how.pretraining if first.round == 1 else 0)
            for program, after in zip(
                programs,
                descend(programs, [dict(s.model.state_dict()) for s in programs], steps, how.steps),
                strict=True,
            ):
                program.model.load_state_dict(after)
            return [None] * len(programs)

        @operation
        def receive(self, parameters: Parameters) -> None:
            self.model.load_state_dict(parameters)
            self.transient = False

        @query
        @measurement
        def appraise(self, parameters: Parameters) -> Embedded:
            """Fused features of given parameters, and the labels, for the server to cluster and score."""
            encoder = self.autoencoder
            own = {name: t.clone() for name, t in encoder.state_dict().items()}
            encoder.load_state_dict(
                {
                    k.removeprefix("encoder."): v
                    for k, v in parameters.items()
                    if k.startswith("encoder.")
                }
            )
            told = self.embed()
            encoder.load_state_dict(own)
            return told

        def state(self) -> State | None:
            return None if self.transient else super().state()

        def subsets(self) -> list[tuple[str, ...]]:
            names = self.client.info().modalities
            return [
                subset for size in range(1, len(names) + 1) for subset in combinations(names, size)
            ]

        def objective(self, subset: tuple[str, ...]) -> Callable[..., Tensor]:
            """Eq. 7 for one fusion set; every modality the client owns is rebuilt from it, also those outside. A sample counts where it
            has something of the fusion set and, in the terms of one modality, has that."""
            how = self.algorithm

            def loss(model: Model, x: dict[str, Tensor]) -> Tensor:
                encoder: Any = model.encoder
                codes = encoder.codes(x)
                h = fuse({name: codes[name] for name in subset}, x)
                seen = torch.stack([x[name + MARK] for name in subset]).amax(0)
                both = {name: seen * x[name + MARK] for name in codes}
                parts = [
                    reconstruction(
                        rows.flatten(1), encoder.decoders[name](h), how.error, both[name]
                    )
                    for name, rows in modalities(x).items()
                ]
                if how.alpha:
                    parts += [
                        how.alpha * fusion_contrast(h, z, how.temperature, both[name])
                        for name, z in codes.items()
                    ]
                if how.beta:
                    parts.append(
                        how.beta
                        * class_correlation_loss(model.head(h).softmax(-1), how.flexibility, seen)
                    )
                return torch.stack(parts).sum()

            return loss

        @property
        def autoencoder(self) -> Autoencoder:
            encoder = self.model.encoder
            assert isinstance(encoder, Autoencoder)  # the task made sure
            return encoder

        def shares(self, distance: Tensor) -> list[float]:
            """A softmax of how far each model's codes are, in units of the mean distance; as printed, eq. 6 overflows."""
            sign = 1 if self.algorithm.weights == "far" else -1
            return (
                (sign * self.algorithm.sharpness * distance / distance.mean().clamp_min(1e-12))
                .softmax(0)
                .tolist()
            )


def descend(
    programs: list[AFMCC.Program], parameters: list[Parameters], steps: int, turns: int
) -> list[Parameters]:
    """Gradient steps from these parameters with a fresh optimizer, `turns` of them on each fusion set in turn, over all rows of a
    client or batches of them."""
    first, subsets, batch = programs[0], programs[0].subsets(), programs[0].training.batch_size
    losses = [first.objective(subsets[at // turns % len(subsets)]) for at in range(steps)]
    first.model.train()
    for program in programs:
        program.work += steps * min(len(program.client.train), batch)
    if all(len(program.client.train) <= batch for program in programs):
        after, ends = whole(programs, parameters, losses, turns)
    else:
        stack, ends = Stack(first.model, parameters, first.training), torch.zeros(())
        draws = [
            stream(program.seed, "batches", program.client.id, program.round)
            for program in programs
        ]
        for loss in losses:
            picked = [
                torch.randperm(len(program.client.train), generator=draw)[:batch].to(
                    first.client.device
                )
                for program, draw in zip(programs, draws, strict=True)
            ]
            ends = stack.step(
                loss,
                padded(
                    [
                        {name: rows[few] for name, rows in program.rows().items()}
                        for program, few in zip(programs, picked, strict=True)
                    ]
                ),
            )
        after = stack.unstack()
    if not bool(
        ends.isfinite().all()
    ):  # one of several: they are asked again one by one, and it is named then
        raise Diverged(
            f"the training loss became {float(ends)}; look for NaN in the data of {first.client.id}, or lower training.lr"
        )
    return after


def whole(
    programs: list[AFMCC.Program], parameters: list[Parameters], losses: list[Callable], turns: int
) -> tuple[list[Parameters], Tensor]:
    """The steps on all rows. On a GPU they are recorded when the same clients come together a second time, and played from then on."""
    first, key = programs[0], (*(program.client.id for program in programs), len(losses), turns)
    if key in first.recorded and (recorded := first.recorded[key]) is not None:
        return recorded.replay(parameters)
    x = padded([program.rows() for program in programs])
    stack = Stack(first.model, parameters, first.training)
    if (
        key in first.recorded
        and sum(kept is not None for kept in first.recorded.values()) < RECORDS
    ):
        first.recorded[key] = recorded = RecordedSteps(stack, losses, x)
        return recorded.replay(parameters)
    if parameters[0] and next(iter(parameters[0].values())).is_cuda:
        first.recorded[key] = None
    ends = torch.zeros(())
    for loss in losses:
        ends = stack.step(loss, x)
    return stack.unstack(), ends


def deviations(programs: list[AFMCC.Program], models: list[Parameters], own: list[int]) -> Tensor:
    """(clients, models): how far the codes of each model lie from a client's fused features under its own model, mean over the
    client's modalities; of all clients and models at once."""
    x = padded([program.rows() for program in programs])
    mine = torch.tensor(own, device=next(iter(x.values())).device)
    codes = {}
    with torch.no_grad():
        for name, rows in modalities(x).items():
            encoder, prefix = programs[0].autoencoder.encoders[name], f"encoder.encoders.{name}."
            keys = [key for key in models[0] if key.startswith(prefix)]
            known = [
                {key.removeprefix(prefix): model[key].to(rows) for key in keys} for model in models
            ]
            each = torch.func.vmap(
                partial(torch.func.functional_call, encoder), (0, None)
            )  # all models on one client's rows
            if rows.is_cuda:
                stacked = {key: torch.stack([own[key] for own in known]) for key in known[0]}
                codes[name] = torch.func.vmap(each)(
                    stacked, rows.flatten(2)
                )  # (clients, models, rows, width)
            else:  # as quick, and no model is copied
                codes[name] = torch.stack(
                    [each(own, its) for own, its in zip(known, rows.flatten(2), strict=True)]
                )
        h = fuse(
            {
                name: z[torch.arange(len(programs), device=z.device), mine]
                for name, z in codes.items()
            },
            x,
        )  # (clients, rows, width)
        far = [
            ((z - h[:, None]) * x[name + MARK][:, None, :, None]).flatten(2).norm(dim=-1)
            for name, z in codes.items()
        ]
    for program in programs:
        program.work += len(program.client.train) * len(next(iter(models[0].values()))) / 3
    return torch.stack(far).mean(0).double().cpu()


def mix(shares: Tensor, models: Tensor) -> Tensor:
    """Weighted means (clients, ...) of models (models, ...) by shares (clients, models)."""
    return (shares.to(models) @ models.flatten(1)).reshape(len(shares), *models.shape[1:])


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Modalities and marks of several clients, filled up to the same number of rows: by the marks these have no modality at all."""
    return {name: pad_and_mask([each[name] for each in rows])[0] for name in rows[0]}
