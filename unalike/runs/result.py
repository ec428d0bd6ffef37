"""What a run returns: `Result`, and how it is put together at the end of a run.

A `Result` is a dictionary that equals the run's results.json, so that it can be written, compared
and read as such; its attributes describe the fields and give them types.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from unalike.base.errors import UserError
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client, ClientInfo
from unalike.core.federation import Federation
from unalike.core.participation import Failure
from unalike.runs.plan import RunPlan
from unalike.tasks import find_task

if TYPE_CHECKING:
    from pandas import DataFrame

    from unalike.report.notebook import Figures

BACKWARD_COST = 3  # a training step costs about three forward passes


@dataclass(frozen=True)
class Bytes:
    """Traffic of a method in bytes, measurements left out.

    Attributes:
        up: from clients to the server.
        down: from the server to clients.
    """

    up: int
    down: int


@dataclass(frozen=True)
class ClientResult:
    """What one client got out of the run.

    Attributes:
        id: the client's name.
        model: name of its encoder.
        modalities: names of its inputs; `("x",)` where there is one without a name.
        task: name of its task.
        metric: name of the metric that `local`, `value` and `gain` are about.
        higher_is_better: whether that metric should rise.
        unit: of that metric, such as "%"; empty where it has none.
        labelled: whether the client trains on labels.
        samples: number of its training samples.
        test: "own" if measured on its own test set, "common" on the one all clients share.
        local: the metric after training alone; None where that was not done.
        value: the metric of its federated model; None where it could not be measured.
        gain: of `value` over `local`, in percent of `local`; positive is better.
        metrics: all metrics of its federated model.
        bytes: traffic of the method with this client.
        hash: of all parameters and buffers of its model; None if the client failed.
        parameters: number of parameters; None if the client failed.
        trainable: number of those that are trained.
        flops: floating-point operations of one forward pass on one sample.
        round_flops: of one round of local training, an estimate.
        safeguarded: with the safeguard, the metric of the model the client keeps.
        safeguarded_gain: of that over `local`, in percent.
        kept: with the safeguard, which model the client keeps, "alone" or "together".
        log_loss: with the safeguard, the cross-validated losses that decided.
        privacy: with privacy, epsilon, delta and number of releases.
    """

    id: str
    model: str
    modalities: tuple[str, ...]
    task: str
    metric: str
    higher_is_better: bool
    unit: str
    labelled: bool
    samples: int
    test: str
    local: float | None
    value: float | None
    gain: float | None
    metrics: dict[str, float]
    bytes: Bytes
    hash: str | None = None
    parameters: int | None = None
    trainable: int | None = None
    flops: int | None = None
    round_flops: int | None = None
    safeguarded: float | None = None
    safeguarded_gain: float | None = None
    kept: str | None = None
    log_loss: dict[str, float] | None = None
    privacy: dict[str, Any] | None = None

    @classmethod
    def from_entry(cls, id: str, entry: Mapping[str, Any]) -> "ClientResult":
        """Read a client's entry of results.json."""
        optional = (
            "hash", "parameters", "trainable", "flops", "round_flops",
            "safeguarded", "safeguarded_gain", "kept", "privacy",
        )  # fmt: skip
        return cls(
            id=id,
            model=entry["model"],
            modalities=tuple(entry["modalities"]),
            task=entry["task"],
            metric=entry["metric"],
            higher_is_better=entry.get("higher_is_better", True),
            unit=entry.get("unit", "%"),
            labelled=entry.get("labelled", True),
            samples=entry["samples"],
            test=entry["test"],
            local=entry["alone"],
            value=entry["value"],
            gain=entry["gain"],
            metrics=dict(entry["metrics"]),
            bytes=Bytes(**entry["bytes"]),
            log_loss=entry.get("judged"),
            **{name: entry.get(name) for name in optional},
        )


class Result(dict[str, Any]):
    """The results of a run.

    As a dictionary it equals results.json: `result["clients"]["a"]["gain"]`. As an object it has
    the same values under described, typed names: `result.clients["a"].gain`.
    """

    # Of a run from Python: what `models` needs to build the clients' models again.
    _clients: Sequence[Client] | None = None
    _algorithm: Algorithm | None = None

    @property
    def scenario(self) -> str:
        """Name of the scenario, or the `name` given to `unalike.run`."""
        return self["scenario"]

    @property
    def algorithm(self) -> str:
        """Name of the method."""
        return self["algorithm"]

    @property
    def seed(self) -> int:
        """The seed that all random numbers of the run derive from."""
        return self["seed"]

    @property
    def clients(self) -> dict[str, ClientResult]:
        """Results of each client, by id."""
        return {id: ClientResult.from_entry(id, entry) for id, entry in self["clients"].items()}

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the whole federation: by default the mean of each metric over clients."""
        return self["metrics"]

    @property
    def federation_metrics(self) -> list[str]:
        """Names of those figures in `metrics` that tables show."""
        return self.get("federation_metrics", [])

    @property
    def delta(self) -> float | None:
        """Mean gain over all clients that have one, in percent; None without a local baseline."""
        return self["delta"]

    @property
    def degraded(self) -> int | None:
        """Number of clients that are worse off than alone; None without a local baseline."""
        return self["losers"]

    @property
    def bytes(self) -> Bytes:
        """Traffic of the method, all clients together."""
        return Bytes(**self["bytes"])

    @property
    def clock(self) -> float:
        """Seconds on the engine's clock: simulated on the local engine, real on others."""
        return self["clock"]

    @property
    def seconds(self) -> float:
        """Seconds the run took, all attempts together."""
        return self["seconds"]

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return self["rounds"]

    @property
    def failed_rounds(self) -> list[int]:
        """Rounds that ended early because too few clients replied."""
        return self["lost"]

    @property
    def failures(self) -> list[Failure]:
        """What went wrong at clients, in the order it happened; of a bug with file and line.

        Tracebacks are in the run's events.jsonl.
        """
        return [_read_failure(entry) for entry in self["failures"]]

    @property
    def sharing(self) -> dict[str, list[list[str]]] | None:
        """Groups of clients that worked together, by what they shared: parameters, heads, labels,
        public predictions or the public set.

        Clients in no group worked alone; {} says that all did. None for a single client, and for
        methods that do not say.
        """
        return self.get("sharing")

    @property
    def lazy(self) -> dict[str, int] | None:
        """Of a run with lazy clients: number of `clients`, `participants` and `measured` ones.

        Only the measured ones are in `clients`; none was trained alone. None otherwise.
        """
        return self.get("lazy")

    @property
    def visits(self) -> dict[str, int] | None:
        """Of an asynchronous run: how often each client was called in; None otherwise."""
        return self.get("visits")

    @property
    def safeguard(self) -> dict[str, Any] | None:
        """`delta` and `losers` of the models that clients keep; None without the safeguard."""
        return self.get("safeguard")

    @property
    def privacy(self) -> dict[str, Any] | None:
        """Epsilon, delta and releases of the client that released most; None without privacy."""
        return self.get("privacy")

    @property
    def server(self) -> dict[str, Any] | None:
        """What the server's own model achieved; None where the method trains none."""
        return self.get("server")

    @property
    def commit(self) -> str:
        """Git commit of the code (with a + where it was changed), or the version."""
        return self["commit"]

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Versions of Python, torch and numpy, hash of the code, processor and threads.

        More than one where a run was resumed with others (`accept_changes`); the last is the end's.
        """
        return self["environments"]

    @property
    def folder(self) -> Path:
        """The run's folder, with config, events, ledger, checkpoints and report."""
        return Path(self["folder"])

    def models(
        self, clients: Iterable[Client] | None = None, trust: bool = False
    ) -> dict[str, nn.Module]:
        """Return the trained models by client, on the CPU and in eval mode.

        Args:
            clients: as for `unalike.trained`; not needed for a result that `unalike.run` returned
                in this program, nor for a scenario.
            trust: as for `unalike.trained`.
        Raises: UserError where the run was started from Python and the clients are not known.
        """
        from unalike.runs.export import trained

        known = self._clients if clients is None else clients
        return trained(self.folder, known, self._algorithm, trust)

    def show(self) -> None:
        """Print a table of the clients and the main figures."""
        from unalike.report import show

        show(self)

    def _repr_html_(self) -> str:
        """What Jupyter shows: the table of `show`."""
        from unalike.report.notebook import results_html

        return results_html(self)

    def figures(self, *titles: str) -> "Figures":
        """Return the figures of the run's report, or those with these titles; Jupyter shows them.

        Args:
            titles: such as "Local and federated" or "Over the rounds"; none: all figures.
        """
        from unalike.report.notebook import figures

        return figures(self.folder, *titles)

    def to_pandas(self) -> "DataFrame":
        """Return a pandas DataFrame with one row per client, indexed by its id.

        Raises: UserError where pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            message = "to_pandas needs the package pandas: pip install pandas"
            raise UserError(message) from None
        rows = []
        for client in self.clients.values():
            row = dict(vars(client))
            traffic = row.pop("bytes")
            rows.append({**row, "bytes_up": traffic.up, "bytes_down": traffic.down})
        return pandas.DataFrame(rows).set_index("id")

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, equal to results.json."""
        return dict(self)


@dataclass
class Decisions:
    """What clients decided at the end of a run with the safeguard.

    Attributes:
        kept: replies to the operation `safeguard`: which model, and the losses that decided.
        metrics: of the models that clients keep.
    """

    kept: Mapping[str, Any]
    metrics: Mapping[str, Any]


def build_results(
    plan: RunPlan,
    fed: Federation,
    *,
    metrics: Mapping[str, dict[str, float]],
    figures: dict[str, Any],
    local: Mapping[str, dict[str, float]] | None,
    models: Mapping[str, Any],
    decisions: Decisions | None,
    of_tasks: Mapping[str, Any],
) -> dict[str, Any]:
    """Put the results of a run together, as results.json has them.

    Args:
        plan: what was run.
        fed: the server's view at the end: traffic, failures, releases.
        metrics: of each client's federated model.
        figures: of the whole federation.
        local: metrics of the local baseline; None where there is none.
        models: replies to the operation `describe`: size, cost and hash of each model.
        decisions: of the safeguard; None without it.
        of_tasks: what tasks add, e.g. the metrics of each label.
    """
    clients = {}
    traffic = fed.ledger.totals_by_client()
    for id in fed.listed:
        info = fed.infos[id]
        baseline = (local or {}).get(id, {}).get(info.metric)
        entry = _client_entry(plan, info, metrics.get(id, {}), baseline, models.get(id))
        entry["bytes"] = traffic.get(id, {"up": 0, "down": 0})
        if "flops" in entry:
            steps = info.samples * plan.training.epochs
            entry["round_flops"] = BACKWARD_COST * entry["flops"] * steps
        if decisions is not None and id in decisions.kept:
            safeguarded = decisions.metrics.get(id, {}).get(info.metric)
            entry["safeguarded"] = safeguarded
            entry["safeguarded_gain"] = gain(safeguarded, baseline, info.higher_is_better)
            entry["kept"] = decisions.kept[id]["kept"]
            entry["judged"] = decisions.kept[id]["log_loss"]
        clients[id] = entry
    results = {
        "scenario": plan.name,
        "algorithm": plan.method,
        "seed": plan.seed,
        "clients": clients,
        "metrics": figures,
        "federation_metrics": federation_metrics(fed),
        **summarize_gains(clients, "gain"),
        "bytes": {way: fed.ledger.total(way) for way in ("up", "down")},
        "clock": fed.clock,
        "rounds": fed.finished,
        "lost": fed.failed_rounds,
        "failures": [_failure_entry(failure, fed) for failure in fed.failures],
        **of_tasks,
    }
    sharing = plan.algorithm.sharing(fed)
    if sharing is not None and len(fed.infos) > 1:
        results["sharing"] = sharing
    if fed.lazy:
        results["lazy"] = {
            "clients": len(fed.population),
            "participants": len(fed.infos),
            "measured": len(clients),
        }
    if fed.visits:
        results["visits"] = fed.visits
    if decisions is not None:
        results["safeguard"] = summarize_gains(clients, "safeguarded_gain")
    _add_privacy(results, plan, fed)
    server = plan.algorithm.server_results(fed, dict(metrics))
    if server is not None:
        results["server"] = server
    return results


def _add_privacy(results: dict[str, Any], plan: RunPlan, fed: Federation) -> None:
    """Add what the run cost in privacy: of each client, and at the top of the worst."""
    entries = results["clients"]
    if plan.privacy is not None:
        for id, entry in entries.items():
            entry["privacy"] = plan.privacy.spent(fed.released[id])
        results["privacy"] = plan.privacy.spent(max(fed.released.values()))
    central = plan.algorithm.central_results(fed)
    if central is not None:
        results["central_privacy"] = central
    costs = plan.algorithm.sample_results(fed)
    if costs:
        results["sample_privacy"] = max(costs.values(), key=lambda cost: cost["epsilon"])
        for id in entries:
            entries[id]["sample_privacy"] = costs[id]


def _client_entry(
    plan: RunPlan,
    info: ClientInfo,
    metrics: dict[str, float],
    baseline: float | None,
    model: Mapping[str, Any] | None,
) -> dict[str, Any]:
    value = metrics.get(info.metric)
    return {
        "model": info.model,
        "modalities": list(info.modalities),
        "task": info.task,
        "metric": info.metric,
        "higher_is_better": info.higher_is_better,
        "unit": info.unit,
        "labelled": info.has("labelled"),
        "samples": info.samples,
        "test": "own" if plan.algorithm.keeps_own_models() else info.tested_on,
        "alone": baseline,
        "value": value,
        "gain": gain(value, baseline, info.higher_is_better),
        "metrics": metrics,
        **(model if model is not None else {"hash": None}),
    }


def _failure_entry(failure: Failure, fed: Federation) -> dict[str, Any]:
    """A failure; one after which the client was asked again did not last."""
    entry = {
        "client": failure.client,
        "round": failure.round,
        "operation": failure.operation,
        "reason": failure.reason,
        "lasting": failure.lasting and fed.quarantined.get(failure.client) == failure,
    }
    if failure.location:  # of a bug: file, line and function
        entry["location"] = failure.location
    return entry


def _read_failure(entry: Mapping[str, Any]) -> Failure:
    location = entry.get("location")
    return Failure(
        client=entry["client"],
        operation=entry["operation"],
        round=entry["round"],
        reason=f"{entry['reason']} ({location})" if location else entry["reason"],
        lasting=entry["lasting"],
    )


def gain(
    value: float | None, baseline: float | None, higher_is_better: bool = True
) -> float | None:
    """Return the improvement over the local baseline in percent of it, positive if better.

    None if a value is missing, or the baseline is 0 or so near to it that the gain is infinite.

    >>> gain(60.0, 50.0), gain(4.0, 5.0, higher_is_better=False)
    (20.0, 20.0)
    """
    if value is None or not baseline:
        return None
    improvement = value - baseline if higher_is_better else baseline - value
    percent = 100 * improvement / abs(baseline)
    return percent if math.isfinite(percent) else None


def federation_metrics(fed: Federation) -> list[str]:
    """Return the federation's metrics that a report shows: none if clients have unlike tasks."""
    tasks = {info.task for info in fed.infos.values()}
    return list(find_task(tasks.pop()).federation_metrics) if len(tasks) == 1 else []


def summarize_gains(clients: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the mean of a gain (`delta`) and how many are negative (`losers`)."""
    gains = [entry[name] for entry in clients.values() if entry.get(name) is not None]
    if not gains:
        return {"delta": None, "losers": None}
    return {"delta": sum(gains) / len(gains), "losers": sum(gain < 0 for gain in gains)}
