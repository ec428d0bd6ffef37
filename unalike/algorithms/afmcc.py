"""AFMCC: asynchronous federated multi-modal constrained clustering.

"AFMCC: Asynchronous Federated Multi-modal Constrained Clustering", 2026,
https://openreview.net/forum?id=sJCs8mqPsY.

Clients own some of the modalities and no labels, and learn features to cluster. Every client is
visited again and again and never waits for another: it gets a mixture of all clients' latest
models, weighted for it (eq. 6), trains on every subset of its modalities, and returns its model.
It minimises a reconstruction error, a contrast with the fused feature and the class-correlation
constraint (eq. 7). What is evaluated is the mixture that a client would get next.

docs/afmcc.md says how we read what the paper leaves open, such as the weights of eq. 6, which
overflow as printed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.base.message import Value
from unalike.base.randomness import derive_seed, stream
from unalike.base.types import Parameters
from unalike.core.algorithm import Algorithm, Metrics
from unalike.core.evaluation import score_federation
from unalike.core.federation import Ask, Federation, Replies
from unalike.core.operations import measurement, operation, query, sends, together
from unalike.core.program import ClientProgram, Embedding, State
from unalike.core.signatures import Shape, tensor_spec
from unalike.data.modalities import MARK, modalities
from unalike.losses.clustering import class_correlation_loss, fusion_contrast, reconstruction
from unalike.models.autoencoder import Autoencoder, fuse
from unalike.models.model import Model
from unalike.tasks import Task
from unalike.tasks.federated_kmeans import federated_kmeans
from unalike.training.batching import pad_and_mask
from unalike.training.cuda_graphs import RecordedSteps
from unalike.training.loop import Diverged
from unalike.training.stacked import Stack

Share = Annotated[float, Field(ge=0, le=1)]
MAX_RECORDINGS = 4  # CUDA graphs that a client keeps, one for each set of clients trained together


class WeightsReply(TypedDict):
    """How much each client's model counts here; sums to 1."""

    shares: Annotated[list[float], Shape("clients")]


class VisitReply(TypedDict):
    """A client's model after a visit."""

    parameters: Parameters


class AgreementReply(TypedDict):
    """How far groups hold at a client, each 1 where they hold entirely; no label is needed."""

    own: float  # adjusted Rand index with k-means on the client's own features
    modalities: float  # share of samples that one modality alone puts into the same group, mean


class StabilityReply(AgreementReply):
    """The same, and how far groups hold from one measured visit to the next."""

    before: float  # adjusted Rand index with the groups measured before, 0 the first time


class ChooseReply(WeightsReply, VisitReply):
    """Both, where a visit is one message."""


@dataclass
class AFMCC(Algorithm):
    """alpha, beta, lambda and tau are the paper's for BDGP; `training.rounds` counts visits.

    Ablation: without A is alpha=0, without B is beta=0, without C is weights=uniform.

    Args:
        alpha: weight of the contrast, the paper's alpha.
        beta: weight of the class-correlation constraint, the paper's beta.
        flexibility: the paper's lambda in that constraint: 1 for tight clusters, 0 for none.
        constrain: the fusion sets under that constraint: "all", or only "fused" ones of two
            modalities or more, and only after pretraining.
        head_lr_scale: learning rate of W, which learns from the constraint alone, relative to that
            of all else.
        temperature: the paper's tau, of the contrast.
        contrast: what the fused feature of a fusion set is contrasted with: "all" modalities of the
            client, as printed, or "others" than the set's only one. With that one every positive
            pair is a row with itself, which can only push rows apart.
        steps: gradient steps of a visit for each subset of modalities.
        pretraining: gradient steps of the first client, before the others start.
        error: of the reconstruction: "feature" is the mean over features, "sample" their sum.
        weights: eq. 6: models whose features are "far" from the client's own count more, as
            printed, or "near" ones; or all the same ("uniform").
        sharpness: of the weights; distances are relative to their mean.
        reference: H of eq. 6: the client's fused features under its "own" model, or, for the weight
            of each model, under that one ("each").
        exchange: what a client gets to compute its weights: the "encoders" that it can use, or all
            parameters ("paper").
        rest: whether fast clients stop after their visits; False: until the slowest has had its
            visits they go on.
        starts: initialisations of k-means in the evaluation.
        keep: the models that clients get in the end: of the "last" visit, or the most "stable" ones
            of the visits that were measured (`federation.evaluations`), a rule without labels.
        log_stability: measure how far groups hold also where the last visit is kept.
        kmeans: how clients agree on centres (`federated_groups`): the "least" total distance of all
            clients' proposals, or the "first" client's, as in the paper.
        cluster_counts: numbers of clusters to compare by a rule without labels, where nobody knows
            how many there are: `metrics.stability_by_clusters` of the results. Training goes on
            with the number of the task.
    """

    asynchronous: ClassVar[bool] = True
    requires_identical_models: ClassVar[bool] = True

    alpha: NonNegativeFloat = 0.01
    beta: NonNegativeFloat = 0.01
    flexibility: Share = 0.3
    constrain: Literal["all", "fused"] = "all"
    head_lr_scale: PositiveFloat = 1.0
    temperature: PositiveFloat = 0.5
    contrast: Literal["all", "others"] = "all"
    steps: Annotated[int, Field(ge=1)] = 2
    pretraining: NonNegativeInt = 45
    error: Literal["feature", "sample"] = "feature"
    weights: Literal["uniform", "far", "near"] = "far"
    sharpness: NonNegativeFloat = 1.0
    reference: Literal["own", "each"] = "own"
    exchange: Literal["encoders", "paper"] = "encoders"
    rest: bool = True
    starts: Annotated[int, Field(ge=1)] = 100
    keep: Literal["last", "stable"] = "last"
    log_stability: bool = False
    kmeans: Literal["least", "first"] = "least"
    cluster_counts: tuple[Annotated[int, Field(ge=2)], ...] = ()

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.labelled

    # The server. Its state: `models`, all clients' latest parameters stacked (clients, ...), and
    # `shares` (clients, clients), whose row i are the weights of all models for client i.

    def serve(self, fed: Federation) -> Iterator[int]:
        if "models" not in fed.state:
            initial = self.pretrain_one(fed)
            count = len(fed.infos)
            fed.state["models"] = {
                name: torch.stack([tensor] * count) for name, tensor in initial.items()
            }
            fed.state["shares"] = torch.full((count, count), 1 / count, dtype=torch.float64)
        yield from fed.run_async(
            lambda client: self.start_visit(fed, client),
            lambda replies: self.handle_replies(fed, replies),
            self.rest,
        )

    def pretrain_one(self, fed: Federation) -> Parameters:
        """Have a client with the most modalities train first; all others start from its model.

        If it fails, the next one is asked.
        """
        order = sorted(fed.infos, key=lambda c: -len(fed.infos[c].modalities))
        for client in order:
            is_last = client == order[-1]
            replies = fed.call("pretrain", clients=[client], quorum=1.0 if is_last else 0.0)
            if client in replies:
                return replies[client]
        raise RuntimeError("expected one client that can pretrain, all failed")

    def start_visit(self, fed: Federation, client: str) -> Ask:
        """The first message of a visit: models to compute weights with, or the uniform mixture."""
        models = fed.state["models"]
        if self.weights == "uniform":
            return "visit", {"parameters": self.mixtures(fed, [client])[client]}
        own = list(fed.infos).index(client)
        if self.exchange == "paper":
            return "choose", {"models": models, "own": own}
        usable = tuple(f"encoder.encoders.{name}." for name in fed.infos[client].modalities)
        encoders = {name: t for name, t in models.items() if name.startswith(usable)}
        return "weigh", {"models": encoders, "own": own}

    def handle_replies(self, fed: Federation, replies: Replies) -> dict[str, Ask]:
        """Store weights and trained models; send the mixture to clients that sent weights only."""
        self.refuse_other_models(fed, replies)
        position = {client: i for i, client in enumerate(fed.infos)}
        # All replies of this instant are stored before any mixture is computed.
        for client, reply in replies.items():
            i = position[client]
            if "shares" in reply:
                fed.state["shares"][i] = torch.tensor(reply["shares"], dtype=torch.float64)
            for name, tensor in reply.get("parameters", {}).items():
                fed.state["models"][name][i] = tensor
        waiting = [client for client, reply in replies.items() if "parameters" not in reply]
        mixtures = self.mixtures(fed, waiting)
        return {client: ("visit", {"parameters": mixtures[client]}) for client in mixtures}

    def refuse_other_models(self, fed: Federation, replies: Replies) -> None:
        """Drop replies whose parameters are not those of the federation's model."""
        expected = tensor_spec({name: stack[0] for name, stack in fed.state["models"].items()})
        for client in list(replies):
            reply = replies[client]
            if "parameters" in reply and tensor_spec(reply["parameters"]) != expected:
                reason = "its parameters have other names or shapes than the federation's"
                fed.refuse(client, "visit", reason)
                del replies[client]

    def mixtures(self, fed: Federation, clients: list[str]) -> dict[str, Parameters]:
        """All clients' latest models, mixed with the weights of each of these clients (eq. 6)."""
        order = list(fed.infos)
        shares = fed.state["shares"][[order.index(client) for client in clients]]
        mixed = {name: mix(shares, models) for name, models in fed.state["models"].items()}
        mixtures = {}
        for i, client in enumerate(clients):
            mixtures[client] = {name: tensor[i] for name, tensor in mixed.items()}
        return mixtures

    def mixture_messages(self, fed: Federation) -> dict[str, dict[str, Value]]:
        """A message with its mixture for every client."""
        mixtures = self.mixtures(fed, fed.clients)
        return {client: {"parameters": mixtures[client]} for client in mixtures}

    def finish(self, fed: Federation) -> None:
        """Give every client its final mixture."""
        if self.keep == "stable" and "at the end" not in fed.scratch:
            with fed.measured():
                self.evaluate(fed)  # the last visit competes, too
            kept = fed.state.get("stable")
            if kept is not None:
                fed.state["models"], fed.state["shares"] = kept["models"], kept["shares"]
        fed.scratch["at the end"] = True
        messages = self.mixture_messages(fed)
        fed.call("receive", clients=fed.clients, quorum=0, per_client=messages)

    def evaluate(self, fed: Federation) -> Replies:
        """Cluster the fused features of all clients and score them; log what acts on them."""
        names = list(fed.infos)
        fed.log_figure("aggregation weights", matrix=fed.state["shares"], rows=names, columns=names)
        messages = self.mixture_messages(fed)
        features = fed.call("appraise", clients=fed.clients, quorum=0, per_client=messages)
        self.log_constraint(fed, messages, features)
        self.log_weights(fed)
        scores = score_federation(fed, features, starts=self.starts, protocol=self.kmeans)
        ended = "at the end" in fed.scratch
        if self.log_stability or (self.keep == "stable" and not ended):
            self.measure_stability(fed, messages)
        if self.cluster_counts and ended:
            self.compare_cluster_counts(fed, messages, features)
        return scores

    def measure_stability(self, fed: Federation, messages: dict[str, dict[str, Value]]) -> None:
        """Log how far groups hold; keep the most stable of the measured models if asked.

        Where training goes on too long groups first stop to hold: between clients, between
        modalities and from visit to visit. Nothing is done where features do not reach the server.
        """
        centres = fed.scratch.get("centres", {})
        asked = {c: messages[c] | {"centres": centres[c]} for c in messages if c in centres}
        if not asked:
            return
        replies = fed.call("stability", clients=list(asked), quorum=0, per_client=asked)
        own, across = agreements(fed, replies)
        score = stability_score(own, across, mean_of(reply["before"] for reply in replies.values()))
        fed.log_metrics("stability", dict.fromkeys(replies, score))
        if self.keep == "last":
            return
        if "stable" not in fed.state or score > fed.state["stable"]["score"]:
            models = {name: stack.clone() for name, stack in fed.state["models"].items()}
            shares = fed.state["shares"].clone()
            fed.state["stable"] = {"score": score, "models": models, "shares": shares}

    def compare_cluster_counts(
        self, fed: Federation, messages: dict[str, dict[str, Value]], replies: Replies
    ) -> None:
        """Score numbers of clusters by how far their groups hold; no label is needed.

        Nothing is done where features do not reach the server.
        """
        features = {c: reply["features"] for c, reply in replies.items() if "features" in reply}
        rows = [normalize(own.double(), dim=-1) for own in features.values()]
        seed = derive_seed(fed.seed, "k-means")
        scores = {}
        for count in self.cluster_counts:
            if all(len(own) < count for own in rows):
                continue
            _, centres = federated_kmeans(rows, count, seed, self.starts)
            asked = {c: messages[c] | {"centres": centres} for c in features}
            answers = fed.call("agreement", clients=list(asked), quorum=0, per_client=asked)
            scores[str(count)] = stability_score(*agreements(fed, answers), 1.0)
        if scores:
            fed.state["stability by clusters"] = scores

    def figures(self, fed: Federation, metrics: Metrics) -> dict[str, Any]:
        """The scores of the clustering, and the stability of other numbers of clusters."""
        figures = super().figures(fed, metrics)
        if "stability by clusters" in fed.state:
            figures["stability_by_clusters"] = dict(fed.state["stability by clusters"])
        return figures

    def log_constraint(
        self, fed: Federation, messages: Mapping[str, Any], replies: Replies
    ) -> None:
        """Log L_c and the mean largest p of eq. 4, where features reach the server.

        A constraint without effect has p near 1/K and L_c near lambda^2 (K - 1).
        """
        losses: dict[str, float | None] = {}
        largest: dict[str, float | None] = {}
        for client, reply in replies.items():
            W = messages[client]["parameters"]["head.weight"].cpu()
            features = reply.get("features")
            if features is not None and features.shape[1] == W.shape[1]:
                p = (features.to(W) @ W.mT).softmax(-1)
                losses[client] = float(class_correlation_loss(p, self.flexibility))
                largest[client] = float(p.amax(-1).mean())
        fed.log_metrics("class-correlation loss", losses)
        fed.log_metrics("largest class probability", largest)

    def log_weights(self, fed: Federation) -> None:
        """Log the entropy of each client's weights of eq. 6: 1 where all models count the same."""
        shares = fed.state["shares"]
        entropy = torch.special.entr(shares).sum(1) / math.log(max(2, len(shares)))
        fed.log_metrics("entropy of weights", dict(zip(fed.infos, entropy.tolist(), strict=True)))

    def privacy_problem(self) -> str | None:
        """Weights of eq. 6 are computed from a client's data and would have to be sent."""
        if self.keep == "stable" or self.log_stability or self.cluster_counts:
            return (
                "how far groups hold would leave the clients, which nothing protects; set "
                "algorithm.keep to last, and leave out log_stability and cluster_counts"
            )
        if self.weights == "uniform":
            return super().privacy_problem()
        return (
            "weights made from private data would leave the clients; "
            "set algorithm.weights to uniform"
        )

    class Program(ClientProgram):
        """The client's half. Operations marked `together` handle several clients in one batch."""

        algorithm: "AFMCC"
        # True: the next message brings a model, so the present one need not be saved here.
        transient = False

        def __init__(self, *args: Any):
            super().__init__(*args)
            # On a GPU: recorded steps by the clients that train together; None: met once so far.
            self.recordings: dict[tuple, RecordedSteps | None] = {}

        @operation
        @sends("parameters")
        def pretrain(self) -> Parameters:
            """Train on the subsets of modalities in turn: five steps each, fewer if there are not
            enough steps to reach all subsets."""
            self.transient = True
            steps = self.algorithm.pretraining
            steps_per_subset = min(5, max(1, steps // len(self.subsets())))
            before = dict(self.model.state_dict())
            return descend([self], [before], steps, steps_per_subset, pretraining=True)[0]

        def blank_pretrain(self) -> Parameters:
            """A reply without content, sent by a client with privacy whose training failed."""
            return dict(self.model.named_parameters())

        def blank_visit(self, parameters: Parameters) -> VisitReply:
            """A reply without content, sent by a client with privacy whose training failed."""
            names = [name for name, _ in self.model.named_parameters()]
            return {"parameters": {name: parameters[name] for name in names}}

        @query
        @together
        def weigh(
            programs: "list[AFMCC.Program]", models: list[Parameters], own: list[int]
        ) -> list[WeightsReply]:
            """Compute how much each model counts here.

            Args:
                models: for each client, all clients' encoders, stacked (clients, ...).
                own: for each client, the position of its own model in them.
            """
            distances = feature_distances(programs, models, own)
            replies: list[WeightsReply] = []
            for program, distance in zip(programs, distances, strict=True):
                replies.append({"shares": program.shares(distance)})
            return replies

        @operation
        def choose(self, models: Parameters, own: int) -> ChooseReply:
            """Compute weights, mix and train, all in one message."""
            shares = self.shares(feature_distances([self], [models], [own])[0])
            row = torch.tensor([shares], dtype=torch.float64)
            mixture = {name: mix(row, stack)[0] for name, stack in models.items()}
            parameters = AFMCC.Program.visit([self], [mixture])[0]["parameters"]
            return {"shares": shares, "parameters": parameters}

        @operation
        @together
        @sends(parameters="parameters")
        def visit(
            programs: "list[AFMCC.Program]", parameters: list[Parameters]
        ) -> list[VisitReply]:
            """Train from the mixture."""
            for program in programs:
                program.transient = True
            first = programs[0]
            steps_per_subset = first.algorithm.steps
            steps = steps_per_subset * len(first.subsets())
            trained = descend(programs, parameters, steps, steps_per_subset)
            return [{"parameters": state} for state in trained]

        @operation
        @together
        def train(programs: "list[AFMCC.Program]") -> list[None]:
            """A visit without the other clients' models (local baseline)."""
            first = programs[0]
            method = first.algorithm
            steps = method.steps * len(first.subsets())
            if first.round == 1:
                steps += method.pretraining
            before = [dict(program.model.state_dict()) for program in programs]
            trained = descend(programs, before, steps, method.steps)
            for program, state in zip(programs, trained, strict=True):
                program.model.load_state_dict(state)
            return [None] * len(programs)

        @operation
        def receive(self, parameters: Parameters) -> None:
            """Keep these parameters as the final ones."""
            self.model.load_state_dict(parameters)
            self.transient = False

        @query
        @measurement
        def appraise(self, parameters: Parameters) -> Embedding | dict[str, float]:
            """Fused features under these parameters, and labels, for the server to score.

            A client of another organisation scores itself and answers metrics.
            """
            encoder = self.autoencoder
            own = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
            prefix = "encoder."
            state = {
                name.removeprefix(prefix): tensor
                for name, tensor in parameters.items()
                if name.startswith(prefix)
            }
            encoder.load_state_dict(state)
            reply = self.client.task.evaluation_reply(self)
            encoder.load_state_dict(own)
            return reply

        @query
        @measurement
        def stability(self, parameters: Parameters, centres: Tensor) -> StabilityReply:
            """How far the groups around these centres (clusters, width) hold here."""
            groups, agreement = self.agree(parameters, centres)
            before = self.memory.get("groups")
            held = 0.0 if before is None else adjusted_rand_index(before, groups)
            self.memory["groups"] = groups
            return {**agreement, "before": held}

        @query
        @measurement
        def agreement(self, parameters: Parameters, centres: Tensor) -> AgreementReply:
            """How far the groups around these centres (clusters, width) hold here now."""
            return self.agree(parameters, centres)[1]

        def agree(self, parameters: Parameters, centres: Tensor) -> tuple[Tensor, AgreementReply]:
            """The groups (n,) around these centres, and how far they hold."""
            encoder = self.autoencoder
            task: Any = self.client.task
            x = self.all_inputs()
            own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            self.model.load_state_dict(parameters)
            with torch.no_grad():
                codes = encoder.codes(x)
                features = fuse(codes, x)
            self.model.load_state_dict(own)
            groups = nearest(features, centres)
            shares = []
            for name, z in codes.items():
                present = x[name + MARK] > 0
                shares.append(float((nearest(z, centres) == groups)[present].double().mean()))
            clusters = min(len(centres), len(features))
            alone, _ = task.cluster(features, self.seed, clusters)
            agreement: AgreementReply = {
                "own": adjusted_rand_index(alone, groups.cpu()),
                "modalities": mean_of(shares),
            }
            return groups.cpu(), agreement

        def state(self) -> State | None:
            return None if self.transient else super().state()

        def subsets(self) -> list[tuple[str, ...]]:
            """All nonempty subsets of the client's modalities, the smallest first."""
            names = self.client.info().modalities
            subsets: list[tuple[str, ...]] = []
            for size in range(1, len(names) + 1):
                subsets += combinations(names, size)
            return subsets

        def objective(
            self, subset: tuple[str, ...], pretraining: bool = False
        ) -> Callable[..., Tensor]:
            """The loss of eq. 7 for one fusion set, as a function of model and samples.

            Every modality of the client is reconstructed from the fused feature, also those
            outside the subset. A sample counts if it has a modality of the subset and, in the
            terms of a single modality, that one.
            """
            method = self.algorithm
            constrained = method.constrain == "all" or (len(subset) > 1 and not pretraining)
            # the only modality of the set, if it is no contrast to itself
            alone = subset[0] if method.contrast == "others" and len(subset) == 1 else None

            def loss(model: Model, x: dict[str, Tensor]) -> Tensor:
                encoder: Any = model.encoder
                codes = encoder.codes(x)  # z, by modality (n, width)
                h = fuse({name: codes[name] for name in subset}, x)  # (n, width)
                has_subset = torch.stack([x[name + MARK] for name in subset]).amax(0)
                has_both = {name: has_subset * x[name + MARK] for name in codes}
                terms = []
                for name, rows in modalities(x).items():
                    rebuilt = encoder.decoders[name](h)
                    terms.append(
                        reconstruction(rows.flatten(1), rebuilt, method.error, has_both[name])
                    )
                if method.alpha:
                    for name in codes:
                        if name != alone:
                            contrast = fusion_contrast(
                                h, codes[name], method.temperature, has_both[name]
                            )
                            terms.append(method.alpha * contrast)
                if method.beta and constrained:
                    classes = model.head(h).softmax(-1)
                    constraint = class_correlation_loss(classes, method.flexibility, has_subset)
                    terms.append(method.beta * constraint)
                return torch.stack(terms).sum()

            return loss

        @property
        def autoencoder(self) -> Autoencoder:
            encoder = self.model.encoder
            assert isinstance(encoder, Autoencoder)  # the task ensures it
            return encoder

        def shares(self, distance: Tensor) -> list[float]:
            """Weights of models from the distances (models,) of their features, summing to 1.

            eq. 6 as a softmax of distances relative to their mean: as printed it overflows.
            """
            method = self.algorithm
            sign = 1 if method.weights == "far" else -1
            relative = sign * method.sharpness * distance / distance.mean().clamp_min(1e-12)
            return relative.softmax(0).tolist()


def stability_score(own: float, modalities: float, before: float) -> float:
    """One number of three agreements; see `StabilityReply`.

    The exponent was chosen on seed 100 of four datasets (docs/afmcc.md).

    >>> stability_score(0.5, 1.0, 1.0)
    0.5
    """
    return max(0.0, own) * max(0.0, modalities * before) ** 4


def agreements(fed: Federation, replies: Replies) -> tuple[float, float]:
    """Means over clients: `own` of all, `modalities` of those that have several."""
    several = [client for client in replies if len(fed.infos[client].modalities) > 1]
    own = mean_of(reply["own"] for reply in replies.values())
    return own, mean_of(replies[client]["modalities"] for client in several)


def adjusted_rand_index(groups: Tensor, others: Tensor) -> float:
    """Agreement of two groupings (n,): 1 where they are the same, 0 by chance."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(groups, others))


def mean_of(values: Iterable[float]) -> float:
    """The mean; 1 of no values."""
    collected = list(values)
    return sum(collected) / len(collected) if collected else 1.0


def nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """The nearest centre (n,) of each row (n, width), rows scaled to length 1."""
    return torch.cdist(normalize(rows.double(), dim=-1), centres.to(rows.device).double()).argmin(
        -1
    )


def descend(
    programs: list[AFMCC.Program],
    parameters: list[Parameters],
    steps: int,
    steps_per_subset: int,
    pretraining: bool = False,
) -> list[Parameters]:
    """Gradient steps of several clients at once, with a fresh optimizer.

    A client with more samples than a batch draws a new batch for every step.

    Args:
        programs: clients with the same model and modalities.
        parameters: where each client starts.
        steps: number of steps.
        steps_per_subset: steps on a subset of modalities before the next subset's turn.
        pretraining: whether these are the first client's steps before all others.
    Returns: each client's parameters after the steps.
    Raises: Diverged if a loss is not finite; with several clients the runtime then runs them one
        by one, so that the message names the right one.
    """
    first = programs[0]
    subsets = first.subsets()
    batch_size = first.training.batch_size
    losses = []
    for step in range(steps):
        subset = subsets[step // steps_per_subset % len(subsets)]
        losses.append(first.objective(subset, pretraining))
    first.model.train()
    for program in programs:
        program.work += steps * min(len(program.client.train), batch_size)
    if all(len(program.client.train) <= batch_size for program in programs):
        after, last_losses = descend_full_batch(programs, parameters, losses, steps_per_subset)
    else:
        after, last_losses = descend_batches(programs, parameters, losses)
    diverged = last_losses[~last_losses.isfinite()]
    if len(diverged):
        raise Diverged(
            f"the training loss became {float(diverged[0])}; look for NaN in the data of "
            f"{first.client.id}, or lower training.lr"
        )
    return after


def descend_batches(
    programs: list[AFMCC.Program], parameters: list[Parameters], losses: list[Callable]
) -> tuple[list[Parameters], Tensor]:
    """Gradient steps on random batches; returns parameters and the last losses."""
    first = programs[0]
    stack = Stack(first.model, parameters, first.training, learning_rate(first), lr_scales(first))
    generators = [
        stream(program.seed, "batches", program.client.id, program.round) for program in programs
    ]
    last_losses = torch.zeros(())
    for loss in losses:
        batches = []
        for program, generator in zip(programs, generators, strict=True):
            order = torch.randperm(len(program.client.train), generator=generator)
            index = order[: first.training.batch_size].to(first.client.device)
            batches.append({name: rows[index] for name, rows in program.all_inputs().items()})
        last_losses = stack.step(loss, pad_rows(batches))
    return stack.unstack(), last_losses


def descend_full_batch(
    programs: list[AFMCC.Program],
    parameters: list[Parameters],
    losses: list[Callable],
    steps_per_subset: int,
) -> tuple[list[Parameters], Tensor]:
    """Gradient steps on all samples; returns parameters and the last losses.

    On a GPU the steps are recorded as a CUDA graph when the same clients train together a second
    time, and replayed from then on.
    """
    first = programs[0]
    lr = learning_rate(first)
    key = (*(program.client.id for program in programs), len(losses), steps_per_subset, lr)
    recording = first.recordings.get(key)
    if recording is not None:
        return recording.replay(parameters)
    x = pad_rows([program.all_inputs() for program in programs])
    stack = Stack(first.model, parameters, first.training, lr, lr_scales(first))
    recorded = sum(recording is not None for recording in first.recordings.values())
    if key in first.recordings and recorded < MAX_RECORDINGS:
        recording = RecordedSteps(stack, losses, x)
        first.recordings[key] = recording
        return recording.replay(parameters)
    if parameters[0] and next(iter(parameters[0].values())).is_cuda:
        first.recordings[key] = None
    last_losses = torch.zeros(())
    for loss in losses:
        last_losses = stack.step(loss, x)
    return stack.unstack(), last_losses


def learning_rate(program: AFMCC.Program) -> float:
    """The learning rate of the client's present round, by the schedule."""
    return program.training.lr * program.training.lr_factor(program.round)


def lr_scales(program: AFMCC.Program) -> dict[str, float]:
    """The rate of W, the model's head, relative to the others' (`Stack`)."""
    scale = program.algorithm.head_lr_scale
    return {} if scale == 1 else {"head.": scale}


def feature_distances(
    programs: list[AFMCC.Program], models: list[Parameters], own: list[int]
) -> Tensor:
    """Distances of all models' features from each client's own fused features H (eq. 6).

    Args:
        programs: clients with the same modalities.
        models: for each client, all clients' encoders, stacked (models, ...).
        own: for each client, the position of its own model.
    Returns: ||Z - H||, mean over the client's modalities, (clients, models) in float64.
    """
    x = pad_rows([program.all_inputs() for program in programs])
    device = next(iter(x.values())).device
    client = torch.arange(len(programs), device=device)
    own_model = torch.tensor(own, device=device)
    with torch.no_grad():
        codes = {}  # Z, by modality (clients, models, rows, width)
        for name, rows in modalities(x).items():
            encoder = programs[0].autoencoder.encoders[name]
            prefix = f"encoder.encoders.{name}."
            codes[name] = encode_all(encoder, [take_prefix(m, prefix, rows) for m in models], rows)
        if programs[0].algorithm.reference == "each":
            masks = {name + MARK: x[name + MARK][:, None] for name in codes}
            h = fuse(codes, masks)  # H, (clients, models, rows, width)
        else:
            own_codes = {name: z[client, own_model] for name, z in codes.items()}
            h = fuse(own_codes, x)[:, None]  # (clients, 1, rows, width)
        distances = []
        for name, z in codes.items():
            has_modality = x[name + MARK][:, None, :, None]
            distances.append(((z - h) * has_modality).flatten(2).norm(dim=-1))
    for program in programs:
        # A forward pass counts a third of a training step.
        program.work += len(program.client.train) * len(next(iter(models[0].values()))) / 3
    return torch.stack(distances).mean(0).double().cpu()


def encode_all(encoder: nn.Module, states: list[Parameters], rows: Tensor) -> Tensor:
    """Codes (clients, models, rows, width) of clients' rows (clients, rows, ...) by all models.

    Args:
        states: for each client, parameters of the encoder in all models, stacked (models, ...).
    """
    all_models = torch.func.vmap(partial(torch.func.functional_call, encoder), (0, None))
    rows = rows.flatten(2)
    if rows.is_cuda:
        stacked = {}
        for name in states[0]:
            stacked[name] = torch.stack([state[name] for state in states])
        return torch.func.vmap(all_models)(stacked, rows)
    # On a CPU as fast, and no model is copied.
    return torch.stack([all_models(state, own) for state, own in zip(states, rows, strict=True)])


def take_prefix(parameters: Parameters, prefix: str, like: Tensor) -> Parameters:
    """Parameters whose name has a prefix, without it, in the device and dtype of a tensor."""
    return {
        name.removeprefix(prefix): tensor.to(like)
        for name, tensor in parameters.items()
        if name.startswith(prefix)
    }


def mix(shares: Tensor, models: Tensor) -> Tensor:
    """Weighted means (clients, ...) of models (models, ...) by shares (clients, models)."""
    return (shares.to(models) @ models.flatten(1)).reshape(len(shares), *models.shape[1:])


def pad_rows(inputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Inputs of several clients, padded to one number of rows and stacked (clients, rows, ...).

    Padded rows have no modality, by their masks, and count nowhere.
    """
    padded = {}
    for name in inputs[0]:
        padded[name], _ = pad_and_mask([rows[name] for rows in inputs])
    return padded
