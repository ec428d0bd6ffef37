"""What an engine does with a client: runs the operations of its program, one request at a time.

Method authors write a `ClientProgram`; engines hold a `ClientRuntime` around it, which validates
requests, names the randomness, protects replies and repeats each change on the fold replicas.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from unalike.base.errors import Refusal
from unalike.base.lockstep import run_each
from unalike.base.message import Value, find_nonfinite
from unalike.base.module_tree import Kind, kind_of
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.core.client_stack import ClientStack, NotTogether, StackedReplies
from unalike.core.operations import find_stacked_form, list_operations, operation_scope
from unalike.core.privacy import Privacy
from unalike.core.program import ClientProgram, State
from unalike.core.protection import Protection
from unalike.core.safeguard import build_fold_replicas
from unalike.core.signatures import signature_of, validate_request
from unalike.core.stacking import Stacks
from unalike.data.samples import nonfinite_problem
from unalike.training.loop import Diverged, Training


class ClientRuntime:
    """Runs the remote operations of one client's program for an engine.

    Args:
        program: the client half of a method.
        privacy: how replies are protected before they leave; None: they leave as they are.
        fold_replicas: programs of the same client without one fold of its labels each, for the
            safeguard. Every operation that changes the program is repeated on them.
    """

    def __init__(
        self,
        program: ClientProgram,
        privacy: Privacy | None = None,
        fold_replicas: Sequence[ClientProgram] = (),
    ):
        self.program = program
        self.program.fold_replicas = list(fold_replicas)
        self.protection = Protection(program, privacy)
        # Whether the model may differ from the initial one.
        self.changed = False
        # With privacy: why the last operation failed. It stays with the client's owner.
        self.hidden_failure: BaseException | None = None

    @property
    def privacy(self) -> Privacy | None:
        return self.protection.privacy

    def find_operation(self, name: Any) -> Any:
        """The method of the program behind a remote operation.

        Raises:
            Refusal: the program has no such operation.
        """
        method = getattr(type(self.program), name, None) if isinstance(name, str) else None
        if getattr(method, "operation", None) is None:
            names = ", ".join(list_operations(type(self.program)))
            raise Refusal(f"this client has no operation {name!r}; it has: {names}")
        return method

    def changes_client(self, name: str) -> bool:
        """Whether an operation of this name exists and may change the program's state."""
        method = getattr(type(self.program), name, None)
        return getattr(method, "operation", None) == "changes"

    def perform(self, name: str, round: int, turn: int, body: dict[str, Value]) -> Value:
        """Run one operation and return the reply as it may leave the client.

        Args:
            name: of the operation.
            round: the federated round the request belongs to.
            turn: how often this operation was requested before in this round. Round and turn name
                the random stream of the operation.
            body: its arguments.

        Raises:
            Refusal: the request is not answered (before any data is read).
            Exception: whatever the operation raises; with privacy a reply without any update
                leaves instead, and the exception is in `hidden_failure`.
        """
        method = self.find_operation(name)
        if hasattr(method, "together"):
            return self.perform_together([self], name, [round], [turn], [body])[0]
        self._accept(method, round, body)
        try:
            reply = self._run(name, round, turn, body)
            if method.operation == "changes":
                self._repeat_on_replicas(name, round, turn, body)
            return self.protection.protect(name, turn, body, reply)
        except (Exception, SystemExit) as error:
            if not self.protection.covers(name):
                raise
            return self._hide_failure(name, turn, body, error)

    @staticmethod
    def perform_together(
        runtimes: Sequence["ClientRuntime"],
        name: str,
        rounds: Sequence[int],
        turns: Sequence[int],
        bodies: Sequence[dict[str, Value]],
    ) -> list[Value]:
        """Run an operation marked `@together` on several clients of one `batching_key` at once.

        All bodies must have the same keys. Returns one reply for each client, in their order.
        """
        method = runtimes[0].find_operation(name)
        for runtime, round, body in zip(runtimes, rounds, bodies, strict=True):
            runtime._accept(method, round, body)
        arguments = {key: [body[key] for body in bodies] for key in bodies[0]}
        try:
            replies = method([runtime.program for runtime in runtimes], **arguments)
            return [
                runtime.protection.protect(name, turn, body, reply)
                for runtime, turn, body, reply in zip(runtimes, turns, bodies, replies, strict=True)
            ]
        except (Exception, SystemExit) as error:
            # The host requests several again, one by one.
            if len(runtimes) > 1 or not runtimes[0].protection.covers(name):
                raise
            return [runtimes[0]._hide_failure(name, turns[0], bodies[0], error)]

    @staticmethod
    def perform_stack(
        runtimes: Sequence["ClientRuntime"],
        name: str,
        round: int,
        body: dict[str, Value],
        stacks: Stacks,
    ) -> StackedReplies:
        """Run an operation marked `@stacked` on several clients of one `batching_key` at once.

        Raises:
            NotTogether, or any other exception: it must be done one by one; nothing has changed.
        """
        first = runtimes[0]
        method = first.find_operation(name)
        form = find_stacked_form(type(first.program), name)
        if form is None:
            raise NotTogether("the method has its own form of it")
        checked = set()
        for runtime in runtimes:
            program = runtime.program
            if runtime.privacy or program.fold_replicas or program.client.held_out is not None:
                raise NotTogether("each client protects or repeats its own")
            sizes = tuple(program.axis_lengths.items())
            if sizes not in checked:
                checked.add(sizes)
                problem = signature_of(method).request(body, program.axis_lengths, name)
                if problem is not None:
                    raise NotTogether(problem)
            program.round = round
            runtime.changed = True
        if find_nonfinite(body) is not None:
            raise NotTogether("what was sent is not finite")
        columns = form(ClientStack([runtime.program for runtime in runtimes], stacks), **body)
        return StackedReplies(columns, len(runtimes))

    def _accept(self, method: Any, round: int, body: dict[str, Value]) -> None:
        """Decide whether to answer, before any data is read; then enter the round."""
        self.protection.check_answerable(method.__name__)
        validate_request(method, body, self.program.axis_lengths)
        self.protection.check_magnitudes(method, body)
        if method.operation == "changes":
            self.program.known_kind = None
        self.program.round = round
        self.changed = self.changed or method.operation == "changes"
        self.protection.check_initial_weights(method, self.changed)

    def _run(self, name: str, round: int, turn: int, body: dict[str, Value]) -> Value:
        """Run the operation; a loss that diverged because of the data is reported as that."""
        try:
            with operation_scope(self.program, name, round, turn) as run:
                return run(**body)
        except Diverged:
            # With privacy the search is left out: how long a reply takes can be observed.
            data = self.program.samples("train") if self.privacy is None else None
            problem = None if data is None else nonfinite_problem(data)
            if problem is not None:
                raise ValueError(problem) from None
            raise

    def _repeat_on_replicas(self, name: str, round: int, turn: int, body: dict[str, Value]) -> None:
        """Run the operation on every fold replica and drop the replies.

        If one fails all are given up: without every fold there is no cross-validation.
        """
        program = self.program

        def repeat(replica: ClientProgram) -> None:
            with operation_scope(replica, name, round, turn) as run:
                run(**body)
            program.work += replica.work
            replica.work = 0.0

        try:
            run_each([partial(repeat, replica) for replica in program.fold_replicas])
        except (ValueError, RuntimeError):
            program.fold_replicas = []

    def _hide_failure(
        self, name: str, turn: int, body: dict[str, Value], error: BaseException
    ) -> Value:
        """With privacy: keep the error here and return a reply without any update."""
        reply = self.protection.blank_reply(name, turn, body, error)
        self.hidden_failure = error
        return reply

    def take_hidden_failure(self) -> BaseException | None:
        """The failure that privacy kept from the server in the last operation; forgets it."""
        failure, self.hidden_failure = self.hidden_failure, None
        return failure

    def take_work(self) -> float:
        """Samples trained on since the last call (a forward pass counts a third); starts anew."""
        work, self.program.work = self.program.work, 0.0
        return work

    @cached_property
    def batching_key(self) -> Kind:
        """Equal for clients whose `@together` operations may run at once.

        They have the same class of program, device, inputs, and names and shapes of parameters.
        """
        program = self.program
        shapes = [(name, tuple(t.shape)) for name, t in program.model.state_dict().items()]
        return kind_of(
            (
                type(program),
                str(program.client.device),
                program.client.dtype,
                program.client.info().modalities,
                tuple(shapes),
            )
        )

    def state(self) -> State | None:
        """What must survive between calls, of the program and its replicas; None: nothing."""
        state = self.program.state()
        if state is None or not self.program.fold_replicas:
            return state
        return {**state, "fold_replicas": [r.state() for r in self.program.fold_replicas]}

    def restore(self, state: State) -> None:
        """Take up a state that `state` returned."""
        self.changed = True
        self.program.restore(state)
        saved = state.get("fold_replicas", [])
        replicas = self.program.fold_replicas[: len(saved)]
        for replica, replica_state in zip(replicas, saved, strict=False):
            replica.restore(replica_state)
        self.program.fold_replicas = replicas


def build_runtime(
    client: Client,
    algorithm: Algorithm,
    training: Training,
    seed: int,
    guarded: bool = False,
    privacy: Privacy | None = None,
    shares_features: bool = True,
) -> ClientRuntime:
    """The runtime of a client's program in a run, with its initial weights.

    Args:
        guarded: build the fold replicas that the safeguard cross-validates with.
        privacy: how replies are protected; None: not at all.
        shares_features: whether measurements may answer with features and labels.
    """
    program = algorithm.Program(client, algorithm, training, seed)
    program.shares_features = shares_features
    replicas = build_fold_replicas(program) if guarded and not algorithm.holds_out() else []
    return ClientRuntime(program, privacy, replicas)
