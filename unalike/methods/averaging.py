"""Federated averaging: the loop of all methods that send parameters, train and average.

McMahan et al. 2017, Algorithm 1, https://arxiv.org/abs/1602.05629. In a round the server sends the
shared parameters to every active client, each client trains its local epochs from there with a
fresh optimizer, and the weighted mean of what comes back becomes the shared parameters.

Clients may have different models: those whose shared parameters have the same names and shapes
form a group, and parameters are averaged within groups only. A method derives from `Averaging`
and `AveragingProgram` and overrides what differs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.message import Value
from unalike.base.module_tree import state_of
from unalike.base.types import Parameters
from unalike.core.algorithm import Algorithm, Sharing
from unalike.core.client import Client
from unalike.core.client_stack import ClientStack
from unalike.core.evaluation import score_federation
from unalike.core.federation import Federation, Replies
from unalike.core.operations import (
    list_operations,
    measurement,
    operation,
    query,
    sends,
    stacked,
)
from unalike.core.privacy import accounting_problem
from unalike.core.program import ClientProgram, Embedding, State
from unalike.core.signatures import Shape
from unalike.methods.central_privacy import (
    CentralPrivacy,
    central_results,
    count_round,
    noisy_mean,
    privacy_settings,
)
from unalike.methods.label_thresholds import best_thresholds, count_hits, shift_outputs
from unalike.methods.robust import (
    Rule,
    Upload,
    cap_weights,
    drop_outliers,
    merge_robustly,
    remember_merge,
    undo_merge,
)
from unalike.methods.sample_privacy import (
    SamplePrivacy,
    client_sample_problem,
    count_updates,
    sample_results,
    train_privately,
)
from unalike.methods.sharing import connect_clients
from unalike.models.frozen import hash_frozen
from unalike.models.model import load_tensors
from unalike.tasks import Task
from unalike.training.batching import batches

LabelMask = Annotated[Tensor, Shape("labels")]  # 1 for a label that the client has samples of


class Update(TypedDict):
    """A client's reply after local training."""

    parameters: Parameters
    samples: int
    loss: float


# What `AveragingProgram.update_stack` does at once for several clients.
UPDATE_PARTS = (
    "receive",
    "remember_first",
    "train_round",
    "learn",
    "shared",
    "optimizer",
    "samples",
    "training_batch",
)
FIRST = "first"  # in a program's memory, with the safeguard: the first message with parameters


class FinetuneProgram(ClientProgram):
    """Can train own epochs on top of the model that it got last."""

    algorithm: "Averaging"

    def remember_first(self, parameters: Parameters, **more: Any) -> None:
        """With the safeguard: keep where the client began, to train alone from there."""
        if self.client.held_out is not None and FIRST not in self.memory:
            copies = {name: tensor.clone() for name, tensor in parameters.items()}
            self.memory[FIRST] = {"parameters": copies, **more}

    @operation
    @sends()
    def finetune(self) -> None:
        """Train `finetune` epochs on the own task, with other orders of rows than any round."""
        first = self.training.epochs
        epochs = range(first, first + self.algorithm.finetune)
        self.learn(epochs, self.optimizer(fresh=True), self.task_loss)


class AveragingProgram(FinetuneProgram):
    """The client's half: receives the shared parameters, trains from there, returns them."""

    algorithm: "Averaging"
    # True: the next message brings the shared parameters again, so they need not be saved here.
    transient = False

    @query
    @sends("open")
    def shape(self) -> str:
        """A hash that is equal for clients whose shared parameters have equal names and shapes.

        Where parts of an encoder with frozen weights are shared, a second hash is equal for those
        whose frozen weights are equal: adapters of different weights are not averaged.
        """
        shared = self.shared()
        if not any(name.startswith("encoder.") for name in shared):
            return shape_hash(shared)
        return f"{shape_hash(shared)} {hash_frozen(self.model)}".strip()

    @query
    @sends("first")
    def begin(self) -> Parameters:
        """The initial shared parameters."""
        return self.shared()

    @operation
    def receive(self, parameters: Parameters) -> None:
        """Load shared parameters, and keep them: no further message need bring them."""
        load_tensors(self.model, parameters)
        self.transient = False
        self.remember_first(parameters)

    @operation
    @sends(parameters="parameters", samples="open")
    @stacked("update_stack", *UPDATE_PARTS)
    def update(self, parameters: Parameters) -> Update:
        """Train the local epochs from these parameters (ClientUpdate of Algorithm 1)."""
        self.receive(parameters)
        self.transient = True
        self.round_start = parameters
        loss = self.train_round()
        return {"parameters": self.shared(), "samples": len(self.client.train), "loss": loss}

    @staticmethod
    def update_stack(stack: ClientStack, parameters: Parameters) -> dict[str, Any]:
        """`update` of several clients of one kind that are sent the same parameters."""
        programs: Any = stack.programs
        stack.load(parameters)
        for program in programs:
            program.transient = True
            program.round_start = parameters
        losses = stack.learn()
        names = list(programs[0].shared())
        # The next message brings shared parameters again: only what stays here is kept.
        forgotten = set(names) if programs[0].forgets_shared() else set()
        stack.keep((parameters.keys() | stack.trained.keys()) - forgotten)
        return {
            "parameters": stack.state(names),
            "samples": [len(program.client.train) for program in programs],
            "loss": losses,
        }

    def forgets_shared(self) -> bool:
        """Whether nobody looks at shared parameters between an update and the next message."""
        return (
            not self.algorithm.keeps_own_models()
            and type(self.algorithm).evaluate is Averaging.evaluate
            and list_operations(type(self)) == list_operations(AveragingProgram)
        )

    def restart(self, client: Client) -> Self:
        program = self.fresh_copy(client)
        if FIRST in self.memory:
            program.receive(self.memory[FIRST]["parameters"])
        return program

    def train_round(self) -> float:
        """The local training of a round; returns the mean loss, which is not told with `sample`."""
        if self.algorithm.sample is not None:
            train_privately(self, self.algorithm.sample, self.optimizer(fresh=True))
            return 0.0
        return self.learn(optimizer=self.optimizer(fresh=True))

    def blank_update(self, **body: Any) -> dict[str, Value]:
        """An update without content, sent by a client with privacy whose training failed."""
        return {"parameters": self.shared(), "samples": len(self.client.train)}

    @query
    @measurement
    def appraise(self, parameters: Parameters, common: bool) -> dict[str, float] | Embedding:
        """Evaluate these parameters without keeping them.

        Args:
            common: use the common test set instead of the client's own.
        Returns: metrics, or what the server needs to compute them; empty without test samples.
        """
        own = {name: tensor.clone() for name, tensor in self.shared().items()}
        load_tensors(self.model, parameters)
        try:
            return self.client.task.evaluation_reply(self, common)
        finally:
            load_tensors(self.model, own)

    @query
    def threshold_counts(
        self, parameters: Parameters
    ) -> Annotated[Tensor, Shape("labels", None, 3)]:
        """How often each label would be right at each threshold, on the training rows."""
        if self.algorithm.thresholds != "training":
            raise ValueError("counts are sent only if thresholds are chosen by them")
        own = {name: tensor.clone() for name, tensor in self.shared().items()}
        load_tensors(self.model, parameters)
        try:
            return self._count_hits()
        finally:
            load_tensors(self.model, own)

    def _count_hits(self) -> Tensor:
        counts = []
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for rows in batches(len(self.client.train), 256):
                x, y = self.training_batch(rows)
                outputs = self.model(self.client.to_device(x))
                counts.append(count_hits(outputs, self.client.to_device(y)).cpu())
        self.model.train(was_training)
        return torch.stack(counts).sum(0)

    def state(self) -> State | None:
        """What must be saved; shared parameters are left out while they are transient."""
        state = super().state()
        if state is None:
            return None
        if self.transient and not self.algorithm.keeps_own_models():
            state["model"] = {
                name: tensor
                for name, tensor in state["model"].items()
                if not self.algorithm.shares(name)
            }
        return state if any(state.values()) else None

    def shared(self) -> Parameters:
        """The parameters and buffers that are exchanged with the server."""
        return {
            name: tensor
            for name, tensor in state_of(self.model).items()
            if self.algorithm.shares(name)
        }

    def squared_drift(self) -> Tensor | float:
        """||w - w_t||^2: squared distance of the shared parameters from the round's start."""
        total: Tensor | float = 0
        for name, parameter in self.model.named_parameters():
            if name in self.round_start:
                start = self.round_start[name].to(parameter.device, parameter.dtype)
                total = total + ((parameter - start) ** 2).sum()
        return total


@dataclass
class Averaging(Algorithm):
    """Federated averaging, with hooks for methods that differ in one step.

    Hooks: `shares` (which parameters are exchanged), `client_weights` and `average` (how they are
    averaged), `build_messages` and `update_messages` (what is sent), `aggregate` (what
    becomes of the replies).

    Args:
        mean: weight of a client in the mean: its number of "samples", or the same for all
            ("uniform").
        thresholds: of multi-label tasks: a label is present above probability a "half", or above a
            threshold of its own, chosen on the "training" rows of all clients.
        finetune: own epochs of each client after the last merge; it ends with what comes of them.
        robust: how updates are merged, so that some false ones do little; see
            `unalike.methods.robust`.
        max_weight: largest weight of a client, as a multiple of the median weight; None: any, as in
            the papers.
        central: noise that the server adds to the sum of clipped updates, `{clip: 1.0, noise:
            2.0}`; None: no noise.
        sample: differential privacy of single samples in local training, `{clip: 1.0, noise: 1.0}`
            (sample_privacy.py); None: none.
    """

    personalised: ClassVar[bool] = False
    # Whether the server merges by `average`, where `robust` has an effect.
    merges: ClassVar[bool] = True
    # Whether head and features are told apart: then a task without a head cannot be served.
    needs_head: ClassVar[bool] = False
    Program: ClassVar[type[ClientProgram]] = AveragingProgram

    mean: Literal["samples", "uniform"] = field(default="samples", kw_only=True)
    thresholds: Literal["half", "training"] = field(default="half", kw_only=True)
    finetune: Annotated[int, Field(ge=0)] = field(default=0, kw_only=True)
    robust: Rule = field(default="never", kw_only=True)
    max_weight: Annotated[float, Field(ge=1)] | None = field(default=None, kw_only=True)
    central: CentralPrivacy | None = field(default=None, kw_only=True)
    sample: SamplePrivacy | None = field(default=None, kw_only=True)

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.paired and not (cls.needs_head and task.headless)

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = super().check(clients, public_rows)
        if self.robust != "never" and not self.merges:
            sentence = f"must be never: {type(self).__name__} averages no updates at the server."
            problems.append(("robust", sentence))
        if self.finetune and not self.can_finetune():
            sentence = f"must be 0: clients of {type(self).__name__} do not end with what is merged"
            problems.append(("finetune", f"{sentence}."))
        if self.thresholds != "half" and type(self).finish is not Averaging.finish:
            sentence = f"must be half: {type(self).__name__} does not end with one merged model."
            problems.append(("thresholds", sentence))
        if self.central is not None:
            problems += [("central", sentence) for sentence in self.central_problems()]
        if self.sample is not None:
            problems += [("sample", sentence) for sentence in self.sample_problems()]
        return problems

    def keeps_own_models(self) -> bool:
        return self.personalised or self.finetune > 0

    def holds_out(self) -> bool:
        return not self.supports_safeguard and type(self).alone is Averaging.alone

    def can_finetune(self) -> bool:
        """Whether clients end with what was merged last."""
        return type(self).finish is Averaging.finish

    def central_problems(self) -> list[str]:
        """Why noise on the mean would not cover all that leaves the server."""
        problems = []
        own = [name for name in CENTRAL_STEPS if getattr(type(self), name) is not _step(name)]
        if own:
            sentence = f"is for methods that only average; {type(self).__name__} has its own "
            problems.append(f"{sentence}{' and '.join(own)}. Leave it out, or use fedavg.")
        if self.robust != "never":
            problems.append(f"needs robust: never, got {self.robust}: clipping bounds an update.")
        if self.central.get("sampling") == "secret" and self.mean != "uniform":  # type: ignore[union-attr]
            problems.append("with sampling: secret needs mean: uniform, got samples.")
        if self.thresholds != "half":
            problems.append("needs thresholds: half, because counts of labels get no noise.")
        reason = accounting_problem()
        return problems + ([f"{reason}."] if reason else [])

    def sample_problems(self) -> list[str]:
        """Why training by DP-SGD would not cover all that leaves a client."""
        program = type(self).Program
        own = [
            name
            for name in SAMPLE_STEPS
            if getattr(program, name, None) is not getattr(AveragingProgram, name)
        ]
        own += sorted(set(list_operations(program)) - set(list_operations(AveragingProgram)))
        if type(self).record_round is not Averaging.record_round:
            own.append("record_round")
        problems = []
        if own:
            sentence = f"is for methods that only average; clients of {type(self).__name__} have "
            problems.append(f"{sentence}their own {' and '.join(own)}. Leave it out.")
        if self.thresholds != "half":
            problems.append("needs thresholds: half, because counts of labels get no noise.")
        reason = accounting_problem()
        return problems + ([f"{reason}."] if reason else [])

    def client_problem(self, client: Client) -> str | None:
        problem = client_sample_problem(client) if self.sample is not None else None
        return problem or super().client_problem(client)

    def safeguard_problem(self) -> str | None:
        if self.sample is not None:
            return "what it decides would tell of the samples that `sample` protects"
        return super().safeguard_problem()

    def privacy_problem(self) -> str | None:
        if self.central is not None:
            return "clients' noise and central noise are counted apart: leave out one of the two"
        if self.sample is not None:
            return "noise on updates and in training (sample) are counted apart: leave out one"
        if self.thresholds != "half":
            return "clients send counts of their labels, which nothing protects: thresholds: half"
        return super().privacy_problem()

    def central_results(self, fed: Federation) -> dict[str, Any] | None:
        return None if self.central is None else central_results(self.central, fed)

    def sample_results(self, fed: Federation) -> dict[str, dict[str, Any]]:
        return {} if self.sample is None else sample_results(self.sample, fed)

    def shares(self, name: str) -> bool:
        """Whether the parameter of that name is exchanged."""
        return True

    def requires_same_labels(self) -> bool:
        """Whether only clients with the same task and labels may be averaged.

        True where some shared parameters belong to single labels, as the rows of a head do.
        """
        return True

    def client_weights(self, replies: Mapping[str, Any]) -> dict[str, float]:
        """Weight of each client in the mean, by `mean`; need not sum to 1."""
        if self.mean == "uniform":
            return dict.fromkeys(replies, 1.0)
        return {client: float(reply["samples"]) for client, reply in replies.items()}

    def average(self, states: dict[str, Parameters], weights: dict[str, float]) -> Parameters:
        """Combine the parameters of several clients into one."""
        if self.robust == "never" or len(states) < 3:
            return mean_states(states, weights)
        uploads = [Upload(client, state) for client, state in states.items()]
        return merge_robustly(uploads[0].parameters, uploads, weights, self.robust)

    def build_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        """What each client is sent: the model of its group."""
        models, group = fed.state["models"], fed.state["group"]
        return {c: {"parameters": models[group[c]]} for c in clients}

    def update_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        """What each client is sent to train; a method may add arguments of its `update`."""
        return self.build_messages(fed, clients)

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """Replace a group's model by the average of what its members sent."""
        fed.state["models"][group] = self.average(states, weights)

    def serve(self, fed: Federation) -> Iterator[int]:
        """The server's loop of Algorithm 1."""
        for round in fed.rounds():
            self.register_clients(fed)
            messages, replies = self.update_clients(fed)
            self.drop_false_counts(fed, replies)
            if self.central is not None:
                self.merge_with_noise(fed, replies)
                self.record_round(fed, replies)
                yield round
                continue
            remember_merge(fed, drop_outliers(fed, messages, replies, fed.state["group"]))
            weights = cap_weights(self.client_weights(replies), self.max_weight)
            for group in sorted({fed.state["group"][c] for c in replies}):
                states = {
                    c: reply["parameters"]
                    for c, reply in replies.items()
                    if fed.state["group"][c] == group
                }
                self.aggregate(fed, group, states, weights)
            self.record_round(fed, replies)
            yield round

    def merge_with_noise(self, fed: Federation, replies: Replies) -> None:
        """Replace each group's model by a noisy mean (central_privacy.py).

        Outliers are not refused: whether they are would depend on other clients' data.
        """
        assert self.central is not None
        privacy = privacy_settings(self.central)
        group = fed.state["group"]
        asked = {c: {"samples": fed.infos[c].samples} for c in fed.sampled if c in group}
        weights = cap_weights(self.client_weights(asked), self.max_weight)
        for key in sorted({group[c] for c in asked}):
            states = {c: reply["parameters"] for c, reply in replies.items() if group[c] == key}
            shares = {c: weight for c, weight in weights.items() if group[c] == key}
            draw = privacy.draws(fed.seed, "central", key, fed.round)
            model = fed.state["models"][key]
            fed.state["models"][key] = noisy_mean(model, states, shares, privacy, draw)
        count_round(fed)

    def update_clients(self, fed: Federation) -> tuple[dict[str, dict[str, Value]], Replies]:
        """Have the active clients train. Returns what they were sent, and their replies.

        Where most of them diverge because of what was merged last, that is undone (robust.py).
        """
        messages = self.update_messages(fed, fed.active)
        self.count_training(fed, messages)
        if "suspects" not in fed.state:
            return messages, fed.call("update", per_client=messages)
        replies = fed.call("update", per_client=messages, quorum=0)
        if undo_merge(fed, replies):
            messages = self.update_messages(fed, fed.active)
            self.count_training(fed, messages)
            return messages, fed.call("update", per_client=messages)
        fed.check_quorum("update", len(replies), replies.failures, fed.config.quorum)
        return messages, replies

    def count_training(self, fed: Federation, clients: Iterable[str]) -> None:
        """With `sample`: count what is asked of clients."""
        if self.sample is not None:
            count_updates(fed, clients)

    def drop_false_counts(self, fed: Federation, replies: Replies) -> None:
        """Refuse replies whose number of samples, a weight, is not the one announced."""
        for client in list(replies):
            announced, samples = fed.infos[client].samples, replies[client]["samples"]
            if samples != announced:
                reason = f"it announced {announced} samples and now reports {samples}"
                fed.refuse(client, "update", reason)
                del replies[client]

    def record_round(self, fed: Federation, replies: Replies) -> None:
        """Record the replies of a round; by default logs the training loss."""
        if self.sample is not None:
            return
        fed.log_metrics("train_loss", {client: reply["loss"] for client, reply in replies.items()})

    def register_clients(self, fed: Federation) -> None:
        """Put new clients into groups, and fetch the initial model of a new group from its first.

        Before the first round all clients are asked; later, active ones that could not answer yet.
        """
        group = fed.state.setdefault("group", {})
        models = fed.state.setdefault("models", {})
        candidates = fed.active if group else fed.clients
        new = [c for c in candidates if c not in group]
        if not new:
            return
        for client, answer in fed.call("shape", clients=new, quorum=0 if group else None).items():
            key = self.group_key(fed, client, answer)
            if key not in models:
                initial = fed.call("begin", clients=[client], quorum=0)
                if client in initial and not self.add_group(fed, key, answer, initial[client]):
                    reason = "its initial weights have other names or shapes than it announced"
                    fed.refuse(client, "begin", reason)
                    continue
            if key in models:
                self.add_member(fed, key, client, answer)
        fed.report_sharing()

    def sharing(self, fed: Federation) -> Sharing | None:
        """Groups are known once clients were asked for their shapes."""
        if "group" not in fed.state:
            return None
        groups = connect_clients({c: [key] for c, key in fed.state["group"].items()})
        only_heads = self.shares("head.") and not self.shares("encoder.")
        return {"heads" if only_heads else "parameters": groups} if groups else {}

    def group_key(self, fed: Federation, client: str, answer: Any) -> str:
        """A string that is equal for clients that are averaged with each other.

        Args:
            answer: the client's reply to `shape`.
        """
        if not answer:
            return f"only {client}"
        info = fed.infos[client]
        if self.requires_same_labels() and info.has("labelled"):
            return f"{answer} {short_hash((info.task, info.labels))}"
        return answer

    def add_group(self, fed: Federation, key: str, answer: Any, initial: Any) -> bool:
        """Store the initial model of a new group; False if it is not as `answer` announced it."""
        if shape_hash(initial) != answer.split(" ")[0]:
            return False
        fed.state["models"][key] = initial
        return True

    def add_member(self, fed: Federation, key: str, client: str, answer: Any) -> None:
        """Put a client into a group."""
        fed.state["group"][client] = key

    def evaluate(self, fed: Federation) -> Replies:
        """Metrics of the shared model, on the common test set if all clients have one.

        Where clients end with models of their own, on each client's own test set.
        """
        if "finetuned" in fed.state:
            return super().evaluate(fed)
        members = self.members(fed)
        infos = [fed.infos[c] for c in members]
        if not self.keeps_own_models() and all(
            info.tested_on == "common" and info.has("labelled") for info in infos
        ):
            return self.evaluate_groups(fed, members)
        return score_federation(fed, self.ask_metrics(fed, members, common=False))

    def evaluate_groups(self, fed: Federation, members: list[str]) -> Replies:
        """Metrics on the common test set, where one member answers for all with the same model.

        A member that fails is replaced by the next one.
        """
        keys = {c: (fed.state["group"][c], fed.infos[c].task, fed.infos[c].labels) for c in members}
        metrics: dict[Any, Any] = {}
        failures: dict[str, Any] = {}
        while True:
            open_members = [c for c in members if keys[c] not in metrics and c not in failures]
            if not open_members:
                break
            speakers = {keys[c]: c for c in reversed(open_members)}  # the first of each group
            replies = self.ask_metrics(fed, list(speakers.values()), common=True)
            metrics |= {keys[c]: reply for c, reply in replies.items()}
            failures |= replies.failures
        return Replies({c: metrics[keys[c]] for c in members if keys[c] in metrics}, failures)

    def ask_metrics(self, fed: Federation, clients: list[str], common: bool) -> Replies:
        """Have clients evaluate the model of their group."""
        messages = self.build_messages(fed, clients)
        return fed.call("appraise", clients=clients, quorum=0, common=common, per_client=messages)

    def alone(self, fed: Federation) -> None:
        """Start local training from the same parameters as federated training."""
        self.register_clients(fed)
        self.send_final(fed, self.members(fed))

    def finish(self, fed: Federation) -> None:
        """Give every client the final model of its group, which it may fine-tune."""
        if self.thresholds == "training":
            self.choose_thresholds(fed)
        self.send_final(fed, self.members(fed))
        self.finetune_clients(fed)

    def send_final(self, fed: Federation, clients: list[str]) -> None:
        """Give these clients the model that they would be sent next, to keep it."""
        fed.call("receive", clients=clients, quorum=0, per_client=self.build_messages(fed, clients))

    def choose_thresholds(self, fed: Federation) -> None:
        """Lower the outputs of each multi-label group's model by the thresholds of its labels."""
        members = [c for c in self.members(fed) if fed.infos[c].has("multilabel")]
        messages = self.build_messages(fed, members)
        counts = fed.call("threshold_counts", clients=members, quorum=0, per_client=messages)
        for group in sorted({fed.state["group"][c] for c in counts}):
            own = [counts[c] for c in counts if fed.state["group"][c] == group]
            thresholds = best_thresholds(own)
            fed.state["models"][group] = shift_outputs(fed.state["models"][group], thresholds)

    def finetune_clients(self, fed: Federation) -> None:
        """Have all clients train their own epochs, if there are any."""
        if self.finetune:
            members = self.members(fed)
            fed.call("finetune", clients=members, quorum=0)
            fed.state["finetuned"] = True

    def members(self, fed: Federation) -> list[str]:
        """Clients that are in a group."""
        return [c for c in fed.clients if c in fed.state["group"]]


# With central privacy these are as in Averaging: whatever else a server made of replies would leave
# it without noise.
CENTRAL_STEPS = (
    "serve",
    "aggregate",
    "average",
    "client_weights",
    "build_messages",
    "update_messages",
    "update_clients",
    "record_round",
    "finish",
)

# With `sample`, clients do these as AveragingProgram does: all else would read samples unprotected.
SAMPLE_STEPS = ("update", "train_round", "shape", "begin", "training_batch")


def _step(name: str) -> Any:
    return getattr(Averaging, name)


def shape_hash(parameters: Parameters) -> str:
    """A hash of names and shapes; empty where there are no parameters."""
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in parameters.items())
    return short_hash(shapes) if shapes else ""


def short_hash(value: object) -> str:
    """16 hexadecimal digits of SHA-256 over `repr(value)`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def mean_states(states: dict[str, Parameters], weights: dict[str, float]) -> Parameters:
    """Weighted mean of parameters with equal names and shapes; integers (counters) are rounded.

    Args:
        states: parameters by client.
        weights: weight by client, at least of all in `states`; need not sum to 1.

    >>> states = {"a": {"w": torch.tensor([0.0, 4.0])}, "b": {"w": torch.tensor([4.0, 8.0])}}
    >>> mean_states(states, {"a": 3.0, "b": 1.0})["w"].tolist()
    [1.0, 5.0]
    """
    total_weight = sum(weights[c] for c in states)
    first = next(iter(states.values()))
    totals = []
    for tensor in first.values():
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        totals.append(torch.zeros_like(tensor, dtype=dtype))
    for client, state in states.items():
        own = [state[name].to(t.device, t.dtype) for name, t in zip(first, totals, strict=True)]
        if own:  # torch refuses an empty list
            torch._foreach_add_(totals, own, alpha=weights[client] / total_weight)
    return {name: cast_like(total, first[name]) for name, total in zip(first, totals, strict=True)}


def cast_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the dtype of another, rounded where that one holds integers."""
    return (tensor if like.is_floating_point() else tensor.round()).to(like.dtype)


def label_masks(fed: Federation, clients: Iterable[str]) -> dict[str, Tensor]:
    """Boolean masks (labels,) of the labels that clients have samples of.

    Asks `clients` that were not asked before; returns the masks of all that ever answered.
    """
    masks: dict[str, Tensor] = fed.state.setdefault("present", {})
    new = [c for c in clients if c not in masks]
    if new:
        replies = fed.call("present", clients=new, quorum=0)
        masks |= {c: mask.bool().cpu() for c, mask in replies.items()}
    return masks
