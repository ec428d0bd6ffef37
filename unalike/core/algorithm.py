"""A method: its hyperparameters, the server's program and, as `Program`, the client half."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Self

from unalike.core.client import Client
from unalike.core.evaluation import score_federation, scored_at_server
from unalike.core.privacy import protects
from unalike.core.program import ClientProgram
from unalike.core.safeguard import REQUIREMENT
from unalike.tasks.task import Task

if TYPE_CHECKING:
    from unalike.core.federation import Federation, Replies

Metrics = dict[str, dict[str, float]]  # by client and name
Sharing = dict[str, list[list[str]]]  # groups of two or more clients, by what they share


@dataclass
class Algorithm:
    """A method. Its fields are its own hyperparameters, with the paper's defaults.

    Class attributes say what a run has to know of a method:
        personalised: clients end with models of their own, measured on their own test sets.
        supports_safeguard: nothing that a client receives was computed from its own labels.
        evaluates: `serve` itself calls `fed.evaluate`.
        asynchronous: served by `fed.run_async`: clients have visits, not common rounds.
        requires_identical_models: whole models of all clients are averaged.
        needs_public: clients must hold a public set.
        RENAMED: old names of fields and their new ones, for the error message.
        Program: the client half.

    Args:
        fields: the method's own hyperparameters, by name.
    """

    personalised: ClassVar[bool] = True
    supports_safeguard: ClassVar[bool] = False
    evaluates: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False
    requires_identical_models: ClassVar[bool] = False
    needs_public: ClassVar[bool] = False
    RENAMED: ClassVar[dict[str, str]] = {}
    Program: ClassVar[type[ClientProgram]] = ClientProgram

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        for name in fields.keys() & cls.RENAMED.keys():
            raise TypeError(f'{cls.__name__}: "{name}" is called "{cls.RENAMED[name]}" now')
        return super().__new__(cls)

    def holds_out(self) -> bool:
        """Whether the safeguard holds a share of a client's rows out of everything.

        Where not, it cross-validates, if `supports_safeguard`.
        """
        return False

    def keeps_own_models(self) -> bool:
        """Whether clients end with models of their own, here: with these hyperparameters."""
        return self.personalised

    # the server's program

    def serve(self, fed: "Federation") -> Iterator[int]:
        """Run all rounds. Yields after each: there the run is saved and can be resumed."""
        raise NotImplementedError(f"{type(self).__name__} has no server program: write serve(fed)")
        yield

    def finish(self, fed: "Federation") -> None:
        """Do what is left after the last round, e.g. send every client the final model."""

    def alone(self, fed: "Federation") -> None:
        """Prepare clients for the local baseline, so that it has the same initial weights."""

    def evaluate(self, fed: "Federation") -> "Replies":
        """Metrics by client; by default of its own model on its own test set."""
        if scored_at_server(fed):
            features = fed.call("embed", clients=fed.clients, quorum=0)
            score_federation(fed, features, shared=False)
        return fed.call("evaluate", clients=fed.clients, quorum=0)

    def figures(self, fed: "Federation", metrics: Metrics) -> dict[str, Any]:
        """Figures of the whole federation, by default the mean of each metric over clients.

        Where the server scored all clients together (clustering), these are its scores.
        """
        if "scores" in fed.state:
            return dict(fed.state["scores"])
        values: dict[str, list[float]] = {}
        for client_metrics in metrics.values():
            for name, value in client_metrics.items():
                values.setdefault(name, []).append(value)
        return {name: fmean(values[name]) for name in sorted(values)}

    def server_results(self, fed: "Federation", metrics: Metrics) -> dict[str, Any] | None:
        """What the server's own model achieved, where there is one."""
        return None

    def central_results(self, fed: "Federation") -> dict[str, Any] | None:
        """Epsilon, delta and releases of noise that the server adds; None where it adds none."""
        return None

    def sample_results(self, fed: "Federation") -> dict[str, dict[str, Any]]:
        """By client, what differential privacy in its training cost: epsilon, delta, releases."""
        return {}

    def sharing(self, fed: "Federation") -> Sharing | None:
        """Which clients work with each other: groups by what their members share.

        A client in no group works alone. By default all share parameters where models must be
        identical, and the public set where there must be one.

        Returns: e.g. {"parameters": [["a", "b"], ["c", "d"]]}; {} where nobody shares anything;
            None where that is not known (yet), or nothing is meant to be shared.
        """
        what = []
        if self.requires_identical_models:
            what.append("parameters")
        if self.needs_public:
            what.append("public set")
        if not what:
            return None
        clients = list(fed.infos)
        return {key: [clients] for key in what} if len(clients) > 1 else {}

    # what fits this method

    @classmethod
    def for_engine(cls, fields: dict[str, Any], slow_messages: bool) -> dict[str, Any]:
        """Add defaults that suit the engine to the fields that a scenario gives this method.

        Args:
            fields: by name; what is given stays.
            slow_messages: whether a message takes seconds on the engine.
        """
        return fields

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        """Whether clients with this task can take part, judged by the task's traits.

        By default every task that is learnt from labels of single inputs, by a head.
        """
        return task.labelled and not task.paired and not task.headless

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        """What does not fit this federation: (field, sentence) for each problem."""
        return []

    def check_round(self, clients: int) -> list[tuple[str, str]]:
        """What does not fit rounds with so many clients: (field, sentence) for each problem."""
        return []

    def client_problem(self, client: Client) -> str | None:
        """Why this client cannot take part, judged by its data; None: it can."""
        return client.task.check_client(client)

    def safeguard_problem(self) -> str | None:
        """Why the safeguard cannot be used with this method; None: it can."""
        if self.supports_safeguard or self.holds_out():
            return None
        return f"{REQUIREMENT}; {type(self).__name__} is none of them"

    def privacy_problem(self) -> str | None:
        """Why the replies of its clients cannot be protected; None: they can."""
        for name in dir(self.Program):
            if protects(getattr(getattr(self.Program, name), "sends", {})):
                return None
        return (
            f"{type(self).__name__} does not say how anything its clients send could be "
            "protected (@sends): leave privacy out"
        )

    def axis_lengths(self) -> dict[str, int]:
        """Fields that an operation may name as the length of an axis (`Shape`): the integers."""
        return {name: value for name, value in vars(self).items() if type(value) is int}
