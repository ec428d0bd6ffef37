"""The client's own law: what its owner allows is checked here, whatever a server asks for."""

import ctypes
import json
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from unalike.base.errors import Refusal
from unalike.base.message import Value
from unalike.core.client import Client
from unalike.core.operations import list_measurements, measures_data
from unalike.core.privacy import Privacy, releases
from unalike.core.runtime import ClientRuntime
from unalike.cross_silo.site_records import PrivacyAccount
from unalike.engines.host import Host
from unalike.scenarios.site_policy import ClientPrivacy, SitePolicy, SiteRules

USAGE = "usage.json"  # seconds of each round, in a run's folder


class RoundTimeout(RuntimeError):
    """The operations of a round took longer than the client's policy allows."""


class SiteLaw:
    """Decides which runs a client takes part in, and what it answers.

    Args:
        rules: of its client.yaml.
        folder: where the client's own records are.
        submitter: who runs the job, by certificate; None where the engine does not say.
    """

    def __init__(self, rules: SiteRules, folder: Path, submitter: str | None = None):
        self.rules = rules
        self.folder = folder
        self.submitter = submitter

    @property
    def policy(self) -> SitePolicy:
        return self.rules.policy

    def account(self, privacy: Privacy | None) -> PrivacyAccount:
        """The client's privacy account, with the limit that its privacy demands."""
        limit = privacy.epsilon if isinstance(privacy, ClientPrivacy) else None
        delta = privacy.delta if privacy is not None else Privacy(noise=0.0).delta
        return PrivacyAccount(self.folder, limit, delta)

    def check_run(self, terms: Mapping[str, Any], plan: dict[str, Any], client: Client) -> None:
        """Raise Refusal for a run that the client's owner does not allow.

        Args:
            terms: as the server sent them.
            plan: `plan_from_dict(terms)`.
        """
        policy = self.policy
        method = terms["algorithm"]["name"]
        if policy.methods is not None and method not in policy.methods:
            raise Refusal(
                f"its policy allows the methods {', '.join(policy.methods)}, and this is {method}"
            )
        training = plan["training"]
        for name, most in (("rounds", policy.rounds), ("epochs", policy.epochs)):
            value = getattr(training, name)
            if value > most:
                raise Refusal(f"its policy allows at most {most} {name}, and training has {value}")
        self._check_accepted(terms)
        if client.privacy is not None:
            shortfall = client.privacy.shortfall(plan["privacy"])
            if shortfall:
                raise Refusal(shortfall)
        self._check_budget(client, plan["privacy"], 1)

    def _check_accepted(self, terms: Mapping[str, Any]) -> None:
        accepted = self.rules.accept
        if accepted is None:
            return
        reasons = []
        for run in accepted:
            reason = run.mismatch(terms, self.submitter)
            if reason is None:
                return
            reasons.append(reason)
        text = "; ".join(dict.fromkeys(reasons)) or "it accepts none"
        raise Refusal(f"its owner has not accepted this run: {text}")

    def _check_budget(self, client: Client, privacy: Privacy | None, count: int) -> None:
        account = self.account(client.privacy)
        noise = privacy.noise if privacy is not None else 0.0
        if not account.allows(noise, count):
            raise Refusal(
                f"its privacy budget, epsilon {account.limit:g} over all runs, would be exceeded"
            )

    def check_request(self, runtime: ClientRuntime, operation: str, round: int) -> None:
        """Raise Refusal for an operation that the client's owner does not allow."""
        policy = self.policy
        program = type(runtime.program)
        if policy.operations is not None and operation not in policy.operations:
            raise Refusal(f"its policy does not allow the operation {operation}")
        if not 0 <= round <= policy.rounds:
            raise Refusal(f"its policy allows {policy.rounds} rounds, and this is round {round}")
        if policy.measuring == "none" and measures_data(program, operation):
            raise Refusal(f"its policy is measuring: none, and {operation} measures")

    def check_reply(self, runtime: ClientRuntime, operation: str, reply: Value) -> None:
        """Raise Refusal where a measurement would send more than numbers."""
        if operation in list_measurements(type(runtime.program)) and contains_tensor(reply):
            raise Refusal(
                f"{operation} would send features or labels of its data, which no measurement may; "
                "it scores itself at home"
            )

    def count_releases(
        self, runtime: ClientRuntime, client: Client, operation: str, reply: Value, **facts: Any
    ) -> None:
        """Count what a reply releases, on disk. Raises Refusal where the budget is used up."""
        privacy = runtime.privacy
        if privacy is None:
            return
        sends = getattr(getattr(type(runtime.program), operation), "sends", {})
        count = releases(reply, sends)
        if not count:
            return
        account = self.account(client.privacy)
        if not account.spend(privacy.noise, count, operation=operation, **facts):
            raise Refusal(
                f"its privacy budget, epsilon {account.limit:g} over all runs, would be exceeded"
            )


def contains_tensor(value: Any) -> bool:
    """Whether a value is a tensor or has one inside."""
    if isinstance(value, dict):
        return any(map(contains_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(contains_tensor, value))
    return isinstance(value, Tensor)


class SiteHost(Host):
    """A host that keeps to the law of the client's owner.

    Args:
        law: of the owner.
        run: id of the run, for the records.
        folder: of the run.
        arguments: those of `Host`.
    """

    def __init__(self, *arguments: Any, law: SiteLaw, run: str, folder: Path, **options: Any):
        super().__init__(*arguments, **options)
        self.law = law
        self.run = run
        self.usage = folder / USAGE

    def _run(self, client: str, message: dict[str, Any]) -> dict[str, Any]:
        runtime = self.wake(client)
        operation, round = message["operation"], message["round"]
        runtime.find_operation(operation)
        self.law.check_request(runtime, operation, round)
        with self._within_limits(round):
            answer = super()._run(client, message)
        self.law.check_reply(runtime, operation, answer["body"])
        self.law.count_releases(
            runtime, self.clients[client], operation, answer["body"], run=self.run, round=round
        )
        return answer

    @contextmanager
    def _within_limits(self, round: int) -> Iterator[None]:
        policy = self.law.policy
        if policy.round_seconds is None:
            with memory_limit(policy.memory_bytes):
                yield
            return
        usage = json.loads(self.usage.read_text()) if self.usage.exists() else {}
        used = usage.get(str(round), 0.0)
        if used >= policy.round_seconds:
            raise Refusal(f"its policy allows {policy.round_seconds:g} s a round, which are over")
        start = time.monotonic()
        try:
            with memory_limit(policy.memory_bytes), time_limit(policy.round_seconds - used):
                yield
        finally:
            usage[str(round)] = used + time.monotonic() - start
            self.usage.write_text(json.dumps(usage))


@contextmanager
def memory_limit(more: int | None) -> Iterator[None]:
    """Let this process allocate so many more bytes, no more; None: no limit. Linux only.

    An allocation beyond that fails with MemoryError, or what torch raises instead.
    """
    allocated = _allocated_bytes()
    if more is None or allocated is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([allocated + more, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _allocated_bytes() -> int | None:
    """What RLIMIT_DATA counts of this process; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise RoundTimeout in this thread after so many seconds, between two steps of Python."""
    thread = threading.get_ident()
    lock = threading.Lock()
    state = {"running": True, "raised": False}

    def interrupt() -> None:
        with lock:
            if state["running"]:
                state["raised"] = True
                error = ctypes.py_object(RoundTimeout)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RoundTimeout:
        state["raised"] = False
        raise RoundTimeout("the operation took longer than policy.round_seconds allows") from None
    finally:
        timer.cancel()
        with lock:
            state["running"] = False
            if state["raised"]:  # on its way: it must not arrive later, somewhere else
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
